"""What looks like a credential: names and values that must not be logged, and cell text without them. Pure.

A guess on the safe side: a masked text that was harmless costs a line of a log, a token in a log costs more.
"""

from __future__ import annotations

import re

__all__ = ["looks_like_credential", "mask_credentials"]

_MASK = "***"

# Shapes that services give to their keys.
_SHAPES = re.compile(
    r"""
    -----BEGIN[ A-Z]*PRIVATE\ KEY-----.*?(?:-----END[ A-Z]*PRIVATE\ KEY-----|\Z)
    | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b                                # AWS
    | \bgh[oprsu]_[0-9A-Za-z]{20,} | \bgithub_pat_\w{20,}          # GitHub
    | \bglpat-[\w-]{20,}                                           # GitLab
    | \bhf_[0-9A-Za-z]{20,}                                        # Hugging Face
    | \bsk-[\w-]{20,} | \bsk_(?:live|test)_\w{16,}                 # OpenAI, Anthropic, Stripe
    | \bxox[abeoprs]-[\w-]{10,}                                    # Slack
    | \bAIza[\w-]{35}                                              # Google
    | \bdapi[0-9a-f]{32}                                           # Databricks
    | \bpypi-[\w-]{16,} | \bnpm_\w{30,}
    | \beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?                       # JSON web token
    """,
    re.VERBOSE | re.DOTALL,
)
# user:password@ in a URL; the user stays.
_URL_PASSWORD = re.compile(r"(?<=://)([^\s:/@'\"]*):[^\s/@'\"]+(?=@)")

_SENSITIVE = r"(?:token|secret|passw(?:or)?d|passphrase|pwd|api_?key|access_?key|private_?key|auth_?key|credentials?)"
# `pad_token`, `eos_token` and the like are words of language models.
_HARMLESS = re.compile(
    r"(?:^|_)(?:pad|bos|eos|unk|sep|cls|mask|num|max|min|special|stop|image|next|prev)_tokens?(?:_|$)"
)
_NAME = re.compile(rf"(?:^|_|-){_SENSITIVE}(?:$|_|-|\d)", re.IGNORECASE)

# `name = "text"`, `"name": "text"`, `f(name="text")`, `d["name"] = "text"`, `setdefault("name", "text")`.
_ASSIGNED = re.compile(
    r"""
    (?P<before>(?P<name>[\w-]+)["']?\]?\s*(?::\s*[\w.\[\]| ]+?\s*=|[:=,])\s*\(?\s*[rRbBuUfF]{0,2})
    (?P<quote>\"\"\"|'''|"|')(?P<text>(?:\\.|(?!(?P=quote)).)*)(?P=quote)
    """,
    re.VERBOSE | re.DOTALL,
)
# `%env NAME=text`, `export NAME=text`, without quotes.
_SHELL = re.compile(r"(?P<before>(?:%env|%set_env|\bexport|\bset)\s+(?P<name>\w+)(?:\s*=\s*|\s+))(?P<text>[^\s'\"]+)")


def looks_like_credential(name: str, value: object) -> bool:
    """Whether a variable seems to hold a key, a token or a password.

    Args:
        name: Of the variable.
        value: Only text and bytes are judged.
    """
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if not isinstance(value, str) or not value:
        return False
    return _is_sensitive(name) or bool(_SHAPES.search(value) or _URL_PASSWORD.search(value))


def mask_credentials(source: str) -> str:
    """The source with ``***`` in place of what looks like a credential.

    Args:
        source: A cell, with IPython's syntax; it need not compile.
    """
    masked = _SHAPES.sub(_MASK, source)
    masked = _URL_PASSWORD.sub(rf"\1:{_MASK}", masked)
    return _SHELL.sub(_mask_named, _ASSIGNED.sub(_mask_named, masked))


def _mask_named(match: re.Match[str]) -> str:
    groups = match.groupdict()
    if not groups["text"] or not _is_sensitive(groups["name"]):
        return match[0]
    quote = groups.get("quote", "")
    return f"{groups['before']}{quote}{_MASK}{quote}"


def _is_sensitive(name: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)  # apiKey
    return _NAME.search(words) is not None and _HARMLESS.search(words.lower()) is None
