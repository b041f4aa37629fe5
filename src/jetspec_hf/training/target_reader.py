"""The frozen target as training sees it: tapped features, last hidden states, embeddings and logits.

Rows may hold several documents. They are told apart as a verified tree is: by positions that start again and by masks
per layer kind, which every target takes that a tree can be verified on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..decoding.taps import FeatureTaps
from ..target import (
    AttentionKind,
    OutputRows,
    attention_kinds,
    base_model,
    check_architecture,
    decoder_layers,
    length_limit_reason,
    takes_mask_per_kind,
)
from .blocks import document_positions, number_documents

_PROBE_TOKENS = 16


@dataclass(frozen=True)
class TargetStates:
    """What the target says about rows of tokens.

    Attributes:
        features (`torch.Tensor` of shape `(batch, length, taps * hidden)`): The tapped states, concatenated.
        last_hidden (`torch.Tensor` of shape `(batch, length, hidden)`): What the `lm_head` is applied to.
    """

    features: torch.Tensor
    last_hidden: torch.Tensor


@contextmanager
def frozen(target: PreTrainedModel) -> Iterator[None]:
    """Puts a target into evaluation mode without gradients, and afterwards all of it back as it was.

    Args:
        target (`PreTrainedModel` or `PeftModel`): The model to be sped up.
    """
    training = [module for module in target.modules() if module.training]
    trainable = [parameter for parameter in target.parameters() if parameter.requires_grad]
    target.eval()
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for parameter in trainable:
            parameter.requires_grad_(True)


def place_target(target: PreTrainedModel, device: torch.device) -> None:
    """Moves a target to a device, unless it has its place: spread over devices, quantised, offloaded or sharded.

    Args:
        target (`PreTrainedModel` or `PeftModel`): The model to be sped up.
        device (`torch.device`): Where the head trains.
    """
    parameters = list(target.parameters())
    placed = getattr(target, "hf_device_map", None) or getattr(base_model(target), "is_quantized", False)
    plain = all(type(parameter.data) is torch.Tensor and parameter.device.type != "meta" for parameter in parameters)
    if not placed and plain and any(parameter.device != device for parameter in parameters):
        cast(Any, target).to(device)


class TargetReader:
    """Reads a target without leaving a trace in it, and never with a gradient into it.

    Args:
        target (`PreTrainedModel` or `PeftModel`): The model to be sped up, in evaluation mode.
        layer_ids (`list[int]`): Tapped layers; id `i` is the output of decoder layer `i`.

    Attributes:
        num_logits (`int`): Rows of the `lm_head`, of which some targets have more than tokens.

    Raises:
        ValueError: If a tree cannot be verified on the target, its prompts are learned by PEFT, or its logits are
            neither those of its `lm_head` nor a constant multiple or a soft cap of them.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: list[int]) -> None:
        if getattr(getattr(target, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                "`target` must not have learned prompts, whose virtual tokens no row of training data has, got "
                f"{type(target.active_peft_config).__name__}."
            )
        check_architecture(target)
        self.target = base_model(target)
        self._taps = layer_ids
        self._decoder = _decoder(self.target)
        self._embeddings: nn.Module = self.target.get_input_embeddings()
        self._lm_head = cast(nn.Module, self.target.get_output_embeddings())
        self._kinds = attention_kinds(self.target)
        self._mask_per_kind = takes_mask_per_kind(self.target)
        config = self.target.config.get_text_config(decoder=True)
        self._shares_keys = bool(getattr(config, "num_kv_shared_layers", 0))
        self._counts_slots = getattr(config, "floor_scale", None) is not None
        self._limited = length_limit_reason(self.target, 1, 2**62) is not None
        self._output_rows: dict[torch.dtype, OutputRows] = {}
        self._output_ids: torch.Tensor | None = None
        self._state_dtype, self._finish = self._probe()

    @torch.no_grad()
    def read(self, input_ids: torch.Tensor, document_ids: torch.Tensor) -> TargetStates:
        """One forward of the target's decoder; its `lm_head` does not run.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`): The rows.
            document_ids (`torch.LongTensor` of shape `(batch, length)`): The document of each slot, in runs of equal
                ids, -1 for padding at either side. Every document is read as if it stood alone.

        Returns:
            [`TargetStates`]: Meaningless at padding.

        Raises:
            ValueError: If the target's positions depend on the other documents of the batch.
        """
        device = self.target.device
        input_ids, document_ids = input_ids.to(device), number_documents(document_ids.to(device))
        positions = document_positions(document_ids).masked_fill(document_ids < 0, 0)
        if self._limited:
            self._check_lengths(positions, document_ids)
        taps = FeatureTaps(self.target, self._taps)
        with taps.attached(), taps.recording():
            outputs = self._decoder(
                input_ids=input_ids,
                position_ids=positions,
                attention_mask=self._attention_mask(positions, document_ids),
                use_cache=self._shares_keys,  # some releases hand shared keys and values on through a cache
                return_dict=True,
            )
        return TargetStates(taps.take(), outputs.last_hidden_state)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's own embedding of these tokens (`modeling_jetspec.TargetEmbeddings`)."""
        with torch.no_grad():
            embeds: torch.Tensor = self._embeddings(token_ids.to(self.target.device))
        return embeds

    def draft_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """What the bare `lm_head` makes of the head's states, as drafting does; a gradient reaches the states.

        Args:
            hidden (`torch.Tensor` of shape `(..., hidden)`): The head's states.
            token_ids (`torch.LongTensor` of shape `(draft_vocab,)`, *optional*): The draft vocabulary; all tokens when
                missing.

        Returns:
            `torch.Tensor` of shape `(..., draft_vocab)`.
        """
        if token_ids is not None:
            return self._rows(token_ids, hidden.dtype)(hidden)
        parameter = next(self._lm_head.parameters(), None)
        offloaded = parameter is None or parameter.device.type == "meta"
        device = self.target.device if offloaded else cast(torch.Tensor, parameter).device
        logits: torch.Tensor = self._lm_head(hidden.to(device=device, dtype=self._state_dtype))
        return logits

    @torch.no_grad()
    def teacher_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """The target's own logits, with whatever its architecture does to what the `lm_head` returns.

        Args:
            hidden (`torch.Tensor` of shape `(..., hidden)`): Some of the target's last hidden states.
            token_ids (`torch.LongTensor` of shape `(draft_vocab,)`, *optional*): The draft vocabulary; all tokens when
                missing.

        Returns:
            `torch.Tensor` of shape `(..., draft_vocab)`.
        """
        return self._finish(self.draft_logits(hidden.to(self._state_dtype), token_ids))

    def _rows(self, token_ids: torch.Tensor, dtype: torch.dtype) -> OutputRows:
        """The draft vocabulary's rows of the `lm_head`, gathered once per dtype: the head's may not be the target's."""
        known = self._output_ids
        if known is None or (known is not token_ids and not torch.equal(known, token_ids.to(known.device))):
            self._output_rows.clear()
        self._output_ids = token_ids
        if dtype not in self._output_rows:
            self._output_rows[dtype] = OutputRows(self.target, token_ids)
        return self._output_rows[dtype]

    def _attention_mask(
        self, positions: torch.Tensor, document_ids: torch.Tensor
    ) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """What keeps documents apart: nothing or a 2D mask where rows hold one each, else 4D masks per layer kind."""
        real = document_ids >= 0
        if bool(((positions == 0) & real).sum(dim=1).le(1).all()):
            return None if bool(real.all()) else real.long()
        masks = {kind.name: self._document_mask(kind, positions, document_ids) for kind in self._kinds}
        return masks if self._mask_per_kind else next(iter(masks.values()))

    def _document_mask(self, kind: AttentionKind, positions: torch.Tensor, document_ids: torch.Tensor) -> torch.Tensor:
        """Additive mask of shape `(batch, 1, length, length)` for one layer kind; padding sees padding, so no NaN."""
        slots = torch.arange(document_ids.shape[1], device=document_ids.device)
        visible = (slots[:, None] >= slots) & (document_ids[:, :, None] == document_ids[:, None, :])
        queries, keys = positions[:, :, None], positions[:, None, :]
        if kind.sliding_window is not None:
            visible &= queries - keys < kind.sliding_window
        if kind.chunk_size is not None:
            visible &= queries // kind.chunk_size == keys // kind.chunk_size
        dtype = self.target.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]

    def _check_lengths(self, positions: torch.Tensor, document_ids: torch.Tensor) -> None:
        """Refuses documents that would be read otherwise than alone: some rotary embeddings look at the longest."""
        ends = document_ids >= 0
        ends[:, :-1] &= document_ids[:, :-1] != document_ids[:, 1:]
        lengths = positions[ends] + 1
        if lengths.numel() == 0:
            return
        longest = document_ids.shape[1] if self._counts_slots else int(lengths.max())
        if (reason := length_limit_reason(self.target, int(lengths.min()), longest)) is not None:
            raise ValueError(
                f"{type(self.target).__name__} {reason}. For training data that is the longest document (`max_length` "
                "of its rows), and documents on either side of such a limit must not share a batch."
            )

    @torch.no_grad()
    def _probe(self) -> tuple[torch.dtype, Callable[[torch.Tensor], torch.Tensor]]:
        """The dtype of last hidden states, and what turns the `lm_head`'s output into the target's own logits."""
        config = self.target.config.get_text_config(decoder=True)
        step = max(1, config.vocab_size // (2 * _PROBE_TOKENS))  # placeholders of images and such stand at the end
        tokens = (torch.arange(1, _PROBE_TOKENS + 1, device=self.target.device) * step)[None] % config.vocab_size
        hidden = self.read(tokens, torch.zeros_like(tokens)).last_hidden
        bare = self._lm_head(hidden)
        self.num_logits = bare.shape[-1]
        logits = self.target(input_ids=tokens, use_cache=self._shares_keys, return_dict=True).logits.to(bare.device)
        cap = getattr(config, "final_logit_softcapping", None)
        finish = _LogitFinish(_factor(bare, logits, cap), cap)
        deviation = float((finish(bare) - logits).float().abs().max() / logits.float().abs().max().clamp(min=1e-9))
        if not deviation < (1e-3 if logits.dtype == torch.float32 else 3e-2):
            raise ValueError(
                "The logits of `target` must be those of its `lm_head`, a constant multiple of them, or their soft cap "
                f"`final_logit_softcapping`; those of {type(self.target).__name__} deviate by {deviation:.1%} from a "
                f"factor of {finish.factor:g} and a cap of {cap}."
            )
        return hidden.dtype, finish


def _decoder(target: PreTrainedModel) -> Callable[..., Any]:
    """What turns tokens into last hidden states: `get_decoder()`, or what holds the layers where that is the target."""
    decoder, layers = target.get_decoder(), decoder_layers(target)
    if decoder is not target:
        return cast(Callable[..., Any], decoder)
    holds_layers = (module for module in target.modules() if any(child is layers for child in module.children()))
    return cast(Callable[..., Any], next(holds_layers))


@dataclass(frozen=True)
class _LogitFinish:
    """What a target's architecture does to the output of its `lm_head`."""

    factor: float
    cap: float | None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def _factor(bare: torch.Tensor, logits: torch.Tensor, cap: float | None) -> float:
    """The constant between the `lm_head`'s output and the logits before their cap; exactly 1 where there is none."""
    bare, logits = bare.double(), logits.double()
    if cap is not None:
        flat = (logits.abs() < 0.9 * cap).to(logits)  # near the cap its inverse only amplifies rounding
        bare, logits = bare * flat, torch.atanh(logits * flat / cap) * cap
    factor = float((bare * logits).sum() / (bare * bare).sum().clamp(min=1e-30))
    return 1.0 if abs(factor - 1.0) < 1e-2 or factor == 0.0 else factor
