"""The `config.json` of published JetSpec and DFlash heads, translated to the fields of `JetSpecConfig`.

Pure functions over dictionaries: this file travels to the Hub with a head and imports nothing. Heads that compute
something a `JetSpecDraftHead` cannot (DFlash 2, Domino, DSpark, the AR read-out) are refused by name.
"""

from typing import Any

_PUBLISHED_ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel")
_REFUSED_ARCHITECTURES = {
    "DFlash2DraftModel": "DFlash 2 (convolutions and a candidate selector)",
    "DominoDraftModel": "Domino (a recurrent prefix encoder)",
    "DSparkDraftModel": "DSpark (a Markov projector over shifted labels)",
    "JetSpecSpeculator": "the AR read-out of speculators (row k is fed the real token k)",
    "DFlashSpeculator": "a speculators checkpoint (layer ids are off by one, own lm_head)",
}
_DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_SHARED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "max_position_embeddings",
    "initializer_range",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "num_target_layers",
    "dtype",
    "torch_dtype",
    "transformers_version",
)


def default_target_layer_ids(num_draft_layers: int, num_target_layers: int) -> list[int]:
    """The published choice of tapped layers: `num_draft_layers` ids spread evenly over the target.

    Args:
        num_draft_layers (`int`): Number of layers of the head.
        num_target_layers (`int`): Number of decoder layers of the target.

    Returns:
        `list[int]`: Ids from 1 to `num_target_layers - 3`; the middle layer for a head of one layer. Targets too
        shallow for that spread get as many distinct layers as they have.
    """
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    if last - first + 1 < num_draft_layers:
        return list(range(min(num_draft_layers, num_target_layers)))
    return [round(first + index * (last - first) / (num_draft_layers - 1)) for index in range(num_draft_layers)]


def is_published_config(config: dict[str, Any]) -> bool:
    """Whether this dictionary is the configuration of a published draft head, supported or not."""
    if config.get("model_type") == "jetspec":
        return False
    architectures = config.get("architectures") or []
    known = any(name in _PUBLISHED_ARCHITECTURES or name in _REFUSED_ARCHITECTURES for name in architectures)
    return known or any(key in config for key in ("dflash_config", "speculators_model_type"))


def translate_published_config(config: dict[str, Any], head_type: str | None = None) -> dict[str, Any]:
    """Translates a published head's configuration to the fields of `JetSpecConfig`.

    Args:
        config (`dict`): The parsed `config.json`.
        head_type (`str`, *optional*): `"jetspec"` (causal) or `"dflash"` (bidirectional), overriding what the file says
            about causality. Needed only when its keys contradict each other.

    Returns:
        `dict`: Keyword arguments of `JetSpecConfig`.

    Raises:
        ValueError: If the head is of a kind that cannot be represented, a required key is missing, or keys contradict.
    """
    dflash = config.get("dflash_config") or {}
    _refuse_unsupported(config, dflash)
    translated = {key: config[key] for key in _SHARED_KEYS if key in config}
    translated["model_type"] = "jetspec"
    translated["block_size"] = _required(config, dflash, "block_size")
    translated["mask_token_id"] = _required(config, dflash, "mask_token_id")
    translated["rope_parameters"] = _rope_parameters(config)
    translated["layer_types"], translated["sliding_window"] = _layers(config)
    translated["target_layer_ids"] = dflash.get("target_layer_ids", config.get("target_layer_ids"))
    if translated["target_layer_ids"] is None and config.get("num_target_layers") is None:
        raise ValueError(
            "`dflash_config.target_layer_ids` or `num_target_layers` must be in the config of a published head, got "
            "neither: without one the tapped layers are unknown."
        )
    translated["causal"] = _causality(config, dflash, translated["layer_types"], head_type)
    for key, ours in (("final_logit_softcapping", "final_logit_softcapping"), ("logit_scale", "logit_scale")):
        value = config.get(key, dflash.get(key))
        if value is not None:
            translated[ours] = value
    if (multiplier := config.get("output_multiplier", dflash.get("output_multiplier"))) is not None:
        translated["logit_scale"] = multiplier
    return translated


def _refused_kind(config: dict[str, Any], dflash: dict[str, Any]) -> str | None:
    """What kind of head this is, if it computes something ours cannot; its keys count more than its name."""
    architectures = config.get("architectures") or []
    kind = next((_REFUSED_ARCHITECTURES[name] for name in architectures if name in _REFUSED_ARCHITECTURES), None)
    projector = str(dflash.get("projector_type", config.get("projector_type", ""))).lower()
    if any(key in dflash or key in config for key in _DFLASH2_KEYS):
        kind = _REFUSED_ARCHITECTURES["DFlash2DraftModel"]
    elif projector == "domino" or "gru_hidden_dim" in dflash:
        kind = _REFUSED_ARCHITECTURES["DominoDraftModel"]
    elif projector == "dspark" or "markov_rank" in dflash:
        kind = _REFUSED_ARCHITECTURES["DSparkDraftModel"]
    elif config.get("speculators_model_type") == "jetspec":
        kind = _REFUSED_ARCHITECTURES["JetSpecSpeculator"]
    elif "speculators_model_type" in config:
        kind = _REFUSED_ARCHITECTURES["DFlashSpeculator"]
    return kind


def _refuse_unsupported(config: dict[str, Any], dflash: dict[str, Any]) -> None:
    if (kind := _refused_kind(config, dflash)) is not None:
        raise ValueError(
            "`architectures` must name a head that this library can represent, got "
            f"{config.get('architectures') or []!r}: {kind}."
        )
    for key, meaning in (
        ("shift_label", "shifted labels: row k predicts token k + 1"),
        ("draft_shift", "a shifted read-out: row k predicts token k + 1"),
        ("sample_from_anchor", "a read-out that starts at the anchor's row"),
        ("attention_sink_bias", "attention sinks"),
    ):
        if dflash.get(key, config.get(key)):
            raise ValueError(
                f"`{key}` must be false or missing in a published head, got true: {meaning} is not supported."
            )
    target_hidden = dflash.get("target_hidden_size", config.get("target_hidden_size"))
    if target_hidden is not None and target_hidden != config.get("hidden_size"):
        raise ValueError(
            f"`target_hidden_size` must equal `hidden_size`, got {target_hidden} and {config.get('hidden_size')}: "
            "heads with a hidden-size adapter are not supported."
        )
    draft_vocabulary = config.get("draft_vocab_size")
    if draft_vocabulary is not None and draft_vocabulary != config.get("vocab_size"):
        raise ValueError(
            f"`draft_vocab_size` must equal `vocab_size`, got {draft_vocabulary} and {config.get('vocab_size')}: "
            "a head with its own reduced lm_head is not supported."
        )


def _required(config: dict[str, Any], dflash: dict[str, Any], key: str) -> Any:
    """A key that stands at the top level or inside `dflash_config`; in both places only with the same value."""
    found = [place[key] for place in (config, dflash) if place.get(key) is not None]
    if not found:
        raise ValueError(
            f"`{key}` must be at the top level or inside `dflash_config` of a published head, got neither."
        )
    if found[0] != found[-1]:
        raise ValueError(
            f"`{key}` must be the same at the top level and inside `dflash_config`, got {found[0]} and {found[-1]}."
        )
    return found[0]


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (transformers 4), as the former."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = config.get("rope_theta")
    if "rope_theta" not in parameters and theta is None:
        raise ValueError(
            "`rope_theta` or `rope_parameters.rope_theta` must be in the config of a published head, got neither."
        )
    parameters.setdefault("rope_theta", theta)
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    if theta is not None and parameters["rope_theta"] != theta:
        raise ValueError(
            f"`rope_theta` must agree with `rope_parameters.rope_theta`, got {theta} and {parameters['rope_theta']}."
        )
    return parameters


def _layers(config: dict[str, Any]) -> tuple[list[str], int | None]:
    """Layer kinds and window; the window counts only when a layer slides."""
    count = config.get("num_hidden_layers", 0)
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first_sliding = config.get("max_window_layers", 0) if config.get("use_sliding_window") and window else count
        kinds = ["full_attention" if index < first_sliding else "sliding_attention" for index in range(count)]
    return list(kinds), window if "sliding_attention" in kinds else None


def _causality(
    config: dict[str, Any], dflash: dict[str, Any], layer_types: list[str], head_type: str | None
) -> bool | dict[str, bool]:
    """In-block causality per layer kind; DFlash's own rule (sliding layers causal, full ones not) if no key says it."""
    if head_type is not None:
        if head_type not in ("jetspec", "dflash"):
            raise ValueError(f'`head_type` must be "jetspec" (causal) or "dflash" (bidirectional), got {head_type!r}.')
        return head_type == "jetspec"
    said = {f"dflash_config.{key}": dflash[key] for key in ("causal_head", "causal") if dflash.get(key) is not None}
    if config.get("is_causal") is not None:
        said["is_causal"] = config["is_causal"]
    if len(set(said.values())) > 1:
        keys = ", ".join(f"`{key}`={value}" for key, value in said.items())
        hint = "NeMo writes this pair for causal JetSpec heads; " if said.get("dflash_config.causal") else ""
        raise ValueError(
            f'The causality keys must agree, got {keys}. {hint}pass `head_type="jetspec"` (causal) or '
            '`head_type="dflash"` (bidirectional) to `from_pretrained`.'
        )
    if said:
        return bool(next(iter(said.values())))
    return {"full_attention": False, "sliding_attention": True} if "sliding_attention" in layer_types else False
