"""A numeric test of a target: does a token tree on top of its cache give the logits of a plain forward?

It runs once for every kind of target a head meets, on three tiny forwards, and catches what no list can: code that
reads positions or masks in a way of its own.
"""

from typing import cast

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from ..tree import TokenTree
from .cache import CACHE_NAME
from .taps import FeatureTaps
from .verifier import Verifier

_PROMPT_LENGTH = 6
_PARENTS = (-1, 0, 0, 1, 1)
_DEPTHS = (0, 1, 1, 2, 2)
_LEAF_PATHS = ((0, 1, 3), (0, 1, 4), (0, 2))
# Mean error over the logits' standard deviation. A wrong mask or position gives 0.1 and more; a right one gives 1e-6 in
# float32 and, with half-precision matrix products of other shapes, about 0.01.
_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 0.08


def signature(target: PreTrainedModel) -> str:
    """What the outcome of the self-test depends on."""
    config = target.config.get_text_config(decoder=True)
    return f"{type(target).__qualname__} {config._attn_implementation} {target.dtype} {config.to_json_string()}"


@torch.no_grad()
def check_tree_logits(target: PreTrainedModel) -> None:
    """Compares the logits of a five-node tree with those of plain forwards over its paths.

    Args:
        target (`PreTrainedModel`): The model to be sped up.

    Raises:
        ValueError: If they differ by more than rounding: tree decoding on this target would be silently wrong.
    """
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None) or 10**9
    length = max(1, min(_PROMPT_LENGTH, positions - max(_DEPTHS) - 1))  # a learned table may be short
    tokens = torch.arange(3, 3 + length + len(_PARENTS), device=_device(target)) * 7 % vocabulary
    prompt, nodes = tokens[:length], tokens[length:]
    with _verifier(target, length) as verifier:
        verifier.prefill(prompt[None])
        tree_logits = verifier.verify(_tree(nodes), last_depths=[max(_DEPTHS)]).logits[0]
    plain_logits = torch.zeros_like(tree_logits, dtype=torch.float32)
    for path in map(list, _LEAF_PATHS):
        with _verifier(target, length + len(path)) as verifier:
            outputs, _ = verifier.prefill(torch.cat([prompt, nodes[path]])[None])
        plain_logits[path] = outputs.logits[0, -len(path) :].float()
    error = (tree_logits.float() - plain_logits).abs().mean() / plain_logits.std().clamp(min=1e-12)
    tolerance = _TOLERANCES.get(tree_logits.dtype, _HALF_TOLERANCE)  # under autocast not the target's dtype
    if not error <= tolerance:
        training = " It is in training mode: call `target.eval()` first." if target.training else ""
        raise ValueError(
            "`target` must give a token tree the logits of a plain forward, got a mean error of "
            f"{float(error):.2g} standard deviations (at most {tolerance:g}) from {type(target).__name__}: it cannot "
            f"be verified with a tree.{training}"
        )


def _tree(nodes: torch.Tensor) -> TokenTree:
    parents, depths = (torch.tensor([values], device=nodes.device) for values in (_PARENTS, _DEPTHS))
    return TokenTree(
        nodes[None], parents, depths, torch.zeros(depths.shape, dtype=torch.float32, device=nodes.device), max(_DEPTHS)
    )


def _verifier(target: PreTrainedModel, length: int) -> Verifier:
    """The very code that decodes, over an empty cache; its prefill is the target's own, with the target's own mask."""
    device = _device(target)
    model_kwargs = {
        CACHE_NAME: DynamicCache(config=target.config.get_text_config(decoder=True)),
        "use_cache": True,
        "attention_mask": None,
        "position_ids": torch.arange(length, device=device)[None],
    }
    return Verifier(target, FeatureTaps(target, []), model_kwargs, GenerationConfig())


def _device(target: PreTrainedModel) -> torch.device:
    """Where token ids go; the CPU for an offloaded target, whose own hooks move them."""
    device = cast(torch.Tensor, target.get_input_embeddings().weight).device
    return torch.device("cpu") if device.type == "meta" else device
