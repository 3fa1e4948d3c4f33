r"""One stream of one rank: its text, cut anywhere, becomes finished lines and rows still being written.

Pure. Text without cursor movement takes a fast path (``str.split``). As soon as a carriage return, a backspace or a
cursor escape comes, a small screen is emulated, because progress bars paint: ``\r`` goes back to the column 0,
nested bars of tqdm go down with ``\n`` and back up with ``ESC[A``, so that there a newline does not end a line.
"""

from __future__ import annotations

import re

__all__ = ["LINE_MAX", "LineBuffer"]

LINE_MAX = 1 << 16
"""Characters of a line that are shown: a browser shows no more of one, and four 1 MB lines at once trip the server."""

_ROWS_MAX = 64
_CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
_MOVE = re.compile(rf"[\r\x08]|{_CURSOR.pattern}")
_CONTROL = re.compile(r"(\r|\n|\x08+|\x1b\[[0-9;?]*[A-HJKSTfhlsu])")
_UNFINISHED = re.compile(r"(?:\r|\x1b(?:\[[0-9;?]*)?)+\Z")
_NEWLINE = re.compile(r"\r+\n")


class _Row:
    """One row of the emulated screen; a ``bar`` is a row that was rewritten after a carriage return."""

    __slots__ = ("bar", "returned", "text")

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.bar = False
        self.returned = False


class LineBuffer:
    """Text of one stream of one rank, as lines.

    Attributes:
        since: When the unfinished plain line began, None if there is none.
        unsettled_since: Since when finished bars wait for the cursor to come back up to them, None if there are none.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self.unsettled_since: float | None = None
        self._held = ""
        self._text = ""
        self._dropped = 0
        self._taken = False
        self._rows: list[_Row] = []
        self._row = 0
        self._col = 0
        self._line_start = False

    @property
    def drawing(self) -> bool:
        """Whether the cursor has been moved, so that rows are rewritten rather than ended."""
        return bool(self._rows)

    @property
    def idle(self) -> bool:
        """Whether nothing is unfinished."""
        return not (self._rows or self._text or self._held or self._taken)

    def prepare(self, text: str) -> str:
        r"""Join what was held back, make ``\r\n`` newlines, hold back what may be the start of a sequence."""
        if self._held:
            text = self._held + text
            self._held = ""
        if "\x00" in text:
            # A NUL byte ends the text in some front ends.
            text = text.replace("\x00", "␀")
        if text.endswith("\r") or "\x1b" in text[-16:]:
            unfinished = _UNFINISHED.search(text)
            if unfinished:
                self._held = unfinished.group()
                text = text[: unfinished.start()]
        return _NEWLINE.sub("\n", text) if "\r" in text else text

    def is_plain(self, text: str) -> bool:
        """Whether this prepared text only adds to lines, never rewrites one."""
        if self._rows or "\r" in text or "\x08" in text:
            return False
        return "\x1b" not in text or _CURSOR.search(text) is None

    def add(self, text: str, now: float) -> list[str]:
        """Take prepared text; return the lines that it finished."""
        if self.is_plain(text):
            return self._add_plain(text, now)
        before = self._lines_before_move(text)
        done = self._add_plain(before, now) if before else []
        return done + self._paint(text[len(before) :], now)

    def settle(self) -> list[str]:
        """Finish the rows above the cursor: it has not come back up to them."""
        done = [row.text.rstrip() for row in self._rows[: self._row] if row.text.strip()]
        del self._rows[: self._row]
        if self._line_start:
            # What is below a finished line was left there by a bar that moved up; a terminal would write over it.
            self._rows = [row for row in self._rows if not row.bar]
        self._row = 0
        self._rest(None)
        return done

    def close(self) -> list[str]:
        """Finish everything: the stream has ended."""
        done = self.settle() if self._line_start else []
        done += [row.text.rstrip() for row in self._rows if row.text.strip()]
        if self._text:
            done.append(_cut(self._text, self._dropped))
        self.clear()
        return done

    def clear(self) -> None:
        """Forget what is unfinished."""
        self.__init__()  # type: ignore[misc]  # the same object stays with its rank

    def live(self) -> list[str]:
        """Text of the rows still being written, blank ones left out."""
        if self._rows:
            return [row.text.rstrip() for row in self._rows if row.text.strip()]
        return [self._text] if self._text else []

    def take_partial(self) -> str:
        """Give the unfinished plain line away as if it had ended; its newline then adds no empty line."""
        text = _cut(self._text, self._dropped)
        self._text, self._dropped, self.since, self._taken = "", 0, None, True
        return text

    def _add_plain(self, text: str, now: float) -> list[str]:
        if "\n" not in text:
            self._extend(text, now)
            return []
        lines = text.split("\n")
        rest = lines.pop()
        long = len(text) > LINE_MAX or self._dropped or len(self._text) + len(lines[0]) > LINE_MAX
        if long:
            first, dropped = self._text + lines[0][: LINE_MAX + 1], self._dropped
            dropped += max(len(lines[0]) - LINE_MAX - 1, 0)
            lines = [_cut(first, dropped), *(_cut(line, 0) for line in lines[1:])]
        elif self._text:
            lines[0] = self._text + lines[0]
        elif self._taken and not lines[0]:
            del lines[0]
        self._text, self._dropped, self.since, self._taken = "", 0, None, False
        self._extend(rest, now)
        return lines

    def _extend(self, text: str, now: float) -> None:
        if not text:
            return
        room = max(LINE_MAX - len(self._text), 0)
        self._text += text[:room]
        self._dropped += max(len(text) - room, 0)
        if self.since is None:
            self.since = now

    def _lines_before_move(self, text: str) -> str:
        """Finished lines at the start that need no screen: it would forget how much of a long one is not shown.

        Blank lines right before the movement belong to the screen: bars go down to their row with them.
        """
        move = None if self._rows else _MOVE.search(text)
        if move is None:
            return ""
        lines = text[: text.rfind("\n", 0, move.start()) + 1]
        written = lines.rstrip()
        return lines[: lines.find("\n", len(written)) + 1] if written or self._text.strip() else ""

    def _paint(self, text: str, now: float) -> list[str]:
        if not self._rows:
            self._rows = [_Row(self._text)]
            self._row, self._col, self._line_start = 0, len(self._text), False
            self._text, self._dropped, self.since, self._taken = "", 0, None, False
        done: list[str] = []
        for piece in _CONTROL.split(text):
            if piece == "\n":
                self._newline(done)
            elif piece == "\r":
                self._col = 0
                self._rows[self._row].returned = True
            elif piece.startswith("\x08"):
                self._col = max(self._col - len(piece), 0)
                self._rows[self._row].returned = True
            elif piece.startswith("\x1b[") and _CURSOR.fullmatch(piece):
                self._move(piece)
            elif piece:
                self._write(piece)
        self._rest(now)
        return done

    def _write(self, text: str) -> None:
        row = self._rows[self._row]
        self._line_start = False
        row.bar = row.bar or row.returned
        if self._col == 0 and ("\x1b" in text or "\x1b" in row.text):
            # Colours take no width: writing over them position by position would tear them.
            row.text = text[:LINE_MAX]
        else:
            row.text = (row.text[: self._col].ljust(self._col) + text + row.text[self._col + len(text) :])[:LINE_MAX]
        self._col = min(self._col + len(text), LINE_MAX)

    def _newline(self, done: list[str]) -> None:
        row = self._rows[self._row]
        if row.text.strip() and not row.bar:
            # Ordinary text below finished bars: the cursor will not go back up to those.
            above = self._rows[: self._row + 1]
            done.extend(each.text.rstrip() if each.bar else each.text for each in above if each.text or not each.bar)
            del self._rows[: self._row + 1]
            self._row = 0
        else:
            self._row += 1
        self._reach_row(done)
        self._col = 0
        self._line_start = True

    def _move(self, piece: str) -> None:
        count = int(piece[2:-1]) if piece[2:-1].isdigit() else 1
        row = self._rows[self._row]
        self._line_start = False
        match piece[-1]:
            case "A":
                self._row = max(self._row - count, 0)
            case "B":
                self._row += min(count, _ROWS_MAX)
                self._reach_row([])
            case "C":
                self._col = min(self._col + count, LINE_MAX)
                row.text = row.text.ljust(self._col)
            case "D":
                self._col = max(self._col - count, 0)
                row.returned = True
            case "K" if piece == "\x1b[2K":
                row.text = ""
                row.returned = True
            case "K":
                row.text = row.text[: self._col]
            case "J":
                row.text = row.text[: self._col]
                del self._rows[self._row + 1 :]
            case _:
                pass  # absolute positions, scrolling, hiding the cursor: not for a stream of lines

    def _reach_row(self, done: list[str]) -> None:
        while self._row >= len(self._rows):
            self._rows.append(_Row())
        if len(self._rows) > _ROWS_MAX and self._row:
            done.extend(self.settle())
            if not self._rows:
                self._rows = [_Row()]

    def _rest(self, now: float | None) -> None:
        """Leave the screen if nothing on it can still be rewritten."""
        if self._row == 0:
            self.unsettled_since = None
        elif self.unsettled_since is None:
            self.unsettled_since = now
        if len(self._rows) == 1 and not (self._rows[0].bar or self._rows[0].returned):
            self._text = self._rows[0].text
            self._rows = []
            self.since = now if self._text else None


def _cut(line: str, dropped: int) -> str:
    more = max(len(line) - LINE_MAX, 0) + dropped
    return f"{line[:LINE_MAX]}… {more:,} more characters" if more else line
