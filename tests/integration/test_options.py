"""Options that can't be meant stop the cell at once, with one line; those that can, reach the run."""

from __future__ import annotations

import pytest

_BAD = {
    "--gpus 0": "--gpus 0: the number must be 1 or more",
    "--nproc -1": "--nproc -1: the number must be 1 or more",
    "--nproc many": "argument --nproc: invalid int value: 'many'",
    "--gpus 3 --gpu-ids 1": "--gpus 3 contradicts --gpu-ids 1: give one of the two",
    "--gpu-ids 1,1": "--gpu-ids 1,1: give each GPU once",
    "--gpus 2 --nproc 2": "--nproc contradicts --gpus/--gpu-ids",
    "--gpus 2 --device cpu": "--device cpu contradicts --gpus/--gpu-ids",
    "--device tpu": "--device tpu: choose one of auto, cuda, cpu",
    "--output loud": "--output loud: choose one of merged, rank0, all, tabs, none",
    "--timeout soon": "--timeout soon: give seconds, or a time such as 90m or 1h30m, or `none`",
    "--timeout 0": "--timeout 0: the time must be positive",
    "--in missing": "--in missing: not defined in this notebook",
    "--in 1x": "--in 1x: not a variable name",
    "--out 2y": "--out 2y: not a variable name",
    "--out class": "--out class: not a variable name",
    "--pull a,b-c": "--pull b-c: not a variable name",
    "--env FOO": "--env FOO: give NAME=VALUE",
    "--name a/b": "--name 'a/b': 1 to 120 letters",
    "--name 'open": "No closing quotation",
    "--unknown": "unrecognized arguments: --unknown",
    "--gpus": "argument --gpus: expected one argument",
    "surplus": "unrecognized arguments: surplus",
}


@pytest.mark.parametrize("line,message", _BAD.items(), ids=_BAD)
@pytest.mark.usefixtures("nothing_started")
def test_a_bad_option_is_a_one_line_usage_error_and_starts_nothing(kernel, line, message):
    cell = kernel.run(f"%%distributed {line}\nprint('ran')\n1")

    assert cell.reply_status == "error"  # what makes Run All stop
    assert cell.text.strip().startswith("UsageError: ")
    assert message in cell.text
    assert len(cell.text.strip().splitlines()) == 1


@pytest.mark.usefixtures("nothing_started")
@pytest.mark.parametrize("body", ["", "\n", "\n   \n\n"], ids=repr)
def test_an_empty_cell_is_a_usage_error(kernel, body):
    cell = kernel.run(f"%%distributed --nproc 2{body}")

    assert cell.reply_status == "error"
    assert cell.text.startswith("UsageError: %%distributed")
    assert "empty" in cell.text


@pytest.mark.usefixtures("nothing_started")
def test_a_syntax_error_is_shown_as_of_any_cell_with_its_line(kernel):
    cell = kernel.run("%%distributed --nproc 2\nx = 1\ny = = 3")
    ordinary = kernel.run("# the same cell\nx = 1\ny = = 3")

    assert cell.reply_status == "error"
    assert cell.error["ename"] == "SyntaxError"
    number = int(cell.text.split("Cell In[")[1].split("]")[0])
    assert cell.text.replace(f"In[{number}]", f"In[{number + 1}]").strip() == ordinary.text.strip()
    assert "line 3" in cell.text


@pytest.mark.usefixtures("nothing_started")
def test_a_return_outside_a_function_is_a_syntax_error(kernel):
    cell = kernel.run("%%distributed --nproc 2\nreturn 3")

    assert cell.error["ename"] == "SyntaxError"
    assert "'return' outside function" in cell.text


@pytest.mark.usefixtures("nothing_started")
def test_out_without_a_last_expression_is_a_usage_error(kernel):
    cell = kernel.run("%%distributed --nproc 2 --out values\nx = 1")

    assert cell.reply_status == "error"
    assert "UsageError: --out values: the cell's last line is not an expression" in cell.text


@pytest.fixture
def no_gpus(kernel):
    """As on a machine without any, whatever this one has; CPU ranks are not asked for."""
    kernel.ok("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\nsaved_device = os.environ.pop('AIR_NB_DEVICE')")
    yield
    kernel.ok("os.environ['AIR_NB_DEVICE'] = saved_device\ndel os.environ['CUDA_VISIBLE_DEVICES'], saved_device")


def test_more_gpus_than_there_are_is_a_usage_error_that_names_the_way_to_the_cpu(kernel, no_gpus, test_environment):
    before = set((test_environment / "runs").iterdir())

    cell = kernel.run("%%distributed --gpus 8\nprint('ran')")

    assert cell.reply_status == "error"
    assert cell.text.startswith("UsageError: ")
    assert "8 GPUs were asked for" in cell.text
    assert "AIR_NB_DEVICE=cpu" in cell.text
    assert "ran" not in cell.text.replace("ranks", "")
    assert set((test_environment / "runs").iterdir()) <= before


def test_no_count_and_no_gpu_means_two_cpu_ranks_and_the_header_says_so(kernel, no_gpus):
    cell = kernel.ok("%%distributed --out sizes\nimport os\nos.environ['WORLD_SIZE']")

    assert "2 ranks on CPU (gloo) · no GPU found" in cell.text
    assert kernel.value("sizes") == "['2', '2']"


def test_gpus_are_cpu_ranks_where_the_environment_asks_for_the_cpu(kernel):
    cell = kernel.ok("%%distributed --gpus 8 --out sizes\nimport os\nos.environ['WORLD_SIZE']", timeout_s=120)

    assert "8 ranks on CPU (gloo) · AIR_NB_DEVICE=cpu: 8 CPU ranks instead of 8 GPUs" in cell.text
    assert kernel.value("sizes") == str(["8"] * 8)


def test_variables_of_the_notebook_are_expanded_in_the_line(kernel):
    kernel.ok("wanted = 3")

    assert "[0-2] here" in kernel.ok("%%distributed --nproc {wanted} --quiet\nprint('here')").text
    assert "[0-2] here" in kernel.ok("%%distributed --nproc $wanted --quiet\nprint('here')").text


def test_env_reaches_the_ranks_only_and_may_hold_blanks(kernel, on_ranks):
    values = on_ranks(
        "import os\nos.environ['ONE'], os.environ['TWO'], os.environ['THREE']",
        "--nproc 1 --env ONE=1 --env 'TWO=a b=c' --env THREE=",
    )

    assert values == [("1", "a b=c", "")]
    assert kernel.value("[name in os.environ for name in ('ONE', 'TWO', 'THREE')]") == "[False, False, False]"


def test_name_is_the_name_of_the_run(kernel):
    cell = kernel.ok(
        "%%distributed --nproc 1 --name 'first try'\nimport os\nprint('I am', os.environ['AIR_NB_RUN_NAME'])"
    )

    assert "run first try · 1 rank on CPU" in cell.text
    assert "I am first try" in cell.text
    assert "first try" in kernel.ok("%air runs").text


def test_quiet_shows_the_output_only(kernel):
    assert kernel.ok("%%distributed --nproc 2 --quiet\nprint('alone')").text == "[0-1] alone\n"


def test_help_explains_the_options(kernel):
    cell = kernel.ok("%%distributed?")

    assert cell.reply_status == "ok"


def test_a_changed_import_variable_starts_a_new_launcher_and_the_header_names_it(kernel, on_ranks):
    kernel.ok("import os\nos.environ['TORCH_LOGS'] = 'recompiles'\nos.environ['OMP_NUM_THREADS'] = '3'")

    cell = kernel.ok("%%distributed --nproc 2 --out threads\nimport torch\ntorch.get_num_threads()", timeout_s=120)

    assert "OMP_NUM_THREADS, TORCH_LOGS changed: new launcher" in cell.text
    assert kernel.value("threads") == "[3, 3]"
    again = kernel.ok("%%distributed --nproc 2\npass")
    assert "new launcher" not in again.text


def test_cold_starts_a_new_launcher(kernel):
    before = kernel.ok("%air status").text.split("pid ")[1].split(",")[0]

    cell = kernel.ok("%%distributed --nproc 1 --cold\npass", timeout_s=120)

    assert "--cold: new launcher" in cell.text
    assert kernel.ok("%air status").text.split("pid ")[1].split(",")[0] != before
