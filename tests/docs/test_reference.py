"""The reference is complete: every public name is in `docs/api.md`, and has a docstring.

Public is what a module lists in `__all__`, and whatever pages, notebooks and examples import from the library.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import jetspec_hf
from support.doc_pages import PAGES, ROOT, blocks_of, name_of

DIRECTIVE = re.compile(
    r"^\.\. (?:auto|py:)(?P<kind>class|function|data|module|exception):: (?P<name>[\w.]+)\n(?P<options>( +:.*\n)*)",
    re.MULTILINE,
)


def modules() -> list[Any]:
    names = [module.name for module in pkgutil.walk_packages(jetspec_hf.__path__, "jetspec_hf.")]
    return [jetspec_hf, *(importlib.import_module(name) for name in names if not name.endswith("__main__"))]


def look_up(dotted: str) -> Any:
    """The object under a dotted name, through modules and classes."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"{dotted} does not exist")


def documented() -> list[Any]:
    """The objects in the reference; of an `automodule` the members that it lists, or all public ones of its own."""
    found = []
    for directive in DIRECTIVE.finditer((ROOT / "docs" / "api.md").read_text(encoding="utf-8")):
        thing = look_up(directive["name"])
        found.append(thing)
        members = re.search(r":members:(?P<names>.*)", directive["options"])
        if directive["kind"] == "module" and members:
            names = re.findall(r"\w+", members["names"]) or [name for name in dir(thing) if not name.startswith("_")]
            own = [getattr(thing, name) for name in names]
            found += [member for member in own if getattr(member, "__module__", None) == thing.__name__]
    return found


def imports_of(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("jetspec_hf"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def code_of_notebook(cells: list[dict[str, Any]]) -> str:
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return re.sub(r"^%.*$", "", code, flags=re.MULTILINE)  # what only a notebook understands


def public_names() -> dict[str, str]:
    """Dotted names and where each is public."""
    found = {}
    for module in modules():
        found.update({f"{module.__name__}.{name}": module.__name__ for name in getattr(module, "__all__", ())})
    for page in PAGES:
        for block in blocks_of(page):
            if block.language == "python":
                found.update(dict.fromkeys(imports_of(block.code), name_of(page)))
    for script in (ROOT / "examples").glob("*.py"):
        found.update(dict.fromkeys(imports_of(script.read_text(encoding="utf-8")), name_of(script)))
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        found.update(dict.fromkeys(imports_of(code_of_notebook(cells)), name_of(notebook)))
    return found


PUBLIC = public_names()


def test_every_public_name_is_in_the_reference() -> None:
    there = documented()
    missing = {name: place for name, place in PUBLIC.items() if not any(look_up(name) is thing for thing in there)}
    assert not missing


def test_everything_in_the_reference_has_a_docstring() -> None:
    without = [thing for thing in documented() if not inspect.getdoc(thing)]
    assert not without


def test_public_methods_have_docstrings() -> None:
    without = [
        f"{thing.__module__}.{thing.__name__}.{name}"
        for thing in documented()
        if inspect.isclass(thing) and thing.__module__.startswith("jetspec_hf")
        for name, member in vars(thing).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, (property, classmethod)))
        if not inspect.getdoc(member)
    ]
    assert not without
