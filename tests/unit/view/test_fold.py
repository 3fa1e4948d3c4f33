from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_nb.view.fold import Folder, Item, label


def folder(ranks: int, *, wait_s=0.15, look_s=0.01, max_queued=1000, max_chars=1 << 20) -> Folder:
    folder = Folder(ranks, wait_s=wait_s, start_s=wait_s, look_s=look_s, max_queued=max_queued, max_chars=max_chars)
    for rank in range(ranks):
        folder.begin(rank, 0.0)
    return folder


def push(folder: Folder, rank: int, *lines: str, at=0.0, stream="stdout") -> None:
    folder.push(rank, [Item(line, stream, at) for line in lines])


def released(folder: Folder, now=0.0) -> list[str]:
    return [f"{label(each.ranks)} {each.items[0].text}" for each in folder.release(now)]


@pytest.mark.parametrize(
    "ranks, text",
    [((3,), "[3]"), ((0, 1), "[0-1]"), (tuple(range(8)), "[0-7]"), ((0, 2, 3), "[0,2-3]"), ((1, 3, 5), "[1,3,5]")],
)
def test_label(ranks, text):
    assert label(ranks) == text


@given(st.sets(st.integers(0, 40), min_size=1))
def test_label_names_exactly_the_ranks(ranks):
    read = set()
    for part in label(tuple(sorted(ranks)))[1:-1].split(","):
        first, _, last = part.partition("-")
        read |= set(range(int(first), int(last or first) + 1))
    assert read == ranks


def test_equal_lines_fold_as_soon_as_the_last_rank_has_them():
    queues = folder(3)
    push(queues, 0, "a")
    push(queues, 2, "a")
    assert released(queues) == []
    push(queues, 1, "a")
    assert released(queues) == ["[0-2] a"]


def test_line_goes_after_150_ms_without_the_others():
    queues = folder(3)
    push(queues, 0, "a", at=1.0)
    push(queues, 1, "a", at=1.1)
    assert released(queues, 1.14) == []
    assert queues.deadline() == pytest.approx(1.15)
    assert released(queues, 1.15) == ["[0-1] a"]
    push(queues, 2, "a", at=1.2)
    assert released(queues, 1.35) == ["[2] a"]
    assert queues.deadline() is None


def test_line_that_is_not_old_enough_waits_when_another_one_goes():
    queues = folder(3)
    push(queues, 0, "a", at=1.0)
    push(queues, 1, "b", at=1.1)
    assert released(queues, 1.15) == ["[0] a"]
    assert queues.deadline() == pytest.approx(1.25)


def test_stdout_and_stderr_do_not_fold():
    queues = folder(2)
    push(queues, 0, "a")
    push(queues, 1, "a", stream="stderr")
    assert released(queues, 0.02) == ["[0] a", "[1] a"]


def test_differing_lines_come_in_order_of_ranks_with_equal_ones_together():
    queues = folder(4)
    for rank, text in enumerate(["x", "y", "x", "z"]):
        push(queues, rank, text)
    assert released(queues, 0.02) == ["[0,2] x", "[1] y", "[3] z"]


def test_extra_line_of_one_rank_does_not_stop_later_lines_from_folding():
    queues = folder(3)
    push(queues, 0, "header", "epoch 1", "epoch 2")
    for rank in (1, 2):
        push(queues, rank, "epoch 1", "epoch 2")
    assert released(queues, 0.02) == ["[0] header", "[0-2] epoch 1", "[0-2] epoch 2"]


def test_lines_in_opposite_orders_end():
    queues = folder(2)
    push(queues, 0, "a", "b")
    push(queues, 1, "b", "a")
    assert released(queues, 0.2) == ["[0] a", "[0-1] b", "[1] a"]


def test_rank_that_has_ended_is_not_waited_for():
    queues = folder(2)
    push(queues, 0, "a")
    queues.end(1)
    assert released(queues) == ["[0] a"]


def test_full_queue_is_not_waited_for():
    queues = folder(2, max_queued=3)
    push(queues, 0, *"abcde")
    assert released(queues) == ["[0] a", "[0] b"]


def test_queue_of_many_characters_is_not_waited_for():
    queues = folder(2, max_chars=10)
    push(queues, 0, "x" * 8, "y" * 8)
    assert released(queues) == ["[0] xxxxxxxx"]


_rank_lines = st.lists(st.sampled_from("abcd"), max_size=12)


@given(st.lists(_rank_lines, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_every_order_of_arrival_keeps_each_ranks_lines(texts, random):
    queues = folder(len(texts))
    pending = [list(lines) for lines in texts]
    seen: list[list[str]] = [[] for _ in texts]
    now = 0.0

    def take() -> None:
        for each in queues.release(now):
            for rank, item in zip(each.ranks, each.items, strict=True):
                seen[rank].append(item.text)

    while any(pending):
        rank = random.choice([rank for rank, lines in enumerate(pending) if lines])
        push(queues, rank, pending[rank].pop(0), at=now)
        now += random.choice([0.0, 0.005, 0.2])
        take()
    for rank in range(len(texts)):
        queues.end(rank)
    now += 1
    take()
    assert seen == texts


@given(st.lists(_rank_lines, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_patient_folding_does_not_depend_on_the_order_of_arrival(texts, random):
    def run(order: list[int]) -> list[str]:
        queues = folder(len(texts), wait_s=30, look_s=30)
        pending = [list(lines) for lines in texts]
        lines = []
        for rank in order:
            if pending[rank]:
                push(queues, rank, pending[rank].pop(0))
            else:
                queues.end(rank)
            lines += released(queues)
        return lines

    order = [rank for rank, lines in enumerate(texts) for _ in range(len(lines) + 1)]
    shuffled = random.sample(order, len(order))
    assert run(shuffled) == run(order)
