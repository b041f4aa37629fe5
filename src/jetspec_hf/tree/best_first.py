"""The nodes of highest path probability by best-first search on the host, where values are read without waiting.

For children that depend on their depth and token alone. `build` finds the same nodes level by level with operations on
whole tensors, some twenty of them for each depth; a search takes one short step for each node, and asks for no depth
that it does not reach.
"""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

import torch

from .token_tree import TokenTree

Node = tuple[float, int, int, int]  # minus the path's log-probability, depth, parent, and rank among its siblings


def best_first_tree(
    anchor_ids: torch.Tensor, children: Iterator[tuple[torch.Tensor, torch.Tensor]], depth_limit: int, tree_budget: int
) -> TokenTree:
    """Return the tree of the `tree_budget` nodes with the highest path probability.

    Args:
        anchor_ids (`torch.LongTensor` of shape `(batch,)`): The roots' tokens, one row at least.
        children (`Iterator[tuple]`): Per depth, log-probabilities and tokens of every node's children, the best first,
            of shape `(batch, width)`; no log-probability is above 0 or NaN.
        depth_limit (`int`): How many depths there are, at least 1.
        tree_budget (`int`): The number of nodes besides the root, at least 1; fewer if there are fewer.

    Returns:
        [`TokenTree`]: Among equally probable nodes the shallower stands first, then the one whose parent stands first.
    """
    scores: list[list[list[float]]] = []  # by depth, row and rank
    tokens: list[list[list[int]]] = []

    def scores_at(depth: int, row: int) -> list[float]:
        if depth > len(scores):
            log_probs, token_ids = next(children)
            scores.append(log_probs.tolist())
            tokens.append(token_ids.tolist())
        return scores[depth - 1][row]

    found: tuple[list[list[int]], ...] = ([], [], [])
    log_probs = []
    for row, anchor in enumerate(anchor_ids.tolist()):
        nodes = _search(lambda depth, row=row: scores_at(depth, row), depth_limit, tree_budget)  # type: ignore[misc]
        costs, depths, parents, ranks = zip(*nodes, strict=True)
        drafted = (tokens[depth - 1][row][rank] for depth, rank in zip(depths[1:], ranks[1:], strict=True))
        for fields, of_row in zip(found, ([anchor, *drafted], parents, depths), strict=True):
            fields.append(list(of_row))
        log_probs.append([-cost for cost in costs])
    device = anchor_ids.device
    token_ids, parents_of_all, depths_of_all = (torch.tensor(values, device=device) for values in found)
    path_log_probs = torch.tensor(log_probs, dtype=torch.float32, device=device)
    return TokenTree(token_ids, parents_of_all, depths_of_all, path_log_probs, depth_limit=max(map(max, found[2])))


def _search(scores_at: Callable[[int], list[float]], depth_limit: int, tree_budget: int) -> list[Node]:
    """The nodes of one row, the root first."""
    nodes: list[Node] = [(0.0, 0, -1, 0)]
    frontier: list[Node] = [(-scores_at(1)[0], 1, 0, 0)]
    while frontier and len(nodes) <= tree_budget:
        node = cost, depth, parent, rank = heappop(frontier)
        scores = scores_at(depth)
        if rank + 1 < len(scores):
            heappush(frontier, (nodes[parent][0] - scores[rank + 1], depth, parent, rank + 1))
        if depth < depth_limit and len(nodes) < tree_budget:
            heappush(frontier, (cost - scores_at(depth + 1)[0], depth + 1, len(nodes), 0))
        nodes.append(node)
    return nodes
