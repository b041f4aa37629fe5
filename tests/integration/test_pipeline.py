"""Pipelines load a head from a string, as transformers loads any assistant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, pipeline
from transformers.pipelines.base import load_assistant_model, load_model

from jetspec_hf import JetSpecConfig, JetSpecDraftHead
from support.char_tokenizer import letter_tokenizer
from support.random_heads import random_head

PROMPT = "stakilomenu"


@pytest.fixture
def folders(target: PreTrainedModel, tmp_path: Path) -> dict[str, Any]:
    """A saved target and a saved head, by their paths."""
    target.generation_config.max_new_tokens = 20
    target.generation_config.do_sample = False
    target.save_pretrained(tmp_path / "target")
    letter_tokenizer().save_pretrained(tmp_path / "target")
    head = random_head(target, block_size=6)
    head.generation_config.tree_budget = 40
    head.save_pretrained(tmp_path / "head", tokenizer=letter_tokenizer())
    return {"model": str(tmp_path / "target"), "assistant_model": str(tmp_path / "head")}


def test_a_pipeline_of_two_strings_writes_the_plain_text(folders: dict[str, Any]) -> None:
    plain = pipeline("text-generation", folders["model"])(PROMPT)
    writer = pipeline("text-generation", **folders)
    assert writer(PROMPT) == plain
    head = writer.assistant_model
    assert type(head) is JetSpecDraftHead
    assert head.last_acceptance.tree_sizes[0] == 40
    assert head.last_acceptance.mean_acceptance_length > 1


def test_the_head_takes_the_target_s_dtype(folders: dict[str, Any]) -> None:
    writer = pipeline("text-generation", **folders, dtype="bfloat16")
    assert writer.assistant_model.dtype == writer.model.dtype == torch.bfloat16
    writer(PROMPT)
    assert writer.assistant_model.last_acceptance.steps > 0


@pytest.mark.contract
def test_a_pipeline_looks_for_classes_in_transformers_alone(folders: dict[str, Any]) -> None:
    """Once it also asks the auto classes, the attribute that the package sets on transformers may go."""
    config = JetSpecConfig.from_pretrained(folders["assistant_model"])
    assert config.architectures == ["JetSpecDraftHead"]
    assert sys.modules["transformers"].JetSpecDraftHead is JetSpecDraftHead
    config.architectures = ["NotThere"]
    with pytest.raises(ValueError, match="cannot infer suitable model classes"):
        load_model(folders["assistant_model"], config=config)


@pytest.mark.contract
def test_equal_special_tokens_need_no_second_tokenizer(target: PreTrainedModel, folders: dict[str, Any]) -> None:
    """A head is refused together with an assistant's tokenizer, so a pipeline must not hand one on."""
    head, tokenizer = load_assistant_model(target, folders["assistant_model"], None)
    assert type(head) is JetSpecDraftHead
    assert tokenizer is None
