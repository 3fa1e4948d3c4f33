"""``python -m air_nb.checkpoint ls|verify|show|prune``: look at checkpoints from a terminal, without torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from air_nb.checkpoint.catalog import CheckpointInfo, find_latest_valid, list_checkpoints, prune, verify
from air_nb.checkpoint.commit import GRACE_S, read_manifest
from air_nb.checkpoint.manifest import COMMIT_FILE, METADATA_FILE, Manifest
from air_nb.checkpoint.restricted import Entry, load_layout
from air_nb.checkpoint.store import open_store
from air_nb.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["main"]

_COLUMNS = ("step", "state", "created (UTC)", "size", "ranks", "run", "path")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 1 if a checkpoint is damaged or there is none, 2 for an error."""
    options = _parser().parse_args(arguments)
    try:
        lines, is_good = _COMMANDS[options.command](options)
        for line in lines:
            sys.stdout.write(line + "\n")
    except (CheckpointError, OSError, ValueError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    return 0 if is_good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m air_nb.checkpoint", description="Look at checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("root", help="directory or URL of all checkpoints, or of one (verify, show)")
        return added

    command("ls", "List the checkpoints, the newest first.")
    verify_ = command("verify", "Check that all files have the sizes that were committed.")
    verify_.add_argument("--deep", action="store_true", help="read every byte and compare the digests, too")
    command("show", "Show the manifest, and the keys, shapes and types, of one checkpoint (the newest valid one).")
    prune_ = command("prune", "Delete old checkpoints, and what was never completed; 2 that verify always stay.")
    prune_.add_argument("--keep", type=int, required=True, help="number of checkpoints to keep")
    prune_.add_argument("--dry-run", action="store_true", help="only tell what would be deleted")
    prune_.add_argument(
        "--grace",
        type=float,
        default=GRACE_S,
        metavar="S",
        help="seconds for which an incomplete one must not have changed, if its writer can't be asked (%(default)g)",
    )
    return parser


def _ls(options: argparse.Namespace) -> tuple[Iterable[str], bool]:
    found = list_checkpoints(options.root)
    return _table([_COLUMNS, *map(_row, found)]) if found else [_none_in(options.root)], bool(found)


def _row(info: CheckpointInfo) -> tuple[str, ...]:
    return (
        _or_dash(info.step),
        info.state.value + (f": {info.reason}" if info.reason else ""),
        "-" if info.created_at is None else _time(info.created_at),
        _size(info.size_bytes),
        _or_dash(info.world_size),
        info.run_name or info.run_id or "-",
        info.path,
    )


def _verify(options: argparse.Namespace) -> tuple[Iterable[str], bool]:
    paths = [options.root] if _is_checkpoint(options.root) else [info.path for info in list_checkpoints(options.root)]
    if not paths:
        return [_none_in(options.root)], False
    verdicts = {path: verify(path, deep=options.deep) for path in paths}
    lines = [f"{path}: {'; '.join(verdict.problems) or 'ok'}" for path, verdict in verdicts.items()]
    return lines, all(verdict.ok for verdict in verdicts.values())


def _show(options: argparse.Namespace) -> tuple[Iterable[str], bool]:
    path = options.root
    if not _is_checkpoint(path):
        newest = find_latest_valid(path)
        if newest is None:
            raise CheckpointNotFoundError(_none_in(path))
        path = newest.path
    store = open_store(path)
    manifest = read_manifest(store)
    layout = load_layout(store.read(METADATA_FILE))
    head = [path, *(_manifest_lines(manifest) if manifest else ["  no manifest: saved with torch's own writer"])]
    keys = [("key", "type", "shape", "shards"), *(_key(*item) for item in sorted(layout.entries.items()))]
    return [*head, "", *_table(keys)], True


def _manifest_lines(manifest: Manifest) -> Iterator[str]:
    yield f"  step {_or_dash(manifest.step)}, {_time(manifest.created_at)} UTC, {manifest.world_size} rank(s)"
    yield f"  run {manifest.run_name or '-'} ({manifest.run_id or '-'}), MLflow run {manifest.mlflow_run_id or '-'}"
    yield "  " + ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()))
    yield f"  data {manifest.data}"
    for name, value in sorted(manifest.extra.items()):
        yield f"  {name} {value}"
    for name, record in sorted(manifest.files.items()):
        yield f"  {name}  {_size(record.size_bytes)}  {record.algorithm} {record.digest}"


def _key(key: str, entry: Entry) -> tuple[str, ...]:
    shape = "-" if entry.shape is None else "x".join(map(str, entry.shape)) or "scalar"
    return key, entry.dtype or "object", shape, str(entry.shards)


def _prune(options: argparse.Namespace) -> tuple[Iterable[str], bool]:
    gone = prune(options.root, options.keep, dry_run=options.dry_run, grace_s=options.grace)
    word = "would delete" if options.dry_run else "deleted"
    return [f"{word} {path}" for path in gone] or ["nothing to delete"], True


_COMMANDS = {"ls": _ls, "verify": _verify, "show": _show, "prune": _prune}


def _is_checkpoint(path: str) -> bool:
    return bool({COMMIT_FILE, METADATA_FILE} & open_store(path).list().keys())


def _none_in(root: str) -> str:
    return f"no checkpoint in {root}"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _size(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:  # noqa: PLR2004 - the next unit
            break
        size, unit = size / 1024, larger
    return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


if __name__ == "__main__":
    raise SystemExit(main())
