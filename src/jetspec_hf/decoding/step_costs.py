"""What a step costs on this machine, as a function of the tree's size: measured once, or learned from the steps.

The denominator of the choice of a tree budget (docs/how_it_works.md, "The budget"). Knows nothing of trees or tokens.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Protocol

# Sizes of trees to choose from: few enough that each is seen often.
LADDER = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
# Each size of a static cache's forward may be compiled, which takes longer than many steps.
STATIC_LADDER = (0, 8, 32, 128)

# Before anything is measured, in plain steps: what drafting costs, and what each further node adds to a verify.
DRAFT_PRIOR = 0.2
NODE_PRIOR = 0.03

_CLOCK = 1e-9  # seconds; a step that took none by the clock must not be divided by
_AGES = 1e9  # seconds, more than any step takes


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
            least = 0 if name == "draft" else _CLOCK
            if not _is_number(seconds) or not least <= seconds <= _AGES:
                raise ValueError(
                    f"`step_costs` must hold seconds from {least:g} to {_AGES:g} for {name}, got {seconds!r}."
                )
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
        table = {int(size): seconds for size, seconds in values["verify"].items() if _is_size(size)}
        if len(table) < len(values["verify"]):
            raise ValueError(
                f"`step_costs` must have different numbers of nodes in `verify`, got {list(values['verify'])!r}."
            )
        return cls(values["draft"], dict(sorted(table.items())))

    def to_dict(self) -> dict[str, Any]:
        """The form that [`from_dict`] reads and JSON keeps."""
        return {"draft": self.draft, "verify": {str(size): seconds for size, seconds in self.verify_table.items()}}

    def verify(self, nodes: int) -> float:
        """Seconds of a step without its draft.

        Args:
            nodes (`int`): Nodes besides the root.
        """
        return _interpolate(_rising(sorted(self.verify_table.items())), nodes)


_Observations = deque[tuple[int, float]]  # the step, and its seconds


@dataclass
class LearnedCosts:
    """Costs learned from the steps themselves.

    Of a draft and per size the median of the last observations, of two the lower. The first ever is not trusted, for it
    pays for allocations and kernels that later ones find ready. Old observations are forgotten, and no size is taken to
    cost more than a larger one does: an unlucky measurement, a busy minute or a shorter context must not decide for
    ever.
    """

    draft_seconds: _Observations = field(default_factory=lambda: deque(maxlen=9))
    verify_seconds: dict[int, _Observations] = field(default_factory=dict)
    first_seconds: dict[int, float] = field(default_factory=dict)
    has_drafted: bool = False
    steps: int = 0

    REMEMBERED = 128  # steps after which an observation is forgotten
    SURE = 2  # observations of which one may be an outlier

    def observe_draft(self, seconds: float) -> None:
        """Adds one measurement of drafting and building."""
        if self.has_drafted:
            self.draft_seconds.append((self.steps, seconds))
            self._forget(self.draft_seconds, kept=self.SURE)
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
        self.verify_seconds.setdefault(nodes, deque(maxlen=9)).append((self.steps, seconds))
        for size, times in list(self.verify_seconds.items()):
            self._forget(times, kept=0 if size else self.SURE)
            if not times:
                del self.verify_seconds[size]

    def _forget(self, times: _Observations, kept: int) -> None:
        """Drops old observations, but for the last `kept`: of plain steps and drafts old ones say more than none."""
        while len(times) > kept and self.steps - times[0][0] > self.REMEMBERED:
            times.popleft()

    @property
    def largest_measured(self) -> int:
        """The largest size whose cost is known; 0 if none is."""
        return max(self.verify_seconds, default=0)

    def plain_is_sure(self, age: int) -> bool:
        """Whether enough plain steps were measured within the last `age` steps."""
        return sum(self.steps - step <= age for step, _ in self.verify_seconds.get(0, ())) >= self.SURE

    @property
    def draft_is_sure(self) -> bool:
        """Whether enough drafts were measured."""
        return len(self.draft_seconds) >= self.SURE

    @property
    def draft(self) -> float:
        """See [`CostModel`]."""
        return _typical(self.draft_seconds) if self.draft_seconds else DRAFT_PRIOR * self.verify(0)

    def verify(self, nodes: int) -> float:
        """See [`CostModel`]: in plain steps until something is measured, then in seconds.

        Args:
            nodes (`int`): Nodes besides the root.
        """
        known = _rising((size, _typical(times)) for size, times in sorted(self.verify_seconds.items()))
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


def _typical(times: _Observations) -> float:
    return median_low(seconds for _, seconds in times)


def _rising(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """The same costs, none above that of a larger size: fewer nodes cost no more, and measurements may be old or noisy.

    Args:
        points (`Iterable`): Size and seconds, by size.
    """
    risen: list[tuple[int, float]] = []
    for size, seconds in reversed(list(points)):
        risen.append((size, min(seconds, risen[-1][1]) if risen else seconds))
    return risen[::-1]


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


def _is_size(value: object) -> bool:
    """Whether it is a number of nodes, perhaps as JSON writes the keys of a table; whether of a tree is told later."""
    if isinstance(value, str):
        return value.removeprefix("-").isdecimal()
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Relative costs of a machine of which nothing is known, and where time must not matter.
PRIOR_COSTS = StepCosts(DRAFT_PRIOR, {0: 1.0, 100: 1.0 + 100 * NODE_PRIOR})
