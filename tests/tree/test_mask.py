"""Masks and positions, element by element against the rules written down one key at a time."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from jetspec_hf.tree import TokenTree, tree_attention_mask, tree_position_ids
from jetspec_hf.tree.mask import TreeMaskBuffer


def sees(
    tree: TokenTree,
    prefix: list[bool],
    row: int,
    query: int,
    slot: int,
    window: int | None,
    chunk: int | None,
    root: int | None = None,
    start: int | None = None,
) -> bool:
    """Say whether a node sees the key in a cache slot: the reference."""
    parents, depths, cached = tree.parents[row].tolist(), tree.depths[row].tolist(), len(prefix)
    if slot >= cached + tree.num_nodes:
        return False  # nothing stands there yet
    if slot < cached:
        if not prefix[slot]:
            return False
        key_place = slot
    else:
        ancestor = query
        while ancestor not in (-1, slot - cached):
            ancestor = parents[ancestor]
        if ancestor == -1:
            return False
        key_place = (cached if root is None else root) + depths[slot - cached]
    query_place = (cached if root is None else root) + depths[query]
    padding = prefix.index(True) if True in prefix else cached
    padding = padding if start is None else start
    if window is not None and not query_place - key_place < window:
        return False
    return chunk is None or (query_place - padding) // chunk == (key_place - padding) // chunk


@settings(deadline=None, max_examples=150)
@given(data=st.data(), uneven=st.booleans())
def test_a_node_sees_exactly_the_keys_of_its_own_path(token_trees: Any, data: st.DataObject, uneven: bool) -> None:
    tree = data.draw(token_trees(), label="tree")
    cached = data.draw(st.integers(0, 9), label="cached slots")
    rows = st.lists(st.booleans(), min_size=cached, max_size=cached)
    prefix = data.draw(st.lists(rows, min_size=tree.batch_size, max_size=tree.batch_size), label="prefix")
    kv_offset = data.draw(st.integers(0, cached), label="kv_offset")
    kv_length = cached - kv_offset + tree.num_nodes + data.draw(st.integers(0, 4), label="free slots")
    window = data.draw(st.none() | st.integers(1, 12), label="window")
    chunk = data.draw(st.none() | st.integers(1, 12), label="chunk")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), label="dtype")
    roots, starts = [None] * tree.batch_size, [None] * tree.batch_size
    if uneven:  # rows that end before others, and whose text starts where it did before slots were dropped
        roots = [data.draw(st.integers(0, cached), label="root slot") for _ in prefix]
        starts = [data.draw(st.integers(-5, root), label="start of the text") for root in roots]
        prefix = [row[:root] + [False] * (cached - root) for row, root in zip(prefix, roots, strict=True)]

    mask = tree_attention_mask(
        tree,
        torch.tensor(prefix, dtype=torch.bool).view(tree.batch_size, cached),
        kv_length=kv_length,
        kv_offset=kv_offset,
        sliding_window=window,
        chunk_size=chunk,
        root_slots=torch.tensor(roots) if uneven else None,
        text_starts=torch.tensor(starts) if uneven else None,
        dtype=dtype,
    )

    expected = [
        [
            [
                0.0
                if sees(tree, prefix[row], row, query, kv_offset + column, window, chunk, roots[row], starts[row])
                else torch.finfo(dtype).min
                for column in range(kv_length)
            ]
            for query in range(tree.num_nodes)
        ]
        for row in range(tree.batch_size)
    ]
    assert mask.dtype == dtype
    assert mask[:, 0].tolist() == expected
    assert mask.shape[1] == 1


def visible(tree: TokenTree, prefix: list[int], **geometry: Any) -> list[str]:
    """Draw the first row's mask, x for a key that is seen."""
    prefix_mask = torch.tensor([prefix], dtype=torch.bool)
    mask = tree_attention_mask(tree, prefix_mask, dtype=torch.float32, **geometry)
    return ["".join("x" if value == 0 else "." for value in query) for query in mask[0, 0].tolist()]


@pytest.fixture
def branched() -> TokenTree:
    """0 -> (1 -> 3, 2)."""
    return TokenTree(
        token_ids=torch.tensor([[7, 8, 9, 10]]),
        parents=torch.tensor([[-1, 0, 0, 1]]),
        depths=torch.tensor([[0, 1, 1, 2]]),
        log_probs=torch.tensor([[0.0, -0.5, -1.0, -1.5]]),
        depth_limit=2,
    )


def test_a_full_layer_sees_the_prefix_less_its_padding_and_the_path(branched: TokenTree) -> None:
    assert visible(branched, [0, 1, 1, 0, 1], kv_length=9) == [
        ".xx.xx...",
        ".xx.xxx..",
        ".xx.xx.x.",
        ".xx.xxx.x",
    ]


def test_a_sliding_layer_sees_its_window_counted_along_the_path(branched: TokenTree) -> None:
    # A window of 3 is the token itself and the two before it.
    assert visible(branched, [1, 1, 1, 1, 1], kv_length=9, sliding_window=3) == [
        "...xxx...",
        "....xxx..",
        "....xx.x.",
        ".....xx.x",
    ]


def test_a_chunked_layer_sees_its_own_chunk_counted_from_the_end_of_the_padding(branched: TokenTree) -> None:
    # Real tokens stand at 0..3, the root at 4, its children at 5, the last node at 6; chunks of 3 are 0..2, 3..5, 6..8.
    assert visible(branched, [0, 1, 1, 1, 1], kv_length=9, chunk_size=3) == [
        "....xx...",
        "....xxx..",
        "....xx.x.",
        "........x",
    ]


def test_a_dropped_prefix_and_free_slots_move_and_widen_the_mask(branched: TokenTree) -> None:
    assert visible(branched, [1, 1, 1, 1, 1], kv_offset=3, kv_length=9) == [
        "xxx......",
        "xxxx.....",
        "xxx.x....",
        "xxxx.x...",
    ]


def test_a_row_without_real_tokens_is_masked_by_a_finite_number(branched: TokenTree) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        mask = tree_attention_mask(branched, torch.zeros(1, 3, dtype=torch.bool), kv_length=7, dtype=dtype)
        assert mask.isfinite().all()
        assert mask[0, 0, :, :3].eq(torch.finfo(dtype).min).all()


def test_a_chain_sees_what_causal_decoding_sees() -> None:
    tree = TokenTree.chain(torch.arange(5)[None])
    expected = torch.ones(9, 9).tril().bool()[4:]
    assert visible(tree, [1, 1, 1, 1], kv_length=9) == [
        "".join(".x"[seen] for seen in row) for row in expected.tolist()
    ]


def test_masks_do_not_wait_for_the_device(branched: TokenTree, no_host_sync: Any) -> None:
    prefix_mask = torch.ones(1, 5, dtype=torch.bool)
    geometry: dict[str, Any] = {"kv_length": 9, "sliding_window": 3, "chunk_size": 4, "dtype": torch.float32}
    with no_host_sync:
        tree_attention_mask(branched, prefix_mask, **geometry)
        tree_position_ids(branched, torch.tensor([5]))
    assert tree_attention_mask(branched.to("meta"), prefix_mask.to("meta"), **geometry).shape == (1, 1, 4, 9)


class LargestOutput(TorchDispatchMode):
    """Remembers the bytes of the largest storage that an operation returned, or of the largest part it wrote."""

    def __init__(self, written: bool = False) -> None:
        super().__init__()
        self.largest = 0
        self.written = written

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            written = 0 if func.is_view else result.numel() * result.element_size()
            self.largest = max(self.largest, written if self.written else result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("geometry", [{}, {"sliding_window": 500}, {"chunk_size": 500}])
def test_a_mask_is_built_in_no_more_memory_than_the_mask_itself(geometry: dict[str, int]) -> None:
    tree, cached = TokenTree.chain(torch.arange(65).expand(2, 65)), 3000
    with LargestOutput() as outputs:
        mask = tree_attention_mask(
            tree, torch.ones(2, cached, dtype=torch.bool), kv_length=cached + 65, dtype=torch.float32, **geometry
        )
    assert outputs.largest == mask.numel() * mask.element_size()


@settings(deadline=None, max_examples=60)
@given(data=st.data(), capacity=st.none() | st.just(40))
def test_a_buffer_gives_the_masks_of_a_growing_prefix(token_trees: Any, data: st.DataObject, capacity: Any) -> None:
    buffer = TreeMaskBuffer(torch.float32)
    batch = data.draw(st.integers(1, 3), label="batch")
    rows = [[data.draw(st.booleans())] * data.draw(st.integers(0, 3), label="prompt") for _ in range(batch)]
    for _ in range(data.draw(st.integers(1, 5), label="steps")):
        tree = data.draw(token_trees(min_batch=batch, max_batch=batch), label="tree")
        length = max(map(len, rows))
        prefix_mask = torch.tensor([row + [False] * (length - len(row)) for row in rows]).bool().view(batch, length)
        kv_length = capacity or length + tree.num_nodes
        mask = buffer.write(tree, prefix_mask, kv_length=kv_length, settled=min(map(len, rows)))
        assert torch.equal(mask, tree_attention_mask(tree, prefix_mask, kv_length=kv_length, dtype=torch.float32))
        for row in rows:  # rows grow by different numbers of tokens
            row.extend([True] * data.draw(st.integers(0, 4), label="accepted"))


def test_a_buffer_writes_no_more_for_a_long_prefix_than_for_a_short_one() -> None:
    tree, written = TokenTree.chain(torch.arange(9)[None]), []
    for length in (100, 3000):
        buffer = TreeMaskBuffer(torch.float32)
        buffer.write(tree, torch.ones(1, length).bool(), kv_length=length + 9, settled=length)
        prefix_mask = torch.ones(1, length + 5).bool()
        with LargestOutput(written=True) as outputs:
            buffer.write(tree, prefix_mask, kv_length=length + 14, settled=length + 5)
        written.append(outputs.largest)
    assert written[0] == written[1]


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_node_stands_as_far_behind_the_anchor_as_its_path_is_long(token_trees: Any, data: st.DataObject) -> None:
    tree = data.draw(token_trees())
    anchors = data.draw(st.lists(st.integers(0, 99), min_size=tree.batch_size, max_size=tree.batch_size))
    positions = tree_position_ids(tree, torch.tensor(anchors)).tolist()
    for row, parents in enumerate(tree.parents.tolist()):
        for node, parent in enumerate(parents):
            assert positions[row][node] == (anchors[row] if node == 0 else positions[row][parent] + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefix_mask": torch.ones(1, 5)}, r"`prefix_mask` must be a torch.BoolTensor .* got torch.float32"),
        (
            {"prefix_mask": torch.ones(2, 5).bool()},
            r"`prefix_mask` must be .* shape \(1, cached slots\), got .* \(2, 5\)",
        ),
        ({"prefix_mask": torch.ones(1, 5, 1).bool()}, r"`prefix_mask` must be .* \(1, 5, 1\)"),
        (
            {"prefix_mask": torch.ones(1, 5, device="meta").bool()},
            r"`prefix_mask` must be on the tree's device cpu, got meta",
        ),
        ({"kv_length": 8}, r"`kv_length` must be at least 9, to hold 5 cached slots and 4 nodes from slot 0 on, got 8"),
        ({"kv_offset": 1, "kv_length": 7}, r"`kv_length` must be at least 8, .* from slot 1 on, got 7"),
        ({"kv_offset": -1, "kv_length": 10}, r"`kv_offset` must be between 0 and the 5 slots of `prefix_mask`, got -1"),
        ({"kv_offset": 6}, r"`kv_offset` must be between 0 and the 5 slots of `prefix_mask`, got 6"),
        ({"sliding_window": 0}, r"`sliding_window` must be at least 1, got 0: pass None"),
        ({"chunk_size": -4}, r"`chunk_size` must be at least 1, got -4: pass None"),
        ({"dtype": torch.int64}, r"`dtype` must be floating, got torch.int64"),
        ({"root_slots": torch.tensor([1, 2])}, r"`root_slots` must be a torch.LongTensor of shape \(1,\), got"),
        ({"text_starts": torch.tensor([1.0])}, r"`text_starts` must be a torch.LongTensor .* got torch.float32"),
    ],
)
def test_a_geometry_that_does_not_fit_is_refused(branched: TokenTree, changes: dict[str, Any], message: str) -> None:
    arguments = {"prefix_mask": torch.ones(1, 5).bool(), "kv_length": 9, "dtype": torch.float32, **changes}
    with pytest.raises(ValueError, match=message):
        tree_attention_mask(branched, **arguments)


@pytest.mark.parametrize("anchors", [torch.tensor([1, 2]), torch.tensor([[1]]), torch.tensor([1.0])])
def test_anchor_positions_of_another_shape_or_dtype_are_refused(branched: TokenTree, anchors: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"`anchor_positions` must be a torch.LongTensor of shape \(1,\), got"):
        tree_position_ids(branched, anchors)
