"""`jetspec bench`: `python -m jetspec_hf.bench` under a shorter name."""

import typer

from .forwarding import forward

EXAMPLES = ("jetspec bench --target TARGET --head HEAD --prompts prompts.jsonl --tree-budget 16 32",)


def bench(context: typer.Context) -> None:
    """Measure how much faster a head makes generation."""
    forward(context, "jetspec_hf.bench.speed", EXAMPLES)
