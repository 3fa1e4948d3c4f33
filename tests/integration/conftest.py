"""Kernels for tests that drive air_nb as a notebook does. Ranks are on the CPU, whatever the machine has."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernel import Kernel, running_kernel


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory, test_environment) -> Iterator[Kernel]:
    """One kernel for the tests of a module, with the extension loaded and the launcher warm."""
    with running_kernel(tmp_path_factory.mktemp("notebook"), env={"AIR_NB_DEVICE": "cpu"}) as running:
        running.ok("%%distributed --nproc 1\npass", timeout_s=120)
        yield running


@pytest.fixture
def on_ranks(kernel: Kernel) -> Callable[..., Any]:
    """Run a cell on ranks and return the list of its values, which must be literals."""

    def run(code: str, options: str = "--nproc 1", timeout_s: float = 60.0) -> Any:
        kernel.ok(f"%%distributed --quiet --out results_ {options}\n{code}", timeout_s)
        return ast.literal_eval(kernel.value("results_"))

    return run


@pytest.fixture
def nothing_started(kernel: Kernel, test_environment: Path) -> Iterator[None]:
    """Fail a test that leaves a run directory or starts a process in the kernel."""

    def traces() -> tuple[set[str], set[int]]:
        return {path.name for path in (test_environment / "runs").iterdir()}, {p.pid for p in kernel.descendants()}

    runs_before, processes_before = traces()
    yield
    runs, processes = traces()
    assert runs <= runs_before
    assert processes <= processes_before
