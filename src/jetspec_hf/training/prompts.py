"""Prompts that a target answers, and the token ids it sees of them."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
KINDS = ("prompt", "messages", "turns")


@dataclass(frozen=True)
class Prompt:
    """What a target is asked.

    Attributes:
        id (`str`): Its name, or a hash of what it says.
        messages (`list[dict]`): The conversation up to the first answer.
        later_turns (`tuple[str, ...]`): What the user says after each answer.
        kind (`str`): The field it came from: `"prompt"`, `"messages"` or `"turns"`.
        source (`str`, *optional*): Where it comes from.
    """

    id: str
    messages: list[Message]
    later_turns: tuple[str, ...] = ()
    kind: str = "prompt"
    source: str | None = None

    @property
    def answers(self) -> int:
        """How many answers it takes."""
        return 1 + len(self.later_turns)

    def fingerprint(self) -> str:
        """A hash of its id and of all it says."""
        return _hash([self.id, self.kind, self.messages, list(self.later_turns)])


def read_prompts(
    prompts: str | os.PathLike[str] | Iterable[Mapping[str, Any]], limit: int | None = None
) -> list[Prompt]:
    """Reads prompts and checks them.

    Args:
        prompts (`str`, `os.PathLike` or iterable of `dict`): A JSONL file, a `datasets.Dataset` or dicts, each with
            one of `prompt` (text), `messages` (a conversation; what it has of a last answer is dropped) or `turns`
            (what the user says, turn after turn), and optionally with `id` and `source`. `None` counts as not there.
        limit (`int`, *optional*): Takes the first prompts only.

    Returns:
        `list[Prompt]`: In their order.

    Raises:
        ValueError: If there is no prompt, if one is not as described, or if an id is there twice.
    """
    if isinstance(prompts, str | os.PathLike):
        rows: list[Mapping[str, Any]] = list(islice(read_objects(prompts), limit))
        where = f" in {os.fspath(prompts)}"
    else:
        rows = list(islice(prompts, limit))
        where = ""
    if not rows:
        raise ValueError(f"`prompts` must have a prompt at least, got none{where}.")
    read = [_read_prompt(row, number) for number, row in enumerate(rows)]
    if doubled := [name for name, times in Counter(prompt.id for prompt in read).items() if times > 1]:
        raise ValueError(
            f"`id` must be there once, got {len(doubled)} ids more than once: {', '.join(doubled[:10])}. Prompts "
            "without an id are named by a hash of what they say; drop the repeated ones, or give them ids."
        )
    return read


def read_objects(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file with one in each line; empty lines are left out.

    Args:
        path (`str` or `os.PathLike`): The file, in UTF-8.

    Raises:
        ValueError: If a line is something else.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except ValueError:  # of the encoding, or of JSON
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"Line {number} of {os.fspath(path)} must be a JSON object, got {line[:80]!r}.")
            yield row


def prompts_fingerprint(prompts: Sequence[Prompt]) -> str:
    """A hash of prompts and of their order.

    Args:
        prompts (`Sequence[Prompt]`): The prompts.
    """
    return _hash([prompt.fingerprint() for prompt in prompts])


@dataclass(frozen=True)
class PromptRenderer:
    """Turns a conversation into the token ids that the target is given.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        chat_template (`bool`, *optional*): Whether to use its chat template; if it has one when not given.
        template_kwargs (`dict`, *optional*): Variables of the template.

    Raises:
        ValueError: If a template is asked for and the tokenizer has none.
    """

    tokenizer: PreTrainedTokenizerBase
    chat_template: bool | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.chat_template and self.tokenizer.chat_template is None:
            raise ValueError("`chat_template` must be False for a tokenizer without a chat template, got True.")

    @property
    def uses_template(self) -> bool:
        """Whether conversations go through the chat template."""
        return self.tokenizer.chat_template is not None if self.chat_template is None else self.chat_template

    def template_fingerprint(self) -> str | None:
        """A hash of the chat template, `None` if it is not used."""
        return _hash(self.tokenizer.get_chat_template()) if self.uses_template else None

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Checks that these prompts can be rendered.

        Args:
            prompts (`Iterable[Prompt]`): The prompts.

        Raises:
            ValueError: If one is a conversation and there is no chat template.
        """
        for prompt in prompts:
            if prompt.kind != "prompt" and not self.uses_template:
                raise ValueError(
                    f"`{prompt.kind}` of id {prompt.id!r} must have a chat template to be put in, got none."
                )

    def ids(self, messages: list[Message]) -> list[int]:
        """The token ids after which the target writes its answer.

        Args:
            messages (`list[dict]`): The conversation; without a chat template a single message, taken as plain text.
        """
        if not self.uses_template:
            return list(self.tokenizer(messages[0]["content"])["input_ids"])
        tokenizer: Any = self.tokenizer  # the declared result depends on the arguments
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **self.template_kwargs)
        return list(rendered["input_ids"])


def _read_prompt(row: Mapping[str, Any], number: int) -> Prompt:
    given = [kind for kind in KINDS if row.get(kind) is not None]
    if len(given) != 1:
        raise ValueError(
            f"Prompt {number} must have one of `prompt`, `messages` and `turns`, got {' and '.join(given) or 'none'}."
        )
    kind = given[0]
    content = row[kind]
    later: tuple[str, ...] = ()
    if kind == "prompt":
        if not isinstance(content, str):
            raise ValueError(f"`prompt` of prompt {number} must be text, got {content!r}.")
        messages = [_user(content)]
    elif kind == "turns":
        if not content or not all(isinstance(turn, str) for turn in content):
            raise ValueError(f"`turns` of prompt {number} must be a list of what the user says, got {content!r}.")
        messages, later = [_user(content[0])], tuple(content[1:])
    else:
        messages = _until_last_answer(content)
        if not messages:
            raise ValueError(f"`messages` of prompt {number} must have a message to be answered, got {content!r}.")
    name, source = row.get("id"), row.get("source")
    return Prompt(
        id=_hash([kind, messages, list(later)]) if name is None else str(name),
        messages=messages,
        later_turns=later,
        kind=kind,
        source=None if source is None else str(source),
    )


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _until_last_answer(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    kept = [{name: value for name, value in message.items() if value is not None} for message in messages]
    while kept and kept[-1].get("role") == "assistant":
        kept.pop()
    return kept


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
