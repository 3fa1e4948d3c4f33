"""Text of the ranks in a real kernel: modes, folding, order, what is not text, and who prints when."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.kernel import running_kernel
from tests.support.screen import body, body_lines, headlines, on_ranks


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    with running_kernel(tmp_path_factory.mktemp("cwd"), env={"AIR_NB_DEVICE": "cpu"}) as kernel:
        kernel.ok("from air_nb.runtime import get_rank")
        yield kernel


THREE_LINES = """
    print("same")
    print("rank", get_rank())
    print("again")
"""
EACH_RANK = ["[0] rank 0", "[1] rank 1", "[2] rank 2", "[3] rank 3"]


def test_equal_lines_are_folded_and_different_ones_labelled(kernel):
    cell = kernel.ok(on_ranks(THREE_LINES, "--nproc 4 --quiet"))
    assert body_lines(cell) == ["[0-3] same", *EACH_RANK, "[0-3] again"]


def test_lines_of_ranks_that_run_in_step_are_folded_without_quiet_too(kernel):
    cell = kernel.ok(
        on_ranks("""
            import time
            import torch.distributed as dist
            from air_nb.runtime import init_process_group
            init_process_group()
            for step in range(10):
                dist.barrier()
                print("step", step)
                time.sleep(0.02)
        """)
    )
    lines = body_lines(cell)
    assert [line for line in lines if re.fullmatch(r"\[0-3\] step \d", line)], "no line was folded"
    for step in range(10):
        assert ranks_of(lines, f"step {step}") == [0, 1, 2, 3]


def test_some_ranks_fold_and_the_one_that_differs_is_labelled(kernel):
    cell = kernel.ok(on_ranks('print("odd one" if get_rank() == 2 else "most")', "--nproc 4 --quiet"))
    assert body_lines(cell) == ["[0-1,3] most", "[2] odd one"]


def test_header_and_footer_are_one_line_each_and_change_in_place(kernel):
    cell = kernel.ok(on_ranks('print("x")', "--nproc 2 --name calm-heron"))
    header, footer = headlines(cell)
    assert header.startswith("run calm-heron · 2 ranks on CPU (gloo)")
    assert header.endswith("FINISHED")
    assert re.fullmatch(r"FINISHED in \d+\.\d s", footer)
    kinds = [message["msg_type"] for _, message in cell.messages]
    # Two displays of ours in all: what changed later was an update.
    assert kinds.count("display_data") == 2
    assert kinds.count("update_display_data") >= 1


def test_two_cells_with_the_same_run_name_do_not_change_each_others_header(kernel):
    first, second = (kernel.ok(on_ranks("pass", "--nproc 1 --name twice")) for _ in range(2))
    assert display_ids(first).isdisjoint(display_ids(second))


def test_rank0_shows_the_text_of_rank_0_alone_as_it_is(kernel):
    cell = kernel.ok(on_ranks(THREE_LINES, "--nproc 4 --output rank0"))
    assert body_lines(cell) == ["same", "rank 0", "again"]
    assert len(headlines(cell)) == 2


def test_all_shows_every_line_with_its_rank_and_keeps_each_ranks_order(kernel):
    cell = kernel.ok(on_ranks(THREE_LINES, "--nproc 4 --output all"))
    lines = body_lines(cell)
    assert len(lines) == 12
    for rank in range(4):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] same", f"[{rank}] rank {rank}", f"[{rank}] again"]


def test_tabs_is_one_display_that_needs_no_kernel_at_the_end(kernel):
    cell = kernel.ok(on_ranks(THREE_LINES, "--nproc 2 --output tabs"))
    (display,) = body(cell)
    sections = [["same", "rank 0", "again"], ["same", "rank 1", "again"]]
    assert display["text"].split("\n") == [
        *("── rank 0: 3 lines, ended ──", *sections[0]),
        *("── rank 1: 3 lines, ended ──", *sections[1]),
    ]
    assert display["data"]["text/html"].count("<details") == 2
    assert "script" not in display["data"]["text/html"]


def test_none_shows_nothing_and_the_logs_have_it_all(kernel):
    cell = kernel.ok(on_ranks(THREE_LINES, "--nproc 4 --output none --name silent"))
    assert body(cell) == []
    assert kernel.ok("%air logs silent --rank 2").stream("stdout") == "same\nrank 2\nagain\n"


@pytest.mark.parametrize("mode", ["merged", "rank0", "all", "tabs", "none"])
def test_every_mode_shows_the_error_of_a_rank_after_its_output(kernel, mode):
    cell = kernel.run(on_ranks('print("before"); 1 / 0', f"--nproc 2 --output {mode}"))
    assert cell.reply_status == "error"
    assert "ZeroDivisionError" in cell.traceback
    kinds = [message["msg_type"] for _, message in cell.messages]
    assert set(kinds[kinds.index("error") + 1 :]) <= {"status"}
    *shown, error = body(cell)
    assert error["kind"] == "error"
    assert any("before" in output["text"] for output in shown) == (mode != "none")


@pytest.mark.parametrize("mode", ["merged", "rank0", "all"])
def test_quiet_is_streams_only(kernel, mode):
    cell = kernel.ok(on_ranks(THREE_LINES, f"--nproc 2 --quiet --output {mode}"))
    assert {output["kind"] for output in body(cell)} == {"stdout"}
    assert headlines(cell) == []


def test_quiet_gives_the_same_output_each_time_although_a_rank_is_late(kernel):
    source = """
        import time
        time.sleep(0.4 * get_rank())
        print("one")
        print("rank", get_rank())
        print("two")
    """
    cells = [kernel.ok(on_ranks(source, "--nproc 2 --quiet")) for _ in range(2)]
    assert body_lines(cells[0]) == body_lines(cells[1]) == ["[0-1] one", "[0] rank 0", "[1] rank 1", "[0-1] two"]


def test_prints_warnings_and_logging_of_one_rank_come_in_the_order_it_made_them(kernel):
    cell = kernel.ok(
        on_ranks(
            """
            import logging, sys, warnings
            print("1 print")
            warnings.warn("2 warning")
            print("3 print")
            logging.warning("4 log")
            print("5 print"); print("6 stderr", file=sys.stderr); print("7 print")
            """,
            "--nproc 2 --quiet",
        )
    )
    text = "\n".join(body_lines(cell))
    marks = ["1 print", "2 warning", "3 print", "4 log", "5 print", "6 stderr", "7 print"]
    assert [text.index(mark) for mark in marks] == sorted(text.index(mark) for mark in marks)
    kinds = {mark: output["kind"] for output in body(cell) for mark in marks if mark in output["text"]}
    assert [kinds[mark] for mark in marks] == ["stdout", "stderr"] * 3 + ["stdout"]


def test_root_logging_level_and_format_of_the_kernel_hold_on_the_ranks(kernel):
    kernel.ok("import logging; logging.basicConfig(level='INFO', format='%(levelname)s~%(message)s', force=True)")
    cell = kernel.ok(on_ranks('import logging; logging.info("ready"); logging.debug("hidden")', "--nproc 2 --quiet"))
    kernel.ok("logging.basicConfig(level='WARNING', force=True)")
    assert body_lines(cell) == ["[0-1] INFO~ready"]


def test_what_c_code_child_processes_and_raw_descriptors_write_is_shown(kernel):
    cell = kernel.ok(
        on_ranks(
            r"""
            import ctypes, os, subprocess
            libc = ctypes.CDLL(None)
            libc.printf(b"from printf\n")
            os.write(1, b"from os.write\n")
            os.system("echo from os.system")
            !echo from bang
            subprocess.run(["sh", "-c", "echo from subprocess; echo its stderr >&2"], check=True)
            libc.printf(b"last, no newline");
            """,
            "--nproc 2 --quiet --name native",
        )
    )
    assert [line for line in body_lines(cell) if "stderr" not in line] == [
        "[0-1] from printf",
        "[0-1] from os.write",
        "[0-1] from os.system",
        "[0-1] from bang",
        "[0-1] from subprocess",
        "[0-1] last, no newline",
    ]
    assert "its stderr" in cell.stream("stderr")
    assert "last, no newline" in kernel.ok("%air logs native --rank 1").stream()


def test_last_words_of_a_rank_that_dies_are_shown(kernel):
    cell = kernel.run(
        on_ranks(
            """
            import faulthandler, os
            print("last words", end="")
            os.write(2, b"and its stderr")
            faulthandler._sigsegv()
            """,
            "--nproc 1",
        )
    )
    assert "SIGSEGV" in cell.traceback
    assert "last words" in cell.stream("stdout")
    assert "and its stderr" in cell.stream("stderr")
    assert "Fatal Python error: Segmentation fault" in cell.stream("stderr")


def test_text_without_a_final_newline_stays_apart_from_the_footer(kernel):
    for options, expected in (("--nproc 1", ["half"]), ("--nproc 2 --output all", ["[0] half", "[1] half"])):
        cell = kernel.ok(on_ranks('print("half", end="")', options))
        assert sorted(body_lines(cell)) == expected
        assert len(headlines(cell)) == 2


def test_invalid_utf8_colours_and_nul_are_shown_in_a_way_that_breaks_nothing(kernel):
    cell = kernel.ok(
        on_ranks(
            r"""
            import os
            os.write(1, b"bad \xff\xfe bytes\n")
            print("\x1b[31mred\x1b[0m plain")
            print("a\x00b")
            print("é" * 3, "🙂")
            """,
            "--nproc 2 --quiet",
        )
    )
    assert body_lines(cell) == [
        "[0-1] bad \ufffd\ufffd bytes",
        "[0-1] \x1b[31mred\x1b[0m plain",
        "[0-1] a␀b",
        "[0-1] ééé 🙂",
    ]


def test_a_character_cut_in_two_by_separate_writes_is_put_together(kernel):
    cell = kernel.ok(
        on_ranks(
            r"""
            import os, time
            whole = "né🙂".encode()
            for byte in whole:
                os.write(1, bytes([byte]))
                time.sleep(0.03)
            """,
            "--nproc 1 --quiet",
        )
    )
    assert body_lines(cell) == ["né🙂"]


@pytest.mark.parametrize("size, options", [(1_000_000, "--nproc 4"), (20_000_000, "--nproc 1")])
def test_a_huge_line_is_cut_in_the_cell_and_whole_in_the_file(kernel, size, options):
    cell = kernel.ok(on_ranks(f'print("x" * {size}); print("next")', f"{options} --name huge{size}"))
    lines = body_lines(cell)
    cut = [line for line in lines if "more characters" in line]
    assert cut
    assert all(line.endswith("more characters") for line in cut)
    assert any("next" in line for line in lines)
    assert all(len(str(message["content"])) < 500_000 for _, message in cell.messages)
    assert log_file(kernel, f"huge{size}", 0).read_bytes() == b"x" * size + b"\nnext\n"


def test_lines_of_threads_and_forked_children_are_whole(kernel):
    kernel.ok(
        on_ranks(
            """
            import os, sys, threading
            def talk(who):
                for number in range(200):
                    sys.stdout.write(f"{who} says line {number}\\n")
            threads = [threading.Thread(target=talk, args=(f"thread {i}",)) for i in range(3)]
            [thread.start() for thread in threads]; [thread.join() for thread in threads]
            children = []
            for i in range(3):
                pid = os.fork()
                if pid == 0:
                    talk(f"child {i}"); os._exit(0)
                children.append(pid)
            [os.waitpid(pid, 0) for pid in children]
            """,
            "--nproc 1 --name chorus",
        )
    )
    written = Counter(log_file(kernel, "chorus", 0).read_text().splitlines())
    assert written == Counter(
        f"{kind} {i} says line {number}" for kind in ("thread", "child") for i in range(3) for number in range(200)
    )


def test_carriage_returns_by_hand_leave_the_last_state(kernel):
    source = """
        for percent in range(0, 101, 10):
            print(f"\\r{percent:3d} % done", end="")
        print()
        print("then this")
    """
    assert body_lines(kernel.ok(on_ranks(source, "--nproc 2 --quiet"))) == ["[0-1] 100 % done", "[0-1] then this"]
    assert body_lines(kernel.ok(on_ranks(source, "--nproc 1"))) == ["100 % done", "then this"]


def ranks_of(lines, text):
    """Ranks that a text was shown for, over all of its labels."""
    ranks: list[int] = []
    for line in lines:
        label, _, rest = line.partition("] ")
        if rest == text:
            for part in label.removeprefix("[").split(","):
                first, _, last = part.partition("-")
                ranks += range(int(first), int(last or first) + 1)
    return sorted(ranks)


def display_ids(cell):
    return {content["transient"]["display_id"] for content in cell.displays()}


def log_file(kernel, name, rank):
    """The file of one rank's stdout."""
    listing = kernel.ok(f"%air logs {name} --tail 1").stream("stdout")
    path = re.search(rf"--- rank {rank} \((.*)\)", listing)
    assert path
    return Path(path[1])
