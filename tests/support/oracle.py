"""A draft head that knows the target's text, so that trees are really accepted on tiny random targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from jetspec_hf import JetSpecDraftHead

# Logits of the four best-ranked tokens of a depth, the others lie between 0 and 1. A right draft is put one above its
# place, so that the first has a probability of about 0.7 and a chain of them comes before most of its siblings.
RANKED_LOGITS = (9.0, 7.0, 5.0, 3.0)
NEVER = -20.0


class OracleHead(JetSpecDraftHead):
    """Drafts each row's known continuation, right with a chosen probability per depth.

    What it draws comes from its own generator, so it leaves torch's global random state alone.
    """

    def know(
        self,
        texts: Sequence[Sequence[int]],
        *,
        accuracy: float = 1.0,
        runner_up_rate: float = 0.0,
        must_match: bool = True,
        seed: int = 0,
    ) -> OracleHead:
        """Sets what the head drafts from.

        Args:
            texts: each row's unpadded token ids, prompt and continuation.
            accuracy: probability, per row and depth, that the known token is among the drafted ones.
            runner_up_rate: probability that a right draft ranks second or third instead of first.
            must_match: whether the decoded text has to be the known one, which is then asserted at every anchor.
            seed: seed of the draws.
        """
        self.texts = [list(text) for text in texts]
        self.accuracy = accuracy
        self.runner_up_rate = runner_up_rate
        self.must_match = must_match
        self.draws = torch.Generator().manual_seed(seed)
        self.calls = 0
        return self

    def draft_with(self, **knobs: int) -> OracleHead:
        """Sets `tree_budget`, `tree_width` and `draft_depth` for the generations to come."""
        for name, value in knobs.items():
            setattr(self.generation_config, name, value)
        return self

    def draft_logits(self, anchor_ids: torch.Tensor, state: Any) -> torch.Tensor:
        """Logits of shape `(batch, block_size - 1, vocab)`, or of the draft vocabulary's columns alone."""
        self.calls += 1
        if self.branch is not None:
            super().draft_logits(anchor_ids, state)  # the branch term reads the states of the head's own block
        positions = state.anchor_positions.tolist()
        assert len(positions) == len(self.texts) == anchor_ids.shape[0]
        if self.must_match:
            self._check_anchors(anchor_ids.tolist(), positions)
        shape = (len(positions), self.config.block_size - 1, self.config.vocab_size)
        logits = torch.rand(shape, generator=self.draws)
        decoys = logits.topk(min(len(RANKED_LOGITS), shape[-1])).indices
        logits.scatter_(2, decoys, torch.tensor(RANKED_LOGITS[: decoys.shape[-1]]).expand(decoys.shape))
        right = (torch.rand(shape[:2], generator=self.draws) < self.accuracy).tolist()
        places = self._places(shape[:2])
        for row, (position, text) in enumerate(zip(positions, self.texts, strict=True)):
            for index, token in enumerate(text[position + 1 : position + 1 + shape[1]]):
                logits[row, index, token] = RANKED_LOGITS[places[row][index]] + 1.0 if right[row][index] else NEVER
        drafted = logits if self.draft_token_ids is None else logits[..., self.draft_token_ids.cpu()]
        return drafted.to(anchor_ids.device)

    def _places(self, shape: tuple[int, int]) -> list[list[int]]:
        runner_up = torch.rand(shape, generator=self.draws) < self.runner_up_rate
        second_or_third = torch.randint(1, 3, shape, generator=self.draws)
        return torch.where(runner_up, second_or_third, 0).tolist()

    def _check_anchors(self, anchors: list[int], positions: list[int]) -> None:
        for row, (anchor, position, text) in enumerate(zip(anchors, positions, self.texts, strict=True)):
            # the last known token ends the row, which then may hold anything
            unfinished = position < len(text) - 1
            assert not unfinished or text[position] == anchor, (
                f"row {row} has anchor {anchor} at position {position}, where the target's text has {text[position]}"
            )
