"""Text as it is accepted, and where each piece of it comes from."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..modeling_jetspec import JetSpecDraftHead


class AcceptanceStreamer(BaseStreamer):
    """Hands out the text of one generation at batch size 1, and says of each piece whether the head had drafted it.

    The last token of a step is the target's own. That it was the last shows when the next step begins, so one token is
    always held back.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        head ([`JetSpecDraftHead`]): The head that drafts; its statistics tell one step from the next.
        show (`Callable[[str, bool], None]`): Receives text, and whether it was drafted.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, head: JetSpecDraftHead, show: Callable[[str, bool], None]
    ) -> None:
        self._text = _TextPieces(tokenizer)
        self._head = head
        self._show = show
        self._puts = 0
        self._held: int | None = None
        self._step = -1  # of the token held back

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, then one token after the other.

        Args:
            value (`torch.LongTensor` of shape `(1, length)` or `(1,)`): The prompt, or a token.
        """
        if self._puts:
            # a step is counted after its tokens came; the first token is the prefill's
            step = -1 if self._puts == 1 else len(self._head.last_acceptance.accepted_lengths[0])
            self._release(drafted=step == self._step)
            self._held, self._step = int(value.item()), step
        self._puts += 1

    def end(self) -> None:
        """Hands out what was held back."""
        self._release(drafted=False)
        if rest := self._text.rest():
            self._show(rest, False)

    def _release(self, drafted: bool) -> None:
        if self._held is not None and (piece := self._text.add(self._held)):
            self._show(piece, drafted)


class _TextPieces:
    """The text that each token adds: whole characters, with the spaces that a token has after its predecessors."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer  # the declared result depends on the arguments
        self._ids: list[int] = []
        self._start = 0  # tokens from here on are decoded, so that the cost of a piece does not grow with the text
        self._shown = 0  # tokens up to here have been handed out

    def add(self, token: int) -> str:
        """What can be shown now; empty in the middle of a character."""
        self._ids.append(token)
        piece = self._piece()
        if not piece or piece.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return piece

    def rest(self) -> str:
        """What was not shown, for good or ill."""
        return self._piece()

    def _piece(self) -> str:
        before = self._decode(self._ids[self._start : self._shown])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
