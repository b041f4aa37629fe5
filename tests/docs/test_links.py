"""Links inside the documentation lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.doc_pages import PAGES, ROOT, anchors_of, links_of, name_of, prose_of

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
OUTSIDE = re.compile(r"^(https?|mailto):")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    broken = []
    for line, link in links_of(page):
        if OUTSIDE.match(link):
            continue
        path, _, anchor = link.partition("#")
        goal = (page.parent / path).resolve() if path else page
        if not goal.exists() or not goal.is_relative_to(ROOT):
            broken.append(f"line {line}: {link}: there is no such file")
        elif anchor and anchor not in anchors_of(goal):
            broken.append(f"line {line}: {link}: {sorted(anchors_of(goal))}")
    assert not broken, "\n".join(broken)


def test_labels_that_are_referred_to_exist() -> None:
    labels = {anchor for page in PAGES for anchor in anchors_of(page)}
    used = {
        (name_of(page), name)
        for page in PAGES
        for _, line in prose_of(page)
        for name in re.findall(r"\{ref\}`(?:[^`<]*<)?([\w-]+)>?`", line)
    }
    assert used
    assert not [(page, name) for page, name in used if name not in labels]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_between_notebooks_lead_to_files(notebook: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not OUTSIDE.match(link)]
    assert not [link for link in links if not (notebook.parent / link).exists()]


def test_every_page_is_in_the_table_of_contents() -> None:
    index = ROOT / "docs" / "index.md"
    listed = re.findall(r"^[a-z_]+$", index.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.stem for page in PAGES if page.parent == index.parent and page != index)
