"""Draft logits to a token tree: the nodes of highest path probability, exactly.

Paper (arXiv 2606.18394): building the draft tree under a budget. The official builder takes a popped node's whole set
of siblings; this one takes the optimum. Everything is batched and runs on the device, which the host never waits for;
on the CPU, where there is nothing to wait for, depths and paths that cannot have one of the best nodes are left out.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from .best_first import best_first_tree
from .token_tree import TokenTree


class BranchTerm(Protocol):
    """What a path adds to the draft logits of its children."""

    def __call__(
        self, depth: int, parent_ids: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores the candidates of one depth under every kept path.

        Args:
            depth (`int`): Row of the draft logits, from 0.
            parent_ids (`torch.LongTensor` of shape `(batch, paths)`): The last token of each path.
            states (`torch.Tensor` of shape `(batch, paths, state)`, *optional*): What this returned for the path's
                parent; `None` at the root.
            columns (`torch.LongTensor` of shape `(batch, candidates)`): Columns of the draft logits.

        Returns:
            `tuple`: What to add to each candidate's logit, of shape `(batch, paths, candidates)`, and the paths'
            states, handed on to their children; `None` if it keeps none.
        """


_BLOCK = 16  # logits of which only the largest is compared at first
_FEWEST_BLOCKS = 4  # for each token wanted; fewer are sorted faster than they are divided into blocks
_CACHED = 2**19  # logits that a processor's cache may hold


@torch.no_grad()
def build_tree(
    anchor_ids: torch.Tensor,
    draft_logits: torch.Tensor,
    *,
    tree_budget: int,
    tree_width: int,
    temperature: float = 1.0,
    branch: BranchTerm | None = None,
    branch_candidates: int = 256,
    token_ids: torch.Tensor | None = None,
) -> TokenTree:
    """Return the tree of the `tree_budget` nodes with the highest path probability under the draft.

    A path's log-probability is the sum of its nodes' scores. Without `branch` a node's score depends on its depth `d`
    and token `v` alone, `log_softmax(draft_logits[d] / temperature)[v]`, and every node's children are the `tree_width`
    best tokens of their depth. With `branch` it depends on the parent's token `u` too: `log_softmax((draft_logits[d] +
    branch(u, .)) / temperature)[v]`, normalised over the `branch_candidates` best tokens of the depth, of which the
    `tree_width` best under `u` are its children.

    No heap is needed. A path's probability never rises along it, so a node at depth `d` has `d - 1` ancestors at least
    as good, and only the `tree_budget - d + 1` best nodes of a depth, all children of such nodes, can be among the
    `tree_budget` best of all depths.

    Args:
        anchor_ids (`torch.LongTensor` of shape `(batch,)`):
            The last committed token of each row, the root of its tree.
        draft_logits (`torch.FloatTensor` of shape `(batch, depth, vocabulary)`):
            The draft head's logits of the tokens 1, 2, ... after the anchor, in any floating dtype. A logit of `-inf`
            forbids its token: a node of probability 0 stands after all others. A depth whose logits hold a NaN counts
            as forbidden altogether.
        tree_budget (`int`):
            The number of nodes besides the root, at least 0. Every tree has this many, or all there are if there are
            fewer.
        tree_width (`int`):
            The number of children a node may have, at least 1. More than the candidates there are does no harm.
        temperature (`float`, *optional*, defaults to 1.0):
            What to divide the logits by. Pass the temperature that the target samples with, and 1.0 for greedy
            decoding.
        branch ([`BranchTerm`], *optional*):
            Tells what a path adds to the logits of its children. It is called once for each depth.
        branch_candidates (`int`, *optional*, defaults to 256):
            The number of best tokens of a depth, by `draft_logits`, that `branch` chooses among. Unused without
            `branch`.
        token_ids (`torch.LongTensor` of shape `(vocabulary,)`, *optional*):
            The token of each column of `draft_logits`, if the head drafts over a part of the target's vocabulary.

    Returns:
        [`TokenTree`]: `1 + min(tree_budget, size of the whole tree)` nodes in each row.

    Raises:
        ValueError: A shape, dtype or device does not fit, `tree_budget` is negative, `tree_width` or
            `branch_candidates` is below 1, one of them is not an `int`, `temperature` is not positive and finite, or
            `branch` returns another shape.
    """
    _check_tensors(anchor_ids, draft_logits, token_ids)
    _check_at_least("tree_budget", tree_budget, 0, "it counts the nodes besides the root.")
    _check_at_least("tree_width", tree_width, 1, "it counts the children a node may have.")
    _check_at_least("branch_candidates", branch_candidates, 1, "it counts the tokens that `branch` chooses among.")
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"`temperature` must be positive and finite, got {temperature}: for greedy decoding leave it at 1.0."
        )
    depth_limit = min(draft_logits.shape[1], tree_budget)
    if depth_limit == 0:
        return TokenTree.root_only(anchor_ids)

    draft_logits = draft_logits[:, :depth_limit]
    width = min(tree_width, tree_budget, draft_logits.shape[2])
    if branch is None:
        by_depth = _children_by_depth(draft_logits, width, temperature, token_ids)
        if _host_may_look(anchor_ids) and len(anchor_ids):
            return best_first_tree(anchor_ids, by_depth, depth_limit, tree_budget)
        children = _the_same_for_all_paths(by_depth)
    else:
        children = _children_by_path(draft_logits, width, temperature, token_ids, branch, branch_candidates)

    levels = [_Level.root(anchor_ids)]
    paths, best = levels[0], levels[0].log_probs[:, :0]
    for depth in range(depth_limit):
        levels.append(_best_children(paths, children(depth, paths), limit=tree_budget - depth))
        paths = levels[-1]
        if _host_may_look(anchor_ids):
            best = torch.cat([best, paths.log_probs], dim=1)
            best = best.topk(min(tree_budget, best.shape[1]), dim=1).values
            if best.shape[1] == tree_budget:
                paths = paths.better_than(best[:, -1:])
                if paths.log_probs.shape[1] == 0:
                    break
    return _best_nodes(levels, tree_budget)


def _host_may_look(tensor: torch.Tensor) -> bool:
    """Whether reading a value costs no wait: then what cannot lead to one of the best nodes is not scored."""
    return tensor.device.type == "cpu"


@dataclass(frozen=True, eq=False)
class _Level:
    """The paths kept at one depth, the best first: tensors of shape `(batch, paths)`; `parents` counts within the level
    above. `states`, of shape `(batch, paths, state)`, are those of the paths' parents under a branch term.
    """  # noqa: D205  # one sentence is too long for a line

    token_ids: torch.Tensor
    parents: torch.Tensor
    log_probs: torch.Tensor
    states: torch.Tensor | None = None

    @classmethod
    def root(cls, anchor_ids: torch.Tensor) -> "_Level":
        """Return the level of the empty path."""
        token_ids = anchor_ids[:, None]
        return cls(token_ids, torch.zeros_like(token_ids), torch.zeros_like(token_ids, dtype=torch.float32))

    def better_than(self, log_probs: torch.Tensor) -> "_Level":
        """Return the best paths alone, as many as are more probable than `log_probs` in any row."""
        counts = (self.log_probs > log_probs).sum(dim=1)
        count = int(counts.amax()) if len(counts) else 0
        states = None if self.states is None else self.states[:, :count]
        return _Level(self.token_ids[:, :count], self.parents[:, :count], self.log_probs[:, :count], states)


@dataclass(frozen=True, eq=False)
class _Children:
    """The children that paths may have: tensors of shape `(batch, paths, width)`, or `(batch, 1, width)` if all paths
    have the same. No log-probability is above 0 or NaN. `states` are those of the paths.
    """  # noqa: D205  # one sentence is too long for a line

    log_probs: torch.Tensor
    token_ids: torch.Tensor
    states: torch.Tensor | None = None


def _best_children(level: _Level, children: _Children, limit: int) -> _Level:
    """Keep the `limit` best paths of one step more."""
    path_log_probs = level.log_probs[:, :, None] + children.log_probs
    paths, width = path_log_probs.shape[1:]
    best, chosen = _largest(path_log_probs.flatten(1), limit)
    token_ids = children.token_ids.expand(-1, paths, -1).flatten(1).gather(1, chosen)
    parents = chosen // width
    states = children.states
    if states is not None:
        states = states.gather(1, parents[:, :, None].expand(-1, -1, states.shape[2]))
    return _Level(token_ids, parents, best, states)


def _best_nodes(levels: list[_Level], tree_budget: int) -> TokenTree:
    """Keep the root and the `tree_budget` best nodes of all levels, and renumber their parents."""
    above_each, depths, start = [torch.full_like(levels[0].parents, -1)], [torch.zeros_like(levels[0].parents)], 0
    for depth, (above, level) in enumerate(pairwise(levels), start=1):
        above_each.append(level.parents + start)
        depths.append(torch.full_like(level.parents, depth))
        start += above.parents.shape[1]
    parents = torch.cat(above_each, dim=1)

    # Among equals the shallower stands first, hence a parent before its children.
    log_probs, order = _largest(torch.cat([level.log_probs for level in levels], dim=1), tree_budget + 1)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(parents).scatter_(1, order, places)
    parent = parents.gather(1, order)
    return TokenTree(
        token_ids=torch.cat([level.token_ids for level in levels], dim=1).gather(1, order),
        parents=torch.where(parent < 0, -1, rank.gather(1, parent.clamp(min=0))),
        depths=torch.cat(depths, dim=1).gather(1, order),
        log_probs=log_probs,
        depth_limit=len(levels) - 1,
    )


def _largest(log_probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest of each row, or all there are, sorted, and their places.

    Among equals the one of the earlier place stands first. With what `topk` happens to choose, a tree would not be the
    prefix of a larger one, from which other budgets are simulated. Places are the low halves of numbers whose high
    halves, the bits of a float without its sign, grow as a log-probability falls.
    """
    places = torch.arange(log_probs.shape[1], device=log_probs.device)
    keys = log_probs.abs().view(torch.int32).long().mul_(2**32).add_(places)
    chosen = keys.topk(min(count, log_probs.shape[1]), dim=1, largest=False).values.bitwise_and_(2**32 - 1)
    return log_probs.gather(1, chosen), chosen


def _children_by_depth(
    draft_logits: torch.Tensor, width: int, temperature: float, token_ids: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield log-probabilities and tokens of each depth's best children, of shape `(batch, width)`."""
    for logits in _few_depths_at_once(draft_logits):
        best, columns = _best_tokens(logits, width)
        named = columns if token_ids is None else token_ids[columns]
        log_probs = _log_probs_of_best(best, logits, temperature)
        yield from zip(log_probs.unbind(1), named.unbind(1), strict=True)


def _the_same_for_all_paths(
    by_depth: Iterator[tuple[torch.Tensor, torch.Tensor]],
) -> Callable[[int, _Level], _Children]:
    """Score children by their depth and token."""

    def children(depth: int, level: _Level) -> _Children:
        log_probs, token_ids = next(by_depth)
        return _Children(log_probs[:, None], token_ids[:, None])

    return children


def _children_by_path(
    draft_logits: torch.Tensor,
    width: int,
    temperature: float,
    token_ids: torch.Tensor | None,
    branch: BranchTerm,
    branch_candidates: int,
) -> Callable[[int, _Level], _Children]:
    """Score children by their depth, token and the path that leads to them."""
    count = min(branch_candidates, draft_logits.shape[2])

    def by_depth() -> Iterator[tuple[torch.Tensor, ...]]:
        for some_logits in _few_depths_at_once(draft_logits):
            best, columns = _best_tokens(some_logits, count)
            named = columns if token_ids is None else token_ids[columns]
            yield from zip(best.split(1, dim=1), columns.unbind(1), named.split(1, dim=1), strict=True)

    candidates = by_depth()

    def children(depth: int, level: _Level) -> _Children:
        logits, columns, named = next(candidates)
        extra, states = branch(depth, level.token_ids, level.states, columns)
        expected = (*level.token_ids.shape, count)
        if extra.shape != expected:
            raise ValueError(
                f"`branch` must return scores of shape (batch, paths, candidates), here {expected}, got "
                f"{tuple(extra.shape)}: return what each path adds to the logit of each candidate."
            )
        scores = logits + extra
        best, chosen = scores.topk(min(width, count), dim=2)
        log_probs = _log_probs_of_best(best, scores, temperature)
        return _Children(log_probs, named.expand(expected).gather(2, chosen), states)

    return children


def _few_depths_at_once(draft_logits: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the logits in float32 at least, on the CPU no more depths at once than a processor's cache may hold."""
    vocabulary = draft_logits.shape[0] * draft_logits.shape[2]
    depths = max(1, _CACHED // max(1, vocabulary)) if draft_logits.device.type == "cpu" else draft_logits.shape[1]
    return (_at_least_float32(logits) for logits in draft_logits.split(depths, dim=1))


def _log_probs_of_best(best: torch.Tensor, scores: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return `log_softmax(scores / temperature)` at the entries `best`, which are the largest ones, sorted.

    With the largest known, no full log-softmax is stored. Nothing exceeds 0, since the sum below holds the largest's
    own 1. What has no probability, a forbidden entry or all of a row that holds a NaN or no finite number, gets `-inf`.
    """
    peak = best[..., :1]
    # powers of 2 are computed faster than those of e
    powers = (scores - peak).mul_(math.log2(math.e) / temperature).exp2_()
    log_sum = powers.sum(dim=-1, keepdim=True).log_()
    return ((best - peak) / temperature - log_sum).nan_to_num_(nan=-math.inf, neginf=-math.inf).float()


def _at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _best_tokens(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest logits of the last dimension, sorted, and where they are.

    This is `topk` made fast for a large vocabulary. The `count` largest lie in the `count` blocks with the largest
    maxima, themselves found in this way, so only those blocks are sorted, and what is left over after the last whole
    block. Logit `i` belongs to block `i % blocks`: maxima of such blocks are taken many at a time.
    """
    vocabulary = logits.shape[-1]
    blocks = vocabulary // _BLOCK
    if blocks < _FEWEST_BLOCKS * count:
        return logits.topk(count)
    whole = blocks * _BLOCK
    maxima = logits[..., :whole].unflatten(-1, (_BLOCK, blocks)).amax(dim=-2)
    _, block = _best_tokens(maxima, count)
    columns = (block[..., None] + torch.arange(0, whole, blocks, device=logits.device)).flatten(-2)
    if whole < vocabulary:
        rest = torch.arange(whole, vocabulary, device=logits.device).expand(*logits.shape[:-1], -1)
        columns = torch.cat([columns, rest], dim=-1)
    best, chosen = logits.gather(-1, columns).topk(count)
    return best, columns.gather(-1, chosen)


def _check_tensors(anchor_ids: torch.Tensor, draft_logits: torch.Tensor, token_ids: torch.Tensor | None) -> None:
    if anchor_ids.ndim != 1 or anchor_ids.dtype != torch.int64:
        raise ValueError(
            f"`anchor_ids` must be a torch.LongTensor of shape (batch,), got {anchor_ids.dtype} of shape "
            f"{tuple(anchor_ids.shape)}: pass the last committed token of each row."
        )
    if draft_logits.ndim != 3 or not draft_logits.is_floating_point() or draft_logits.shape[2] == 0:
        raise ValueError(
            "`draft_logits` must be a floating tensor of shape (batch, depth, vocabulary), the vocabulary at least 1, "
            f"got {draft_logits.dtype} of shape {tuple(draft_logits.shape)}: pass the draft head's logits of the "
            "tokens after the anchor."
        )
    if anchor_ids.shape[0] != draft_logits.shape[0] or anchor_ids.device != draft_logits.device:
        raise ValueError(
            "`anchor_ids` and `draft_logits` must have the same batch size and device, got "
            f"{anchor_ids.shape[0]} on {anchor_ids.device} and {draft_logits.shape[0]} on {draft_logits.device}: "
            "pass one anchor for each row, on the device of the logits."
        )
    if token_ids is None:
        return
    fits = token_ids.shape == draft_logits.shape[2:] and token_ids.device == draft_logits.device
    if not fits or token_ids.dtype != torch.int64:
        raise ValueError(
            f"`token_ids` must be a torch.LongTensor of shape (vocabulary,), here ({draft_logits.shape[2]},), on the "
            f"device of `draft_logits`, got {token_ids.dtype} of shape {tuple(token_ids.shape)} on {token_ids.device}: "
            "pass the token of each column of the logits."
        )


def _check_at_least(name: str, value: int, least: int, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` must be an int of at least {least}, got {value!r}: {meaning}")
