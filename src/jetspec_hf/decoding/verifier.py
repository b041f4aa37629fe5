"""Verify a token tree in one forward pass of the target (arXiv 2606.18394, section 4.2); commit its accepted paths.

The prefill is the target's own, and a tree node is fed what the target's next plain step would be fed, but for its
position (anchor plus depth) and its mask (the prefix and the node's own ancestors). This file alone calls the private
methods of `GenerationMixin`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel

from ..target import attention_kinds, takes_mask_per_kind
from ..tree import TokenTree, tree_attention_mask
from .cache import (
    CACHE_NAME,
    cached_length,
    check_cache,
    commit_path,
    commit_ragged,
    crop_to,
    free_slots,
    mask_sizes,
    ragged_sources,
    start_recording,
    stop_recording,
)
from .drafter import CommittedTokens
from .taps import FeatureTaps

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
        self._recording = False
        cache: Any = model_kwargs.get(CACHE_NAME)
        check_cache(cache)
        self.cache: Cache = cache
        self._prefix_mask = torch.empty(0, 0, dtype=torch.bool)
        self._lags: list[int] = []
        self._next_positions = torch.empty(0, dtype=torch.long)
        self._step_inputs: dict[str, Any] = {}
        self._num_nodes = 0

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, error: type[BaseException] | None, *_details: object) -> None:
        """Takes what an error left uncommitted out of the cache, and gives it its ordinary behaviour back."""
        if self._recording:
            if error is not None:
                crop_to(self.cache, self.prefix_length)
            stop_recording(self.cache)

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
        with self._taps.recording():
            outputs = self._target._prefill(input_ids, self._generation_config, self._model_kwargs)
        self._model_kwargs = self._target._update_model_kwargs_for_generation(outputs, self._model_kwargs)
        self.cache = outputs[CACHE_NAME]
        check_cache(self.cache)
        start_recording(self.cache)
        self._recording = True
        self._describe_prefix(input_ids, outputs.logits)
        positions = (self._prefix_mask.long().cumsum(dim=1) - 1).clamp_(min=0)
        new = self._prefix_mask[:, reused:]
        committed = CommittedTokens(
            self._taps.take(), positions[:, reused:], None if bool(new.all()) else new, self.prefix_length
        )
        return outputs, committed

    def _describe_prefix(self, input_ids: torch.Tensor, logits: torch.Tensor) -> None:
        """Which slots hold tokens, where the next token stands, and what else a plain step would be fed."""
        batch, device, length = logits.shape[0], logits.device, cached_length(self.cache)
        mask = self._model_kwargs.get("attention_mask")
        known = torch.ones(batch, 0, device=device) if mask is None else mask[:, :-1].to(device)
        missing = length - known.shape[1]  # all of them without a mask; virtual tokens of prompt tuning before a mask
        self._prefix_mask = torch.cat([torch.ones(batch, missing, device=device), known], dim=1).bool()
        self._lags = [0] * batch
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

    @property
    def device(self) -> torch.device:
        """Where trees live: the device of the target's logits."""
        return self._prefix_mask.device

    @property
    def anchor_positions(self) -> torch.Tensor:
        """Absolute positions of the anchors in their unpadded sequences, of shape `(batch,)`."""
        return self._prefix_mask.sum(dim=1)

    @property
    def free_nodes(self) -> int | None:
        """Slots that a static cache has for nodes besides the root; `None` if the cache grows."""
        slots = free_slots(self.cache)
        return None if slots is None else slots - 1

    @property
    def prefix_length(self) -> int:
        """Slots before the tree."""
        return self._prefix_mask.shape[1]

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
        depths = torch.minimum(tree.depths, torch.tensor(last_depths, device=tree.device)[:, None])
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
        if not needs_logits and self._target._supports_logits_to_keep():
            inputs["logits_to_keep"] = torch.tensor([-1], device=self.device)
        with self._taps.recording(), self._target._optimize_model_for_decode():
            outputs = self._target(**inputs)
        self._num_nodes = tree.num_nodes
        return outputs

    def _masks(self, tree: TokenTree) -> torch.Tensor | dict[str, torch.Tensor]:
        masks = {}
        for kind in self._kinds:
            length, offset = mask_sizes(self.cache, kind, tree.num_nodes)
            masks[kind.name] = tree_attention_mask(
                tree,
                self._prefix_mask,
                kv_length=length,
                kv_offset=offset,
                sliding_window=kind.sliding_window,
                chunk_size=kind.chunk_size,
                dtype=self._target.dtype,
            )
        return masks if self._mask_per_kind else next(iter(masks.values()))

    def commit(self, paths: Sequence[Sequence[int]]) -> CommittedTokens:
        """Keeps the accepted paths of the tree just verified, drops every other node.

        Args:
            paths (`list[list[int]]`): Per row, the accepted nodes, the root first; empty for a row that stands still.

        Returns:
            `CommittedTokens`: What the head will see of them.
        """
        device, num_nodes = self.device, self._num_nodes
        lengths = [len(path) for path in paths]
        longest = max(lengths)
        padded = torch.tensor([list(path) + [0] * (longest - len(path)) for path in paths], device=device)
        counts = torch.tensor(lengths, device=device)
        visible = torch.arange(longest, device=device) < counts[:, None]
        positions = self.anchor_positions[:, None] + torch.arange(longest, device=device)
        features = self._taps.take()
        features = features.gather(1, padded.to(features.device)[..., None].expand(-1, -1, features.shape[-1]))
        even = len(set(lengths)) == 1 and not any(self._lags)
        if even:
            commit_path(self.cache, num_nodes, padded)
            self._prefix_mask = torch.cat([self._prefix_mask, visible], dim=1)
        else:
            prefix = self.prefix_length
            self._lags = commit_ragged(self.cache, num_nodes, paths, self._lags)
            self._prefix_mask = self._ragged_prefix_mask(prefix, paths)
        self._next_positions = self._next_positions + counts
        return CommittedTokens(features, positions, None if even else visible, self.prefix_length)

    def _ragged_prefix_mask(self, prefix: int, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        """The prefix mask after [`commit_ragged`]: moved as the slots were, empty where a row lags behind."""
        new_prefix = cached_length(self.cache)
        sources = ragged_sources(prefix, new_prefix, paths).to(self._prefix_mask.device)
        everything = torch.cat([self._prefix_mask, self._prefix_mask.new_ones(len(paths), 1)], dim=1)
        moved = everything.gather(1, sources.clamp(min=0, max=prefix))  # the last column stands for any node
        return moved & (sources >= 0)

    def idle(self) -> None:
        """A forward whose result nobody needs, to keep step with ranks that share the weights."""
        anchors = torch.zeros(self._prefix_mask.shape[0], dtype=torch.long, device=self.device)
        self.verify(TokenTree.root_only(anchors), last_depths=[0] * anchors.shape[0], needs_logits=False)
        self._taps.take()
        crop_to(self.cache, self.prefix_length)

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
