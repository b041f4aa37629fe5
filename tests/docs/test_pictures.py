"""The pictures of the documentation are small, are shown, and are what the script draws."""

from __future__ import annotations

import runpy

from support.doc_pages import PAGES, ROOT

IMAGES = ROOT / "docs" / "images"


def test_the_drawing_of_the_method_is_what_the_script_draws() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "make_pictures.py"))
    assert script["draw_method"]() == (IMAGES / "method.svg").read_text(encoding="utf-8")


def test_pictures_are_small_and_each_is_shown_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    pictures = [path for path in IMAGES.iterdir() if path.suffix in (".svg", ".png")]
    assert {path.suffix for path in pictures} == {".svg", ".png"}
    assert not [path.name for path in pictures if path.stat().st_size > 100_000]
    assert not [path.name for path in pictures if f"images/{path.name}" not in pages]
