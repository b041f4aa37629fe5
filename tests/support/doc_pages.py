"""The pages of the documentation, taken apart: code blocks, links and the places they may point to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "examples" / "heads").glob("*/README.md")),
]

_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>```+)(?P<language>[^\s`]*)")
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+) -->")
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)|(?:src|href)=\"(?P<attribute>[^\"]+)\"")
_HEADING = re.compile(r"^#{1,6} +(?P<title>.+?) *$")
_LABEL = re.compile(r"^\((?P<name>[\w-]+)\)=$")


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Args:
        line: the number of its first line of code.
        language: what stands after the fence.
        code: its text, without common indentation.
        not_run: the reason in the comment `<!-- not run: ... -->` on the line above it, if there is one.
    """

    line: int
    language: str
    code: str
    not_run: str | None = None


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        number += 1
        if fence is None:
            continue
        start = number
        while lines[number].strip() != fence["marks"]:
            number += 1
        indent = len(fence["indent"])
        above = _NOT_RUN.search(lines[start - 2]) if start > 1 else None
        code = "\n".join(line[indent:] for line in lines[start:number])
        found.append(Block(start + 1, fence["language"], code, above and above["reason"]))
        number += 1
    return found


def prose_of(page: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines outside code blocks."""
    marks = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = _FENCE.match(line)
        if fence and marks is None:
            marks = fence["marks"]
        elif marks is None:
            yield number, line
        elif line.strip() == marks:
            marks = None


def links_of(page: Path) -> Iterator[tuple[int, str]]:
    for number, line in prose_of(page):
        for link in _LINK.finditer(re.sub(r"`[^`]*`", "", line)):
            yield number, link["target"] or link["attribute"]


def anchors_of(page: Path) -> set[str]:
    """What GitHub and Sphinx make of the headings, and the labels of `{ref}`."""
    anchors = set()
    for _, line in prose_of(page):
        if heading := _HEADING.match(line):
            title = re.sub(r"[^\w\s-]", "", heading["title"].lower())
            anchors.add(re.sub(r"\s", "-", title.strip()))
        if label := _LABEL.match(line):
            anchors.add(label["name"])
    return anchors
