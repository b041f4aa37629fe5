"""Record the tapped layers' outputs with forward hooks, only for one's own forwards, and only while decoding.

Hooks on the decoder layers give the states before the final norm, mean the same on every release of transformers,
survive PEFT and offloading, and see every chunk of a chunked prefill.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..target import decoder_layers


class FeatureTaps:
    """The outputs of the tapped layers of a target.

    Args:
        target (`PreTrainedModel`): The model to be sped up.
        layer_ids (`list[int]`): Tapped layers; id `i` is the output of decoder layer `i`.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: list[int]) -> None:
        self._layer_ids = layer_ids
        self._layers = decoder_layers(target)
        self._active_copy: int | None = getattr(target.config.get_text_config(decoder=True), "altup_active_idx", None)
        self._thread = threading.get_ident()
        self._recording = False
        self._outputs: dict[int, list[torch.Tensor]] = {}
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks the tapped layers for the duration of a generation; always removed."""
        self._handles = [
            self._layers[layer_id].register_forward_hook(
                lambda _module, _args, output, i=layer_id: self._record(i, output)
            )
            for layer_id in dict.fromkeys(self._layer_ids)
        ]
        try:
            yield
        finally:
            self.detach()

    def detach(self) -> None:
        """Removes the hooks before their time: a compiled graph does not notice whether there are any."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the forwards that this thread runs inside; others, such as a processor's own, are not ours."""
        self._outputs = {layer_id: [] for layer_id in self._layer_ids}
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    @property
    def are_hidden_states(self) -> bool:
        """Whether all tapped states are among a model's `hidden_states`, which end with a normalised one."""
        return max(self._layer_ids, default=0) < len(self._layers) - 1

    def read(self, hidden_states: Sequence[torch.Tensor]) -> None:
        """Takes the states from a forward's outputs instead of hooks.

        Args:
            hidden_states (`tuple[torch.Tensor]`): The embeddings, then the output of every layer.
        """
        self._outputs = {layer_id: [self._one_stream(hidden_states[layer_id + 1])] for layer_id in self._layer_ids}

    def take(self, nodes: torch.Tensor | None = None) -> torch.Tensor:
        """The recorded states, concatenated over taps.

        Args:
            nodes (`torch.LongTensor` of shape `(batch, kept)`, *optional*): The positions wanted of each row, by
                default all.

        Returns:
            `torch.Tensor` of shape `(batch, positions, taps * hidden)`: On the last tapped layer's device.
        """
        outputs, self._outputs = self._outputs, {}
        if not outputs:
            return torch.empty(0, 0, 0)
        states = [torch.cat(chunks, dim=1) if len(chunks) > 1 else chunks[0] for chunks in outputs.values()]
        if nodes is not None:  # before they are concatenated: most nodes are rejected
            index = nodes[..., None]
            states = [state.gather(1, index.to(state.device).expand(-1, -1, state.shape[-1])) for state in states]
        return torch.cat([state.to(states[-1].device) for state in states], dim=-1)

    def _record(self, layer_id: int, output: Any) -> None:
        if not self._recording or threading.get_ident() != self._thread:
            return
        self._outputs[layer_id].append(self._one_stream(output[0] if isinstance(output, tuple) else output))

    def _one_stream(self, state: torch.Tensor) -> torch.Tensor:
        if state.dim() == 4:  # several copies of the residual stream: gemma3n leads with them, others carry them inside
            state = state.mean(dim=2) if self._active_copy is None else state[self._active_copy]
        return state
