"""What ranks leave for the tracking process: nothing is lost, and nothing torn is taken for something else."""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import threading

import pytest

from air_nb.protocol.tracking import spool_name
from air_nb.tracking.spool import Spool, SpoolEntry, rank_spool, read


@pytest.fixture
def path(tmp_path):
    found = tmp_path / spool_name(0)
    found.parent.mkdir()
    return found


@pytest.fixture
def write(path):
    spool = Spool(path)
    yield spool
    os.close(spool._fd)


def metric(step, value=0.5):
    return SpoolEntry(metrics=[("loss", value, 1_700_000_000_000, step)])


def test_what_is_appended_is_read_in_its_order(path, write):
    entries = [
        SpoolEntry(
            metrics=(("loss", 0.25, 1_700_000_000_000, 3), ("acc", 1e-300, 1_700_000_000_001, 2**40)),
            params=(("lr", "0.1"),),
            tags=(("note", "zwölf\nlines"),),
            run_name="brave-otter",
        ),
        SpoolEntry(artifact=("mlflow_artifacts/1/plot.png", None)),
        SpoolEntry(artifact=("mlflow_artifacts/2/out", "deep/er")),
    ]
    for entry in entries:
        write.append(entry)

    part = read(path, 0, 1 << 20)

    assert part.entries == entries
    assert part.offset == path.stat().st_size
    assert part.skipped == 0


def test_nan_and_infinities_survive(path, write):
    for value in (math.nan, math.inf, -math.inf):
        write.append(metric(1, value))

    values = [entry.metrics[0][1] for entry in read(path, 0, 1 << 20).entries]

    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]


def test_a_spool_that_is_not_there_yet_is_empty(path):
    part = read(path, 0, 100)

    assert (part.entries, part.offset, part.skipped) == ([], 0, 0)


def test_a_limit_is_kept_and_the_rest_follows(path, write):
    for step in range(10):
        write.append(metric(step))
    length = path.stat().st_size // 10

    steps, offset, parts = [], 0, 0
    while (part := read(path, offset, 3 * length + 5)).entries:
        steps += [entry.metrics[0][3] for entry in part.entries]
        offset = part.offset
        parts += 1

    assert steps == list(range(10))
    assert parts == 4


def test_a_line_longer_than_the_limit_is_read_whole(path, write):
    write.append(SpoolEntry(tags=[("long", "x" * 5000)]))
    write.append(metric(1))

    part = read(path, 0, 10)

    assert [entry.tags[0][1] for entry in part.entries] == ["x" * 5000]
    assert [entry.metrics[0][3] for entry in read(path, part.offset, 10).entries] == [1]


def test_a_line_that_is_still_being_written_is_left_for_later(path):
    whole, half = metric(1).encode(), metric(2).encode()
    path.write_bytes(whole + half[:20])

    part = read(path, 0, 1 << 20)
    assert len(part.entries) == 1
    assert part.offset == len(whole)
    assert read(path, part.offset, 1 << 20).entries == []

    path.write_bytes(whole + half)
    assert [entry.metrics[0][3] for entry in read(path, part.offset, 1 << 20).entries] == [2]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff\xfe",
        b"{",
        b"[1, 2]",
        b'"text"',
        b"null",
        b'{"metrics": 3}',
        b'{"metrics": [["loss", 1.0]]}',
        b'{"metrics": [["loss", "much", 1, 1]]}',
        b'{"params": [["lr"]]}',
        b'{"artifact": "one"}',
        b'{"tags": {"a": 1}}',
        b"[" * 100_000,
    ],
)
def test_garbage_between_entries_is_skipped_and_counted(path, garbage):
    path.write_bytes(metric(1).encode() + garbage + b"\n" + metric(2).encode())

    part = read(path, 0, 1 << 20)

    assert [entry.metrics[0][3] for entry in part.entries] == [1, 2]
    assert part.skipped == 1


def test_fields_of_a_later_version_are_ignored(path):
    path.write_bytes(b'{"params": [["a", "b"]], "images": 7}\n')

    assert read(path, 0, 100).entries == [SpoolEntry(params=(("a", "b"),))]


def test_only_this_user_may_read_it_and_children_that_execute_do_not_inherit_it(path, write):
    assert path.stat().st_mode & 0o777 == 0o600
    assert not os.get_inheritable(write._fd)


def test_eight_threads_lose_nothing_and_tear_nothing(path, write):
    def log(name):
        for step in range(500):
            write.append(SpoolEntry(metrics=[(name, 1.0, 1, step)]))

    threads = [threading.Thread(target=log, args=(f"m{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    part = read(path, 0, 1 << 24)
    assert part.skipped == 0
    for number in range(8):
        assert [m[3] for entry in part.entries for m in entry.metrics if m[0] == f"m{number}"] == list(range(500))


def _log_in_child(directory, number):
    for step in range(300):
        rank_spool(directory, 0).append(SpoolEntry(metrics=[(f"m{number}", 1.0, 1, step)]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_workers_of_a_rank_may_log_too(tmp_path, method):
    context = multiprocessing.get_context(method)
    rank_spool(tmp_path, 0).append(metric(0))
    children = [context.Process(target=_log_in_child, args=(tmp_path, number)) for number in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    os.close(rank_spool(tmp_path, 0)._fd)
    rank_spool.cache_clear()

    part = read(tmp_path / spool_name(0), 0, 1 << 24)

    assert part.skipped == 0
    assert len(part.entries) == 601


def test_a_spool_whose_descriptor_was_closed_behind_its_back_is_opened_again(path, write):
    write.append(metric(1))
    os.close(write._fd)  # as a process does that becomes a daemon
    write.append(metric(2))

    assert [entry.metrics[0][3] for entry in read(path, 0, 1000).entries] == [1, 2]
    assert write.lost == 0


def test_a_full_disk_does_not_end_the_training_and_is_said_once(path, write, capfd, monkeypatch):
    write.append(metric(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", _disk_full)
        for step in (2, 3, 4):
            write.append(metric(step))
    write.append(metric(5))

    said = capfd.readouterr().err
    assert said.count("air_nb:") == 1
    assert "No space left on device" in said
    assert str(path) in said
    assert write.lost == 3
    assert [entry.metrics[0][3] for entry in read(path, 0, 1000).entries] == [1, 5]


def _disk_full(_fd, _line):
    raise OSError(28, "No space left on device")


def test_an_entry_of_which_only_a_part_fitted_costs_no_other_entry(path, write):
    write.append(metric(1))
    length = path.stat().st_size
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length + 10, old[1]))  # a write beyond it is cut, as on a full disk
    try:
        write.append(metric(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    write.append(metric(3))

    part = read(path, 0, 1000)
    assert [entry.metrics[0][3] for entry in part.entries] == [1, 3]
    assert part.skipped == 1
    assert write.lost == 1


def test_a_directory_that_is_gone_does_not_end_the_training(tmp_path, capfd):
    spool = Spool(tmp_path / "gone" / "rank_0.mlflow")

    spool.append(metric(1))

    assert spool.lost == 1
    assert "No such file" in capfd.readouterr().err
