"""One answer: streamed in two colours, and summed up in one line."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from ..decoding.cache import CACHE_NAME
from ..decoding.output import AcceptanceStats
from .models import Models
from .streaming import AcceptanceStreamer

DRAFTED, OWN = Style(color="green"), Style(color="yellow")


@dataclass(frozen=True)
class Answer:
    """What was generated, and how fast.

    Args:
        token_ids (`list[int]`): The new tokens.
        sequence (`list[int]`): Prompt and new tokens.
        cache (`Cache`): What the target knows of all but the last of them.
        seconds (`float`): Of the whole generation.
        acceptance ([`AcceptanceStats`]): How drafting went.
    """

    token_ids: list[int]
    sequence: list[int]
    cache: Any
    seconds: float
    acceptance: AcceptanceStats


def answer(models: Models, input_ids: Sequence[int], cache: Any, console: Console, **options: Any) -> Answer:
    """Generates, and shows the text as it comes.

    Args:
        models (`Models`): What to generate with.
        input_ids (`Sequence[int]`): The prompt.
        cache (`Cache`, *optional*): That of an earlier answer with which the prompt begins.
        console (`Console`): Where the text goes, in colours if it is a terminal.
        options: Of `generate`.
    """

    def show(piece: str, drafted: bool) -> None:
        # as it is: a text of rich's would have its tabs and its line ends changed
        console.print(Segments([Segment(piece, DRAFTED if drafted else OWN)]), end="", soft_wrap=True)

    prompt = torch.tensor([list(input_ids)], device=models.target.device)
    start = time.perf_counter()
    output = models.target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=models.head,
        streamer=AcceptanceStreamer(models.tokenizer, models.head, show),
        return_dict_in_generate=True,
        **({} if cache is None else {CACHE_NAME: cache}),
        **options,
    )
    seconds = time.perf_counter() - start
    console.print()
    sequence = output.sequences[0].tolist()
    return Answer(
        token_ids=sequence[len(input_ids) :],
        sequence=sequence,
        cache=getattr(output, CACHE_NAME),
        seconds=seconds,
        acceptance=output.acceptance,
    )


def summary(answers: Sequence[Answer]) -> Text:
    """τ, speed, and how many tokens came from where, in the colours of the text.

    Args:
        answers (`Sequence[Answer]`): One or more.
    """
    lengths = [length for given in answers for length in given.acceptance.accepted_lengths[0]]
    stats = AcceptanceStats(accepted_lengths=[lengths])
    tokens, seconds = sum(len(given.token_ids) for given in answers), sum(given.seconds for given in answers)
    drafted = sum(lengths) - len(lengths)
    drafting = f"τ {stats.mean_acceptance_length:.2f}" if lengths else "no draft was needed"
    return Text.assemble(
        f"{drafting}, {tokens / seconds:.1f} tokens/s, {tokens} token{'' if tokens == 1 else 's'}: ",
        (f"{drafted} drafted", DRAFTED),
        ", ",
        (f"{tokens - drafted} the target's own", OWN),
    )
