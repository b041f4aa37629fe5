"""Draft a token tree: the head's own context, its cache, and the knobs that shape the tree.

Implements sections 3 and 4.1 of arXiv 2606.18394. The head sees the fused features of the committed tokens, strictly
before the anchor. They are projected to keys and values once; the block's own keys and values are dropped after every
draft.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import Cache, GenerationConfig, PreTrainedModel

from ..modeling_jetspec import DRAFTING_DEFAULTS, JetSpecDraftHead
from ..target import OutputRows
from ..tree import TokenTree, build_tree
from .step_costs import StepCosts

_CONTEXT_NAME = "jetspec_context"  # the attribute of the target's cache that holds the `DraftContext`


MOST_NODES = 4096  # masks of that many rows and columns are made before a node is drafted


@dataclass(frozen=True)
class DraftingKnobs:
    """The shape of the trees of one generation.

    Args:
        tree_budget (`int` or `"auto"`): Nodes verified besides the root.
        tree_width (`int`): Children per node.
        draft_depth (`int`): Longest path, at most the head's block size minus one.
        temperature (`float`): Divides the draft logits; that of the sampling, 1 for greedy decoding.
        step_costs (`StepCosts`, *optional*): What the automatic budget takes a step to cost, instead of the clock.
    """

    tree_budget: int | Literal["auto"]
    tree_width: int
    draft_depth: int
    temperature: float
    step_costs: StepCosts | None = None

    @classmethod
    def resolve(cls, head: JetSpecDraftHead, target: PreTrainedModel, call: GenerationConfig) -> "DraftingKnobs":
        """The knobs in force: the call's, else the target's generation config's, else the head's, else the defaults.

        Args:
            head (`JetSpecDraftHead`): The head.
            target (`PreTrainedModel`): The model to be sped up.
            call (`GenerationConfig`): What `generate` was called with.

        Returns:
            `DraftingKnobs`: Validated.

        Raises:
            ValueError: If a knob is out of its range; the message names it.
        """
        values: dict[str, Any] = {}
        for name, default in DRAFTING_DEFAULTS.items():
            places = (getattr(place, name, None) for place in (call, target.generation_config, head.generation_config))
            values[name] = next((value for value in places if value is not None), default)
        longest = head.config.block_size - 1
        budget, width, depth = values["tree_budget"], values["tree_width"], values["draft_depth"]
        depth = longest if depth is None else depth
        if budget != "auto" and (not _is_integer(budget) or not 0 <= budget <= MOST_NODES):
            raise ValueError(f'`tree_budget` must be "auto" or an integer from 0 to {MOST_NODES}, got {budget!r}.')
        if not _is_integer(width) or width < 1:
            raise ValueError(f"`tree_width` must be an integer of at least 1, got {width!r}.")
        if not _is_integer(depth) or not 1 <= depth <= longest:
            raise ValueError(
                f"`draft_depth` must be an integer from 1 to the head's block size minus one, {longest}, got {depth!r}."
            )
        temperature = call.temperature if call.do_sample and call.temperature else 1.0
        costs = None if values["step_costs"] is None else StepCosts.from_dict(values["step_costs"])
        return cls(budget, width, depth, float(temperature), costs)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class CommittedTokens:
    """What the prefill or a commit added to the prefix.

    Args:
        features (`torch.Tensor` of shape `(batch, new, taps * hidden)`): Tapped states.
        positions (`torch.LongTensor` of shape `(batch, new)`): Absolute positions in the unpadded sequences.
        visible (`torch.BoolTensor` of shape `(batch, new)`, *optional*): `False` where a row has no token; `None`: all
            tokens.
        length (`int`): Slots of the target's cache, these included.
    """

    features: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor | None
    length: int


class GrowingKeyValueCache:
    """Keys and values of the head's layers in buffers that grow by doubling, so that a step copies only what is new."""

    def __init__(self) -> None:
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._lengths: dict[int, int] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of positions this layer holds."""
        return self._lengths.get(layer_idx, 0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values of shape `(batch, heads, new, head_dim)` and returns views of all of them."""
        start = self.get_seq_length(layer_idx)
        end = self._lengths[layer_idx] = start + key_states.shape[2]
        views = []
        for buffers, states in ((self._keys, key_states), (self._values, value_states)):
            buffer = buffers.get(layer_idx)
            frozen = buffer is not None and buffer.is_inference() and not torch.is_inference_mode_enabled()
            if buffer is None or buffer.shape[2] < end or frozen:
                grown = states.new_empty((*states.shape[:2], max(64, 2 * end), states.shape[3]))
                if buffer is not None:
                    grown[:, :, :start] = buffer[:, :, :start]
                buffer = buffers[layer_idx] = grown
            buffer[:, :, start:end] = states
            views.append(buffer[:, :, :end])
        return views[0], views[1]

    def crop(self, count: int) -> None:
        """Drops the last `-count` positions of every layer."""
        for layer_idx in self._lengths:
            self._lengths[layer_idx] += count


class DraftContext:
    """What the head knows of the committed tokens: cached keys and values, and features that wait to be projected.

    It travels with the target's cache, so that a conversation continued on a returned cache keeps its features.

    Args:
        head (`JetSpecDraftHead`): The head whose keys and values these are.
        batch_size (`int`): Rows.
        start (`int`): Slots of the target's cache that came before; their features are unknown.
    """

    def __init__(self, head: JetSpecDraftHead, batch_size: int, start: int) -> None:
        self._key = _context_key(head)
        self.batch_size = batch_size
        self.length = start
        self.cache = GrowingKeyValueCache()
        self.visible: torch.Tensor | None = None  # (batch, cached) once a row has a hole, `None` while there is none
        self.pending: list[CommittedTokens] = []

    def fits(self, head: JetSpecDraftHead, batch_size: int, length: int) -> bool:
        """Whether this context is that of `head` after `length` committed slots."""
        return self._key == _context_key(head) and self.batch_size == batch_size and self.length == length

    def append(self, committed: CommittedTokens) -> None:
        """Adds the tapped features of newly committed tokens; they are projected with the next block."""
        if committed.features.shape[1]:
            self.pending.append(committed)
        self.length = committed.length

    def run_block(
        self, head: JetSpecDraftHead, noise_embeds: torch.Tensor, anchor_positions: torch.Tensor
    ) -> torch.Tensor:
        """Projects the waiting features, runs the block after the context, and drops the block again.

        Args:
            head (`JetSpecDraftHead`): The head this context belongs to.
            noise_embeds (`torch.Tensor` of shape `(batch, block, hidden)`): Embeddings of `[anchor, MASK, ...]`.
            anchor_positions (`torch.LongTensor` of shape `(batch,)`): Absolute positions of the anchors.

        Returns:
            `torch.Tensor` of shape `(batch, block, hidden)`: The head's states.
        """
        device, block = noise_embeds.device, noise_embeds.shape[1]
        features, positions = self._take_pending(head, device)
        block_positions = anchor_positions.to(device)[:, None] + torch.arange(block, device=device)
        mask = None
        if self.visible is not None:
            mask = torch.cat([self.visible, self.visible.new_ones(self.batch_size, block)], dim=1)
        states: torch.Tensor = head(
            noise_embeds=noise_embeds,
            context_hidden_states=features,
            attention_mask=mask,
            position_ids=torch.cat([positions, block_positions], dim=1),
            cache=self.cache,
        ).last_hidden_state
        self.cache.crop(-block)
        return states

    def _take_pending(self, head: JetSpecDraftHead, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The waiting features and their positions; their visibility joins that of the cached ones."""
        pending, self.pending = self.pending, []
        cached = self.cache.get_seq_length()
        if not pending:
            width = head.fc.in_features
            empty = torch.empty(self.batch_size, 0, width, device=device, dtype=head.dtype)
            return empty, torch.empty(self.batch_size, 0, device=device, dtype=torch.long)
        features = torch.cat([entry.features.to(device=device, dtype=head.dtype) for entry in pending], dim=1)
        positions = torch.cat([entry.positions.to(device) for entry in pending], dim=1)
        if self.visible is not None or any(entry.visible is not None for entry in pending):
            known = [
                torch.ones(self.batch_size, cached, dtype=torch.bool, device=device)
                if self.visible is None
                else self.visible
            ]
            for entry in pending:
                everything = torch.ones(entry.positions.shape, dtype=torch.bool, device=device)
                known.append(everything if entry.visible is None else entry.visible.to(device))
            self.visible = torch.cat(known, dim=1)
        return features, positions


def _context_key(head: JetSpecDraftHead) -> tuple[str, torch.dtype, torch.device]:
    """Whose keys and values a context holds, in what form; unlike a reference to the head it can be pickled."""
    return head.identity, head.dtype, head.device


class DraftingState:
    """The state of one generation that [`JetSpecDraftHead.draft_logits`] reads.

    Attributes:
        anchor_positions (`torch.LongTensor` of shape `(batch,)`): Absolute positions of the anchors in their unpadded
            sequences.
        draft_depth (`int`): Depth wanted of the next draft.
        block_states (`torch.Tensor` of shape `(batch, block, hidden)`, *optional*): The head's states of the last
            block.
    """

    def __init__(
        self, target: PreTrainedModel, head: JetSpecDraftHead, context: DraftContext, draft_depth: int
    ) -> None:
        token_ids = head.draft_token_ids
        self._rows = None if token_ids is None else OutputRows(target, token_ids)
        self._embeddings: nn.Module = target.get_input_embeddings()
        self._lm_head: nn.Module = target.get_output_embeddings()
        self._target_dtype: torch.dtype | None = None
        self._target_device: torch.device | None = None
        self.context = context
        self.draft_depth = draft_depth
        self.anchor_positions = torch.zeros(context.batch_size, dtype=torch.long)
        self.block_states: torch.Tensor | None = None
        self.branch_tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's own embedding of these tokens, called as a module (its weight may be packed or offloaded)."""
        embeds: torch.Tensor = self._embeddings(token_ids)
        self._target_dtype, self._target_device = embeds.dtype, embeds.device
        return embeds

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's own `lm_head` over these states: its rows of the draft vocabulary, where there is one."""
        if self._rows is not None:
            return self._rows(hidden_states)
        if self._target_dtype is not None:
            hidden_states = hidden_states.to(device=self._lm_head_device(), dtype=self._target_dtype)
        logits: torch.Tensor = self._lm_head(hidden_states)
        return logits

    def run_block(self, head: JetSpecDraftHead, noise_embeds: torch.Tensor) -> torch.Tensor:
        """`head.forward` over the block after the committed context; the block leaves no trace."""
        self.block_states = self.context.run_block(head, noise_embeds, self.anchor_positions)
        return self.block_states

    def _lm_head_device(self) -> torch.device | None:
        """Where the `lm_head` wants its input: its weight's device, or the embeddings' if the weight is offloaded."""
        parameter = next(self._lm_head.parameters(), None)
        return self._target_device if parameter is None or parameter.device.type == "meta" else parameter.device


class Drafter:
    """Draws token trees from a head.

    Args:
        head (`JetSpecDraftHead`): The head.
        target (`PreTrainedModel`): The model to be sped up.
        cache (`Cache`): The target's cache; what this head knew of its tokens is taken up again.
        knobs (`DraftingKnobs`): The shape of the trees.
        batch_size (`int`): Rows.
    """

    def __init__(
        self, head: JetSpecDraftHead, target: PreTrainedModel, cache: Cache, knobs: DraftingKnobs, batch_size: int
    ) -> None:
        self._head = head
        self._knobs = knobs
        length = int(cache.get_seq_length())
        # taken off the cache, so that a generation that fails leaves none that is half changed
        context: DraftContext | None = vars(cache).pop(_CONTEXT_NAME, None)
        if context is None or not context.fits(head, batch_size, length):
            context = DraftContext(head, batch_size, length)
        self._context = context
        self._state = DraftingState(target, head, context, knobs.draft_depth)

    def see(self, committed: CommittedTokens) -> None:
        """Takes in the features of newly committed tokens."""
        if self.drafts:
            self._context.append(committed)

    def hand_over(self, cache: Cache) -> None:
        """Leaves the context on the target's cache, for the next turn of the conversation; its copies keep copies."""
        if self.drafts:
            setattr(cache, _CONTEXT_NAME, self._context)

    def draft(self, anchor_ids: torch.Tensor, anchor_positions: torch.Tensor, depth: int) -> torch.Tensor:
        """One forward of the head over the block.

        Args:
            anchor_ids (`torch.LongTensor` of shape `(batch,)`): The last committed token of each row.
            anchor_positions (`torch.LongTensor` of shape `(batch,)`): Their absolute positions.
            depth (`int`): Most tokens that can still be accepted, at least 1.

        Returns:
            `torch.Tensor` of shape `(batch, depth, vocab)`: On the anchors' device.
        """
        self._state.anchor_positions = anchor_positions
        self._state.draft_depth = min(depth, self._knobs.draft_depth)
        logits = self._head.draft_logits(anchor_ids, self._state)
        return logits[:, : self._state.draft_depth].to(anchor_ids.device)

    def build(self, anchor_ids: torch.Tensor, draft_logits: torch.Tensor, tree_budget: int) -> TokenTree:
        """The most probable tree of these draft logits.

        Args:
            anchor_ids (`torch.LongTensor` of shape `(batch,)`): The roots.
            draft_logits (`torch.Tensor` of shape `(batch, depth, vocab)`): See [`Drafter.draft`].
            tree_budget (`int`): Nodes besides the root.

        Returns:
            `TokenTree`: At most `tree_budget` nodes besides the root.
        """
        knobs = self._knobs
        drafted = self._head.draft_token_ids
        return build_tree(
            anchor_ids,
            draft_logits,
            tree_budget=tree_budget,
            tree_width=knobs.tree_width,
            temperature=knobs.temperature,
            branch=self._head.branch_term(self._state),
            token_ids=None if drafted is None else drafted.to(anchor_ids.device),
        )

    @property
    def drafts(self) -> bool:
        """Whether trees may have any node besides the root."""
        return self._knobs.tree_budget != 0
