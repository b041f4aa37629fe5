"""The value type: its shape rules, prefixes, and ancestors against a walk along the parents."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_hf.tree import TokenTree


def small_tree(**changes: Any) -> TokenTree:
    """7 -> (8 -> 10, 9)."""
    fields = {
        "token_ids": torch.tensor([[7, 8, 9, 10]]),
        "parents": torch.tensor([[-1, 0, 0, 1]]),
        "depths": torch.tensor([[0, 1, 1, 2]]),
        "log_probs": torch.tensor([[0.0, -0.5, -1.0, -1.5]]),
        "depth_limit": 2,
    }
    return TokenTree(**{**fields, **changes})


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_ancestors_are_what_a_walk_along_the_parents_meets(token_trees: Any, data: st.DataObject) -> None:
    tree = data.draw(token_trees(max_nodes=20))
    expected = torch.zeros(tree.batch_size, tree.num_nodes, tree.num_nodes, dtype=torch.bool)
    for row, parents in enumerate(tree.parents.tolist()):
        for node in range(tree.num_nodes):
            ancestor = node
            while ancestor >= 0:
                expected[row, node, ancestor] = True
                ancestor = parents[ancestor]
    assert torch.equal(tree.ancestors(), expected)


def test_ancestors_of_a_small_tree() -> None:
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert small_tree().ancestors().int().tolist() == [expected]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 33])
def test_every_node_of_a_chain_has_all_earlier_nodes_as_ancestors(length: int) -> None:
    tree = TokenTree.chain(torch.arange(2 * length).view(2, length))
    assert torch.equal(tree.ancestors(), torch.ones(2, length, length).tril().bool())


def test_ancestors_do_not_wait_for_the_device(no_host_sync: Any) -> None:
    tree = small_tree()
    with no_host_sync:
        tree.prefix(2).ancestors()
    assert tree.to("meta").ancestors().shape == (1, 4, 4)


def test_a_chain_is_one_path_in_order() -> None:
    tree = TokenTree.chain(torch.tensor([[5, 6, 7], [1, 2, 3]]))
    assert tree.token_ids.tolist() == [[5, 6, 7], [1, 2, 3]]
    assert tree.parents.tolist() == [[-1, 0, 1]] * 2
    assert tree.depths.tolist() == [[0, 1, 2]] * 2
    assert tree.log_probs.tolist() == [[0.0] * 3] * 2
    assert (tree.batch_size, tree.num_nodes, tree.max_depth) == (2, 3, 2)


def test_a_tree_of_the_root_only_has_one_node_of_depth_0() -> None:
    tree = TokenTree.root_only(torch.tensor([5, 6]))
    assert (tree.token_ids.tolist(), tree.parents.tolist(), tree.depths.tolist()) == ([[5], [6]], [[-1]] * 2, [[0]] * 2)
    assert (tree.batch_size, tree.num_nodes, tree.max_depth) == (2, 1, 0)
    assert tree.ancestors().tolist() == [[[True]]] * 2


def test_a_prefix_keeps_the_first_nodes_besides_the_root() -> None:
    tree = small_tree().prefix(2)
    assert tree.token_ids.tolist() == [[7, 8, 9]]
    assert tree.parents.tolist() == [[-1, 0, 0]]
    assert tree.depths.tolist() == [[0, 1, 1]]
    assert tree.log_probs.tolist() == [[0.0, -0.5, -1.0]]


def test_a_prefix_of_budget_0_is_the_root() -> None:
    tree = small_tree().prefix(0)
    assert (tree.token_ids.tolist(), tree.max_depth) == ([[7]], 0)


def test_a_prefix_beyond_the_tree_is_the_tree() -> None:
    assert small_tree().prefix(99).token_ids.tolist() == [[7, 8, 9, 10]]


def test_no_node_of_a_prefix_is_deeper_than_its_depth_limit() -> None:
    tree = TokenTree.chain(torch.arange(6)[None])
    for budget in range(8):
        prefix = tree.prefix(budget)
        assert prefix.depths.max().item() == prefix.max_depth == min(budget, 5)


def test_a_negative_prefix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`tree_budget` must be at least 0, got -1"):
        small_tree().prefix(-1)


def test_a_tree_moves_to_another_device_as_a_whole() -> None:
    tree = small_tree().to("meta")
    assert tree.device == tree.parents.device == tree.depths.device == tree.log_probs.device == torch.device("meta")
    assert tree.max_depth == 2


def test_trees_are_equal_only_to_themselves() -> None:
    tree = small_tree()
    assert tree == tree
    assert tree != small_tree()
    assert len({tree, small_tree()}) == 2


def test_a_tree_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="cannot assign"):
        small_tree().depth_limit = 3  # type: ignore[misc]


def test_a_tree_prints_as_one_line_without_reading_values(no_host_sync: Any) -> None:
    tree = small_tree()
    with no_host_sync:
        text = repr(tree)
    assert text == "TokenTree(batch_size=1, num_nodes=4, depth_limit=2, device='cpu')"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": torch.tensor([7, 8])}, r"`token_ids` must have shape \(batch, nodes\).* got \(2,\)"),
        ({"token_ids": torch.zeros(1, 0, dtype=torch.int64)}, r"at least one node, the root, got \(1, 0\)"),
        (
            {"token_ids": torch.tensor([[7, 8, 9, 10]]).int()},
            r"`token_ids` must have .* dtype torch.int64, got .* torch.int32",
        ),
        ({"parents": torch.tensor([[-1, 0, 0]])}, r"`parents` must have shape \(1, 4\).* got \(1, 3\)"),
        ({"depths": torch.zeros(1, 4)}, r"`depths` must have .* dtype torch.int64, got .* torch.float32"),
        (
            {"log_probs": torch.zeros(1, 4, dtype=torch.float64)},
            r"`log_probs` must have .* dtype torch.float32, got .* torch.float64",
        ),
        ({"log_probs": torch.zeros(1, 4, device="meta")}, r"`log_probs` must have .* device cpu.* got .* meta"),
        ({"depth_limit": -1}, r"`depth_limit` must be an int of at least 0, got -1"),
        ({"depth_limit": True}, r"`depth_limit` must be an int of at least 0, got True"),
        ({"depth_limit": torch.tensor(2)}, r"`depth_limit` must be an int of at least 0, got tensor"),
    ],
)
def test_a_tree_that_does_not_fit_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_tree(**changes)


def test_anchors_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`anchor_ids` must have shape \(batch,\), got \(1, 1\)"):
        TokenTree.root_only(torch.tensor([[1]]))
    with pytest.raises(ValueError, match=r"`token_ids` must have shape \(batch, nodes\).* got \(1, 0\)"):
        TokenTree.chain(torch.zeros(1, 0, dtype=torch.int64))
