"""Acceptance without decoding: what the tree loop accepts on answers that the target wrote greedily.

Greedy decoding writes one text whatever the head drafts, so everything is known beforehand: one forward of the target
gives the features of all positions, and what the head drafts at an anchor depends on the text before it alone. The
blocks of many anchors go through the head in one forward, as in training. The nodes of a tree are sorted, so the tree
of a smaller budget is its beginning: one tree at each anchor tells what every budget accepts there.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from typing import Any, Literal, cast

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.utils import logging

from ..configuration_jetspec import JetSpecConfig
from ..decoding.drafter import GrowingKeyValueCache
from ..decoding.output import AcceptanceStats
from ..modeling_jetspec import JetSpecDraftHead
from ..target import base_model
from ..tree import TokenTree, build_tree
from .blocks import Blocks, document_positions, make_blocks, training_masks
from .rows import RowCollator
from .target_reader import TargetReader

Budget = int | Literal["chain"]

# What one forward of the head may take: numbers of its draft logits, and block positions of one row.
_LOGITS_AT_ONCE, _POSITIONS_AT_ONCE = 2**26, 512
_NOWHERE = 2**62  # after every node of a tree


def simulate_acceptance(
    head: JetSpecDraftHead,
    reader: TargetReader,
    rows: Iterable[Mapping[str, Any]],
    tree_budget: Budget,
    tree_width: int = 16,
    draft_depth: int | None = None,
    batch_size: int = 8,
    stop_token_ids: Collection[int] | None = None,
    progress: bool = True,
) -> AcceptanceStats:
    """What greedy decoding accepts with one tree budget; see [`simulate_budgets`], whose other arguments it has."""
    found = simulate_budgets(
        head, reader, rows, [tree_budget], tree_width, draft_depth, batch_size, stop_token_ids, progress
    )
    return found[tree_budget]


@torch.no_grad()
def simulate_budgets(
    head: JetSpecDraftHead,
    reader: TargetReader,
    rows: Iterable[Mapping[str, Any]],
    tree_budgets: Sequence[Budget],
    tree_width: int = 16,
    draft_depth: int | None = None,
    batch_size: int = 8,
    stop_token_ids: Collection[int] | None = None,
    progress: bool = True,
) -> dict[Budget, AcceptanceStats]:
    """What greedy decoding with this head accepts on answers that the target wrote greedily.

    It is what the real loop accepts, step by step; in half precision up to near ties, which rounding may decide
    otherwise. An answer is a run of tokens with `loss_mask` 1. A row may have several, as a conversation or a pack of
    documents has. Answers that were written otherwise are taken as if they were the target's greedy ones.

    Args:
        head (`JetSpecDraftHead`): The head, perhaps wrapped by PEFT, DDP or `torch.compile`.
        reader ([`TargetReader`]): The target it drafts for, tapped at the head's layers.
        rows (`Iterable[Mapping]`): Rows with `input_ids`, `loss_mask` and perhaps `document_ids`.
        tree_budgets (`Sequence`): Nodes verified besides the root, or `"chain"` for the single path of the most
            probable tokens. Several trees cost hardly more than the largest.
        tree_width (`int`, defaults to 16): Children per node of a tree.
        draft_depth (`int`, *optional*): Longest path; the head's block size minus one when missing.
        batch_size (`int`, defaults to 8): Rows whose features are in memory at once.
        stop_token_ids (`Collection[int]`, *optional*): Tokens that end a generation; the EOS of the target's generation
            config when missing. An answer that ends in one had room for more; any other counts as cut by
            `max_new_tokens`, to which the last trees are cut too.
        progress (`bool`, defaults to `True`): Whether to show a progress bar.

    Returns:
        `dict`: By budget, the [`AcceptanceStats`] of decoding the answers one at a time. `accepted_lengths` has an
        entry for each answer, in the order of the rows; times and trees are missing.

    Raises:
        ValueError: If a knob is out of its range, or no row has an answer.
    """
    head = bare_head(head)
    shapes = _tree_shapes(head.config.draft_depth, tree_budgets, tree_width, draft_depth)
    stops = _eos_token_ids(reader.target) if stop_token_ids is None else stop_token_ids
    rows = list(rows)
    collate = RowCollator(pad_token_id=0)
    by_length = sorted(range(len(rows)), key=lambda row: len(rows[row]["input_ids"]))  # little padding in a batch
    replays: dict[tuple[int, int], dict[Budget, AcceptanceStats]] = {}
    bar = logging.tqdm(total=len(rows), desc="Simulating", unit="row", disable=not progress)
    with evaluating(head), evaluating(reader.target), bar:
        for start in range(0, len(rows), batch_size):
            indices = by_length[start : start + batch_size]
            batch = _Batch(head, reader, collate([rows[row] for row in indices]))
            answers = batch.answers(stops)
            trees = _drafted_trees(batch, answers, shapes.values())
            for answer in answers:
                replays[indices[answer.row], answer.first] = {
                    budget: _replay(answer, trees[shape.width], shape.budget) for budget, shape in shapes.items()
                }
            bar.update(len(indices))
    if not replays:
        raise ValueError(f"`rows` must have an answer, tokens with `loss_mask` 1, got none in {len(rows)} rows.")
    return {budget: pool_acceptance([replays[key][budget] for key in sorted(replays)]) for budget in shapes}


def pool_acceptance(parts: Sequence[AcceptanceStats]) -> AcceptanceStats:
    """The statistics of several generations together: their rows one after the other, steps and times added up.

    Args:
        parts (`Sequence[AcceptanceStats]`): The statistics of each, in order.
    """
    return AcceptanceStats(
        accepted_lengths=[lengths for part in parts for lengths in part.accepted_lengths],
        steps=sum(part.steps for part in parts),
        tree_sizes=[size for part in parts for size in part.tree_sizes],
        decisions=[decision for part in parts for decision in part.decisions],
        reached_by_depth=_column_sums(part.reached_by_depth for part in parts),
        accepted_by_depth=_column_sums(part.accepted_by_depth for part in parts),
        prefill_seconds=sum(part.prefill_seconds for part in parts),
        step_seconds=[seconds for part in parts for seconds in part.step_seconds],
    )


def _column_sums(rows: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def bare_head(head: nn.Module) -> JetSpecDraftHead:
    """The head itself where DDP, `torch.compile` or a PEFT model wraps it."""
    return cast(JetSpecDraftHead, base_model(extract_model_from_parallel(head, keep_torch_compile=False)))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model in evaluation mode, and afterwards every module back into the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@dataclass(frozen=True)
class _Shape:
    """The shape of one budget's trees."""

    budget: int
    width: int
    depth: int


def _tree_shapes(longest: int, budgets: Sequence[Budget], width: int, draft_depth: int | None) -> dict[Budget, _Shape]:
    depth = longest if draft_depth is None else draft_depth
    if not 1 <= depth <= longest:
        raise ValueError(f"`draft_depth` must be from 1 to the head's block size minus one, {longest}, got {depth}.")
    if width < 1:
        raise ValueError(f"`tree_width` must be at least 1, got {width}: it counts the children a node may have.")
    shapes: dict[Budget, _Shape] = {}
    for budget in budgets:
        if budget == "chain":
            shapes[budget] = _Shape(depth, 1, depth)
        elif isinstance(budget, int) and budget >= 0:
            shapes[budget] = _Shape(budget, width, depth)
        else:
            raise ValueError(f'`tree_budget` must be "chain" or an integer of at least 0, got {budget!r}.')
    if not shapes:
        raise ValueError("`tree_budgets` must have a budget, got none.")
    return shapes


def _eos_token_ids(target: PreTrainedModel) -> list[int]:
    found = getattr(target.generation_config, "eos_token_id", None)
    return [] if found is None else list(found) if isinstance(found, Sequence) else [found]


@dataclass(frozen=True)
class _Answer:
    """A run of tokens that the target wrote, from slot `first` to slot `last` of a row.

    `stopped` says that the target ended it itself, so that there was room for more.
    """

    row: int
    first: int
    last: int
    stopped: bool

    def depth_at(self, slot: int, draft_depth: int) -> int:
        """The depth of the tree that is drafted when `slot` is the anchor: the last token is always the target's."""
        return draft_depth if self.stopped else min(draft_depth, self.last - slot - 1)


@dataclass(frozen=True)
class _DraftedTree:
    """What a tree holds of the text that really follows.

    Attributes:
        size (`int`): Nodes besides the root.
        true_nodes (`list[int]`): Per depth, the node reached along the true tokens; `_NOWHERE` if there is none.
        first_nodes (`list[int]`): Per depth, the first node of that depth; `_NOWHERE` if there is none.
    """

    size: int = 0
    true_nodes: list[int] = field(default_factory=list)
    first_nodes: list[int] = field(default_factory=list)

    @classmethod
    def of_batch(cls, trees: TokenTree, true_ids: torch.Tensor) -> "list[_DraftedTree]":
        """Walks every tree down its row of `true_ids`, of shape `(batch, depth)`, -1 where the text has ended."""
        nodes = torch.arange(trees.num_nodes, device=trees.device)
        node = torch.zeros_like(trees.token_ids[:, 0])
        true_nodes, first_nodes = [], []
        for depth, token_ids in enumerate(true_ids.unbind(1), start=1):
            follows = (trees.parents == node[:, None]) & (trees.token_ids == token_ids[:, None])
            node = torch.where(follows, nodes, _NOWHERE).amin(dim=1)
            true_nodes.append(node)
            first_nodes.append(torch.where(trees.depths == depth, nodes, _NOWHERE).amin(dim=1))
        rows = zip(torch.stack(true_nodes, dim=1).tolist(), torch.stack(first_nodes, dim=1).tolist(), strict=True)
        return [cls(trees.num_nodes - 1, true, first) for true, first in rows]

    def within(self, budget: int) -> tuple[int, int, int]:
        """Of the tree of the first `budget` nodes: its size, its deepest depth, and how many true tokens it holds."""
        deepest, held = (sum(node <= budget for node in nodes) for nodes in (self.first_nodes, self.true_nodes))
        return min(self.size, budget), deepest, held


_ROOT_ONLY = _DraftedTree()
# By row and slot of the anchor, the largest tree drafted there.
_Trees = dict[tuple[int, int], _DraftedTree]


class _Batch:
    """A batch of rows, and a `DraftState` over several anchors of every row at once.

    Args:
        head (`JetSpecDraftHead`): The head.
        reader ([`TargetReader`]): The target.
        rows (`dict[str, torch.Tensor]`): What [`RowCollator`] returns.
    """

    def __init__(self, head: JetSpecDraftHead, reader: TargetReader, rows: Mapping[str, torch.Tensor]) -> None:
        self.head = head
        self._reader = reader
        self._input_ids, self._loss_mask, self._document_ids = (
            rows[name].to(head.device) for name in ("input_ids", "loss_mask", "document_ids")
        )
        self._new_features = reader.read(self._input_ids, self._document_ids).features.to(head.device, head.dtype)
        self._cache = GrowingKeyValueCache()
        self._anchors, self._used = self._input_ids[:, :0], self._loss_mask[:, :0]
        self.anchor_positions = self._anchors.flatten()
        self.draft_depth = 0
        self.block_states: torch.Tensor | None = None
        self.branch_tables: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self._input_ids.shape[0]

    def blocks_at_once(self, depth: int) -> int:
        """Blocks of every row that one forward of the head may take."""
        config = cast(JetSpecConfig, self.head.config)
        drafted = config.draft_vocab_size or config.vocab_size
        blocks = min(_LOGITS_AT_ONCE // (depth * drafted * self.num_rows), _POSITIONS_AT_ONCE // (depth + 1))
        return max(1, blocks)

    def answers(self, stop_token_ids: Collection[int]) -> list[_Answer]:
        """The answers of these rows."""
        columns = (tensor.tolist() for tensor in (self._input_ids, self._loss_mask, self._document_ids))
        found = []
        for row, (token_ids, written, documents) in enumerate(zip(*columns, strict=True)):
            runs = groupby(range(len(token_ids)), key=list(zip(written, documents, strict=True)).__getitem__)
            for (is_answer, _), run in runs:
                slots = list(run)
                if is_answer:
                    found.append(_Answer(row, slots[0], slots[-1], token_ids[slots[-1]] in stop_token_ids))
        return found

    def draft(self, slots: torch.Tensor, depth: int, budgets: Mapping[int, int]) -> dict[int, list[_DraftedTree]]:
        """Drafts a block at several anchors of every row and builds its trees, as `decoding.drafter.Drafter` does.

        Args:
            slots (`torch.LongTensor` of shape `(rows, blocks)`): Slots of the anchors, -1 for none.
            depth (`int`): Most tokens that can still be accepted.
            budgets (`Mapping[int, int]`): By width, the nodes of its trees besides the root.

        Returns:
            `dict[int, list]`: By width, the trees of `slots.flatten()`.
        """
        head = self.head
        self._anchors, self._used = slots.clamp(min=0), slots >= 0
        blocks = self._blocks(depth + 1)
        self.anchor_positions, self.draft_depth = blocks.positions[:, :, 0].flatten(), depth
        anchor_ids = self._input_ids.gather(1, self._anchors).flatten()
        draft_logits = head.draft_logits(anchor_ids, self)[:, :depth].to(anchor_ids.device)
        true_ids = torch.where(blocks.supervised, blocks.labels, -1).flatten(0, 1)
        return {
            width: _DraftedTree.of_batch(
                build_tree(
                    anchor_ids,
                    draft_logits,
                    tree_budget=budget,
                    tree_width=width,
                    branch=head.branch_term(self),
                    token_ids=head.draft_token_ids,
                ),
                true_ids,
            )
            for width, budget in budgets.items()
        }

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's own embedding of these tokens."""
        return self._reader.embed(token_ids)

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's own `lm_head` over these states: its rows of the draft vocabulary, where there is one."""
        return self._reader.draft_logits(hidden_states, self.head.draft_token_ids)

    def run_block(self, head: JetSpecDraftHead, noise_embeds: torch.Tensor) -> torch.Tensor:
        """`head.forward` over the blocks of all anchors, those of a row behind each other; they leave no trace."""
        (rows, count), block_size = self._anchors.shape, noise_embeds.shape[1]
        blocks = self._blocks(block_size)
        features = self._new_features
        self._new_features = features.new_empty(rows, 0, features.shape[2])  # the first forward projects them
        positions = document_positions(self._document_ids)[:, : features.shape[1]]
        states: torch.Tensor = head(
            noise_embeds=noise_embeds.reshape(rows, count * block_size, -1),
            context_hidden_states=features,
            attention_mask=training_masks(cast(JetSpecConfig, head.config), self._document_ids, blocks, head.dtype),
            position_ids=torch.cat([positions, blocks.positions.flatten(1)], dim=1),
            cache=self._cache,
        ).last_hidden_state
        self._cache.crop(-count * block_size)
        self.block_states = states.view(rows * count, block_size, -1)
        return self.block_states

    def _blocks(self, block_size: int) -> Blocks:
        return make_blocks(self._input_ids, self._loss_mask, self._document_ids, self._anchors, self._used, block_size)


def _drafted_trees(batch: _Batch, answers: Sequence[_Answer], shapes: Collection[_Shape]) -> dict[int, _Trees]:
    """By width, the tree of the largest budget at every anchor; no entry where the root alone is verified."""
    budgets: dict[int, int] = {}
    for shape in shapes:
        budgets[shape.width] = max(shape.budget, budgets.get(shape.width, 0))
    found: dict[int, _Trees] = {width: {} for width in budgets}
    slots_by_depth: dict[int, list[list[int]]] = {}
    for answer in answers:
        for slot in range(answer.first, answer.last):
            depth = answer.depth_at(slot, next(iter(shapes)).depth)
            slots_by_depth.setdefault(depth, [[] for _ in range(batch.num_rows)])[answer.row].append(slot)
    for depth, slots_by_row in slots_by_depth.items():
        if depth < 1:
            continue
        slots = pad_sequence([torch.tensor(row, dtype=torch.long) for row in slots_by_row], True, -1)
        for part in slots.split(batch.blocks_at_once(depth), dim=1):
            anchors = [(row, slot) for row, slots_of_row in enumerate(part.tolist()) for slot in slots_of_row]
            for width, trees in batch.draft(part.to(batch.head.device), depth, budgets).items():
                found[width].update(zip(anchors, trees, strict=True))
    return found


def _replay(answer: _Answer, trees: _Trees, budget: int) -> AcceptanceStats:
    """Decodes one answer with the trees of one budget: the accepted nodes and the bonus token, until its last token."""
    stats = AcceptanceStats.of_batch(1)
    slot = answer.first
    while slot < answer.last:
        size, deepest, held = trees.get((answer.row, slot), _ROOT_ONLY).within(budget)
        accepted = min(held, answer.last - slot - 1)
        stats.steps += 1
        stats.tree_sizes.append(size)
        stats.accepted_lengths[0].append(accepted + 1)
        for counts, nodes in ((stats.reached_by_depth, deepest), (stats.accepted_by_depth, accepted)):
            counts.extend([0] * (deepest - len(counts)))
            for depth in range(nodes):
                counts[depth] += 1
        slot += accepted + 1
    return stats
