"""``%air status | gpus | runs | logs | stop`` in a real kernel."""

from __future__ import annotations

import pytest


def test_status_tells_of_the_launcher_and_the_live_runs(kernel):
    text = kernel.ok("%air status").text

    assert "launcher: warm (pid " in text
    assert "live runs: none" in text


def test_gpus_answers_on_any_machine(kernel):
    assert kernel.ok("%air gpus").text.strip()


def test_runs_lists_state_ranks_and_id_newest_first(kernel):
    kernel.ok("%%distributed --nproc 2 --name listed-one\npass")
    kernel.run("%%distributed --nproc 3 --name listed-two\nraise ValueError")

    lines = [line for line in kernel.ok("%air runs").text.splitlines() if line.startswith("listed-")]

    assert [line.split()[:2] for line in lines] == [["listed-two", "FAILED"], ["listed-one", "FINISHED"]]
    assert "3 cpu ranks" in lines[0]
    assert "2 cpu ranks" in lines[1]


@pytest.fixture(scope="module")
def logged(kernel):
    kernel.ok(
        "%%distributed --nproc 2 --name logged --output none\nimport os, sys\n"
        "for i in range(5):\n    print('line', i, 'of', os.environ['RANK'])\nprint('to stderr', file=sys.stderr)"
    )


def test_logs_of_all_ranks_have_what_the_cell_did_not_show(kernel, logged):
    text = kernel.ok("%air logs logged").text

    assert text.count("--- rank ") == 2
    for rank in range(2):
        assert f"line 4 of {rank}" in text
    assert text.count("to stderr") == 2


def test_logs_of_one_rank_and_its_last_lines(kernel, logged):
    text = kernel.ok("%air logs logged --rank 1 --tail 3").text

    assert text.splitlines() == ["line 3 of 1", "line 4 of 1", "to stderr"]


def test_logs_by_the_beginning_of_an_id(kernel, logged):
    run_id = next(line for line in kernel.ok("%air runs").text.splitlines() if line.startswith("logged ")).split()[-1]

    assert "line 0 of 0" in kernel.ok(f"%air logs {run_id}").text


_BAD = {
    "": "%air: the following arguments are required: command. Use %air status | gpus | runs",
    "nonsense": "%air: argument command: invalid choice: 'nonsense'",
    "logs": "%air: the following arguments are required: run",
    "logs nowhere": "%air logs: ",
    "logs logged --rank 9": "%air logs: run logged has ranks 0 to 1",
    "logs logged --rank one": "%air: argument --rank: invalid int value: 'one'",
    "logs logged --tail -1": "--tail",
    "stop nowhere": "%air stop: ",
    "logs 'logged": "%air logs 'logged: No closing quotation",
}


@pytest.mark.parametrize("line,message", _BAD.items(), ids=_BAD)
def test_a_wrong_command_is_a_one_line_usage_error(kernel, logged, line, message):
    cell = kernel.run(f"%air {line}")

    assert cell.reply_status == "error"
    assert cell.text.startswith("UsageError: ")
    assert message in cell.text
    assert len(cell.text.strip().splitlines()) == 1


def test_stop_of_an_ended_run_says_so(kernel, logged):
    assert "run logged has ended already: FINISHED" in kernel.ok("%air stop logged").text


def test_stop_ends_a_run_of_another_thread_and_its_caller_gets_an_error(kernel):
    kernel.ok("""
import threading, time
from air_nb import distributed
@distributed(nproc=2, device="cpu", name="endless", output="none")
def endless():
    while True:
        time.sleep(0.05)
caught = []
def launch():
    try:
        endless.distributed()
    except BaseException as error:
        caught.append(error)
thread = threading.Thread(target=launch)
thread.start()
""")
    kernel.ok(
        "end = time.time() + 60\nimport io, contextlib\nseen = ''\nwhile 'RUNNING' not in seen and time.time() < end:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        get_ipython().run_line_magic('air', 'status')\n"
        "    seen = out.getvalue()"
    )
    assert "endless" in kernel.value("seen")

    assert "run endless was stopped" in kernel.ok("%air stop endless").text

    kernel.ok("thread.join(30)\nassert not thread.is_alive()")
    assert kernel.value("[type(error).__name__ for error in caught]") == "['RunStoppedError']"
    assert "live runs: none" in kernel.ok("%air status").text


def test_help_explains_the_command(kernel):
    assert kernel.ok("%air?").reply_status == "ok"
