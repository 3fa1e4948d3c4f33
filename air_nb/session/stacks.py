"""Where every rank was: faulthandler's dumps -> text for a person, equal stacks once (reads files, starts nothing)."""

from __future__ import annotations

import linecache
import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import dropwhile
from typing import TYPE_CHECKING

from air_nb.protocol.task import RankTask
from air_nb.session.rank_names import name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from air_nb.runs.directory import RunDirectory

__all__ = ["describe_stacks"]

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
_INPUT = re.compile(r"^<ipython-input-(\d+)-")
_RANK_MAIN = "/air_nb/rank/main.py"
_NOT_THE_USERS = ("/IPython/core/", "/air_nb/rank/", "/air_nb/launch/")
_NO_STACK = "no Python stack: the process did not answer"


@dataclass(frozen=True, slots=True)
class _Frame:
    file: str
    line: int
    function: str


def describe_stacks(directory: RunDirectory, ranks: Iterable[int]) -> list[str]:
    """The newest stack of each rank's main thread, innermost call last, with the lines of the cell marked."""
    groups: dict[tuple[_Frame, ...], list[int]] = defaultdict(list)
    for rank in ranks:
        try:
            text = directory.rank_file(rank, "stacks").read_text(errors="replace")
        except FileNotFoundError:
            text = ""
        groups[_users_part(_main_thread(text))].append(rank)
    cells = _Cells(RankTask.read(directory.path))
    lines = []
    for frames, members in groups.items():
        lines.append(f"{name_ranks(members)}:")
        lines += [line for frame in frames for line in cells.describe(frame)] or [f"  {_NO_STACK}"]
    return lines


def _main_thread(text: str) -> list[_Frame]:
    """Frames of the newest dump's main thread, innermost first."""
    threads = re.split(r"^(?=(?:Current thread|Thread) )", text, flags=re.MULTILINE)
    mains = [thread for thread in threads if _RANK_MAIN in thread and "end_with_launcher" not in thread]
    main = mains or [thread for thread in threads if thread.startswith("Current thread")]
    return [_Frame(file, int(line), function) for file, line, function in _FRAME.findall(main[-1] if main else "")]


def _users_part(frames: Sequence[_Frame]) -> tuple[_Frame, ...]:
    """Outermost first, without what runs the cell; all of it where the rank has not come to the cell."""
    outermost_first = list(reversed(frames))
    ours = [index for index, frame in enumerate(outermost_first) if _RANK_MAIN in frame.file]
    after_main = outermost_first[ours[-1] + 1 :] if ours else outermost_first
    users = tuple(dropwhile(lambda frame: any(part in frame.file for part in _NOT_THE_USERS), after_main))
    return users or tuple(outermost_first)


class _Cells:
    """Code of the notebook by the file names that stacks have."""

    def __init__(self, task: RankTask) -> None:
        self._task = task
        # IPython drops empty lines at the beginning of a cell before it counts.
        source = list(dropwhile(lambda line: not line.strip(), task.source.splitlines()))
        self._cell = task.header.splitlines() + source

    def describe(self, frame: _Frame) -> list[str]:
        found = _INPUT.match(frame.file)
        if found:
            return self._cell_lines(frame, int(found[1]), self._cell)
        if frame.file in self._task.sources:
            number = self._task.cell_numbers.get(frame.file)
            return self._cell_lines(frame, number, self._task.sources[frame.file].splitlines())
        text = linecache.getline(frame.file, frame.line).strip()
        return [f'  File "{frame.file}", line {frame.line}, in {frame.function}', *([f"    {text}"] if text else [])]

    @staticmethod
    def _cell_lines(frame: _Frame, number: int | None, source: Sequence[str]) -> list[str]:
        text = source[frame.line - 1].strip() if frame.line <= len(source) else ""
        where = f"Cell In[{number}]" if number is not None else "Cell"
        line = f"  \x1b[32m{where}, line {frame.line}\x1b[0m, in {frame.function}"
        return [line, *([f"\x1b[32m---->\x1b[0m {text}"] if text else [])]
