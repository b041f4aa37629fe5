"""What stands in for real models while the code of the documentation runs: folders under the names that it loads."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import EntryNotFoundError
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.training.regenerate import regenerate
from support.char_tokenizer import letter_tokenizer
from support.random_heads import random_head
from support.tiny_targets import tiny_target

TARGETS = ("Qwen/Qwen3-8B", "google/gemma-3-270m")
HEADS = ("JetSpec/jetspec-qwen3-8b", "examples/heads/gemma-3-270m")
MOST_TOKENS = 24  # a page may ask for hundreds
CHAT = (
    "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


@contextlib.contextmanager
def stand_ins(folder: Path) -> Iterator[dict[str, Any]]:
    """Runs in `folder`, where tiny targets and heads have the names of real ones, and the files that pages name are.

    Args:
        folder: an empty folder.

    Returns:
        The names that pages use without making them.
    """
    target, tokenizer = tiny_target("llama", num_hidden_layers=4, max_position_embeddings=2048), letter_tokenizer()
    target.generation_config.max_new_tokens = MOST_TOKENS
    tokenizer.chat_template = CHAT
    head = random_head(target, block_size=6)
    head.config.target_name_or_path = TARGETS[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder / "modules"))
        patch.setattr("jetspec_hf.hub.sharing.HfApi", FolderHub)
        patch.setattr(GenerationMixin, "generate", _brief(GenerationMixin.generate))
        for name in TARGETS:
            target.save_pretrained(name)
            tokenizer.save_pretrained(name)
        for name in HEADS:
            head.save_pretrained(name)
        _write_files(target, tokenizer)
        inputs = tokenizer("hello", return_tensors="pt")
        yield {
            "target": target,
            "tokenizer": tokenizer,
            "head": head,
            "inputs": inputs,
            "JetSpecHead": JetSpecDraftHead,
        }


class FolderHub:
    """A Hub whose repositories are folders here."""

    def __init__(self, token: Any = None) -> None:
        pass

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=repo_id)

    def hf_hub_download(self, repo_id: str, file: str, **_: Any) -> str:
        raise EntryNotFoundError(f"{repo_id} is new and has no {file}")

    def upload_folder(self, *, repo_id: str, folder_path: Path, **_: Any) -> str:
        shutil.copytree(folder_path, repo_id)
        return repo_id


def _brief(generate: Any) -> Any:
    """`generate` that writes few tokens, however many were asked for."""

    def brief(self: PreTrainedModel, *arguments: Any, **options: Any) -> Any:
        if "max_new_tokens" in options:
            options["max_new_tokens"] = min(MOST_TOKENS, options["max_new_tokens"])
        return generate(self, *arguments, **options)

    return brief


def _write_files(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    words = ["".join(letters) for letters in itertools.product("abc", "xyz")]
    prompts = [{"id": word, "prompt": word} for word in words]
    Path("prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts), encoding="utf-8")
    for file in ("answers.jsonl", "heldout.jsonl"):
        regenerate(target, tokenizer, prompts, file, batch_size=9, max_new_tokens=12, chat_template=False)
    machine = {"description": "a machine", "device": "cpu", "cores": 1, "threads": 1}
    settings = {"target": "target", "dtype": "float32", "batch_size": 1, "max_new_tokens": 24, "repeats": 1}
    benchmark = {"machine": machine, "settings": settings, "summary": []}  # what a model card takes of it
    Path("speed.json").write_text(json.dumps(benchmark), encoding="utf-8")
