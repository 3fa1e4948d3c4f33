"""Figures, HTML, tables, updates and clears of the ranks in a real kernel."""

from __future__ import annotations

import base64
import io

import pytest

from tests.support.kernel import running_kernel
from tests.support.screen import body, body_lines, headlines, on_ranks


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    with running_kernel(tmp_path_factory.mktemp("cwd"), env={"AIR_NB_DEVICE": "cpu"}) as kernel:
        kernel.ok("from air_nb.runtime import get_rank")
        yield kernel


@pytest.mark.parametrize("where", ["kernel", "ranks"])
def test_a_figure_of_rank_1_between_two_prints_keeps_its_place(kernel, where):
    pytest.importorskip("matplotlib")
    if where == "kernel":
        kernel.ok("%matplotlib inline\nimport matplotlib.pyplot as plt")
    cell = kernel.ok(
        on_ranks(
            f"""
            {"%matplotlib inline" if where == "ranks" else "pass"}
            import matplotlib.pyplot as plt
            print("before")
            if get_rank() == 1:
                plt.figure(figsize=(2, 1))
                plt.plot([1, 3, 2])
                plt.show()
            print("after")
            """,
            "--nproc 2 --quiet",
        )
    )
    assert body_lines(cell) == ["[0-1] before", "[1]", "<image/png>", "[0-1] after"]
    (figure,) = [output["data"]["image/png"] for output in body(cell) if output["data"]]
    assert png_size(figure)[0] > 100


def test_a_figure_left_open_is_shown_at_the_end_of_the_cell(kernel):
    pytest.importorskip("matplotlib")
    cell = kernel.ok(
        on_ranks(
            """
            %matplotlib inline
            import matplotlib.pyplot as plt
            figure, axes = plt.subplots(figsize=(2, 1))
            print("text")
            """,
            "--nproc 1",
        )
    )
    assert body_lines(cell) == ["text", "<image/png>"]


def test_equal_displays_are_shown_once_and_different_ones_with_their_ranks(kernel):
    cell = kernel.ok(
        on_ranks(
            """
            from IPython.display import HTML, display
            display(HTML("<b>all</b>"))
            display(HTML(f"<i>{get_rank() // 2}</i>"))
            """,
            "--nproc 4 --quiet",
        )
    )
    assert body_lines(cell) == ["[0-3]", "<text/html>", "[0-1]", "<text/html>", "[2-3]", "<text/html>"]
    pages = [output["data"]["text/html"] for output in body(cell) if output["data"]]
    assert pages == ["<b>all</b>", "<i>0</i>", "<i>1</i>"]


@pytest.mark.parametrize("mode", ["merged", "rank0", "all", "tabs"])
def test_a_display_comes_through_in_every_mode_that_shows_text(kernel, mode):
    cell = kernel.ok(on_ranks('from IPython.display import HTML\nHTML("<b>here</b>")', f"--nproc 2 --output {mode}"))
    assert "<b>here</b>" in [output["data"].get("text/html") for output in body(cell)]


def test_a_display_is_updated_in_place_by_the_rank_that_made_it(kernel):
    cell = kernel.ok(
        on_ranks(
            """
            import time
            from IPython.display import HTML, display
            handle = display(HTML(f"<i>rank {get_rank()}: 0</i>"), display_id=True)
            for step in range(1, 4):
                time.sleep(0.08)
                handle.update(HTML(f"<i>rank {get_rank()}: {step}</i>"))
            """,
            "--nproc 2",
        )
    )
    pages = [output["data"]["text/html"] for output in body(cell) if "text/html" in output["data"]]
    assert sorted(pages) == ["<i>rank 0: 3</i>", "<i>rank 1: 3</i>"]
    assert any(message["msg_type"] == "update_display_data" for _, message in cell.messages)


def test_ranks_that_use_the_same_display_id_do_not_overwrite_each_other(kernel):
    cell = kernel.ok(
        on_ranks(
            """
            from IPython.display import HTML, display, update_display
            display(HTML("<i>start</i>"), display_id="score")
            update_display(HTML(f"<i>{get_rank()}</i>"), display_id="score")
            """,
            "--nproc 2 --quiet",
        )
    )
    pages = [output["data"]["text/html"] for output in body(cell) if "text/html" in output["data"]]
    assert sorted(pages) == ["<i>0</i>", "<i>1</i>"]


def test_the_same_display_id_in_two_cells_does_not_change_the_first_cell(kernel):
    source = 'from IPython.display import HTML, display\ndisplay(HTML("<i>x</i>"), display_id="score")'
    first, second = (kernel.ok(on_ranks(source, "--nproc 1 --quiet")) for _ in range(2))
    ids = [{content["transient"]["display_id"] for content in cell.displays()} for cell in (first, second)]
    assert ids[0].isdisjoint(ids[1])


def test_a_table_comes_with_its_html(kernel):
    pytest.importorskip("pandas")
    cell = kernel.ok(on_ranks('import pandas as pd\npd.DataFrame({"loss": [1, 2]})', "--nproc 2 --quiet"))
    (table,) = [output for output in body(cell) if output["data"]]
    assert "<table" in table["data"]["text/html"]
    assert "loss" in table["text"]


def test_the_last_expression_is_echoed_once_when_all_ranks_have_the_same(kernel):
    assert body_lines(kernel.ok(on_ranks("6 * 7", "--nproc 4 --quiet"))) == ["[0-3] 42"]
    lines = body_lines(kernel.ok(on_ranks("get_rank() * 10", "--nproc 3 --quiet")))
    assert lines == ["[0] 0", "[1] 10", "[2] 20"]


@pytest.mark.parametrize(
    "source, options",
    [
        ("6 * 7;", ""),
        ("6 * 7;  # a comment", ""),
        ("None", ""),
        ("x = 1", ""),
        ("6 * 7", "--out answers"),
    ],
)
def test_nothing_is_echoed_with_a_semicolon_out_or_no_value(kernel, source, options):
    assert body(kernel.ok(on_ranks(source, f"--nproc 2 {options}"))) == []


def test_an_echo_after_prints_comes_after_them(kernel):
    assert body_lines(kernel.ok(on_ranks('print("first")\n"last"', "--nproc 2 --quiet"))) == [
        "[0-1] first",
        "[0-1] 'last'",
    ]


def test_clear_output_of_a_single_rank_leaves_the_last_frame_and_our_header(kernel):
    cell = kernel.ok(
        on_ranks(
            """
            import time
            from IPython.display import clear_output
            for frame in range(4):
                clear_output(wait=True)
                print("frame", frame)
                time.sleep(0.1)
            """,
            "--nproc 1",
        )
    )
    assert any(message["msg_type"] == "clear_output" for _, message in cell.messages)
    assert body_lines(cell) == ["frame 3"]
    assert len(headlines(cell)) == 2


def test_clear_output_of_one_of_many_ranks_leaves_the_others_output(kernel):
    cell = kernel.ok(
        on_ranks(
            """
            from IPython.display import clear_output
            print("everyone")
            if get_rank() == 1:
                clear_output()
            print("done")
            """,
            "--nproc 2 --quiet",
        )
    )
    assert not any(message["msg_type"] == "clear_output" for _, message in cell.messages)
    assert body_lines(cell) == ["[0-1] everyone", "[0-1] done"]


def test_text_and_displays_of_one_rank_alternate_as_it_made_them(kernel):
    cell = kernel.ok(
        on_ranks(
            """
            import sys
            from IPython.display import HTML, display
            for i in range(5):
                print("text", i)
                print("error", i, file=sys.stderr)
                display(HTML(f"<b>{i}</b>"))
            """,
            "--nproc 1 --quiet",
        )
    )
    expected = [part for i in range(5) for part in (f"text {i}", f"error {i}", f"<b>{i}</b>")]
    shown = [output["data"].get("text/html") or output["text"].strip() for output in body(cell)]
    assert shown == expected


def test_a_display_of_a_function_that_runs_on_the_ranks_comes_through(kernel):
    kernel.ok(
        """
        from air_nb import distributed
        @distributed(nproc=2, device="cpu")
        def show():
            from IPython.display import HTML, display
            display(HTML("<b>from a function</b>"))
        """
    )
    cell = kernel.ok("show.distributed();")
    assert "<b>from a function</b>" in [output["data"].get("text/html") for output in body(cell)]


def test_large_figures_of_four_ranks_all_arrive(kernel):
    cell = kernel.ok(
        on_ranks(
            """
            import os
            from IPython.display import Image, display
            png = b"\\x89PNG\\r\\n\\x1a\\n" + os.urandom(1_500_000)
            display(Image(data=png, format="png"))
            """,
            "--nproc 4",
        )
    )
    sizes = [len(base64.b64decode(output["data"]["image/png"])) for output in body(cell) if output["data"]]
    assert sizes == [1_500_008] * 4


def png_size(text):
    image = pytest.importorskip("matplotlib.image").imread(io.BytesIO(base64.b64decode(text)))
    return image.shape[1], image.shape[0]
