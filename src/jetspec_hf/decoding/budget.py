"""How many nodes to verify: a fixed number, or the number that pays most on this machine and this text.

Every prefix of a tree's nodes is a tree, so after the draft all sizes are open. A step of `n` nodes commits
`1 + E(n)` tokens and costs `t_verify(n)` more seconds; with `r` the best rate that can be had, in tokens per second,
the choice is `argmax_n 1 + E(n) - r t_verify(n)`. The draft is paid for by then, so whether to draft at all is decided
before: while drafting does not beat plain decoding, it pauses, and tries again later. See docs/how_it_works.md.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..tree import TokenTree
from .calibration import Calibration
from .step_costs import LADDER, PRIOR_COSTS, STATIC_LADDER, CostModel, LearnedCosts, StepCosts

FIXED, BEST, PLAIN = "fixed", "best rate", "a plain step pays more"
PAUSED, MEASURING, NOTHING = "paused", "measuring a plain step", "nothing can be accepted"

_VERIFY_PHASES = ("verify", "accept", "commit")  # of a step, draft and build aside
_FIRST = 4  # nodes of the first tree on a machine of which nothing is known
_SHORTEST_PAUSE, _LONGEST_PAUSE = 4, 64
_IN_VAIN = 0.015  # share of the time that drafts may take while they do not pay
_STALE = 256  # steps after which the plain step is measured again
_MARGIN = 1.01  # advantage that drafting must promise, for promises are uncertain
_WEIGHT = 0.08  # of the newest step in the running rate of drafting: a text's hard and easy places even out
_TURN = 0.5  # of a step that says otherwise than the rate, after a pause or in a new text
_RECENT = 8  # choices by which the next tree is built: four times the largest, for what is built costs time as well


@dataclass(frozen=True)
class BudgetDecision:
    """Why a step had the tree it had.

    Attributes:
        tree_budget (`int`): Nodes to verify besides the root.
        reason (`str`): One of the constants of this module.
        expected_tokens (`float`, *optional*): Tokens the step was expected to commit, per growing row.
        expected_seconds (`float`, *optional*): Time it was expected to take, draft included.
        plain_seconds (`float`, *optional*): The same of a plain step.
    """

    tree_budget: int
    reason: str
    expected_tokens: float | None = None
    expected_seconds: float | None = None
    plain_seconds: float | None = None

    @property
    def expected_speedup(self) -> float | None:
        """Over plain decoding, `None` where nothing was expected."""
        if self.expected_tokens is None or not self.expected_seconds or self.plain_seconds is None:
            return None
        return self.expected_tokens * self.plain_seconds / self.expected_seconds


class TreeBudget(Protocol):
    """What the decoding loop asks for the size of a step's tree."""

    def skip(self) -> BudgetDecision:
        """A step in which nothing can be drafted."""

    def before_draft(self, limit: int | None) -> BudgetDecision:
        """The most nodes that the step may verify; 0: no draft.

        Args:
            limit (`int`, *optional*): Slots that a static cache still has for them.
        """

    def after_build(self, tree: TokenTree, rows: Sequence[int]) -> BudgetDecision:
        """How many of the built nodes to verify.

        Args:
            tree (`TokenTree`): As built, of at most the nodes that `before_draft` allowed.
            rows (`list[int]`): Rows that are still growing.
        """

    def learn(self, paths: Sequence[Sequence[int]], rows: Sequence[int], seconds: dict[str, float]) -> None:
        """Takes in how the step went.

        Args:
            paths (`list[list[int]]`): Per row, the committed nodes, the root first.
            rows (`list[int]`): Rows that were still growing before the step.
            seconds (`dict[str, float]`): By phase.
        """


class FixedBudget:
    """The same number of nodes in every step.

    Args:
        tree_budget (`int`): Nodes besides the root.
    """

    def __init__(self, tree_budget: int) -> None:
        self._tree_budget = tree_budget

    def skip(self) -> BudgetDecision:
        """See [`TreeBudget`]."""
        return BudgetDecision(0, NOTHING)

    def before_draft(self, limit: int | None) -> BudgetDecision:
        """See [`TreeBudget`]."""
        return BudgetDecision(self._tree_budget if limit is None else min(limit, self._tree_budget), FIXED)

    def after_build(self, tree: TokenTree, rows: Sequence[int]) -> BudgetDecision:
        """See [`TreeBudget`]."""
        return BudgetDecision(tree.num_nodes - 1, FIXED)

    def learn(self, paths: Sequence[Sequence[int]], rows: Sequence[int], seconds: dict[str, float]) -> None:
        """Learns nothing."""


@dataclass
class Experience:
    """What a head has learned with one kind of target and batch; kept on the head between generations.

    Args:
        costs (`CostModel`): A table, or what is learned from the steps.
        calibration (`Calibration`): How far the head's probabilities can be believed.
        paused (`int`): Steps until the next draft.
        tokens (`float`): Tokens of a drafted step lately.
        cost (`float`): The same step's cost in plain steps; 0 before the first.
    """

    costs: CostModel = field(default_factory=LearnedCosts)
    calibration: Calibration = field(default_factory=Calibration)
    paused: int = 0
    tokens: float = 0.0
    cost: float = 0.0

    @property
    def speedup(self) -> float:
        """Of drafted steps lately over plain ones; 0 before the first."""
        return self.tokens / self.cost if self.cost else 0.0


class AutoBudget:
    """The number of nodes that pays most, step by step.

    Args:
        experience (`Experience`): What is known, and is learned from here on.
        static (`bool`, defaults to `False`): Whether few sizes are better, since each may be compiled.
    """

    def __init__(self, experience: Experience, static: bool = False) -> None:
        self._experience = experience
        self._costs = experience.costs
        self._calibration = experience.calibration
        self._ladder = STATIC_LADDER if static else LADDER
        experience.paused = min(experience.paused, self._shortest_pause())  # a new text may be easier
        self._pause = _SHORTEST_PAUSE
        self._is_new_text = True
        self._chosen: deque[int] = deque(maxlen=_RECENT)
        self._tree: list[list[float]] | None = None  # log-probabilities of the tree just built
        self._decision = self.skip()

    def skip(self) -> BudgetDecision:
        """See [`TreeBudget`]."""
        self._tree, self._decision = None, BudgetDecision(0, NOTHING)
        return self._decision

    def before_draft(self, limit: int | None) -> BudgetDecision:
        """See [`TreeBudget`]."""
        self._tree = None
        self._decision = self._before_draft(limit)
        return self._decision

    def _before_draft(self, limit: int | None) -> BudgetDecision:
        plain = self._costs.verify(0)
        if self._experience.paused > 0:
            self._experience.paused -= 1
            return BudgetDecision(0, PAUSED, 1.0, plain, plain)
        if isinstance(self._costs, LearnedCosts) and self._plain_is_unknown(self._costs):
            return BudgetDecision(0, MEASURING, 1.0, plain, plain)
        most = max(size for size in self._ladder if self._may_try(size) and (limit is None or size <= limit))
        return BudgetDecision(most, BEST if most else NOTHING, plain_seconds=plain)

    def _plain_is_unknown(self, costs: LearnedCosts) -> bool:
        """Whether a plain step should be measured: after the first tree, and again when its cost may have changed."""
        return costs.steps > 0 and not costs.plain_is_sure(_STALE)

    def _may_try(self, size: int) -> bool:
        """Not far above the largest size chosen lately, and not more than one rung above the largest measured one.

        What is built and not verified is work in vain, and the costs of larger trees are guesses.
        """
        if self._chosen and size > self._rung(4 * max(self._chosen)):
            return False
        return not isinstance(self._costs, LearnedCosts) or size <= self._rung(self._costs.largest_measured + 1)

    def _rung(self, size: int) -> int:
        """The smallest rung of this size, and of the first tree's, at least; the last one if none is."""
        return next((rung for rung in self._ladder if rung >= max(_FIRST, size)), self._ladder[-1])

    def after_build(self, tree: TokenTree, rows: Sequence[int]) -> BudgetDecision:
        """See [`TreeBudget`]. The tree's probabilities come to the host: one wait for the device."""
        log_probs, depths = torch.stack([tree.log_probs, tree.depths.float()]).tolist()
        self._tree = log_probs
        sizes = sorted({size for size in self._ladder if size < tree.num_nodes} | {tree.num_nodes - 1})
        chances = [self._calibration.expected(log_probs[row][1:], depths[row][1:], sizes) for row in rows]
        tokens = [1.0 + sum(sum(of_row[index]) for of_row in chances) / len(rows) for index in range(len(sizes))]
        seconds = [self._costs.verify(size) for size in sizes]
        plain, draft = self._costs.verify(0), self._costs.draft
        rate = max(self._experience.speedup, 1.0) / plain
        best = max(range(len(sizes)), key=lambda index: tokens[index] - rate * seconds[index])
        expected = seconds[best] + draft
        self._weigh(tokens[best], expected / plain)
        self._chosen.append(sizes[best])
        reason = BEST if sizes[best] else PLAIN
        self._decision = BudgetDecision(sizes[best], reason, tokens[best], expected, plain)
        return self._decision

    def _weigh(self, tokens: float, cost: float) -> None:
        """Updates what drafting is worth, and pauses it while plain decoding is faster."""
        known = self._experience
        turns = self._is_new_text or (tokens > _MARGIN * cost and known.speedup < _MARGIN)
        weight = 1.0 if not known.cost else _TURN if turns else _WEIGHT
        self._is_new_text = False
        known.tokens += weight * (tokens - known.tokens)
        known.cost += weight * (cost - known.cost)
        if known.speedup >= _MARGIN:
            self._pause = _SHORTEST_PAUSE
        else:
            known.paused = max(self._pause, self._shortest_pause())
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _shortest_pause(self) -> int:
        """Steps over which a draft in vain costs little; of a single, perhaps slow, draft not too many."""
        steps = math.ceil(self._costs.draft / (_IN_VAIN * self._costs.verify(0)))
        sure = not isinstance(self._costs, LearnedCosts) or self._costs.draft_is_sure
        return steps if sure else min(steps, _LONGEST_PAUSE)

    def learn(self, paths: Sequence[Sequence[int]], rows: Sequence[int], seconds: dict[str, float]) -> None:
        """See [`TreeBudget`]."""
        nodes = self._decision.tree_budget
        if isinstance(self._costs, LearnedCosts):
            if self._tree is not None:
                self._costs.observe_draft(seconds.get("draft", 0.0) + seconds.get("build", 0.0))
            self._costs.observe_verify(nodes, sum(seconds.get(phase, 0.0) for phase in _VERIFY_PHASES))
        self._calibration.fade()
        if self._tree is not None:
            for row in rows:
                self._calibration.learn(self._tree[row][1 : nodes + 1], [node - 1 for node in paths[row][1:]])


def make_budget(
    tree_budget: Any, step_costs: StepCosts | None, experience: Experience | None, static: bool
) -> TreeBudget:
    """The budget that the knobs ask for.

    Args:
        tree_budget (`int` or `"auto"`): The knob.
        step_costs (`StepCosts`, *optional*): A table of costs: choices then depend on the text alone.
        experience (`Experience`, *optional*): What to learn into where there is no table; `None` where time must not
            matter at all, since several processes must choose alike.
        static (`bool`): Whether the cache is static.
    """
    if tree_budget != "auto":
        return FixedBudget(tree_budget)
    if step_costs is not None:
        return AutoBudget(Experience(step_costs), static)
    return AutoBudget(Experience(PRIOR_COSTS) if experience is None else experience, static)
