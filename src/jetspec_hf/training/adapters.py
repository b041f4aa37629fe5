"""LoRA on a draft head, to adapt it to a changed target; what is saved is an ordinary head with the adapters merged.

The adapters stand inside the head, which stays a `JetSpecDraftHead`: it drafts, trains and is evaluated as before.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ..modeling_jetspec import JetSpecDraftHead

FILE_NAME = "lora_weights.safetensors"
DEFAULT_MODULES = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ADAPTER = "default"


def add_lora(
    head: JetSpecDraftHead,
    rank: int = 16,
    alpha: int | None = None,
    target_modules: Sequence[str] = DEFAULT_MODULES,
    **config: Any,
) -> JetSpecDraftHead:
    """Puts LoRA adapters into a head, in place, and freezes the rest of it.

    A fresh adapter changes nothing. Its weights are float32, also in a head of half precision.

    Args:
        head (`JetSpecDraftHead`): A trained head.
        rank (`int`, defaults to 16): Rank of the adapters.
        alpha (`int`, *optional*): Their strength, divided by `rank`; twice the rank when missing.
        target_modules (`Sequence[str]`): Names of the linear layers that get one; the fusion and all of the draft
            layers' by default.
        config: Any other field of `peft.LoraConfig`.

    Returns:
        `JetSpecDraftHead`: The same head.

    Raises:
        ImportError: If `peft` is not installed.
        ValueError: If the head has adapters already, or `rank` is not positive.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415  (optional dependency)
    except ImportError as error:
        raise ImportError("LoRA needs `peft`: pip install jetspec_hf[train].") from error
    if has_lora(head):
        raise ValueError("`head` must have no adapters yet, got one that has: merge them with `merge_lora` first.")
    if rank < 1:
        raise ValueError(f"`rank` must be at least 1, got {rank}.")
    lora = LoraConfig(
        r=rank, lora_alpha=2 * rank if alpha is None else alpha, target_modules=list(target_modules), **config
    )
    inject_adapter_in_model(lora, head, adapter_name=_ADAPTER)
    for name, parameter in head.named_parameters():
        if _is_lora(name):
            parameter.data = parameter.data.float()
    return head


def has_lora(head: nn.Module) -> bool:
    """Whether adapters stand in a head."""
    return next(_adapted(head), None) is not None


def merge_lora(head: JetSpecDraftHead) -> JetSpecDraftHead:
    """Adds the adapters to the weights they adapt, in place: an ordinary head remains, all of it trainable again.

    Args:
        head (`JetSpecDraftHead`): A head with adapters.

    Returns:
        `JetSpecDraftHead`: The same head.
    """
    for name, layer in list(_adapted(head)):
        base = layer.get_base_layer()
        base.weight.data = _merged_weight(layer)
        parent, _, child = name.rpartition(".")
        setattr(head.get_submodule(parent), child, base)
    return head.requires_grad_(True)


def merged_state_dict(head: JetSpecDraftHead) -> dict[str, torch.Tensor]:
    """The weights that [`merge_lora`] would leave; the head itself stays as it is."""
    merged = {f"{name}.weight": _merged_weight(layer) for name, layer in _adapted(head)}
    others = {
        name.replace(".base_layer.", "."): value for name, value in head.state_dict().items() if not _is_lora(name)
    }
    return {**others, **merged}


def save_lora(head: nn.Module, folder: str | Path) -> None:
    """Writes the adapters alone, for a run to go on from."""
    weights = {name: value.contiguous() for name, value in head.state_dict().items() if _is_lora(name)}
    save_file(weights, str(Path(folder) / FILE_NAME), metadata={"format": "pt"})


def load_lora(head: nn.Module, folder: str | Path) -> None:
    """Reads what [`save_lora`] wrote into a head with the same adapters.

    Args:
        head (`JetSpecDraftHead`): The head.
        folder (`str` or `Path`): A checkpoint.

    Raises:
        ValueError: If the adapters differ.
    """
    file = Path(folder) / FILE_NAME
    if not file.is_file():
        raise ValueError(f"A run with adapters goes on from a checkpoint with {FILE_NAME}, got {folder} without one.")
    saved = load_file(str(file))
    own = {name: value for name, value in head.state_dict().items() if _is_lora(name)}
    if odd := sorted(
        name
        for name in saved.keys() | own.keys()
        if name not in saved or name not in own or saved[name].shape != own[name].shape
    ):
        raise ValueError(f"The adapters must be those of the checkpoint {folder}, got a difference at {odd[0]}.")
    head.load_state_dict(saved, strict=False)


def _adapted(head: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers with an adapter, by name."""
    for name, module in head.named_modules():
        if hasattr(module, "get_delta_weight") and hasattr(module, "lora_A"):
            yield name, module


def _is_lora(name: str) -> bool:
    return ".lora_" in name


@torch.no_grad()
def _merged_weight(layer: Any) -> torch.Tensor:
    weight: torch.Tensor = layer.get_base_layer().weight
    change: torch.Tensor = layer.get_delta_weight(_ADAPTER)
    return (weight.float() + change.float().to(weight.device)).to(weight.dtype)
