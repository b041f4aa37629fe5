"""The notebooks run from first cell to last, give the kinds of outputs they are kept with, and name no place."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

import jetspec_hf

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
RICH = {"image/png", "image/svg+xml", "text/markdown"}

by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds_of(cell: Any) -> list[str]:
    """What a cell shows: streams by name, and rich outputs by their richest kind."""
    kinds = []
    for output in cell.outputs:
        rich = sorted(RICH.intersection(output.get("data", {})))
        kinds.append(rich[0] if rich else output.get("name", output.output_type))
    return kinds


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for temporary files in which the toy is made once, by whichever process comes first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "notebooks"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.timeout(900)
@by_name
def test_a_notebook_runs_and_shows_what_it_is_kept_with(path: Path, shared_folder: Path, tmp_path: Path) -> None:
    from run_notebooks import read, run  # noqa: PLC0415  # of `examples`, which a fixture puts on the path

    environment = {
        "TMPDIR": str(shared_folder),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(Path(jetspec_hf.__file__).parents[1])]),
        "OMP_NUM_THREADS": "1",
    }
    notebook = run(path, tmp_path, environment)  # raises the error of a cell
    kept = read(path)
    assert [cell.source for cell in code_cells(notebook)] == [cell.source for cell in code_cells(kept)]
    assert [kinds_of(cell) for cell in code_cells(notebook)] == [kinds_of(cell) for cell in code_cells(kept)]


@by_name
def test_a_notebook_is_kept_with_its_outputs(path: Path) -> None:
    from run_notebooks import read  # noqa: PLC0415

    cells = code_cells(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [kind for cell in cells for kind in kinds_of(cell)]
    assert RICH.intersection(kinds)
    assert not {"error", "stderr"}.intersection(kinds)
    places = (str(Path.home()), str(EXAMPLES.parent), tempfile.gettempdir() + "/", "/tmp/", "/home/", "/Users/")
    assert not [place for place in places if place in path.read_text(encoding="utf-8")]
