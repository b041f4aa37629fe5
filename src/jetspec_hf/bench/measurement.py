"""What one generation was measured to be, and the medians and quartiles of several."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..decoding.output import PHASES

FORWARDS = ("draft", "verify")
OWN_WORK = tuple(phase for phase in PHASES if phase not in FORWARDS)


@dataclass(frozen=True)
class Measurement:
    """One generation.

    Args:
        texts (`tuple[tuple[int, ...], ...]`): Each row's new tokens, EOS included and nothing after it.
        seconds (`float`): Duration of the whole `generate` call.
        prefill_seconds (`float`): Of that, up to the end of the first forward of the target.
        forwards (`int`): Forwards of the target, the prefill included.
        row_forwards (`int`): Forwards after the prefill, each counted once for every row that was unfinished.
        tree_sizes (`tuple[int, ...]`): Nodes besides the root, per step; empty without our trees.
        reasons (`Mapping[str, int]`): Steps by the reason for the size of their tree.
        step_seconds (`tuple[Mapping[str, float], ...]`): Seconds by phase, per step; empty without our trees.
        phased_seconds (`float`): Time after the prefill of the generation that `step_seconds` are from. On an
            accelerator that is another generation of the same text, one that waits for the device.
    """

    texts: tuple[tuple[int, ...], ...]
    seconds: float
    prefill_seconds: float = 0.0
    forwards: int = 1
    row_forwards: int = 0
    tree_sizes: tuple[int, ...] = ()
    reasons: Mapping[str, int] = field(default_factory=dict)
    step_seconds: tuple[Mapping[str, float], ...] = field(default=(), repr=False)
    phased_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.texts))

    @property
    def later_tokens(self) -> int:
        """New tokens without those that the prefill gave."""
        return self.tokens - len(self.texts)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of the whole call, prefill included."""
        return self.tokens / self.seconds

    @property
    def decoding_seconds(self) -> float:
        """Time after the prefill."""
        return self.seconds - self.prefill_seconds

    @property
    def mean_acceptance_length(self) -> float:
        """τ: tokens per forward of the target and unfinished row, the prefill left out; 0 if nothing followed it."""
        return self.later_tokens / self.row_forwards if self.row_forwards else 0.0

    def phase_seconds(self) -> dict[str, float]:
        """Sum over steps by phase, and `rest`, which no phase claims; empty without our trees."""
        if not self.step_seconds:
            return {}
        sums = {phase: sum(step.get(phase, 0.0) for step in self.step_seconds) for phase in PHASES}
        return {**sums, "rest": self.phased_seconds - sum(sums.values())}

    def per_step(self) -> dict[str, float]:
        """Seconds per step: every phase, `rest`, and `step`, their sum.

        Raises:
            ValueError: If there was no step.
        """
        if not self.step_seconds:
            raise ValueError("A generation must have steps to be divided by them, got none.")
        steps = len(self.step_seconds)
        phases = {phase: seconds / steps for phase, seconds in self.phase_seconds().items()}
        return {**phases, "step": self.phased_seconds / steps}


def own_work_share(per_step: Mapping[str, float]) -> float:
    """Share of a step spent outside the two forwards.

    Args:
        per_step (`Mapping[str, float]`): As `Measurement.per_step` returns it.
    """
    return 1.0 - sum(per_step[phase] for phase in FORWARDS) / per_step["step"]


def median_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each entry.

    Args:
        rows (`Sequence[Mapping[str, float]]`): One at least, all with the same entries.
    """
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile, interpolated between the values.

    Args:
        values (`Sequence[float]`): One at least.
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, middle, upper
