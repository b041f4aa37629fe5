"""The commands that hand a job to the library: that it is done, with the arguments given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from typer.testing import Result

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.cli import push
from jetspec_hf.hub import read_checkpoint

Run = Callable[..., Result]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": f"prompt-{number}", "prompt": text} for number, text in enumerate(("hello", "more", "words"))]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def test_from_prompts_to_a_measured_head(run: Run, folders: Any, prompts: Path, tmp_path: Path) -> None:
    answers, head, figures = tmp_path / "answers.jsonl", tmp_path / "trained", tmp_path / "speed.json"
    given = ["--target", folders.target, "--threads", 1]
    result = run("regenerate", *given, "--prompts", prompts, "--output", answers, "--max-new-tokens", 9)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"3 answers are in {answers}\n"
    assert [len(json.loads(line)["response_ids"]) for line in answers.read_text().splitlines()] == [9, 9, 9]

    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"num_hidden_layers": 1, "block_size": 4, "simulated": 0, "heldout_share": 0.0}))
    options = ["--max_steps", 1, "--use_cpu", "true", "--save_strategy", "no", "--disable_tqdm", "true"]
    result = run("train", recipe, *given, "--answers", answers, "--output_dir", head, *options)
    assert result.exit_code == 0, result.stderr
    assert "3 answers to train on, 0 held out" in result.stdout
    assert JetSpecDraftHead.from_pretrained(head).config.block_size == 4

    options = ["--limit", 1, "--max-new-tokens", 4, "--tree-budget", 3, "--dtype", "float32", "--json", figures]
    result = run("bench", *given, "--head", head, "--prompts", prompts, *options)
    assert result.exit_code == 0, result.stderr
    assert figures.is_file()

    options = ["--prompts", prompts, "--limit", 1, "--max-new-tokens", 4, "--sizes", 2, "--dtype", "float32"]
    result = run("doctor", *given, "--head", head, *options)
    assert result.exit_code == 0, result.stderr
    assert "this head" in result.stdout


def test_a_head_is_converted_and_the_command_that_serves_it_printed(run: Run, folders: Any, tmp_path: Path) -> None:
    arguments = ["convert", folders.head, tmp_path / "published", "--to", "published", "--target", "some/target"]
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    served = result.stdout.splitlines()
    assert [line.split()[0] for line in served] == ["vllm", "python"]
    assert all("some/target" in line and str(tmp_path / "published") in line for line in served)
    warnings = result.stderr.splitlines()
    assert all(line.startswith("warning: ") for line in warnings)
    assert any("`target_layer_ids` has the target's last layer" in line for line in warnings)
    head, converted = (read_checkpoint(folder) for folder in (folders.head, tmp_path / "published"))
    assert all(torch.equal(value, converted.state_dict()[name]) for name, value in head.state_dict().items())

    again = run(*arguments)
    assert (again.exit_code, again.stdout, again.stderr.count("\n")) == (1, "", 1)
    assert "must hold no checkpoint yet" in again.stderr


def test_what_no_engine_reads_is_said_to_be_written(run: Run, folders: Any, tmp_path: Path) -> None:
    result = run("convert", folders.head, tmp_path / "copy", "--to", "jetspec")
    assert (result.exit_code, result.stdout) == (0, f"The head is in {tmp_path / 'copy'}, in the jetspec format.\n")


def test_a_push_that_does_not_get_there_says_where_to(run: Run, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    result = run("push", folders.head, "user/head")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith("error: user/head could not be pushed to http://127.0.0.1:9: ")


def test_figures_that_cannot_be_written_are_refused_before_they_are_measured(run: Run, tmp_path: Path) -> None:
    options = ["--target", "x", "--head", "y", "--prompts", __file__, "--json", tmp_path]
    result = run("bench", *options)
    assert result.exit_code == 2
    assert f"--json must be a file that can be written, got {tmp_path}: Is a directory" in result.stderr


def test_a_head_is_pushed_with_what_was_said_of_it(
    run: Run, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[tuple[Any, ...]] = []

    def push_head(head: JetSpecDraftHead, repo_id: str, **options: Any) -> str:
        pushed.append((head, repo_id, options))
        return "https://hub/user/head/commit/1"

    monkeypatch.setattr(push, "push_head", push_head)
    arguments = ["--license", "mit", "--private", "--tokenizer", folders.target, "--results", tmp_path / "speed.json"]
    result = run("push", folders.head, "user/head", *arguments, "--message", "First")
    assert (result.exit_code, result.stdout) == (0, "https://hub/user/head/commit/1\n")
    ((head, repo_id, options),) = pushed
    assert (head.config.block_size, repo_id) == (4, "user/head")
    assert options.pop("tokenizer").vocab_size == 128
    expected = {"license": "mit", "private": True, "results": [tmp_path / "speed.json"], "commit_message": "First"}
    assert options == expected
