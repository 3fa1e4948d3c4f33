"""Command line: ``python -m benchmarks NAME [--repeats N] [--quick]``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from benchmarks import (
    checkpoint,
    data,
    imports,
    launch,
    memory,
    monitor,
    overhead,
    results,
    stop,
    stream,
    tracking,
)
from benchmarks.harness import clean_environment
from benchmarks.machine import machine_facts
from benchmarks.report import Report, Settings

_BENCHMARKS: dict[str, Callable[[Settings], Report]] = {
    "imports": imports.run,
    "launch": launch.run,
    "stream": stream.run,
    "stop": stop.run,
    "results": results.run,
    "overhead": overhead.run,
    "memory": memory.run,
    "tracking": tracking.run,
    "checkpoint": checkpoint.run,
    "data": data.run,
    "monitor": monitor.run,
}


def main() -> None:
    """Run one benchmark, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=[*_BENCHMARKS, "all"])
    parser.add_argument("--repeats", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--quick", action="store_true", help="only see whether it works: one round, small sizes")
    parser.add_argument("--scaling", action="store_true", help="launch: 1 to 32 ranks, too")
    arguments = parser.parse_args()
    settings = Settings(arguments.repeats, arguments.quick, arguments.scaling)
    clean_environment()
    print(json.dumps({"machine": machine_facts()}), flush=True)
    names = list(_BENCHMARKS) if arguments.name == "all" else [arguments.name]
    reports = [_BENCHMARKS[name](settings) for name in names]
    facts = machine_facts()
    print(f"\n{facts['cores']} cores ({facts['cpu']}), {facts['memory_gib']} GiB, Python {facts['python']}, ", end="")
    print(f"torch {facts['torch']}, load average at the end {facts['load_average']}")
    for report in reports:
        rounds = len(settings.rounds)
        print(f"\n## {report.benchmark}: median (range) of {rounds} interleaved round{'s' if rounds > 1 else ''}\n")
        print(report.table())


if __name__ == "__main__":
    main()
