"""Keep accepted tree nodes on every kind of cache layer; the only file that touches the inside of a `Cache`.

The tree's nodes stand behind the prefix, one column each. A commit moves the accepted nodes to the end of their row and
drops the rest; nothing else moves, however long the prefix is and however many nodes each row accepts. When decoding
ends the cache is laid out as plain decoding leaves it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from packaging import version
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache, __version__
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .columns import Columns, OnDevice

_DYNAMIC_LAYERS: tuple[type[CacheLayerMixin], ...] = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)
_STATIC_LAYERS: tuple[type[CacheLayerMixin], ...] = (StaticLayer, StaticSlidingWindowLayer)
_PLACEHOLDER_LAYERS: tuple[type, ...] = ()


def _since(release: str) -> bool:
    return version.parse(__version__) >= version.parse(release)


# What `generate`, the models' forwards and their outputs call the cache.
CACHE_NAME = "cache" if _since("5.24") else "past_key_values"

if _since("5.23"):  # before, layers that share keys and values had no entry at all
    from transformers.cache_utils import DummyLayer

    _PLACEHOLDER_LAYERS = (DummyLayer,)

# Per tensor of a layer: the dimension of its slots and that of its rows.
_SLOT_TENSORS = {"keys": (2, 0), "values": (2, 0), "indexer_keys": (1, 0), "indexer_position_ids": (2, 1)}
_LEAST_ROOM = 64  # columns that a buffer gets beyond what it holds, or a quarter of that


def check_cache(cache: Cache | None) -> None:
    """Checks that rejected tokens can be taken out of this cache again.

    Args:
        cache (`Cache`, *optional*): What `generate` prepared or the user passed.

    Raises:
        ValueError: If there is no cache, or one of its layers is of a kind that cannot keep an accepted path.
    """
    if cache is None:
        raise ValueError(
            "`use_cache` must be `True` with a JetSpec head, got no cache: a tree is verified on top of the cached "
            "prefix."
        )
    if isinstance(cache, EncoderDecoderCache) or not isinstance(cache, DynamicCache | StaticCache | Cache):
        raise ValueError(
            f"`cache` must be a `DynamicCache` or a `StaticCache` with a JetSpec head, got {type(cache).__name__}."
        )
    for layer in cache.layers:
        if type(layer) not in (*_DYNAMIC_LAYERS, *_STATIC_LAYERS, *_PLACEHOLDER_LAYERS):
            raise ValueError(
                f"`cache` must have layers from which tokens can be taken back, got {type(layer).__name__} in "
                f"{type(cache).__name__}: use the default cache, or `cache_implementation='static'`."
            )
        if isinstance(layer, StaticSlidingWindowLayer) and _may_overwrite(layer, cache):
            raise ValueError(
                f"`max_cache_len` of a static cache must not exceed the sliding window of {layer.max_cache_len} with a "
                "JetSpec head, got a longer one: a full static window overwrites what a rejected token displaced."
            )


def cached_length(cache: Cache) -> int:
    """Number of slots the cache holds or has evicted, the same for every row."""
    return int(cache.get_seq_length())  # a static layer returns its live counter tensor


def is_static(cache: Cache) -> bool:
    """Whether the cache has a fixed number of slots."""
    return any(isinstance(layer, StaticLayer) for layer in cache.layers)


def make_room(cache: Cache, slots: int) -> None:
    """Gives a static cache that `generate` made, and that nothing is in yet, slots for a tree behind the text."""
    layers: list[Any] = cache.layers
    if getattr(cache, "_is_user_defined", False) or any(
        type(layer) is not StaticLayer or layer.is_initialized for layer in layers
    ):
        return
    for layer in layers:
        layer.max_cache_len += slots


class DecodingCache:
    """The target's cache while trees are verified on it.

    A row's slots are its tokens in order, left padding included. Rows may have different numbers of them; all counts
    are kept on the host, so that nothing here waits for the device.

    Args:
        cache (`Cache`): The cache after the prefill.
        prefix_mask (`torch.BoolTensor` of shape `(batch, slots)`): Which slots hold a token, rather than padding.
    """

    def __init__(self, cache: Cache, prefix_mask: torch.Tensor) -> None:
        self.lengths = [prefix_mask.shape[1]] * prefix_mask.shape[0]
        by_window: dict[tuple[type, int | None], Columns] = {}
        self._columns: dict[int, Columns] = {}
        layers: list[Any] = cache.layers  # `check_cache` lets only kinds pass that have `keys`
        for index, layer in enumerate(layers):
            if layer.keys is None or layer.keys.numel() == 0:
                continue
            window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
            columns = by_window.get((type(layer), window))
            if columns is None:
                capacity = layer.max_cache_len if isinstance(layer, StaticLayer) else None
                held = layer.keys.shape[2] if capacity is None else self.length
                columns = by_window[type(layer), window] = Columns(prefix_mask, held, window, capacity)
            columns.layers.append(_DecodingLayer(layer, columns, bool(getattr(cache, "offloading", False))))
            self._columns[index] = columns

    @property
    def length(self) -> int:
        """Slots of the longest row."""
        return max(self.lengths)

    @property
    def free_slots(self) -> int | None:
        """Number of slots a static cache still has, `None` if it can grow."""
        sizes = [columns.capacity for columns in self._distinct_columns() if columns.capacity is not None]
        return min(sizes) - self.length if sizes else None

    def columns(self, layer_idx: int) -> Columns:
        """The columns of this layer, and of all others with its window."""
        return self._columns[layer_idx]

    def commit(self, paths: Sequence[Sequence[int]], padded: torch.Tensor, visible: torch.Tensor) -> None:
        """Keeps each row's accepted nodes, drops the others.

        Args:
            paths (`list[list[int]]`): Per row, the accepted nodes in path order, the root first; empty for a row that
                stands still.
            padded (`torch.LongTensor` of shape `(batch, longest)`): The same, with anything behind shorter paths.
            visible (`torch.BoolTensor` of shape `(batch, longest)`): Which of them are nodes of the row's path.
        """
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]
        for columns in self._distinct_columns():
            columns.commit(paths, padded, visible)
        self.rollback()

    def rollback(self) -> None:
        """Forgets what was fed since the last commit, also after a forward that did not reach every layer."""
        for columns in self._distinct_columns():
            for layer in columns.layers:
                layer.show(self.length)

    def close(self) -> None:
        """Gives every layer the form in which plain decoding leaves it, and its own behaviour back.

        Rows of different lengths are aligned to the right: what the shorter ones lack is left padding.
        """
        for columns in self._distinct_columns():
            columns.close(self.length)

    def _distinct_columns(self) -> list[Columns]:
        return list(dict.fromkeys(self._columns.values()))


class _DecodingLayer:
    """A layer of the cache while decoding.

    A dynamic layer concatenates its whole context at every forward. Meanwhile it is lent buffers with room behind what
    they hold, and its tensors are views of them. Where tensors move between devices, as those of an offloaded cache do,
    they stay its own.

    Args:
        layer (`CacheLayerMixin`): The layer, after the prefill.
        columns (`Columns`): Where its slots stand.
        offloaded (`bool`): Whether its tensors move between devices.
    """

    def __init__(self, layer: Any, columns: Columns, offloaded: bool) -> None:
        self._layer = layer
        self._columns = columns
        self._offloaded = offloaded
        self._static = isinstance(layer, StaticLayer)
        self._sliding = isinstance(layer, DynamicSlidingWindowLayer)
        self._names = [name for name in _SLOT_TENSORS if _tensor(layer, name) is not None]
        self._buffers: dict[str, torch.Tensor] = {}
        self._first = 0  # the column with which the layer's own tensors begin
        if not self._static:
            layer.update = self._update
            if "indexer_keys" in self._names:
                layer.update_indexer = self._update_indexer

    def _update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a forward calls instead of the layer's own `update`; a sliding layer gives all that any row sees."""
        if self._sliding:
            self._layer.cumulative_length += key_states.shape[2]
        return self._append("keys", key_states), self._append("values", value_states)

    def _update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        return self._append("indexer_keys", indexer_key_states)

    def _append(self, name: str, states: torch.Tensor) -> torch.Tensor:
        slot_dim, _ = _SLOT_TENSORS[name]
        held: torch.Tensor = getattr(self._layer, name)
        if self._offloaded:
            whole = torch.cat([held, states], dim=slot_dim)
        else:
            start, end, new = self._columns.start, self._columns.end, states.shape[slot_dim]
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape[slot_dim] < end + new:
                buffer = self._buffers[name] = _with_room(held, slot_dim, self._first, end + new)
            buffer.narrow(slot_dim, end, new).copy_(states)
            whole = buffer.narrow(slot_dim, start, end + new - start)
        setattr(self._layer, name, whole)
        return whole

    def move(self, sources: OnDevice, targets: OnDevice | None, count: int) -> None:
        """Copies `count` columns of each row to others."""
        for _, tensor, first, slot_dim, row_dim in self._tensors():
            taken = _take(tensor, sources(tensor.device) - first, slot_dim, row_dim)
            if targets is None:
                tensor.narrow(slot_dim, self._columns.end - first, count).copy_(taken)
            else:
                index = _index(tensor, targets(tensor.device) - first, slot_dim, row_dim)
                tensor.scatter_(slot_dim, index, taken)

    def keep(self, sources: OnDevice) -> None:
        """Keeps these columns of each row alone."""
        for name, tensor, first, slot_dim, row_dim in self._tensors():
            taken = _take(tensor, sources(tensor.device) - first, slot_dim, row_dim)
            if name in self._buffers:
                self._buffers[name] = _with_room(taken, slot_dim, 0, taken.shape[slot_dim])
            else:
                setattr(self._layer, name, taken)
        self._first = 0

    def show(self, length: int) -> None:
        """Makes the layer hold the committed columns, and count `length` slots."""
        start, end = self._columns.start, self._columns.end
        if not self._static:
            for name, tensor, first, slot_dim, _ in self._tensors():
                setattr(self._layer, name, tensor.narrow(slot_dim, start - first, end - start))
            self._first = start
        self._count(length)

    def close(self, size: int, sources: torch.Tensor | None, length: int) -> None:
        """Leaves the last `size` columns, or these of each row, in tensors of the layer's own."""
        for name, tensor, first, slot_dim, row_dim in self._tensors():
            if sources is not None:
                kept = _take(tensor, (sources.to(tensor.device) - first).clamp_(min=0), slot_dim, row_dim)
            elif self._static:
                continue
            else:
                kept = tensor.narrow(slot_dim, self._columns.end - size - first, size)
                kept = kept.clone() if name in self._buffers else kept
            if self._static:
                tensor.narrow(slot_dim, 0, size).copy_(kept)
            else:
                setattr(self._layer, name, kept)
        self._buffers.clear()
        self._count(length)
        for name in ("update", "update_indexer"):
            vars(self._layer).pop(name, None)
        if self._sliding:
            self._layer.record_past = False

    def _tensors(self) -> list[tuple[str, torch.Tensor, int, int, int]]:
        """Each tensor with its name, the column with which it begins, and the dimensions of its slots and rows."""
        return [
            (name, self._buffers[name], 0, *_SLOT_TENSORS[name])
            if name in self._buffers
            else (name, getattr(self._layer, name), self._first, *_SLOT_TENSORS[name])
            for name in self._names
        ]

    def _count(self, length: int) -> None:
        if self._static:
            self._layer.cumulative_length.fill_(length)  # its address is fixed
            if isinstance(self._layer, StaticSlidingWindowLayer):
                self._layer.cumulative_length_int = length
        elif self._sliding:
            self._layer.cumulative_length = length


def _may_overwrite(layer: StaticSlidingWindowLayer, cache: Cache) -> bool:
    """Whether this static window can get full; before transformers 5.24 only a full layer beside it tells."""
    if _since("5.24"):
        return not layer.is_croppable
    return layer.max_cache_len not in [other.max_cache_len for other in cache.layers if type(other) is StaticLayer]


def _tensor(layer: Any, name: str) -> torch.Tensor | None:
    """A slot tensor of this layer, `None` if its kind has no such tensor or it is not filled."""
    if name.startswith("indexer") and not isinstance(layer, DynamicIndexedLayer):
        return None
    tensor: torch.Tensor | None = getattr(layer, name, None)  # `indexer_position_ids` exists from transformers 5.24
    return tensor


def _index(tensor: torch.Tensor, slots: torch.Tensor, slot_dim: int, row_dim: int) -> torch.Tensor:
    """`slots` of shape `(rows, count)` as an index of all other dimensions too."""
    shape = [1] * tensor.dim()
    shape[row_dim], shape[slot_dim] = slots.shape
    target = list(tensor.shape)
    target[slot_dim] = slots.shape[1]
    return slots.view(shape).expand(target)


def _take(tensor: torch.Tensor, slots: torch.Tensor, slot_dim: int, row_dim: int) -> torch.Tensor:
    """Gathers `slots` of shape `(rows, count)` along the slot dimension."""
    return tensor.gather(slot_dim, _index(tensor, slots, slot_dim, row_dim))


def _with_room(held: torch.Tensor, slot_dim: int, first: int, needed: int) -> torch.Tensor:
    """A buffer with `held` from column `first` on, for `needed` columns and some more."""
    shape = list(held.shape)
    shape[slot_dim] = needed + max(_LEAST_ROOM, needed // 4)
    buffer = held.new_empty(shape)
    buffer.narrow(slot_dim, first, held.shape[slot_dim]).copy_(held)
    return buffer
