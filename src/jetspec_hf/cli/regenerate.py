"""`jetspec regenerate`: `python -m jetspec_hf.training.regenerate` under a shorter name."""

import typer

from .forwarding import forward

EXAMPLES = (
    "jetspec regenerate --target Qwen/Qwen3-8B --prompts prompts.jsonl --output answers.jsonl",
    "jetspec regenerate --target TARGET --prompts prompts.jsonl --output answers.jsonl --temperature 0 --limit 100",
)


def regenerate(context: typer.Context) -> None:
    """The target answers prompts itself: what a head is trained on."""
    forward(context, "jetspec_hf.training.regenerate", EXAMPLES)
