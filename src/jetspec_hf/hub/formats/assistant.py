"""The layout of transformers' own DFlash assistants (`muse_glimmer_assistant`): flat, bidirectional, no vocabulary."""

from typing import Any

from ...published_config import SHAPE_KEYS, shared_fields
from .layout import Checkpoint, Layout, Reading, Writing, qwen3_fields

_MODEL_TYPE = "muse_glimmer_assistant"
_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
# What the class takes a missing key for.
_DEFAULTS = {
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "sliding_window": 2048,
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
    "pad_token_id": 200018,
    "bos_token_id": 200000,
    "eos_token_id": 200001,
}
_THETA = 500000.0
_OWN = (*SHAPE_KEYS, "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_dropout")
_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
_WRITTEN = (*_OWN, *_IDS, "rope_parameters", "layer_types", "num_target_layers", "target_name_or_path", "dtype")


def _read(checkpoint: Checkpoint, reading: Reading) -> Checkpoint:
    if reading.head_type == "jetspec":
        raise ValueError('`head_type` must be "dflash" or missing, got "jetspec": this format is bidirectional.')
    given = {key: value for key, value in checkpoint.config.items() if value is not None}
    if not given.get("rope_parameters"):
        given.setdefault("rope_theta", _THETA)
    if reading.target is not None:
        text_config = reading.target.config.get_text_config(decoder=True)
        given.setdefault("vocab_size", text_config.vocab_size)
        given.setdefault("num_target_layers", text_config.num_hidden_layers)
    if "vocab_size" not in given:
        raise ValueError(
            "`vocab_size` must be known, got none: transformers' assistants do not record it. Give `target=` or "
            "`vocab_size=`."
        )
    given = {**_DEFAULTS, **given}
    kinds = given.get("layer_types", ["sliding_attention"] * given["num_hidden_layers"])
    fields = {
        **shared_fields(given),
        **{key: given[key] for key in ("block_size", "mask_token_id", "target_layer_ids")},
        "layer_types": kinds,
        "sliding_window": _ours(given["sliding_window"]) if "sliding_attention" in kinds else None,
        "causal": False,
    }
    return Checkpoint(fields, {_NAMES.get(name, name): tensor for name, tensor in checkpoint.tensors.items()})


def _ours(window: Any) -> Any:
    """Their window, as far as which a row sees to both sides, as ours, which counts the row itself."""
    return window + 1 if isinstance(window, int) else window


def _write(writing: Writing) -> Checkpoint:
    config = writing.config
    qwen3 = qwen3_fields(writing)
    fields: dict[str, Any] = {
        "architectures": ["MuseGlimmerAssistantModel"],
        **{key: qwen3[key] for key in _WRITTEN if key in qwen3},
        "model_type": _MODEL_TYPE,
        "sliding_window": config.sliding_window - 1 if config.sliding_window else _DEFAULTS["sliding_window"],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": config.target_layer_ids,
    }
    for name in _IDS:
        value = fields.get(name)
        fields[name] = value[0] if isinstance(value, list) else value  # the class takes one id, or `None`
    names = {ours: theirs for theirs, ours in _NAMES.items()}
    return Checkpoint(fields, {names.get(name, name): tensor for name, tensor in writing.tensors.items()})


ASSISTANT = Layout(
    "transformers' own DFlash assistants, bidirectional",
    lambda config: config.get("model_type") == _MODEL_TYPE,
    _read,
    _write,
)
