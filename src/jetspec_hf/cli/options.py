"""Options that several commands share."""

import argparse
from typing import Annotated, Literal

import typer

from ..command_line import usable_device


def _usable(device: str) -> str:
    if device != "auto":
        try:
            usable_device(device)
        except argparse.ArgumentTypeError as error:
            raise typer.BadParameter(str(error)) from None
    return device


def _budget(text: str | None) -> str | None:
    if text is not None and text != "auto" and not text.isdecimal():
        raise typer.BadParameter(f'must be "auto" or an integer of at least 0, got {text!r}.')
    return text


Head = Annotated[str, typer.Option("--head", help="Folder or Hub id of the draft head.", show_default=False)]
Target = Annotated[
    str | None,
    typer.Option("--target", help="Folder or Hub id of the target (default: the one the head was made for)."),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="Of target and head; `auto` is what they were saved in."),
]
Device = Annotated[str, typer.Option("--device", callback=_usable, help="`auto` spreads the target over all devices.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Where an answer is cut.")]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", min=0.0, help="0 is greedy (default: the target's generation config)."),
]
Seed = Annotated[int, typer.Option("--seed", help="Of sampling.")]
TreeBudget = Annotated[
    str | None,
    typer.Option(
        "--tree-budget", callback=_budget, help="Tree nodes besides the root, or `auto` (default: the head's)."
    ),
]
Thinking = Annotated[
    bool | None,
    typer.Option("--thinking/--no-thinking", help="The chat template's `enable_thinking` (default: its own)."),
]


def examples(*commands: str) -> str:
    """The last paragraph of a command's help.

    Args:
        commands (`str`): What could be typed.
    """
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])  # after \b, lines are kept
