"""The commands that the pages tell people to type exist, with the options that are shown."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.doc_pages import PAGES, ROOT, blocks_of, name_of

if sys.version_info >= (3, 11):
    import tomllib
else:  # comes with the newest pytest there
    import tomli as tomllib

SHELL = ("bash", "sh", "console", "shell")
# Other people's programs, which are not there while tests run.
OUTSIDE = {"cd", "git", "vllm", "accelerate", "hf"}
OUTSIDE_MODULES = {"sglang.launch_server", "venv"}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Where a command stands, and its words."""
    for page in PAGES:
        for block in blocks_of(page):
            if block.language not in SHELL:
                continue
            for line in block.code.replace("\\\n", " ").splitlines():
                line_of_code = re.sub(r"(^|\s)#.*", "", re.sub(r"^\$ ", "", line))
                for command in re.split(r"&&|\|\||;|\|", line_of_code):
                    if words := shlex.split(command):
                        yield f"{name_of(page)}, line {block.line}", words


ALL = list(commands())


@functools.cache
def help_of(*words: str) -> str:
    """What `python WORDS --help` prints, run here."""
    is_module = words[0] == "-m"
    name, *rest = words[is_module:]
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)  # by other tests
        patch.setattr(sys, "argv", [name, *rest, "--help"])
        patch.setenv("COLUMNS", "200")
        patch.syspath_prepend(str(ROOT / "examples"))
        with contextlib.suppress(SystemExit):
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / name), run_name="__main__")
    return printed.getvalue()


def unknown_options(words: list[str], known: str) -> list[str]:
    names = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", known))
    options = [word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)]
    return [option for option in options if option not in names]


def problems_of(words: list[str]) -> list[str]:
    program, *rest = words
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return [word for word in rest if "=" not in word and word not in targets]
    if program == "pip":
        return [] if rest[0] == "install" else [program]
    if program == "jetspec":
        subcommand = rest[:1] if rest and not rest[0].startswith("-") else []
        return unknown_options(rest, help_of("-m", "jetspec_hf.cli", *subcommand))
    if program in ("python", "python3"):
        script = rest[:2] if rest[0] == "-m" else rest[:1]
        if script[-1] in OUTSIDE_MODULES:
            return []
        return unknown_options(rest[len(script) :], help_of(*script))
    return [] if program in OUTSIDE else [program]


@pytest.mark.parametrize("page", sorted({place.split(",")[0] for place, _ in ALL}))
def test_commands_and_their_options_exist(page: str) -> None:
    problems = {
        f"{place}: {shlex.join(words)}": problems
        for place, words in ALL
        if place.split(",")[0] == page and (problems := problems_of(words))
    }
    assert not problems


def test_an_option_that_does_not_exist_is_found() -> None:
    assert problems_of(shlex.split("python -m jetspec_hf.bench.phases --target T --no-such-option")) == [
        "--no-such-option"
    ]
    assert problems_of(["make", "no-such-target"]) == ["no-such-target"]


def test_extras_that_are_installed_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {
        extra
        for _, words in ALL
        for word in words
        for extras in re.findall(r"^(?:\.|jetspec_hf)\[([\w,]+)\]$", word)
        for extra in extras.split(",")
    }
    assert asked
    assert asked <= set(project["optional-dependencies"])


def test_modules_that_pages_name_in_a_sentence_exist() -> None:
    named = {
        match
        for page in PAGES
        for match in re.findall(r"`python -m (jetspec_hf[\w.]*)", page.read_text(encoding="utf-8"))
    }
    assert named
    for module in named:
        path = ROOT / "src" / Path(*module.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
