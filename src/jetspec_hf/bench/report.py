"""What the runs of a benchmark come to: medians, quartiles, shares, and the tables and JSON made of them."""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .phases import PHASES, Measurement, describe_machine, format_table
from .runner import PLAIN, CaseKey, Difference, Run, RunKey

PROCESSOR_FLAGS = ("avx2", "avx512_bf16", "amx_bf16")
NOTES = (
    "τ: tokens per target forward, the prefill and the token it gives left out. Speed-up: median over prompts of plain "
    "time per token divided by the method's, with lower and upper quartile. Identical: prompts whose tokens are those "
    "of plain decoding; margin: the largest gap, in the logits on which plain greedy decoding chooses, between its own "
    "token and the other at the first difference. Phases: shares of the time after the prefill. Stock prompt lookup "
    "draws for rejected tokens too, so its sampled text is another draw from the same distribution."
)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile, interpolated between the values.

    Args:
        values (`Sequence[float]`): One at least.
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, middle, upper


@dataclass(frozen=True)
class Row:
    """What a method makes of a task under a decoding.

    Args:
        task (`str`): The task.
        decoding (`str`): The decoding.
        method (`str`): The method.
        prompts (`int`): How many.
        new_tokens (`float`): Median over prompts.
        mean_acceptance_length (`float`, *optional*): τ over all prompts together; `None` if there was nothing after
            the prefill.
        tokens_per_second (`float`): Median over prompts.
        speedup (`tuple[float, float, float]`): Lower quartile, median and upper quartile over prompts of plain time
            per token divided by this method's.
        identical (`int`): Prompts whose text is that of plain decoding in every repeat.
        largest_margin (`float`, *optional*): Among the other prompts' margins, if there are any.
        phase_shares (`dict[str, float]`, *optional*): By phase, and `rest`, of the time after the prefill; of methods
            with the head only.
    """

    task: str
    decoding: str
    method: str
    prompts: int
    new_tokens: float
    mean_acceptance_length: float | None
    tokens_per_second: float
    speedup: tuple[float, float, float]
    identical: int
    largest_margin: float | None
    phase_shares: dict[str, float] | None


def summarise(runs: Sequence[Run], differences: Mapping[RunKey, Difference]) -> list[Row]:
    """The table's rows: task by task, decoding by decoding, method by method, plain decoding first.

    Args:
        runs (`Sequence[Run]`): Repeats of a text count as one, at their median time.
        differences (`dict`): As `Benchmark.differences` returns them.
    """
    groups: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in runs:
        group = groups.setdefault((run.case.prompt.task, run.case.decoding), {})
        group.setdefault(run.method, []).append(run)
    methods = list(dict.fromkeys(run.method for run in runs))  # the first text's are not rotated
    return [
        _row(task, decoding, method, group, differences)
        for (task, decoding), group in groups.items()
        for method in methods
    ]


def _row(
    task: str,
    decoding: str,
    method: str,
    group: Mapping[str, Sequence[Run]],
    differences: Mapping[RunKey, Difference],
) -> Row:
    runs = group[method]
    plain_times, times = _time_per_token(group[PLAIN]), _time_per_token(runs)
    found = [differences.get((*key, method)) for key in times]
    margins = [difference.margin for difference in found if difference is not None and difference.margin is not None]
    drafted = sum(len(run.measurement.tokens) - 1 for run in runs)
    forwards = sum(run.target_forwards - 1 for run in runs)
    return Row(
        task,
        decoding,
        method,
        prompts=len(times),
        new_tokens=statistics.median(len(run.measurement.tokens) for run in runs),
        mean_acceptance_length=drafted / forwards if forwards else None,
        tokens_per_second=statistics.median(1 / seconds for seconds in times.values()),
        speedup=quartiles([plain_times[key] / seconds for key, seconds in times.items()]),
        identical=found.count(None),
        largest_margin=max(margins) if margins else None,
        phase_shares=_phase_shares([run.measurement for run in runs]),
    )


def _time_per_token(runs: Sequence[Run]) -> dict[CaseKey, float]:
    repeats: dict[CaseKey, list[float]] = {}
    for run in runs:
        repeats.setdefault(run.case.key, []).append(1 / run.measurement.tokens_per_second)
    return {key: statistics.median(times) for key, times in repeats.items()}


def _phase_shares(measurements: Sequence[Measurement]) -> dict[str, float] | None:
    drafted = [measurement for measurement in measurements if measurement.step_seconds]
    if not drafted:
        return None
    decoding = sum(measurement.seconds - measurement.phase_seconds["prefill"] for measurement in drafted)
    shares = {phase: sum(measurement.phase_seconds[phase] for measurement in drafted) / decoding for phase in PHASES}
    return {**shares, "rest": 1.0 - sum(shares.values())}


def tables(rows: Sequence[Row]) -> str:
    """A Markdown table per task.

    Args:
        rows (`Sequence[Row]`): As `summarise` returns them.
    """
    phases = (*PHASES, "rest")
    header = ("", "tokens", "τ", "tokens/s", "speed-up", "identical", "margin", *(f"{phase}, %" for phase in phases))
    parts = []
    for task in dict.fromkeys(row.task for row in rows):
        of_task = [row for row in rows if row.task == task]
        parts.append(f"**{task}** (prompts: {of_task[0].prompts})\n")
        parts.append(format_table(header, [_cells(row, phases) for row in of_task]) + "\n")
    return "\n".join(parts)


def _cells(row: Row, phases: Sequence[str]) -> list[str]:
    lower, middle, upper = row.speedup
    tau, shares = row.mean_acceptance_length, row.phase_shares
    plain = row.method == PLAIN
    return [
        f"{row.decoding}, {row.method}",
        f"{row.new_tokens:g}",
        "-" if tau is None else f"{tau:.2f}",
        f"{row.tokens_per_second:.2f}",
        "1" if plain else f"{middle:.2f} ({lower:.2f}–{upper:.2f})",
        "-" if plain else f"{row.identical} of {row.prompts}",
        "-" if row.largest_margin is None else f"{row.largest_margin:.3f}",
        *("-" if shares is None else f"{100 * shares[phase]:.1f}" for phase in phases),
    ]


def as_json(
    machine: Mapping[str, Any],
    settings: Mapping[str, Any],
    rows: Sequence[Row],
    runs: Sequence[Run],
    differences: Mapping[RunKey, Difference],
) -> dict[str, Any]:
    """Everything that was measured, for `json.dump`.

    Args:
        machine (`dict`): As `machine` returns it.
        settings (`dict`): What was asked for.
        rows (`Sequence[Row]`): The tables.
        runs (`Sequence[Run]`): All generations, in their order in time.
        differences (`dict`): As `Benchmark.differences` returns them.
    """

    def entry(run: Run) -> dict[str, Any]:
        difference = differences.get(run.key)
        return {
            "task": run.case.prompt.task,
            "id": run.case.prompt.id,
            "decoding": run.case.decoding,
            "method": run.method,
            "prompt_tokens": run.case.input_ids.shape[1],
            "new_tokens": len(run.measurement.tokens),
            "seconds": run.measurement.seconds,
            "target_forwards": run.target_forwards,
            "phase_seconds": dict(run.measurement.phase_seconds),
            "first_difference": None if difference is None else difference.position,
            "margin": None if difference is None else difference.margin,
        }

    return {
        "machine": dict(machine),
        "settings": dict(settings),
        "summary": [asdict(row) for row in rows],
        "runs": [entry(run) for run in runs],
    }


def machine() -> dict[str, Any]:
    """Processor, versions, cores, and which of the instructions that make half precision fast there are."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    return {"description": describe_machine(), "cores": os.cpu_count(), "flags": processor_flags(text)}


def processor_flags(cpuinfo: str) -> dict[str, bool]:
    """Which of `PROCESSOR_FLAGS` a processor has.

    Args:
        cpuinfo (`str`): Text of Linux's `/proc/cpuinfo`; nothing counts as there without it.
    """
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    found = {flag for name, _, flags in lines if name.strip() == "flags" for flag in flags.split()}
    return {flag: flag in found for flag in PROCESSOR_FLAGS}
