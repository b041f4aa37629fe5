"""Verify a token tree in one forward pass of the target (arXiv 2606.18394, section 4.2); commit its accepted paths.

The prefill is the target's own, and a tree node is fed what the target's next plain step would be fed, but for its
position (anchor plus depth) and its mask (the prefix and the node's own ancestors). This file alone calls the private
methods of `GenerationMixin`.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..target import AttentionKind, attention_kinds, takes_mask_per_kind
from ..tree import TokenTree, tree_attention_mask
from ..tree.mask import TreeMaskBuffer
from .cache import CACHE_NAME, DecodingCache, cached_length, check_cache, is_static, make_room
from .columns import Columns
from .drafter import CommittedTokens
from .taps import FeatureTaps

logger = logging.get_logger(__name__)

if TYPE_CHECKING:
    from transformers._typing import GenerativePreTrainedModel

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
_REPLACED_INPUTS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "logits_to_keep",
    "cache",
    "past_key_values",
)


class Verifier:
    """The target, its cache, and what each cached slot is.

    Args:
        target (`PreTrainedModel`): The model to be sped up.
        taps (`FeatureTaps`): The tapped layers, attached.
        model_kwargs (`dict`): What `generate` prepared for the target's forward.
        generation_config (`GenerationConfig`): What `generate` prepared.

    Raises:
        ValueError: If rejected tokens cannot be taken out of the cache.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        taps: FeatureTaps,
        model_kwargs: dict[str, Any],
        generation_config: GenerationConfig,
    ) -> None:
        self._target = cast("GenerativePreTrainedModel", target)
        self._taps = taps
        self._model_kwargs = model_kwargs
        self._generation_config = generation_config
        self._kinds = attention_kinds(target)
        self._shares_keys = bool(getattr(target.config.get_text_config(decoder=True), "num_kv_shared_layers", 0))
        self._mask_per_kind = takes_mask_per_kind(target)
        cache: Any = model_kwargs.get(CACHE_NAME)
        check_cache(cache)
        self.cache: Cache = cache
        self._slots: DecodingCache | None = None  # from the prefill on
        self._mask_buffer = TreeMaskBuffer(target.dtype)
        self._text_starts: torch.Tensor | None = None
        self._anchor_positions = torch.empty(0, dtype=torch.long)
        self._next_positions = torch.empty(0, dtype=torch.long)
        self._step_inputs: dict[str, Any] = {}
        self._sizes: list[int] = []
        self._compiled: Callable[..., Any] | None = None
        self._is_warm = False

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, *_error: object) -> None:
        """Takes what an error left uncommitted out of the cache, and gives it its ordinary behaviour back."""
        if self._slots is not None:
            self._slots.close()

    def fix_shapes(self, tree_budgets: Sequence[int]) -> None:
        """On a static cache, lets every forward have one of a few shapes, so that each is compiled once.

        Trees are filled up to the next budget. A cache that `generate` made gets the slots for it beforehand; in one
        that the user made, the last trees are as small as its free slots.

        Args:
            tree_budgets (`list[int]`): Numbers of nodes besides the root.
        """
        if is_static(self.cache):
            self._sizes = sorted(budget + 1 for budget in tree_budgets)
            make_room(self.cache, self._sizes[-1])

    def prefill(self, input_ids: torch.Tensor) -> tuple[Any, CommittedTokens]:
        """Runs the target's own prefill: reused caches, chunks, embeddings and multimodal inputs are its business.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`): The prompt; empty when `inputs_embeds` were
                given.

        Returns:
            `tuple`: The target's outputs, whose last logits give the first token, and the committed prompt.
        """
        reused = cached_length(self.cache)
        if self._shares_keys and "logits_to_keep" in self._model_kwargs:
            # an integer lets layers that share keys and values skip the prompt, whose features the head needs
            self._model_kwargs["logits_to_keep"] = torch.tensor([-1], device=input_ids.device)
        self._compiled = self._compiled_call()
        with self._taps.recording():
            outputs = self._target._prefill(input_ids, self._generation_config, self._model_kwargs)
        if self._compiled is not None:
            self._taps.detach()
        self._model_kwargs = self._target._update_model_kwargs_for_generation(outputs, self._model_kwargs)
        self.cache = outputs[CACHE_NAME]
        check_cache(self.cache)
        prefix_mask = self._describe_prefix(input_ids, outputs.logits)
        self._slots = DecodingCache(self.cache, prefix_mask)
        positions = (prefix_mask.long().cumsum(dim=1) - 1).clamp_(min=0)
        new = prefix_mask[:, reused:]
        committed = CommittedTokens(
            self._taps.take(), positions[:, reused:], None if bool(new.all()) else new, self.prefix_length
        )
        return outputs, committed

    def _compiled_call(self) -> Callable[..., Any] | None:
        """The target's call as plain decoding would compile it, `None` where it would not."""
        target, config = self._target, self._generation_config
        if not target._valid_auto_compile_criteria(self._model_kwargs, config):
            return None
        if not self._taps.are_hidden_states:
            logger.warning_once(
                "The head taps the target's last layer, whose output is not among its `hidden_states`: the target is "
                "not compiled."
            )
            return None
        compiled: Callable[..., Any] = target.get_compiled_call(config.compile_config)
        return compiled

    def _describe_prefix(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Which slots hold tokens, where the next token stands, and what else a plain step would be fed."""
        batch, device, length = logits.shape[0], logits.device, cached_length(self.cache)
        mask = self._model_kwargs.get("attention_mask")
        known = torch.ones(batch, 0, device=device) if mask is None else mask[:, :-1].to(device)
        missing = length - known.shape[1]  # all of them without a mask; virtual tokens of prompt tuning before a mask
        prefix_mask = torch.cat([torch.ones(batch, missing, device=device), known], dim=1).bool()
        self._text_starts = (prefix_mask.cumsum(dim=1) == 0).sum(dim=1)
        self._anchor_positions = prefix_mask.sum(dim=1)
        anchors = input_ids.new_zeros(batch, 1)
        step = self._target.prepare_inputs_for_generation(
            torch.cat([input_ids, anchors], dim=1),
            next_sequence_length=1,
            is_first_iteration=False,
            **self._model_kwargs,
        )
        _check_plain_step(step, length)
        positions = step.get("position_ids")
        self._next_positions = (
            torch.full((batch,), length, device=device) if positions is None else positions[..., -1].to(device)
        )
        self._step_inputs = {
            key: value for key, value in step.items() if key not in _REPLACED_INPUTS and value is not None
        }
        return prefix_mask

    @property
    def device(self) -> torch.device:
        """Where trees live: the device of the target's logits."""
        return self._anchor_positions.device

    @property
    def anchor_positions(self) -> torch.Tensor:
        """Absolute positions of the anchors in their unpadded sequences, of shape `(batch,)`."""
        return self._anchor_positions

    @property
    def slots(self) -> DecodingCache:
        """The cache's slots, from the prefill on."""
        if self._slots is None:
            raise RuntimeError("`prefill` must be called first, got a verifier whose cache is not filled.")
        return self._slots

    @property
    def free_nodes(self) -> int | None:
        """Slots that a static cache has for nodes besides the root; `None` if the cache grows."""
        slots = self.slots.free_slots
        return None if slots is None else slots - 1

    @property
    def prefix_length(self) -> int:
        """Slots before the tree, in the longest row."""
        return self.slots.length

    def verify(self, tree: TokenTree, last_depths: Sequence[int], needs_logits: bool = True) -> Any:
        """One forward of the target over all nodes.

        Args:
            tree (`TokenTree`): The tree, the anchors at its root.
            last_depths (`list[int]`): Per row, the deepest node that can still be accepted; deeper nodes are verified
                at that depth's position, so that no position beyond the end of the generation is ever used.
            needs_logits (`bool`, defaults to `True`): Whether anyone looks at the logits; they are large.

        Returns:
            `ModelOutput`: `logits` of shape `(batch, nodes, vocab)`; row `i` is the target's distribution after node
            `i`.

        Raises:
            ValueError: If a static cache is too short for the text.
        """
        if self.free_nodes is not None and self.free_nodes < tree.num_nodes - 1:
            raise ValueError(
                "`max_cache_len` of a static cache must leave room for the text, got a full one at "
                f"{self.prefix_length} tokens: make it at least as long as prompt and new tokens."
            )
        num_nodes = tree.num_nodes
        tree = self._filled_up(tree)
        depths = tree.depths
        if min(last_depths) < tree.max_depth:
            depths = torch.minimum(depths, self._upload(last_depths)[:, None])
        inputs = {
            **self._step_inputs,
            **{
                key: self._step_inputs[key][..., -1:].expand(-1, tree.num_nodes)
                for key in _TOKEN_TYPES
                if key in self._step_inputs
            },
            "input_ids": tree.token_ids,
            "position_ids": self._next_positions[..., None] + depths,
            "attention_mask": self._masks(tree),
            CACHE_NAME: self.cache,
            "return_dict": True,
        }
        outputs = self._forward(inputs, needs_logits)
        if num_nodes < tree.num_nodes and needs_logits:
            outputs.logits = outputs.logits[:, :num_nodes]
        return outputs

    def _forward(self, inputs: dict[str, Any], needs_logits: bool) -> Any:
        if self._compiled is not None:
            return self._compiled_forward(inputs, self._compiled)
        if not needs_logits and self._target._supports_logits_to_keep():
            inputs["logits_to_keep"] = torch.tensor([-1], device=self.device)
        with self._taps.recording(), self._target._optimize_model_for_decode():
            return self._target(**inputs)

    def _compiled_forward(self, inputs: dict[str, Any], compiled: Callable[..., Any]) -> Any:
        """A forward with the same arguments always, lest it is compiled again.

        A generation's first is not compiled: transformers may put hooks that collect hidden states into the target
        then, under a lock, which no graph can hold.
        """
        forward = compiled if self._is_warm else self._target
        with self._target._optimize_model_for_decode():
            outputs = forward(**{**inputs, "output_hidden_states": True})
        self._is_warm = True
        self._taps.read(outputs.hidden_states)
        return outputs

    def _filled_up(self, tree: TokenTree) -> TokenTree:
        """The tree with further roots behind it, which only see themselves and the prefix, up to a fixed size."""
        free = self.slots.free_slots
        size = next((size for size in self._sizes if size >= tree.num_nodes), tree.num_nodes)
        missing = (size if free is None else min(size, free)) - tree.num_nodes
        if missing <= 0:
            return tree
        fill = torch.nn.functional.pad
        return TokenTree(
            token_ids=torch.cat([tree.token_ids, tree.token_ids[:, :1].expand(-1, missing)], dim=1),
            parents=fill(tree.parents, (0, missing), value=-1),
            depths=fill(tree.depths, (0, missing)),
            log_probs=fill(tree.log_probs, (0, missing)),
            depth_limit=tree.depth_limit,
        )

    def _masks(self, tree: TokenTree) -> torch.Tensor | dict[str, torch.Tensor]:
        """One mask per kind of layer; kinds whose window is not reached yet share that of a layer without any."""
        masks: dict[str, torch.Tensor] = {}
        shared: dict[int, torch.Tensor] = {}
        for kind in self._kinds:
            columns = self.slots.columns(kind.layer_idx)
            length, size = columns.kv_length(tree.num_nodes), kind.sliding_window or kind.chunk_size
            if size is not None and self.prefix_length + tree.max_depth >= size:
                masks[kind.name] = self._window_mask(tree, kind, columns)
                continue
            if length not in shared:
                shared[length] = self._mask_buffer.write(
                    tree, columns.prefix_mask, kv_length=length, settled=min(columns.counts)
                )
            masks[kind.name] = shared[length]
        return masks if self._mask_per_kind else next(iter(masks.values()))

    def _window_mask(self, tree: TokenTree, kind: AttentionKind, columns: Columns) -> torch.Tensor:
        """The mask of layers with a window or with chunks, whose distances are counted in each row's own slots."""
        text_starts = None
        if kind.chunk_size is not None and self._text_starts is not None:
            text_starts = self._text_starts - columns.shown_slots()
        return tree_attention_mask(
            tree,
            columns.prefix_mask,
            kv_length=columns.kv_length(tree.num_nodes),
            sliding_window=kind.sliding_window,
            chunk_size=kind.chunk_size,
            root_slots=columns.roots(),
            text_starts=text_starts,
            dtype=self._target.dtype,
        )

    def commit(self, paths: Sequence[Sequence[int]]) -> CommittedTokens:
        """Keeps the accepted paths of the tree just verified, drops every other node.

        Args:
            paths (`list[list[int]]`): Per row, the accepted nodes, the root first; empty for a row that stands still.

        Returns:
            `CommittedTokens`: What the head will see of them.
        """
        lengths = [len(path) for path in paths]
        longest = max(lengths)
        padded = self._upload([list(path) + [0] * (longest - len(path)) for path in paths])
        counts = self._upload(lengths)
        order = torch.arange(longest, device=self.device)
        visible = order < counts[:, None]
        positions = self._anchor_positions[:, None] + order
        self.slots.commit(paths, padded, visible)
        self._anchor_positions = self._anchor_positions + counts
        self._next_positions = self._next_positions + counts
        features = self._taps.take(padded)
        return CommittedTokens(features, positions, None if len(set(lengths)) == 1 else visible, self.prefix_length)

    def _upload(self, values: Sequence[Any]) -> torch.Tensor:
        """Integers of the host on the target's device, without waiting for it."""
        return torch.tensor(values, dtype=torch.long).to(self.device, non_blocking=True)

    def idle(self) -> None:
        """A forward whose result nobody needs, to keep step with ranks that share the weights."""
        anchors = torch.zeros_like(self._anchor_positions)
        self.verify(TokenTree.root_only(anchors), last_depths=[0] * anchors.shape[0], needs_logits=False)
        self._taps.take()
        self.slots.rollback()

    def anyone_unfinished(self, finished: bool, synced_gpus: bool) -> bool:
        """Whether another step is due here, or, with `synced_gpus`, on any rank that shares this target's weights."""
        unfinished: bool = self._target._has_unfinished_sequences(finished, synced_gpus, device=self.device)
        return unfinished


def _check_plain_step(step: dict[str, Any], cached: int) -> None:
    """Refuses a target whose own next step is not one token behind its cache: there is nothing to be equal to."""
    fed = step.get("inputs_embeds") if step.get("input_ids") is None else step["input_ids"]
    tokens = 0 if fed is None else fed.shape[1]
    mask = step.get("attention_mask")
    # a static cache gets 4D masks, perhaps one per kind
    columns = mask.shape[1] if isinstance(mask, torch.Tensor) and mask.dim() == 2 else cached + 1
    if tokens != 1 or columns != cached + 1:
        raise ValueError(
            "`target` must decode one token behind its cache, got a step of its own with "
            f"{tokens} tokens and {columns} columns of mask over {cached} cached tokens: some releases of transformers "
            "lose or repeat tokens with PEFT's prompt learning, or with a chunked prefill on a filled cache."
        )
