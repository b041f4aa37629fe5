"""The commands together: their help, their errors, their exit codes."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import Result

import jetspec_hf
from jetspec_hf import cli
from jetspec_hf.cli import bench, chat, convert, doctor, generate, push, regenerate, train
from jetspec_hf.cli.app import app, in_one_line
from jetspec_hf.cli.models import Models

Run = Callable[..., Result]

OWN = {"generate": generate, "chat": chat, "convert": convert, "push": push}
FORWARDED = {"regenerate": regenerate, "train": train, "bench": bench, "doctor": doctor}
MODULES = {
    "regenerate": "training.regenerate",
    "train": "training.recipe",
    "bench": "bench.speed",
    "doctor": "bench.doctor",
}
EXAMPLES = [(name, example) for name, command in (OWN | FORWARDED).items() for example in command.EXAMPLES]


@pytest.mark.parametrize("name", OWN | FORWARDED)
def test_the_help_of_a_command_says_how_to_use_it(run: Run, name: str) -> None:
    result = run(name, "--help", COLUMNS="80")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: jetspec {name} [")
    assert {*(OWN | FORWARDED)[name].EXAMPLES} <= {line.strip() for line in result.stdout.splitlines()}
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_an_example_is_a_command_line_that_is_understood(
    name: str, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.json").write_text("{}")
    Path("prompts.jsonl").write_text('{"prompt": "Hello"}')
    Path("TARGET").mkdir()
    Path("TARGET/config.json").write_text('{"model_type": "llama"}')
    Path("HEAD").mkdir()  # where the doctor may save
    program, command, *arguments = shlex.split(example.partition(" < ")[0])
    assert (program, command) == ("jetspec", name)
    if name in OWN:
        group: Any = typer.main.get_command(app)
        group.commands[name].make_context(name, arguments)
    else:
        importlib.import_module(f"jetspec_hf.{MODULES[name]}").parse(arguments)


def test_all_commands_are_listed(run: Run) -> None:
    listed = run("--help").stdout
    assert all(f"\n  {name} " in listed for name in OWN | FORWARDED)
    assert run("--version").stdout == f"jetspec_hf {jetspec_hf.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve"], "No such command 'serve'"),
        (["generate", "hello"], "Missing option '--head'"),
        (["generate", "hello", "--head", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["chat", "--head", "x", "--tree"], "No such option: --tree"),
        (["convert", "x", "y", "--to", "eagle"], "must be one of jetspec, published"),
        (["convert", "x", "y", "--to", "published", "--load-target"], "needs `--target`"),
        (["regenerate", "--target", "x"], "the following arguments are required: --prompts, --output"),
        (["train", "--max_step", "3", "--target", "x", "--answers", "y"], "--max_step"),
        (["bench", "--seed", "one"], "--seed"),
        (["generate", "hello", "--head", "x", "--tree-budget", "foo"], "an integer of at least 0, got 'foo'"),
        (["chat", "--head", "x", "--tree-budget", "-3"], "an integer of at least 0, got '-3'"),
        (["generate", "hello", "--head", "x", "--device", "abacus"], "must be a device of this machine, got 'abacus'"),
        (["bench", "--device", "abacus"], "must be a device of this machine, got 'abacus'"),
        (["regenerate", "--device", "abacus"], "must be a device of this machine, got 'abacus'"),
        (["generate", " \n", "--head", "x"], "must have text to go on from"),
        (["regenerate", "--prompts", "/nope.jsonl"], "--prompts: must be a file that is there, got /nope.jsonl"),
        (["regenerate", "--max-new-tokens", "0"], "--max-new-tokens: must be an integer of at least 1, got '0'"),
        (["regenerate", "--temperature", "-1"], "--temperature: must be a number of at least 0, got '-1'"),
        (["regenerate", "--shard", "5/4"], "--shard: must be a share and how many there are, as in 1/4, got '5/4'"),
        (["train", "/nope.json"], "the recipe /nope.json must be a file with a JSON object"),
    ],
    ids=str,
)
def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_2(
    run: Run, arguments: list[str], message: str
) -> None:
    result = run(*arguments)
    command = f"jetspec {arguments[0]}" if arguments and arguments != ["serve"] else "jetspec"
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.endswith(f" (see `{command} --help`)\n")
    assert result.stderr.count("\n") == 1


def test_without_a_command_the_help_is_shown(run: Run) -> None:
    assert run().stdout == run("--help").stdout
    assert run().exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["generate", "x", "--head", "./nope"],
            "`--head` must be a folder or a Hub id, and there is no folder ./nope.",
        ),
        (["generate", "x", "--head", "HEAD", "--target", "/nope"], "`--target` must be a folder or a Hub id"),
        (["chat", "--head", "HEAD", "--target", "HEAD"], "`--target` must be the target, a language model, got HEAD"),
        (
            ["convert", "/nope", "y", "--to", "jetspec"],
            "HEAD must be a folder or a Hub id, and there is no folder /nope",
        ),
        (["push", "/nope", "a/b"], "HEAD must be a folder or a Hub id, and there is no folder /nope"),
        (["push", "HEAD", "a/b", "--tokenizer", "/nope"], "`--tokenizer` must be a folder or a Hub id"),
        (["regenerate", "--target", "/nope", "--output", "x", "--prompts", "PROMPTS"], "there is no folder /nope"),
        (["regenerate", "--target", "HEAD", "--output", "x", "--prompts", "PROMPTS"], "HEAD, which is a draft head"),
        (["train", "--target", "HEAD", "--answers", "x", "--output_dir", "y"], "HEAD, which is a draft head"),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_is_named_with_its_option(
    run: Run, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("HEAD").symlink_to(folders.head)
    Path("PROMPTS").write_text('{"prompt": "hello"}\n')
    result = run(*arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert message in result.stderr


def test_a_failure_is_one_line_and_exit_code_1(run: Run, tmp_path: Path) -> None:
    result = run("generate", "hello", "--head", tmp_path / "nowhere")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith("error: ")
    assert "nowhere" in result.stderr


def test_where_an_error_came_from_is_shown_when_asked_for(run: Run, tmp_path: Path) -> None:
    result = run("--traceback", "generate", "hello", "--head", tmp_path / "nowhere")
    assert isinstance(result.exception, OSError)
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (KeyError("layers"), "KeyError: 'layers'"),
        (ModuleNotFoundError(name="datasets"), "this command needs `datasets`: pip install 'jetspec_hf[train]'"),
        (ModuleNotFoundError("No module named 'x'", name="x"), "ModuleNotFoundError: No module named 'x'"),
        (RuntimeError(), "RuntimeError: "),
        (FileExistsError("`folder` must be empty"), "`folder` must be empty"),
        (PermissionError(13, "Permission denied", "/x"), "/x: Permission denied"),
        (json.JSONDecodeError("Extra data", "1 2", 2), "JSONDecodeError: Extra data: line 1 column 3 (char 2)"),
    ],
    ids=repr,
)
def test_what_an_error_says(error: Exception, line: str) -> None:
    assert in_one_line(error) == line


def test_ctrl_c_is_exit_code_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Models, "load", interrupted)
    assert run("generate", "hello", "--head", "x").exit_code == 130


def test_without_typer_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jetspec_hf.cli.app")
    monkeypatch.delattr(cli, "app")
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == "error: the `jetspec` command needs `typer`: pip install 'jetspec_hf[cli]'"


def test_a_chat_through_pipes_has_no_colours_and_ends_with_ctrl_c(folders: Any) -> None:
    command = [sys.executable, "-m", "jetspec_hf.cli", "chat", "--head", folders.head, "--max-new-tokens", "12"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(jetspec_hf.__file__).parents[1])}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # started in the background of a shell, the tests themselves may be deaf to Ctrl-C, and the child with them
    listen: Any = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, env=environment, text=True, bufsize=1, **pipes, **listen) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("hello\n")
        answer = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate()
    assert answer.strip()
    assert "\x1b" not in answer + rest
    assert process.returncode == 130
