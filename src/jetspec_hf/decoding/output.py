"""What a generation with a draft head returns besides the tokens."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..tree import TokenTree
from .budget import BudgetDecision

PHASES = ("draft", "build", "verify", "accept", "commit")


@dataclass
class AcceptanceStats:
    """How drafting went: acceptance lengths, tree sizes and time by phase.

    Attributes:
        accepted_lengths (`list[list[int]]`): Per row, the tokens committed by each step in which the row was
            unfinished: the accepted nodes and the bonus token.
        steps (`int`): Target forwards after the prefill.
        tree_sizes (`list[int]`): Per step, the nodes verified besides the root.
        reached_by_depth (`list[int]`): Row-steps whose tree had a node at depth 1, 2, ...
        accepted_by_depth (`list[int]`): Row-steps that accepted a node at depth 1, 2, ...
        prefill_seconds (`float`): Time of the prefill and the first token.
        step_seconds (`list[dict[str, float]]`): Per step, the seconds of draft, build, verify, accept and commit. Wall
            time of the host: on an accelerator a phase may pay for what an earlier one queued.
        last_tree (`TokenTree`, *optional*): The last step's tree.
        last_path (`list[list[int]]`): Per row, the accepted nodes of that tree, the root first.
        decisions (`list[BudgetDecision]`): Per step, why the tree had that size, and what was expected of it.
    """

    accepted_lengths: list[list[int]]
    steps: int = 0
    tree_sizes: list[int] = field(default_factory=list)
    reached_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    step_seconds: list[dict[str, float]] = field(default_factory=list)
    last_tree: TokenTree | None = None
    last_path: list[list[int]] = field(default_factory=list)
    decisions: list[BudgetDecision] = field(default_factory=list)

    @classmethod
    def of_batch(cls, batch_size: int) -> "AcceptanceStats":
        """Empty statistics of a batch."""
        return cls(accepted_lengths=[[] for _ in range(batch_size)])

    @property
    def mean_acceptance_length(self) -> float:
        """τ: tokens committed per target forward and unfinished row, 1 + accepted; 0 if no step was needed."""
        lengths = [length for row in self.accepted_lengths for length in row]
        return sum(lengths) / len(lengths) if lengths else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of row-steps, among those whose tree reached depth 1, 2, ..., that accepted a node there."""
        pairs = zip(self.accepted_by_depth, self.reached_by_depth, strict=True)
        return [accepted / reached for accepted, reached in pairs]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase: prefill, draft, build, verify, accept, commit."""
        sums = {phase: sum(step.get(phase, 0.0) for step in self.step_seconds) for phase in PHASES}
        return {"prefill": self.prefill_seconds, **sums}

    @property
    def reasons(self) -> dict[str, int]:
        """Steps by the reason for the size of their tree, the most frequent first."""
        return dict(Counter(decision.reason for decision in self.decisions).most_common())

    def record(
        self,
        tree: TokenTree,
        depths: Sequence[Sequence[int]],
        paths: Sequence[Sequence[int]],
        rows: Sequence[int],
        decision: BudgetDecision,
    ) -> None:
        """Adds one step.

        Args:
            tree (`TokenTree`): The verified tree.
            depths (`list[list[int]]`): Its nodes' depths.
            paths (`list[list[int]]`): Per row, the committed nodes, the root first.
            rows (`list[int]`): The rows that were unfinished before the step.
            decision (`BudgetDecision`): Why the tree had its size.
        """
        self.steps += 1
        self.decisions.append(decision)
        self.tree_sizes.append(tree.num_nodes - 1)
        self.last_tree, self.last_path = tree, [list(path) for path in paths]
        deepest = [max(of_row) for of_row in depths]
        for counts in (self.reached_by_depth, self.accepted_by_depth):
            counts.extend([0] * (max(deepest[row] for row in rows) - len(counts)))
        for row in rows:
            self.accepted_lengths[row].append(len(paths[row]))
            for depth in range(deepest[row]):
                self.reached_by_depth[depth] += 1
                self.accepted_by_depth[depth] += depth < len(paths[row]) - 1

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the time spent inside to the step under way."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.step_seconds[-1][phase] = self.step_seconds[-1].get(phase, 0.0) + time.perf_counter() - start


@dataclass
class JetSpecGenerateOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with the statistics of drafting.

    Args:
        acceptance (`AcceptanceStats`): How drafting went.
        kwargs: See `GenerateDecoderOnlyOutput`.
    """

    acceptance: AcceptanceStats | None = None


class HiddenStates:
    """The hidden states that plain decoding would return: those of the prompt, then those of each token that was fed.

    Args:
        generation_config (`GenerationConfig`): Nothing is kept unless it asks for them.
    """

    def __init__(self, generation_config: GenerationConfig) -> None:
        wanted = generation_config.return_dict_in_generate and generation_config.output_hidden_states
        self.per_token: tuple[tuple[torch.Tensor, ...], ...] | None = () if wanted else None

    def add_prompt(self, outputs: Any) -> None:
        """Adds those of the prefill, of shape `(batch, length, hidden)` per layer."""
        if self.per_token is not None:
            self.per_token += (outputs.hidden_states,)

    def add_path(self, outputs: Any, paths: Sequence[Sequence[int]]) -> None:
        """Adds those of the accepted nodes, of shape `(batch, 1, hidden)` per layer; all paths are of one length."""
        if self.per_token is None:
            return
        for nodes in zip(*paths, strict=True):
            rows = range(len(nodes))
            picked = (layer[..., list(rows), list(nodes), :].unsqueeze(-2) for layer in outputs.hidden_states)
            self.per_token += (tuple(picked),)
