"""The tour notebook: the file keeps the outputs of a whole run, and its cells run."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "jax_fa4_tour.ipynb"


def test_it_was_run_top_to_bottom_without_errors():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 4


@pytest.mark.slow
def test_it_runs(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, 4)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute()
