"""The command that serves a draft head with vLLM or SGLang."""

import json
import os
import shlex
from typing import Any

from .checkpoints import detect_format
from .files import find_folder, read_config

# Which formats an engine reads.
ENGINES = {"vllm": ("published", "speculators"), "sglang": ("published",)}


def serve_command(
    path: str | os.PathLike[str], engine: str = "vllm", target: str | None = None, subfolder: str = "", **hub: Any
) -> str:
    """The command line that serves a target with a head.

    Args:
        path (`str` or `os.PathLike`): The head: a folder, or a Hub id.
        engine (`str`, defaults to `"vllm"`): `"vllm"` or `"sglang"`.
        target (`str`, *optional*): The target; what the checkpoint records when missing.
        subfolder (`str`, *optional*): Folder of the head within `path`.
        hub: Arguments of `huggingface_hub.snapshot_download`, as `revision`.

    Returns:
        `str`: One line for a shell.

    Raises:
        ValueError: If the engine does not read the checkpoint's format, or the target is not known.
    """
    if engine not in ENGINES:
        raise ValueError(f"`engine` must be one of {', '.join(ENGINES)}, got {engine!r}.")
    config = read_config(find_folder(path, subfolder, **hub))
    format = detect_format(config)
    if format not in ENGINES[engine]:
        raise ValueError(
            f"{engine} reads heads in the format {' or '.join(ENGINES[engine])}, got {path} in the {format} one: write "
            "it with `jetspec_hf.hub.write_checkpoint` first."
        )
    head, block_size = os.fspath(path), _block_size(config)
    if format == "speculators" and target is None:
        return shlex.join(["vllm", "serve", head])  # the checkpoint records its target and the number of tokens
    target = target or config.get("target_name_or_path")
    if not isinstance(target, str):
        raise ValueError(f"`target` must be given for {path}, got {target!r}: it records none.")
    return command_line(engine, target, head, block_size)


def command_line(engine: str, target: str, head: str, block_size: int) -> str:
    """The command for a head in the published format.

    Args:
        engine (`str`): `"vllm"` or `"sglang"`.
        target (`str`): The target.
        head (`str`): The head's folder or Hub id.
        block_size (`int`): Its block size.

    Returns:
        `str`: One line for a shell.
    """
    if engine == "vllm":
        speculation = {"method": "dflash", "model": head, "num_speculative_tokens": block_size - 1}
        return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(speculation)])
    arguments = {
        "--model-path": target,
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": head,
        "--speculative-num-draft-tokens": str(block_size),
    }
    return shlex.join(["python", "-m", "sglang.launch_server", *[word for pair in arguments.items() for word in pair]])


def _block_size(config: dict[str, Any]) -> int:
    dflash = config.get("dflash_config")
    value = config.get("block_size", dflash.get("block_size") if isinstance(dflash, dict) else None)
    if not isinstance(value, int):
        raise ValueError(f"`block_size` must be an integer, got {value!r}.")
    return value
