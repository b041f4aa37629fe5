"""What a step costs on this machine, as a function of the tree's size: measured once, or learned from the steps.

The denominator of the choice of a tree budget (docs/how_it_works.md, "The budget"). Knows nothing of trees or tokens.
"""

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

# Sizes of trees to choose from: few enough that each is seen often.
LADDER = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
# Each size of a static cache's forward may be compiled, which takes longer than many steps.
STATIC_LADDER = (0, 8, 32, 128)

# Before anything is measured, in plain steps: what drafting costs, and what each further node adds to a verify.
DRAFT_PRIOR = 0.2
NODE_PRIOR = 0.03

_CLOCK = 1e-9  # seconds; a step that took none by the clock must not be divided by


class CostModel(Protocol):
    """What the choice of a budget asks; seconds, or any other unit that is the same throughout."""

    @property
    def draft(self) -> float:
        """Drafting and building a tree."""

    def verify(self, nodes: int) -> float:
        """Everything else of a step whose tree has this many nodes besides the root; 0: a plain step."""


@dataclass(frozen=True)
class StepCosts:
    """A table of costs, with straight lines between its entries and beyond the last, and never falling.

    With such a table in `generation_config.step_costs` the sizes of trees depend on the text alone, so that a run
    repeats itself in half precision too.

    Args:
        draft (`float`): Seconds of drafting and building a tree.
        verify_table (`dict[int, float]`): Nodes besides the root, and the seconds of everything else of such a step;
            0, a plain step, must be among them.
    """

    draft: float
    verify_table: Mapping[int, float]

    def __post_init__(self) -> None:
        """Checks every number."""
        for name, seconds in (("draft", self.draft), *((f"verify[{n}]", s) for n, s in self.verify_table.items())):
            if (
                not _is_number(seconds)
                or not seconds <= sys.float_info.max
                or seconds < 0
                or (seconds == 0 and name != "draft")
            ):
                raise ValueError(f"`step_costs` must hold seconds above 0, got {seconds!r} for {name}.")
        sizes = list(self.verify_table)
        if 0 not in sizes or any(not isinstance(size, int) or isinstance(size, bool) or size < 0 for size in sizes):
            raise ValueError(
                "`step_costs` must have a `verify` from numbers of nodes to seconds, 0 (a plain step) among them, got "
                f"{sizes!r}."
            )

    @classmethod
    def from_dict(cls, values: Any) -> "StepCosts":
        """Reads what a generation config holds.

        Args:
            values (`dict`): `{"draft": 0.01, "verify": {"0": 0.05, "8": 0.07}}`; JSON makes texts of the sizes.

        Raises:
            ValueError: If it is not of that form; the message names what is wrong.
        """
        if (
            not isinstance(values, Mapping)
            or set(values) != {"draft", "verify"}
            or not isinstance(values["verify"], Mapping)
        ):
            raise ValueError(
                '`step_costs` must be a dict such as {"draft": 0.01, "verify": {"0": 0.05, "8": 0.07}} (seconds), got '
                f"{values!r}."
            )
        try:
            table = {int(size): seconds for size, seconds in values["verify"].items()}
        except (TypeError, ValueError):
            raise ValueError(
                f"`step_costs` must have numbers of nodes in `verify`, got {list(values['verify'])!r}."
            ) from None
        return cls(values["draft"], dict(sorted(table.items())))

    def to_dict(self) -> dict[str, Any]:
        """The form that [`from_dict`] reads and JSON keeps."""
        return {"draft": self.draft, "verify": {str(size): seconds for size, seconds in self.verify_table.items()}}

    def verify(self, nodes: int) -> float:
        """Seconds of a step without its draft.

        Args:
            nodes (`int`): Nodes besides the root.
        """
        return _interpolate(_rising([(size, cost, 1) for size, cost in sorted(self.verify_table.items())]), nodes)


@dataclass
class LearnedCosts:
    """Costs learned from the steps themselves.

    Per size the median of the last observations. The first of a size, and of a draft, is not trusted, for it pays for
    allocations and kernels that later ones find ready, and what has not been seen for long is forgotten: an unlucky
    measurement, a busy minute or a shorter context must not decide for ever.
    """

    draft_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    verify_seconds: dict[int, deque[float]] = field(default_factory=dict)
    last_seen: dict[int, int] = field(default_factory=dict)
    first_seconds: dict[int, float] = field(default_factory=dict)
    has_drafted: bool = False
    steps: int = 0

    REMEMBERED = 1000  # steps after which a size is forgotten

    def observe_draft(self, seconds: float) -> None:
        """Adds one measurement of drafting and building."""
        if self.has_drafted:
            self.draft_seconds.append(seconds)
        self.has_drafted = True

    def observe_verify(self, nodes: int, seconds: float) -> None:
        """Adds one measurement of the rest of a step.

        Args:
            nodes (`int`): Nodes besides the root.
            seconds (`float`): Time on the clock.
        """
        self.steps += 1
        seconds = max(seconds, _CLOCK)
        if nodes not in self.first_seconds:
            self.first_seconds[nodes] = seconds
            return
        self.verify_seconds.setdefault(nodes, deque(maxlen=9)).append(seconds)
        self.last_seen[nodes] = self.steps
        for size, step in list(self.last_seen.items()):
            if size and self.steps - step > self.REMEMBERED:
                del self.verify_seconds[size], self.last_seen[size]

    @property
    def largest_measured(self) -> int:
        """The largest size whose cost is known; 0 if none is."""
        return max(self.verify_seconds, default=0)

    @property
    def plain_age(self) -> int | None:
        """Steps since a plain step was measured, `None` if none was."""
        return self.steps - self.last_seen[0] if 0 in self.last_seen else None

    @property
    def draft(self) -> float:
        """See [`CostModel`]."""
        return median(self.draft_seconds) if self.draft_seconds else DRAFT_PRIOR * self.verify(0)

    def verify(self, nodes: int) -> float:
        """See [`CostModel`]: in plain steps until something is measured, then in seconds.

        Args:
            nodes (`int`): Nodes besides the root.
        """
        known = _rising([(size, median(times), len(times)) for size, times in sorted(self.verify_seconds.items())])
        if not known:
            known = sorted(self.first_seconds.items())[:1]
        if not known:
            return 1.0 + NODE_PRIOR * nodes
        if known[0][0] > 0:  # no plain step yet
            size, seconds = known[0]
            known.insert(0, (0, seconds / (1.0 + NODE_PRIOR * size)))
        largest, seconds = known[-1]
        if nodes <= largest:
            return _interpolate(known, nodes)
        # The first node is often the dearest, so the line to a plain step says nothing of larger trees.
        halves = [point for point in known if 0 < point[0] <= largest / 2]
        slope = (seconds - halves[-1][1]) / (largest - halves[-1][0]) if halves else NODE_PRIOR * known[0][1]
        return seconds + slope * (nodes - largest)


def _rising(points: list[tuple[int, float, int]]) -> list[tuple[int, float]]:
    """The nearest costs that never fall with the size: larger trees do not cost less, measurements are noisy.

    Args:
        points (`list`): Size, seconds and weight, by size.

    Returns:
        `list[tuple[int, float]]`: Size and seconds.
    """
    pools: list[tuple[list[int], float, int]] = []
    for size, seconds, weight in points:
        pools.append(([size], seconds, weight))
        while len(pools) > 1 and pools[-2][1] > pools[-1][1]:
            (sizes, below, light), (more, above, heavy) = pools[-2:]
            pools[-2:] = [(sizes + more, (below * light + above * heavy) / (light + heavy), light + heavy)]
    return [(size, seconds) for sizes, seconds, _ in pools for size in sizes]


def _interpolate(points: list[tuple[int, float]], nodes: int) -> float:
    """On the line between the neighbours of `nodes`; beyond the last point, on that through the last two."""
    sizes = [size for size, _ in points]
    index = bisect_left(sizes, nodes)
    if index < len(points) and sizes[index] == nodes:
        return points[index][1]
    if len(points) == 1:
        return points[0][1]
    low, high = points[-2:] if index == len(points) else points[index - 1 : index + 1]
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return high[1] + slope * (nodes - high[0])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Relative costs of a machine of which nothing is known, and where time must not matter.
PRIOR_COSTS = StepCosts(DRAFT_PRIOR, {0: 1.0, 100: 1.0 + 100 * NODE_PRIOR})
