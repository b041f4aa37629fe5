"""Keep the target's states of a small training set on disk, so that the target is read once and not at every step.

One file holds, token after token and row after row, the tapped states and the last hidden state. It is written from its
beginning to its end, so what a killed run has written stays right, and the next run goes on from there. The file gets
its final name when it is whole.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # its types are a package of their own
from transformers.utils import logging

from .batches import TrainingCollator
from .target_reader import TargetReader

logger = logging.get_logger(__name__)

_FORMAT = 1


@dataclass(frozen=True)
class CacheLayout:
    """Where the states of each row lie.

    Args:
        key (`str`): Tells the rows, the target, the taps and the dtype from others.
        lengths (`np.ndarray`): Tokens of each row.
        width (`int`): Numbers per token: all tapped states and the last hidden state.
        dtype (`torch.dtype`): Of the states.
    """

    key: str
    lengths: np.ndarray
    width: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.width * self.dtype.itemsize

    @property
    def row_ends(self) -> np.ndarray:
        """Tokens up to the end of each row."""
        ends: np.ndarray = self.lengths.cumsum()
        return ends

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return int(self.lengths.sum()) * self.token_bytes


class CachedRows(Dataset[dict[str, Any]]):
    """Rows that come with the target's states, which are read from disk when a row is asked for.

    Args:
        rows (`datasets.Dataset` or sequence of `dict`): The rows.
        file (`Path`): The states.
        layout ([`CacheLayout`]): Where they lie.
    """

    def __init__(self, rows: Any, file: Path, layout: CacheLayout) -> None:
        self.rows = rows
        self._file = file
        self._layout = layout
        self._ends = layout.row_ends
        self._states: np.memmap[Any, np.dtype[np.uint8]] | None = None

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._states is None:
            shape = (int(self._ends[-1]), self._layout.token_bytes)
            self._states = np.memmap(self._file, dtype=np.uint8, mode="r", shape=shape)
        end = int(self._ends[index])
        states = np.array(self._states[end - int(self._layout.lengths[index]) : end])
        return {**self.rows[index], "target_states": torch.from_numpy(states).view(self._layout.dtype)}

    def __getstate__(self) -> dict[str, Any]:
        """Without the open file, which every worker of a data loader opens for itself."""
        return {**self.__dict__, "_states": None}


def cache_key(rows_fingerprint: str, target_fingerprint: str, layer_ids: Sequence[int], dtype: torch.dtype) -> str:
    """What a cache is for, in one word."""
    parts = json.dumps([_FORMAT, rows_fingerprint, target_fingerprint, list(layer_ids), str(dtype)])
    return hashlib.blake2b(parts.encode(), digest_size=10).hexdigest()


def cache_states(
    rows: Any,
    reader: TargetReader,
    directory: str | Path,
    layout: CacheLayout,
    collator: TrainingCollator,
    *,
    batch_size: int = 8,
    progress: bool = True,
) -> CachedRows:
    """Reads the target over all rows, unless a cache of this key is there already.

    Args:
        rows (`datasets.Dataset` or sequence of `dict`): The rows.
        reader ([`TargetReader`]): The target.
        directory (`str` or `Path`): Where caches are.
        layout ([`CacheLayout`]): What is to be written.
        collator ([`TrainingCollator`]): Makes batches.
        batch_size (`int`): Rows read at once.
        progress (`bool`): Whether to show how far it is.

    Returns:
        [`CachedRows`]

    Raises:
        OSError: If the disk has less room than the cache takes.
    """
    folder = Path(directory) / layout.key
    file, part = folder / "states.bin", folder / "states.bin.part"
    if file.is_file() and file.stat().st_size == layout.num_bytes:
        logger.info(f"The target's states are in {folder}.")
        return CachedRows(rows, file, layout)
    folder.mkdir(parents=True, exist_ok=True)
    kept = part.stat().st_size if part.is_file() else 0
    done = int(np.searchsorted(layout.row_ends * layout.token_bytes, kept, side="right"))
    kept = int(layout.row_ends[done - 1]) * layout.token_bytes if done else 0
    _check_room(folder, layout, kept)
    with part.open("ab") as stream:
        stream.truncate(kept)  # drops a row that was written in part
        batches = range(done, len(layout.lengths), batch_size)
        for start in tqdm(batches, desc="Reading the target", disable=not progress):
            batch = collator([rows[index] for index in range(start, min(start + batch_size, len(layout.lengths)))])
            read = reader.read(batch["input_ids"], batch["document_ids"])
            states = torch.cat([read.features, read.last_hidden.to(read.features.device)], dim=-1).to(layout.dtype)
            for row, length in zip(states, layout.lengths[start : start + batch_size].tolist(), strict=True):
                tokens = row[:length] if collator.rows.padding_side == "right" else row[-length:]
                stream.write(tokens.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)
    return CachedRows(rows, file, layout)


def _check_room(folder: Path, layout: CacheLayout, kept: int) -> None:
    room = shutil.disk_usage(folder).free
    logger.warning(
        f"The target's states of {int(layout.lengths.sum()):,} tokens take {_size(layout.num_bytes)} in {folder}, of "
        f"which {_size(kept)} are there; the disk has room for {_size(room)}."
    )
    if layout.num_bytes - kept > room:
        raise OSError(
            f"`feature_cache_dir` must have room for {_size(layout.num_bytes - kept)} more, got {_size(room)} at "
            f"{folder}: read the target at every step (`feature_cache_dir=None`), or use fewer rows or taps."
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.2f} MB"
