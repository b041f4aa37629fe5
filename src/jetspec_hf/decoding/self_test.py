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
    device = cast(torch.Tensor, target.get_input_embeddings().weight).device
    tokens = (
        torch.arange(3, 3 + _PROMPT_LENGTH + len(_PARENTS), device="cpu" if device.type == "meta" else device)
        * 7
        % vocabulary
    )
    prompt, nodes = tokens[:_PROMPT_LENGTH], tokens[_PROMPT_LENGTH:]
    tree_logits = _tree_logits(target, prompt, nodes)
    plain_logits = torch.zeros_like(tree_logits)
    for path in _LEAF_PATHS:
        logits = target(
            input_ids=torch.cat([prompt, nodes[list(path)]])[None], use_cache=False, return_dict=True
        ).logits
        plain_logits[list(path)] = logits[0, _PROMPT_LENGTH:].float()
    error = (tree_logits - plain_logits).abs().mean() / plain_logits.std().clamp(min=1e-12)
    tolerance = _TOLERANCES.get(target.dtype, _HALF_TOLERANCE)
    if not error <= tolerance:
        training = " It is in training mode: call `target.eval()` first." if target.training else ""
        raise ValueError(
            "`target` must give a token tree the logits of a plain forward, got a mean error of "
            f"{float(error):.2g} standard deviations (at most {tolerance:g}) from {type(target).__name__}: it cannot "
            f"be verified with a tree.{training}"
        )


def _tree_logits(target: PreTrainedModel, prompt: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """Float32 logits of every node, of shape `(nodes, vocab)`, by the very code that decodes."""
    parents = torch.tensor([_PARENTS], device=nodes.device)
    depths = torch.tensor([[0, 1, 1, 2, 2]], device=nodes.device)
    tree = TokenTree(nodes[None], parents, depths, torch.zeros(depths.shape, device=nodes.device), depth_limit=2)
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    taps = FeatureTaps(target, [])
    model_kwargs = {
        CACHE_NAME: cache,
        "use_cache": True,
        "attention_mask": None,
        "position_ids": torch.arange(_PROMPT_LENGTH, device=nodes.device)[None],
    }
    with Verifier(target, taps, model_kwargs, GenerationConfig()) as verifier:
        verifier.prefill(prompt[None])
        outputs = verifier.verify(tree, last_depths=[2])
    logits: torch.Tensor = outputs.logits[0].float()
    return logits
