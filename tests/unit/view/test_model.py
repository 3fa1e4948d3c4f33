from __future__ import annotations

import io
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from air_nb.protocol.events import RankBegan, RankEnded, Rich, Text
from air_nb.tracking.links import Link
from air_nb.view.actions import Print, Show, Update
from air_nb.view.rich import WIDGET_VIEW

PNG = {"image/png": "aGVsbG8=", "text/plain": "<Figure>"}

# ---------------------------------------------------------------------------------------------------------- merged


def test_equal_lines_fold_and_others_are_labelled(make_cell):
    cell = make_cell(8)
    for rank in range(8):
        cell.out(rank, f"epoch 1\nloss {0.41 if rank == 3 else 0.4}\n")
    cell.finish()
    assert cell.lines == ["[0-7] epoch 1", "[0-2,4-7] loss 0.4", "[3] loss 0.41"]


def test_line_of_one_rank_is_shown_after_150_ms(make_cell):
    cell = make_cell(2).out(0, "hello\n")
    assert cell.text == ""
    assert cell.model.next_deadline(cell.now) == pytest.approx(cell.now + 0.15)
    cell.wait(0.15)
    assert cell.text == "[0] hello\n"
    assert cell.model.next_deadline(cell.now) is None


def test_lines_wait_for_ranks_that_have_not_begun_so_that_they_fold_with_theirs(make_cell):
    cell = make_cell(2, begun=False).feed(RankBegan(0)).out(0, "hello\n").wait(0.5)
    assert cell.text == ""
    cell.feed(RankBegan(1)).wait(0.1).out(1, "hello\n")
    assert cell.text == "[0-1] hello\n"


def test_lines_go_150_ms_after_the_last_rank_has_begun(make_cell):
    cell = make_cell(2, begun=False).feed(RankBegan(0)).out(0, "hello\n").wait(0.5).feed(RankBegan(1)).wait(0.15)
    assert cell.text == "[0] hello\n"


def test_lines_go_after_a_second_if_a_rank_does_not_begin(make_cell):
    cell = make_cell(2, begun=False).feed(RankBegan(0)).out(0, "hello\n").wait(0.99)
    assert cell.text == ""
    assert cell.wait(0.02).text == "[0] hello\n"


def test_streams_are_kept(make_cell):
    cell = make_cell(2)
    for rank in (0, 1):
        cell.out(rank, "a\n").out(rank, "b\n", "stderr").out(rank, "c\n")
    assert cell.outputs == [["stdout", "[0-1] a\n"], ["stderr", "[0-1] b\n"], ["stdout", "[0-1] c\n"]]


def test_fold_of_all_is_one_message(make_cell):
    cell = make_cell(2).out(0, "a\nb\nc\n")
    assert cell.feed(Text(1, "stdout", "a\nb\nc\n")).actions == [Print("stdout", "[0-1] a\n[0-1] b\n[0-1] c\n")]


def test_rank_that_has_ended_is_not_waited_for(make_cell):
    cell = make_cell(2).end(1).out(0, "alone\n")
    assert cell.text == "[0] alone\n"


def test_unfinished_line_of_a_rank_that_ends_is_shown(make_cell):
    assert make_cell(1).out(0, "no newline").end(0).finish().text.rstrip("\n") == "no newline"
    assert make_cell(2).out(0, "no newline").end(0, 1).text == "[0] no newline\n"


_texts = st.lists(
    st.lists(st.sampled_from(["a", "b", "", "loss 0.1", "x" * 50, "é\x1b[31mred\x1b[0m"]), max_size=8).map(
        lambda lines: "".join(line + "\n" for line in lines)
    ),
    min_size=1,
    max_size=4,
)


def schedule(texts: list[str], random) -> list[Text]:
    """Each rank's text cut at random places, the ranks interleaved at random."""
    pending = []
    for rank, text in enumerate(texts):
        edges = sorted({0, len(text), *(random.randint(0, len(text)) for _ in range(5))})
        pending.append([Text(rank, "stdout", text[a:b]) for a, b in pairwise(edges)])
    events = []
    while any(pending):
        events.append(random.choice([chunks for chunks in pending if chunks]).pop(0))
    return events


def lines_of(rank: int, shown: list[str], ranks: int) -> list[str]:
    """What this rank printed, read back from the cell."""
    if ranks == 1:
        return shown
    found = []
    for line in shown:
        label, _, text = line.partition("] ")
        for part in label[1:].split(","):
            first, _, last = part.partition("-")
            if int(first) <= rank <= int(last or first):
                found.append(text)
    return found


@settings(deadline=None)
@given(_texts, st.randoms(use_true_random=False), st.booleans(), st.sampled_from(["merged", "all"]), st.booleans())
def test_nothing_is_lost_and_each_ranks_order_is_kept(make_cell, texts, random, quiet, mode, live):
    cell = make_cell(len(texts), mode, quiet=quiet, live=live)
    for event in schedule(texts, random):
        cell.feed(event)
        if random.random() < 0.2:
            cell.wait(random.choice([0.001, 0.1, 0.2]))
    cell.finish()
    for rank, text in enumerate(texts):
        shown = lines_of(rank, cell.text.split("\n")[:-1], len(texts))
        if live or quiet:
            assert shown == text.split("\n")[:-1]
        else:  # a line that is long in coming is shown in pieces
            assert "".join(shown) == text.replace("\n", "")


@settings(deadline=None)
@given(st.integers(1, 4), _texts, st.randoms(use_true_random=False))
def test_quiet_output_does_not_depend_on_interleaving_when_all_ranks_print_the_same(make_cell, ranks, texts, random):
    text = "".join(texts)
    cell = make_cell(ranks, quiet=True)
    for event in schedule([text] * ranks, random):
        cell.feed(event)
        cell.wait(random.choice([0, 0.3]))
    cell.finish()
    prefix = "" if ranks == 1 else f"[0-{ranks - 1}] "
    assert cell.text == "".join(f"{prefix}{line}\n" for line in text.split("\n")[:-1])


@settings(deadline=None)
@given(_texts, st.randoms(use_true_random=False))
def test_quiet_output_does_not_depend_on_interleaving_when_ranks_differ(make_cell, texts, random):
    def run(events):
        cell = make_cell(len(texts), quiet=True)
        for event in events:
            cell.feed(event).wait(random.choice([0, 0.3]))
        return cell.finish().text

    in_order = [Text(rank, "stdout", text) for rank, text in enumerate(texts)]
    assert run(schedule(texts, random)) == run(in_order)


def test_quiet_lines_wait_for_a_slow_rank_but_not_for_ever(make_cell):
    cell = make_cell(2, quiet=True).out(0, "epoch 1\n").wait(29)
    assert cell.text == ""
    cell.wait(1)
    assert cell.text == "[0] epoch 1\n"


def test_quiet_run_has_no_header_footer_or_display(make_cell):
    cell = make_cell(2, quiet=True)
    cell.draw(cell.model.header("run calm-otter", cell.now))
    cell.out(0, "\r 50%\r100%\n", "stderr").out(1, "\r 50%\r100%\n", "stderr").end(0, 1).finish()
    cell.draw(cell.model.footer("FINISHED", cell.now))
    assert cell.actions == [Print("stderr", "[0-1] 100%\n")]


# ------------------------------------------------------------------------------------------------------ other modes


def test_rank0_shows_rank_0_without_prefix(make_cell):
    cell = make_cell(4, "rank0").out(1, "no\n").out(0, "yes\n").rich(2, PNG)
    assert cell.finish().text == "yes\n"


def test_all_shows_every_line_at_once(make_cell):
    cell = make_cell(2, "all").out(1, "a\nb").out(0, "a\n")
    assert cell.text == "[1] a\n[0] a\n"
    assert cell.end(1).text == "[1] a\n[0] a\n[1] b\n"


def test_none_shows_nothing(make_cell):
    cell = make_cell(2, "none").out(0, "a\n").rich(0, PNG).out(1, "\r1%").wait(1).end(0, 1).finish()
    assert cell.actions == []


@pytest.mark.parametrize("live", [True, False])
def test_single_rank_shows_text_as_it_comes(make_cell, live):
    cell = make_cell(1, live=live).out(0, "loading")
    assert cell.actions == [Print("stdout", "loading")]
    cell.out(0, "... done\nwarn", "stdout").out(0, "ing\n", "stderr")
    assert cell.outputs == [["stdout", "loading... done\nwarn"], ["stderr", "ing\n"]]


def test_single_rank_on_a_terminal_passes_everything_through(make_cell):
    cell = make_cell(1, live=False, tty=True, max_lines=None)
    cell.out(0, "\r 1%").out(0, "\r 2%\x1b[A\x00\r").out(0, "\nend")
    assert "".join(action.text for action in cell.finish().actions) == "\r 1%\r 2%\x1b[A\x00\r\nend"


# ---------------------------------------------------------------------------------------------------- partial lines


def test_unfinished_line_is_shown_after_half_a_second(make_cell):
    cell = make_cell(2).out(1, "continue? ").wait(0.49)
    assert cell.text == ""
    cell.wait(0.01)
    assert cell.text.rstrip("\n") == "[1] continue? "
    cell.out(1, "yes\n").end(0, 1).finish()
    assert cell.text == "[1] continue? yes\n"


def test_unfinished_line_without_live_displays_is_shown_in_fewer_and_fewer_pieces(make_cell):
    cell = make_cell(2, "all", live=False)
    for _ in range(40):
        cell.out(0, ".").wait(0.1)
    cell.out(0, "\nend\n").finish()
    assert cell.text.replace("[0] ", "").replace("\n", "") == "." * 40 + "end"
    assert len(cell.lines) <= 6
    assert cell.lines[-1] == "[0] end"


def test_unfinished_line_in_a_quiet_run_waits(make_cell):
    cell = make_cell(2, quiet=True).out(0, "a").wait(5)
    assert cell.model.next_deadline(cell.now) is None
    cell.out(0, "b\n").end(0, 1)
    assert cell.text == "[0] ab\n"


# -------------------------------------------------------------------------------------------------------------- bars


class _Recorder(io.StringIO):
    def __init__(self):
        super().__init__()
        self.chunks = []

    def write(self, text):
        self.chunks.append(text)
        return len(text)


def tqdm_chunks(steps=100, **options) -> list[str]:
    file = _Recorder()
    for _ in tqdm(range(steps), file=file, mininterval=0, **options):
        pass
    return file.chunks


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("mode", ["merged", "all"])
def test_tqdm_on_four_ranks_ends_as_four_final_bars(make_cell, live, mode):
    cell = make_cell(4, mode, live=live)
    for chunks in zip(*(tqdm_chunks(desc=f"rank {rank}") for rank in range(4)), strict=True):
        for rank, chunk in enumerate(chunks):
            cell.out(rank, chunk, "stderr")
        cell.wait(0.01)
    cell.end(0, 1, 2, 3).finish()
    assert sorted(line.split("|")[0] for line in cell.lines) == [f"[{r}] rank {r}: 100%" for r in range(4)]
    if not live:
        assert all(isinstance(action, Print) for action in cell.actions)


def test_live_bars_are_one_line_per_rank_folded_when_equal_and_not_too_often(make_cell):
    cell = make_cell(3)
    for step in range(100):
        for rank in range(3):
            cell.out(rank, f"\r{step}%" if rank < 2 else "\rslow", "stderr")
        cell.wait(0.01)
    assert cell.lines == ["[0-1] 99%", "[2] slow"]
    updates = [action for action in cell.actions if isinstance(action, Update)]
    assert 5 <= len(updates) <= 11
    assert sum(isinstance(action, Show) for action in cell.actions) == 1


def test_finished_bar_does_not_vanish_while_it_waits_for_the_others(make_cell):
    cell = make_cell(2).out(0, "\r 50%", "stderr").out(1, "\r 10%", "stderr").wait(0.2)
    cell.out(0, "\r100%\n", "stderr").out(0, "next\n")
    for step in range(30):
        cell.out(1, f"\r {step}%", "stderr").wait(0.01)
        assert "[0] 50%" in cell.text.replace("  ", " ") or "[0] 100%" in cell.text


def test_text_goes_on_in_the_block_in_the_order_of_the_rank(make_cell):
    cell = make_cell(1).out(0, "before\n")
    for epoch in range(3):
        cell.out(0, f"\repoch {epoch}: 0%", "stderr").wait(0.3).out(0, f"\repoch {epoch}: 100%\n", "stderr")
        cell.out(0, f"loss {epoch}\n").wait(0.3)
    cell.finish()
    assert cell.lines == ["before", *(line for e in range(3) for line in (f"epoch {e}: 100%", f"loss {e}"))]
    assert len(cell.outputs) == 2


def test_bar_that_clears_itself_leaves_nothing(make_cell):
    cell = make_cell(2)
    for rank in range(2):
        for chunk in tqdm_chunks(steps=5, leave=False):
            cell.out(rank, chunk, "stderr").wait(0.05)
        cell.out(rank, "done\n")
    assert cell.wait(1).end(0, 1).finish().text.strip() == "[0] done\n[1] done"


def test_windows_line_ends_are_lines_and_no_bars(make_cell):
    cell = make_cell(2)
    for rank in range(2):
        cell.out(rank, "a\r").out(rank, "\nb\r\n")
    assert cell.text == "[0-1] a\n[0-1] b\n"
    assert all(isinstance(action, Print) for action in cell.actions)


# -------------------------------------------------------------------------------------------------------------- caps


def numbered(count: int, width=0) -> str:
    return "".join(f"line {index}{'x' * width}\n" for index in range(count))


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("chunk", [1 << 10, 1 << 30])
@pytest.mark.parametrize("ranks, mode", [(1, "merged"), (2, "merged"), (2, "all"), (3, "rank0")])
def test_long_output_is_kept_as_head_and_tail_with_a_count_between(make_cell, live, chunk, ranks, mode):
    cell = make_cell(ranks, mode, live=live)
    text = numbered(50_000)
    for start in range(0, len(text), chunk):
        for rank in range(ranks):
            cell.out(rank, text[start : start + chunk])
        cell.wait(0.001)
    cell.end(*range(ranks)).finish()
    lines = cell.lines
    assert len(lines) <= 2_001
    assert lines[0].endswith("line 0")
    assert lines[-1].endswith("line 49999")
    marker = next(line for line in lines if line.startswith("…"))
    assert lines.index(marker) == 1_000
    # Every line is either shown or counted, for each rank.
    shown = [line for line in lines if line is not marker]
    for rank in range(1 if mode == "rank0" else ranks):
        single = ranks == 1 or mode == "rank0"
        mine = len(shown) if single else len(lines_of(rank, shown, ranks))
        counts = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) lines", marker)]
        assert any(mine + count == 50_000 for count in counts)


def test_marker_names_the_files(make_cell):
    cell = make_cell(2, "all", directory="/logs/run").out(1, numbered(5_000)).finish()
    assert [line for line in cell.lines if line[0] == "…"] == ["… 3,000 lines in /logs/run/rank_1.out"]
    cell = make_cell(2, quiet=True, directory="/logs/run")
    for rank in range(2):
        cell.out(rank, numbered(5_000))
    assert [line for line in cell.finish().lines if line[0] == "…"] == ["… 3,000 lines in each of rank_[0-1].out"]


def test_below_the_cap_nothing_is_left_out_whatever_the_bars_do(make_cell):
    cell = make_cell(1)
    for index in range(900):
        cell.out(0, f"\rbar {index}", "stderr").out(0, "y" * 100 + f" line {index}\n").wait(0.03)
    cell.out(0, "\n", "stderr").finish()
    assert [line.split()[-1] for line in cell.lines if "line" in line] == [str(index) for index in range(900)]
    assert max(len(data["text/plain"]) for key, data in cell.outputs if key not in ("stdout", "stderr")) < 1 << 16


def test_terminal_has_no_cap(make_cell):
    cell = make_cell(2, "all", live=False, max_lines=None).out(0, numbered(30_000)).finish()
    assert len(cell.lines) == 30_000


def test_blocks_and_streams_stay_small(make_cell):
    cell = make_cell(4, "all")
    for _ in range(30):
        for rank in range(4):
            cell.out(rank, numbered(300, width=400))
        cell.wait(0.1)
    cell.end(0, 1, 2, 3).finish()
    for action in cell.actions:
        if isinstance(action, Show | Update):
            assert len(action.data["text/plain"]) <= 1 << 16
    assert sum(len(action.text) for action in cell.prints) <= 1 << 20
    assert len(cell.text) < 1 << 20


def test_long_line_without_a_newline_is_cut(make_cell):
    cell = make_cell(2)
    for _ in range(20):
        cell.out(0, "x" * 1_000_000)
    cell.end(0, 1).finish()
    assert len(cell.text) < 70_000
    assert "more characters" in cell.text


def test_megabyte_lines_of_eight_ranks_do_not_flood_the_server(make_cell):
    cell = make_cell(8)
    for rank in range(8):
        cell.out(rank, f"{rank}" * 1_000_000 + "\n")
    cell.end(*range(8)).finish()
    assert sum(len(action.text) for action in cell.prints) < 1_000_000
    assert [line[:5] for line in cell.lines] == [f"[{rank}] {rank}" for rank in range(8)]


# -------------------------------------------------------------------------------------------------------------- rich


def test_figure_keeps_its_place_between_prints(make_cell):
    cell = make_cell(2).out(1, "before\n").rich(1, PNG).out(1, "after\n").end(0, 1).finish()
    assert cell.outputs == [["stdout", "[1] before\n[1]\n"], [None, PNG], ["stdout", "[1] after\n"]]


def test_figure_keeps_its_place_when_bars_are_drawn(make_cell):
    cell = make_cell(2)
    cell.out(0, "\r 10%", "stderr").wait(1).out(1, "before\n").rich(1, PNG).out(1, "after\n")
    cell.wait(1).out(0, "\r100%\n", "stderr").end(0, 1).finish()
    texts = [data if isinstance(data, str) else data["text/plain"] for _, data in cell.outputs]
    assert "".join(text.rstrip("\n") + "\n" for text in texts) == "[1] before\n[1]\n<Figure>\n[1] after\n[0] 100%\n"


def test_unfinished_line_comes_before_the_figure_that_follows_it(make_cell):
    cell = make_cell(2).out(1, "figure: ").rich(1, PNG).out(1, "\n").end(0, 1).finish()
    assert cell.outputs == [["stdout", "[1] figure: \n[1]\n"], [None, PNG]]


def test_equal_figures_fold_and_others_are_labelled(make_cell):
    other = {"image/png": "b3RoZXI=", "text/plain": "<Figure>"}
    cell = make_cell(4)
    for rank in range(4):
        cell.rich(rank, other if rank == 2 else PNG)
    cell.wait(0.02)
    assert cell.outputs == [["stdout", "[0-1,3]\n"], [None, PNG], ["stdout", "[2]\n"], [None, other]]


def test_figure_of_a_single_rank_has_no_label(make_cell):
    assert make_cell(1).rich(0, PNG).outputs == [[None, PNG]]


def test_echo_of_text_folds_like_a_line(make_cell):
    cell = make_cell(8)
    for rank in range(8):
        cell.rich(rank, {"text/plain": "tensor(\n  1)"}, "execute_result")
    assert cell.text == "[0-7] tensor(\n[0-7]   1)\n"
    assert make_cell(1).rich(0, {"text/plain": "3"}, "execute_result").text == "3\n"


def test_widget_becomes_its_text_with_one_note(make_cell):
    cell = make_cell(2)
    for _ in range(2):
        for rank in range(2):
            cell.rich(rank, {"text/plain": "IntSlider(value=0)", WIDGET_VIEW: {"model_id": f"{rank}"}})
    assert cell.text.count("note:") == 1
    assert cell.text.count("[0-1] IntSlider(value=0)") == 2
    assert WIDGET_VIEW not in str(cell.outputs)


def test_display_ids_of_ranks_do_not_meet(make_cell):
    cell = make_cell(2, "all", run_id="calm-otter")
    for rank in range(2):
        cell.rich(rank, {"text/plain": f"{rank}"}, display_id="x")
    cell.rich(1, {"text/plain": "new"}, "update_display_data", display_id="x")
    assert cell.text == "[0]\n0\n[1]\nnew\n"
    assert [key for key, _ in cell.outputs if key.startswith("air-")] == ["air-calm-otter-0-x", "air-calm-otter-1-x"]


def test_folded_display_is_updated_by_all_and_split_by_some(make_cell):
    cell = make_cell(3)
    for rank in range(3):
        cell.rich(rank, {"text/plain": "0%"}, display_id=f"own id of {rank}")
    for rank in range(3):
        cell.rich(rank, {"text/plain": "50%"}, "update_display_data", display_id=f"own id of {rank}")
    assert cell.text == "[0-2]\n50%\n"
    for rank in range(3):
        text = "lost" if rank == 0 else "100%"
        cell.rich(rank, {"text/plain": text}, "update_display_data", display_id=f"own id of {rank}")
    cell.end(0, 1, 2).finish()
    assert cell.text == "[0-2]\n100%\n[0]\nlost\n"


def test_update_of_an_unknown_display_shows_nothing(make_cell):
    cell = make_cell(1).rich(0, PNG, "update_display_data", display_id="never shown")
    assert cell.finish().actions == []


def test_clear_output_of_a_single_rank_clears_the_cell_but_not_the_header(make_cell):
    cell = make_cell(1)
    cell.draw(cell.model.header("run calm-otter", cell.now))
    for step in range(3):
        cell.out(0, f"step {step}\n").rich(0, {}, "clear_output", wait=True)
    assert cell.lines == ["run calm-otter", "step 2"]
    cell.out(0, "end\n").finish()
    assert cell.lines == ["run calm-otter", "end"]


def test_clear_output_of_one_of_many_ranks_takes_only_its_unfinished_lines(make_cell):
    cell = make_cell(2, "all").out(0, "kept\n\r 10%", "stderr").out(1, "\r 20%", "stderr").wait(1)
    cell.rich(0, {}, "clear_output").wait(1)
    assert cell.text.replace("  ", " ").splitlines()[-1] == "[1] 20%"
    assert "kept" in cell.text
    assert "10%" not in cell.text


# --------------------------------------------------------------------------------------------------- header and footer


def test_header_is_one_display_and_its_link_can_be_clicked(make_cell):
    cell = make_cell(2)
    cell.draw(cell.model.header("run <a> · https://host/x?a=1&b=2", cell.now))
    cell.out(0, "a\n").out(1, "a\n")
    cell.draw(cell.model.header("run a · FINISHED", cell.now))
    cell.finish()
    cell.draw(cell.model.footer("FINISHED in 1.2 s", cell.now))
    assert cell.lines == ["run a · FINISHED", "[0-1] a", "FINISHED in 1.2 s"]
    first = cell.actions[0].data["text/html"]
    assert '<a href="https://host/x?a=1&amp;b=2"' in first
    assert "&lt;a&gt;" in first


def test_header_without_displays_is_printed_once(make_cell):
    cell = make_cell(1, live=False)
    cell.draw(cell.model.header("run a", cell.now))
    cell.out(0, "no newline")
    cell.draw(cell.model.header("run a · FINISHED", cell.now))
    cell.finish()
    cell.draw(cell.model.footer("FINISHED in 1.2 s", cell.now))
    assert cell.text == "run a\nno newline\nFINISHED in 1.2 s\n"


def test_link_is_a_click_in_a_page_and_an_address_in_text(make_cell):
    cell = make_cell(2)
    link = Link("http://127.0.0.1:8888/a/open?run=x&y", '/a/open?run=x&y"', "MLflow")
    cell.draw(cell.model.header("run <a> · 2 ranks", cell.now))
    cell.draw(cell.model.header("run <a> · 2 ranks", cell.now, link))
    cell.finish()
    cell.draw(cell.model.footer("FINISHED in 1.2 s", cell.now, link))
    assert cell.lines == [
        "run <a> · 2 ranks · MLflow: http://127.0.0.1:8888/a/open?run=x&y",
        "FINISHED in 1.2 s · MLflow: http://127.0.0.1:8888/a/open?run=x&y",
    ]
    anchor = '<a href="/a/open?run=x&amp;y&quot;" target="_blank" rel="noopener">MLflow</a>'
    for (_, data), text in zip(cell.outputs, ["run &lt;a&gt; · 2 ranks", "FINISHED in 1.2 s"], strict=True):
        assert f">{text} · {anchor}</div>" in data["text/html"]


def test_link_that_is_a_command_is_text(make_cell):
    cell = make_cell(2)
    cell.draw(cell.model.header("run a", cell.now, Link("%air ui")))
    assert cell.lines == ["run a · MLflow: %air ui"]
    assert "<a" not in cell.outputs[0][1]["text/html"]
    assert "run a · MLflow: %air ui" in cell.outputs[0][1]["text/html"]


def test_link_that_comes_after_the_header_is_printed_in_the_footer_where_there_are_no_displays(make_cell):
    cell = make_cell(1, live=False)
    cell.draw(cell.model.header("run a", cell.now))
    cell.draw(cell.model.header("run a", cell.now, Link("http://h/x", "http://h/x")))
    cell.finish()
    cell.draw(cell.model.footer("FINISHED in 1.2 s", cell.now, Link("http://h/x", "http://h/x")))
    assert cell.text == "run a\nFINISHED in 1.2 s · MLflow: http://h/x\n"


def test_quiet_run_has_no_link(make_cell):
    cell = make_cell(2, quiet=True)
    cell.draw(cell.model.header("run a", cell.now, Link("http://h/x", "http://h/x")))
    cell.draw(cell.model.footer("FINISHED", cell.now, Link("http://h/x", "http://h/x")))
    assert cell.actions == []


# -------------------------------------------------------------------------------------------------------------- tabs


def test_tabs_show_every_rank_and_end_as_details(make_cell):
    cell = make_cell(2, "tabs", run_id="r")
    cell.out(0, "a & b\n").wait(1).out(1, "\r 50%", "stderr").wait(1)
    assert cell.lines == ["── rank 0: 1 line ──", "a & b", "── rank 1: 0 lines ──", " 50%"]
    cell.out(1, numbered(1_000)).end(0, 1).finish()
    assert [key for key, _ in cell.outputs] == ["air-r-tabs"]
    html = cell.outputs[0][1]["text/html"]
    assert html.count("<details") == 2
    assert "a &amp; b" in html
    assert "rank 1: 1,001 lines, the last 500, ended" in html
    assert cell.lines[-1] == " 50%"


def test_tabs_are_updated_at_most_five_times_a_second(make_cell):
    cell = make_cell(2, "tabs")
    for index in range(200):
        cell.out(0, f"{index}\n").wait(0.01)
    assert len(cell.actions) <= 11


def test_tabs_without_displays_are_printed_at_the_end(make_cell):
    cell = make_cell(2, "tabs", live=False).out(1, "b\n").out(0, "a\n")
    assert cell.actions == []
    cell.end(0, 1).finish()
    assert cell.lines == ["── rank 0: 1 line, ended ──", "a", "── rank 1: 1 line, ended ──", "b"]


def test_tabs_take_a_flood(make_cell):
    cell = make_cell(4, "tabs")
    for rank in range(4):
        cell.out(rank, numbered(50_000))
    cell.finish()
    assert cell.text.count("50,000 lines, the last 500") == 4
    assert len(cell.lines) == 4 * 501


# ------------------------------------------------------------------------------------------------------------ anything


_event = st.one_of(
    st.builds(
        Text,
        st.integers(0, 2),
        st.sampled_from(["stdout", "stderr"]),
        st.lists(st.sampled_from(["a", "\n", "\r", "b\n", "\x1b[A", "\x1b[3", "\x00", "x" * 200]), max_size=6).map(
            "".join
        ),
    ),
    st.builds(
        Rich,
        st.integers(0, 2),
        st.sampled_from(["display_data", "update_display_data", "execute_result", "clear_output"]),
        st.sampled_from([PNG, {"text/plain": "t"}, {}]),
        st.just({}),
        st.sampled_from([None, "x"]),
        st.booleans(),
    ),
    st.builds(RankEnded, st.integers(0, 2)),
)


@settings(deadline=None)
@given(
    st.lists(_event, max_size=30),
    st.sampled_from(["merged", "all", "rank0", "tabs", "none"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([2_000, 10, None]),
)
def test_any_sequence_of_events_ends_with_nothing_due(make_cell, events, mode, quiet, live, max_lines):
    cell = make_cell(3, mode, quiet=quiet, live=live, max_lines=max_lines)
    for event in events:
        cell.feed(event).wait(0.05)
    cell.wait(40).finish()
    cell.wait(1)
    assert cell.model.next_deadline(cell.now) is None
    shown = {action.key for action in cell.actions if isinstance(action, Show)}
    assert all(action.key in shown for action in cell.actions if isinstance(action, Update))
    if quiet or not live:
        keys = {key for key in shown if key}
        assert not [key for key in keys if "text" in key or "tabs" in key]
