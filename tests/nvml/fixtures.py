"""Fixtures for tests that run the real pynvml against the stub; a conftest.py imports them."""

import pytest

from tests.nvml.stub import FakeNvml, build_stub


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory):
    """The folder with the stub, built once per session."""
    return build_stub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake_nvml(nvml_library, tmp_path, monkeypatch):
    """A machine with 8 idle H100s, for every process that the test starts."""
    fake = FakeNvml(nvml_library, tmp_path / "nvml-state.txt")
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    return fake
