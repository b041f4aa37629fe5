"""Token trees: the candidates of one step, as a value, and what the target needs to verify them in one forward.

Paper (arXiv 2606.18394): the draft tree and its verification. This package needs torch alone and imports nothing else
of the library.
"""

from .build import BranchTerm, build_tree
from .mask import tree_attention_mask, tree_position_ids
from .picture import TreePicture, draw_tree
from .token_tree import TokenTree

__all__ = [
    "BranchTerm",
    "TokenTree",
    "TreePicture",
    "build_tree",
    "draw_tree",
    "tree_attention_mask",
    "tree_position_ids",
]
