"""The files of a head's folder or repository, looked at before anything is loaded from them.

This file travels to the Hub with a head, so it imports nothing of the library.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.utils import logging
from transformers.utils.hub import cached_file

logger = logging.get_logger(__name__)

WEIGHTS = "model.safetensors"
SHARDS = "model-*-of-*.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTERS = "adapter_config.json"
KNOBS = "generation_config.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_WEIGHT_TYPES = ("F16", "BF16", "F32", "F64")
_ID_TYPES = ("I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64")


def read_json(file: Path) -> dict[str, Any]:
    """Parses a JSON file that holds a dictionary.

    Args:
        file (`Path`): The file.

    Returns:
        `dict`: What it holds.

    Raises:
        ValueError: If it is no JSON, or no dictionary; the message names the file.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of the encoding as well
        raise ValueError(f"{file} must be JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a dictionary, got {type(found).__name__}.")
    return found


def shard_names(index: Path) -> list[str]:
    """The files that an index of shards names.

    Args:
        index (`Path`): A `model.safetensors.index.json`.

    Returns:
        `list[str]`: Names of files beside it.

    Raises:
        ValueError: If it is no index, or names a file elsewhere or of another kind.
    """
    content = read_json(index)
    shards = content.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"`weight_map` of {index} must map tensors to files, got {shards!r}.")
    if not isinstance(metadata := content.get("metadata", {}), dict):
        raise ValueError(f"`metadata` of {index} must be a dictionary or missing, got {metadata!r}.")
    for shard in shards.values():
        beside = isinstance(shard, str) and not {"/", "\\", ":", "\0"} & {*shard}
        if not beside or not shard.endswith(".safetensors"):
            raise ValueError(f"`weight_map` of {index} must name safetensors files beside it, got {shard!r}.")
    return sorted(set(shards.values()))


def check_types(types: Mapping[str, str], path: object, warn: bool = True) -> None:
    """Checks that weights are floating-point numbers and token ids integers.

    Args:
        types (`Mapping[str, str]`): Type of each of a head's tensors, by the names of safetensors.
        path (`str`): The checkpoint.
        warn (`bool`, defaults to `True`): Whether to warn of weights of several types, which are loaded in one.

    Raises:
        ValueError: If one is of another kind; the message names the tensor.
    """
    for name, kind in types.items():
        is_ids = name.endswith("draft_token_ids")
        if kind not in (_ID_TYPES if is_ids else _WEIGHT_TYPES):
            rule = "integers" if is_ids else f"of type {', '.join(_WEIGHT_TYPES)}"
            raise ValueError(f"`{name}` of {path} must be {rule}, got {kind}.")
    found = sorted({kind for name, kind in types.items() if kind in _WEIGHT_TYPES})
    if warn and len(found) > 1:
        logger.warning(
            f"The weights of {path} are of types {' and '.join(found)}: they are loaded in one, give `dtype`."
        )


def check_files(path: Any, places: dict[str, Any], variant: str | None = None, warn: bool = True) -> None:
    """Checks what `PreTrainedModel.from_pretrained` would follow without a look: adapters, knobs, shards, types.

    Args:
        path (`str` or `os.PathLike`): A folder or a Hub id.
        places (`dict`): Arguments of `transformers.utils.cached_file`.
        variant (`str`, *optional*): As of `PreTrainedModel.from_pretrained`.
        warn (`bool`, defaults to `True`): See [`check_types`].

    Raises:
        ValueError: If there are adapters, an index beside a whole file, one that names files elsewhere, a tensor of a
            wrong type, or a file that is no JSON.
    """
    if find_file(path, ADAPTERS, places) is not None:
        raise ValueError(f"{path} must have no adapters beside the weights, got an `{ADAPTERS}`.")
    if (knobs := find_file(path, KNOBS, places)) is not None:
        read_json(knobs)
    added = "" if variant is None else f".{variant}"
    name = f"model{added}.safetensors"
    index = find_file(path, f"model.safetensors.index{added}.json", places)
    whole = find_file(path, name, places)
    if whole is not None and index is not None:
        raise ValueError(f"{path} must have a `{name}` or an index of shards, got both: one of them is out of date.")
    shards = [whole] if index is None else [find_file(path, shard, places) for shard in shard_names(index)]
    types: dict[str, str] = {}
    for shard in shards:
        if shard is not None:
            with safe_open(shard, framework="pt") as opened:
                types |= {tensor: opened.get_slice(tensor).get_dtype() for tensor in opened.keys()}  # noqa: SIM118
    check_types(types, path, warn)


def find_file(path: Any, name: str, places: dict[str, Any]) -> Path | None:
    """A file of a folder or of a repository, `None` if it has none.

    Args:
        path (`str` or `os.PathLike`): A folder or a Hub id.
        name (`str`): The file's.
        places (`dict`): Arguments of `transformers.utils.cached_file`.
    """
    found = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
        **places,
    )
    return None if found is None else Path(found)


def drop_stale_weights(folder: Path) -> None:
    """Deletes what a save has left of an earlier one: transformers deletes earlier shards, and nothing else.

    Args:
        folder (`Path`): Where a head has just been saved, whole or in shards.
    """
    in_shards = any(_SHARD.fullmatch(file.name) for file in folder.iterdir())
    (folder / (WEIGHTS if in_shards else INDEX)).unlink(missing_ok=True)
