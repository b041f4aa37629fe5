"""Commit accepted tree nodes to every kind of cache layer; the only file that touches the inside of a `Cache`.

The tree's nodes stand behind the prefix, one slot each. A commit keeps the slots of the accepted path and drops the
rest. Rows of a batch may accept different numbers: their slots are then right-aligned again, which keeps the
left-padding that transformers expects.
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

from ..target import AttentionKind

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


def start_recording(cache: Cache) -> None:
    """Makes sliding layers keep what they would evict, until the next commit. To be called after the prefill."""
    cache.activate_past_recording()
    for layer in _filled_layers(cache):
        _crop(layer, 0)  # trims sliding layers to what the next forward needs


def stop_recording(cache: Cache) -> None:
    """Gives sliding layers their ordinary eviction back."""
    for layer in _filled_layers(cache):
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.record_past = False


def cached_length(cache: Cache) -> int:
    """Number of slots the cache holds or has evicted, the same for every row."""
    return int(cache.get_seq_length())  # a static layer returns its live counter tensor


def is_static(cache: Cache) -> bool:
    """Whether the cache has a fixed number of slots."""
    return any(isinstance(layer, StaticLayer) for layer in cache.layers)


def free_slots(cache: Cache) -> int | None:
    """Number of slots a static cache still has, `None` if it can grow."""
    sizes = [
        layer.max_cache_len - int(layer.get_seq_length())
        for layer in _filled_layers(cache)
        if isinstance(layer, StaticLayer)
    ]
    return min(sizes) if sizes else None


def mask_sizes(cache: Cache, kind: AttentionKind, num_nodes: int) -> tuple[int, int]:
    """Columns of one layer kind's mask, and the slot of the first column, before a forward over `num_nodes` tokens."""
    length, offset = cache.get_mask_sizes(num_nodes, kind.layer_idx)
    return int(length), int(offset)


def crop_to(cache: Cache, length: int) -> None:
    """Takes every slot from `length` on out again; layers that a forward did not reach before it failed have none."""
    for layer in _filled_layers(cache):
        _crop(layer, max(int(layer.get_seq_length()) - length, 0))


def commit_path(cache: Cache, num_nodes: int, path: torch.Tensor) -> None:
    """Keeps the same number of nodes in every row; the prefix does not move.

    Args:
        cache (`Cache`): The cache right after the forward over `num_nodes` tree nodes.
        num_nodes (`int`): Nodes of the tree, the root included.
        path (`torch.LongTensor` of shape `(batch, kept)`): Accepted nodes in path order, the root first.
    """
    kept = path.shape[1]
    for layer in _filled_layers(cache):
        for name, (slot_dim, row_dim) in _SLOT_TENSORS.items():
            if (tensor := _tensor(layer, name)) is None:
                continue
            first = (
                int(layer.get_seq_length()) - num_nodes
                if isinstance(layer, StaticLayer)
                else tensor.shape[slot_dim] - num_nodes
            )
            accepted = _take(tensor, path + first, slot_dim, row_dim)
            tensor.narrow(slot_dim, first, kept).copy_(accepted)
        _crop(layer, num_nodes - kept)


def commit_ragged(cache: Cache, num_nodes: int, paths: Sequence[Sequence[int]], lags: Sequence[int]) -> list[int]:
    """Keeps another number of nodes in every row and right-aligns the rows again.

    Args:
        cache (`Cache`): The cache right after the forward over `num_nodes` tree nodes.
        num_nodes (`int`): Nodes of the tree, the root included.
        paths (`list[list[int]]`): Per row, the accepted nodes in path order, the root first; empty for a row that
            stands still.
        lags (`list[int]`): Per row, the empty slots on its left that earlier ragged commits left.

    Returns:
        `list[int]`: The new lags; the row that is furthest has 0.
    """
    prefix = cached_length(cache) - num_nodes
    lengths = [prefix - lag + len(path) for lag, path in zip(lags, paths, strict=True)]
    new_prefix = max(lengths)
    for layer in _filled_layers(cache):
        keys = layer.keys
        first = prefix if isinstance(layer, StaticLayer) else keys.shape[2] - num_nodes
        size = min(new_prefix, layer.sliding_window - 1) if isinstance(layer, DynamicSlidingWindowLayer) else new_prefix
        sources = ragged_sources(prefix, new_prefix, paths)[:, new_prefix - size :] - (prefix - first)
        sources = sources.clamp_(min=0).to(keys.device)
        for name, (slot_dim, row_dim) in _SLOT_TENSORS.items():
            if (tensor := _tensor(layer, name)) is not None:
                taken = _take(tensor, sources, slot_dim, row_dim)
                if isinstance(layer, StaticLayer):
                    tensor.narrow(slot_dim, 0, size).copy_(taken)
                else:
                    setattr(layer, name, taken)
        _set_length(layer, new_prefix)
    return [new_prefix - length for length in lengths]


def ragged_sources(prefix: int, new_prefix: int, paths: Sequence[Sequence[int]]) -> torch.Tensor:
    """For every slot after a ragged commit, the slot before it that moves there.

    Args:
        prefix (`int`): Slots before the tree.
        new_prefix (`int`): Slots after the commit.
        paths (`list[list[int]]`): Per row, the kept nodes.

    Returns:
        `torch.LongTensor` of shape `(batch, new_prefix)`: On the CPU; negative where a row has nothing to put.
    """
    slots = torch.arange(new_prefix)
    rows = []
    for path in paths:
        source = slots + (prefix + len(path) - new_prefix)
        source[new_prefix - len(path) :] = prefix + torch.tensor(path, dtype=torch.long)
        rows.append(source)
    return torch.stack(rows)


def _may_overwrite(layer: StaticSlidingWindowLayer, cache: Cache) -> bool:
    """Whether this static window can get full; before transformers 5.24 only a full layer beside it tells."""
    if _since("5.24"):
        return not layer.is_croppable
    return layer.max_cache_len not in [other.max_cache_len for other in cache.layers if type(other) is StaticLayer]


def _filled_layers(cache: Cache) -> list[Any]:
    layers: list[Any] = cache.layers  # `check_cache` lets only kinds pass that have `keys`
    return [layer for layer in layers if layer.keys is not None and layer.keys.numel() > 0]


def _tensor(layer: Any, name: str) -> torch.Tensor | None:
    """A slot tensor of this layer, `None` if its kind has no such tensor or it is not filled."""
    if name.startswith("indexer") and not isinstance(layer, DynamicIndexedLayer):
        return None
    tensor: torch.Tensor | None = getattr(layer, name, None)  # `indexer_position_ids` exists from transformers 5.24
    return tensor


def _take(tensor: torch.Tensor, slots: torch.Tensor, slot_dim: int, row_dim: int) -> torch.Tensor:
    """Gathers `slots` of shape `(rows, kept)` along the slot dimension."""
    shape = [1] * tensor.dim()
    shape[row_dim], shape[slot_dim] = slots.shape
    target = list(tensor.shape)
    target[slot_dim] = slots.shape[1]
    return tensor.gather(slot_dim, slots.to(tensor.device).view(shape).expand(target))


def _crop(layer: Any, count: int) -> None:
    """Drops the last `count` slots; static layers have no `crop` before transformers 5.24."""
    if isinstance(layer, StaticLayer):
        _set_length(layer, int(layer.get_seq_length()) - count)
    else:
        layer.crop(-count)


def _set_length(layer: Any, length: int) -> None:
    if isinstance(layer, StaticLayer):
        layer.cumulative_length.fill_(length)
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int = length
    elif isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = length
