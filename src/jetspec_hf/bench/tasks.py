"""The prompts of a benchmark, and the token ids a target is given of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

KINDS = ("prompt", "turns")


@dataclass(frozen=True)
class Prompt:
    """What a target is asked.

    Attributes:
        id (`str`): Its name, once in its task.
        task (`str`): The task it belongs to.
        text (`str`): What the user says.
    """

    id: str
    task: str
    text: str


def read_tasks(paths: Sequence[Path], limit: int | None = None) -> list[Prompt]:
    """Reads prompts from JSONL files.

    Args:
        paths (`Sequence[Path]`): Files whose lines have `turns` (what the user says, of which the first is taken) or
            `prompt` (a text), and optionally `task` (the file's name without its ending if missing) and `id` (numbered
            from 0 within the file if missing).
        limit (`int`, *optional*): Takes the first prompts of each file only.

    Returns:
        `list[Prompt]`: In their order.

    Raises:
        ValueError: If a file has no prompts, a line is not as described, or an id is there twice in a task.
    """
    prompts = [prompt for path in paths for prompt in _read_file(path, limit)]
    seen: set[tuple[str, str]] = set()
    for prompt in prompts:
        if (prompt.task, prompt.id) in seen:
            raise ValueError(f"`id` must be there once in a task, got {prompt.id!r} again in {prompt.task!r}.")
        seen.add((prompt.task, prompt.id))
    return prompts


def encode(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The token ids after which the target writes its answer.

    Args:
        prompt (`Prompt`): The prompt.
        tokenizer (`PreTrainedTokenizerBase`): The target's. Its chat template is used if it has one, else the text
            stands as it is.

    Returns:
        `torch.LongTensor` of shape `(1, length)`.

    Raises:
        ValueError: If that is no token at all.
    """
    if tokenizer.chat_template is None:
        encoded: Any = tokenizer(prompt.text)
    else:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], add_generation_prompt=True, return_dict=True
        )
    if not encoded["input_ids"]:
        raise ValueError(f"The prompt of id {prompt.id!r} must have a token at least, got none.")
    return torch.tensor([encoded["input_ids"]])


def _read_file(path: Path, limit: int | None) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if limit is not None and len(prompts) == limit:
            break
        if line.strip():
            prompts.append(_read_line(line, f"line {number} of {path.name}", path.stem, str(len(prompts))))
    if not prompts:
        raise ValueError(f"{path.name} must have a prompt at least, got none.")
    return prompts


def _read_line(line: str, place: str, default_task: str, default_id: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"A prompt must be a JSON object, got {line[:40]!r} in {place}: {error}.") from error
    if not isinstance(row, dict):
        raise ValueError(f"A prompt must be a JSON object, got {line[:40]!r} in {place}.")
    task, name = row.get("task"), row.get("id")
    if task is not None and (not isinstance(task, str) or not task):
        raise ValueError(f"`task` in {place} must be a text, got {task!r}.")
    if name is not None and (not isinstance(name, str | int) or isinstance(name, bool)):
        raise ValueError(f"`id` in {place} must be a text or a number, got {name!r}.")
    return Prompt(
        id=default_id if name is None else str(name),
        task=default_task if task is None else task,
        text=_first_turn(row, place),
    )


def _first_turn(row: Mapping[str, Any], place: str) -> str:
    given = [kind for kind in KINDS if row.get(kind) is not None]
    if len(given) != 1:
        raise ValueError(f"A prompt must have `prompt` or `turns`, got {' and '.join(given) or 'neither'} in {place}.")
    kind, content = given[0], row[given[0]]
    turns = [content] if kind == "prompt" else content
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        expected = "a text that is not empty" if kind == "prompt" else "a list of texts that are not empty"
        raise ValueError(f"`{kind}` in {place} must be {expected}, got {content!r}.")
    text: str = turns[0]
    return text
