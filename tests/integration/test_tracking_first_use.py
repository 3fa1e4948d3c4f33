"""The very first launches of a project: no database yet, and several runs that want one at the same moment."""

import subprocess
import sys

from tests.support.mlflow_stores import read_runs

_OPEN_AT_ONCE = """
import sys, threading
from air_nb.protocol.tracking import TrackingRequest
from air_nb.tracking.store import Store

failures = []

def open_store(number):
    uri = f"sqlite:///{sys.argv[1]}/{number % 3}.db"
    request = TrackingRequest(f"run {number}", uri, experiment_name="e", cwd=sys.argv[1])
    try:
        store = Store(request)
        store.ask(lambda client: client.create_run("0", run_name=f"run {number}"))
    except Exception as error:
        failures.append(repr(error))

threads = [threading.Thread(target=open_store, args=(number,)) for number in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit("\\n".join(failures) or 0)
"""


def test_runs_that_open_new_databases_at_once_all_get_one_that_is_whole(tmp_path):
    """MLflow locks each database, but its migrations share globals: those of one would be made in another."""
    command = [sys.executable, "-c", _OPEN_AT_ONCE, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    names = {run.name for number in range(3) for run in read_runs(f"sqlite:///{tmp_path}/{number}.db")}
    assert names == {f"run {number}" for number in range(12)}
