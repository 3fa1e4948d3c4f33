"""Stacks of all ranks as text: the user's frames, innermost last, equal ones once."""

from __future__ import annotations

from pathlib import Path

from air_nb.protocol.task import RankTask
from air_nb.runs.directory import RunDirectory
from air_nb.session.rank_names import format_ranks, name_ranks
from air_nb.session.stacks import describe_stacks
from tests.support.kernel import plain

_MAIN = """  File "/x/IPython/core/interactiveshell.py", line 3823 in run_code
  File "/x/air_nb/rank/main.py", line 58 in main
  File "/x/multiprocessing/process.py", line 314 in _bootstrap
"""
_LIFELINE = """Thread 0x00007f5ec24146c0 (most recent call first):
  File "/x/multiprocessing/connection.py", line 947 in wait
  File "/x/air_nb/rank/environment.py", line 46 in end_with_launcher

"""


def _dump(frames: str, thread: str = "Current thread 0x00007f5ee220fb80") -> str:
    return f"{_LIFELINE}{thread} (most recent call first):\n{frames}{_MAIN}"


def _describe(tmp_path: Path, dumps: list[str | None], source: str = "\n\nimport time\ntime.sleep(9)\n") -> list[str]:
    directory = RunDirectory(tmp_path)
    RankTask(
        kind="cell", run_name="x", source=source, header="%%distributed\n", execution_count=3, cwd="/", sys_path=[],
        argv=[], sources={"/tmp/ipykernel_1/2.py": "def f():\n    wait()\n"}, cell_numbers={"/tmp/ipykernel_1/2.py": 7},
    ).write(tmp_path)  # fmt: skip
    for rank, dump in enumerate(dumps):
        if dump is not None:
            directory.rank_file(rank, "stacks").write_text(dump)
    return [plain(line) for line in describe_stacks(directory, range(len(dumps)))]


def test_equal_stacks_are_shown_once_with_the_lines_of_the_cell(tmp_path: Path):
    cell = '  File "<ipython-input-3-abc>", line 3 in <module>\n'
    assert _describe(tmp_path, [_dump(cell), _dump(cell, "Current thread 0x01"), None]) == [
        "ranks 0-1:",
        "  Cell In[3], line 3, in <module>",
        "----> time.sleep(9)",
        "rank 2:",
        "  no Python stack: the process did not answer",
    ]


def test_code_of_another_cell_and_of_a_file_is_shown_innermost_last(tmp_path: Path):
    frames = f'  File "{__file__}", line 1 in helper\n  File "/tmp/ipykernel_1/2.py", line 2 in f\n'
    frames += '  File "<ipython-input-3-abc>", line 2 in <module>\n'
    assert _describe(tmp_path, [_dump(frames)]) == [
        "rank 0:",
        "  Cell In[3], line 2, in <module>",
        "----> import time",
        "  Cell In[7], line 2, in f",
        "----> wait()",
        f'  File "{__file__}", line 1, in helper',
        '    """Stacks of all ranks as text: the user\'s frames, innermost last, equal ones once."""',
    ]


def test_the_newest_dump_counts(tmp_path: Path):
    first, second = (f'  File "<ipython-input-3-abc>", line {line} in <module>\n' for line in (2, 3))
    assert _describe(tmp_path, [_dump(first) + _dump(second)])[1] == "  Cell In[3], line 3, in <module>"


def test_a_rank_that_has_not_come_to_the_cell_shows_all_it_has(tmp_path: Path):
    lines = _describe(tmp_path, [f"Current thread 0x1 (most recent call first):\n{_MAIN}"])
    assert '  File "/x/air_nb/rank/main.py", line 58, in main' in lines


def test_ranks_are_named_as_in_a_sentence():
    assert format_ranks([5, 0, 2, 1]) == "0-2, 5"
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1]) == "ranks 0-1"
