"""The machine under a measurement: what it is, when it has finished, and how much memory was needed."""

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ..decoding.output import AcceptanceStats

PROCESSOR_FLAGS = ("avx2", "avx512_bf16", "amx_bf16")
_CPUINFO = Path("/proc/cpuinfo")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_HIGH_WATER_MARK = "5"


def describe_machine() -> str:
    """One line: processor, operating system, versions."""
    return (
        f"{_processor_name()}, {platform.system()} {platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, versions, cores, which of the instructions that make half precision fast there are, and the device.

    Args:
        device (`torch.device`): Where the models run.
    """
    text = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "description": describe_machine(),
        "device": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "flags": processor_flags(text),
    }


def machine_lines(found: dict[str, Any]) -> str:
    """The machine for people to read.

    Args:
        found (`dict`): As `machine` returns it.
    """
    flags = ", ".join(flag if there else f"no {flag}" for flag, there in found["flags"].items())
    place = f"device: {found['device']}; cores: {found['cores']}, torch threads: {found['threads']}; {flags}"
    return f"{found['description']}\n{place}"


def processor_flags(cpuinfo: str) -> dict[str, bool]:
    """Which of `PROCESSOR_FLAGS` a processor has.

    Args:
        cpuinfo (`str`): Text of Linux's `/proc/cpuinfo`; nothing counts as there without it.
    """
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    found = {flag for name, _, flags in lines if name.strip() == "flags" for flag in flags.split()}
    return {flag: flag in found for flag in PROCESSOR_FLAGS}


def _processor_name() -> str:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown processor"


def wait_for(device: torch.device) -> None:
    """Returns once the device has done what was asked of it; the CPU always has.

    Args:
        device (`torch.device`): Where the models run.
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def waiting_phases(device: torch.device) -> Iterator[None]:
    """While inside, every phase of a step begins and ends with the device idle, so that it pays for its own work alone.

    Waiting costs an accelerator time, so runs inside tell shares, not speeds. On the CPU nothing changes.

    Args:
        device (`torch.device`): Where the models run.
    """
    if device.type == "cpu":
        yield
        return
    original: Callable[..., Any] = AcceptanceStats.timed

    @contextmanager
    def timed(stats: AcceptanceStats, phase: str) -> Iterator[None]:
        wait_for(device)
        with original(stats, phase):
            yield
            wait_for(device)

    setattr(AcceptanceStats, "timed", timed)  # noqa: B010  # mypy takes no assignment to a method
    try:
        yield
    finally:
        setattr(AcceptanceStats, "timed", original)  # noqa: B010


class PeakMemory:
    """Measures how far memory rises, while inside, above what is in use at the beginning.

    On a CUDA device that is `torch.cuda.max_memory_allocated`. On the CPU it is the high-water mark of the resident
    set, which Linux keeps and lets a process reset; memory that was freed before is given back to the system first, so
    that it is not used again unseen.

    Args:
        device (`torch.device`): Where the models run.

    Attributes:
        bytes (`int`, *optional*): The rise, once outside; `None` where it cannot be measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None
        self.bytes: int | None = None

    def __enter__(self) -> "PeakMemory":
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        elif self._device.type == "cpu":
            self._before = _reset_high_water_mark()
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        cuda = self._device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self._device) if cuda else _resident("VmHWM")
        self.bytes = max(peak - self._before, 0)

    @staticmethod
    def source(device: torch.device) -> str:
        """What is measured, in words.

        Args:
            device (`torch.device`): Where the models run.
        """
        if device.type == "cuda":
            return "torch.cuda.max_memory_allocated during a generation, less what was allocated before it"
        return "high-water mark of the resident set (Linux's VmHWM) during a generation, less the resident set before"


def _reset_high_water_mark() -> int | None:
    """Resident bytes now; `None` where the system keeps no high-water mark that can be reset."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:  # glibc; others give memory back by themselves
        trim(0)
    try:
        _CLEAR_REFS.write_text(_RESET_HIGH_WATER_MARK)
    except OSError:
        return None
    return _resident("VmRSS")


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def bytes_of(model: nn.Module) -> int:
    """Memory of a model's parameters and buffers.

    Args:
        model (`nn.Module`): The model.
    """
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())
