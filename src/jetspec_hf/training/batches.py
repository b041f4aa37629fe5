"""Batches for training: rows, the target's states where they are kept, and the anchors a row gets in an epoch.

The anchors of a row follow from its content, the seed and the epoch alone. So they are the same in any batch, on any
process and after any interruption, and runs that differ only in how they split a global batch are the same run.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .blocks import Blocks, choose_anchors, make_blocks
from .rows import COLUMNS, RowCollator

EVALUATION_EPOCH = -1  # the anchors of held-out rows never change


def cut_row(row: Mapping[str, Any], max_length: int | None) -> dict[str, np.ndarray]:
    """The columns of a row that training reads, up to a length, as arrays."""
    return {
        name: np.asarray(row[name][:max_length], dtype=kind)
        for name, kind in COLUMNS.items()
        if row.get(name) is not None
    }


def row_digest(row: Mapping[str, np.ndarray]) -> bytes:
    """A digest of what [`cut_row`] returned."""
    digest = hashlib.blake2b(digest_size=16)
    for name, values in row.items():
        digest.update(f"{name}:{len(values)}:".encode())
        digest.update(np.ascontiguousarray(values, dtype="<i8").tobytes())
    return digest.digest()


@dataclass
class TrainingCollator:
    """Makes a batch of rows and of what training needs beside them.

    Args:
        rows ([`RowCollator`]): Pads the rows.
        max_length (`int`, *optional*): Where rows are cut.
    """

    rows: RowCollator
    max_length: int | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Makes a batch.

        Args:
            rows (`Sequence[Mapping]`): Rows, with `target_states` where these are kept.

        Returns:
            `dict[str, torch.Tensor]`: What [`RowCollator`] returns, `row_keys` (`torch.LongTensor` of shape
            `(batch,)`), and `target_states` (`torch.Tensor` of shape `(batch, length, width)`) if the rows have them.
        """
        cut = [cut_row(row, self.max_length) for row in rows]
        batch = self.rows(cut)
        keys = [int.from_bytes(row_digest(row)[:8], "little", signed=True) for row in cut]
        batch["row_keys"] = torch.tensor(keys)
        if "target_states" in rows[0]:
            batch["target_states"] = self._pad([row["target_states"] for row in rows], batch["input_ids"].shape[1])
        return batch

    def _pad(self, states: Sequence[torch.Tensor], length: int) -> torch.Tensor:
        padded = states[0].new_zeros(len(states), length, states[0].shape[1])
        for into, values in zip(padded, states, strict=True):
            start = 0 if self.rows.padding_side == "right" else length - len(values)
            into[start : start + len(values)] = values
        return padded


def draw_blocks(batch: Mapping[str, torch.Tensor], *, count: int, block_size: int, seed: int, epoch: int) -> Blocks:
    """The blocks of a batch in an epoch.

    Args:
        batch (`Mapping[str, torch.Tensor]`): What [`TrainingCollator`] returned.
        count (`int`): Blocks per row at most.
        block_size (`int`): Positions of a block, the anchor included.
        seed (`int`): The seed of the run.
        epoch (`int`): Counted from 0; [`EVALUATION_EPOCH`] for held-out rows.

    Returns:
        [`Blocks`]
    """
    input_ids, loss_mask, document_ids = batch["input_ids"], batch["loss_mask"], batch["document_ids"]
    length = input_ids.shape[1]
    draws = torch.stack([_draw(f"{seed}:{epoch}:{key}", length) for key in batch["row_keys"].tolist()])
    slots = torch.arange(length, device=input_ids.device)
    padding = (document_ids >= 0).long().argmax(dim=1)  # at the left
    priorities = draws.to(input_ids.device).gather(1, (slots - padding[:, None]).clamp(min=0))
    anchors, used = choose_anchors(priorities, loss_mask, document_ids, count)
    return make_blocks(input_ids, loss_mask, document_ids, anchors, used, block_size)


def _draw(name: str, length: int) -> torch.Tensor:
    """Numbers from 0 to 1 that follow from a name; more of them begin as fewer do."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
    return torch.rand(length, generator=torch.Generator().manual_seed(seed))
