"""`jetspec chat`: a conversation, whose cache is kept from turn to turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from jetspec_hf.cli.app import app
from jetspec_hf.cli.chat import Conversation
from jetspec_hf.cli.models import Models

Run = Callable[..., Result]
GREEDY = {"max_new_tokens": 10, "do_sample": False}


@pytest.fixture
def models(folders: Any) -> Models:
    return Models.load(str(folders.head), None, "float32", "cpu", "8")


@contextmanager
def reads(target: Any) -> Iterator[list[int]]:
    """How many tokens each forward of the target reads."""
    counts: list[int] = []
    embeddings = target.model.layers[0]
    handle = embeddings.register_forward_pre_hook(lambda _module, inputs: counts.append(inputs[0].shape[1]))
    yield counts
    handle.remove()


def alone(models: Models, text: str) -> list[int]:
    """What the target goes on with after a rendered conversation that it has never seen."""
    prompt = torch.tensor([models.encode(text)])
    return models.target.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)[
        0, prompt.shape[1] :
    ].tolist()


def decode(models: Models, token_ids: list[int]) -> str:
    return str(models.tokenizer.decode(token_ids))


def test_a_turn_reads_only_what_is_new_and_answers_as_without_a_cache(models: Models) -> None:
    console = Console(file=StringIO())
    conversation = Conversation(models, system="be")
    first = conversation.say("hello", console, **GREEDY)
    before = f"<s>be</s><s>hello</s><s>{decode(models, first.token_ids)}"
    with reads(models.target) as counts:
        second = conversation.say("more", console, **GREEDY)
    assert second.token_ids == alone(models, f"{before}</s><s>more</s><s>")
    new = models.encode("</s><s>more</s><s>")
    assert counts[0] == 1 + len(new)  # and the last token of the first answer, which the target has not read
    assert len(second.acceptance.accepted_lengths[0]) > 0


def test_a_template_that_writes_answers_differently_has_all_read_again(models: Models) -> None:
    models.tokenizer.chat_template = models.tokenizer.chat_template.replace("['content']", "['content'][:5]")
    console = Console(file=StringIO())
    conversation = Conversation(models)
    first = conversation.say("hello", console, **GREEDY)
    text = f"<s>hello</s><s>{decode(models, first.token_ids)[:5]}</s><s>more</s><s>"
    with reads(models.target) as counts:
        second = conversation.say("more", console, **GREEDY)
    assert second.token_ids == alone(models, text)
    assert counts[0] == len(models.encode(text))


def test_commands_of_a_chat(run: Run, folders: Any) -> None:
    lines = "/stats\nhello\n\n/stats\n/help\n/reset\n/stats\nhello\n/quit\nnever said\n"
    arguments = ["--head", folders.head, "--max-new-tokens", 10, "--temperature", 0, "--tree-budget", 8]
    result = run("chat", *arguments, stdin=lines)
    assert result.exit_code == 0
    answers = result.stdout.splitlines()
    assert len(answers) == 2
    assert answers[0] == answers[1]  # the conversation was forgotten
    commands, *notes = result.stderr.splitlines()
    assert notes[0] == notes[3] == "Nothing was said yet."
    assert re.fullmatch(r"τ \d\.\d\d, \d+\.\d tokens/s, 10 tokens: \d+ drafted, \d+ the target's own", notes[1])
    assert notes[2] == commands == "/stats tells how drafting goes, /reset forgets the conversation, /quit ends it"
    assert len(notes) == 4


def test_the_end_of_the_input_ends_a_chat(run: Run, folders: Any) -> None:
    result = run("chat", "--head", folders.head, "--max-new-tokens", 3, stdin="hello\n")
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 1)


def test_input_that_is_no_text_is_told_in_one_line(folders: Any) -> None:
    for command in ("chat", "generate"):
        result = CliRunner().invoke(app, [command, "--head", str(folders.head)], input=b"\xff\n")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.endswith("error: Standard input must be text in utf-8, got other bytes.\n")


def test_a_tokenizer_without_a_chat_template_is_refused_before_the_target_is_loaded(
    run: Run, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    result = run("chat", "--head", folders.head, "--target", folders.plain_target)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: A chat needs a tokenizer with a chat template")
    assert result.stderr.count("\n") == 1
