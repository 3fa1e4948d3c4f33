"""Notebooks run without a page: nbclient, nbconvert, and what they keep."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys

import nbclient
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.support.screen import on_ranks

BARS = on_ranks(
    """
    from tqdm.auto import tqdm
    for _ in tqdm(range(400), mininterval=0):
        pass
    print("after the bar")
    """
)
FIGURE = on_ranks(
    """
    %matplotlib inline
    import matplotlib.pyplot as plt
    print("before")
    if get_rank() == 1:
        plt.figure(figsize=(2, 1)); plt.plot([1, 2]); plt.show()
    print("after")
    """,
    "--nproc 2",
)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """A notebook that was run by nbclient, which went on past the cell that fails."""
    sources = [
        "%load_ext air_nb\nfrom air_nb.runtime import get_rank",
        on_ranks('print("same"); print("rank", get_rank())', "--nproc 4 --quiet"),
        BARS,
        FIGURE,
        "%%capture kept\n" + on_ranks('print("hidden")', "--nproc 2 --quiet"),
        "print(repr(kept.stdout))",
        on_ranks('for i in range(20_000): print(get_rank(), "x" * 100, i)', "--nproc 2"),
        on_ranks('print("then"); {}["missing"]', "--nproc 2"),
    ]
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    notebook.cells[-1].metadata["tags"] = ["raises-exception"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIR_NB_DEVICE", "cpu")
        run(notebook, tmp_path_factory.mktemp("cwd"))
    return notebook


def run(notebook, cwd):
    """Execute; in a loop of our own, so that nothing of it is left in this thread."""
    client = nbclient.NotebookClient(
        notebook, kernel_name="python3", timeout=120, resources={"metadata": {"path": cwd}}
    )
    asyncio.run(client.async_execute())


def test_nbclient_keeps_the_folded_lines(notebook):
    outputs = notebook.cells[1].outputs
    assert {output.name for output in outputs} == {"stdout"}
    text = "".join(output.text for output in outputs)
    assert text == "[0-3] same\n[0] rank 0\n[1] rank 1\n[2] rank 2\n[3] rank 3\n"


def test_nbclient_keeps_bars_in_their_last_state(notebook):
    lines = text_of(notebook.cells[2]).splitlines()
    bars = [line for line in lines if "400/400" in line]
    assert sorted(line[:9] for line in bars) == [f"[{rank}] 100%|"[:9] for rank in range(4)]
    assert len([line for line in lines if "%|" in line]) == 4
    assert len(lines) <= 10


def test_nbclient_keeps_the_figure_between_its_prints(notebook):
    outputs = [output for output in notebook.cells[3].outputs if not is_headline(output)]
    (place,) = [index for index, output in enumerate(outputs) if "image/png" in output.get("data", {})]
    assert "before" in "".join(output.get("text", "") for output in outputs[:place])
    assert "after" in "".join(output.get("text", "") for output in outputs[place:])
    assert "[1] after" not in "".join(output.get("text", "") for output in outputs[:place])


def test_capture_keeps_the_text_out_of_the_notebook(notebook):
    assert notebook.cells[4].outputs == []
    assert notebook.cells[5].outputs[0].text == "'[0-1] hidden\\n'\n"


def test_what_a_flood_leaves_in_the_notebook_is_small(notebook):
    text = text_of(notebook.cells[6])
    assert len(text) < 600_000
    assert text.count("\n") <= 2_010
    assert re.search(r"… .* lines in ", text)


def test_a_failed_cell_keeps_its_output_above_its_error(notebook):
    outputs = notebook.cells[7].outputs
    assert outputs[-1].output_type == "error"
    assert outputs[-1].ename == "RankFailedError"
    assert "KeyError" in "\n".join(outputs[-1].traceback)
    assert "then" in text_of(notebook.cells[7])


def test_header_and_footer_are_saved_in_their_last_state(notebook):
    for cell in (notebook.cells[2], notebook.cells[3]):
        header, footer = [output for output in cell.outputs if is_headline(output)]
        assert header.data["text/plain"].endswith("FINISHED")
        assert footer.data["text/plain"].startswith("FINISHED in ")


def test_the_saved_notebook_is_valid_and_small(notebook):
    nbformat.validate(notebook)
    assert len(nbformat.writes(notebook)) < 1_000_000


def test_a_failing_cell_ends_the_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("AIR_NB_DEVICE", "cpu")
    cells = ["%load_ext air_nb", on_ranks("1 / 0", "--nproc 2"), "print('must not run')"]
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        run(notebook, tmp_path)
    assert notebook.cells[2].outputs == []


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Cells run by ``jupyter nbconvert --execute``, then made a page."""
    folder = tmp_path_factory.mktemp("nbconvert")
    cells = ["%load_ext air_nb\nfrom air_nb.runtime import get_rank", BARS, FIGURE]
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in cells]), folder / "in.ipynb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIR_NB_DEVICE", "cpu")
        nbconvert(folder, "--execute", "--to", "notebook", "in.ipynb", "--output", "out.ipynb")
        nbconvert(folder, "--to", "html", "out.ipynb", "--output", "out.html")
    return folder


def nbconvert(folder, *arguments):
    command = [sys.executable, "-m", "nbconvert", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_nbconvert_to_notebook_has_four_final_bars(converted):
    notebook = nbformat.read(converted / "out.ipynb", as_version=4)
    nbformat.validate(notebook)
    lines = text_of(notebook.cells[1]).splitlines()
    assert len([line for line in lines if "400/400" in line]) == 4
    assert len([line for line in lines if "%|" in line]) == 4


def test_nbconvert_to_html_has_bars_figure_and_headlines(converted):
    page = (converted / "out.html").read_text()
    assert page.count("400/400") == 4
    assert page.count('src="data:image/png') == 1
    assert page.count("FINISHED in ") == 2
    assert page.index("before") < page.index('src="data:image/png')


def text_of(cell):
    parts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "\n".join(part.removesuffix("\n") for part in parts)


def is_headline(output):
    text = output.get("data", {}).get("text/plain", "")
    return text.startswith(("run ", "FINISHED in "))
