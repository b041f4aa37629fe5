"""The branch term of a draft head: what makes the children of one node differ from those of its siblings.

One forward of a head gives one distribution per depth, averaged over what the tokens before may be. The branch term
adds to it what the path says, at a few multiplications per candidate and no forward. It is an extension of arXiv
2606.18394; published heads have none. This file travels to the Hub with a head, so it imports only its sibling
`configuration_jetspec`.
"""

from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .configuration_jetspec import JetSpecConfig

if TYPE_CHECKING:
    from .modeling_jetspec import DraftState, JetSpecDraftHead


class JetSpecBranch(nn.Module):
    """The branch term `<s, b_v>`: what a path adds to the draft logit of token `v` right after it.

    The state `s` of a path follows from its last token `u`, the block's own state `h` at the depth below, and the state
    of the path without `u`: `s = silu(P norm(e_u) + H h + R s')`. The target's embeddings `e` serve both sides, so
    the term costs no table over the vocabulary: `b_v = C norm(e_v)`.
    """

    def __init__(self, config: JetSpecConfig) -> None:
        super().__init__()
        width, rank = config.hidden_size, config.branch_rank
        self.parent_norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.parent_proj = nn.Linear(width, rank, bias=False)
        self.state_proj = nn.Linear(width, rank, bias=False)
        self.previous_proj = nn.Linear(rank, rank, bias=False)
        self.child_norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.child_proj = nn.Linear(width, rank, bias=False)

    def advance(
        self, parent_embeds: torch.Tensor, block_states: torch.Tensor, previous: torch.Tensor | None
    ) -> torch.Tensor:
        """The states of paths, of shape `(..., rank)`.

        Args:
            parent_embeds (`torch.Tensor` of shape `(..., hidden)`): Embeddings of the paths' last tokens.
            block_states (`torch.Tensor` of shape `(..., hidden)`): The head's states one place after them.
            previous (`torch.Tensor` of shape `(..., rank)`, *optional*): The states of the paths without their last
                tokens; `None` at the anchor.
        """
        inputs = self.parent_proj(self.parent_norm(parent_embeds)) + self.state_proj(block_states)
        return nn.functional.silu(inputs if previous is None else inputs + self.previous_proj(previous))

    def states(self, parent_embeds: torch.Tensor, block_states: torch.Tensor) -> torch.Tensor:
        """The states along given paths, one per depth, of shape `(..., depth, rank)`: teacher forcing.

        Args:
            parent_embeds (`torch.Tensor` of shape `(..., depth, hidden)`): Embeddings of the anchor and of the tokens
                that follow it.
            block_states (`torch.Tensor` of shape `(..., depth, hidden)`): The head's states of the depths 1, 2, ...
        """
        previous, states = None, []
        for parents, block in zip(parent_embeds.unbind(-2), block_states.unbind(-2), strict=True):
            previous = self.advance(parents, block, previous)
            states.append(previous)
        return torch.stack(states, dim=-2)

    def table(self, embeds: torch.Tensor) -> torch.Tensor:
        """The children's factors `b_v`, of shape `(..., rank)`, from the target's embeddings `(..., hidden)`."""
        factors: torch.Tensor = self.child_proj(self.child_norm(embeds))
        return factors


class BranchScores:
    """The branch term over the block that was drafted last: a `tree.build.BranchTerm`.

    Args:
        branch (`JetSpecBranch`): The branch term.
        head (`JetSpecDraftHead`): The head it belongs to.
        state (`DraftState`): The drafting state of the generation.
    """

    def __init__(self, branch: JetSpecBranch, head: "JetSpecDraftHead", state: "DraftState") -> None:
        self._branch, self._head, self._state = branch, head, state

    def __call__(
        self, depth: int, parent_ids: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `tree.build.BranchTerm`."""
        head, device = self._head, parent_ids.device
        last = head.config.vocab_size - 1  # an `lm_head` may have more rows than there are tokens
        block_states = cast(torch.Tensor, self._state.block_states)[:, depth + 1, None]
        parents = head.embed(parent_ids.clamp(max=last), self._state)
        states = self._branch.advance(parents, block_states, None if states is None else states.to(head.device))
        scores = states @ self._factors(columns).transpose(1, 2)
        return scores.to(device), states.to(device)

    def _factors(self, columns: torch.Tensor) -> torch.Tensor:
        """The children's factors, of shape `(batch, candidates, rank)`: those of a draft vocabulary are kept."""
        head, state = self._head, self._state
        if head.draft_token_ids is None:
            return self._branch.table(head.embed(columns.clamp(max=head.config.vocab_size - 1), state))
        if state.branch_table is None:
            state.branch_table = self._branch.table(head.embed(head.draft_token_ids, state))
        return state.branch_table[columns.to(state.branch_table.device)]
