"""A draft head that is right with a chosen probability and costs what a real head costs.

It separates the two things a speed-up depends on, acceptance and the time of a step, and so tells what a head of that
quality would give on the machine at hand, before one is trained.
"""

import math
from collections.abc import Sequence

import torch

from ..modeling_jetspec import DraftState, JetSpecDraftHead


class OracleHead(JetSpecDraftHead):
    """Drafts the known text: at every depth its favourite is the text's token with a chosen probability.

    Its draft logits are those of the head it is made of, a whole forward, except for the favourite of each depth, to
    which they give the very probability with which it is right: it is a calibrated head. Its random draws are its own.
    """

    def know(self, texts: Sequence[Sequence[int]], accuracy: float, seed: int = 0) -> "OracleHead":
        """Sets what the head drafts in the generations to come.

        Args:
            texts (`Sequence[Sequence[int]]`): Each row's tokens, prompt without padding and continuation.
            accuracy (`float`): Probability, per row and depth, that the favourite is the text's token.
            seed (`int`): Of the draws.

        Returns:
            `OracleHead`: Itself.

        Raises:
            ValueError: If `accuracy` is no probability strictly between 0 and 1.
        """
        if not 0 < accuracy < 1:
            raise ValueError(f"`accuracy` must lie between 0 and 1, both left out, got {accuracy}.")
        longest = max(map(len, texts))
        self._texts = torch.tensor([[*text, *[-1] * (longest + self.config.block_size - len(text))] for text in texts])
        self._odds = math.log(accuracy / (1 - accuracy))
        self._accuracy = accuracy
        self._draws = torch.Generator().manual_seed(seed)
        self._others: torch.Tensor | None = None
        return self

    def draft_logits(self, anchor_ids: torch.Tensor, state: DraftState) -> torch.Tensor:
        """See [`JetSpecDraftHead.draft_logits`]."""
        logits = super().draft_logits(anchor_ids, state)
        if self._others is None:  # much the same at every step, and a whole pass over the logits: once is enough
            self._others = logits[0].float().logsumexp(dim=-1).mean()
        favourites = self._favourites(state.anchor_positions.cpu(), logits.shape)
        chosen = (self._others + self._odds).to(logits.dtype)
        return logits.scatter_(2, favourites[..., None].to(logits.device), chosen.expand(*logits.shape[:2], 1))

    def _favourites(self, positions: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Columns of the favourites, of shape `(batch, depth)`."""
        rows, depth, columns = shape
        wanted = positions[:, None] + torch.arange(1, depth + 1)
        known = self._texts.gather(1, wanted.clamp(max=self._texts.shape[1] - 1))
        decoys = torch.randint(0, columns, (rows, depth), generator=self._draws)
        right = torch.rand(rows, depth, generator=self._draws) < self._accuracy
        if self.draft_token_ids is not None:
            tokens = self.draft_token_ids.cpu()
            places = torch.searchsorted(tokens, known).clamp(max=columns - 1)
            known = torch.where(tokens[places] == known, places, -1)
        return torch.where(right & (known >= 0), known, decoys)
