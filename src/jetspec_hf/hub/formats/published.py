"""The layout of published JetSpec and DFlash heads, and NeMo Automodel's, which differs in the name of its class."""

from typing import Any

from transformers.utils import logging

from ...published_config import architectures_of, is_published_config, translate_published_config
from .layout import Checkpoint, Layout, Reading, Writing, qwen3_fields, uniform_causality

logger = logging.get_logger(__name__)

_NEMO = "Qwen3DFlashDraftModel"


def _is_nemo(config: dict[str, Any]) -> bool:
    return _NEMO in architectures_of(config)


def _is_published(config: dict[str, Any]) -> bool:
    alike = is_published_config({key: value for key, value in config.items() if key != "model_type"})
    return alike and not _is_nemo(config) and ("dflash_config" in config or "speculators_model_type" not in config)


def _read(checkpoint: Checkpoint, reading: Reading) -> Checkpoint:
    """The names of the tensors are ours."""
    return Checkpoint(translate_published_config(checkpoint.config, head_type=reading.head_type), checkpoint.tensors)


def _read_nemo(checkpoint: Checkpoint, reading: Reading) -> Checkpoint:
    canonical = _read(checkpoint, reading)
    if "sliding_attention" in (canonical.config["layer_types"] or []) and canonical.config["causal"] is True:
        logger.warning(
            "NeMo trains JetSpec heads with full attention and may save them as sliding all the same: if this one was, "
            'read it with `layer_types=["full_attention", ...]`.'
        )
    return canonical


def _write(writing: Writing, architecture: str) -> Checkpoint:
    """Every key about causality that anybody reads says the same; none is there where it depends on the layer."""
    config = writing.config
    causal = uniform_causality(config)
    drafting = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": config.target_layer_ids,
        **({} if causal is None else {"causal_head": causal, "causal": causal}),
    }
    fields = {
        "architectures": [architecture],
        **qwen3_fields(writing),
        "block_size": config.block_size,
        **({} if causal is None else {"is_causal": causal}),
        "dflash_config": drafting,
    }
    if config.logit_scale != 1.0:
        fields["output_multiplier"] = config.logit_scale
    if config.final_logit_softcapping is not None:
        fields["final_logit_softcapping"] = config.final_logit_softcapping
    return Checkpoint(fields, writing.tensors)


PUBLISHED = Layout(
    "published JetSpec and DFlash heads; vLLM, SGLang and the official code read it",
    _is_published,
    _read,
    lambda writing: _write(writing, "DFlashDraftModel"),
)
NEMO = Layout("NeMo Automodel's, to train on there", _is_nemo, _read_nemo, lambda writing: _write(writing, _NEMO))
