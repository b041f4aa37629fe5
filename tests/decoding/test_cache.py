"""A commit keeps exactly the accepted slots of every row, in order, on every kind of cache layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from jetspec_hf.decoding.cache import (
    cached_length,
    check_cache,
    commit_path,
    commit_ragged,
    crop_to,
    free_slots,
    start_recording,
    stop_recording,
)

pytestmark = pytest.mark.contract

WINDOW = 4
EMPTY = -1.0


def make_cache(kinds: tuple[str, ...], capacity: int = 64) -> Any:
    layers = {
        "dynamic": DynamicLayer,
        "sliding": lambda: DynamicSlidingWindowLayer(sliding_window=WINDOW),
        "indexed": DynamicIndexedLayer,
        "static": lambda: StaticLayer(max_cache_len=capacity),
    }
    cache = DynamicCache()
    cache.layers = [layers[kind]() for kind in kinds]
    return cache


def feed(cache: Any, values: torch.Tensor) -> None:
    """Appends slots of shape `(batch, new)` to every layer, as a forward would; their tensors hold these values."""
    states = values[:, None, :, None].expand(-1, 2, -1, 3).contiguous()
    for layer in cache.layers:
        layer.update(states, states + 0.5)
        if isinstance(layer, DynamicIndexedLayer):
            layer.update_indexer(states[:, 0])


def slots_of(layer: Any, row: int) -> list[float]:
    """What the row's slots hold, checked to be the same in every tensor of the layer."""
    length = int(layer.get_seq_length()) if isinstance(layer, StaticLayer) else layer.keys.shape[-2]
    keys = layer.keys[row, :, :length]
    assert torch.equal(keys, keys[:1, :, :1].expand_as(keys))
    assert torch.equal(layer.values[row, :, :length], keys + 0.5)
    if isinstance(layer, DynamicIndexedLayer):
        assert torch.equal(layer.indexer_keys[row], keys[0])
    return keys[0, :, 0].tolist()


@dataclass
class Model:
    """The reference: each row is a plain list of the tokens it holds, right-aligned in the cache."""

    rows: list[list[float]]
    lags: list[int] = field(default_factory=list)

    def check(self, cache: Any) -> None:
        longest = max(len(row) for row in self.rows)
        assert cached_length(cache) == longest
        for layer in cache.layers:
            for index, row in enumerate(self.rows):
                held = slots_of(layer, index)
                kept = min(longest, WINDOW - 1) if isinstance(layer, DynamicSlidingWindowLayer) else longest
                assert len(held) == kept
                visible = row[-kept:]
                assert held[len(held) - len(visible) :] == visible


layer_kinds = st.lists(st.sampled_from(["dynamic", "sliding", "indexed", "static"]), min_size=1, max_size=3).map(tuple)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kinds=layer_kinds, batch=st.integers(1, 3), prompt=st.integers(1, 9))
def test_rounds_of_ragged_commits_keep_the_accepted_tokens(
    data: st.DataObject, kinds: tuple[str, ...], batch: int, prompt: int
) -> None:
    counter = iter(range(10_000))

    def fresh(count: int) -> list[list[float]]:
        return [[float(next(counter)) for _ in range(count)] for _ in range(batch)]

    cache = make_cache(kinds)
    model = Model(fresh(prompt))
    feed(cache, torch.tensor(model.rows))
    start_recording(cache)
    lags = [0] * batch
    for _ in range(data.draw(st.integers(1, 4), label="rounds")):
        nodes = data.draw(st.integers(1, 6), label="nodes")
        tokens = fresh(nodes)
        feed(cache, torch.tensor(tokens))
        subsets = st.lists(st.integers(0, nodes - 1), unique=True, max_size=nodes).map(sorted)
        paths = data.draw(st.lists(subsets, min_size=batch, max_size=batch), label="paths")
        lags = commit_ragged(cache, nodes, paths, lags)
        for row, path, added in zip(model.rows, paths, tokens, strict=True):
            row.extend(added[node] for node in path)
        longest = max(len(row) for row in model.rows)
        assert lags == [longest - len(row) for row in model.rows]
        model.check(cache)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), kinds=layer_kinds, batch=st.integers(1, 3), prompt=st.integers(1, 9))
def test_rounds_of_even_commits_keep_the_accepted_tokens(
    data: st.DataObject, kinds: tuple[str, ...], batch: int, prompt: int
) -> None:
    counter = iter(range(10_000))
    cache = make_cache(kinds)
    model = Model([[float(next(counter)) for _ in range(prompt)] for _ in range(batch)])
    feed(cache, torch.tensor(model.rows))
    start_recording(cache)
    for _ in range(data.draw(st.integers(1, 4), label="rounds")):
        nodes = data.draw(st.integers(1, 6), label="nodes")
        kept = data.draw(st.integers(1, nodes), label="kept")
        tokens = [[float(next(counter)) for _ in range(nodes)] for _ in range(batch)]
        feed(cache, torch.tensor(tokens))
        subsets = st.lists(st.integers(0, nodes - 1), unique=True, min_size=kept, max_size=kept).map(sorted)
        paths = data.draw(st.lists(subsets, min_size=batch, max_size=batch), label="paths")
        commit_path(cache, nodes, torch.tensor(paths))
        for row, path, added in zip(model.rows, paths, tokens, strict=True):
            row.extend(added[node] for node in path)
        model.check(cache)


@pytest.mark.parametrize("kind", ["dynamic", "sliding", "indexed", "static"])
def test_dropped_nodes_leave_no_trace(kind: str) -> None:
    cache = make_cache((kind,))
    model = Model([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    feed(cache, torch.tensor(model.rows))
    start_recording(cache)
    feed(cache, torch.tensor([[7.0, 8.0]]))
    crop_to(cache, 6)
    model.check(cache)


def test_a_sliding_layer_evicts_again_once_recording_stops() -> None:
    cache = make_cache(("sliding",))
    feed(cache, torch.arange(6.0)[None])
    start_recording(cache)
    stop_recording(cache)
    feed(cache, torch.tensor([[7.0, 8.0, 9.0]]))
    assert slots_of(cache.layers[0], 0) == [7.0, 8.0, 9.0]


def test_a_static_cache_tells_its_free_slots() -> None:
    cache = make_cache(("static",), capacity=10)
    feed(cache, torch.arange(6.0)[None])
    assert free_slots(cache) == 4
    assert free_slots(make_cache(("dynamic",))) is None


def test_no_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="use_cache"):
        check_cache(None)


def test_an_unknown_layer_is_refused_by_name_even_if_it_calls_itself_croppable() -> None:
    class ForgetfulLayer(DynamicLayer):
        is_croppable = True

    cache = DynamicCache()
    cache.layers = [ForgetfulLayer()]
    with pytest.raises(ValueError, match="ForgetfulLayer"):
        check_cache(cache)


def test_a_static_window_shorter_than_the_cache_is_refused() -> None:
    config = LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_size=8,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
    )
    check_cache(StaticCache(config=config, max_cache_len=8))
    with pytest.raises(ValueError, match="max_cache_len"):
        check_cache(StaticCache(config=config, max_cache_len=9))
