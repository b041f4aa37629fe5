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

    def parents(self, embeds: torch.Tensor) -> torch.Tensor:
        """What tokens add to the states of the paths they end: `P norm(e_u)`, of shape `(..., rank)`.

        Args:
            embeds (`torch.Tensor` of shape `(..., hidden)`): The target's embeddings of the tokens.
        """
        inputs: torch.Tensor = self.parent_proj(self.parent_norm(embeds))
        return inputs

    def advance(self, parents: torch.Tensor, blocks: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        """The states of paths, of shape `(..., rank)`.

        Args:
            parents (`torch.Tensor` of shape `(..., rank)`): Of the paths' last tokens, what [`parents`] returns.
            blocks (`torch.Tensor` of shape `(..., rank)`): `H h`, of the head's states `h` one place after them.
            previous (`torch.Tensor` of shape `(..., rank)`, *optional*): The states of the paths without their last
                tokens; `None` at the anchor.
        """
        inputs = parents + blocks
        return nn.functional.silu(inputs if previous is None else inputs + self.previous_proj(previous))

    def states(self, parent_embeds: torch.Tensor, block_states: torch.Tensor) -> torch.Tensor:
        """The states along given paths, one per depth, of shape `(..., depth, rank)`: teacher forcing.

        Args:
            parent_embeds (`torch.Tensor` of shape `(..., depth, hidden)`): Embeddings of the anchor and of the tokens
                that follow it.
            block_states (`torch.Tensor` of shape `(..., depth, hidden)`): The head's states of the depths 1, 2, ...
        """
        previous, states = None, []
        inputs = (self.parents(parent_embeds), self.state_proj(block_states))
        for parents, blocks in zip(*(tensor.unbind(-2) for tensor in inputs), strict=True):
            previous = self.advance(parents, blocks, previous)
            states.append(previous)
        return torch.stack(states, dim=-2)

    def table(self, embeds: torch.Tensor) -> torch.Tensor:
        """The children's factors `b_v`, of shape `(..., rank)`, from the target's embeddings `(..., hidden)`."""
        factors: torch.Tensor = self.child_proj(self.child_norm(embeds))
        return factors


class BranchScores:
    """The branch term over the block that was drafted last: a `tree.build.BranchTerm`.

    Below the anchor, which may be any token, the last tokens of paths must be drafted ones: those of the draft
    vocabulary, where there is one.

    Args:
        branch (`JetSpecBranch`): The branch term.
        head (`JetSpecDraftHead`): The head it belongs to.
        state (`DraftState`): The drafting state of the generation.
    """

    def __init__(self, branch: JetSpecBranch, head: "JetSpecDraftHead", state: "DraftState") -> None:
        self._branch, self._head, self._state = branch, head, state
        self._blocks: torch.Tensor | None = None  # `H h` of all depths, of shape (batch, block, rank)

    def __call__(
        self, depth: int, parent_ids: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `tree.build.BranchTerm`."""
        device, head_device = parent_ids.device, self._head.device
        if self._blocks is None:
            self._blocks = self._branch.state_proj(cast(torch.Tensor, self._state.block_states))
        parents = self._parents(parent_ids.to(head_device), are_drafted=states is not None)
        previous = None if states is None else states.to(head_device)
        states = self._branch.advance(parents, self._blocks[:, depth + 1, None], previous)
        scores = states @ self._factors(columns.to(head_device)).transpose(1, 2)
        return scores.to(device), states.to(device)

    def _parents(self, token_ids: torch.Tensor, are_drafted: bool) -> torch.Tensor:
        """What these tokens add to the states of paths that end in them, of shape `(batch, paths, rank)`."""
        vocabulary = self._head.draft_token_ids
        if vocabulary is None or not are_drafted:  # the anchor may be any token
            return self._branch.parents(self._embed(token_ids))
        return self._tables(vocabulary)[1][torch.searchsorted(vocabulary, token_ids.contiguous())]

    def _factors(self, columns: torch.Tensor) -> torch.Tensor:
        """The children's factors, of shape `(batch, candidates, rank)`."""
        vocabulary = self._head.draft_token_ids
        return self._branch.table(self._embed(columns)) if vocabulary is None else self._tables(vocabulary)[0][columns]

    def _tables(self, vocabulary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all tokens of a draft vocabulary the factors as children and the inputs as parents, made once."""
        if self._state.branch_tables is None:
            embeds = self._embed(vocabulary)
            self._state.branch_tables = self._branch.table(embeds), self._branch.parents(embeds)
        return self._state.branch_tables

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        last = self._head.config.vocab_size - 1  # an `lm_head` may have more rows than there are tokens
        return self._head.embed(token_ids.clamp(max=last), self._state)
