"""What looks like a credential never reaches a log, and ordinary code stays as it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_nb.capture.credentials import looks_like_credential, mask_credentials

_HF = "hf_" + "a1" * 15
_JWT = "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl"
_KEY = "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    "name, value",
    [
        ("hf_token", "x"),
        ("API_KEY", "x"),
        ("apiKey", "x"),
        ("aws_secret_access_key", "x"),
        ("password", b"x"),
        ("db_passwd", "x"),
        ("token2", "x"),
        ("x", _HF),
        ("x", "AKIA" + "A" * 16),
        ("x", "ghp_" + "a" * 36),
        ("x", "sk-" + "a" * 40),
        ("x", _JWT),
        ("x", _KEY),
        ("x", "postgres://me:secret@host/db"),
    ],
)
def test_looks_like_a_credential(name, value):
    assert looks_like_credential(name, value)


@pytest.mark.parametrize(
    "name, value",
    [
        ("tokenizer", "bert-base"),
        ("pad_token", "<pad>"),
        ("max_tokens", "5"),
        ("tokens", ["a"]),
        ("token", 5),
        ("password", ""),
        ("url", "https://host:80/path"),
        ("x", "skip-this"),
        ("secretary", "x"),
    ],
)
def test_looks_harmless(name, value):
    assert not looks_like_credential(name, value)


@pytest.mark.parametrize(
    "source, masked",
    [
        ('API_KEY = "abc"', 'API_KEY = "***"'),
        ("token: str = 'it\\'s'  # mine", "token: str = '***'  # mine"),
        ('os.environ["HF_TOKEN"] = "abc"', 'os.environ["HF_TOKEN"] = "***"'),
        ('os.environ.setdefault("DB_PASSWORD", "abc")', 'os.environ.setdefault("DB_PASSWORD", "***")'),
        ('login(user="me", token="abc")', 'login(user="me", token="***")'),
        ("{'password': 'abc', 'user': 'me'}", "{'password': '***', 'user': 'me'}"),
        ('secret = f"a{b}"', 'secret = f"***"'),
        ('password = """a\nb"""', 'password = """***"""'),
        (f'login("{_HF}")', 'login("***")'),
        (f"key = '''{_KEY}'''", "key = '''***'''"),
        ('"postgres://me:abc@host/db"', '"postgres://me:***@host/db"'),
        ("%env WANDB_API_KEY=abc", "%env WANDB_API_KEY=***"),
        ("%env WANDB_API_KEY abc", "%env WANDB_API_KEY ***"),
        ("!export AWS_SECRET_ACCESS_KEY=abc && ls", "!export AWS_SECRET_ACCESS_KEY=*** && ls"),
        ("%env LR=3", "%env LR=3"),
        (
            'tokenizer = AutoTokenizer("bert"); pad_token = "<pad>"',
            'tokenizer = AutoTokenizer("bert"); pad_token = "<pad>"',
        ),
        ('token = os.environ["HF_TOKEN"]', 'token = os.environ["HF_TOKEN"]'),
        ("x = 'unfinished", "x = 'unfinished"),
    ],
)
def test_masks_in_source(source, masked):
    assert mask_credentials(source) == masked


@given(st.text(alphabet="abc'\"=\n token_:[](){}#", max_size=60))
def test_any_text_can_be_masked_and_masking_again_changes_nothing(text):
    once = mask_credentials(text)
    assert mask_credentials(once) == once


@given(st.text(alphabet="xyz019-_.", min_size=1, max_size=30))
def test_the_value_of_a_password_is_gone(value):
    assert mask_credentials(f'a = 1\npassword = "{value}"\nb = 2') == 'a = 1\npassword = "***"\nb = 2'
