"""The notebook of the documentation runs, and shows in each cell what it was saved with."""

import json
import os
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "notebook.ipynb"


def kinds(outputs) -> set[str]:
    """The output of a cell: text, and the types of results; progress on stderr is not saved."""
    return {
        kind
        for output in outputs
        for kind in output.get("data", {f"{output.get('name')}": ""})
        if output["output_type"] != "stream" or output["name"] != "stderr"
    }


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parents[1]), os.environ.get("PYTHONPATH", "")]))
    book = nbformat.read(NOTEBOOK, as_version=4)
    saved = [kinds(cell.outputs) for cell in book.cells if cell.cell_type == "code"]
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [kinds(cell.outputs) for cell in cells] == saved
    assert sum("text/html" in each for each in saved) >= 6
    assert any(output.get("name") == "stderr" for cell in cells for output in cell.outputs)  # the bars of tqdm
    assert (tmp_path / "demo" / "new.pth").is_file()


def test_the_notebook_contains_no_local_paths():
    text = json.dumps(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
    assert not any(place in text for place in ("/tmp", "/home", "/work", "Error\\n", "Traceback"))
