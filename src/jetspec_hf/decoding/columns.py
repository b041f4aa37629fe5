"""Where the slots of every row stand in the layers of a cache, while rows get different numbers of tokens.

Counts are kept on the host, so that nothing here waits for the device. Knows nothing of transformers' cache classes.
"""

from collections.abc import Callable, Sequence
from functools import cache as remember
from typing import Protocol

import torch

_ROOM = 64  # columns that the mask gets beyond what it holds, or a quarter of that
_LEAST_SLACK = 16  # columns kept beyond the window before they are dropped, or a quarter of the window
OnDevice = Callable[[torch.device], torch.Tensor]  # the same integers on any device


class ColumnLayer(Protocol):
    """A layer whose columns are moved."""

    def move(self, sources: OnDevice, targets: OnDevice | None, count: int) -> None:
        """Copies `count` columns of each row to others, by default to those right behind the prefix."""

    def keep(self, sources: OnDevice) -> None:
        """Keeps these columns of each row alone."""

    def show(self, length: int) -> None:
        """Makes the layer hold the committed columns, and count `length` slots."""

    def close(self, size: int, sources: torch.Tensor | None, length: int) -> None:
        """Leaves the last `size` columns, or these of each row, in tensors of the layer's own."""


class Columns:
    """Where each row's slots stand in all layers of one kind and window.

    Column `c` of a row holds its slot `first_slots[row] + c`, from `start` on, up to `counts[row]` columns; the tree is
    appended behind the longest row. Without a window slots and columns are the same. With one, columns before `start`
    are in no row's window any more; they are dropped when there are enough of them, each row's own.

    Args:
        prefix_mask (`torch.BoolTensor` of shape `(batch, slots)`): Which slots hold a token, rather than padding.
        held (`int`): The columns that the prefill left: the last slots.
        window (`int`, *optional*): The tokens that a node of these layers sees, itself included.
        capacity (`int`, *optional*): The columns of layers that do not grow; attention gets them all.
    """

    def __init__(self, prefix_mask: torch.Tensor, held: int, window: int | None, capacity: int | None) -> None:
        batch, slots = prefix_mask.shape
        self.layers: list[ColumnLayer] = []
        self.window = window
        self.capacity = capacity
        self.first_slots = [slots - held] * batch
        self.counts = [held] * batch
        self.start = 0
        self.end = held
        self._mask = prefix_mask[:, slots - held :]

    @property
    def even(self) -> bool:
        """Whether all rows have the same number of columns."""
        return min(self.counts) == self.end

    @property
    def prefix_mask(self) -> torch.Tensor:
        """Which columns before the tree hold a token of their row, of shape `(batch, columns)`."""
        return self._mask[:, self.start : self.end]

    def kv_length(self, num_nodes: int) -> int:
        """The keys that attention gets in a forward over `num_nodes` nodes."""
        return self.end - self.start + num_nodes if self.capacity is None else self.capacity

    def roots(self) -> torch.Tensor | None:
        """Each row's number of columns that attention gets, of shape `(batch,)`; `None` if all rows have as many."""
        return None if self.even else self.upload([count - self.start for count in self.counts])

    def shown_slots(self) -> torch.Tensor:
        """Each row's slot in the first column that attention gets, of shape `(batch,)`."""
        return self.upload([slot + self.start for slot in self.first_slots])

    def upload(self, values: Sequence[int]) -> torch.Tensor:
        """Integers of the host on the mask's device, without waiting for it."""
        return torch.tensor(values, dtype=torch.long).to(self._mask.device, non_blocking=True)

    def commit(self, paths: Sequence[Sequence[int]], padded: torch.Tensor, visible: torch.Tensor) -> None:
        """See [`DecodingCache.commit`]."""
        kept = padded.shape[1]
        if self._mask.shape[1] < self.end + kept:
            room = max(_ROOM, self.end // 4) + kept
            self._mask = torch.cat([self._mask, self._mask.new_zeros(self._mask.shape[0], room)], dim=1)
        if self.even:
            self._mask[:, self.end : self.end + kept] = visible
            if any(list(path) != list(range(len(path))) for path in paths):
                self._move(padded, None)
        else:
            targets = self._following(self.counts, kept)
            self._mask.scatter_(1, targets, visible)
            self._move(padded, targets)
        self.counts = [count + len(path) for count, path in zip(self.counts, paths, strict=True)]
        self.end = max(self.counts)
        if self.window is not None:
            self._drop_columns(self.window - 1)

    def close(self, length: int) -> None:
        """See [`DecodingCache.close`]."""
        size = length if self.window is None else min(length, self.window - 1)
        sources = None if self.even else self._following([count - size for count in self.counts], size).clamp_(min=0)
        for layer in self.layers:
            layer.close(size, sources, length)

    def _following(self, firsts: Sequence[int], count: int) -> torch.Tensor:
        """`count` columns from each row's first, of shape `(batch, count)`."""
        return self.upload(firsts)[:, None] + torch.arange(count, device=self._mask.device)

    def _move(self, nodes: torch.Tensor, targets: torch.Tensor | None) -> None:
        """Copies the accepted nodes to their columns, in rows of equal length those right behind the prefix."""
        sources = remember((nodes + self.end).to)
        places = None if targets is None else remember(targets.to)
        for layer in self.layers:
            layer.move(sources, places, nodes.shape[1])

    def _drop_columns(self, needed: int) -> None:
        """Drops what is in no row's window, many columns at once, so that a slot is moved about four times in all."""
        self.start = max(min(self.counts) - needed, 0)
        if self.end - needed < max(_LEAST_SLACK, needed // 4):
            return
        drops = [max(count - needed, 0) for count in self.counts]
        self.counts = [count - drop for count, drop in zip(self.counts, drops, strict=True)]
        self.first_slots = [first + drop for first, drop in zip(self.first_slots, drops, strict=True)]
        sources = self._following(drops, max(self.counts)).clamp_(max=self.end - 1)
        self._mask = self._mask.gather(1, sources)
        kept = remember(sources.to)
        for layer in self.layers:
            layer.keep(kept)
        self.start, self.end = 0, max(self.counts)
