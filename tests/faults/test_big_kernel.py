"""A kernel with 10 GB of variables: neither a launch nor its refusal touches, copies or inherits them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.conftest import TaggedKernel, new_kernel
from tests.support.screen import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_GB = 10**9
_NEEDED_BYTES = 13 * _GB
_GROWTH_BYTES = 100 << 20
_RANK_BYTES = 1 << 30  # torch included; a rank that had the kernel's memory would have ten times that
_LARGE = f"""
import numpy
large = numpy.ones({9 * _GB}, dtype="uint8")
text = bytearray(b"x") * {_GB}
held = {{"deep": [large]}}
small = 7
def mean():
    return large.mean()
"""
_MEMORY = """
import psutil
own = psutil.Process().memory_full_info()
print("small is", small)
own.rss, own.pss
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaggedKernel]:
    """A kernel with a warm launcher and every page of its variables in memory."""
    available = psutil.virtual_memory().available
    if available < _NEEDED_BYTES:
        pytest.skip(f"{available / _GB:.1f} GB of memory are free here, the test needs {_NEEDED_BYTES / _GB:.0f} GB")
    for kernel in new_kernel(tmp_path_factory.mktemp("kernel")):
        kernel.ok("%%distributed --nproc 2 --device cpu --quiet\npass")
        kernel.ok(_LARGE, timeout_s=240)
        assert psutil.Process(kernel.kernel.pid).memory_info().rss > 10 * _GB
        yield kernel


def _reset_peak(kernel: TaggedKernel) -> int:
    """Forget the kernel's peak so far, where it can be forgotten (proc(5), clear_refs); what is resident now."""
    Path(f"/proc/{kernel.kernel.pid}/clear_refs").write_text("5")
    return psutil.Process(kernel.kernel.pid).memory_info().rss


def _peak_bytes(kernel: TaggedKernel) -> int:
    """The most that has been resident since: a copy that was made and dropped is in it."""
    lines = Path(f"/proc/{kernel.kernel.pid}/status").read_text().splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(value) << 10


@pytest.mark.parametrize("options", ["--nproc 4", "--nproc 2 --cold"])
def test_a_cell_that_reads_a_small_name_leaves_the_large_ones_in_the_kernel(big: TaggedKernel, options: str):
    before = _reset_peak(big)
    cell = big.ok(on_ranks(_MEMORY, f"{options} --device cpu --out sizes"), timeout_s=60)
    assert "small is 7" in cell.text
    assert _peak_bytes(big) - before < _GROWTH_BYTES
    assert int(big.value("len(sizes)")) == int(options.split()[1])
    assert int(big.value("max(rss for rss, _ in sizes)")) < _RANK_BYTES
    assert int(big.value("sum(pss for _, pss in sizes)")) < _RANK_BYTES
    others = [process for process in big.processes() if process.pid != big.kernel.pid]
    assert len(others) >= 2  # launcher and forkserver
    assert max(process.memory_info().rss for process in others) < _RANK_BYTES


@pytest.mark.parametrize(
    "code, name, kind, size",
    [
        pytest.param("print(small, large[0])", "large", "ndarray", "8.4 GiB", id="an array"),
        pytest.param("print(small, text[0])", "text", "bytearray", "954 MiB", id="a bytearray"),
        pytest.param("print(small, len(held))", "held", "dict", "8.4 GiB", id="what holds it"),
        pytest.param("print(small, mean())", "mean", "function", "8.4 GiB", id="a function that reads it"),
    ],
)
def test_a_cell_that_reads_a_large_name_is_refused_at_once_and_without_a_copy(
    big: TaggedKernel, code: str, name: str, kind: str, size: str
):
    before = _reset_peak(big)
    cell = big.run(on_ranks(code, "--nproc 2 --device cpu"), timeout_s=60)
    assert _peak_bytes(big) - before < _GROWTH_BYTES
    assert cell.error is not None
    assert cell.error["ename"] == "CaptureError"
    assert f"`{name}` ({kind}) can't be sent to the ranks: it is {size} large" in cell.traceback
    assert "256 MiB" in cell.traceback
    assert "`small`" not in cell.traceback
    assert cell.idle_at - cell.sent_at < 3  # copying it takes longer; counting it, milliseconds
    assert big.below_forkserver() == []
    assert "[0-1] 7" in big.ok(on_ranks("print(small)", "--nproc 2 --device cpu")).text
