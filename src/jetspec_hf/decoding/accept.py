"""Walk a verified tree with the target's own choices (arXiv 2606.18394, section 4.3).

At every node the token is the one plain decoding would emit; where a child carries it the walk goes down, else it is
the bonus token and the walk ends. Nothing but the target's own choice is ever emitted, so this is exact for any tree,
and no rule accepts more often.
"""

import math
from dataclasses import dataclass

import torch

from ..tree import TokenTree
from .writer import TokenWriter


@dataclass(frozen=True)
class HostTree:
    """What the walk needs of a tree, as lists.

    Attributes:
        token_ids (`list[list[int]]`): Per row, the token of each node.
        parents (`list[list[int]]`): Per row, the parent of each node.
        depths (`list[list[int]]`): Per row, the depth of each node.
        choices (`list[list[int]]`, *optional*): Per row, the target's greedy choice after each node, where it alone
            decides and an accelerator has computed it for all of them.
    """

    token_ids: list[list[int]]
    parents: list[list[int]]
    depths: list[list[int]]
    choices: list[list[int]] | None


def has_queue(device: torch.device) -> bool:
    """Whether the host waits when it reads a result; then all choices are computed, where a CPU computes the path's."""
    return device.type != "cpu"


def to_host(tree: TokenTree, logits: torch.Tensor, writer: TokenWriter) -> HostTree:
    """Brings a tree to the host, with the target's choices where that saves further waits for the device.

    Args:
        tree (`TokenTree`): The verified tree.
        logits (`torch.Tensor` of shape `(batch, nodes, vocab)`): The target's logits after each node.
        writer (`TokenWriter`): Says whether the largest logit alone decides.

    Returns:
        `HostTree`: The only wait for the device in a greedy step of fixed size.
    """
    tensors = [tree.token_ids, tree.parents, tree.depths]
    ahead = writer.takes_largest and has_queue(logits.device)
    if ahead:
        tensors.append(logits.argmax(dim=-1).to(tree.device))
    lists: list[list[list[int]]] = torch.stack(tensors).tolist()
    return HostTree(lists[0], lists[1], lists[2], lists[3] if ahead else None)


def accept(tree: HostTree, logits: torch.Tensor, writer: TokenWriter) -> list[list[int]]:
    """Emits the target's tokens along the tree.

    Args:
        tree (`HostTree`): The verified tree.
        logits (`torch.Tensor` of shape `(batch, nodes, vocab)`): The target's logits after each node.
        writer (`TokenWriter`): Chooses and hands out the tokens.

    Returns:
        `list[list[int]]`: Per row, the nodes whose tokens are committed now, the root first; the last emitted token is
        not among them, it is the next anchor. Empty for rows that had finished before.
    """
    children = [_children(parents, tokens) for parents, tokens in zip(tree.parents, tree.token_ids, strict=True)]
    paths: list[list[int]] = [[] for _ in children]
    nodes = [0] * len(children)
    rows = writer.active_rows
    while rows:
        for row in rows:
            paths[row].append(nodes[row])
        tokens = _next_tokens(tree, logits, writer, rows, nodes)
        descending = []
        for row, token in zip(rows, tokens, strict=True):
            child = children[row].get((nodes[row], token))
            if child is not None and (not writer.finished[row] or writer.lockstep):
                nodes[row] = child
                descending.append(row)
        if writer.done or (writer.lockstep and len(descending) < len(rows)):
            break
        rows = descending
    writer.flush()
    return paths


def _children(parents: list[int], tokens: list[int]) -> dict[tuple[int, int], int]:
    """The node below a parent with a token; the first of several that carry the same."""
    nodes = range(len(parents) - 1, -1, -1)
    return {(parents[node], tokens[node]): node for node in nodes}


def _next_tokens(
    tree: HostTree, logits: torch.Tensor, writer: TokenWriter, rows: list[int], nodes: list[int]
) -> list[int]:
    """The target's tokens after the nodes at which these rows are."""
    if not writer.takes_largest:
        return writer.write(rows, logits[rows, [nodes[row] for row in rows]])
    if tree.choices is not None:
        return writer.take(rows, [tree.choices[row][nodes[row]] for row in rows])
    return writer.take(rows, [first_largest(logits[row, nodes[row]]) for row in rows])


def first_largest(logits: torch.Tensor) -> int:
    """`int(logits.argmax())`, several times as fast on a CPU, which takes maxima of many numbers at a time.

    Args:
        logits (`torch.Tensor` of shape `(vocab,)`): Logits, of which the first stands for its equals; NaN is largest.
    """
    size = max(1, math.isqrt(logits.shape[0]))
    blocks = logits.shape[0] // size
    maxima = logits[: blocks * size].view(blocks, size).amax(dim=1)
    if blocks * size < logits.shape[0]:
        maxima = torch.cat([maxima, logits[blocks * size :].amax(dim=0, keepdim=True)])
    start = int(maxima.argmax()) * size
    return start + int(logits[start : start + size].argmax())
