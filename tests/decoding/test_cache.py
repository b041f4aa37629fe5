"""A commit keeps exactly the accepted slots of every row, in order, on every kind of cache layer."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from jetspec_hf.decoding.cache import DecodingCache, cached_length, check_cache

pytestmark = pytest.mark.contract

WINDOW = 4
KINDS = ["dynamic", "sliding", "indexed", "static"]


def make_cache(kinds: tuple[str, ...], window: int = WINDOW, capacity: int = 128) -> Any:
    layers = {
        "dynamic": DynamicLayer,
        "sliding": lambda: DynamicSlidingWindowLayer(sliding_window=window),
        "indexed": DynamicIndexedLayer,
        "static": lambda: StaticLayer(max_cache_len=capacity),
    }
    cache = DynamicCache()
    cache.layers = [layers[kind]() for kind in kinds]
    return cache


def feed_layer(layer: Any, values: torch.Tensor) -> torch.Tensor:
    """Appends slots of shape `(batch, new)` as a forward would; every tensor holds these values. Returns the keys."""
    states = values[:, None, :, None].expand(-1, 2, -1, 3).contiguous()
    keys, value_states = layer.update(states, -states)
    assert torch.equal(value_states, -keys)
    assert torch.equal(keys, keys[:, :1, :, :1].expand_as(keys))
    if isinstance(layer, DynamicIndexedLayer):
        assert torch.equal(layer.update_indexer(states[:, 0]), keys[:, 0])
    return keys[:, 0, :, 0]


class Decoding:
    """A cache under trees of made-up tokens, and the reference: each row is a plain list of the tokens it holds."""

    def __init__(self, kinds: tuple[str, ...], rows: list[int], prompt: int, offloaded: bool = False) -> None:
        self.counter = iter(range(1, 1_000_000))
        self.rows = [[0.0] * (prompt - real) + self.fresh(real) for real in rows]
        self.cache = make_cache(kinds)
        self.cache.offloading = self.offloaded = offloaded
        for layer in self.cache.layers:
            feed_layer(layer, torch.tensor(self.rows))
        self.decoding = DecodingCache(self.cache, torch.tensor(self.rows) > 0)  # token 0 is padding

    def fresh(self, count: int) -> list[float]:
        return [float(next(self.counter)) for _ in range(count)]

    def feed(self, nodes: int, layers: int | None = None) -> list[list[float]]:
        """Appends a tree, and checks which tokens of the prefix each row's nodes are shown beside it."""
        tokens = [self.fresh(nodes) for _ in self.rows]
        for index, layer in enumerate(self.cache.layers[:layers]):
            columns = self.decoding.columns(index)
            before, shown = columns.prefix_mask, columns.kv_length(nodes)
            keys = feed_layer(layer, torch.tensor(tokens))
            assert keys.shape[1] == shown
            assert keys[:, before.shape[1] :][:, :nodes].tolist() == tokens
            for row, held in enumerate(self.rows):
                seen = keys[row, : before.shape[1]][before[row]].tolist()
                root = before.shape[1] if columns.roots() is None else int(columns.roots()[row])
                slots = len(held) - root  # the slot of the first column, before the row's first if it has few
                assert slots == int(columns.shown_slots()[row])
                assert seen == [token for token in held[slots:] if token]
                needed = len(held) if columns.window is None else min(len(held), WINDOW - 1)
                assert root >= needed
            if self.offloaded:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        return tokens

    def commit(self, tokens: list[list[float]], paths: list[list[int]]) -> None:
        longest = max(len(path) for path in paths)
        padded = torch.tensor([path + [0] * (longest - len(path)) for path in paths], dtype=torch.long)
        visible = torch.tensor([[node < len(path) for node in range(longest)] for path in paths], dtype=torch.bool)
        shape = (len(paths), longest)
        self.decoding.commit(paths, padded.view(shape), visible.view(shape))
        for row, path, added in zip(self.rows, paths, tokens, strict=True):
            row.extend(added[node] for node in path)
        assert self.decoding.lengths == [len(row) for row in self.rows]

    def close(self) -> None:
        self.decoding.close()
        longest = max(len(row) for row in self.rows)
        assert cached_length(self.cache) == longest
        for layer in self.cache.layers:
            for index, row in enumerate(self.rows):
                held = slots_of(layer, index)
                kept = min(longest, WINDOW - 1) if isinstance(layer, DynamicSlidingWindowLayer) else longest
                assert len(held) == kept
                visible = row[-kept:]
                assert held[len(held) - len(visible) :] == visible


def slots_of(layer: Any, row: int) -> list[float]:
    """What the row's slots hold, checked to be the same in every tensor of the layer."""
    length = int(layer.get_seq_length()) if isinstance(layer, StaticLayer) else layer.keys.shape[-2]
    keys = layer.keys[row, :, :length]
    assert torch.equal(keys, keys[:1, :, :1].expand_as(keys))
    assert torch.equal(layer.values[row, :, :length], -keys)
    if isinstance(layer, DynamicIndexedLayer):
        assert torch.equal(layer.indexer_keys[row], keys[0])
    return keys[0, :, 0].tolist()


@st.composite
def decodings(draw: st.DrawFn, offloads: bool = False) -> Decoding:
    kinds = tuple(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), label="kinds"))
    prompt = draw(st.integers(1, 9), label="prompt")
    rows = draw(st.lists(st.integers(0, prompt), min_size=1, max_size=3), label="tokens of the prompt")
    return Decoding(kinds, rows, prompt, offloads and draw(st.booleans(), label="offloaded"))


def draw_paths(data: st.DataObject, batch: int, nodes: int, even: bool) -> list[list[int]]:
    kept = data.draw(st.integers(1, nodes), label="kept") if even else None
    subsets = st.lists(st.integers(0, nodes - 1), unique=True, min_size=kept or 0, max_size=kept or nodes).map(sorted)
    return data.draw(st.lists(subsets, min_size=batch, max_size=batch), label="paths")


@settings(max_examples=100, deadline=None)
@given(data=st.data(), decoding=decodings(offloads=True), even=st.booleans())
def test_rounds_of_commits_show_and_leave_the_accepted_tokens(
    data: st.DataObject, decoding: Decoding, even: bool
) -> None:
    for _ in range(data.draw(st.integers(0, 12), label="rounds")):
        nodes = data.draw(st.integers(1, 6), label="nodes")
        tokens = decoding.feed(nodes)
        decoding.commit(tokens, draw_paths(data, len(decoding.rows), nodes, even))
    decoding.close()


@settings(max_examples=25, deadline=None)
@given(data=st.data(), decoding=decodings())
def test_dropped_nodes_leave_no_trace(data: st.DataObject, decoding: Decoding) -> None:
    """Be they forgotten, or left behind by a forward that did not reach every layer."""
    tokens = decoding.feed(3)
    decoding.commit(tokens, draw_paths(data, len(decoding.rows), 3, even=False))
    decoding.feed(2)
    decoding.decoding.rollback()
    decoding.feed(4)
    decoding.decoding.rollback()
    decoding.feed(5, layers=data.draw(st.integers(0, 2), label="layers"))
    decoding.close()


def plain_layers(kinds: tuple[str, ...], rows: list[list[float]]) -> Any:
    """The same layers, fed by plain decoding."""
    cache = make_cache(kinds)
    for token in torch.tensor(rows).split(1, dim=1):
        for layer in cache.layers:
            feed_layer(layer, token)
    return cache


def own_storage(value: Any) -> Any:
    return (value.tolist(), value.untyped_storage().nbytes()) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_cache_that_is_left_is_the_one_that_plain_decoding_leaves(kind: str, batch: int) -> None:
    """Down to every attribute of its layers: so whatever can be done to a cache can be done to it."""
    decoding = Decoding((kind,), [6] * batch, prompt=6)
    ahead = [[0, 2, 3, 5], [0], [0, 1]][:batch]
    behind = [[0, 2], [0, 1, 2, 4, 5], [0, 3, 4, 5]][:batch]
    for paths in [ahead, behind] * 8:
        decoding.commit(decoding.feed(6), paths)
    decoding.close()
    plain = plain_layers((kind,), decoding.rows)
    ours, theirs = vars(decoding.cache.layers[0]), vars(plain.layers[0])
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if kind == "static" and name in ("keys", "values"):  # what plain decoding never wrote nobody will read
            continue
        if kind == "sliding" and name in ("keys", "values"):  # plain decoding leaves a view of one slot more
            assert ours[name].tolist() == value.tolist()
            assert ours[name].untyped_storage().nbytes() <= value.untyped_storage().nbytes()
            continue
        assert own_storage(ours[name]) == own_storage(value), name
    again = pickle.loads(pickle.dumps(decoding.cache))
    assert slots_of(again.layers[0], 0) == slots_of(plain.layers[0], 0)


class CopiedElements(TorchDispatchMode):
    """Counts the elements that operations write, views aside."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and "empty" not in func.name():
            self.count += args[3].numel() if func.name().startswith("aten::scatter_") else result.numel()
        return result


def steps(decoding: DecodingCache, cache: Any, batch: int, count: int) -> Iterator[None]:
    nodes = torch.zeros(batch, 2, 8, 3)
    for step in range(count):
        paths = [[0, 2, 5, 7] if (row + step) % 2 else [0, 3] for row in range(batch)]
        padded = torch.tensor([path + [0] * (4 - len(path)) for path in paths])
        for layer in cache.layers:
            layer.update(nodes, nodes)
            if isinstance(layer, DynamicIndexedLayer):
                layer.update_indexer(nodes[:, 0])
        decoding.commit(paths, padded, torch.tensor([[len(path) > node for node in range(4)] for path in paths]))
        yield


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_step_copies_no_more_of_a_long_context_than_of_a_short_one(window: int | None, batch: int) -> None:
    cache = make_cache(("dynamic" if window is None else "sliding",), window=window or WINDOW)
    prompt = torch.zeros(batch, 2, 4096, 3)
    cache.layers[0].update(prompt, prompt)
    decoding = DecodingCache(cache, torch.ones(batch, 4096, dtype=torch.bool))
    with CopiedElements() as copied:
        for _ in steps(decoding, cache, batch, 200):
            pass
    columns = copied.count / (200 * batch * 2 * 2 * 3)  # per step and row: keys and values, 2 heads of 3 numbers
    assert columns < 64  # 8 nodes, what is moved of them, and a share of a buffer's growth; the context is 4096


def test_a_commit_does_not_wait_for_the_device() -> None:
    waits = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal")

    class NoHostSync(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            assert func.overloadpacket.__name__.removeprefix("aten::") not in waits
            return func(*args, **(kwargs or {}))

    cache = make_cache(tuple(KINDS))
    for layer in cache.layers:
        feed_layer(layer, torch.ones(2, 6))
    decoding = DecodingCache(cache, torch.ones(2, 6, dtype=torch.bool))
    with NoHostSync():
        for _ in steps(decoding, cache, 2, 20):
            assert decoding.free_slots is not None
        decoding.close()


def test_a_static_cache_tells_its_free_slots() -> None:
    for kind, free in (("static", 122), ("dynamic", None)):
        cache = make_cache((kind,))
        feed_layer(cache.layers[0], torch.ones(1, 6))
        assert DecodingCache(cache, torch.ones(1, 6, dtype=torch.bool)).free_slots == free


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
