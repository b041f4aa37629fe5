"""Runs the notebooks of this folder and keeps their outputs in them.

    python examples/run_notebooks.py
    python examples/run_notebooks.py examples/01_quickstart.ipynb

What would differ between two runs without telling anything (times, host, kernel version) is not kept.
"""

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbclient import NotebookClient
from nbformat import v4

FOLDER = Path(__file__).resolve().parent


def read(path: Path) -> Any:
    """The notebook in a file."""
    return v4.reads_json(path.read_text(encoding="utf-8"))  # type: ignore[no-untyped-call]


def run(path: Path, folder: Path, environment: Mapping[str, str] | None = None) -> Any:
    """The notebook with the outputs of a run in `folder`.

    Args:
        path (`Path`): The notebook.
        folder (`Path`): Where it runs.
        environment (`Mapping[str, str]`, *optional*): Environment variables to add.

    Raises:
        CellExecutionError: If a cell fails.
    """
    notebook = read(path)
    client = NotebookClient(
        notebook,
        timeout=500,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    imports = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": imports, "PYTHONWARNINGS": "ignore:IProgress not found"}  # there are no progress bars
    client.execute(env={**os.environ, **own, **(environment or {})})
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs and rewrites notebooks.

    Args:
        arguments (`Sequence[str]`, *optional*): The command line; that of the process if not given.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("notebooks", type=Path, nargs="*", help="all of the folder if none is given")
    for path in parser.parse_args(arguments).notebooks or sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = run(path, Path(folder))
        path.write_text(v4.writes_json(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")  # type: ignore[no-untyped-call]
        print(path.name)


if __name__ == "__main__":
    main()
