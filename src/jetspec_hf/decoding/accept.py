"""Walk a verified tree with the target's own choices (arXiv 2606.18394, section 4.3).

At every node the token is the one plain decoding would emit; where a child carries it the walk goes down, else it is
the bonus token and the walk ends. Nothing but the target's own choice is ever emitted, so this is exact for any tree,
and no rule accepts more often.
"""

import torch

from ..tree import TokenTree
from .writer import TokenWriter


def accept(tree: TokenTree, logits: torch.Tensor, writer: TokenWriter) -> list[list[int]]:
    """Emits the target's tokens along the tree.

    Args:
        tree (`TokenTree`): The verified tree.
        logits (`torch.Tensor` of shape `(batch, nodes, vocab)`): The target's logits after each node.
        writer (`TokenWriter`): Chooses and hands out the tokens.

    Returns:
        `list[list[int]]`: Per row, the nodes whose tokens are committed now, the root first; the last emitted token is
        not among them, it is the next anchor. Empty for rows that had finished before.
    """
    children = [
        {
            (parent, token): node
            for node, (parent, token) in reversed(list(enumerate(zip(parents, tokens, strict=True))))
        }
        for parents, tokens in zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
    ]
    paths: list[list[int]] = [[] for _ in range(tree.batch_size)]
    nodes = [0] * tree.batch_size
    rows = writer.active_rows
    while rows:
        for row in rows:
            paths[row].append(nodes[row])
        tokens = writer.write(rows, logits[rows, [nodes[row] for row in rows]])
        descending = []
        for row, token in zip(rows, tokens, strict=True):
            child = children[row].get((nodes[row], token))
            if child is not None and (not writer.finished[row] or writer.lockstep):
                nodes[row] = child
                descending.append(row)
        if writer.done or (writer.lockstep and len(descending) < len(rows)):
            break
        rows = descending
    return paths
