"""The notebooks run from their first cell to their last, and are kept with clean outputs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from nbclient import NotebookClient
from nbformat import v4

import jetspec_hf

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))

by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return v4.reads_json(path.read_text(encoding="utf-8"))  # type: ignore[no-untyped-call]


@by_name
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = read(path)
    client = NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}})
    package = str(Path(jetspec_hf.__file__).parents[1])
    places = {"TMPDIR": str(tmp_path), "IPYTHONDIR": str(tmp_path / "ipython"), "PYTHONPATH": package}
    client.execute(env={**os.environ, **places, "OMP_NUM_THREADS": "1"})  # raises the error of a cell
    run = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert run == list(range(1, len(run) + 1))


@by_name
def test_a_notebook_is_kept_with_its_outputs(path: Path) -> None:
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/png", "image/svg+xml"} <= kinds
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    places = (str(Path.home()), str(Path(__file__).parents[2]), "/tmp/", "/home/", "/Users/")
    assert not [place for place in places if place in path.read_text(encoding="utf-8")]
