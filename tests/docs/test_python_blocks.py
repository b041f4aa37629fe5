"""The Python code of every page runs, from its first block to its last, in one namespace."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.doc_pages import PAGES, blocks_of, name_of
from support.doc_stand_ins import stand_ins

WITH_CODE = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    blocks = [block for block in blocks_of(page) if block.language == "python" and block.not_run is None]
    with stand_ins(tmp_path) as namespace:
        for block in blocks:
            # so that a traceback shows the page's own line
            code = compile("\n" * (block.line - 1) + block.code, name_of(page), "exec")
            exec(code, namespace)


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_that_is_not_run_can_be_read(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            ast.parse(block.code, name_of(page))


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    skipped = [(name_of(page), block.line) for page in PAGES for block in blocks_of(page) if block.not_run]
    assert len(skipped) <= 3, skipped


def test_every_block_says_its_language() -> None:
    nameless = [(name_of(page), block.line) for page in PAGES for block in blocks_of(page) if not block.language]
    assert not nameless, "write ```text for what is no code"
