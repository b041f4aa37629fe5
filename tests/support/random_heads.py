"""Draft heads in which every weight matters."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from jetspec_hf import JetSpecDraftHead


@torch.no_grad()
def random_head(
    target: PreTrainedModel, cls: type[JetSpecDraftHead] = JetSpecDraftHead, seed: int = 0, **fields: Any
) -> Any:
    """A head for `target` all of whose weights are random, the norms' and the branch term's too.

    Args:
        target: the model to draft for.
        cls: the head's class.
        seed: seed of the weights.
        fields: see `JetSpecDraftHead.from_target`; one layer if they do not say.
    """
    head = cls.from_target(target, **{"num_hidden_layers": 1, **fields})
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        random = torch.randn(weight.shape, generator=generator)
        weight.copy_(1 + 0.3 * random if weight.dim() == 1 else random * weight.shape[1] ** -0.5)
    return head
