"""Output of ``@distributed`` in a plain Python script: no IPython, only text."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest

HEAD = """
    import sys, time
    from air_nb import distributed
    from air_nb.runtime import get_rank
"""


def script(folder, source):
    """Write a script; its lines in the file are those of ``HEAD``, then of ``source``."""
    path = folder / "train.py"
    path.write_text(textwrap.dedent(HEAD).lstrip() + textwrap.dedent(source))
    return [sys.executable, str(path)]


@pytest.fixture
def environment():
    return {**os.environ, "AIR_NB_DEVICE": "cpu"}


def run(command, environment):
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_lines_of_all_ranks_come_folded_and_the_values_come_back(tmp_path, environment):
    done = run(
        script(
            tmp_path,
            """
            @distributed(nproc=3, device="cpu", name="calm-otter")
            def train(x):
                print("same")
                print("rank", get_rank())
                print("a warning", file=sys.stderr)
                return x + get_rank()

            print("above")
            print(train.distributed(10))
            print("below", "IPython" in sys.modules)
            """,
        ),
        environment,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "above"
    assert lines[1].startswith("run calm-otter · 3 ranks on CPU")
    assert lines[-2:] == ["[10, 11, 12]", "below False"]
    assert re.fullmatch(r"FINISHED in \d+\.\d s", lines[-3])
    middle = lines[2:-3]
    assert sorted(line.partition("] ")[2] for line in middle if "rank" in line) == ["rank 0", "rank 1", "rank 2"]
    assert any("same" in line for line in middle)
    assert "a warning" in done.stderr


def test_all_lines_but_only_the_last_state_of_bars_go_into_a_file(tmp_path, environment):
    done = run(
        script(
            tmp_path,
            """
            @distributed(nproc=1, device="cpu")
            def lines():
                for i in range(5_000):
                    print("line", i)

            @distributed(nproc=4, device="cpu")
            def bars():
                from tqdm import tqdm
                for _ in tqdm(range(300), mininterval=0):
                    pass

            lines.distributed()
            bars.distributed()
            """,
        ),
        environment,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    # Nothing is stored here, so nothing is left out.
    assert [line for line in lines if line.startswith("line ")] == [f"line {i}" for i in range(5_000)]
    drawn = [line for line in (done.stdout + done.stderr).splitlines() if "%|" in line]
    assert sorted(bar[:3] for bar in drawn) == ["[0]", "[1]", "[2]", "[3]"]
    assert all("300/300" in bar for bar in drawn)


def test_a_failure_shows_the_ranks_own_line_and_fails_the_script(tmp_path, environment):
    done = run(
        script(
            tmp_path,
            """
            @distributed(nproc=2, device="cpu")
            def train():
                print("before")
                if get_rank() == 1:
                    raise ValueError("bad batch")
                time.sleep(60)

            train.distributed()
            print("must not come")
            """,
        ),
        environment,
    )
    assert done.returncode == 1
    assert "before" in done.stdout
    assert "must not come" not in done.stdout
    assert 'raise ValueError("bad batch")' in done.stderr
    assert "RankFailedError: rank 1 of 2: ValueError: bad batch" in done.stderr


def test_ctrl_c_raises_keyboard_interrupt_in_the_script(tmp_path, environment):
    command = script(
        tmp_path,
        """
        @distributed(nproc=2, device="cpu", output="all")
        def train():
            print("running")
            time.sleep(60)

        try:
            train.distributed()
        except KeyboardInterrupt:
            print("interrupted")
        """,
    )
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    shown = []
    for line in process.stdout:
        shown.append(line)
        if line == "[1] running\n":
            process.send_signal(signal.SIGINT)
            break
    rest, _ = process.communicate(timeout=60)
    assert rest.splitlines()[-1] == "interrupted"
    assert "KILLED" in rest
    assert process.returncode == 0
