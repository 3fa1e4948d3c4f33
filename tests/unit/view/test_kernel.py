"""The view in a real kernel: what reaches the client."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

SETUP = """
from air_nb.protocol.events import RankEnded, Rich, Text
from air_nb.view.cell import CellView
from air_nb.view.draw import detect_front, pin_thread_to_cell

def view(ranks=2, mode="merged", quiet=False):
    return CellView(ranks, mode, "calm-otter", quiet=quiet, front=detect_front())
"""


@pytest.fixture(scope="module")
def execute():
    manager, client = start_new_kernel(kernel_name="python3")

    def run(code: str) -> list[dict[str, Any]]:
        outputs: list[dict[str, Any]] = []

        def hook(message: dict[str, Any]) -> None:
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    if outputs and outputs[-1].get("name") == content["name"]:
                        outputs[-1]["text"] += content["text"]
                    else:
                        outputs.append(dict(content))
                case "display_data" | "execute_result":
                    outputs.append({"key": content.get("transient", {}).get("display_id"), "data": content["data"]})
                case "update_display_data":
                    found = [o for o in outputs if o.get("key") == content["transient"]["display_id"]]
                    assert found, f"update of an unknown display: {content}"
                    for output in found:
                        output["data"] = content["data"]

        reply = client.execute_interactive(textwrap.dedent(code), output_hook=hook, timeout=60)
        assert reply["content"]["status"] == "ok", "\n".join(reply["content"].get("traceback", []))
        return outputs

    run(SETUP)
    yield run
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def plain(outputs: list[dict[str, Any]]) -> list[str]:
    return [o["text"] if "text" in o else o["data"]["text/plain"] for o in outputs]


def test_bars_figures_and_text_reach_the_cell_in_order(execute):
    outputs = execute("""
        import time
        v = view()
        v.start("run calm-otter")
        v.feed([Text(r, "stdout", "epoch 1\\n") for r in (0, 1)])
        v.feed([Text(r, "stderr", f"\\r {r}0%") for r in (0, 1)])
        time.sleep(0.3); v.tick()
        v.feed([Text(r, "stderr", "\\r100%\\n") for r in (0, 1)])
        v.feed([Text(1, "stdout", "before\\n"), Rich(1, "display_data", {"image/png": "aGk=", "text/plain": "F"}, {}),
                Text(1, "stdout", "after\\n"), RankEnded(0), RankEnded(1)])
        v.header("run calm-otter · FINISHED")
        v.finish("FINISHED in 1.2 s")
    """)
    assert plain(outputs) == [
        "run calm-otter · FINISHED",
        "[0-1] epoch 1\n",
        "[0-1] 100%\n[1] before\n[1]",
        "F",
        "[1] after\n",
        "FINISHED in 1.2 s",
    ]


def test_quiet_run_is_streams_only(execute):
    outputs = execute("""
        v = view(quiet=True)
        v.start("header")
        for r in (0, 1):
            v.feed([Text(r, "stdout", "a\\n"), Text(r, "stderr", "\\r1%\\r100%\\n"), Text(r, "stdout", "b\\n")])
        v.finish("footer")
    """)
    assert [(o["name"], o["text"]) for o in outputs] == [
        ("stdout", "[0-1] a\n"),
        ("stderr", "[0-1] 100%\n"),
        ("stdout", "[0-1] b\n"),
    ]


def test_flood_stays_under_the_limits_of_the_server(execute):
    outputs = execute("""
        v = view(4)
        for start in range(0, 50_000, 500):
            for r in range(4):
                lines = [f"rank {r} line {i} {'x' * 80}\\n" for i in range(start, start + 500)]
                v.feed([Text(r, "stdout", "".join(lines))])
        for r in range(4):
            v.feed([RankEnded(r)])
        v.finish()
    """)
    assert sum(len(output.get("text", "")) for output in outputs) < 1_000_000
    text = "".join(plain(outputs))
    assert "rank 0 line 0 " in text
    assert "rank 3 line 49999 " in text
    assert " lines in " in text


def test_output_of_a_thread_stays_in_the_cell_that_started_it(execute):
    first = execute("""
        import threading
        go = threading.Event()
        def work():
            pin_thread_to_cell()
            v = view(1)
            v.start("header")
            started.set()
            go.wait(30)
            v.feed([Text(0, "stdout", "late\\n"), RankEnded(0)])
            v.finish("footer")
        started = threading.Event()
        thread = threading.Thread(target=work)
        thread.start()
        _ = started.wait(30)
    """)
    second = execute("go.set(); thread.join(30); print('second')")
    assert plain(first) == ["header"]
    assert plain(second) == ["second\n"]


def test_capture_magic_gets_plain_text(execute):
    outputs = execute("""
        from IPython.utils.capture import capture_output
        with capture_output() as captured:
            v = view()
            v.start("header")
            v.feed([Text(r, "stderr", "\\r 5%\\r100%\\n") for r in (0, 1)])
            v.feed([Text(r, "stdout", "a\\n" * 3000) for r in (0, 1)])
            v.finish("footer")
        assert captured.stdout == "header\\n" + "[0-1] a\\n" * 3000 + "footer\\n", captured.stdout[:200]
        assert captured.stderr == "[0-1] 100%\\n"
        assert not captured.outputs
    """)
    assert outputs == []
