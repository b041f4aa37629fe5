"""What a checkpoint format is: how it is recognised, read to the canonical head, and written from one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ...configuration_jetspec import JetSpecConfig
from ...published_config import SHAPE_KEYS


@dataclass(frozen=True)
class Checkpoint:
    """A parsed `config.json` and the tensors beside it: of any format, or canonical.

    Canonical are the fields of [`JetSpecConfig`] and the names of [`JetSpecDraftHead`]'s tensors.

    Args:
        config (`dict`): The configuration.
        tensors (`dict[str, torch.Tensor]`): The weights by name.
    """

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reading:
    """What a reader may need besides the files.

    Args:
        head_type (`str`, *optional*): `"jetspec"` or `"dflash"`, where the causality keys contradict each other.
        target (`PreTrainedModel`, *optional*): The model the head drafts for.
    """

    head_type: str | None = None
    target: PreTrainedModel | None = None


@dataclass(frozen=True)
class Writing:
    """What a writer writes: the head's configuration and weights, and for whom.

    Args:
        config ([`JetSpecConfig`]): The head's configuration.
        tensors (`dict[str, torch.Tensor]`): Its weights, without its branch term and draft vocabulary.
        draft_token_ids (`torch.LongTensor`, *optional*): Its draft vocabulary.
        target (`PreTrainedModel`, *optional*): The model the head drafts for.
        target_name (`str`, *optional*): What to record as its name.
    """

    config: JetSpecConfig
    tensors: dict[str, torch.Tensor]
    draft_token_ids: torch.Tensor | None
    target: PreTrainedModel | None
    target_name: str | None


@dataclass(frozen=True)
class Layout:
    """A checkpoint format.

    Args:
        meaning (`str`): Whose it is, in a few words.
        recognises (`Callable`): Whether a parsed `config.json` is of this format.
        read (`Callable`): Turns a checkpoint of this format into a canonical one.
        write (`Callable`): The reverse.
    """

    meaning: str
    recognises: Callable[[dict[str, Any]], bool]
    read: Callable[[Checkpoint, Reading], Checkpoint]
    write: Callable[[Writing], Checkpoint]


def qwen3_fields(writing: Writing) -> dict[str, Any]:
    """A head's configuration in the keys of a Qwen3 configuration, which the other formats build on.

    Args:
        writing ([`Writing`]): What is written.

    Returns:
        `dict`: Rotary parameters in the spelling of transformers 4 and of 5.
    """
    names = (
        *SHAPE_KEYS,
        "hidden_act",
        "rms_norm_eps",
        "attention_bias",
        "attention_dropout",
        "max_position_embeddings",
        "initializer_range",
        "layer_types",
        "sliding_window",
        "num_target_layers",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
    )
    config = writing.config
    rope = dict(config.rope_parameters or {})
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    fields = {name: getattr(config, name) for name in names}
    return {
        "model_type": "qwen3",
        **{name: value for name, value in fields.items() if value is not None},
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        **({} if rope["rope_type"] == "default" else {"rope_scaling": scaling}),
        "use_sliding_window": "sliding_attention" in (config.layer_types or []),
        "max_window_layers": config.num_hidden_layers,
        "tie_word_embeddings": False,
        **({} if writing.target_name is None else {"target_name_or_path": writing.target_name}),
        "dtype": str(writing.tensors["fc.weight"].dtype).removeprefix("torch."),
        **({} if config.logit_scale == 1.0 else {"logit_scale": config.logit_scale}),
    }


def uniform_causality(config: JetSpecConfig) -> bool | None:
    """Whether every layer of a head is causal, or none; `None` where some are.

    Args:
        config ([`JetSpecConfig`]): The head's configuration.

    Returns:
        `bool`, *optional*: `None` if it depends on the kind of layer.
    """
    said = {config.is_causal(kind) for kind in config.layer_types or []}
    return said.pop() if len(said) == 1 else None
