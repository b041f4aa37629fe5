"""The target as the library sees it: its decoder layers, its attention kinds, and whether a tree can be verified on it.

This file travels to the Hub with a head, so it imports only torch and transformers.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.utils import logging

if TYPE_CHECKING:
    from .configuration_jetspec import JetSpecConfig

logger = logging.get_logger(__name__)

SUPPORTED_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "dummy")
SUPPORTED_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class AttentionKind:
    """One kind of attention layer of a target, and what its mask needs.

    Args:
        name (`str`): The layer type of transformers.
        layer_idx (`int`): A layer of this kind that has a cache of its own.
        sliding_window (`int`, *optional*): Window in tokens, the query included.
        chunk_size (`int`, *optional*): Size of the chunks that cannot see each other.
    """

    name: str
    layer_idx: int
    sliding_window: int | None = None
    chunk_size: int | None = None


def attention_kinds(target: PreTrainedModel) -> list[AttentionKind]:
    """The kinds of attention layers of a target, one entry per kind.

    Args:
        target (`PreTrainedModel`): The model to be sped up.

    Returns:
        `list[AttentionKind]`: In the order of their first layer; layers without a cache of their own are left out.
    """
    layer_types, layer_kwargs = get_layer_types_and_kwargs(target.config.get_text_config(decoder=True))
    kinds: dict[str, AttentionKind] = {}
    for index, (name, kwargs) in enumerate(zip(layer_types, layer_kwargs, strict=False)):
        if name == "dummy" or name in kinds:
            continue
        size = kwargs.get("sliding_window")
        kinds[name] = AttentionKind(
            name,
            index,
            sliding_window=size if name == "sliding_attention" else None,
            chunk_size=size if name == "chunked_attention" else None,
        )
    return list(kinds.values())


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a target, in order.

    Args:
        target (`PreTrainedModel`): The model to be sped up.

    Returns:
        `nn.ModuleList`: One module per decoder layer.

    Raises:
        ValueError: If no list of `num_hidden_layers` modules is found in the decoder.
    """
    return _decoder(target)[1]


def takes_mask_per_kind(target: PreTrainedModel) -> bool:
    """Whether the decoder takes a dict of 4D masks keyed by layer kind, rather than the one mask of its only kind."""
    tests = [_tests_for_dict(forward) for forward in _forwards(_decoder(target)[0])]
    known = [test for test in tests if test is not None]
    return any(known) if known else len(attention_kinds(target)) > 1


def _decoder(target: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    for module in target.get_decoder().modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, child
    raise ValueError(
        f"`target` must have a list of its {count} decoder layers inside its decoder, found none in "
        f"{type(target).__name__}."
    )


def _forwards(module: nn.Module) -> list[Callable[..., Any]]:
    """The forwards of a module's class and of those it extends, which it may hand its arguments on to."""
    classes = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    return [cls.__dict__["forward"] for cls in classes if "forward" in cls.__dict__]


@lru_cache(maxsize=256)
def _tests_for_dict(forward: Callable[..., Any]) -> bool | None:
    """Whether a forward asks if its mask is a dict; `None` if its source is not at hand."""
    try:
        return ", dict)" in inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):
        return None


def base_model(target: PreTrainedModel) -> PreTrainedModel:
    """The model itself where a PEFT model wraps it: its adapters are part of the model's own layers.

    Args:
        target (`PreTrainedModel` or `PeftModel`): The model to be sped up.

    Returns:
        `PreTrainedModel`: What `generate` runs on.
    """
    unwrap = getattr(target, "get_base_model", None)
    return target if unwrap is None else unwrap()


class OutputRows:
    """Some rows of a target's `lm_head`, gathered once: the logits of a draft vocabulary alone.

    Args:
        target (`PreTrainedModel`): The model to be sped up.
        token_ids (`torch.LongTensor` of shape `(draft_vocab,)`): The rows.
    """

    def __init__(self, target: PreTrainedModel, token_ids: torch.Tensor) -> None:
        lm_head = cast(nn.Module, target.get_output_embeddings())
        self._weight, self._bias = _rows_of(lm_head, target, token_ids)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits of shape `(..., draft_vocab)` from states of shape `(..., hidden)`, in their dtype and device."""
        if self._weight.dtype != hidden_states.dtype or self._weight.device != hidden_states.device:
            self._weight = self._weight.to(device=hidden_states.device, dtype=hidden_states.dtype)
            self._bias = None if self._bias is None else self._bias.to(self._weight)
        return nn.functional.linear(hidden_states, self._weight, self._bias)


@torch.no_grad()
def _rows_of(
    lm_head: nn.Module, target: PreTrainedModel, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of the weight and the bias; where the weight is packed or elsewhere, what the module makes of unit vectors.

    A subclass of `nn.Linear` may add to its product, as PEFT's adapters do, so only the class itself is read.
    """
    hooked = hasattr(lm_head, "_hf_hook") or lm_head._forward_hooks or lm_head._forward_pre_hooks
    if type(lm_head) is nn.Linear and not hooked:
        weight, bias = lm_head.weight, cast("torch.Tensor | None", lm_head.bias)
        if weight.device.type != "meta" and weight.is_floating_point():
            token_ids = token_ids.to(weight.device)
            return weight[token_ids], None if bias is None else bias[token_ids]
    example = target.get_input_embeddings()(torch.zeros(1, 1, dtype=torch.long, device=target.device))[0]
    origin = torch.zeros_like(example)
    offset = lm_head(origin)[0]
    token_ids = token_ids.to(offset.device)
    columns = []
    for start in range(0, example.shape[1], 64):  # all unit vectors at once would take hidden x vocabulary numbers
        units = torch.eye(example.shape[1], dtype=example.dtype, device=example.device)[start : start + 64]
        columns.append((lm_head(units) - offset)[:, token_ids])
    return torch.cat(columns).T.contiguous(), offset[token_ids]


def unsupported_reason(target: PreTrainedModel) -> str | None:
    """Why a token tree cannot be verified on this target, or `None` if it can.

    Args:
        target (`PreTrainedModel`): The model to be sped up.

    Returns:
        `str`, *optional*: The end of a sentence that starts with the target's name.
    """
    config = target.config.get_text_config(decoder=True)
    if target.config.is_encoder_decoder:
        return "is an encoder-decoder model; only decoder-only targets are supported"
    if not any("position_ids" in inspect.signature(forward).parameters for forward in _forwards(target)):
        return "has no `position_ids` in its forward, so tree nodes cannot be placed at their depth"
    if getattr(config, "alibi", False):
        return "uses alibi, whose biases follow the slots of the cache and not the positions of tree nodes"
    if getattr(target, "_is_stateful", False):
        return "keeps a recurrent state that cannot be taken back to an earlier token"
    layer_types, _ = get_layer_types_and_kwargs(config)
    if odd := sorted(set(layer_types) - set(SUPPORTED_KINDS)):
        return f"has layers of kind {', '.join(odd)}, on which rejected tokens cannot be undone"
    if any(1 in (kind.sliding_window, kind.chunk_size) for kind in attention_kinds(target)):
        return "has a window or chunk of a single token, for which transformers' caches keep the wrong slots"
    if "local" in getattr(config, "attention_layers", []):
        return "has local attention layers that mask by the slots of the cache"
    generating_class: Any = type(target)  # a subclass of `GenerationMixin` as well
    if generating_class._supports_default_dynamic_cache() is False:
        return "uses a cache class of its own"
    if (attention := config._attn_implementation) not in SUPPORTED_ATTENTION:
        return (
            f"runs `attn_implementation={attention!r}`, which takes no 4D tree mask; load it with "
            f"{' or '.join(map(repr, SUPPORTED_ATTENTION))}"
        )
    return None


def length_limit_reason(target: PreTrainedModel, length: int, max_length: int) -> str | None:
    """Why a generation up to `max_length` cannot be exact on this target, or `None` if it can.

    Args:
        target (`PreTrainedModel`): The model to be sped up.
        length (`int`): Tokens of the prompt.
        max_length (`int`): Tokens of the prompt and of the longest output.

    Returns:
        `str`, *optional*: The end of a sentence that starts with the target's name.
    """
    config = target.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    original = original or config.max_position_embeddings
    if rope.get("rope_type") == "dynamic" and max_length > original:
        return (
            f"rescales its rotary embeddings at every step beyond {original} tokens; set `max_length` to at most that, "
            f"not {max_length}"
        )
    if rope.get("rope_type") == "longrope" and length <= original < max_length:
        return (
            f"switches its rotary embeddings at {original} tokens; set `max_length` to at most that, not {max_length}, "
            "or start from a longer prompt"
        )
    floor = getattr(config, "floor_scale", None)
    if floor is not None and getattr(config, "attn_temperature_tuning", False) and max_length > floor:
        return (
            f"scales its attention by the slots of the cache from {floor} tokens on; set `max_length` to at most that, "
            f"not {max_length}"
        )
    return None


def check_architecture(target: PreTrainedModel) -> None:
    """Checks that a token tree can be verified on this target, whatever the head.

    Args:
        target (`PreTrainedModel`): The model to be sped up.

    Raises:
        ValueError: If it cannot; the message says why.
    """
    target = base_model(target)
    if (reason := unsupported_reason(target)) is not None:
        raise ValueError(f"{type(target).__name__} {reason}.")


def check_target(target: PreTrainedModel, config: "JetSpecConfig") -> None:
    """Checks that a head of this configuration can draft for this target.

    Args:
        target (`PreTrainedModel`): The model to be sped up.
        config ([`JetSpecConfig`]): The head's configuration.

    Raises:
        ValueError: If the target cannot be verified with a tree, or does not fit; the message has both values.
    """
    check_architecture(target)
    target = base_model(target)
    name = type(target).__name__
    text_config = target.config.get_text_config(decoder=True)
    facts = (
        ("vocab_size", text_config.vocab_size, config.vocab_size),
        ("hidden_size", text_config.hidden_size, config.hidden_size),
        ("num_target_layers", text_config.num_hidden_layers, config.num_target_layers),
    )
    for field, has, wants in facts:
        if wants is not None and has != wants:
            raise ValueError(
                f"The head's `{field}` must equal the target's, got {wants} and {has}: this head is for another target."
            )
    if max(cast(list[int], config.target_layer_ids)) >= text_config.num_hidden_layers:
        raise ValueError(
            f"The head's `target_layer_ids` must be below the target's {text_config.num_hidden_layers} layers, got "
            f"{config.target_layer_ids}."
        )
    if target.get_output_embeddings() is None:
        raise ValueError(f"{name} has no output embeddings, which a draft head borrows.")
    made_for, given = config.target_name_or_path, target.config.name_or_path
    if made_for and given and _last_part(made_for) != _last_part(given):  # a copy in a folder is the same model
        logger.warning_once(
            f"This head was made for the target {made_for!r} and is used with {given!r}: acceptance may be low."
        )


def _last_part(name_or_path: str) -> str:
    """`gemma-3-270m` of `google/gemma-3-270m` or of a folder."""
    return re.split(r"[/\\]", name_or_path.rstrip("/\\"))[-1]


def head_config_for(target: PreTrainedModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a head's configuration that follow from its target, `fields` taking precedence.

    Args:
        target (`PreTrainedModel`): The model to be sped up.
        fields (`dict`): Fields the caller has chosen; `None` counts as not chosen.

    Returns:
        `dict`: Keyword arguments of [`JetSpecConfig`].
    """
    config = target.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    intermediate = getattr(config, "intermediate_size", None)
    derived = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_target_layers": config.num_hidden_layers,
        "intermediate_size": intermediate if isinstance(intermediate, int) and intermediate else 4 * config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads if heads % key_value_heads == 0 else heads,
        "head_dim": _even_head_dim(config),
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": _rope_theta(config)},
        "target_name_or_path": target.config.name_or_path or None,
        **{name: getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    }
    chosen = {name: value for name, value in fields.items() if value is not None}
    if "mask_token_id" not in chosen:
        derived["mask_token_id"] = _spare_token(config)
    return {**derived, **chosen}


def _even_head_dim(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head_dim + head_dim % 2)


def _rope_theta(config: Any) -> float:
    """The target's rotary base, that of its full-attention layers where kinds differ; 10,000 where it has none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention") or parameters
    return float(parameters.get("rope_theta") or 10000.0)


def _spare_token(config: Any) -> int:
    """The last row of the embedding that is no special token: large vocabularies end in reserved rows."""
    special: set[int | None] = set()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        special.update(value if isinstance(value, list) else [value])
    spare = next((token for token in reversed(range(config.vocab_size)) if token not in special), None)
    if spare is None:
        raise ValueError("`mask_token_id` must be given, got none: every token of the vocabulary is a special one.")
    return spare
