"""The prompts of a benchmark, and the token ids a target is given of them."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

KINDS = ("prompt", "turns")
NAMES = {"task": "category", "id": "question_id"}  # ours, and Spec-Bench's


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
            from 0 within the file if missing). Spec-Bench's `category` and `question_id` are read as these two.
        limit (`int`, *optional*): Takes the first prompts of each task only.

    Returns:
        `list[Prompt]`: In their order.

    Raises:
        ValueError: If a file has no prompts, a line is not as described, or an id is there twice in a task.
    """
    prompts = []
    taken: Counter[str] = Counter()
    seen: set[tuple[str, str]] = set()
    for prompt in (prompt for path in paths for prompt in _read_file(path)):
        if (prompt.task, prompt.id) in seen:
            raise ValueError(f"`id` must be there once in a task, got {prompt.id!r} again in {prompt.task!r}.")
        seen.add((prompt.task, prompt.id))
        if limit is None or taken[prompt.task] < limit:
            taken[prompt.task] += 1
            prompts.append(prompt)
    return prompts


def batches(prompts: Sequence[Prompt], batch_size: int) -> list[tuple[Prompt, ...]]:
    """Neighbouring prompts of a task together, task by task; those that fill no batch are left out.

    Args:
        prompts (`Sequence[Prompt]`): The prompts.
        batch_size (`int`): How many are answered at once.

    Raises:
        ValueError: If a task has fewer prompts than that.
    """
    found = []
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        of_task = [prompt for prompt in prompts if prompt.task == task]
        if len(of_task) < batch_size:
            raise ValueError(
                f"`batch_size` must be at most the number of prompts of every task, got {batch_size} for "
                f"{len(of_task)} of {task!r}."
            )
        last = len(of_task) - batch_size + 1
        found += [tuple(of_task[start : start + batch_size]) for start in range(0, last, batch_size)]
    return found


def left_padded(rows: Sequence[torch.Tensor], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts side by side.

    Args:
        rows (`Sequence[torch.LongTensor]`): Of shape `(1, length)` each, as `encode` returns them.
        pad_token_id (`int`): What stands on the left of shorter ones.

    Returns:
        `tuple`: Token ids and attention mask, both `torch.LongTensor` of shape `(rows, longest)`.
    """
    longest = max(row.shape[1] for row in rows)
    padding = [(longest - row.shape[1], 0) for row in rows]
    ids = [pad(row, sides, value=pad_token_id) for row, sides in zip(rows, padding, strict=True)]
    masks = [pad(torch.ones_like(row), sides) for row, sides in zip(rows, padding, strict=True)]
    return torch.cat(ids), torch.cat(masks)


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


def _read_file(path: Path) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
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
    named = {ours: name if row.get(ours) is None else ours for ours, name in NAMES.items()}
    task, name = row.get(named["task"]), row.get(named["id"])
    if task is not None and (not isinstance(task, str) or not task):
        raise ValueError(f"`{named['task']}` in {place} must be a text, got {task!r}.")
    if name is not None and (not isinstance(name, str | int) or isinstance(name, bool)):
        raise ValueError(f"`{named['id']}` in {place} must be a text or a number, got {name!r}.")
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
