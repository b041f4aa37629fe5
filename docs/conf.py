"""Sphinx configuration: warnings are errors, and nothing is fetched from the network."""

import re
from importlib.metadata import version as installed_version
from typing import Any

project = "jetspec_hf"
author = "The jetspec_hf authors"
copyright = author
release = version = installed_version("jetspec_hf")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
myst_enable_extensions = ["dollarmath", "fieldlist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
nitpicky = False  # types of torch and transformers cannot be resolved offline
html_theme = "furo"
html_title = f"jetspec_hf {release}"

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings give types and shapes
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)$")
REFERENCE = re.compile(r"\[`~?(?P<name>[^`]+)`\]")


def hugging_face_to_restructured_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turns the Markdown of Hugging Face docstrings (fenced code, [`Reference`]) into reStructuredText, in place."""
    converted: list[str] = []
    in_code = False
    for line in lines:
        fence = FENCE.match(line)
        if fence and not in_code:
            converted += [f"{fence['indent']}.. code-block:: {fence['language'] or 'text'}", ""]
            in_code = True
        elif fence:
            converted.append("")
            in_code = False
        else:
            converted.append(f"    {line}" if in_code and line else REFERENCE.sub(r"`\g<name>`", line))
    lines[:] = converted


def setup(app: Any) -> None:
    # Before napoleon (priority 500), which would take a fence inside a section apart.
    app.connect("autodoc-process-docstring", hugging_face_to_restructured_text, priority=400)
