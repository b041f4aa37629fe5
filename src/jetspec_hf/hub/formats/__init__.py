"""The checkpoint formats of draft heads: a file each, and the one canonical head between them."""

from typing import Any

from .assistant import ASSISTANT
from .published import NEMO, PUBLISHED
from .speculators import SPECULATORS

FOREIGN = {"published": PUBLISHED, "nemo": NEMO, "speculators": SPECULATORS, "transformers": ASSISTANT}
OURS = "jetspec"


def recognised_formats(config: dict[str, Any]) -> list[str]:
    """The formats a `config.json` may be of.

    Args:
        config (`dict`): The parsed `config.json`.

    Returns:
        `list[str]`: One name if all is well.
    """
    ours = [OURS] if config.get("model_type") == OURS else []
    return ours + [name for name, layout in FOREIGN.items() if layout.recognises(config)]
