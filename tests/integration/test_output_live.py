"""Output while a run lasts, in a real kernel: bars, unfinished lines, floods, and which cell it lands in."""

from __future__ import annotations

import queue
import re
import textwrap
import time

import pytest

from tests.support.kernel import Cell, running_kernel
from tests.support.screen import body, body_lines, headlines, on_ranks, screen


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    with running_kernel(tmp_path_factory.mktemp("cwd"), env={"AIR_NB_DEVICE": "cpu"}) as kernel:
        kernel.ok(
            """
            import os, time
            from air_nb.runtime import get_rank
            def wait_for(path):
                while not os.path.exists(path):
                    time.sleep(0.01)
            """
        )
        yield kernel


# ------------------------------------------------------------------------------------------------------- bars


@pytest.mark.parametrize("library", ["tqdm", "tqdm.auto"])
def test_a_bar_on_four_ranks_moves_in_place_and_ends_as_four_lines(kernel, library):
    cell = kernel.ok(
        on_ranks(f"""
            from {library} import tqdm
            for _ in tqdm(range(1000), mininterval=0):
                time.sleep(0.0005)
        """)
    )
    lines = body_lines(cell)
    bars = [re.match(r"\[(\d)\] 100%\|█+\| 1000/1000 ", line) for line in lines]
    assert sorted(bar[1] for bar in bars if bar) == list("0123")
    assert len(lines) == 4
    assert cell.stream() == ""


def test_bars_are_updated_ten_times_a_second_however_often_they_are_drawn(kernel):
    cell = kernel.ok(
        on_ranks(
            """
            from tqdm import tqdm
            for _ in tqdm(range(4000), mininterval=0):
                time.sleep(0.0005)
            """,
            "--nproc 2",
        )
    )
    updates = [message for _, message in cell.messages if message["msg_type"] == "update_display_data"]
    assert 5 <= len(updates) <= 6 + 11 * (cell.idle_at - cell.sent_at)


def test_equal_bars_fold_to_one_line(kernel):
    cell = kernel.ok(
        on_ranks(
            """
            from tqdm import tqdm
            for _ in tqdm(range(50), bar_format="{l_bar}{bar}|"):
                pass
            """,
            "--nproc 4 --quiet",
        )
    )
    assert body_lines(cell) == ["[0-3] 100%|██████████|"]


@pytest.mark.parametrize("options", ["--nproc 1", "--nproc 1 --quiet", "--nproc 2 --output rank0"])
def test_a_bar_keeps_its_place_between_two_prints(kernel, options):
    cell = kernel.ok(
        on_ranks(
            """
            from tqdm import tqdm
            print("before")
            for _ in tqdm(range(50), bar_format="{l_bar}{bar}|"):
                pass
            print("after")
            """,
            options,
        )
    )
    assert body_lines(cell) == ["before", "100%|██████████|", "after"]


def test_nested_bars_end_as_one_line_each_and_those_that_do_not_stay_are_gone(kernel):
    source = """
        from tqdm.auto import trange
        for _ in trange(3, desc="outer", bar_format="{l_bar}{bar}|"):
            for _ in trange(20, desc="inner", leave=LEAVE, bar_format="{l_bar}{bar}|"):
                pass
        print("end")
    """
    gone = kernel.ok(on_ranks(source.replace("LEAVE", "False"), "--nproc 2 --quiet"))
    assert body_lines(gone) == ["[0-1] outer: 100%|██████████|", "[0-1] end"]
    stays = body_lines(kernel.ok(on_ranks(source.replace("LEAVE", "True"), "--nproc 1 --quiet")))
    assert stays.count("inner: 100%|██████████|") == 3
    assert stays.count("outer: 100%|██████████|") == 1
    assert stays[-1] == "end"
    assert len(stays) == 5


def test_tqdm_write_puts_its_line_above_the_bar(kernel):
    cell = kernel.ok(
        on_ranks(
            """
            from tqdm import tqdm
            for i in tqdm(range(3), bar_format="{l_bar}{bar}|"):
                tqdm.write(f"message {i}")
            """,
            "--nproc 1",
        )
    )
    assert body_lines(cell) == ["message 0", "message 1", "message 2", "100%|██████████|"]


# ------------------------------------------------------------------------------------------------- while it runs


@pytest.mark.parametrize("options", ["", "--output rank0", "--output all", "--output tabs", "--quiet"])
def test_the_first_line_is_there_while_the_run_lasts(kernel, tmp_path, options):
    cell = kernel.start(
        on_ranks(f'print("first"); wait_for({str(tmp_path / "go")!r}); print("second")', f"--nproc 2 {options}")
    )
    kernel.follow(cell, until=lambda cell: "first" in cell.text)
    (tmp_path / "go").touch()
    kernel.follow(cell)
    assert cell.text.index("first") < cell.text.index("second")


@pytest.mark.parametrize("options, prefix", [("--nproc 1", ""), ("--nproc 2", "[0-1] ")])
def test_an_unfinished_line_is_shown_while_the_run_lasts_and_completed_in_place(kernel, tmp_path, options, prefix):
    source = f'print("working...", end=""); wait_for({str(tmp_path / "go")!r}); print("done")'
    cell = kernel.start(on_ranks(source, options))
    kernel.follow(cell, until=lambda cell: f"{prefix}working..." in body_lines(cell))
    assert not cell.idle_at
    (tmp_path / "go").touch()
    kernel.follow(cell)
    assert [line for line in body_lines(cell) if line.startswith(prefix)] == [f"{prefix}working...done"]


def test_output_before_and_after_a_launch_stays_around_it(kernel):
    kernel.ok(decorated("def talk():\n    print('from the ranks')\n    return get_rank()", "nproc=2"))
    cell = kernel.ok("print('above'); got = talk.distributed(); print('below', got)")
    texts = [output["text"].strip() for output in screen(cell)]
    assert texts[0] == "above"
    assert texts[-1] == "below [0, 1]"
    assert "from the ranks" in "".join(texts[2:-2])
    assert [texts.index(line) for line in headlines(cell)] == [1, len(texts) - 2]


# --------------------------------------------------------------------------------------------------- which cell


def test_output_of_a_thread_lands_in_the_cell_that_launched_it(kernel, tmp_path):
    go = tmp_path / "go"
    kernel.ok(decorated(f"def talk():\n    print('early')\n    wait_for({str(go)!r})\n    print('late')", "nproc=2"))
    first = kernel.start("import threading; thread = threading.Thread(target=talk.distributed); thread.start()")
    take_messages(kernel, [first], until=lambda: "early" in first.text)
    second = kernel.start(f"print('mine'); open({str(go)!r}, 'w').close(); thread.join(); print('joined')")
    take_messages(kernel, [first, second], until=lambda: second.idle_at)
    assert [line for line in body_lines(second) if line] == ["mine", "joined"]
    assert {"early", "late"} <= {line.partition("] ")[2] for line in body_lines(first)}
    assert len(headlines(first)) == 2


def test_output_of_a_thread_lands_there_too_if_another_cell_ran_while_the_launcher_warmed_up(kernel):
    kernel.ok(decorated("def talk():\n    print('from a thread')", "nproc=1"))
    first = kernel.start(
        """
        import threading
        from air_nb.session.session import get_session
        old = get_session().launcher
        os.environ["TORCH_AIR_NB_TEST"] = "1"  # libraries may read it at import: a new launcher is started
        thread = threading.Thread(target=talk.distributed)
        thread.start()
        while get_session().launcher is old:
            time.sleep(0.01)
        """
    )
    take_messages(kernel, [first], until=lambda: first.idle_at)
    assert not first.text, "the launcher was warm already: this tests nothing"
    second = kernel.start("thread.join()")
    take_messages(kernel, [first, second], until=lambda: second.idle_at)
    assert second.text == ""
    assert body_lines(first) == ["from a thread"]


def test_output_of_a_thread_is_whole_while_the_kernels_main_thread_is_busy(kernel):
    kernel.ok(decorated("def count():\n    for i in range(300):\n        print('line', i)", "nproc=1, output='all'"))
    cell = kernel.ok(
        """
        import threading
        thread = threading.Thread(target=count.distributed)
        thread.start()
        while thread.is_alive():
            sum(range(1000))
        """
    )
    assert body_lines(cell) == [f"line {i}" for i in range(300)]


def test_capture_takes_all_of_it_as_text_and_the_next_launch_shows_again(kernel):
    source = """
        from tqdm import tqdm
        for _ in tqdm(range(50), bar_format="{l_bar}{bar}|"): pass
        print("kept")
        40 + 2
    """
    captured = kernel.ok("%%capture kept\n" + on_ranks(source, "--nproc 1"))
    assert screen(captured) == []
    assert kernel.value("kept.stderr") == repr("100%|██████████|\n")
    assert eval(kernel.value("kept.stdout.splitlines()[1:-1]")) == ["kept", "42"]
    assert kernel.value("kept.outputs") == "[]"
    assert body_lines(kernel.ok(on_ranks('print("shown")', "--nproc 2 --quiet"))) == ["[0-1] shown"]


def test_redirect_stdout_takes_the_output(kernel):
    kernel.ok(decorated("def talk():\n    print('redirected')", "nproc=2, output='all'"))
    cell = kernel.ok(
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as sink:\n    talk.distributed()"
    )
    assert body(cell) == []
    assert {"[0] redirected", "[1] redirected"} <= set(eval(kernel.value("sink.getvalue().splitlines()")))


# ------------------------------------------------------------------------------------------------------- floods


def test_a_flood_is_capped_in_the_cell_and_complete_in_the_files(kernel, test_environment):
    cell = kernel.ok(
        on_ranks('for i in range(20_000): print(f"rank {get_rank()} line {i}")', "--nproc 4 --name flood"),
        timeout_s=120,
    )
    lines = body_lines(cell)
    assert len(lines) <= 2_010
    marker = next(index for index, line in enumerate(lines) if line.startswith("… "))
    assert re.search(r"lines in .*/rank_", lines[marker])
    assert 900 <= marker <= 1_100, "the head is half of what is kept"
    assert any(line.endswith(" line 0") for line in lines[:marker])
    assert lines[-1].endswith(" line 19999")
    if "each of" not in lines[marker]:
        hidden = sum(int(count.replace(",", "")) for count in re.findall(r"([\d,]+) lines", lines[marker]))
        assert hidden + len(lines) - 1 == 80_000
    for rank in range(4):
        path = newest_run(test_environment) / f"rank_{rank}.out"
        assert path.read_text().splitlines() == [f"rank {rank} line {i}" for i in range(20_000)]


def test_the_note_about_hidden_lines_names_the_file(kernel):
    cell = kernel.ok(on_ranks("if get_rank() == 3:\n    for i in range(6_000): print(i)", "--nproc 4"))
    lines = body_lines(cell)
    (note,) = [line for line in lines if line.startswith("…")]
    count = re.fullmatch(r"… ([\d,]+) lines in (/.*/rank_3\.out)", note)
    assert count
    assert int(count[1].replace(",", "")) == 6_000 - (len(lines) - 1)


def test_the_kernel_answers_on_the_control_channel_during_a_flood(kernel, tmp_path):
    go = tmp_path / "go"
    cell = kernel.start(
        on_ranks(f"""
            number = 0
            while not os.path.exists({str(go)!r}):
                for _ in range(100):
                    print("line", number)
                    number += 1
        """)
    )
    kernel.follow(cell, until=lambda cell: "line 50" in cell.text)
    request = kernel.client.session.msg("kernel_info_request", {})
    kernel.client.control_channel.send(request)
    reply = kernel.client.get_control_msg(timeout=60)
    assert reply["parent_header"]["msg_id"] == request["header"]["msg_id"]
    assert reply["content"]["status"] == "ok"
    assert not cell.idle_at
    go.touch()
    assert kernel.follow(cell).reply_status == "ok"


def test_text_comes_in_at_most_a_hundred_messages_a_second(kernel):
    cell = kernel.ok(on_ranks("for i in range(900): print(i); time.sleep(0.002)", "--nproc 1"))
    streams = [message for _, message in cell.messages if message["msg_type"] == "stream"]
    assert 5 <= len(streams) <= 10 + 105 * (cell.idle_at - cell.sent_at)
    assert body_lines(cell) == [str(i) for i in range(900)]


def test_a_flood_stays_far_below_what_makes_the_server_drop_output(kernel):
    cell = kernel.ok(on_ranks("for i in range(20_000): print('x' * 200, i)"), timeout_s=120)
    assert len(cell.stream()) < 600_000
    sizes = [len(content["data"]["text/plain"]) for content in cell.displays()]
    assert max(sizes) <= 64 << 10


def decorated(source, arguments):
    return f"from air_nb import distributed\n@distributed({arguments})\n{textwrap.dedent(source)}"


def newest_run(home):
    return max(home.glob("runs/*/run.json"), key=lambda path: path.stat().st_mtime).parent


def take_messages(kernel, cells: list[Cell], until):
    """Sort messages by the cell that they belong to, also after it has ended."""
    by_id = {cell.msg_id: cell for cell in cells}
    end = time.monotonic() + 60
    while not until():
        assert time.monotonic() < end, [cell.text for cell in cells]
        try:
            message = kernel.client.get_iopub_msg(timeout=0.1)
        except queue.Empty:
            continue
        cell = by_id.get(message["parent_header"].get("msg_id"))
        if cell is not None:
            cell.messages.append((time.monotonic(), message))
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                cell.idle_at = time.monotonic()
