"""Values of the ranks in the notebook: ``--out``, ``--pull``, what failed ranks leave, what can't come back."""

from __future__ import annotations


def test_out_is_a_list_whose_index_is_the_rank_and_suppresses_the_echo(kernel):
    cell = kernel.ok("%%distributed --nproc 3 --out mine\nimport os\nint(os.environ['RANK']) * 1000 + 7")

    assert kernel.value("mine") == "[7, 1007, 2007]"
    assert "1007" not in cell.text


def test_the_last_expression_is_echoed_without_out(kernel):
    cell = kernel.ok("%%distributed --nproc 2\n'an' + ' echo'")

    assert "'an echo'" in cell.text


def test_one_rank_gives_a_list_of_one(kernel):
    kernel.ok("%%distributed --nproc 1 --out single --pull pulled\npulled = 'p'\n'o'")

    assert kernel.value("(single, pulled)") == "(['o'], ['p'])"


def test_out_is_none_where_the_last_expression_is_none(kernel):
    kernel.ok("%%distributed --nproc 2 --out empty\nprint('no value')")

    assert kernel.value("empty") == "[None, None]"


def test_pull_fetches_names_and_gives_none_for_ranks_that_lack_them(kernel):
    kernel.ok(
        "%%distributed --nproc 2 --pull loss,only_first\nimport os\nrank = int(os.environ['RANK'])\nloss = rank / 2\n"
        "if rank == 0:\n    only_first = 'here'"
    )

    assert kernel.value("(loss, only_first)") == "([0.0, 0.5], ['here', None])"


def test_pull_of_a_name_that_no_rank_has_is_an_error_after_the_others_were_fetched(kernel):
    cell = kernel.run("%%distributed --nproc 2 --pull fetched,nowhere\nfetched = 1")

    assert cell.reply_status == "error"
    assert "UsageError: --pull nowhere: no rank has this name at the end of the cell" in cell.text
    assert kernel.value("fetched") == "[1, 1]"


def test_pull_of_a_captured_name_gives_what_each_rank_made_of_it(kernel):
    kernel.ok("history = ['start']")

    kernel.ok("%%distributed --nproc 2 --pull history\nimport os\nhistory.append(os.environ['RANK'])")

    assert kernel.value("history") == "[['start', '0'], ['start', '1']]"


def test_torch_tensors_keep_their_values_types_and_shared_storage(kernel):
    kernel.ok("""%%distributed --nproc 2 --out returned
import torch
base = torch.arange(6, dtype=torch.bfloat16)
{"base": base, "view": base[2:4], "grad": torch.ones(2, requires_grad=True), "empty": torch.empty(0, 3)}
""")

    assert kernel.value("[one['base'].tolist() for one in returned]") == str([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2)
    kernel.ok("returned[0]['view'][0] = 9\nassert returned[0]['base'][2] == 9 and returned[1]['base'][2] == 2")
    assert (
        kernel.value("(returned[0]['grad'].requires_grad, str(returned[0]['view'].dtype))")
        == "(True, 'torch.bfloat16')"
    )
    assert kernel.value("tuple(returned[0]['empty'].shape)") == "(0, 3)"


def test_an_array_of_100_mb_comes_back_writable_and_its_file_is_gone(kernel, test_environment):
    kernel.ok(
        "%%distributed --nproc 2 --out large\nimport numpy, os\n"
        "numpy.full(100_000_000, int(os.environ['RANK']), numpy.uint8)"
    )

    assert kernel.value("[(len(one), int(one[-1]), one.flags.writeable) for one in large]") == str(
        [(100_000_000, rank, True) for rank in range(2)]
    )
    kernel.ok("large[0][0] = 1\ndel large")
    assert not list((test_environment / "runs").glob("*/*.result"))


def test_results_of_the_ranks_that_had_finished_are_on_the_exception(kernel):
    cell = kernel.run("""%%distributed --nproc 3 --out unused
import os, time
rank = int(os.environ["RANK"])
if rank == 1:
    directory = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
    while len([name for name in os.listdir(directory) if name.endswith(".result")]) < 2:
        time.sleep(0.01)
    raise ValueError("only rank 1")
("finished", rank)
""")

    assert cell.reply_status == "error"
    assert "ValueError: only rank 1" in cell.traceback
    kernel.ok("import sys\nfailure = sys.last_value")
    assert kernel.value("failure.results") == "[('finished', 0), None, ('finished', 2)]"
    assert kernel.value("[(one.rank, one.type_name, one.message) for one in failure.failures]") == str(
        [(1, "ValueError", "only rank 1")]
    )
    assert kernel.value("type(failure.__cause__)") == "<class 'ValueError'>"
    assert kernel.value("'unused' in globals()") == "False"


def test_a_value_that_can_not_be_pickled_is_an_error_that_says_so(kernel):
    cell = kernel.run("%%distributed --nproc 2 --out unused\nopen('/dev/null')")

    assert cell.reply_status == "error"
    assert "the result (TextIOWrapper) can't be sent back from the rank: it is an open file." in cell.traceback
    assert "Return what can be pickled instead" in cell.traceback
    assert "air_nb/" not in cell.traceback


def test_a_pulled_value_that_can_not_be_pickled_is_named(kernel):
    cell = kernel.run("%%distributed --nproc 2 --pull fine,lock\nimport threading\nfine, lock = 1, threading.Lock()")

    assert "`lock` (lock) can't be sent back from the rank: it is a lock of this process." in cell.traceback


def test_an_exception_whose_class_only_a_rank_knows_is_replaced_by_its_text(kernel):
    kernel.run(
        "%%distributed --nproc 2\nclass Own(Exception):\n"
        "    def __init__(self, a, b):\n        super().__init__('own words')\n"
        "raise Own(1, 2)"
    )

    kernel.ok("import sys\nfailure = sys.last_value")
    assert (
        kernel.value("(type(failure.__cause__).__name__, str(failure.__cause__))")
        == "('RemoteError', 'Own: own words')"
    )


def test_a_name_error_in_a_later_cell_hints_at_pull(kernel):
    kernel.ok("%%distributed --nproc 2\nlearned_weights = 3")

    cell = kernel.run("learned_weights")

    assert "hint: `learned_weights` was assigned on the ranks" in cell.text
    assert "`--pull learned_weights` there fetches it" in cell.text
    assert "hint" not in kernel.run("never_assigned_anywhere").text
