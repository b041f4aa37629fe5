"""What the commands of all parts of this package check before they load anything."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public by its documentation
from transformers import PreTrainedConfig
from transformers.utils.peft_utils import find_adapter_config_file

# Keys of a `config.json` that only draft heads have; `model_type` is that of the target in some formats.
HEAD_KEYS = ("dflash_config", "speculators_model_type")


def at_least(smallest: int) -> Callable[[str], int]:
    """The type of an option that is an integer of at least `smallest`.

    Args:
        smallest (`int`): The smallest value.
    """

    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {smallest}, got {text!r}")
        return int(text)

    return integer


def usable_device(text: str) -> torch.device:
    """The type of an option that is a device on which tensors can be made here.

    Args:
        text (`str`): Its name in torch.
    """
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise argparse.ArgumentTypeError(f"must be a device of this machine, got {text!r}: {reason}") from error
    return torch.device(text)


def existing_file(text: str) -> Path:
    """The type of an option that is a file to be read.

    Args:
        text (`str`): Its path.
    """
    if not os.path.exists(text) or os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"must be a file that is there, got {text}")
    return Path(text)


def check_writable(path: Path, name: str) -> None:
    """Checks that a file can be written or gone on with, and makes the folder that it lies in.

    Args:
        path (`Path`): The file.
        name (`str`): What it is called in the message.

    Raises:
        OSError: If it cannot; the message has the path and the reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with path.open("ab"):
                pass
        else:
            with TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise OSError(f"{name} must be a file that can be written, got {path}: {error.strerror}.") from error


def check_model(name: str, option: str, is_target: bool = False) -> None:
    """Checks that a model is where it may be, and, of a target, that it is no draft head.

    Args:
        name (`str`): Folder, Hub id, or `"repo::subfolder"`.
        option (`str`): Whose value it is.
        is_target (`bool`, defaults to `False`): Whether it must be a language model.

    Raises:
        OSError: If it can only be a folder, and there is none; of a target also if it has no configuration.
        ValueError: If a target is a draft head.
    """
    place = name.partition("::")[0]
    if not os.path.isdir(place):
        try:
            validate_repo_id(place)
        except HFValidationError:
            raise OSError(f"{option} must be a folder or a Hub id, and there is no folder {place}.") from None
    if is_target:
        try:  # of an adapter's folder the config may be elsewhere
            config: dict[str, Any] = {} if find_adapter_config_file(name) else PreTrainedConfig.get_config_dict(name)[0]
        except OSError as error:
            raise OSError(f"{option} must be a model that can be loaded, got {name}: {error}") from error
        if config.get("model_type") == "jetspec" or any(key in config for key in HEAD_KEYS):
            raise ValueError(f"{option} must be the target, a language model, got {name}, which is a draft head.")
