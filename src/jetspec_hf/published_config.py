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
    "DFlashSpeculator": "a speculators checkpoint, which `jetspec_hf.hub.read_checkpoint` reads",
}
_DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
HEAD_TYPES = ("jetspec", "dflash")
SHAPE_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_SHARED_KEYS = (
    *SHAPE_KEYS,
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
    "target_name_or_path",
    "dtype",
    "torch_dtype",
    "transformers_version",
)

MOST = {"num_hidden_layers": 1024, "num_target_layers": 2**16, "block_size": 2**16}
MOST_OF_ANY_SIZE = 2**31
_INTEGERS = (
    *SHAPE_KEYS,
    "max_position_embeddings",
    "num_target_layers",
    "block_size",
    "mask_token_id",
    "sliding_window",
    "swa_window_size",
    "max_window_layers",
    "draft_vocab_size",
    "target_hidden_size",
    "branch_rank",
)
_KINDS: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (int, "an integer", _INTEGERS),
    (list, "a list", ("layer_types", "target_layer_ids", "aux_hidden_state_layer_ids")),
    (dict, "a dictionary", ("rope_parameters", "rope_scaling", "dflash_config", "transformer_layer_config")),
)


def check_kinds(config: dict[str, Any]) -> None:
    """Checks the kind of every key that any format has, before anything is computed from one.

    Args:
        config (`dict`): The parsed `config.json` of a head, in any format.

    Raises:
        ValueError: If a key is of another kind, an integer is beyond all measure, or the head is quantised; the message
            names the key and its value.
    """
    if (quantised := config.get("quantization_config")) is not None:
        raise ValueError(f"`quantization_config` must be missing: heads are not quantised, got {quantised!r}.")
    nested = (config.get(key) for key in ("dflash_config", "transformer_layer_config"))
    for place in (config, *(value for value in nested if isinstance(value, dict))):
        for kind, rule, keys in _KINDS:
            for key in keys:
                _check_kind(key, place.get(key), kind, rule)


def _check_kind(key: str, value: object, kind: type, rule: str) -> None:
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise ValueError(f"`{key}` must be {rule}, got {value!r}.")
    most = MOST.get(key, MOST_OF_ANY_SIZE)
    if isinstance(value, int) and not -most <= value <= most:
        raise ValueError(f"`{key}` must be at most {most}, got {shown(value)}.")


def shown(value: object) -> str:
    """A value as an error message shows it: Python refuses to write integers of thousands of digits."""
    return f"{value!r}" if not isinstance(value, int) or abs(value) < 10**40 else "a longer number"


def check_head_type(head_type: object) -> None:
    """Checks the argument that settles causality.

    Args:
        head_type (`str`, *optional*): `"jetspec"` or `"dflash"`.

    Raises:
        ValueError: If it is anything else.
    """
    if head_type is not None and head_type not in HEAD_TYPES:
        raise ValueError(f'`head_type` must be "jetspec" (causal) or "dflash" (bidirectional), got {head_type!r}.')


def check_causality(config: dict[str, Any], head_type: str | None = None) -> None:
    """Checks that nothing contradicts `causal`, the one key of our own format that says it.

    Args:
        config (`dict`): The parsed `config.json` of a head of ours.
        head_type (`str`, *optional*): What the caller takes the head for.

    Raises:
        ValueError: If another format's key, or the caller, says otherwise; the message names both.
    """
    check_head_type(head_type)
    causal = config.get("causal", True)
    dflash = config.get("dflash_config") or {}
    said = {f"dflash_config.{key}": dflash.get(key) for key in ("causal_head", "causal")}
    said["is_causal"] = config.get("is_causal")
    said["head_type"] = None if head_type is None else head_type == "jetspec"
    for key, value in said.items():
        if value is not None and value is not causal:
            raise ValueError(
                f"`{key}` must not contradict `causal` in the jetspec format, got {value!r} and {causal!r}."
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
    known = any(name in _PUBLISHED_ARCHITECTURES or name in _REFUSED_ARCHITECTURES for name in architectures_of(config))
    return known or any(key in config for key in ("dflash_config", "speculators_model_type"))


def architectures_of(config: dict[str, Any]) -> list[str]:
    """The class names in a `config.json`.

    Args:
        config (`dict`): The parsed `config.json`.

    Returns:
        `list[str]`: Empty if it names none.

    Raises:
        ValueError: If `architectures` is no list of strings.
    """
    names = config.get("architectures")
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"`architectures` must be a list of class names, got {names!r}.")
    return names


def translate_published_config(config: dict[str, Any], head_type: str | None = None) -> dict[str, Any]:
    """Translates a published head's configuration to the fields of `JetSpecConfig`.

    Args:
        config (`dict`): The parsed `config.json`.
        head_type (`str`, *optional*): `"jetspec"` (causal) or `"dflash"` (bidirectional), overriding what the file says
            about causality. Needed only when its keys contradict each other.

    Returns:
        `dict`: Keyword arguments of `JetSpecConfig`.

    Raises:
        ValueError: If the head is of a kind that cannot be represented, a required key is missing or of a wrong type,
            or keys contradict.
    """
    check_kinds(config)
    check_head_type(head_type)
    dflash = config.get("dflash_config") or {}
    _refuse_unsupported(config, dflash)
    translated = shared_fields(config)
    translated["block_size"] = _required(config, dflash, "block_size")
    translated["mask_token_id"] = _required(config, dflash, "mask_token_id")
    translated["layer_types"], translated["sliding_window"] = _layers(config, dflash)
    translated["target_layer_ids"] = _agreed(config, dflash, "target_layer_ids")
    if translated["target_layer_ids"] is None and config.get("num_target_layers") is None:
        raise ValueError(
            "`dflash_config.target_layer_ids` or `num_target_layers` must be in the config of a published head, got "
            "neither: without one the tapped layers are unknown."
        )
    translated["causal"] = _causality(config, dflash, translated["layer_types"], head_type)
    scales = {key: _agreed(config, dflash, key) for key in ("logit_scale", "output_multiplier")}
    given = {key: value for key, value in scales.items() if value is not None}
    if len(set(map(repr, given.values()))) > 1:
        raise ValueError(
            f"`logit_scale` and `output_multiplier` must agree, got {scales['logit_scale']} and "
            f"{scales['output_multiplier']}: they are vLLM's and SGLang's name of one factor."
        )
    if given:
        translated["logit_scale"] = next(iter(given.values()))
    if (cap := _agreed(config, dflash, "final_logit_softcapping")) is not None:
        translated["final_logit_softcapping"] = cap
    return translated


def shared_fields(config: dict[str, Any]) -> dict[str, Any]:
    """What a Qwen3 configuration and `JetSpecConfig` call by the same name, and the rotary parameters.

    Args:
        config (`dict`): A Qwen3 configuration: all of a published head's, the nested one of other layouts.

    Returns:
        `dict`: Keyword arguments of `JetSpecConfig`.

    Raises:
        ValueError: If a key that gives a shape or the rotary base is missing.
    """
    if missing := [key for key in SHAPE_KEYS if config.get(key) is None]:
        raise ValueError(f"`{'`, `'.join(missing)}` must be in the config of a published head, got none.")
    fields = {key: config[key] for key in _SHARED_KEYS if config.get(key) is not None}
    return {**fields, "model_type": "jetspec", "rope_parameters": _rope_parameters(config)}


def _refused_kind(config: dict[str, Any], dflash: dict[str, Any]) -> str | None:
    """What kind of head this is, if it computes something ours cannot; its keys count more than its name."""
    architectures = architectures_of(config)
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


def _agreed(config: dict[str, Any], dflash: dict[str, Any], key: str) -> Any:
    """A key that may stand at the top level or inside `dflash_config`; in both places only with the same value."""
    found = [place[key] for place in (config, dflash) if place.get(key) is not None]
    if found and found[0] != found[-1]:
        raise ValueError(
            f"`{key}` must be the same at the top level and inside `dflash_config`, got {found[0]} and {found[-1]}."
        )
    return found[0] if found else None


def _required(config: dict[str, Any], dflash: dict[str, Any], key: str) -> Any:
    """A key that must stand at the top level or inside `dflash_config`."""
    if (value := _agreed(config, dflash, key)) is None:
        raise ValueError(
            f"`{key}` must be at the top level or inside `dflash_config` of a published head, got neither."
        )
    return value


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (transformers 4), as the former."""
    given = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    for key, value in given.items():
        if not isinstance(value, dict):
            raise ValueError(f"`{key}` must be a dictionary, got {value!r}.")
    theta = config.get("rope_theta")
    readings = [_one_rope(value, theta) for value in given.values()] or [_one_rope({}, theta)]
    if readings[0] != readings[-1]:
        raise ValueError(f"`rope_parameters` and `rope_scaling` must agree, got {readings[0]} and {readings[-1]}.")
    return readings[0]


def _one_rope(given: dict[str, Any], theta: Any) -> dict[str, Any]:
    # Multimodal sections turn text as plain rotary embeddings do.
    parameters = {key: value for key, value in given.items() if key not in ("mrope_section", "mrope_interleaved")}
    if "rope_theta" not in parameters and theta is None:
        raise ValueError(
            "`rope_theta` or `rope_parameters.rope_theta` must be in the config of a published head, got neither."
        )
    parameters.setdefault("rope_theta", theta)
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    parameters.pop("type", None)
    if theta is not None and parameters["rope_theta"] != theta:
        raise ValueError(
            f"`rope_theta` must agree with `rope_parameters.rope_theta`, got {theta} and {parameters['rope_theta']}."
        )
    return parameters


def _layers(config: dict[str, Any], dflash: dict[str, Any]) -> tuple[Any, Any]:
    """Layer kinds and window; the window counts only when a layer slides."""
    count, window, kinds = config["num_hidden_layers"], config.get("sliding_window"), config.get("layer_types")
    if dflash.get("use_swa") and all(kind == "full_attention" for kind in kinds or ()):  # vLLM's key: all layers slide
        kinds, window = ["sliding_attention"] * count, window or dflash.get("swa_window_size")
    if kinds is None:
        first_sliding = config.get("max_window_layers") or 0 if config.get("use_sliding_window") and window else count
        kinds = ["full_attention" if index < first_sliding else "sliding_attention" for index in range(count)]
    return list(kinds), window if "sliding_attention" in kinds else None


def _causality(
    config: dict[str, Any], dflash: dict[str, Any], layer_types: list[str], head_type: str | None
) -> bool | dict[str, bool]:
    """In-block causality per layer kind; DFlash's own rule (sliding layers causal, full ones not) if no key says it."""
    if head_type is not None:
        return head_type == "jetspec"
    said = {f"dflash_config.{key}": dflash[key] for key in ("causal_head", "causal") if dflash.get(key) is not None}
    if config.get("is_causal") is not None:
        said["is_causal"] = config["is_causal"]
    for key, value in said.items():
        if not isinstance(value, bool):
            raise ValueError(f"`{key}` must be `true` or `false`, got {value!r}.")
    if len(set(said.values())) > 1:
        keys = ", ".join(f"`{key}`={value}" for key, value in said.items())
        hint = "NeMo writes this pair for causal JetSpec heads; " if said.get("dflash_config.causal") else ""
        raise ValueError(
            f'The causality keys must agree, got {keys}. {hint}pass `head_type="jetspec"` (causal) or '
            '`head_type="dflash"` (bidirectional).'
        )
    if said:
        return bool(next(iter(said.values())))
    return {"full_attention": False, "sliding_attention": True} if "sliding_attention" in layer_types else False
