"""`jetspec generate`: the target's own text, in two colours, and the figures."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.cli.models import Models

COLOURS = {"32": True, "33": False}  # green is drafted, yellow is the target's own
Run = Callable[..., Result]


def decoded(folders: Any, text: str, **options: Any) -> tuple[list[str], list[int]]:
    """The tokens after a rendered prompt, as text, and how many each step committed."""
    tokenizer = AutoTokenizer.from_pretrained(folders.target)
    target = AutoModelForCausalLM.from_pretrained(folders.target)
    head = JetSpecDraftHead.from_pretrained(folders.head)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False)
    output = target.generate(**inputs, assistant_model=head, return_dict_in_generate=True, **options)
    plain = target.generate(**inputs, **options)
    assert output.sequences.tolist() == plain.tolist()
    new_tokens = plain[0, inputs["input_ids"].shape[1] :].tolist()
    return [tokenizer.decode([token]) for token in new_tokens], output.acceptance.accepted_lengths[0]


def is_drafted(lengths: list[int]) -> list[bool]:
    """The prefill's token is the target's own, and so is the last one of every step."""
    return [False] + [token < length - 1 for length in lengths for token in range(length)]


def test_the_text_goes_to_stdout_and_the_figures_to_stderr(run: Run, folders: Any) -> None:
    tokens, lengths = decoded(folders, "<s>hello</s><s>", max_new_tokens=24, do_sample=False)
    result = run("generate", "hello", "--head", folders.head, "--max-new-tokens", 24, "--temperature", 0)
    assert result.exit_code == 0
    assert result.stdout == "".join(tokens) + "\n"
    assert max(lengths) > 1  # or there is nothing to tell apart
    drafted = sum(lengths) - len(lengths)
    assert re.fullmatch(
        rf"τ {sum(lengths) / len(lengths):.2f}, \d+\.\d tokens/s, 24 tokens: {drafted} drafted, {24 - drafted} the "
        r"target's own\n",
        result.stderr,
    )


def test_a_terminal_shows_drafted_tokens_in_another_colour(run: Run, folders: Any) -> None:
    tokens, lengths = decoded(folders, "<s>hello</s><s>", max_new_tokens=24, do_sample=False)
    arguments = ["hello", "--head", folders.head, "--max-new-tokens", 24, "--temperature", 0]
    result = run("generate", *arguments, FORCE_COLOR="1", TERM="xterm")
    pieces = re.findall("\x1b\\[(\\d+)m([^\x1b]*)\x1b\\[0m", result.stdout)
    shown = [(COLOURS[code], text) for code, text in pieces]
    assert shown == list(zip(is_drafted(lengths), tokens, strict=True))
    assert len(list(groupby(shown, key=lambda piece: piece[0]))) > 2


def test_sampling_is_that_of_the_target_with_the_same_seed(run: Run, folders: Any) -> None:
    torch.manual_seed(5)
    target = AutoModelForCausalLM.from_pretrained(folders.plain_target)
    tokenizer = AutoTokenizer.from_pretrained(folders.plain_target)
    inputs = tokenizer("hello", return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(5)
    plain = target.generate(**inputs, max_new_tokens=12, do_sample=True, temperature=0.8)
    arguments = ["--head", folders.head, "--target", folders.plain_target, "--max-new-tokens", 12]
    result = run("generate", *arguments, "--temperature", 0.8, "--seed", 5, stdin="hello")  # piped in
    text = tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert result.stdout == text + "\n"


def test_the_chat_template_can_be_left_out(run: Run, folders: Any) -> None:
    tokens, _ = decoded(folders, "hello", max_new_tokens=8, do_sample=False)
    arguments = ["--head", folders.head, "--max-new-tokens", 8, "--temperature", 0, "--tree-budget", 4]
    assert run("generate", "hello", *arguments, "--no-chat-template").stdout == "".join(tokens) + "\n"


def test_a_prompt_without_a_token_is_refused(run: Run, folders: Any) -> None:
    with pytest.raises(ValueError, match="`PROMPT` must have a token at least, got none"):
        Models.load(str(folders.head), str(folders.plain_target), "auto", "cpu", None).prompt_ids("", True, None)


def test_one_token_needs_no_draft(run: Run, folders: Any) -> None:
    result = run("generate", "hello", "--head", folders.head, "--max-new-tokens", 1)
    assert re.fullmatch(
        r"no draft was needed, \d+\.\d tokens/s, 1 token: 0 drafted, 1 the target's own\n", result.stderr
    )


def test_a_target_that_the_head_names_and_that_is_gone_is_named_with_the_option(
    run: Run, folders: Any, tmp_path: Any
) -> None:
    head = JetSpecDraftHead.from_pretrained(folders.head)
    for gone in (str(tmp_path / "gone"), "user/gone"):  # a folder, and on the Hub, which cannot be reached
        head.config.target_name_or_path = gone
        head.save_pretrained(tmp_path)
        result = run("generate", "hello", "--head", tmp_path)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert result.stderr.startswith(f"error: `--target`, which is not given and which the head {tmp_path} names,")
        assert gone in result.stderr


def test_a_head_that_names_no_target_needs_one(run: Run, folders: Any, tmp_path: Any) -> None:
    head = JetSpecDraftHead.from_pretrained(folders.head)
    head.config.target_name_or_path = None
    head.save_pretrained(tmp_path)
    result = run("generate", "hello", "--head", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: `--target` must be given, got none")
