"""``%%distributed`` and ``%air``: the only module that faces IPython's magics. Each delegates to the session.

What only a launch needs is imported there: ``%load_ext`` has to be quick.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, argument_group, magic_arguments

from air_nb.errors import AirNbError, DeviceError, NestedLaunchError
from air_nb.options import RunOptions, parse_env, parse_timeout
from air_nb.protocol.names import RESULT
from air_nb.runs.paths import home_path
from air_nb.session.session import close_session, get_session
from air_nb.session.versions import is_too_old, minimum_text
from air_nb.sidebar.panel_comm import PanelOffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

    from air_nb.capture.names import CellNames

__all__ = ["AirMagics", "load", "unload"]


@magics_class
class AirMagics(Magics):
    """The magics of one IPython shell."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._assigned: dict[str, int] = {}
        self.panel: PanelOffer | None = None  # in a kernel

    @magic_arguments()
    @argument_group("which ranks")
    @argument("--gpus", type=int, help="number of GPUs, the most idle ones (default: all)")
    @argument("--gpu-ids", help="these GPUs, as indices into the visible ones or as UUIDs: 0,2,3")
    @argument("--nproc", type=int, help="number of ranks, with --device cpu any number")
    @argument("--device", default="auto", help="auto, cuda or cpu (default: auto)")
    @argument("--gpu-type", help="type that the GPUs must have, such as H100")
    @argument_group("data")
    @argument("--in", dest="inputs", help="send only these names: a,b (default: the names that the cell reads)")
    @argument("--out", help="name for the last expression's values: a list, one per rank")
    @argument("--pull", help="names to fetch from the ranks at the end: a,b; each becomes a list, one per rank")
    @argument_group("output")
    @argument("--output", default="merged", help="merged, rank0, all, tabs or none (default: merged)")
    @argument("--quiet", action="store_true", help="no header and footer; the same text on a loaded machine")
    @argument_group("run")
    @argument("--timeout", default="none", help="time limit: 3h, 90m, 600 or none (default: none)")
    @argument("--name", help="name of the run")
    @argument("--experiment", help="MLflow experiment (default: the active one, else named after the notebook)")
    @argument("--no-mlflow", action="store_true", help="do not track this run with MLflow")
    @argument("--resume", help="what a CheckpointManager restores: auto, must, never or a checkpoint's path")
    @argument("--env", action="append", default=[], help="K=V for the ranks only; can be repeated")
    @argument("--cold", action="store_true", help="start a new launcher first")
    @cell_magic
    def distributed(self, line: str, cell: str) -> None:
        """Run the cell on every rank, one process per GPU, with all of their output here."""
        options = _options(self._parse(line))
        if not cell.strip():
            msg = "%%distributed: the cell is empty"
            raise UsageError(msg)
        names = self._analyse(cell)
        if options.out is not None and not names.ends_with_expression:
            msg = f"--out {options.out}: the cell's last line is not an expression, so it has no value"
            raise UsageError(msg)
        from air_nb.session.kernel_state import cell_header
        from air_nb.session.launched import Launch

        launch = Launch(
            kind="cell",
            source=cell,
            names={name: self.shell.user_ns[name] for name in self._selected(names, options)},
            task={"header": cell_header(self.shell, cell), "out": options.out, "pull": list(options.pull)},
        )
        try:
            values = get_session().run(launch, options, self.shell)
        except (DeviceError, NestedLaunchError) as error:
            raise UsageError(str(error)) from None
        self._take_home(values, options, names)

    def _parse(self, line: str) -> argparse.Namespace:
        """As IPython's ``parse_argstring``, which would leave the quotes on ``--name "two words"``."""
        parsed: argparse.Namespace = self.distributed.parser.parse_args(_words("%%distributed", line))
        return parsed

    def _analyse(self, cell: str) -> CellNames:
        from air_nb.capture.names import cell_names
        from air_nb.session.kernel_state import cell_header

        try:
            return cell_names(cell, self.shell.transform_cell)
        except SyntaxError as error:
            raise _as_shown(error, cell_header(self.shell, cell), cell, self.shell) from None

    def _selected(self, names: CellNames, options: RunOptions) -> tuple[str, ...]:
        if options.inputs is None:
            from air_nb.capture.names import select_names

            return tuple(select_names(names.reads, self.shell.user_ns, hidden=self.shell.user_ns_hidden))
        missing = [name for name in options.inputs if name not in self.shell.user_ns]
        if missing:
            msg = f"--in {','.join(missing)}: not defined in this notebook"
            raise UsageError(msg)
        return options.inputs

    def _take_home(self, values: list[dict[str, Any]], options: RunOptions, names: CellNames) -> None:
        from air_nb.session.kernel_state import prompt_number

        if options.out is not None:
            self.shell.user_ns[options.out] = [value[RESULT] for value in values]
        missing = [name for name in options.pull if not any(name in value for value in values)]
        for name in options.pull:
            if name not in missing:
                self.shell.user_ns[name] = [value.get(name) for value in values]
        if missing:
            msg = f"--pull {','.join(missing)}: no rank has this name at the end of the cell"
            raise UsageError(msg)
        for name in names.assigns - {options.out, *options.pull}:
            self._assigned[name] = prompt_number(self.shell)

    def hint_at_pull(self, result: ExecutionResult) -> None:
        """After a cell: a NameError on what only the ranks have gets a hint (IPython's ``post_run_cell`` event)."""
        error = result.error_in_exec
        if isinstance(error, NameError) and error.name in self._assigned and error.name not in self.shell.user_ns:
            where = self._assigned[error.name]
            sys.stderr.write(
                f"hint: `{error.name}` was assigned on the ranks by the %%distributed cell [{where}]; "
                f"`--pull {error.name}` there fetches it, as a list with one value per rank\n"
            )

    @line_magic
    def air(self, line: str) -> None:
        """Answer status | gpus | runs | logs RUN [--rank R] [--tail N] | stacks RUN | stop RUN | sidebar | ui | doctor.

        status               the launcher and the live runs of this user
        gpus                 the GPUs, and who holds them
        runs                 the runs, newest first; --upload RUN sends MLflow what could not be sent when it ran,
                             --repair does that for all, and ends in MLflow what has died
        logs RUN             output of a run; --rank R of one rank only; --tail N the last N lines
        stacks RUN           where the Python code of every rank of a live run is, of any notebook of this user
        stop RUN             stop a run, of any notebook of this user
        sidebar              open the panel of GPUs, runs and checkpoints beside the notebook; again: close it.
                             AIR_NB_SIDEBAR=1 in the kernel's environment opens it with %load_ext
        ui                   MLflow's pages, on this machine, for the store that is set now
        doctor               what a run depends on, what is wrong with it, and how to fix it
        RUN is a name, an id or the beginning of an id.
        """
        arguments = _air_parser().parse_args(_words("%air", line))
        try:
            text = self._toggle_sidebar() if arguments.command == "sidebar" else _answer(arguments)
        except AirNbError as error:
            msg = f"%air {arguments.command}: {error}"
            raise UsageError(msg) from None
        except LookupError as error:
            msg = f"%air {arguments.command}: {error.args[0]}"
            raise UsageError(msg) from None
        except OSError as error:
            msg = (
                f"%air {arguments.command}: {error}; runs are kept in {home_path()}, AIR_NB_HOME chooses another place"
            )
            raise UsageError(msg) from None
        if text:
            sys.stdout.write(text if text.endswith("\n") else text + "\n")

    def _toggle_sidebar(self) -> str:
        from air_nb.session.commands import gpus_text

        gpus = gpus_text(get_session())
        if self.panel is None:
            return f"{gpus}\nThe panel of GPUs, runs and checkpoints needs Jupyter."
        return get_session().sidebar.toggle(self.panel.main_shell, gpus)


def _words(magic: str, line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        msg = f"{magic} {line}: {error}"
        raise UsageError(msg) from None


class _AirParser(argparse.ArgumentParser):
    """Reports as IPython's magics do, instead of ending the kernel."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(
            f"%air: {message}. Use %air status | gpus | runs | logs RUN | stacks RUN | stop RUN | sidebar | ui | "
            "doctor; `%air?` explains them."
        )


def _air_parser() -> _AirParser:
    parser = _AirParser(prog="%air", add_help=False)
    subparsers = parser.add_subparsers(dest="command", required=True, parser_class=_AirParser)
    for name in ("status", "gpus", "sidebar", "ui", "doctor"):
        subparsers.add_parser(name, add_help=False)
    runs = subparsers.add_parser("runs", add_help=False).add_mutually_exclusive_group()
    runs.add_argument("--upload", metavar="RUN")
    runs.add_argument("--repair", action="store_true")
    logs = subparsers.add_parser("logs", add_help=False)
    logs.add_argument("run")
    logs.add_argument("--rank", type=int)
    logs.add_argument("--tail", type=_line_count)
    for name in ("stacks", "stop"):
        subparsers.add_parser(name, add_help=False).add_argument("run")
    return parser


def _line_count(text: str) -> int:
    count = int(text)
    if count < 1:
        msg = f"{count}: the number must be 1 or more"
        raise argparse.ArgumentTypeError(msg)
    return count


def _answer(arguments: argparse.Namespace) -> str:
    from air_nb.session import commands, mlflow_state
    from air_nb.session.doctor import doctor_text
    from air_nb.session.ui import ui_text

    answers: dict[str, Callable[[], str]] = {
        "status": lambda: commands.status_text(get_session()),
        "gpus": lambda: commands.gpus_text(get_session()),
        "runs": lambda: _runs_answer(arguments),
        "ui": lambda: ui_text(get_session().pages, mlflow_state.tracking_uri(), _say),
        "doctor": lambda: doctor_text(get_session()),
        "logs": lambda: commands.logs_text(arguments.run, arguments.rank, arguments.tail),
        "stacks": lambda: commands.stacks_text(arguments.run),
        "stop": lambda: commands.stop_run(arguments.run),
    }
    return answers[arguments.command]()


def _runs_answer(arguments: argparse.Namespace) -> str:
    from air_nb.session import commands, upload

    if arguments.upload is not None:
        return upload.upload_text(get_session(), arguments.upload)
    return upload.repair_text(get_session()) if arguments.repair else commands.runs_text()


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _options(arguments: Any) -> RunOptions:
    try:
        return RunOptions(
            gpus=arguments.gpus,
            gpu_ids=_split(arguments.gpu_ids),
            nproc=arguments.nproc,
            device=arguments.device,
            gpu_type=arguments.gpu_type,
            inputs=_split(arguments.inputs),
            out=arguments.out,
            pull=_split(arguments.pull) or (),
            output=arguments.output,
            quiet=arguments.quiet,
            timeout_s=parse_timeout(arguments.timeout),
            name=arguments.name,
            experiment=arguments.experiment,
            tracking=not arguments.no_mlflow,
            resume=arguments.resume,
            env=parse_env(arguments.env),
            cold=arguments.cold,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def _split(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


class _CellSyntaxError(Exception):
    """A SyntaxError of the cell, shown as IPython shows one of any cell.

    For a real SyntaxError IPython would draw the frames of this magic; its ``_render_traceback_`` is not asked.
    """

    def __init__(self, error: SyntaxError, lines: list[str]) -> None:
        super().__init__(*error.args)
        self._lines = lines

    def _render_traceback_(self) -> list[str]:
        return self._lines


_CellSyntaxError.__name__ = "SyntaxError"  # what front ends show and nbclient compares


def _as_shown(error: SyntaxError, header: str, cell: str, shell: InteractiveShell) -> _CellSyntaxError:
    from air_nb.session.kernel_state import prompt_number

    error.filename = shell.compile.cache(header + cell, prompt_number(shell))
    error.lineno = (error.lineno or 1) + header.count("\n")
    return _CellSyntaxError(error, shell.SyntaxTB.structured_traceback(SyntaxError, error, None))


def load(shell: InteractiveShell) -> None:
    """Register the magics and start warming up."""
    problem = _unsupported(shell)
    if problem:
        raise UsageError(problem)
    magics = AirMagics(shell)
    shell.register_magics(magics)
    shell.magics_manager.register_function(_refuse_position, "line", "%distributed")
    shell.events.register("post_run_cell", magics.hint_at_pull)
    if "AIR_NB_RUN_ID" not in os.environ:
        get_session().warm()
        if hasattr(shell, "kernel"):
            magics.panel = PanelOffer(shell, lambda: get_session().sidebar.hub)
            magics.panel.offer()


def _refuse_position(_line: str) -> NoReturn:
    """IPython takes a ``%%distributed`` that is not on the first line for a line magic of the name ``%distributed``."""
    msg = (
        "%%distributed must be the first line of its cell; "
        "only cell magics such as %%time and %%capture may stand above it"
    )
    raise UsageError(msg)


def unload(shell: InteractiveShell) -> None:
    """Take the magics back and end the launcher."""
    for kind, name in (("cell", "distributed"), ("line", "air"), ("line", "%distributed")):
        magic = shell.magics_manager.magics[kind].pop(name, None)
        if magic is not None and kind == "cell":
            shell.events.unregister("post_run_cell", magic.__self__.hint_at_pull)
            if magic.__self__.panel is not None:
                magic.__self__.panel.withdraw()
    close_session()


def _unsupported(shell: InteractiveShell) -> str | None:
    """One sentence if air_nb can't work here."""
    if not sys.platform.startswith("linux"):
        return f"air_nb works on Linux; this is {sys.platform}"
    for distribution in ("ipython", "ipykernel", "torch"):
        if distribution == "ipykernel" and not hasattr(shell, "kernel"):
            continue
        needed = f"air_nb needs {distribution} {minimum_text(distribution)} or newer"
        try:
            found = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return f"{needed}, which is not installed"
        if is_too_old(distribution, found):
            return f"{needed}; {found} is installed"
    return None
