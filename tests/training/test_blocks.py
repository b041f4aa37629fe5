"""Training blocks against loops over single slots: anchors, labels, masks, and what a block's states depend on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from jetspec_hf import JetSpecConfig, JetSpecDraftHead
from jetspec_hf.training.blocks import (
    Blocks,
    branch_states,
    choose_anchors,
    document_positions,
    draft_states,
    eligible_anchors,
    make_blocks,
    number_documents,
    sample_anchors,
    training_masks,
)
from support.packed_rows import Layout, layouts
from support.statistics import chi_square_p_value

VOCABULARY, HIDDEN, TAPS = 50, 16, 2
# Slot:                        0  1  2  3  4  5  6  7  8  9 10
DOCUMENT_IDS = torch.tensor([[-1, 0, 0, 0, 0, 0, 0, 1, 1, 1, -1]])
LOSS_MASK = torch.tensor([[0, 0, 0, 1, 1, 0, 1, 1, 0, 1, 1]]).bool()
INPUT_IDS = torch.arange(100, 111)[None]


def make_config(**fields: Any) -> JetSpecConfig:
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "num_target_layers": 4,
        "target_layer_ids": [0, 2],
        "mask_token_id": 49,
        "block_size": 4,
        "initializer_range": 0.4,
        **fields,
    }
    return JetSpecConfig(**config)


def kind_fields(kinds: str, window: int | None, causal: Any) -> dict[str, Any]:
    """Config fields from one letter per layer, `f` or `s`."""
    names = {"f": "full_attention", "s": "sliding_attention"}
    return {
        "num_hidden_layers": len(kinds),
        "layer_types": [names[kind] for kind in kinds],
        "sliding_window": window,
        "causal": causal if isinstance(causal, bool) else dict(zip(names.values(), causal, strict=True)),
    }


def random_head(**fields: Any) -> JetSpecDraftHead:
    """A head in double precision all of whose weights are random, the branch term's too."""
    head = JetSpecDraftHead(make_config(**fields)).eval().double()
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn_like(weight) * (0.4 if weight.dim() > 1 else 0.2) + (weight.dim() == 1))
    return head


class Embeddings(nn.Embedding):
    """A target's embedding, which keeps what it returned last so that gradients into it can be read."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, HIDDEN, dtype=torch.float64)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        self.returned = self(token_ids).detach().requires_grad_()
        return self.returned


def blocks_at(document_ids: torch.Tensor, anchors: torch.Tensor, used: torch.Tensor, block_size: int) -> Blocks:
    """Blocks for which neither tokens nor supervision matter."""
    nothing = torch.zeros_like(document_ids)
    return make_blocks(nothing, nothing.bool(), document_ids, anchors, used, block_size)


def position_in_document(document_ids: list[int], slot: int) -> int:
    start = slot
    while start > 0 and document_ids[start - 1] == document_ids[slot]:
        start -= 1
    return slot - start


def random_bits(shape: torch.Size, seed: int, share: float) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


@st.composite
def anchored_layouts(draw: st.DrawFn) -> tuple[Layout, torch.Tensor, torch.Tensor]:
    """A layout, and per row any anchors inside documents; rows with fewer anchors than others have unused ones."""
    layout = draw(layouts())
    inside = [[slot for slot, number in enumerate(row) if number >= 0] for row in layout.document_ids.tolist()]
    chosen = [sorted(draw(st.sets(st.sampled_from(slots), max_size=4))) if slots else [] for slots in inside]
    count = max(1, *map(len, chosen))
    anchors = torch.tensor([[*row, *[0] * (count - len(row))] for row in chosen])
    used = torch.tensor([[index < len(row) for index in range(count)] for row in chosen])
    return layout, anchors, used


# Anchors --------------------------------------------------------------------------------------------------------------


def test_an_anchor_stands_before_a_token_of_its_document_that_the_target_wrote() -> None:
    # Not 6: the target wrote 7, but in another document. Not 9: the mask is set at 10, but that is padding.
    assert eligible_anchors(LOSS_MASK, DOCUMENT_IDS).nonzero()[:, 1].tolist() == [2, 3, 5, 8]


@settings(deadline=None, max_examples=100)
@given(layout=layouts(), seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.2, 0.7, 1.0]))
def test_positions_and_eligible_anchors_are_those_of_a_loop(layout: Layout, seed: int, share: float) -> None:
    loss_mask = random_bits(layout.document_ids.shape, seed, share)
    eligible, positions = eligible_anchors(loss_mask, layout.document_ids), document_positions(layout.document_ids)
    for row, documents in enumerate(layout.document_ids.tolist()):
        for slot, document in enumerate(documents):
            last = slot + 1 == len(documents)
            expected = not last and document >= 0 and documents[slot + 1] == document and bool(loss_mask[row, slot + 1])
            assert bool(eligible[row, slot]) is expected
            if document >= 0:
                assert positions[row, slot] == position_in_document(documents, slot)


@settings(deadline=None, max_examples=100)
@given(layout=layouts(), seed=st.integers(0, 2**32 - 1), count=st.integers(1, 9))
def test_sampled_anchors_are_different_eligible_slots_in_order(layout: Layout, seed: int, count: int) -> None:
    loss_mask = random_bits(layout.document_ids.shape, seed, 0.5)
    anchors, used = sample_anchors(loss_mask, layout.document_ids, count, torch.Generator().manual_seed(seed))
    eligible = [set(row.nonzero()[:, 0].tolist()) for row in eligible_anchors(loss_mask, layout.document_ids)]
    assert anchors.shape == used.shape == (len(eligible), max(1, min(count, max(map(len, eligible)))))
    for row, slots in enumerate(eligible):
        taken = anchors[row, used[row]].tolist()
        assert len(taken) == min(count, len(slots))
        assert taken == sorted(set(taken) & slots)
        assert anchors[row, ~used[row]].eq(0).all()


def test_every_set_of_anchors_is_equally_probable() -> None:
    rows, count = 20_000, 2
    anchors, used = sample_anchors(
        LOSS_MASK.expand(rows, -1), DOCUMENT_IDS.expand(rows, -1), count, torch.Generator().manual_seed(0)
    )
    assert used.all()
    pairs = list(itertools.combinations([2, 3, 5, 8], count))
    counts = torch.tensor([int((anchors == torch.tensor(pair)).all(dim=1).sum()) for pair in pairs])
    assert counts.sum() == rows
    assert chi_square_p_value(counts, torch.full((len(pairs),), 1 / len(pairs))) > 1e-3


def test_the_slots_of_highest_priority_are_chosen() -> None:
    # The best of all, slot 0, is not eligible.
    priorities = torch.tensor([[0.99, 0, 0.1, 0.4, 0, 0.0, 0, 0, 0.3, 0, 0]])
    for count, expected in ((1, [3]), (2, [3, 8]), (3, [2, 3, 8]), (4, [2, 3, 5, 8]), (9, [2, 3, 5, 8])):
        anchors, used = choose_anchors(priorities, LOSS_MASK, DOCUMENT_IDS, count)
        assert anchors.tolist() == [expected]
        assert used.all()


def test_the_generator_alone_decides_what_is_drawn() -> None:
    state = torch.get_rng_state()
    drawn = [
        sample_anchors(LOSS_MASK, DOCUMENT_IDS, 2, torch.Generator().manual_seed(seed))[0].tolist()
        for seed in (1, 1, *range(30))
    ]
    assert drawn[0] == drawn[1]
    assert len(set(map(str, drawn))) == 6
    assert torch.equal(torch.get_rng_state(), state)


def test_one_eligible_slot_is_always_the_anchor_and_none_leaves_the_row_unused() -> None:
    documents = torch.tensor([[0, 0, 0], [0, 0, 0], [-1, -1, -1]])
    loss_mask = torch.tensor([[0, 0, 1], [1, 0, 0], [1, 1, 1]]).bool()
    anchors, used = sample_anchors(loss_mask, documents, 5)
    assert anchors.tolist() == [[1], [0], [0]]
    assert used.tolist() == [[True], [False], [False]]
    anchors, used = sample_anchors(loss_mask[1:], documents[1:], 5)
    assert anchors.tolist() == [[0], [0]]
    assert not used.any()
    blocks = make_blocks(loss_mask[1:].long(), loss_mask[1:], documents[1:], anchors, used, 4)
    assert not blocks.supervised.any()


# Labels ---------------------------------------------------------------------------------------------------------------


def test_a_block_is_supervised_up_to_the_first_token_that_the_target_did_not_write() -> None:
    anchors = torch.tensor([[2, 3, 5, 8]])
    blocks = make_blocks(INPUT_IDS, LOSS_MASK, DOCUMENT_IDS, anchors, torch.ones(1, 4, dtype=torch.bool), 4)
    assert blocks.labels.tolist() == [[[103, 104, 0], [104, 0, 0], [106, 0, 0], [109, 0, 0]]]
    assert blocks.supervised.long().tolist() == [[[1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]]]
    assert blocks.teacher_slots.tolist() == [[[2, 3, 4], [3, 4, 5], [5, 6, 7], [8, 9, 10]]]
    assert blocks.positions.tolist() == [[[1, 2, 3, 4], [2, 3, 4, 5], [4, 5, 6, 7], [1, 2, 3, 4]]]


def test_an_unused_block_is_not_supervised() -> None:
    used = torch.tensor([[True, False]])
    blocks = make_blocks(INPUT_IDS, LOSS_MASK, DOCUMENT_IDS, torch.tensor([[2, 2]]), used, 4)
    assert blocks.supervised.any(dim=2).tolist() == [[True, False]]
    assert blocks.labels[0, 1].tolist() == [0, 0, 0]


@settings(deadline=None, max_examples=100)
@given(
    anchored=anchored_layouts(),
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0.5, 0.9, 1.0]),
    block_size=st.integers(2, 9),
)
def test_blocks_are_those_of_a_loop(
    anchored: tuple[Layout, torch.Tensor, torch.Tensor], seed: int, share: float, block_size: int
) -> None:
    layout, anchors, used = anchored
    documents, length = layout.document_ids.tolist(), layout.document_ids.shape[1]
    loss_mask = random_bits(layout.document_ids.shape, seed, share)
    input_ids = torch.randint(1, 1000, loss_mask.shape, generator=torch.Generator().manual_seed(seed))
    blocks = make_blocks(input_ids, loss_mask, layout.document_ids, anchors, used, block_size)
    assert torch.equal(blocks.anchors, anchors)
    assert torch.equal(blocks.used, used)
    for row, block in itertools.product(range(anchors.shape[0]), range(anchors.shape[1])):
        anchor, right = int(anchors[row, block]), bool(used[row, block])
        for depth in range(1, block_size):
            slot = anchor + depth
            right = right and slot < length and documents[row][slot] == documents[row][anchor]
            right = right and bool(loss_mask[row, slot])
            assert bool(blocks.supervised[row, block, depth - 1]) is right
            assert blocks.labels[row, block, depth - 1] == (input_ids[row, slot] if right else 0)
            assert blocks.teacher_slots[row, block, depth - 1] == min(slot - 1, length - 1)
        if used[row, block]:
            first = position_in_document(documents[row], anchor)
            assert blocks.positions[row, block].tolist() == list(range(first, first + block_size))


# Masks ----------------------------------------------------------------------------------------------------------------


def sees(
    documents: list[int], anchors: list[int], query: tuple[int, int], key: int, block_size: int, kind: str, fields: Any
) -> bool:
    """Whether the position `query` (block, offset) sees a key: a slot of the row, or a block position after those."""
    block, offset = query
    window = fields["sliding_window"] if kind == "sliding_attention" else None
    causal = fields["causal"] if isinstance(fields["causal"], bool) else fields["causal"][kind]
    if key < len(documents):
        distance = anchors[block] + offset - key
        visible = key < anchors[block] and documents[key] == documents[anchors[block]]
    else:
        other, other_offset = divmod(key - len(documents), block_size)
        distance = offset - other_offset
        visible = other == block and (distance >= 0 or not causal)
    return visible and (window is None or abs(distance) < window)


@settings(deadline=None, max_examples=120)
@given(
    anchored=anchored_layouts(),
    block_size=st.integers(2, 5),
    window=st.integers(1, 7),
    causal=st.booleans() | st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_every_position_sees_exactly_what_the_rule_says(
    anchored: tuple[Layout, torch.Tensor, torch.Tensor], block_size: int, window: int, causal: Any, dtype: torch.dtype
) -> None:
    layout, anchors, used = anchored
    fields = kind_fields("fs", window, causal)
    blocks = blocks_at(layout.document_ids, anchors, used, block_size)
    masks = training_masks(make_config(**fields), layout.document_ids, blocks, dtype)
    (batch, length), count = layout.document_ids.shape, anchors.shape[1]
    assert set(masks) == {"full_attention", "sliding_attention"}
    for kind, mask in masks.items():
        assert (mask.shape, mask.dtype) == ((batch, 1, count * block_size, length + count * block_size), dtype)
        for row, documents in enumerate(layout.document_ids.tolist()):
            expected = [
                [
                    sees(documents, anchors[row].tolist(), query, key, block_size, kind, fields)
                    for key in range(length + count * block_size)
                ]
                for query in itertools.product(range(count), range(block_size))
            ]
            assert (mask[row, 0] == 0).tolist() == expected
        assert torch.equal(mask[mask != 0], mask[mask != 0].fill_(torch.finfo(dtype).min))
        assert (mask == 0).any(dim=-1).all()  # a position that saw nothing would see everything


@settings(deadline=None, max_examples=60)
@given(anchored=anchored_layouts(), block_size=st.integers(2, 5), window=st.integers(2, 7), causal=st.booleans())
def test_one_token_of_window_more_adds_the_keys_at_that_distance(
    anchored: tuple[Layout, torch.Tensor, torch.Tensor], block_size: int, window: int, causal: bool
) -> None:
    layout, anchors, used = anchored
    blocks = blocks_at(layout.document_ids, anchors, used, block_size)

    def visible(window: int) -> dict[str, torch.Tensor]:
        config = make_config(**kind_fields("fs", window, causal))
        return {
            kind: mask[:, 0] == 0
            for kind, mask in training_masks(config, layout.document_ids, blocks, torch.float32).items()
        }

    narrow, wide = visible(window - 1), visible(window)
    length = layout.document_ids.shape[1]
    offsets = torch.arange(block_size)
    queries = (anchors[:, :, None] + offsets).flatten(1)
    keys = torch.cat([torch.arange(length).expand(len(anchors), -1), queries], dim=1)
    distance = (queries[:, :, None] - keys[:, None, :]).abs()
    added = wide["sliding_attention"] & ~narrow["sliding_attention"]
    assert torch.equal(added, wide["full_attention"] & (distance == window - 1))
    assert not (narrow["sliding_attention"] & ~wide["sliding_attention"]).any()
    assert torch.equal(narrow["full_attention"], wide["full_attention"])


# What states depend on ------------------------------------------------------------------------------------------------

LAYOUT = Layout.of((2, [9, 4]), (0, [6, 5, 3]), right=1)
ANCHORS = torch.tensor([[5, 8, 10, 12, 13], [0, 3, 7, 11, 0]])
USED = torch.tensor([[True] * 5, [True] * 4 + [False]])
HEADS = {
    "full, causal": kind_fields("f", None, True),
    "full, bidirectional": kind_fields("f", None, False),
    "sliding, causal": kind_fields("s", 3, True),
    "sliding, bidirectional": kind_fields("s", 3, False),
    "window of one": kind_fields("s", 1, True),
    "two layers, causal": kind_fields("fs", 2, True),
    "three layers, bidirectional in full layers": kind_fields("sfs", 2, (False, True)),
    "three layers, bidirectional in sliding layers": kind_fields("ssf", 2, (True, False)),
}
every_head = pytest.mark.parametrize("fields", HEADS.values(), ids=list(HEADS))


def reachable(fields: dict[str, Any], documents: list[int], anchors: list[int], block_size: int) -> list[set[int]]:
    """Per block position, the slots and block positions (counted after the slots) that reach it through all layers."""
    length = len(documents)
    queries = list(itertools.product(range(len(anchors)), range(block_size)))
    found = [{length + index} for index in range(len(queries))]
    for kind in fields["layer_types"]:
        seen = [
            [
                key
                for key in range(length + len(queries))
                if sees(documents, anchors, query, key, block_size, kind, fields)
            ]
            for query in queries
        ]
        found = [
            found[index].union(*({key} if key < length else found[key - length] for key in keys))
            for index, keys in enumerate(seen)
        ]
    return found


@every_head
def test_a_state_has_a_gradient_in_what_it_may_see_and_in_nothing_else(fields: dict[str, Any]) -> None:
    head, embeddings = random_head(**fields), Embeddings()
    block_size, (batch, length) = head.config.block_size, LAYOUT.document_ids.shape
    features = torch.randn(batch, length, TAPS * HIDDEN, dtype=torch.float64, requires_grad=True)
    input_ids = torch.randint(VOCABULARY, (batch, length))
    blocks = blocks_at(LAYOUT.document_ids, ANCHORS, USED, block_size)
    states = draft_states(head, embeddings, input_ids, LAYOUT.document_ids, features, blocks)
    weights = torch.randn(states.shape[-1], dtype=torch.float64)
    for row, documents in enumerate(LAYOUT.document_ids.tolist()):
        expected = reachable(fields, documents, ANCHORS[row].tolist(), block_size)
        for block, depth in itertools.product(range(ANCHORS.shape[1]), range(1, block_size)):
            gradients = torch.autograd.grad(
                states[row, block, depth - 1] @ weights, [features, embeddings.returned], retain_graph=True
            )
            touched = torch.cat([gradient.ne(0).any(dim=2) for gradient in gradients], dim=1)
            assert set(touched[row].nonzero()[:, 0].tolist()) == expected[block * block_size + depth], (block, depth)
            assert not touched[1 - row].any()


@every_head
@torch.no_grad()
def test_nothing_at_or_after_an_anchor_changes_its_block_but_the_anchors_own_token(fields: dict[str, Any]) -> None:
    head, embeddings = random_head(**fields), Embeddings()
    shape = LAYOUT.document_ids.shape
    input_ids = torch.randint(VOCABULARY, shape)
    features = torch.randn(*shape, TAPS * HIDDEN, dtype=torch.float64)
    blocks = blocks_at(LAYOUT.document_ids, ANCHORS, USED, head.config.block_size)
    states = draft_states(head, embeddings, input_ids, LAYOUT.document_ids, features, blocks)
    for row, block in USED.nonzero().tolist():
        anchor = int(ANCHORS[row, block])
        other_ids, other_features = input_ids.clone(), features.clone()
        other_ids[row] = (input_ids[row] + 1) % VOCABULARY  # tokens before the anchor count through features alone
        other_ids[row, anchor] = input_ids[row, anchor]
        other_features[row, anchor:] += 100.0
        other = draft_states(head, embeddings, other_ids, LAYOUT.document_ids, other_features, blocks)
        assert torch.equal(other[row, block], states[row, block])
        other_ids[row, anchor] = (input_ids[row, anchor] + 1) % VOCABULARY
        other = draft_states(head, embeddings, other_ids, LAYOUT.document_ids, features, blocks)
        assert torch.equal(other[row, block, 0], states[row, block, 0]) is (fields["sliding_window"] == 1)


@every_head
@torch.no_grad()
def test_a_block_does_not_depend_on_where_the_others_are(fields: dict[str, Any]) -> None:
    head, embeddings = random_head(**fields), Embeddings()
    shape = LAYOUT.document_ids.shape
    input_ids = torch.randint(VOCABULARY, shape)
    features = torch.randn(*shape, TAPS * HIDDEN, dtype=torch.float64)

    def states_at(anchors: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        blocks = blocks_at(LAYOUT.document_ids, anchors, used, head.config.block_size)
        return draft_states(head, embeddings, input_ids, LAYOUT.document_ids, features, blocks)

    states = states_at(ANCHORS, USED)
    for block in range(ANCHORS.shape[1]):
        alone = states_at(ANCHORS[:, block : block + 1], USED[:, block : block + 1])
        assert (alone[:, 0] - states[:, block]).abs().max() < 1e-12


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    # The anchor is slot 2, so depth k stands k + 2 tokens after slot 0. Of a window of 4, depths 1 to 3 lose a slot or
    # the anchor; deeper ones see masks alone, which are all alike to the first layer. 8 tokens after slot 0 is depth 6.
    ("window", "expected"),
    [(4, [1, 2, 3]), (9, [6]), (10, [])],
)
@torch.no_grad()
def test_a_window_one_token_shorter_changes_the_rows_that_lose_something(
    window: int, expected: list[int], causal: bool
) -> None:
    document_ids, embeddings = torch.zeros(1, 6, dtype=torch.long), Embeddings()
    input_ids, features = torch.randint(VOCABULARY, (1, 6)), torch.randn(1, 6, TAPS * HIDDEN, dtype=torch.float64)
    head = random_head(block_size=7, **kind_fields("s", window, causal))
    blocks = blocks_at(document_ids, torch.tensor([[2]]), torch.ones(1, 1, dtype=torch.bool), 7)
    wide = draft_states(head, embeddings, input_ids, document_ids, features, blocks)[0, 0]
    head.config.sliding_window = window - 1
    narrow = draft_states(head, embeddings, input_ids, document_ids, features, blocks)[0, 0]
    assert [depth for depth in range(1, 7) if (wide - narrow)[depth - 1].abs().max() > 1e-9] == expected


# The branch term ------------------------------------------------------------------------------------------------------


def test_branch_states_follow_the_true_tokens_up_to_their_own_depth() -> None:
    head, embeddings = random_head(branch_rank=3), Embeddings()
    shape = LAYOUT.document_ids.shape
    input_ids = torch.randint(VOCABULARY, shape)
    blocks = blocks_at(LAYOUT.document_ids, ANCHORS, USED, head.config.block_size)
    states = torch.randn(*ANCHORS.shape, head.config.draft_depth, HIDDEN, dtype=torch.float64, requires_grad=True)
    found = branch_states(head, embeddings, input_ids, states, blocks)
    assert found is not None
    assert found.shape == (*ANCHORS.shape, head.config.draft_depth, 3)
    for row, block in USED.nonzero().tolist():
        for depth in range(head.config.draft_depth):
            (gradient,) = torch.autograd.grad(found[row, block, depth].sum(), [embeddings.returned], retain_graph=True)
            touched = gradient.ne(0).any(dim=-1).nonzero().tolist()
            assert touched == [[row, block, parent] for parent in range(depth + 1)]
            assert blocks.teacher_slots[row, block, depth] == min(int(ANCHORS[row, block]) + depth, shape[1] - 1)
    assert torch.equal(embeddings.returned[0, 0], embeddings.weight[input_ids[0, 5:8]])


def test_the_branch_term_sends_no_gradient_into_the_states_it_reads() -> None:
    head, embeddings = random_head(branch_rank=3), Embeddings()
    blocks = blocks_at(LAYOUT.document_ids, ANCHORS, USED, head.config.block_size)
    states = torch.randn(*ANCHORS.shape, head.config.draft_depth, HIDDEN, dtype=torch.float64, requires_grad=True)
    found = branch_states(head, embeddings, torch.zeros_like(LAYOUT.document_ids), states, blocks)
    assert found is not None
    found.sum().backward()
    assert states.grad is None
    assert head.branch.state_proj.weight.grad.ne(0).any()


def test_a_head_without_a_branch_term_has_no_branch_states() -> None:
    head = random_head()
    blocks = blocks_at(LAYOUT.document_ids, ANCHORS, USED, head.config.block_size)
    assert branch_states(head, Embeddings(), LAYOUT.document_ids, torch.zeros(1), blocks) is None


@pytest.mark.parametrize("given", [[0, 0, 1, 1, 0, 0, 0, 0], [0, 0, -1, -1, 0, 0, 0, 0], [5, 5, 2, 2, 5, 5, 5, 5]])
def test_a_document_is_a_run_of_equal_ids_also_where_an_id_comes_again(given: list[int]) -> None:
    padded = given[2] < 0
    document_ids, distinct = (
        torch.tensor([given]),
        torch.tensor([[0, 0, *([-1, -1] if padded else [1, 1]), 2, 2, 2, 2]]),
    )
    assert number_documents(document_ids).tolist() == distinct.tolist()
    loss_mask, input_ids = torch.ones(1, 8, dtype=torch.bool), torch.arange(8)[None]
    anchors, used = torch.tensor([[5, 6]]), torch.tensor([[True, True]])
    config = JetSpecConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=1, num_target_layers=4, block_size=3
    )
    masks = []
    for ids in (document_ids, distinct):
        blocks = make_blocks(input_ids, loss_mask, ids, anchors, used, 3)
        masks.append(training_masks(config, ids, blocks, torch.float32)["full_attention"])
    assert torch.equal(masks[0], masks[1])
    assert (masks[0][0, 0, 0, :8] == 0).tolist() == [False, False, False, False, True, False, False, False]
