import os
import resource
import threading

import psutil
import pytest
import torch
from torch import nn

from air_nb.checkpoint import host_copy
from air_nb.checkpoint.host_copy import HostCopy

SIZE = 32 * 2**20


@pytest.fixture
def host():
    copy = HostCopy()
    yield copy
    copy.close()


@pytest.fixture(params=[1, 3], ids=lambda n: f"{n} threads")
def threads(request, monkeypatch):
    monkeypatch.setattr(host_copy, "_n_threads", lambda: request.param)
    return request.param


def live_tensors():
    torch.manual_seed(1)
    images = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    return {
        "weight": nn.Parameter(torch.randn(2000, 1500)),  # more than two threads' work
        "odd": torch.randn(1_111_111),
        "half": torch.randn(33, 5).to(torch.bfloat16),
        "flags": torch.rand(17) > 0.5,
        "step": torch.tensor(12.0),
        "empty": torch.empty(0, 3),
        "images": images,
        "transposed": torch.randn(6, 4).T,
        "sliced": torch.randn(10, 10)[::2, 1:5],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
        "negative": torch.randn(5, dtype=torch.complex64).conj().imag,
        "subclass": torch.randn(4).as_subclass(Named),
    }


class Named(torch.Tensor):
    pass


def filled(value, n_bytes=SIZE):
    return {"one": torch.full((n_bytes // 8,), float(value)), "two": torch.full((n_bytes // 8,), float(-value))}


def join_preparation():
    for thread in threading.enumerate():
        if thread.name == "air_nb-host-memory":
            thread.join(60)


def rss():
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("prepared", [False, True])
def test_copies_are_equal_and_do_not_follow_the_live_tensors(host, threads, prepared):
    live = live_tensors()
    if prepared:
        host.prepare(live)
        join_preparation()
    expected = {name: one.detach().clone() for name, one in live.items()}
    copies = host.copy(live)
    with torch.no_grad():
        for name, one in live.items():
            if name != "expanded":
                one.zero_()
    assert list(copies) == list(live)
    for name, copy in copies.items():
        assert type(copy) is torch.Tensor
        assert (copy.dtype, copy.shape, copy.device.type) == (expected[name].dtype, expected[name].shape, "cpu")
        assert not copy.requires_grad
        assert torch.equal(copy, torch.Tensor(expected[name]) if name == "subclass" else expected[name]), name


def test_the_memory_is_used_again(host):
    first = {name: one.data_ptr() for name, one in host.copy(filled(1)).items()}
    again = host.copy(filled(2))
    assert {name: one.data_ptr() for name, one in again.items()} == first
    assert again["one"][-1] == 2


@pytest.mark.parametrize(
    "other",
    [torch.ones(7), torch.ones(4, 5), torch.ones(5, 4, dtype=torch.float64), torch.ones(5, 4, dtype=torch.int32)],
    ids=["shorter", "transposed", "longer type", "type of the same size"],
)
def test_a_tensor_of_another_shape_or_type_gets_memory_of_its_own(host, other):
    live = filled(3) | {"other": torch.zeros(5, 4)}
    before = {name: one.data_ptr() for name, one in host.copy(live).items()}
    copies = host.copy(live | {"other": other})
    assert torch.equal(copies["other"], other)
    assert copies["other"].dtype == other.dtype
    assert copies["one"].data_ptr() == before["one"]
    assert torch.equal(copies["two"], live["two"])


def test_tensors_come_and_go(host):
    host.copy({"a": torch.ones(3), "b": torch.ones(4)})
    assert list(host.copy({"b": torch.zeros(4)})) == ["b"]
    copies = host.copy({"c": torch.full((5,), 2.0), "b": torch.ones(4)})
    assert {name: one.tolist() for name, one in copies.items()} == {"c": [2.0] * 5, "b": [1.0] * 4}


def test_memory_of_tensors_that_are_gone_is_freed(host):
    host.copy(filled(1))
    before = rss()
    host.copy({"three": torch.ones(3)})
    assert before - rss() > 0.9 * SIZE


def test_prepared_memory_is_there_before_the_first_copy(host):
    live = filled(1)
    before = rss()
    host.prepare(live)
    join_preparation()
    assert rss() - before > 0.9 * SIZE
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    copies = host.copy(live)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < SIZE / 4096 / 10
    assert torch.equal(copies["two"], live["two"])


def test_preparing_again_takes_no_more_memory(host):
    live = filled(1)
    host.prepare(live)
    join_preparation()
    before = rss()
    host.prepare(live)
    join_preparation()
    assert rss() - before < SIZE / 10


def test_a_copy_does_not_wait_for_the_preparation(host, monkeypatch):
    touched = []
    arrived, go_on = threading.Event(), threading.Event()

    def advise(pages, advice):
        touched.append(advice)
        arrived.set()
        go_on.wait(10)

    live = filled(4)
    monkeypatch.setattr(host_copy, "_advise", advise)
    host.prepare(live)
    assert arrived.wait(10)
    before = rss()
    host._stop.set()
    go_on.set()
    join_preparation()
    assert rss() - before < SIZE / 4
    copies = host.copy(live)
    assert copies["one"].unique().tolist() == [4]
    assert copies["two"].unique().tolist() == [-4]


def test_a_copy_at_once_after_the_preparation_began_is_right(host):
    for value in range(1, 20):
        live = filled(value, 2**20 * value)
        host.prepare(live)
        copies = host.copy(live)
        assert all(torch.equal(copies[name], live[name]) for name in live)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("air_nb-host")]


def test_preparing_for_more_leaves_alone_what_a_save_is_writing(host):
    in_flight = host.copy(filled(5))
    host.prepare({"one": torch.zeros(3), "two": torch.zeros(SIZE // 8), "three": torch.zeros(SIZE // 4)})
    join_preparation()
    assert in_flight["one"].unique().tolist() == [5]
    assert in_flight["two"].unique().tolist() == [-5]


def test_without_memory_to_prepare_the_copy_says_so(host, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("air_nb.checkpoint.host_copy.mmap.mmap", refuse)
        host.prepare(filled(1))
        join_preparation()
        with pytest.raises(OSError, match="Cannot allocate"):
            host.copy(filled(1))
    assert host.copy(filled(1))["one"][0] == 1


def test_an_error_in_a_thread_of_the_copy_is_raised(host, monkeypatch):
    monkeypatch.setattr(host_copy, "_n_threads", lambda: 3)
    failed = threading.Event()

    def fail(to, from_):
        if threading.current_thread() is threading.main_thread():
            failed.wait(10)
        elif not failed.is_set():
            failed.set()
            raise OSError("bad page")

    monkeypatch.setattr("air_nb.checkpoint.host_copy.np.copyto", fail)
    with pytest.raises(OSError, match="bad page"):
        host.copy(filled(1))


def test_each_rank_has_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert host_copy._n_threads() == 4
    for ranks, threads in ((8, 2), (16, 1), (32, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert host_copy._n_threads() == threads


def test_closing_frees_the_memory(host):
    copies = host.copy(filled(1))
    before = rss()
    host.close()
    assert copies["one"][0] == 1  # a save that is still writing
    del copies
    assert before - rss() > 0.9 * SIZE


def test_closing_while_it_is_prepared_ends_the_thread(host):
    host.prepare(filled(1))
    host.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "air_nb-host-memory"]


def test_a_forked_child_shares_no_pages_so_the_next_copy_faults_none(host):
    live = filled(6)
    copies = host.copy(live)
    view = copies["one"].numpy()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os._exit(0 if os.read(read_end, 1) and view[0] == 0 else 1)
    try:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        again = host.copy(live)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < SIZE / 4096 / 10
    finally:
        os.write(write_end, b"x")
        _, status = os.waitpid(child, 0)
        os.close(read_end)
        os.close(write_end)
    assert os.waitstatus_to_exitcode(status) == 0
    assert again["one"].unique().tolist() == [6]
