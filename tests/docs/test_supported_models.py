"""The table of supported models says what the exactness suite found, and nothing else."""

from __future__ import annotations

import ast
from importlib.metadata import version
from pathlib import Path

from support.exactness_record import PAGE, read_record, table
from support.tiny_targets import ARCHITECTURES

HOW = 'run `make test PYTEST_ARGS="--record-exactness"` and commit what it writes'


def further_architectures() -> set[str]:
    """The names in the table of the test module that has more architectures."""
    path = Path(__file__).parents[1] / "decoding" / "test_further_architectures.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "FURTHER":
            assert isinstance(node.value, ast.Dict)
            return {key.value for key in node.value.keys if isinstance(key, ast.Constant)}  # type: ignore[misc]
    raise AssertionError(f"no FURTHER in {path}")


def test_the_record_has_the_targets_of_the_suite() -> None:
    registered = {
        (name, backend, windowed)
        for name, architecture in ARCHITECTURES.items()
        for backend in architecture.backends
        for windowed in ((False,) if architecture.window is None else (False, True))
    }
    kept = [(entry["architecture"], entry["backend"], entry["windowed"]) for entry in read_record()["targets"]]
    further = {entry for entry in kept if entry[0] not in ARCHITECTURES}
    assert len(set(kept)) == len(kept)
    if read_record()["versions"]["transformers"] == version("transformers"):
        assert set(kept) - further == registered, HOW
    else:  # the backends that an architecture has change from release to release
        assert {name for name, _, _ in set(kept) - further} == set(ARCHITECTURES), HOW
    assert {name for name, _, _ in further} == further_architectures(), HOW


def test_all_of_them_passed() -> None:
    assert not [entry for entry in read_record()["targets"] if entry["failed"] or not entry["passed"]], HOW


def test_the_page_has_the_table_of_the_record() -> None:
    assert table(read_record()) in PAGE.read_text(encoding="utf-8"), HOW


def test_a_target_that_failed_is_not_in_the_table() -> None:
    entry = {"architecture": "llama", "backend": "sdpa", "windowed": False, "attention": ["full"]}
    passed = {**entry, "passed": 3, "failed": 0}
    record = {"versions": {"transformers": "5", "torch": "2"}, "targets": [passed]}
    assert "| llama | full | sdpa | 3 |" in table(record)
    assert "llama" not in table({**record, "targets": [passed, {**passed, "backend": "eager", "failed": 1}]})
