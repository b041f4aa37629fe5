"""Sharing: the model card, the code that travels with a head, pushing, and checkpoint formats."""

from .card import make_card
from .checkpoints import FORMATS, detect_format, read_checkpoint, write_checkpoint
from .serving import serve_command
from .sharing import push_head, write_companions

__all__ = [
    "FORMATS",
    "detect_format",
    "make_card",
    "push_head",
    "read_checkpoint",
    "serve_command",
    "write_checkpoint",
    "write_companions",
]
