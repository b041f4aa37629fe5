"""The layout of vLLM's speculators: layer ids one higher, the layers' configuration nested, its own vocabulary."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...published_config import architectures_of, shared_fields
from .layout import Checkpoint, Layout, Reading, Writing, qwen3_fields, uniform_causality

_OTHER_KINDS = {
    "jetspec": "its read-out feeds row k the real token k, where a head of ours is fed the mask",
    "dflash2": "it has convolutions and a candidate selector",
    "dspark": "it has a Markov projector over shifted labels",
}
_UNSUPPORTED = ("sample_from_anchor", "shift_label")
_DROPPED = ("verifier_lm_head.weight", "verifier_norm.weight")  # copies of the target's, used while training


def _recognises(config: dict[str, Any]) -> bool:
    return "speculators_model_type" in config or bool(
        {"DFlashSpeculator", "JetSpecSpeculator"} & {*architectures_of(config)}
    )


def _read(checkpoint: Checkpoint, reading: Reading) -> Checkpoint:
    config = checkpoint.config
    _refuse_other_kinds(config)
    layers = config.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise ValueError(f"`transformer_layer_config` must be a dictionary, got {layers!r}.")
    fields = shared_fields(layers)
    count, kinds = fields["num_hidden_layers"], layers.get("layer_types")
    kinds = kinds if kinds is not None or not isinstance(count, int) else ["full_attention"] * count
    fields |= {
        "layer_types": kinds,
        "sliding_window": layers.get("sliding_window") if "sliding_attention" in (kinds or []) else None,
        "causal": _causality(config, kinds, reading.head_type),
        "target_layer_ids": _target_layer_ids(config, layers, reading.target),
        "logit_scale": layers.get("logit_scale", 1.0),
        "target_name_or_path": _verifier(config).get("name_or_path"),
    }
    for key in ("block_size", "mask_token_id"):
        if config.get(key) is None:
            raise ValueError(f"`{key}` must be in the config of a speculators checkpoint, got none.")
        fields[key] = config[key]
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in _DROPPED}
    _check_proposal(config)
    token_ids = _take_draft_token_ids(tensors, config, layers["vocab_size"])
    _drop_borrowed(tensors, reading.target, token_ids)
    if token_ids is not None:
        fields["draft_vocab_size"] = len(token_ids)
        tensors["draft_token_ids"] = token_ids
    return Checkpoint(fields, tensors)


def _refuse_other_kinds(config: dict[str, Any]) -> None:
    kind = config.get("speculators_model_type", "dflash")
    if "JetSpecSpeculator" in architectures_of(config):
        kind = "jetspec"
    if kind != "dflash":
        why = _OTHER_KINDS.get(str(kind), "only heads of that kind compute what a head of ours does")
        raise ValueError(f"`speculators_model_type` must be `dflash`, got {kind!r}: {why}.")
    if config.get("projector_type", "dflash") != "dflash":
        raise ValueError(f"`projector_type` must be `dflash` or missing, got {config['projector_type']!r}.")
    for key in _UNSUPPORTED:
        if config.get(key):
            raise ValueError(f"`{key}` must be false or missing, got {config[key]!r}: rows would draft other tokens.")
    layers = config.get("transformer_layer_config")
    hidden, target_hidden = (layers or {}).get("hidden_size"), config.get("target_hidden_size")
    if target_hidden is not None and target_hidden != hidden:
        raise ValueError(f"`target_hidden_size` must equal `hidden_size`, got {target_hidden} and {hidden}.")


def _causality(config: dict[str, Any], kinds: Any, head_type: str | None) -> bool | dict[str, bool]:
    """Full layers are bidirectional there, sliding ones causal unless said otherwise."""
    non_causal = config.get("sliding_window_non_causal", False)
    if not isinstance(non_causal, bool):
        raise ValueError(f"`sliding_window_non_causal` must be `true` or `false`, got {non_causal!r}.")
    if non_causal or "sliding_attention" not in (kinds or []):
        causal: bool | dict[str, bool] = False
    else:
        causal = True if "full_attention" not in kinds else {"full_attention": False, "sliding_attention": True}
    if head_type is not None and causal is not (head_type == "jetspec"):
        raise ValueError(f"`head_type` must not contradict the keys of this format, got {head_type!r} and {causal!r}.")
    return causal


def _target_layer_ids(config: dict[str, Any], layers: dict[str, Any], target: PreTrainedModel | None) -> list[int]:
    ids = config.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 1 for i in ids):
        raise ValueError(
            f"`aux_hidden_state_layer_ids` must be a list of integers of at least 1, got {ids!r}: id 1 is the output "
            "of the first layer."
        )
    depth = layers.get("num_target_layers")
    if target is not None:
        depth = target.config.get_text_config(decoder=True).num_hidden_layers
    if depth is not None and depth in ids:
        raise ValueError(
            f"`aux_hidden_state_layer_ids` must be below the target's {depth} layers, got {ids}: there the last one is "
            "tapped after the final norm, and here before it."
        )
    return [i - 1 for i in ids]


def _verifier(config: dict[str, Any]) -> dict[str, Any]:
    about = config.get("speculators_config")
    verifier = about.get("verifier") if isinstance(about, dict) else None
    return verifier if isinstance(verifier, dict) else {}


def _check_proposal(config: dict[str, Any]) -> None:
    about = config.get("speculators_config")
    methods = about.get("proposal_methods") if isinstance(about, dict) else None
    for method in methods if isinstance(methods, list) else []:
        tokens = method.get("speculative_tokens") if isinstance(method, dict) else None
        if isinstance(tokens, int) and tokens > config["block_size"] - 1:
            raise ValueError(
                f"`speculative_tokens` must be at most `block_size - 1`, got {tokens} for a block of "
                f"{config['block_size']}: the anchor is not drafted."
            )


def _take_draft_token_ids(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], vocab_size: int
) -> torch.Tensor | None:
    """Takes the draft vocabulary out of `tensors`: `d2t` is what to add to a draft id to get the target's."""
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    size = config.get("draft_vocab_size", 32000)  # their default
    if offsets is None:
        if size != vocab_size:
            raise ValueError(f"`d2t` must be among the tensors, got none: `draft_vocab_size={size}` of {vocab_size}.")
        return None
    if offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32) or len(offsets) != size:
        raise ValueError(
            f"`d2t` must be `draft_vocab_size={size}` integers, got {offsets.dtype} of shape {tuple(offsets.shape)}."
        )
    token_ids = torch.arange(len(offsets)) + offsets.long()
    if bool(((token_ids < 0) | (token_ids >= vocab_size)).any()):
        raise ValueError(f"`d2t` must lead to tokens from 0 to {vocab_size - 1}, got some beyond.")
    if mask is not None and not torch.equal(mask.bool().nonzero().flatten(), token_ids):
        raise ValueError("`t2d` and `d2t` must list the same tokens in ascending order, got different ones.")
    return None if len(token_ids) == vocab_size and not offsets.any() else token_ids


def _drop_borrowed(
    tensors: dict[str, torch.Tensor], target: PreTrainedModel | None, token_ids: torch.Tensor | None
) -> None:
    """Takes out the copies of the target's tables, which a head borrows, once they are known to be copies."""
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if (table := tensors.pop(name, None)) is None:
            continue
        if target is None:
            raise ValueError(
                f"`target` must be given for a checkpoint with its own `{name}`, got none: a head borrows its "
                "target's, so the two are compared."
            )
        module = target.get_input_embeddings() if name.startswith("embed") else target.get_output_embeddings()
        rows = plain_weight(module, name)
        rows = rows if token_ids is None or name.startswith("embed") else rows[token_ids.to(rows.device)]
        rows = rows.cpu()
        same = rows.shape == table.shape and (
            torch.equal(rows, table.to(rows.dtype)) or torch.equal(rows.to(table.dtype), table)  # either may be rounded
        )
        if not same:
            raise ValueError(
                f"`{name}` must be the target's own, got another of shape {tuple(table.shape)}: a head borrows its "
                "target's and would draft other tokens."
            )


def plain_weight(module: Any, name: str) -> torch.Tensor:
    """The weight of one of a target's tables.

    Args:
        module (`nn.Module`): The embedding or the `lm_head`.
        name (`str`): What it is called in a checkpoint.

    Returns:
        `torch.Tensor` of shape `(vocab, hidden)`.

    Raises:
        ValueError: If it is packed, not at hand, or not all there is to the module.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    plain = isinstance(module, nn.Embedding) or type(module) is nn.Linear
    if not plain or not isinstance(weight, torch.Tensor) or weight.device.type == "meta" or bias is not None:
        raise ValueError(
            f"The target's `{name}` must be a plain table without a bias, got {type(module).__name__}: load the target "
            "unquantised and not offloaded."
        )
    return weight.detach()


def _write(writing: Writing) -> Checkpoint:
    config, token_ids = writing.config, writing.draft_token_ids
    if writing.target_name is None:
        raise ValueError("`target_name_or_path` must be given for the speculators format, which records it; got none.")
    tensors = dict(writing.tensors)
    if token_ids is not None:
        if writing.target is None:
            raise ValueError(
                "`target` must be given to write a draft vocabulary in the speculators format, got none: its rows of "
                "the `lm_head` are written too."
            )
        lm_head = plain_weight(writing.target.get_output_embeddings(), "lm_head.weight")
        tensors["lm_head.weight"] = lm_head[token_ids.to(lm_head.device)].to(tensors["fc.weight"].dtype).cpu()
        tensors["d2t"] = token_ids - torch.arange(len(token_ids))
        tensors["t2d"] = torch.isin(torch.arange(config.vocab_size), token_ids)
    architectures = [] if writing.target is None else writing.target.config.architectures
    fields = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": qwen3_fields(writing),
        "draft_vocab_size": config.vocab_size if token_ids is None else len(token_ids),
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids or []],
        "mask_token_id": config.mask_token_id,
        # Of a head without sliding layers vLLM reads it too, and takes `false` for causal.
        "sliding_window_non_causal": uniform_causality(config) is False,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.draft_depth}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": writing.target_name, "architectures": architectures or []},
        },
    }
    return Checkpoint(fields, tensors)


SPECULATORS = Layout("vLLM's speculators, with the draft vocabulary", _recognises, _read, _write)
