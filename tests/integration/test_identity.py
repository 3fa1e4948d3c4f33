"""What is one object in the notebook is one object on a rank, and the notebook's own objects stay as they are."""

from __future__ import annotations

import pytest


def test_two_names_for_one_object_are_one_object_on_the_rank(kernel, on_ranks):
    kernel.ok("first = [1]\nsecond = first\nholder = {'first': first}")

    assert on_ranks("first.append(2)\nfirst is second, holder['first'] is second, second") == [(True, True, [1, 2])]
    assert kernel.value("first") == "[1]"


def test_mutual_references_survive(kernel, on_ranks):
    kernel.ok("parent, child = {}, {}\nparent['child'], child['parent'] = child, parent")

    assert on_ranks("parent['child'] is child, child['parent'] is parent") == [(True, True)]


def test_a_function_reads_the_global_that_the_cell_has_set(kernel, on_ranks):
    kernel.ok("lr = 1\ndef train():\n    return lr")

    assert on_ranks("lr = 5\ntrain()") == [5]
    assert kernel.value("lr") == "1"


def test_a_function_writes_the_global_that_the_cell_reads(kernel, on_ranks):
    kernel.ok("steps = 0\ndef step():\n    global steps\n    steps += 1")

    assert on_ranks("step()\nstep()\nsteps") == [2]
    assert kernel.value("steps") == "0"


def test_a_function_finds_what_only_the_cell_defines(kernel, on_ranks):
    kernel.ok("def use():\n    return defined_later")

    assert on_ranks("defined_later = 'here'\nuse()") == ["here"]


def test_a_class_and_its_instances_belong_together(kernel, on_ranks):
    kernel.ok("class Model:\n    scale = 2\n    def apply(self, x):\n        return self.scale * x\nmodel = Model()")

    assert on_ranks("Model.scale = 3\ntype(model) is Model, model.apply(2), Model.__module__") == [
        (True, 6, "__main__")
    ]


@pytest.mark.parametrize("option", ["--out returned", "--pull returned"])
def test_an_instance_of_a_notebook_class_that_comes_back_leaves_the_class_untouched(kernel, option):
    kernel.ok(
        "class Counter:\n    count = 0\n    def read(self):\n        return self.count\n"
        "before = (Counter, Counter.read)"
    )

    kernel.ok(f"%%distributed --nproc 2 {option}\nCounter.count = 99\nreturned = Counter()\nreturned.own = 7\nreturned")

    assert kernel.value("[type(one) is Counter for one in returned]") == "[True, True]"
    assert kernel.value("(Counter.count, returned[1].own, returned[1].read())") == "(0, 7, 0)"
    assert kernel.value("(before[0] is Counter, before[1] is Counter.read)") == "(True, True)"


def test_a_notebook_function_that_comes_back_is_the_notebooks_own(kernel):
    kernel.ok("def own():\n    return 1")

    kernel.ok("%%distributed --nproc 1 --out back\nown")

    assert kernel.value("back[0] is own") == "True"


def test_what_a_rank_defines_comes_back_by_value_and_leaves_the_notebook_alone(kernel):
    kernel.ok("scale = 1")

    kernel.ok("%%distributed --nproc 1 --out made\nscale = 5\ndef scaled(x):\n    return scale * x\nscaled")

    assert kernel.value("made[0](2)") == "10"
    assert kernel.value("scale") == "1"
    assert kernel.value("'scaled' in globals()") == "False"


_DATASET = '''
import torch
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    """Squares of the first numbers."""
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return transform(index)
def transform(index):
    return torch.tensor(index * index)
def collate(batch):
    return torch.stack(batch).tolist()
'''


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_data_loader_with_two_workers_takes_a_dataset_of_the_notebook(kernel, on_ranks, method):
    kernel.ok(_DATASET)

    batches = on_ranks(
        f"loader = DataLoader(Squares(), batch_size=4, num_workers=2, collate_fn=collate,"
        f" multiprocessing_context='{method}')\nlist(loader)",
        timeout_s=120,
    )

    assert batches == [[[0, 1, 4, 9], [16, 25, 36, 49]]]


def test_a_data_loader_with_two_workers_takes_a_dataset_that_the_cell_defines(on_ranks):
    batches = on_ranks(f"{_DATASET}\nlist(DataLoader(Squares(), batch_size=4, num_workers=2, collate_fn=collate))")

    assert batches == [[[0, 1, 4, 9], [16, 25, 36, 49]]]


def test_source_of_notebook_functions_and_classes_can_be_inspected(kernel, on_ranks):
    kernel.ok(_DATASET)
    kernel.ok("import dataclasses\n@dataclasses.dataclass\nclass Plain:\n    value: int = 3")

    function, cls, plain = on_ranks(
        "import inspect\ninspect.getsource(transform), inspect.getsource(Squares), inspect.getsource(Plain)"
    )[0]

    assert function == "def transform(index):\n    return torch.tensor(index * index)\n"
    assert cls.startswith("class Squares(Dataset):")
    assert cls.endswith("return transform(index)\n")
    assert "class Plain:\n    value: int = 3" in plain


def test_source_of_what_the_cell_itself_defines_can_be_inspected(on_ranks):
    source = on_ranks("import inspect\ndef mine(x):\n    return x + 1\ninspect.getsource(mine)")[0]

    assert source == "def mine(x):\n    return x + 1\n"


def test_torch_jit_script_takes_a_function_of_the_notebook_and_one_of_the_cell(kernel, on_ranks):
    kernel.ok(
        "import torch\ndef clipped(x: torch.Tensor) -> torch.Tensor:\n"
        "    if x.sum() > 0:\n        return x\n    return -x"
    )

    values = on_ranks(
        "def doubled(x: torch.Tensor) -> torch.Tensor:\n    return 2 * clipped(x)\n"
        "torch.jit.script(clipped)(torch.tensor([-3.0])).item(), torch.jit.script(doubled)(torch.tensor([-3.0])).item()"
    )

    assert values == [(3.0, 6.0)]
