"""`jetspec chat`: a conversation, whose cache is kept from turn to turn."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console

from . import options
from .answers import Answer, answer, summary
from .models import Models, generation_options, reading_text

with contextlib.suppress(ImportError):  # not on Windows
    import readline  # noqa: F401  (`input` edits lines with it)

EXAMPLES = (
    "jetspec chat --head JetSpec/jetspec-qwen3-8b --target Qwen/Qwen3-8B",
    'jetspec chat --head HEAD --target TARGET --system "Answer in one sentence." --temperature 0.7',
)
COMMANDS = "/stats tells how drafting goes, /reset forgets the conversation, /quit ends it"


class Conversation:
    """What was said, and the target's cache of it.

    Args:
        models (`Models`): Who answers.
        system (`str`, *optional*): What the target is told first.
        thinking (`bool`, *optional*): The chat template's `enable_thinking`.
    """

    def __init__(self, models: Models, system: str | None = None, thinking: bool | None = None) -> None:
        self._models = models
        self._system = system
        self._thinking = thinking
        self.reset()

    def reset(self) -> None:
        """Forgets what was said."""
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._cache: Any = None
        self.answers: list[Answer] = []

    def say(self, text: str, console: Console, **options: Any) -> Answer:
        """Says something, and shows the answer.

        Args:
            text (`str`): What the user says.
            console (`Console`): Where the answer is shown.
            options: Of `generate`.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        given = answer(self._models, *self._continuation(messages), console, **options)
        said: Any = self._models.tokenizer.decode(given.token_ids, skip_special_tokens=True)
        self._messages = [*messages, {"role": "assistant", "content": said}]
        self._cache = given.cache
        self.answers.append(replace(given, cache=None))
        return given

    def _continuation(self, messages: list[dict[str, str]]) -> tuple[list[int], Any]:
        """The prompt, and the cache if that holds how the prompt begins.

        Templates may write earlier answers differently, without their thoughts for instance: then all is read again.
        """
        text = self._models.render(messages, self._thinking)
        if self._cache is not None:
            sequence = self.answers[-1].sequence
            before: Any = self._models.tokenizer.decode(sequence)
            if text.startswith(before):
                return sequence + self._models.encode(text[len(before) :]), self._cache
        return self._models.encode(text), None


def chat(
    head: options.Head,
    target: options.Target = None,
    system: Annotated[str | None, typer.Option("--system", help="What the target is told first.")] = None,
    max_new_tokens: options.MaxNewTokens = 512,
    temperature: options.Temperature = None,
    seed: options.Seed = 0,
    tree_budget: options.TreeBudget = None,
    thinking: options.Thinking = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Talk with the target; what was said stays in its cache.

    Each line is a turn, /stats tells how drafting goes, /reset forgets the conversation, /quit ends it.
    """
    conversation = Conversation(Models.load(head, target, dtype, device, tree_budget, chat=True), system, thinking)
    chosen = generation_options(max_new_tokens, temperature, seed)
    console, notes = Console(), Console(stderr=True)
    notes.print(COMMANDS)
    for line in _lines():
        if line == "/quit":
            return
        if line == "/reset":
            conversation.reset()
        elif line == "/stats":
            said = conversation.answers
            notes.print(summary(said) if said else "Nothing was said yet.", soft_wrap=True)
        elif line.startswith("/"):
            notes.print(COMMANDS)
        elif line:
            conversation.say(line, console, **chosen)


def _lines() -> Iterator[str]:
    """What the user types, or what is piped in."""
    prompt = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError), reading_text():
        while True:
            yield input(prompt).strip()
