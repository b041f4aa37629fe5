"""Pictures of a benchmark: pure functions from the data that `python -m jetspec_hf.bench --json` writes to figures.

Needs matplotlib (`pip install 'jetspec_hf[plots]'`), none of whose global state is used.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

PLAIN = "plain"
TREE = "tree "
AUTO = "tree auto"
PHASE_COLOURS = {
    "draft": "#0072b2",
    "build": "#e69f00",
    "verify": "#56b4e9",
    "accept": "#cc79a7",
    "commit": "#009e73",
    "rest": "#999999",
}
# Okabe and Ito's, which people with any colour vision can tell apart, without their yellow.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000")
_WIDTH, _HEIGHT = 4.4, 3.4  # inches of a panel
_MOST_COLUMNS = 4


def speedup_bars(data: Mapping[str, Any], decoding: str) -> Figure:
    """Speed-up over plain decoding by method, a panel for each task, with quartiles.

    Args:
        data (`dict`): What the benchmark's `--json` holds.
        decoding (`str`): One of its decodings.
    """
    tasks = _tasks(data, decoding)
    figure, panels = _panels(tasks, f"Speed-up over plain decoding, {decoding}")
    for (task, rows), axes in zip(tasks.items(), panels, strict=True):
        shown = [row for row in rows if row["method"] != PLAIN]
        lower, middle, upper = zip(*(row["speedup"] for row in shown), strict=True)
        spread = (
            [m - low for m, low in zip(middle, lower, strict=True)],
            [u - m for m, u in zip(middle, upper, strict=True)],
        )
        names = [row["method"] for row in shown]
        bars = axes.barh(names, middle, xerr=spread, color=[_colour(name) for name in names], capsize=2)
        axes.bar_label(bars, [f"{value:.2f}" for value in middle], padding=3)
        axes.margins(x=0.15)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set(title=task, xlabel="times as fast (median, quartiles)")
    return figure


def step_cost(data: Mapping[str, Any], decoding: str) -> Figure:
    """Milliseconds per step by phase, stacked, for every method that decodes our trees, a panel for each task.

    Args:
        data (`dict`): What the benchmark's `--json` holds.
        decoding (`str`): One of its decodings.
    """
    tasks = _tasks(data, decoding)
    figure, panels = _panels(tasks, f"Cost of a step, {decoding}")
    for (task, rows), axes in zip(tasks.items(), panels, strict=True):
        shown = [row for row in rows if row["step_seconds"] is not None]
        names = [row["method"] for row in shown]
        start = [0.0] * len(shown)
        for phase, colour in PHASE_COLOURS.items():
            values = [1e3 * row["step_seconds"][phase] for row in shown]
            axes.bar(names, values, bottom=start, color=colour, label=phase)
            start = [before + value for before, value in zip(start, values, strict=True)]
        axes.tick_params(axis="x", rotation=60)
        axes.set(title=task, ylabel="ms per step")
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def acceptance_by_budget(data: Mapping[str, Any], decoding: str) -> Figure:
    """τ over the tree budget, a line for each task, with what the automatic budget came to.

    Args:
        data (`dict`): What the benchmark's `--json` holds.
        decoding (`str`): One of its decodings.
    """
    figure, [axes] = _panels([""], f"Tokens per target forward, {decoding}")
    for (task, rows), colour in zip(_tasks(data, decoding).items(), cycle(COLOURS), strict=False):
        fixed = _fixed(rows)
        axes.plot(*_points(fixed, "mean_acceptance_length"), marker="o", color=colour, label=task)
        for row in rows:
            if row["method"] == AUTO and row["tree_size"] and row["mean_acceptance_length"] is not None:
                axes.plot(row["tree_size"], row["mean_acceptance_length"], marker="*", markersize=12, color=colour)
    axes.set(xlabel="nodes besides the root (★: auto, mean)", ylabel="τ")
    _budget_axis(axes, data)
    axes.legend()
    return figure


def speedup_by_budget(data: Mapping[str, Any], decoding: str) -> Figure:
    """Speed-up after the prefill over the tree budget and its ceiling, a panel for each task; auto is a level line.

    Args:
        data (`dict`): What the benchmark's `--json` holds.
        decoding (`str`): One of its decodings.
    """
    tasks = _tasks(data, decoding)
    figure, panels = _panels(tasks, f"Speed-up after the prefill, {decoding}")
    for (task, rows), axes in zip(tasks.items(), panels, strict=True):
        fixed = _fixed(rows)
        axes.plot(*_points(fixed, "ceiling"), linestyle="--", marker=".", color=COLOURS[1], label="ceiling")
        axes.plot(*_points(fixed, "decoding_speedup"), marker="o", color=COLOURS[0], label="measured")
        for row in rows:
            if row["method"] == AUTO and row["decoding_speedup"] is not None:
                axes.axhline(row["decoding_speedup"], color=COLOURS[2], label="auto")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(title=task, xlabel="nodes besides the root", ylabel="times as fast as plain")
        _budget_axis(axes, data)
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def benchmark_figures(data: Mapping[str, Any]) -> dict[str, Figure]:
    """All figures that the data allow, by name.

    Args:
        data (`dict`): What the benchmark's `--json` holds.
    """
    found = {}
    for decoding in dict.fromkeys(row["decoding"] for row in data["summary"]):
        rows = [row for row in data["summary"] if row["decoding"] == decoding]
        if any(row["method"] != PLAIN for row in rows):
            found[f"speedup-{decoding}"] = speedup_bars(data, decoding)
        if any(row["step_seconds"] is not None for row in rows):
            found[f"step-cost-{decoding}"] = step_cost(data, decoding)
        if _fixed(rows):
            found[f"acceptance-by-budget-{decoding}"] = acceptance_by_budget(data, decoding)
            found[f"speedup-by-budget-{decoding}"] = speedup_by_budget(data, decoding)
    return found


def save_benchmark(data: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws all figures into a folder, which is made if it is missing.

    Args:
        data (`dict`): What the benchmark's `--json` holds.
        folder (`Path`): Where to.

    Returns:
        `list[Path]`: The pictures.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in benchmark_figures(data).items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=150)
    return paths


def doctor_figure(data: Mapping[str, Any]) -> Figure:
    """What a step costs, and what it gains, over the number of nodes.

    Args:
        data (`dict`): What the doctor's `--json` holds, or `Diagnosis.to_dict()`.
    """
    sizes = data["sizes"]
    trees = [size for size in sizes if size["nodes"]]
    figure, [cost, gain] = _panels(["", ""], f"tree_budget={data['tree_budget']} pays most by prediction")
    names, start = [str(size["nodes"]) for size in sizes], [0.0] * len(sizes)
    for phase in ("draft", "build", "verify"):
        values = [1e3 * size[f"{phase}_seconds"] for size in sizes]
        cost.bar(names, values, bottom=start, color=PHASE_COLOURS[phase], label=phase)
        start = [before + value for before, value in zip(start, values, strict=True)]
    cost.set(title="cost", xlabel="nodes besides the root (0: plain decoding)", ylabel="ms per step")
    cost.legend()
    names = [str(size["nodes"]) for size in trees]
    for key, label, colour, line in (
        ("mean_acceptance_length", "τ", COLOURS[2], ":"),
        ("predicted_speedup", "predicted speed-up", COLOURS[1], "--"),
        ("measured_speedup", "measured speed-up", COLOURS[0], "-"),
    ):
        gain.plot(names, [size[key] for size in trees], marker="o", linestyle=line, color=colour, label=label)
    if data["auto_speedup"] is not None:
        gain.axhline(data["auto_speedup"], color=COLOURS[3], label="measured, auto")
    gain.axhline(1.0, color="black", linewidth=0.8)
    gain.set(title="gain", xlabel="nodes besides the root", ylabel="τ, times as fast as plain")
    gain.legend()
    return figure


def _tasks(data: Mapping[str, Any], decoding: str) -> dict[str, list[Mapping[str, Any]]]:
    tasks: dict[str, list[Mapping[str, Any]]] = {}
    for row in data["summary"]:
        if row["decoding"] == decoding:
            tasks.setdefault(row["task"], []).append(row)
    return tasks


def _panels(titles: Collection[str], title: str) -> tuple[Figure, list[Axes]]:
    columns = min(len(titles), _MOST_COLUMNS)
    rows = math.ceil(len(titles) / columns)
    figure = Figure(figsize=(_WIDTH * columns + 1.2, _HEIGHT * rows), layout="constrained")
    figure.suptitle(title)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in panels[len(titles) :]:
        unused.remove()
    return figure, panels[: len(titles)]


def _fixed(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, Mapping[str, Any]]]:
    """Rows of fixed tree budgets, in ascending order."""
    budgets = [(row["method"].removeprefix(TREE), row) for row in rows if row["method"].startswith(TREE)]
    return sorted(((int(budget), row) for budget, row in budgets if budget.isdecimal()), key=lambda pair: pair[0])


def _points(fixed: Sequence[tuple[int, Mapping[str, Any]]], name: str) -> tuple[list[int], list[float]]:
    found = [(budget, row[name]) for budget, row in fixed if row[name] is not None]
    return [budget for budget, _ in found], [value for _, value in found]


def _budget_axis(axes: Axes, data: Mapping[str, Any]) -> None:
    budgets = sorted({budget for budget, _ in _fixed(data["summary"])})
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.xaxis.set_minor_locator(NullLocator())


def _colour(method: str) -> str:
    return COLOURS[2] if method == AUTO else COLOURS[0] if method.startswith(TREE) or method == "chain" else "#777777"
