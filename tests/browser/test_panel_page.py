"""The panel in a page of its own, in Chromium, with a script in the kernel's place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.panel_page import (
    AT,
    GIB,
    HELLO,
    PanelPage,
    checkpoint,
    devices,
    history,
    run_row,
    sample,
    status,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Open = Callable[..., PanelPage]

_EVIL = "<img src=x onerror='window.hacked = 1'><b>x</b>"

# Contrast of each text with what is behind it, after WCAG 2: those below 4.5, but for controls that can't be used.
_LOW_CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = color => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = color => color.slice(0, 3).map(each => each / 255)
    .map(each => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, index) => sum + each * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const color = rgba(getComputedStyle(node).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const low = [];
  const walker = document.createTreeWalker(document.getElementById('root'), NodeFilter.SHOW_TEXT);
  for (let text; (text = walker.nextNode());) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility() || node.closest('[aria-disabled]')) continue;
    const both = [luminance(rgba(getComputedStyle(node).color)), luminance(behind(node))];
    const contrast = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    if (contrast < 4.5) low.push(`${text.data}: ${contrast.toFixed(1)}`);
  }
  return low;
}"""

# What sticks out of the panel, or out of its own box without an ellipsis that a tooltip explains.
_CUT = """() => {
  const root = document.getElementById('root').getBoundingClientRect();
  return [...document.querySelectorAll('#root *:not(.air-spoken)')].filter(node => node.checkVisibility())
    .filter(node => {
      const box = node.getBoundingClientRect();
      const scrolls = node.closest('pre');
      const isCut = node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).overflowX === 'hidden';
      return (!scrolls && box.right > root.right + 0.5) || (isCut && !node.title);
    })
    .map(node => `${node.className}: ${node.textContent.slice(0, 60)}`);
}"""


_FIGURES = (
    "data wait 12 % (rank 3) · 1,240 examples/s · 98 % from the cache · 1.15 GiB downloaded · "
    "last save held up training for 37 ms"
)


@pytest.fixture
def open_panel(browser: Browser) -> Iterator[Open]:
    """Open the page; what it logs as an error fails the test."""
    opened: list[PanelPage] = []

    def open_it(*, theme: str | None = "light", width: int = 300, **context: Any) -> PanelPage:
        page = browser.new_context(viewport={"width": width, "height": 900}, **context).new_page()
        opened.append(PanelPage(page, theme=theme))
        return opened[-1]

    yield open_it
    errors = [error for each in opened for error in each.errors]
    for each in opened:
        each.page.context.close()
    assert not errors


def _full(panel: PanelPage, count: int = 8) -> None:
    """Everything that a panel can show."""
    lost = {"state": "lost", "reason": "fell off the bus", "utilization_percent": None, "temperature_celsius": None}
    panel.greet(count, points=700, changes={3: lost, 6: {"temperature_celsius": 91}} if count > 6 else None)
    link = {"href": "/user/alice/air-nb-mlflow/open?run=1", "label": "MLflow", "text": "x"}
    long = "a-run-with-quite-a-long-name-that-somebody-chose-for-it"
    panel.emit(
        {"type": "processes", "gpus": [{"uuid": "GPU-0", "processes": [_process(7, "rank 0 of calm-otter-41")]}]},
        _runs(
            run_row(
                "calm-otter-41",
                link=link,
                line="epoch 3 step 12,480  loss 2.3112  lr 3.0e-4  tokens/s 412,331",
                figures=_FIGURES,
            ),
            run_row(long, is_mine=False, notebook="other/finetune.ipynb", state="STARTING", started_at=None),
            run_row("sad-lynx-7", state="FAILED", is_live=False, ended_at=AT, reason="rank 1: ValueError: bad batch"),
        ),
        _roots(
            checkpoint(12000, verified=True),
            checkpoint(11000, state="damaged", problem="checksum differs", can_resume=False),
            checkpoint(10000, verifying=True),
        ),
        status("paused", why="nobody looks"),
    )


def _process(pid: int, label: str, **fields: Any) -> dict[str, Any]:
    return {"pid": pid, "used_bytes": 3 * GIB, "kind": "rank", "label": label, "run_id": "r", "rank": 0, **fields}


def _runs(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"type": "runs", "runs": list(rows), "more": 0}


def _roots(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "checkpoints",
        "roots": [{"root": "/data/ckpt", "problem": "", "checkpoints": list(rows), "more": 0}],
    }


def _log(panel: PanelPage, text: str, *, offset: int = 0, is_end: bool = False) -> dict[str, Any]:
    """The answer to the last request for a piece of a log."""
    asked = panel.sent("log")[-1]
    fields = {"run_id": asked["run_id"], "rank": asked["rank"], "request": asked["request"]}
    return {
        "type": "log",
        **fields,
        "offset": offset,
        "next_offset": offset + len(text),
        "text": text,
        "is_end": is_end,
    }


def _next_offset(panel: PanelPage, count: int) -> int:
    """Once so many pieces of logs were asked for: where the last one is to begin."""
    asked = "count => window.sent.filter(each => each.type === 'log').length === count"
    panel.page.wait_for_function(asked, arg=count)
    return int(panel.sent("log")[-1]["offset"])


# -------------------------------------------------------------------------------------------------------------- GPUs


@pytest.mark.parametrize("count", [1, 8, 16, 64])
def test_each_gpu_has_a_card_or_where_there_are_many_a_line(open_panel: Open, count):
    panel = open_panel()
    panel.greet(count, points=50)
    cards = panel.page.locator("li.air-card")
    lines = panel.page.locator("li.air-gpu-row")
    assert [cards.count(), lines.count()] == ([count, 0] if count <= 8 else [0, count])
    assert "11 %" in panel.page.locator("li").first.inner_text()
    assert panel.page.locator(".air-section").first.locator("summary").first.inner_text().split()[:2] == [
        "GPUs",
        str(count),
    ]
    if count > 8:
        box = lines.first.locator("..")
        assert box.evaluate("box => box.clientHeight <= 420"), "the list scrolls, not the page"
        lines.nth(9).locator("summary").click()
        lines.nth(9).locator("canvas").first.wait_for()
        assert lines.nth(9).locator("canvas").count() == 4
        assert panel.ink(lines.nth(9).locator("canvas").first) > 50


def test_without_a_gpu_the_machine_is_shown_and_the_reason_why_there_is_none(open_panel: Open):
    panel = open_panel()
    panel.greet(0, points=100)
    text = panel.page.locator("#root").inner_text()
    assert "No GPU: libnvidia-ml.so.1 was not found" in text
    assert re.search(r"CPU\s+23 %\s+Memory\s+41.0 / 128 GiB\s+Disk\s+412 / 1,000 GiB", text)
    assert panel.page.locator("li.air-card").count() == 0
    assert panel.ink(panel.page.locator(".air-card canvas").first) > 100


def test_values_change_and_the_chart_moves(open_panel: Open):
    panel = open_panel()
    panel.greet(2, points=100)
    card = panel.page.locator("li.air-card").first
    before = panel.columns_of_ink(card.locator("canvas").first)
    panel.emit(sample(2, at=AT + 1200, utilization_percent=97))
    assert "97 %" in card.inner_text()
    after = panel.columns_of_ink(card.locator("canvas").first)
    assert before != after
    first, moved = before.index(True), after.index(True)
    assert (first - moved) / len(before) == pytest.approx(1200 / 7200, abs=0.02)


def test_unknown_values_and_a_pause_are_gaps_in_the_chart(open_panel: Open):
    panel = open_panel(width=800)
    panel.emit(HELLO, devices(1), history(1, 360, gap=range(100, 200)), sample(1), sample(1, at=AT + 2000))
    ink = panel.columns_of_ink(panel.page.locator("li.air-card canvas").first)
    spans = [(at - (AT + 2000) + 7200) / 7200 for at in (AT - 3600, AT - 2600, AT - 1600, AT)]
    inside = [
        ink[round(part * len(ink))] for part in (spans[0] + 0.05, (spans[1] + spans[2]) / 2, spans[3] - 0.05, 0.9)
    ]
    assert inside == [True, False, True, False]
    assert ink[-1] or ink[-2], "one value alone is a dot"


def test_a_slower_interval_of_the_past_is_no_gap(open_panel: Open):
    panel = open_panel()
    panel.emit({**HELLO, "interval_s": 5}, devices(1), history(1, 20, step_s=240), status("polling", interval_s=5))
    ink = panel.columns_of_ink(panel.page.locator("li.air-card canvas").first)
    assert all(ink[ink.index(True) : len(ink) - 3])


def test_a_lost_gpu_is_red_with_its_reason_and_the_others_go_on(open_panel: Open):
    panel = open_panel()
    panel.greet(3, changes={1: {"state": "lost", "reason": "GPU has fallen off the bus", "utilization_percent": None}})
    lost, fine = panel.page.locator("li.air-card").nth(1), panel.page.locator("li.air-card").nth(2)
    assert "Lost" in lost.inner_text()
    assert "GPU has fallen off the bus" in lost.inner_text()
    red = lost.evaluate("node => getComputedStyle(node).borderTopColor")
    assert red == "rgb(179, 38, 30)"
    assert fine.evaluate("node => getComputedStyle(node).borderTopColor") != red
    assert "85 %" in fine.inner_text()
    panel.emit(sample(3, at=AT + 10))
    assert "Lost" not in lost.inner_text()
    assert "bus" not in lost.inner_text()


def test_unknown_is_not_zero(open_panel: Open):
    panel = open_panel()
    unknown = dict.fromkeys(("utilization_percent", "memory_used_bytes", "temperature_celsius", "power_watts"))
    panel.emit(HELLO, devices(1, memory_total_bytes=None, power_limit_watts=None, name=None))
    panel.emit(sample(1, changes={0: unknown}))
    text = panel.page.locator("li.air-card").inner_text()
    assert text.count("n/a") == 4
    assert "unknown model" in text
    assert not re.search(r"\b0(\.0)? ?(%|GiB|°C|W)", text)


def test_zero_is_shown_as_zero(open_panel: Open):
    panel = open_panel()
    panel.greet(1, utilization_percent=0, memory_used_bytes=0, power_watts=0.0)
    text = panel.page.locator("li.air-card").inner_text()
    assert "0 %" in text
    assert "0.0 / 80 GiB" in text
    assert "0 / 700 W" in text
    assert "n/a" not in text


def test_hot_and_full_are_told_by_text_too(open_panel: Open):
    panel = open_panel()
    panel.greet(1, temperature_celsius=91, memory_used_bytes=79 * GIB)
    assert panel.page.locator("li.air-card .air-badge:visible").inner_text() == "Hot, Memory full"


def test_values_of_a_driver_that_hangs_say_how_old_they_are(open_panel: Open):
    panel = open_panel()
    hung = {**devices(1, state="timeout", reason="no answer in 2 s")}
    panel.emit(HELLO, devices(1), sample(1), hung, {**sample(1, at=AT + 40), "stale_s": 40.0})
    text = panel.page.locator("#root").inner_text()
    assert "The driver does not answer: no answer in 2 s. The values are 40 s old." in text
    assert "11 %" in text


def test_who_holds_the_memory_is_listed_and_mig_is_marked(open_panel: Open):
    panel = open_panel()
    held = [_process(7, "rank 0 of calm-otter-41"), _process(8, "bob: train.py", kind="stranger", used_bytes=None)]
    panel.emit(
        HELLO, devices(1, mig=True), sample(1), {"type": "processes", "gpus": [{"uuid": "GPU-0", "processes": held}]}
    )
    rows = panel.page.locator(".air-holders li").all_inner_texts()
    assert [row.split("\n") for row in rows] == [["rank 0 of calm-otter-41", "3,072 MiB"], ["bob: train.py", "n/a"]]
    assert panel.page.get_by_text("MIG", exact=True).is_visible()


def test_a_point_of_a_chart_is_read_with_the_pointer_or_with_the_arrow_keys(open_panel: Open):
    panel = open_panel()
    earlier, now = sample(1, at=AT - 3000, utilization_percent=31), sample(1, utilization_percent=87)
    panel.emit(HELLO, devices(1), earlier, now)
    chart = panel.page.locator("li.air-card canvas").first
    tip = panel.page.locator(".air-tip")
    assert tip.is_hidden()
    chart.hover(position={"x": chart.evaluate("node => node.clientWidth") - 1, "y": 10})
    assert re.fullmatch(r"87 % at \d\d:\d\d:\d\d", tip.inner_text())
    panel.page.mouse.move(1, 1)
    assert tip.is_hidden()
    chart.focus()
    panel.page.keyboard.press("ArrowLeft")
    assert tip.inner_text().startswith("31 % at")
    assert str(chart.get_attribute("aria-valuetext")).startswith("31 % at")
    panel.page.keyboard.press("ArrowDown")
    memory = panel.page.locator("li.air-card canvas").nth(1)
    assert memory.evaluate("node => node === document.activeElement")
    assert [each.get_attribute("tabindex") for each in panel.page.locator("li.air-card canvas").all()] == [
        "-1",
        "0",
        "-1",
        "-1",
    ]
    panel.page.keyboard.press("Escape")
    assert tip.is_hidden()


# --------------------------------------------------------------------------------------------------------- messages


def test_a_lost_message_makes_the_page_ask_once_for_everything_again(open_panel: Open):
    panel = open_panel()
    panel.greet(1)
    assert not panel.sent("resync")
    panel.page.evaluate("() => window.fake.lose(2)")
    panel.emit(status("polling"), status("polling"))
    panel.page.evaluate("() => window.fake.lose(1)")
    panel.emit(_runs(run_row("after-the-gap")))
    assert len(panel.sent("resync")) == 1, "the answer is on its way"
    assert "after-the-gap" in panel.page.locator("#root").inner_text()
    panel.greet(2)
    panel.emit(status("polling"))
    assert len(panel.sent("resync")) == 1
    assert panel.page.locator("li.air-card").count() == 2
    panel.page.evaluate("() => window.fake.lose(1)")
    panel.emit(status("polling"))
    assert len(panel.sent("resync")) == 2


def test_messages_of_a_later_version_are_ignored(open_panel: Open):
    panel = open_panel()
    panel.greet(1)
    panel.emit({"type": "weather", "sun": True}, {"type": "constructor"}, sample(1, at=AT + 10, utilization_percent=55))
    panel.page.evaluate("() => { fake.tell(null); fake.tell('x'); fake.tell({type: 'runs'}) }")
    assert "55 %" in panel.page.locator("li.air-card").inner_text()
    assert not panel.sent("resync")


def test_text_from_outside_stays_text(open_panel: Open):
    panel = open_panel(width=900)
    link = {"href": "javascript:window.hacked=1", "label": _EVIL, "text": _EVIL}
    run = run_row(_EVIL, line=_EVIL, notebook=_EVIL, is_mine=False, device=_EVIL, reason=_EVIL, state=_EVIL, link=link)
    root = {"root": _EVIL, "problem": _EVIL, "checkpoints": [checkpoint(1, path=_EVIL, problem=_EVIL, run_name=_EVIL)]}
    broken = {"state": "lost", "reason": _EVIL}
    held = {"type": "processes", "gpus": [{"uuid": "GPU-0", "processes": [_process(1, _EVIL)]}]}
    panel.emit(
        HELLO, devices(1, name=_EVIL, state="error", reason=_EVIL), sample(1, changes={0: broken}), held, _runs(run)
    )
    panel.emit({"type": "checkpoints", "roots": [root]}, status("paused", why=_EVIL))
    panel.page.locator(".air-row").first.get_by_role("button", name="Logs").click()
    panel.emit(_log(panel, f"{_EVIL}\n{_EVIL}"))
    panel.page.get_by_role("button", name="Verify").click()
    panel.reply("verify", _EVIL, ok=False)
    panel.page.wait_for_timeout(100)  # an image would have failed to load by now
    assert panel.page.evaluate("() => [window.hacked, document.querySelectorAll('#root img, #root b > b').length]") == [
        None,
        0,
    ]
    assert panel.page.locator("#root").inner_text().count(_EVIL) >= 14
    assert panel.page.locator("#root a:visible").count() == 0
    assert not panel.page.locator("#root a[href]").count()


def test_a_broken_connection_is_shown_until_it_is_back(open_panel: Open):
    panel = open_panel()
    panel.greet(1)
    panel.emit(_runs(run_row("r1")))
    panel.page.get_by_role("button", name="Stop r1").click()
    panel.page.get_by_role("button", name="Stop r1, really").click()
    panel.page.evaluate("() => fake.tell({type: 'connection', state: 'lost'})")
    panel.draw()
    assert "The connection to the kernel is lost" in panel.page.locator("#root").inner_text()
    assert "whether it was done is not known" in panel.page.locator(".air-row").inner_text()
    assert panel.page.get_by_role("button", name="Stop r1").is_visible()
    said = len(panel.sent("presence"))
    panel.greet(1)
    assert "The connection to the kernel is lost" not in panel.page.locator("#root").inner_text()
    assert len(panel.sent("presence")) == said + 1, "the new connection has not heard of the view yet"


def test_the_kernel_may_have_another_clock(open_panel: Open):
    panel = open_panel()
    hour = 3600
    now = panel.page.evaluate("() => Date.now() / 1000")
    elapsed = panel.page.locator(".air-time")
    panel.emit(HELLO, devices(1), sample(1, at=now - 5 * hour), _runs(run_row("r1", started_at=now - 90)))
    assert re.fullmatch("1:3[0-9]", elapsed.inner_text()), "the first sample is old, the clock is right"
    panel.emit(sample(1, at=now + hour), _runs(run_row("r1", started_at=now + hour - 90)))
    assert re.fullmatch("1:3[0-9]", elapsed.inner_text())


# --------------------------------------------------------------------------------------------------------- presence


def test_folding_the_panel_away_and_back_is_told(open_panel: Open):
    panel = open_panel()
    panel.wait_for_state("active")
    panel.page.evaluate("() => { document.getElementById('root').style.display = 'none' }")
    panel.wait_for_state("hidden")
    panel.page.evaluate("() => { document.getElementById('root').style.display = '' }")
    panel.wait_for_state("active")
    assert len({message["view"] for message in panel.sent("presence")}) == 1


def test_a_page_in_the_background_is_hidden(open_panel: Open):
    panel = open_panel()
    panel.wait_for_state("active")
    change = """state => {
      Object.defineProperty(document, 'visibilityState', {value: state, configurable: true});
      document.dispatchEvent(new Event('visibilitychange'));
      return window.sent.filter(each => each.type === 'presence').at(-1).state;
    }"""
    assert panel.page.evaluate(change, "hidden") == "hidden"
    assert panel.page.evaluate(change, "visible") == "active"


def test_without_input_the_view_is_idle_until_the_pointer_moves(open_panel: Open):
    panel = open_panel()
    panel.wait_for_state("active")
    panel.emit({**HELLO, "idle_s": 0.5}, devices(0))
    panel.wait_for_state("idle")
    beats = [message for message in panel.sent("presence") if message["state"] == "active"]
    assert len(beats) >= 3, "an active view says so again and again"
    panel.emit(status("paused", why="nobody has looked at it for 5 minutes"))
    assert panel.page.get_by_text("Paused after 1 s without activity").is_visible()
    move = "() => document.body.dispatchEvent(new PointerEvent('pointermove', {bubbles: true}))"
    at_once = f"() => {{ ({move})(); return window.sent.filter(each => each.type === 'presence').at(-1).state }}"
    assert panel.page.evaluate(at_once) == "active"
    panel.emit(status("polling"))
    assert panel.page.get_by_text("Paused").is_hidden()


def test_resume_asks_for_values_at_once(open_panel: Open):
    panel = open_panel()
    panel.wait_for_state("active")
    panel.greet(1)
    panel.emit(status("paused", why="no page was active"))
    assert "Paused: no page was active" in panel.page.locator("#root").inner_text()
    said = len(panel.sent("presence"))
    panel.page.get_by_role("button", name="Resume polling").click()
    assert panel.sent("presence")[said]["state"] == "active"
    assert len(panel.sent("refresh")) == 1


def test_the_end_of_the_view_is_told_and_nothing_stays(open_panel: Open):
    panel = open_panel()
    panel.wait_for_state("active")
    _full(panel)
    panel.page.get_by_role("button", name="Logs of calm-otter-41").click()
    panel.page.evaluate("() => window.unmount()")
    assert panel.states()[-1] == "gone"
    assert panel.page.locator("#root > *").count() == 0
    assert panel.page.evaluate("() => window.listeners.size") == 0
    said = len(panel.page.evaluate("() => window.sent"))
    panel.page.mouse.move(100, 100)
    panel.page.wait_for_timeout(1200)  # longer than the clock's tick
    assert len(panel.page.evaluate("() => window.sent")) == said


# --------------------------------------------------------------------------------------------------------- requests


def test_interval_and_refresh_are_sent_and_a_refusal_is_shown(open_panel: Open):
    panel = open_panel()
    panel.greet(1)
    panel.page.get_by_label("Interval of the samples").select_option("30")
    assert panel.sent("interval")[-1]["seconds"] == 30
    panel.reply("interval", "the interval is 60 to 600 seconds, not 30", ok=False)
    assert panel.page.locator(".air-notice:visible").inner_text() == "the interval is 60 to 600 seconds, not 30"
    assert panel.page.get_by_label("Interval of the samples").input_value() == "10"
    panel.page.get_by_role("button", name="Refresh values").click()
    panel.reply("refresh", "")
    assert panel.page.locator(".air-notice:visible").count() == 0
    panel.emit(status("polling", interval_s=45))
    assert panel.page.get_by_label("Interval of the samples").input_value() == "45"


def test_stop_asks_first_and_shows_that_it_is_stopping_until_the_answer(open_panel: Open):
    panel = open_panel()
    panel.greet(0)
    panel.emit(_runs(run_row("r1"), run_row("r2", state="FINISHED", is_live=False, ended_at=AT)))
    assert panel.page.get_by_role("button", name=re.compile("^Stop")).count() == 1
    panel.page.get_by_role("button", name="Stop r1").click()
    panel.page.get_by_role("button", name="Cancel").click()
    panel.page.get_by_role("button", name="Stop r1").click()
    panel.page.keyboard.press("Escape")
    assert not panel.sent("stop")
    panel.page.get_by_role("button", name="Stop r1").click()
    panel.page.get_by_role("button", name="Stop r1, really").click()
    assert [message["run_id"] for message in panel.sent("stop")] == ["r1"]
    busy = panel.page.get_by_role("button", name="Stopping… r1")
    busy.click(force=True)
    assert panel.page.locator(".air-confirm:visible").count() == 0
    assert len(panel.sent("stop")) == 1
    panel.reply("stop", "r1 was stopped.")
    panel.emit(_runs(run_row("r1", state="KILLED", is_live=False, ended_at=AT)))
    row = panel.page.locator(".air-row").first.inner_text()
    assert "r1 was stopped." in row
    assert "Killed" in row
    assert panel.page.get_by_role("status").inner_text() == "r1 was stopped."
    assert panel.page.get_by_role("button", name=re.compile("^Stop")).count() == 0


def test_a_run_shows_what_loading_and_saving_cost_as_text_and_only_where_it_is_known(open_panel: Open):
    panel = open_panel()
    panel.greet(0)
    panel.emit(_runs(run_row("r1", figures=_FIGURES), run_row("r2"), run_row("r3", figures="<b>12 %</b>")))
    rows = panel.page.locator(".air-row")
    assert rows.nth(0).get_by_text(_FIGURES, exact=True).is_visible()
    shown = "p:not([hidden])"  # an empty one would leave a gap
    assert rows.nth(1).locator(shown).count() == rows.nth(0).locator(shown).count() - 1
    assert rows.nth(2).get_by_text("<b>12 %</b>", exact=True).is_visible()
    panel.emit(_runs(run_row("r1"), run_row("r2"), run_row("r3")))
    assert not rows.nth(0).get_by_text(_FIGURES, exact=True).is_visible()


def test_runs_show_this_notebooks_first_with_state_time_and_line(open_panel: Open):
    panel = open_panel(width=700)
    panel.greet(0)
    link = {"href": "/air-nb-mlflow/open?run=1", "label": "MLflow", "text": "x"}
    other = run_row(
        "other", is_mine=False, notebook="b.ipynb", link={"href": None, "label": "MLflow", "text": "%air ui"}
    )
    ended = run_row("ended", state="FAILED", is_live=False, ended_at=AT + 3601, reason="rank 1: ValueError")
    gone = run_row("gone", is_mine=False, is_live=False)
    panel.emit(_runs(other, gone, run_row("mine", link=link), ended))
    rows = panel.page.locator(".air-row").all_inner_texts()
    assert [row.split("\n")[0] for row in rows] == ["mine", "ended", "other", "gone"]
    assert re.search(r"Running\s+\d:\d\d\s+2 ranks · cuda · this notebook\s+step 120 loss 2.31", rows[0])
    assert "1:01:01" in rows[1]
    assert "rank 1: ValueError" in rows[1]
    assert "2 ranks · cuda · b.ipynb" in rows[2]
    assert "MLflow: %air ui" in rows[2]
    assert "Gone" in rows[3]
    anchor = panel.page.get_by_role("link")
    assert anchor.count() == 1
    assert [anchor.get_attribute(name) for name in ("target", "rel")] == ["_blank", "noopener"]
    assert str(anchor.get_attribute("href")).endswith("/air-nb-mlflow/open?run=1")


def test_checkpoints_are_resumed_verified_and_copied(open_panel: Open):
    panel = open_panel(permissions=["clipboard-read", "clipboard-write"])
    panel.greet(0)
    panel.emit(_roots(checkpoint(300, path="/data/it's here/step-300"), checkpoint(200, can_resume=False)))
    panel.page.get_by_role("button", name="Resume step 300").click()
    assert "Launch calm-otter-41 again from step 300?" in panel.page.locator(".air-row").first.inner_text()
    panel.page.get_by_role("button", name="Resume step 300, really").click()
    asked = panel.sent("resume")[-1]
    assert [asked["run_id"], asked["path"]] == ["r1", "/data/it's here/step-300"]
    panel.reply("resume", "Launched as brave-fox-2.")
    assert "Launched as brave-fox-2." in panel.page.locator(".air-row").first.inner_text()

    panel.page.get_by_role("button", name="Resume step 200").click(force=True)
    assert panel.page.locator(".air-confirm:visible").count() == 0

    panel.page.get_by_role("button", name="Verify step 200").click()
    assert panel.sent("verify")[-1]["path"] == "/data/ckpt/step-200"
    assert panel.page.get_by_role("button", name="Verifying… step 200").is_visible()
    panel.reply("verify", "shard 3: checksum differs", ok=False)
    assert "shard 3: checksum differs" in panel.page.locator(".air-row").nth(1).inner_text()

    panel.page.get_by_role("button", name="Copy --resume option of step 300").click()
    panel.page.get_by_text("Copied:").first.wait_for()
    copied = panel.page.evaluate("() => navigator.clipboard.readText()")
    assert copied == """--resume '/data/it'"'"'s here/step-300'"""


def test_copy_works_without_the_clipboard_interface(open_panel: Open):
    panel = open_panel(permissions=["clipboard-read", "clipboard-write"])
    panel.greet(0)
    panel.emit(_roots(checkpoint(300)))
    panel.page.evaluate(
        "() => { window.clip = navigator.clipboard; Object.defineProperty(navigator, 'clipboard', {value: undefined}) }"
    )
    panel.page.get_by_role("button", name="Copy --resume option of step 300").click()
    panel.page.get_by_text("Copied: --resume /data/ckpt/step-300").first.wait_for()
    assert panel.page.evaluate("() => window.clip.readText()") == "--resume /data/ckpt/step-300"


def test_checkpoints_say_whether_they_are_good_and_why_not(open_panel: Open):
    panel = open_panel()
    panel.greet(0)
    rows = [
        checkpoint(6, verified=True),
        checkpoint(5, verified=False, problem="shard 1: checksum differs"),
        checkpoint(4),
        checkpoint(3, verifying=True),
        checkpoint(2, state="incomplete", problem="no manifest", size_bytes=None),
        checkpoint(1, state="damaged", problem="manifest can't be read"),
    ]
    panel.emit(_roots(*rows))
    texts = panel.page.locator(".air-row").all_inner_texts()
    states = ["Verified", "Verification failed", "Not verified", "Verifying…", "Incomplete", "Damaged"]
    for text, state in zip(texts, states, strict=True):
        assert state in text.split("\n")
    assert "shard 1: checksum differs" in texts[1]
    assert "size n/a" in texts[4]
    assert "5.0 GiB · from calm-otter-41" in texts[0]
    assert "60 min ago" in texts[0]
    assert panel.page.get_by_role("button", name="Verifying… step 3").get_attribute("aria-disabled") == "true"


@pytest.mark.parametrize("rows", [_runs(run_row("r1")), _roots(checkpoint(1))], ids=["runs", "checkpoints"])
def test_rows_that_are_old_say_why(open_panel: Open, rows):
    panel = open_panel()
    panel.greet(0)
    panel.emit({**rows, "problem": "OSError: disk <b>gone</b>"})
    note = panel.page.get_by_text("Not up to date: OSError: disk <b>gone</b>")
    assert note.is_visible()
    panel.emit({**rows, "problem": ""})
    assert not note.is_visible()


# ------------------------------------------------------------------------------------------------------------- logs


def test_logs_follow_a_run_to_its_end(open_panel: Open):
    panel = open_panel()
    panel.greet(0)
    panel.emit(_runs(run_row("r1", nproc=3)))
    panel.page.get_by_role("button", name="Logs of r1").click()
    assert [panel.sent("log")[-1][name] for name in ("run_id", "rank", "offset")] == ["r1", 0, -1]
    panel.emit(_log(panel, "one\n\x1b[31mtw", offset=900))
    box = panel.page.get_by_role("log")
    assert box.inner_text().split("\n") == ["… what came before is in the file of the run", "one", "tw"]
    offset = _next_offset(panel, 2)
    assert offset == 900 + len("one\n\x1b[31mtw")
    rewritten = "o\x1b[0m\n 10%\r 55%\r100%\nabc\b\b--\x1b[K\n\x1b]0;title\x07end\x1b["
    panel.emit(_log(panel, rewritten, offset=offset))
    assert box.inner_text().split("\n")[1:] == ["one", "two", "100%", "a--", "end"]
    panel.emit(_log(panel, "32m!\n", offset=_next_offset(panel, 3), is_end=True))
    assert box.inner_text().split("\n")[-1] == "end!"
    assert panel.page.get_by_text("Complete").is_visible()
    panel.page.wait_for_timeout(1500)  # longer than it waits before it asks again
    assert len(panel.sent("log")) == 3


def test_logs_of_another_rank_and_the_end_of_the_view(open_panel: Open):
    panel = open_panel()
    panel.greet(0)
    panel.emit(_runs(run_row("r1", nproc=3)))
    panel.page.get_by_role("button", name="Logs of r1").click()
    late = _log(panel, "of rank 0\n")
    panel.page.get_by_label("Rank").select_option("2")
    assert [message["rank"] for message in panel.sent("log")] == [0, 2]
    panel.emit(late, _log(panel, "of rank 2\n"))
    assert panel.page.get_by_role("log").inner_text() == "of rank 2"
    panel.page.get_by_role("button", name="Close logs of r1").click()
    assert panel.page.get_by_role("log").count() == 0
    assert panel.page.get_by_role("button", name="Logs of r1").evaluate("node => node === document.activeElement")
    panel.page.wait_for_timeout(1200)
    assert len(panel.sent("log")) == 2, "a closed view reads nothing"
    panel.page.get_by_role("button", name="Logs of r1").click()
    panel.reply("log", "there is no rank 0", ok=False)
    assert panel.page.get_by_text("there is no rank 0").is_visible()


def test_logs_keep_a_bounded_end_and_stay_where_the_reader_has_scrolled_to(open_panel: Open):
    panel = open_panel()
    panel.greet(0)
    panel.emit(_runs(run_row("r1")))
    panel.page.get_by_role("button", name="Logs of r1").click()
    halves = ["".join(f"line {number}\n" for number in range(start, start + 3500)) for start in (0, 3500)]
    panel.emit(_log(panel, halves[0]))
    panel.emit(_log(panel, halves[1] + "x" * 100_000, offset=_next_offset(panel, 2)))
    box = panel.page.get_by_role("log")
    assert box.locator("div").count() <= 5001
    assert len(box.inner_text()) < 100_000
    assert "line 6999" in box.inner_text()
    at_end = "node => node.scrollHeight - node.scrollTop - node.clientHeight < 8"
    assert box.evaluate(at_end)
    box.evaluate("node => { node.scrollTop = 100 }")
    panel.page.wait_for_function("() => !document.querySelector('.air-log input').checked")
    panel.emit(_log(panel, "\nmore\n", offset=_next_offset(panel, 3)))
    assert box.evaluate("node => node.scrollTop") < 300
    panel.page.get_by_label("Follow").check()
    assert box.evaluate(at_end)


# --------------------------------------------------------------------------------------------- keyboard, looks, names


def test_focus_and_what_is_unfolded_survive_updates(open_panel: Open):
    panel = open_panel()
    panel.greet(16)
    panel.emit(_runs(run_row("r1"), run_row("r2")))
    row = panel.page.locator("li.air-gpu-row").nth(2)
    row.locator("summary").click()
    panel.page.get_by_role("button", name="Logs of r2").click()
    panel.page.get_by_role("button", name="Stop r2").click()
    focused = "() => document.activeElement.getAttribute('aria-label')"
    assert panel.page.evaluate(focused) == "Stop r2, really"
    panel.emit(_runs(run_row("r3"), run_row("r2", line="new line"), run_row("r1")), sample(16, at=AT + 10), devices(16))
    assert panel.page.evaluate(focused) == "Stop r2, really"
    assert row.locator("details").get_attribute("open") is not None
    assert row.locator("canvas").count() == 4
    assert panel.page.get_by_role("log").is_visible()
    panel.emit(_runs(run_row("r1")))
    assert panel.page.evaluate("() => document.activeElement.tagName") == "SUMMARY", (
        "a row that goes gives the focus back"
    )


def test_everything_is_done_with_the_keyboard(open_panel: Open):
    panel = open_panel()
    panel.greet(1, points=50)
    panel.emit(_runs(run_row("r1")), _roots(checkpoint(300)))
    names = []
    for _ in range(12):
        panel.page.keyboard.press("Tab")
        names.append(
            panel.page.evaluate(
                "() => document.activeElement.ariaLabel || document.activeElement.innerText.split('\\n')[0]"
            )
        )
        outline = panel.page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", names[-1]
    assert names == [
        *("Interval of the samples", "Refresh values", "GPUs", "GPU 0 Utilisation, history", "Host"),
        *("Runs", "Logs of r1", "Stop r1"),
        *("Checkpoints", "Resume step 300", "Copy --resume option of step 300", "Verify step 300"),
    ]
    panel.page.get_by_role("button", name="Stop r1").focus()
    panel.page.keyboard.press("Enter")
    panel.page.keyboard.press("Enter")
    assert len(panel.sent("stop")) == 1
    assert panel.page.evaluate("() => document.activeElement.getAttribute('aria-label')") == "Stopping… r1"
    panel.page.locator("summary", has_text="Runs").focus()
    panel.page.keyboard.press("Enter")
    assert panel.page.get_by_text("step 120").is_hidden()


@pytest.mark.parametrize("count", [8, 16, 0])
def test_everything_that_can_be_used_has_a_name(open_panel: Open, count):
    panel = open_panel()
    _full(panel, count)
    panel.page.get_by_role("button", name="Logs of calm-otter-41").click()
    panel.page.get_by_role("button", name="Stop calm-otter-41").click()
    tree = panel.page.locator("#root").aria_snapshot()
    used = re.findall(r"- '?(button|link|combobox|slider|checkbox|log|list|listitem)\b(.*)", tree)
    assert {"button", "link", "combobox", "checkbox", "log", "list", "listitem"} <= {role for role, _ in used}
    assert ("slider" in {role for role, _ in used}) == (count <= 8)
    assert [each for each in used if not each[1].startswith(' "')] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("count", [8, 16, 0])
def test_text_can_be_read_in_both_themes(open_panel: Open, theme, count):
    panel = open_panel(theme=theme)
    _full(panel, count)
    panel.page.get_by_role("button", name="Stop calm-otter-41").click()
    assert panel.page.evaluate(_LOW_CONTRAST) == []
    background = panel.page.locator("#root").evaluate("node => getComputedStyle(node).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 17, 17)"}[theme]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_outside_jupyterlab_the_system_chooses_the_theme(open_panel: Open, scheme):
    panel = open_panel(theme=None, color_scheme=scheme)
    _full(panel)
    assert panel.page.evaluate(_LOW_CONTRAST) == []
    background = panel.page.locator("#root").evaluate("node => getComputedStyle(node).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 17, 17)"}[scheme]


@pytest.mark.parametrize("width", [220, 300, 480, 1200])
@pytest.mark.parametrize("count", [8, 16, 0])
def test_nothing_is_cut_without_a_tooltip_at_any_width(open_panel: Open, width, count):
    panel = open_panel(width=width)
    _full(panel, count)
    panel.page.get_by_role("button", name="Logs of calm-otter-41").click()
    panel.emit(_log(panel, "a long line " * 50))
    panel.page.get_by_role("button", name="Stop calm-otter-41").click()
    assert panel.page.evaluate(_CUT) == []
    assert panel.page.evaluate("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_charts_take_the_colours_of_a_theme_that_is_switched(open_panel: Open):
    panel = open_panel()
    panel.greet(1, points=300)
    chart = panel.page.locator("li.air-card canvas").first
    before = chart.evaluate("node => node.toDataURL()")
    panel.page.evaluate("() => { document.body.dataset.jpThemeLight = 'false' }")
    panel.draw()
    assert chart.evaluate("node => node.toDataURL()") != before


# -------------------------------------------------------------------------------------------------------- anywidget

_WIDGET = """
window.widget = {
  listeners: [], said: [],
  get: name => ({kernel_id: 'k1'})[name],
  send: message => window.widget.said.push(message),
  on: (name, listener) => name === 'msg:custom' && window.widget.listeners.push(listener),
  off: (name, listener) => { window.widget.listeners = window.widget.listeners.filter(each => each !== listener) },
};
window.el = document.body.appendChild(document.createElement('div'));
"""


def test_as_a_widget_the_panel_is_drawn_below_the_cell(open_panel: Open):
    panel = open_panel()
    panel.page.evaluate(_WIDGET)
    panel.page.evaluate("() => { window.end = window.panel.default.render({model: window.widget, el: window.el}) }")
    assert {"type": "resync"} in panel.page.evaluate("() => window.widget.said")
    messages = [{**message, "seq": seq} for seq, message in enumerate([HELLO, devices(2), sample(2)])]
    panel.page.evaluate("messages => messages.forEach(each => window.widget.listeners[0](each, []))", messages)
    panel.draw()
    assert panel.page.locator("body > div:last-child li.air-card").count() == 2
    panel.page.evaluate("() => window.end()")
    assert panel.page.evaluate("() => [window.widget.listeners.length, window.widget.said.at(-1).state]") == [0, "gone"]


def test_as_a_widget_beside_the_sidebar_it_is_one_line_that_shows_and_hides_that(open_panel: Open):
    panel = open_panel()
    panel.page.evaluate(_WIDGET)
    panel.page.evaluate("""() => {
      let isVisible = false;
      window.announced = [];
      window.airNb = {
        show: () => { isVisible = true }, hide: () => { isVisible = false }, isVisible: () => isVisible,
        announce: id => window.announced.push(id),
      };
      window.panel.default.initialize({model: window.widget});
      window.panel.default.render({model: window.widget, el: window.el});
    }""")
    assert panel.page.evaluate("() => window.announced") == ["k1"]
    line = panel.page.locator("body > div:last-child")
    assert line.inner_text().split("\n") == ["GPU panel: in the right sidebar", "Show"]
    line.get_by_role("button", name="Show").click()
    assert panel.page.evaluate("() => window.airNb.isVisible()") is True
    line.get_by_role("button", name="Hide").click()
    assert panel.page.evaluate("() => window.airNb.isVisible()") is False
