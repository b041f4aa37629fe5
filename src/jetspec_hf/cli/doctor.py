"""`jetspec doctor`: `python -m jetspec_hf.bench.doctor` under a shorter name."""

import typer

from .forwarding import forward

EXAMPLES = (
    "jetspec doctor --target TARGET --head HEAD",
    "jetspec doctor --target TARGET --head HEAD --dtype bfloat16 --save",
)


def doctor(context: typer.Context) -> None:
    """Find out whether a head is worth using on this machine, and with how many nodes."""
    forward(context, "jetspec_hf.bench.doctor", EXAMPLES)
