"""The files of a checkpoint, read without running anything in them: JSON and safetensors, and nothing else."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..modeling_jetspec import ONLY_SAFETENSORS
from ..weight_files import ADAPTERS, INDEX, WEIGHTS, read_json, shard_names

_READ = ("*.json", "*.safetensors")
_PREFIXES = ("_orig_mod.", "module.", "model.", "draft_model.")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_NEMO_FOLDER = Path("model") / "consolidated"
_MASK_EMBEDDING = "mask_embedding.pt"


def find_folder(path: str | os.PathLike[str], subfolder: str = "", **hub: Any) -> Path:
    """The folder of a checkpoint: a local one, or the JSON and safetensors files of a repository in the cache.

    Args:
        path (`str` or `os.PathLike`): A folder, a Hub id, or `"repo::subfolder"`. A step of a NeMo run leads to its
            consolidated weights.
        subfolder (`str`, *optional*): Folder within it.
        hub: Arguments of `huggingface_hub.snapshot_download`.

    Returns:
        `Path`: A folder with a `config.json`.

    Raises:
        OSError: If there is none.
    """
    if isinstance(path, str) and "::" in path:
        path, subfolder = path.split("::", 1)
    if os.path.isdir(path):
        root = Path(path)
    elif isinstance(path, str):
        patterns = [f"{subfolder}/{pattern}" if subfolder else pattern for pattern in _READ]
        root = Path(snapshot_download(path, allow_patterns=patterns, **hub))
    else:
        raise OSError(f"{path} is no folder.")
    for folder in (root / subfolder, root / subfolder / _NEMO_FOLDER):
        if (folder / "config.json").is_file():
            return folder
    raise OSError(f"{root / subfolder} must have a `config.json`, got none.")


def read_config(folder: Path) -> dict[str, Any]:
    """Parses the `config.json` of a checkpoint.

    Args:
        folder (`Path`): The checkpoint.

    Returns:
        `dict`: What it holds.

    Raises:
        ValueError: If it is no JSON, or no dictionary.
    """
    return read_json(folder / "config.json")


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Reads every tensor of a checkpoint, whole or in shards.

    Args:
        folder (`Path`): The checkpoint.

    Returns:
        `dict[str, torch.Tensor]`: By name.

    Raises:
        OSError: If there is no safetensors file, or a shard is missing.
        ValueError: If a file is damaged (the message names the first tensor that is cut off), if there are adapters, or
            both a whole file and an index.
    """
    if (folder / _MASK_EMBEDDING).exists():
        raise ValueError(
            f"{folder} must have no `{_MASK_EMBEDDING}`, got one: such a head does not embed masks as its target does."
        )
    if (folder / ADAPTERS).exists():
        raise ValueError(f"{folder} must have no adapters beside the weights, got an `{ADAPTERS}`.")
    tensors: dict[str, torch.Tensor] = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no dictionary
        except SafetensorError as error:
            cut = _first_cut_tensor(file)
            where = f"`{cut}` is cut off" if cut else str(error)
            raise ValueError(f"{file} must be a whole safetensors file, got a damaged one: {where}.") from error
        if twice := sorted(found.keys() & tensors.keys()):
            raise ValueError(f"A tensor must be in one shard only, got `{twice[0]}` in {file} and in another.")
        tensors |= found
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file() and index.is_file():
        raise ValueError(
            f"{folder} must have a `{WEIGHTS}` or an index of shards, got both: one of them is out of date."
        )
    if single.is_file():
        return [single]
    if not index.is_file():
        raise OSError(f"{folder} must have a `model.safetensors` or its index, got neither. {ONLY_SAFETENSORS}")
    shards = shard_names(index)
    for shard in shards:
        if not (folder / shard).is_file():
            raise OSError(f"{folder} must have the shard {shard}, got no such file.")
    return [folder / shard for shard in shards]


def _first_cut_tensor(file: Path) -> str | None:
    """The first tensor that ends beyond the end of its file: eight bytes of length, a JSON header, then the data."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        available = file.stat().st_size - 8 - size
        try:
            header = json.loads(opened.read(size)) if available >= 0 else {}
            ends = {name: about["data_offsets"][1] for name, about in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return None
    cut = [name for name, end in ends.items() if isinstance(end, int) and end > available]
    return min(cut, key=ends.__getitem__, default=None)


def plain_names(tensors: dict[str, torch.Tensor], sizes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The tensors under the names that all formats share.

    Args:
        tensors (`dict[str, torch.Tensor]`): As read: wrappers may have left prefixes, engines fused projections, and
            old releases rotary tables.
        sizes (`dict[str, tuple[int, ...]]`): Rows of the parts of each kind of fused projection.

    Returns:
        `dict[str, torch.Tensor]`: Without prefixes, fused projections and rotary tables.

    Raises:
        ValueError: If two tensors get one name, or a fused projection has another number of rows.
    """
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        short = name
        while prefix := next((prefix for prefix in _PREFIXES if short.startswith(prefix)), None):
            short = short.removeprefix(prefix)
        if short.endswith("rotary_emb.inv_freq"):
            continue
        fused = next((part for part in short.split(".") if part in _FUSED), None)
        parts = {short: tensor}
        if fused is not None:
            if tensor.dim() == 0 or tensor.shape[0] != sum(sizes[fused]):
                raise ValueError(f"`{name}` must have {sum(sizes[fused])} rows, got shape {tuple(tensor.shape)}.")
            names = [short.replace(fused, part) for part in _FUSED[fused]]
            parts = dict(zip(names, tensor.split(sizes[fused]), strict=True))
        if twice := sorted(parts.keys() & plain.keys()):
            raise ValueError(f"`{twice[0]}` must be there once, got it again as `{name}`.")
        plain |= parts
    return plain


def write_files(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Writes a checkpoint of one safetensors file.

    Args:
        folder (`Path`): Made if it is not there.
        config (`dict`): The configuration.
        tensors (`dict[str, torch.Tensor]`): The weights by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
