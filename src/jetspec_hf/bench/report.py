"""What the runs of a benchmark come to: medians, quartiles, ceilings, and the tables and JSON made of them."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..decoding.output import PHASES
from .markdown import format_table, milliseconds
from .measurement import FORWARDS, Measurement, quartiles
from .methods import AUTO, PLAIN, TREE
from .runner import CaseKey, Differences, Run

AUTO_TREE = f"{TREE} {AUTO}"
NOTES = (
    "τ: tokens per target forward, the prefill and the token it gives left out. Nodes: mean size of the trees. "
    "Speed-up: median over prompts of plain time per token divided by the method's, prefill included, with lower and "
    "upper quartile. Ceiling: plain time per token divided by that of draft and verify alone, prefill left out; share: "
    "how much of it the speed-up after the prefill comes to, for auto of the highest ceiling of all trees. Identical: "
    "texts that are those of plain decoding; margin: the largest gap, in the logits on which plain greedy decoding "
    "chooses, between its own token and the other at the first difference. What transformers drafts is sampled with "
    "draws of its own, so sampled text of prompt lookup, assistants and the stock chain is another draw from the same "
    "distribution; so are sampled batches."
)


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
        tree_size (`float`, *optional*): Mean number of nodes besides the root; of our trees only.
        tokens_per_second (`float`): Median over generations.
        speedup (`tuple[float, float, float]`): Lower quartile, median and upper quartile over generations of plain time
            per token divided by this method's.
        decoding_speedup (`float`, *optional*): The same after the prefill, over all prompts together.
        ceiling (`float`, *optional*): What that would be if a step were its two forwards alone; of our trees only.
        ceiling_share (`float`, *optional*): Share of the ceiling that was reached, for the automatic budget of the
            highest ceiling among all trees.
        identical (`int`): Prompts whose text is that of plain decoding in every repeat.
        largest_margin (`float`, *optional*): Among the other prompts' margins, if there are any.
        step_seconds (`dict[str, float]`, *optional*): By phase, `rest`, and `step`, their sum, per step; of our trees
            only.
    """

    task: str
    decoding: str
    method: str
    prompts: int
    new_tokens: float
    mean_acceptance_length: float | None
    tree_size: float | None
    tokens_per_second: float
    speedup: tuple[float, float, float]
    decoding_speedup: float | None
    ceiling: float | None
    ceiling_share: float | None
    identical: int
    largest_margin: float | None
    step_seconds: dict[str, float] | None


def summarise(runs: Sequence[Run], differences: Differences) -> list[Row]:
    """The table's rows: task by task, decoding by decoding, method by method, plain decoding first.

    Args:
        runs (`Sequence[Run]`): Repeats of a text count as one, at their median time.
        differences (`dict`): As `Benchmark.differences` returns them.
    """
    groups: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in runs:
        group = groups.setdefault((run.key[0], run.case.decoding), {})
        group.setdefault(run.method, []).append(run)
    methods = list(dict.fromkeys(run.method for run in runs))  # the first text's are not rotated
    rows = []
    for (task, decoding), group in groups.items():
        of_group = [_row(task, decoding, method, group, differences) for method in methods]
        highest = max((row.ceiling for row in of_group if row.ceiling is not None), default=None)
        rows += [_with_share(row, highest if row.method == AUTO_TREE else row.ceiling) for row in of_group]
    return rows


def _row(task: str, decoding: str, method: str, group: Mapping[str, Sequence[Run]], differences: Differences) -> Row:
    runs, measured = group[method], [run.measurement for run in group[method]]
    plain = [run.measurement for run in group[PLAIN]]
    plain_times, times = _time_per_token(group[PLAIN]), _time_per_token(runs)
    prompts = {run.case.key: len(run.case.prompts) for run in runs}
    found = [difference for key in times for difference in differences.get((*key, method), ()) if difference]
    margins = [difference.margin for difference in found if difference.margin is not None]
    later, row_forwards = _later_tokens(measured), sum(measurement.row_forwards for measurement in measured)
    sizes = [size for measurement in measured for size in measurement.tree_sizes]
    steps = _step_seconds(measured)
    speedup = ceiling = None
    if later:
        plain_time = sum(measurement.decoding_seconds for measurement in plain) / _later_tokens(plain)
        speedup = plain_time * later / sum(measurement.decoding_seconds for measurement in measured)
        if steps is not None:
            ceiling = plain_time * later / (len(sizes) * sum(steps[phase] for phase in FORWARDS))
    return Row(
        task,
        decoding,
        method,
        prompts=sum(prompts.values()),
        new_tokens=statistics.median(len(text) for measurement in measured for text in measurement.texts),
        mean_acceptance_length=later / row_forwards if row_forwards else None,
        tree_size=statistics.fmean(sizes) if sizes else None,
        tokens_per_second=statistics.median(1 / seconds for seconds in times.values()),
        speedup=quartiles([plain_times[key] / seconds for key, seconds in times.items()]),
        decoding_speedup=speedup,
        ceiling=ceiling,
        ceiling_share=None,
        identical=sum(prompts.values()) - len(found),
        largest_margin=max(margins) if margins else None,
        step_seconds=steps,
    )


def _with_share(row: Row, ceiling: float | None) -> Row:
    if row.ceiling is None or row.decoding_speedup is None or ceiling is None:
        return row
    return replace(row, ceiling_share=row.decoding_speedup / ceiling)


def _time_per_token(runs: Sequence[Run]) -> dict[CaseKey, float]:
    repeats: dict[CaseKey, list[float]] = {}
    for run in runs:
        repeats.setdefault(run.case.key, []).append(1 / run.measurement.tokens_per_second)
    return {key: statistics.median(times) for key, times in repeats.items()}


def _later_tokens(measured: Sequence[Measurement]) -> int:
    return sum(measurement.later_tokens for measurement in measured)


def _step_seconds(measured: Sequence[Measurement]) -> dict[str, float] | None:
    """Over all steps of all generations together."""
    with_steps = [measurement for measurement in measured if measurement.step_seconds]
    if not with_steps:
        return None
    steps = sum(len(measurement.step_seconds) for measurement in with_steps)
    sums: Counter[str] = Counter()
    for measurement in with_steps:
        sums.update({**measurement.phase_seconds(), "step": measurement.phased_seconds})
    return {phase: sums[phase] / steps for phase in (*PHASES, "rest", "step")}


def tables(rows: Sequence[Row]) -> str:
    """Two Markdown tables per task: the comparison, and where the time of our steps goes.

    Args:
        rows (`Sequence[Row]`): As `summarise` returns them.
    """
    header = (
        "", "tokens", "τ", "nodes", "tokens/s", "speed-up", "ceiling", "share, %", "identical", "margin",
    )  # fmt: skip
    phases = (*PHASES, "rest", "step")
    parts = []
    for task in dict.fromkeys(row.task for row in rows):
        of_task = [row for row in rows if row.task == task]
        parts.append(f"**{task}** (prompts: {of_task[0].prompts})\n")
        parts.append(format_table(header, [_cells(row) for row in of_task]) + "\n")
        steps = [
            [f"{row.decoding}, {row.method}", *(milliseconds(row.step_seconds[phase]) for phase in phases)]
            for row in of_task
            if row.step_seconds is not None
        ]
        if steps:
            parts.append(format_table(("ms per step", *phases), steps) + "\n")
    return "\n".join(parts)


def _cells(row: Row) -> list[str]:
    lower, middle, upper = row.speedup
    plain = row.method == PLAIN
    return [
        f"{row.decoding}, {row.method}",
        f"{row.new_tokens:g}",
        _cell(row.mean_acceptance_length, "{:.2f}"),
        _cell(row.tree_size, "{:.1f}"),
        f"{row.tokens_per_second:.2f}",
        "1" if plain else f"{middle:.2f} ({lower:.2f}–{upper:.2f})",
        _cell(row.ceiling, "{:.2f}"),
        _cell(None if row.ceiling_share is None else 100 * row.ceiling_share, "{:.1f}"),
        "-" if plain else f"{'✓' if row.identical == row.prompts else '✗'} {row.identical} of {row.prompts}",
        _cell(row.largest_margin, "{:.3f}"),
    ]


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


@dataclass(frozen=True)
class Memory:
    """How much memory generations need above what the loaded models take.

    Args:
        source (`str`): What was measured.
        models (`dict[str, int]`): Bytes of the target and the head.
        peaks (`dict[str, int | None]`): Bytes by method; `None` where it cannot be measured.
    """

    source: str
    models: Mapping[str, int]
    peaks: Mapping[str, int | None]


def memory_table(memory: Memory) -> str:
    """A Markdown table of the methods' needs.

    Args:
        memory (`Memory`): What was measured.
    """
    plain = memory.peaks[PLAIN]
    rows = [
        (
            method,
            _cell(None if peak is None else peak / 1e6, "{:.1f}"),
            _cell(None if peak is None or plain is None else (peak - plain) / 1e6, "{:+.1f}"),
        )
        for method, peak in memory.peaks.items()
    ]
    models = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in memory.models.items())
    table = format_table(("peak memory", "MB above the models", "MB above plain"), rows)
    return f"{table}\n\nMemory: {memory.source}. Models: {models}.\n"


def as_json(
    machine: Mapping[str, Any],
    settings: Mapping[str, Any],
    rows: Sequence[Row],
    runs: Sequence[Run],
    differences: Differences,
    *,
    skipped: Mapping[str, str] | None = None,
    memory: Memory | None = None,
    complete: bool = True,
) -> dict[str, Any]:
    """Everything that was measured, for `json.dump`.

    Args:
        machine (`dict`): As `machine` returns it.
        settings (`dict`): What was asked for.
        rows (`Sequence[Row]`): The tables.
        runs (`Sequence[Run]`): All generations, in their order in time.
        differences (`dict`): As `Benchmark.differences` returns them.
        skipped (`dict[str, str]`, *optional*): Methods that do not work here, with the reason.
        memory (`Memory`, *optional*): Peak memory.
        complete (`bool`): Whether everything that was asked for was run.
    """
    return {
        "complete": complete,
        "machine": dict(machine),
        "settings": dict(settings),
        "skipped": dict(skipped or {}),
        "summary": [asdict(row) for row in rows],
        "memory": None if memory is None else asdict(memory),
        "runs": [_entry(run, differences) for run in runs],
    }


def _entry(run: Run, differences: Differences) -> dict[str, Any]:
    found = differences.get(run.key, [None] * len(run.case.prompts))
    measured = run.measurement
    return {
        "task": run.key[0],
        "ids": [prompt.id for prompt in run.case.prompts],
        "decoding": run.case.decoding,
        "method": run.method,
        "prompt_tokens": [int(row.sum()) for row in run.case.attention_mask],
        "new_tokens": [len(text) for text in measured.texts],
        "seconds": measured.seconds,
        "prefill_seconds": measured.prefill_seconds,
        "target_forwards": measured.forwards,
        "mean_acceptance_length": measured.mean_acceptance_length,
        "phase_seconds": measured.phase_seconds(),
        "tree_sizes": {str(size): steps for size, steps in sorted(Counter(measured.tree_sizes).items())},
        "reasons": dict(measured.reasons),
        "first_differences": [None if difference is None else difference.position for difference in found],
        "margins": [None if difference is None else difference.margin for difference in found],
    }
