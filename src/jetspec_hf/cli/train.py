"""`jetspec train`: `python -m jetspec_hf.training.recipe` under a shorter name."""

import typer

from .forwarding import forward

EXAMPLES = (
    "jetspec train --target TARGET --answers answers.jsonl --output_dir my_head --num_train_epochs 6",
    "jetspec train recipe.json --target TARGET --answers answers.jsonl --output_dir my_head",
)


def train(context: typer.Context) -> None:
    """Train a head on a target's answers, and measure what the target accepts."""
    forward(context, "jetspec_hf.training.recipe", EXAMPLES)
