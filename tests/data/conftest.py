"""What tests of data and checkpoints share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import forkserver_with_torch


@pytest.fixture(scope="session")
def forkserver() -> Iterator[None]:
    """The process that ranks are forked from; asked for by every test that runs ranks."""
    with forkserver_with_torch():
        yield
