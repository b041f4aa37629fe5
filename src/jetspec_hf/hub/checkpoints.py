"""Checkpoints of draft heads in every format there is: read to one canonical head, and written from it.

No code from a checkpoint ever runs: of its files only JSON and safetensors are read, and nothing is written outside the
cache. The formats themselves stand in `formats`, what each cannot say in `limits`.
"""

import copy
import os
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from ..configuration_jetspec import JetSpecConfig
from ..modeling_jetspec import JetSpecDraftHead
from ..published_config import check_causality, check_head_type, check_kinds
from ..weight_files import INDEX, WEIGHTS, check_types
from .files import find_folder, plain_names, read_config, read_tensors, write_files
from .formats import FOREIGN, OURS, recognised_formats
from .formats.layout import Checkpoint, Reading, Writing
from .limits import warnings_for

#: The formats by name, and whose they are.
FORMATS = {OURS: "this library's, with all that a head has"} | {
    name: layout.meaning for name, layout in FOREIGN.items()
}

_TYPES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
}


def detect_format(config: dict[str, Any]) -> str:
    """Which format a checkpoint is of.

    Args:
        config (`dict`): Its parsed `config.json`.

    Returns:
        `str`: A key of `FORMATS`.

    Raises:
        ValueError: If it is of none, or its keys are of several.
    """
    found = recognised_formats(config)
    if len(found) == 1:
        return found[0]
    keys = ("model_type", "architectures", "dflash_config", "speculators_model_type")
    said = ", ".join(f"`{key}`={config[key]!r}" for key in keys if key in config) or "none of its keys"
    several = f"its keys are those of {' and '.join(found)}" if found else "it is of no known one"
    raise ValueError(f"A checkpoint must be of one format of {', '.join(FORMATS)}; {several}: got {said}.")


def read_checkpoint(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    target: PreTrainedModel | None = None,
    head_type: str | None = None,
    dtype: str | torch.dtype = "auto",
    subfolder: str = "",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    **fields: Any,
) -> JetSpecDraftHead:
    """Reads a draft head in any format.

    Args:
        path (`str` or `os.PathLike`): A folder, a Hub id, or `"repo::subfolder"`.
        format (`str`, *optional*): A key of `FORMATS`; found out when missing.
        target (`PreTrainedModel`, *optional*): The model the head drafts for. Needed where a checkpoint has copies of
            its tables, to compare them, and where it does not record its vocabulary.
        head_type (`str`, *optional*): `"jetspec"` (causal) or `"dflash"` (bidirectional), for checkpoints whose keys
            about causality contradict each other.
        dtype (`str` or `torch.dtype`, defaults to `"auto"`): Type of the weights; that of the checkpoint by default.
        subfolder (`str`, *optional*): Folder of the head within `path`.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.
        token (`str` or `bool`, *optional*): For the Hub.
        cache_dir (`str` or `os.PathLike`, *optional*): Where downloads go.
        fields: Any field of [`JetSpecConfig`], instead of what the checkpoint says.

    Returns:
        `JetSpecDraftHead`: In evaluation mode, on the CPU.

    Raises:
        ValueError: If the format is not clear, a key is missing, of a wrong type or in contradiction to another, if the
            head computes something that ours cannot, or if a tensor is missing, too many, of another shape, damaged or
            not finite. The message names the key or the tensor.
        OSError: If there is no `config.json` or no safetensors file: pickles are not read.

    Example:
        ```python
        >>> from jetspec_hf.hub import read_checkpoint

        >>> head = read_checkpoint("some/head", head_type="jetspec")
        ```
    """
    folder = find_folder(path, subfolder, revision=revision, token=token, cache_dir=cache_dir)
    config = read_config(folder)
    check_head_type(head_type)
    if format is None:
        format = detect_format(config)
    elif format not in FORMATS:
        raise ValueError(f"`format` must be one of {', '.join(FORMATS)}, got {format!r}.")
    if unknown := sorted(fields.keys() - JetSpecConfig.__annotations__.keys()):
        raise ValueError(f"`{unknown[0]}` must be a field of `JetSpecConfig`, got {fields[unknown[0]]!r} for it.")
    try:
        check_kinds(config)
        tensors = read_tensors(folder)
        if format == OURS:  # with its knobs
            check_causality({**config, **fields}, head_type)
            _check_tensors(tensors, JetSpecConfig.from_dict({**config, **fields}))
            head: JetSpecDraftHead = JetSpecDraftHead.from_pretrained(folder, dtype=dtype, **fields)
            return head
        given = Checkpoint({**config, **_known_to_all(fields)}, plain_names(tensors, _fused_sizes(config)))
        canonical = FOREIGN[format].read(given, Reading(head_type, target))
        return _head_of(Checkpoint({**canonical.config, **fields}, canonical.tensors), dtype)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
        raise ValueError(f"{path} as a checkpoint in the {format} format: {error}") from error


def _known_to_all(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that all formats call by the same name at the same place, so that a reader need not miss them."""
    return {name: value for name, value in fields.items() if name in ("vocab_size", "num_target_layers")}


def _fused_sizes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Rows of the parts of fused projections; zeros where the configuration does not say, which no tensor has."""
    layers = config.get("transformer_layer_config", config)

    def number(key: str) -> int:
        value = layers.get(key) if isinstance(layers, dict) else None
        return value if isinstance(value, int) else 0

    queries = number("num_attention_heads") * number("head_dim")
    keys = number("num_key_value_heads") * number("head_dim")
    return {"qkv_proj": (queries, keys, keys), "gate_up_proj": (number("intermediate_size"),) * 2}


def _head_of(checkpoint: Checkpoint, dtype: str | torch.dtype) -> JetSpecDraftHead:
    config = JetSpecConfig.from_dict(checkpoint.config)
    _check_tensors(checkpoint.tensors, config)
    types = {name: _TYPES.get(tensor.dtype, str(tensor.dtype)) for name, tensor in checkpoint.tensors.items()}
    check_types(types, "the checkpoint", warn=dtype == "auto")
    head: JetSpecDraftHead = JetSpecDraftHead.from_pretrained(
        None, config=config, state_dict=checkpoint.tensors, dtype=dtype
    )
    return head


def _check_tensors(tensors: dict[str, torch.Tensor], config: JetSpecConfig) -> None:
    """Names and shapes, before anything is made of the size that a configuration claims."""
    try:
        with torch.device("meta"):
            expected = {name: tuple(tensor.shape) for name, tensor in JetSpecDraftHead(config).state_dict().items()}
    except RuntimeError as error:
        raise ValueError(f"The sizes of the config must fit into memory, got {error}.") from error
    for names, what in ((expected.keys() - tensors.keys(), "missing"), (tensors.keys() - expected.keys(), "too many")):
        if names:
            raise ValueError(f"The tensors must be exactly those the config describes, got {what}: {sorted(names)}.")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"`{name}` must be of shape {shape} by the config, got {tuple(tensors[name].shape)}.")


def write_checkpoint(
    head: JetSpecDraftHead,
    folder: str | os.PathLike[str],
    format: str,
    *,
    target: PreTrainedModel | None = None,
    target_name_or_path: str | None = None,
) -> list[str]:
    """Writes a draft head in a format.

    Args:
        head ([`JetSpecDraftHead`]): The head.
        folder (`str` or `os.PathLike`): Where to; it must hold no checkpoint yet.
        format (`str`): A key of `FORMATS`.
        target (`PreTrainedModel`, *optional*): The model the head drafts for. Needed to write a draft vocabulary in the
            speculators format.
        target_name_or_path (`str`, *optional*): What to record as the target; what the head's config says when missing.

    Returns:
        `list[str]`: What the format, or an engine that reads it, cannot say of this head: a sentence each.

    Raises:
        ValueError: If the weights would mean something else in this format, or have NaN or infinity.
        FileExistsError: If the folder holds a checkpoint.
    """
    if format not in FORMATS:
        raise ValueError(f"`format` must be one of {', '.join(FORMATS)}, got {format!r}.")
    folder = Path(folder)
    if taken := [name for name in ("config.json", WEIGHTS, INDEX) if os.path.lexists(folder / name)]:
        raise FileExistsError(f"`folder` must hold no checkpoint yet, got {folder} with a `{taken[0]}`.")
    head.check_finite()
    config = cast(JetSpecConfig, copy.deepcopy(head.config))
    config.target_name_or_path = target_name_or_path or config.target_name_or_path
    if format == OURS:
        renamed = copy.copy(head)  # the weights are the head's own, the target's name is not
        renamed.config = config
        renamed.save_pretrained(folder)
        return []
    lost = warnings_for(config, format)
    tensors = head.state_dict()
    _check_tensors(tensors, config)  # adapters would stand among them
    token_ids = tensors.pop("draft_token_ids", None)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("branch.")}
    writing = Writing(config, kept, None if token_ids is None else token_ids.cpu(), target, config.target_name_or_path)
    checkpoint = FOREIGN[format].write(writing)
    write_files(folder, checkpoint.config, checkpoint.tensors)
    return lost
