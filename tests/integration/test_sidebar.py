"""The panel's kernel side as a page meets it: comms on a subshell of a real kernel, most of it while a cell runs."""

from __future__ import annotations

import ast
import queue
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from tests.support.kernel import Kernel, running_kernel
from tests.support.wait import eventually

_BUSY = "import time\nwhile not globals().get('is_released'): time.sleep(0.02)"


class Page:
    """A page with a WebSocket of its own: another client of the kernel, and a subshell."""

    def __init__(self, kernel: Kernel) -> None:
        self.client = BlockingKernelClient()  # not the manager's: two clients of one session get each other's replies
        self.client.load_connection_info(kernel.manager.get_connection_info())
        self.client.start_channels(stdin=False, hb=False)
        self.comm_id = ""
        self.iopub: list[dict[str, Any]] = []
        self.subshell = self.control("create_subshell_request")["subshell_id"]
        self.until(lambda: bool(self.iopub) or bool(self.control("list_subshell_request")))

    def control(self, kind: str, **content: Any) -> dict[str, Any]:
        """Ask the kernel on its control channel."""
        message = self.client.session.msg(kind, content)
        self.client.control_channel.send(message)
        while True:
            reply = self.client.get_control_msg(timeout=20)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return dict(reply["content"])

    def send(self, kind: str, content: dict[str, Any]) -> str:
        """Send on the subshell; returns the message's id."""
        message = self.client.session.msg(kind, content)
        message["header"]["subshell_id"] = self.subshell
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def open(self) -> Page:
        """Open a comm and wait for the greeting."""
        self.comm_id = uuid.uuid4().hex
        self.send("comm_open", {"comm_id": self.comm_id, "target_name": "air_nb.panel", "data": {}})
        self.hear("hello")
        return self

    def say(self, **data: Any) -> None:
        """Send a message of the panel."""
        self.send("comm_msg", {"comm_id": self.comm_id, "data": data})

    def ask(self, **data: Any) -> dict[str, Any]:
        """Send a message and wait for its reply."""
        number = len(self.iopub)
        self.say(**data, request=number)
        return self.hear("reply", lambda message: message["request"] == number)

    def heard(self) -> list[dict[str, Any]]:
        """What the panel was told."""
        return [
            message["content"]["data"]
            for message in self.iopub
            if message["msg_type"] == "comm_msg" and message["content"]["comm_id"] == self.comm_id
        ]

    def hear(self, kind: str, matches: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
        """Wait for a message of this kind; the newest that matches."""

        def found() -> list[dict[str, Any]]:
            return [each for each in self.heard() if each["type"] == kind and matches(each)]

        self.until(lambda: bool(found()))
        return found()[-1]

    def until(self, holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Take in what the kernel sends until it holds."""
        end = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > end:
                seen = [(each["msg_type"], str(each["content"])[:200]) for each in self.iopub[-20:]]
                raise TimeoutError(f"the kernel has not said so in {timeout_s:g} s; the last it said: {seen}")
            self._take(0.1)

    def drain(self) -> None:
        """Take in what has come, and what comes within a moment."""
        while self._take(0.3):
            pass

    def _take(self, timeout_s: float) -> bool:
        try:
            self.iopub.append(self.client.get_iopub_msg(timeout=timeout_s))
        except queue.Empty:
            return False
        return True

    def states(self) -> list[str]:
        """States of the kernel, as Jupyter's server takes them from the shell's messages."""
        return [
            message["content"]["execution_state"]
            for message in self.iopub
            if message["msg_type"] == "status" and "subshell_request" not in message["parent_header"]["msg_type"]
        ]

    def close(self) -> None:
        """Hang up, as a page does that has the time for it."""
        if self.comm_id:
            closing = self.send("comm_close", {"comm_id": self.comm_id, "data": {}})
            self.until(lambda: any(each["parent_header"].get("msg_id") == closing for each in self.iopub))
        self.control("delete_subshell_request", subshell_id=self.subshell)
        self.client.stop_channels()


@pytest.fixture
def new_page(kernel) -> Iterator[Callable[[], Page]]:
    """Pages that have not opened a comm yet."""
    made: list[Page] = []

    def make() -> Page:
        made.append(Page(kernel))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def page(new_page) -> Page:
    """A page that looks at the panel."""
    opened: Page = new_page().open()
    opened.ask(type="presence", view="v", state="active")
    return opened


@contextmanager
def busy(kernel: Kernel, page: Page, code: str = _BUSY) -> Iterator[Any]:
    """A cell that runs until the end of the block."""
    kernel.ok("is_released = False")
    page.drain()
    cell = kernel.start(code)
    page.until(lambda: _has_begun(page, cell))
    try:
        yield cell
    finally:
        page.send("execute_request", {"code": "is_released = True", "silent": True})  # on its subshell
        kernel.follow(cell)


def _has_begun(page: Page, cell: Any) -> bool:
    kinds = [each["msg_type"] for each in page.iopub if each["parent_header"].get("msg_id") == cell.msg_id]
    return "execute_input" in kinds


# ------------------------------------------------------------------------------------------------ while a cell runs


def test_a_page_that_is_loaded_while_a_cell_runs_is_greeted_and_answered(kernel, page, new_page):
    with busy(kernel, page) as cell:
        late = new_page().open()
        assert late.ask(type="presence", view="late", state="active")["ok"]
        assert late.hear("sample")["host"]["memory_used_bytes"] > 0
        assert late.ask(type="refresh")["ok"]
        page.drain()
        assert not [each for each in page.iopub if _is_end_of(each, cell)]

    assert cell.reply_status == "ok"


def _is_end_of(message: dict[str, Any], cell: Any) -> bool:
    is_idle = message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
    return bool(is_idle and message["parent_header"]["msg_id"] == cell.msg_id)


def test_requests_are_handled_at_once_after_a_thread_has_sent_under_the_running_cell(kernel, page):
    """ipykernel 7.4 sends them to the main shell otherwise; fails if its private name changes while it is needed."""
    with busy(kernel, page) as cell:
        page.until(lambda: page.ask(type="refresh")["ok"] and any(_is_sample_under(each, cell) for each in page.iopub))

        assert page.ask(type="refresh")["ok"]
        assert not cell.idle_at


def _is_sample_under(message: dict[str, Any], cell: Any) -> bool:
    is_sample = message["msg_type"] == "comm_msg" and message["content"]["data"].get("type") == "sample"
    return bool(is_sample and message["parent_header"]["msg_id"] == cell.msg_id)


def test_the_kernel_stays_busy_while_the_cell_runs_and_is_idle_after_it(kernel, page):
    with busy(kernel, page):
        for _ in range(20):
            page.ask(type="refresh")
            page.drain()
            assert page.states()[-1] == "busy"

    page.drain()
    assert page.states()[-1] == "idle"


def test_the_kernel_is_idle_after_cells_that_end_while_messages_come_in(kernel, page):
    for _ in range(30):
        cell = kernel.start("time.sleep(0.005)")
        for _ in range(5):
            page.say(type="presence", view="v", state="active")
        kernel.follow(cell)
        page.ask(type="refresh")
    page.drain()

    assert page.states()[-1] == "idle"
    late = [number for number, message in enumerate(page.iopub) if _is_end_of(message, cell)]
    after = page.iopub[late[-1] + 1 :]
    assert not [each for each in after if each["parent_header"].get("msg_id") == cell.msg_id and _is_busy(each)]


def _is_busy(message: dict[str, Any]) -> bool:
    return bool(message["msg_type"] == "status" and message["content"]["execution_state"] == "busy")


def test_what_threads_of_the_user_print_stays_in_the_cell(kernel, page):
    code = """
    import threading, time
    def chat():
        while not globals().get("is_released"):
            print("tick", flush=True)
            time.sleep(0.02)
    talker = threading.Thread(target=chat)
    talker.start()
    talker.join()
    """
    with busy(kernel, page, textwrap.dedent(code)) as cell:
        page.ask(type="refresh")
        before = len(page.iopub)
        page.until(lambda: sum(each["msg_type"] == "stream" for each in page.iopub[before:]) > 3)

        parents = {each["parent_header"].get("msg_id") for each in page.iopub[before:] if each["msg_type"] == "stream"}
        assert parents == {cell.msg_id}


def test_messages_of_the_page_trigger_no_events_of_cells(kernel, page):
    """matplotlib shows and closes the figure that the running cell draws at `post_execute`."""
    kernel.ok("triggered = []\nget_ipython().events.register('post_execute', lambda: triggered.append(1))")
    with busy(kernel, page):
        for _ in range(10):
            page.ask(type="refresh")

    # Of the two cells that `busy` runs, of the one that is released, and of this one: none of the ten messages.
    assert int(kernel.value("len(triggered)")) <= 4


# -------------------------------------------------------------------------------------------------------------- runs


def test_a_live_run_is_shown_and_stopped_from_the_page(kernel, page):
    code = "%%distributed --nproc 2 --name endless\nimport time\nprint('here we go')\nwhile True: time.sleep(0.05)"
    cell = kernel.start(code)

    def runs_and_prints(message: dict[str, Any]) -> bool:
        row = _row(message, "endless")
        return bool(row.get("line")) and row["state"] != "STARTING"  # the record follows once all ranks run

    row = _row(page.hear("runs", runs_and_prints), "endless")
    assert (row["state"], row["is_live"], row["nproc"], row["line"]) == ("RUNNING", True, 2, "here we go")
    log = page.heard()
    page.say(type="log", run_id=row["run_id"], rank=0, offset=-1)
    assert "here we go" in page.hear("log")["text"]

    reply = page.ask(type="stop", run_id=row["run_id"])

    assert (reply["ok"], reply["text"]) == (True, "run endless was stopped")
    kernel.follow(cell)
    assert cell.error is not None
    assert cell.error["ename"] == "RunStoppedError"
    page.hear("runs", lambda message: _row(message, "endless").get("state") == "KILLED")
    assert log


def _row(message: dict[str, Any], name: str) -> dict[str, Any]:
    return next((row for row in message["runs"] if row["name"] == name), {})


def test_a_request_for_a_run_that_is_not_there_is_answered(page):
    reply = page.ask(type="stop", run_id="nowhere")

    assert not reply["ok"]
    assert "nowhere" in reply["text"]


def test_garbage_disturbs_nothing(page):
    garbage: tuple[Any, ...] = (
        None,
        [1],
        "x",
        {"type": {}},
        {"type": "log", "rank": "x"},
        {"type": "presence", "state": 3},
    )
    for data in garbage:
        page.send("comm_msg", {"comm_id": page.comm_id, "data": data})
    page.send("comm_msg", {"comm_id": page.comm_id})

    assert page.ask(type="refresh")["ok"]
    assert [each for each in page.iopub if each["msg_type"] in ("error", "stream")] == []


# ------------------------------------------------------------------------------------------------------- begin and end


def test_without_a_gpu_the_panel_shows_the_machine(kernel, page):
    devices = page.hear("devices")

    if devices["driver"]["state"] == "ok":
        pytest.skip("there is a driver")
    assert devices["gpus"] == []
    assert devices["driver"]["reason"]
    assert devices["host"]["cpu_count"] >= 1


def test_pages_that_come_and_go_leave_neither_threads_nor_descriptors(kernel):
    def cycle() -> None:
        page = Page(kernel).open()
        page.ask(type="presence", view=uuid.uuid4().hex, state="active")
        page.close()

    count = "(__import__('threading').active_count(), len(__import__('os').listdir('/proc/self/fd')))"
    for _ in range(3):
        cycle()
    threads, descriptors = ast.literal_eval(kernel.value(count))
    for _ in range(50):
        cycle()

    def is_as_before() -> bool:
        threads_now, descriptors_now = ast.literal_eval(kernel.value(count))
        return bool(threads_now <= threads and descriptors_now <= descriptors)

    # ipykernel gives each thread that sends a pipe, and closes those of dead threads every ten seconds.
    assert eventually(is_as_before, timeout_s=40)


def test_a_fork_of_the_kernel_takes_no_page_with_it(kernel, page):
    code = """
    import os, time
    child = os.fork()
    if not child:
        from air_nb.session.session import get_session
        get_session().sidebar.runs_changed()
        os._exit(0)
    print(os.waitpid(child, 0)[1])
    """
    assert kernel.ok(textwrap.dedent(code)).stream("stdout") == "0\n"
    assert page.ask(type="refresh")["ok"]


def test_unload_hangs_up_and_load_tells_the_pages_again(tmp_path, test_environment):
    with running_kernel(tmp_path, env={"AIR_NB_DEVICE": "cpu", "AIR_NB_SIDEBAR": "1"}) as kernel:
        page = Page(kernel).open()
        page.ask(type="presence", view="v", state="active")

        kernel.ok("%unload_ext air_nb")

        page.until(lambda: any(each["msg_type"] == "comm_close" for each in page.iopub))
        threads = kernel.value("[each.name for each in __import__('threading').enumerate()]")
        assert "air_nb" not in threads
        assert "post_run_cell" not in kernel.value("[k for k, v in get_ipython().events.callbacks.items() if v]")

        kernel.ok("%load_ext air_nb")
        page.until(lambda: any(each["msg_type"] == "comm_open" for each in page.iopub))
        opened = next(each["content"] for each in page.iopub if each["msg_type"] == "comm_open")
        assert opened["target_name"] == "air_nb.announce"
        assert opened["data"] == {"kernel_id": "", "reveal": True, "hide": False}
        page.open()

        kernel.ok("%reload_ext air_nb")
        page.until(lambda: sum(each["msg_type"] == "comm_close" for each in page.iopub) >= 3)
        page.open().close()


def test_loading_imports_neither_the_hub_nor_widgets(tmp_path, test_environment):
    names = "[m for m in ('air_nb.sidebar.hub', 'psutil', 'ipywidgets', 'anywidget', 'numpy') if m in sys.modules]"
    with running_kernel(tmp_path, load=False) as kernel:
        kernel.ok(f"import sys\nbefore = {names}")
        cell = kernel.ok(
            f"import threading; threading.Thread.start = lambda self: None\n%load_ext air_nb\nprint({names})"
        )

        assert cell.stream("stdout").strip() == kernel.value("before")


# --------------------------------------------------------------------------------------------------------- %air sidebar


def test_air_sidebar_closes_it_where_a_page_shows_it(kernel, page):
    cell = kernel.ok("%air sidebar")

    assert cell.text == "GPU panel closed; `%air sidebar` opens it\n"
    page.until(lambda: any(each["msg_type"] == "comm_open" for each in page.iopub))
    opened = next(each["content"] for each in page.iopub if each["msg_type"] == "comm_open")
    assert opened["data"] == {"kernel_id": "", "reveal": False, "hide": True}


def test_air_sidebar_opens_it_where_no_page_shows_it(kernel, new_page):
    watcher = new_page()
    cell = kernel.ok("%air sidebar")

    shown = cell.displays()[0]["data"]
    model = shown["application/vnd.jupyter.widget-view+json"]["model_id"]
    assert shown["text/plain"].startswith(("No GPU", "1 GPU"))

    def opened() -> dict[str, Any]:
        return {
            each["content"]["comm_id"]: each["content"] for each in watcher.iopub if each["msg_type"] == "comm_open"
        }

    watcher.until(lambda: model in opened())
    announced = [each["data"] for each in opened().values() if each["target_name"] == "air_nb.announce"]
    assert announced == [{"kernel_id": "", "reveal": True, "hide": False}]
    assert "export default" in opened()[model]["data"]["state"]["_esm"]


def test_the_widget_works_while_a_cell_runs(kernel, page, new_page):
    page.say(type="presence", view="v", state="hidden")
    page.ask(type="refresh")
    widget = new_page()
    shown = kernel.ok("%air sidebar").displays()[0]["data"]
    widget.comm_id = shown["application/vnd.jupyter.widget-view+json"]["model_id"]

    def heard() -> list[dict[str, Any]]:
        messages = [each["content"] for each in widget.iopub if each["msg_type"] == "comm_msg"]
        custom = [each["data"] for each in messages if each["comm_id"] == widget.comm_id]
        return [each["content"] for each in custom if each["method"] == "custom"]

    with busy(kernel, page):
        assert heard() == []
        for number in range(2):
            content = {"type": "presence", "view": "w", "state": "active", "request": number}
            widget.say(method="custom", content=content)
            widget.until(lambda number=number: any(each.get("request") == number for each in heard()))
        assert heard()[0]["type"] == "hello"
        assert [each["seq"] for each in heard()] == list(range(len(heard())))

    assert "closed" in kernel.ok("%air sidebar").text


def test_without_anywidget_the_sidebar_opens_and_a_line_says_how_to_get_the_inline_panel(tmp_path, test_environment):
    with running_kernel(tmp_path) as kernel:
        kernel.ok("import sys; sys.modules['anywidget'] = None")
        cell = kernel.ok("%air sidebar")

    lines = cell.text.splitlines()
    assert len(lines) == 2
    assert "pip install 'air_nb[widgets]'" in lines[1]


def test_in_a_terminal_the_table_is_printed_and_a_line_says_where_the_panel_is(tmp_path, test_environment):
    code = """
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "air_nb")
    shell.run_line_magic("air", "sidebar")
    shell.run_line_magic("unload_ext", "air_nb")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)

    lines = done.stdout.splitlines()
    assert lines[0].startswith(("No GPU", "1 GPU"))
    assert lines[-1] == "The panel of GPUs, runs and checkpoints needs Jupyter."
