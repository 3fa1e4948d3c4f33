"""When a warm launcher is still good."""

from __future__ import annotations

import pytest

from air_nb.launch.key import changed, current_key


@pytest.mark.parametrize(
    "name", ["OMP_NUM_THREADS", "TORCH_LOGS", "LD_PRELOAD", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG"]
)
def test_a_variable_that_libraries_read_at_import_needs_a_new_launcher(name: str):
    assert changed(current_key({}), current_key({name: "1"})) == (name,)
    assert changed(current_key({name: "1"}), current_key({name: "2"})) == (name,)
    assert changed(current_key({name: "1"}), current_key({})) == (name,)


@pytest.mark.parametrize("name", ["PYTHONPATH", "PATH", "CUDA_VISIBLE_DEVICES", "MLFLOW_RUN_ID", "PYTHONUNBUFFERED"])
def test_a_variable_that_is_applied_in_the_rank_does_not(name: str):
    assert changed(current_key({}), current_key({name: "1"})) == ()
