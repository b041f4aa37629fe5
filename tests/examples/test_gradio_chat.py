"""The chat answers twice, with the same words; its page is built by gradio, which need not be there."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from jetspec_hf import JetSpecHead

QUESTION = [{"role": "user", "content": "abc"}]


@pytest.fixture
def models(data: Path) -> tuple[Any, Any, Any]:
    target = AutoModelForCausalLM.from_pretrained(data / "target")
    head = JetSpecHead.from_target(target, num_hidden_layers=1, block_size=4)
    return target, AutoTokenizer.from_pretrained(data / "target"), head


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_both_sides_grow_to_the_same_text(models: tuple[Any, Any, Any], temperature: float) -> None:
    import gradio_chat  # noqa: PLC0415

    sides = list(gradio_chat.answer(*models, QUESTION, max_new_tokens=12, temperature=temperature, seed=3))
    plain, drafted = sides[-1]
    assert plain.text == drafted.text
    assert len(plain.text) >= 12
    assert plain.note.startswith("12 tokens, ")
    assert "τ" in drafted.note
    assert "τ" not in plain.note
    texts = [drafted.text for _, drafted in sides]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert len(set(texts)) > 3


def test_an_error_of_generate_ends_the_stream(models: tuple[Any, Any, Any]) -> None:
    import gradio_chat  # noqa: PLC0415

    with pytest.raises(ValueError, match="max_new_tokens"):
        list(gradio_chat.answer(*models, QUESTION, max_new_tokens=-1))


def test_a_chat_template_is_used(models: tuple[Any, Any, Any]) -> None:
    import gradio_chat  # noqa: PLC0415

    tokenizer = models[1]
    tokenizer.chat_template = "{% for message in messages %}<s>{{ message['content'] }}{% endfor %}</s>"
    ids = gradio_chat.encode(tokenizer, QUESTION)["input_ids"][0].tolist()
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "a", "b", "c", "</s>"]


def test_the_page_hands_each_message_to_both_sides(
    models: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import gradio_chat  # noqa: PLC0415

    gradio = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "gradio", gradio)
    gradio_chat.build(*models)
    say = gradio.Textbox.return_value.submit.call_args.args[0]
    box, history, left, right, left_note, right_note = list(say("abc", [], 0.0))[-1]
    assert box == ""
    assert history == right == left
    assert [message["role"] for message in left] == ["user", "assistant"]
    assert "tokens" in left_note
    assert "τ" in right_note
