"""Run a notebook from top to bottom and print, cell by cell, what a reader of it would see.

Owns the terminal side of `make quickstart`. Headings are printed as they come, each code cell's first line when the
cell starts and its text outputs when it ends, in their final form (an updated display shows its last state). The
notebook file is not changed.
Exit status: 0, 1 if a cell failed that is not tagged `raises-exception`, 2 if the notebook can't be read.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbformat import NotebookNode

_ANSI_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_HEADING = re.compile(r"#{1,6} ")
_OVERWRITTEN = re.compile(r"^[^\n]*\r(?!\n)", re.MULTILINE)


def output_text(output: NotebookNode) -> str:
    """Return the text that stands for one output of a cell.

    Args:
        output: A stream, display_data, execute_result or error output of nbformat 4.

    Returns:
        Its plain text, of a progress bar only the final state; "[figure]" follows a picture.
    """
    match output.output_type:
        case "stream":
            text = _OVERWRITTEN.sub("", output.text)
        case "error":
            text = "\n".join(output.traceback)
        case _:
            text = output.data.get("text/plain", "")
            if any(mime.startswith("image/") for mime in output.data):
                text += " [figure]"
    return text if text.endswith("\n") or not text else text + "\n"


def cell_text(outputs: list[NotebookNode]) -> str:
    """Return all of a cell's outputs as text; a stream that was cut into pieces is joined first."""
    return "".join(output_text(output) for output in _joined(outputs))


def _joined(outputs: list[NotebookNode]) -> Iterator[NotebookNode]:
    pending: NotebookNode | None = None
    for output in outputs:
        stream = output.output_type == "stream"
        if pending is not None and stream and output.name == pending.name:
            pending = nbformat.from_dict({**pending, "text": pending.text + output.text})
            continue
        if pending is not None:
            yield pending
        pending = output if stream else None
        if not stream:
            yield output
    if pending is not None:
        yield pending


class _Printer:
    """Prints each code cell as it runs; the last one started may still have outputs to show when the run stops."""

    def __init__(self, *, colours: bool) -> None:
        self._colours = colours
        self._running: NotebookNode | None = None

    def reached(self, cell: NotebookNode, **_: object) -> None:
        """Print the headings of a text cell."""
        if cell.cell_type != "markdown":
            return
        for line in cell.source.splitlines():
            if _HEADING.match(line):
                print(f"{line}\n", flush=True)

    def started(self, cell: NotebookNode, **_: object) -> None:
        """Print the first line of a cell that is about to run."""
        self._running = cell
        lines = cell.source.strip().splitlines()
        print(f"In: {lines[0]}{' …' if len(lines) > 1 else ''}", flush=True)

    def ended(self, **_: object) -> None:
        """Print what the running cell has shown."""
        if self._running is None:
            return
        text = cell_text(self._running.outputs)
        self._running = None
        if not self._colours:
            text = _ANSI_STYLE.sub("", text)
        for line in text.splitlines():
            print(f"    {line}".rstrip())
        print(flush=True)


def run(path: Path, *, timeout_s: int) -> int:
    """Run the notebook at `path` in its own folder and print its cells.

    Args:
        path: The notebook.
        timeout_s: How long one cell may take.

    Returns:
        The exit status: 1 if a cell failed that was not meant to.
    """
    notebook = nbformat.read(path, as_version=4)
    printer = _Printer(colours=sys.stdout.isatty())
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name="python3",  # this environment's own, whatever the file was last saved with
        extra_arguments=["--log-level=ERROR"],  # its warnings are about its own sockets, not about the notebook
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=printer.reached,
        on_cell_execute=printer.started,
        on_cell_executed=printer.ended,
    )
    try:
        client.execute()
    except CellExecutionError as error:
        print(f"{path}: a cell failed ({error.ename}); its output is above.", file=sys.stderr)
        return 1
    except (CellTimeoutError, DeadKernelError) as error:
        printer.ended()
        print(f"{path}: stopped in the cell above: {error}", file=sys.stderr)
        return 1
    print(f"{path} ran to its end. `make lab` opens it in JupyterLab.")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Read the command line and run the notebook; returns the exit status."""
    parser = argparse.ArgumentParser(description="Run a notebook and print what its cells show.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--timeout", type=int, default=600, metavar="SECONDS", help="per cell (default: 600)")
    options = parser.parse_args(arguments)
    if not options.notebook.is_file():
        print(f"{options.notebook}: no such notebook", file=sys.stderr)
        return 2
    return run(options.notebook, timeout_s=options.timeout)


if __name__ == "__main__":
    sys.exit(main())
