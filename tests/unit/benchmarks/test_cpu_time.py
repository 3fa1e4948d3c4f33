"""The CPU time of another process, as the benchmark of the monitor reads it."""

from __future__ import annotations

import os
import threading
import time

from benchmarks.server import cpu_s


def test_cpu_time_by_pid_is_that_of_the_process_with_its_ended_threads():
    worker = threading.Thread(target=lambda: sum(range(300_000)))
    worker.start()
    worker.join()

    before = time.process_time()
    by_pid = cpu_s(os.getpid())
    after = time.process_time()

    assert before <= by_pid <= after
