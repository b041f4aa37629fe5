"""What was done to a streamer, and whether a target was left as it was."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


class RecordingStreamer(BaseStreamer):
    """Keeps every call: `("put", shape, values)` and `("end",)`."""

    def __init__(self) -> None:
        """Starts with no calls."""
        self.calls: list[tuple[Any, ...]] = []

    def put(self, value: torch.Tensor) -> None:
        """Records the tensor's shape and values."""
        self.calls.append(("put", tuple(value.shape), value.tolist()))

    def end(self) -> None:
        """Records the end."""
        self.calls.append(("end",))

    @property
    def generated(self) -> list[tuple[Any, ...]]:
        """The calls after the prompt."""
        return self.calls[1:]


class RaisingStreamer(BaseStreamer):
    """Raises when it is handed the given number of tensors after the prompt."""

    def __init__(self, puts: int) -> None:
        """Sets how many puts go well."""
        self.puts = puts

    def put(self, value: torch.Tensor) -> None:
        """Counts down, then raises."""
        if self.puts == 0:
            raise RuntimeError("the streamer's reader hung up")
        self.puts -= 1

    def end(self) -> None:
        """Does nothing."""


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Everything about a model that a generation must leave alone."""

    hooks: dict[str, dict[str, int]]
    attributes: dict[str, frozenset[str]]
    config: dict[str, Any]
    generation_config: dict[str, Any]
    attention: str | None
    training: dict[str, bool]
    gradients: dict[str, tuple[bool, bool]]
    weights: dict[str, tuple[int, torch.Tensor]]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Fingerprint:
        """Takes the fingerprint; weights are copied."""
        modules = dict(model.named_modules())
        return cls(
            hooks={
                name: {table: len(getattr(module, table)) for table in HOOK_TABLES} for name, module in modules.items()
            },
            attributes={name: _instance_attributes(module) for name, module in modules.items()},
            config=model.config.to_dict(),
            generation_config=model.generation_config.to_dict(),
            attention=model.config._attn_implementation,
            training={name: module.training for name, module in modules.items()},
            gradients={name: (p.requires_grad, p.grad is not None) for name, p in model.named_parameters()},
            weights={name: (t.data_ptr(), t.detach().clone()) for name, t in model.state_dict().items()},
        )

    def assert_unchanged(self, model: PreTrainedModel) -> None:
        """Compares the model with the fingerprint, naming what changed."""
        now = Fingerprint.of(model)
        for field in dataclasses.fields(self):
            if field.name != "weights":
                assert getattr(now, field.name) == getattr(self, field.name), f"{field.name} of the target changed"
        for name, (pointer, weight) in self.weights.items():
            assert now.weights[name][0] == pointer, f"{name} was moved"
            assert torch.equal(now.weights[name][1], weight), f"{name} was changed"


def _instance_attributes(module: nn.Module) -> frozenset[str]:
    """Names set on the instance; `generate` itself leaves the length of the last static cache there."""
    return frozenset(name for name in vars(module) if name != "_previous_max_cache_length")
