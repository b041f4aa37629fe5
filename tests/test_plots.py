"""Figures of hand-made benchmark data: their bars, lines and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.container import ErrorbarContainer

from jetspec_hf.plots import (
    acceptance_by_budget,
    benchmark_figures,
    save_benchmark,
    speedup_bars,
    speedup_by_budget,
    step_cost,
)

STEP = {"draft": 0.002, "build": 0.001, "verify": 0.004, "accept": 0.001, "commit": 0.001, "rest": 0.001, "step": 0.01}


def row(method: str, speed: float, tau: float | None = 2.0, size: float | None = None, **fields: Any) -> dict[str, Any]:
    ours = size is not None
    return {
        "task": "talk", "decoding": "greedy", "method": method, "speedup": [speed - 0.5, speed, speed + 0.25],
        "mean_acceptance_length": tau, "tree_size": size, "decoding_speedup": speed + 1,
        "ceiling": 9.0 if ours else None, "step_seconds": STEP if ours else None, **fields,
    }  # fmt: skip


DATA = {
    "summary": [
        row("plain", 1.0),
        row("prompt lookup", 1.5),
        row("tree 16", 2.5, tau=3.0, size=16.0, ceiling=4.0),
        row("tree 8", 2.0, tau=2.5, size=8.0, ceiling=3.0),
        row("tree auto", 2.25, tau=2.75, size=11.5),
        row("plain", 1.0, task="code"),
        row("prompt lookup", 0.5, task="code"),
        row("tree 8", 0.75, tau=None, size=8.0, task="code", ceiling=None),
    ]
}


def test_bars_show_medians_with_their_quartiles() -> None:
    talk, code = speedup_bars(DATA, "greedy").axes
    assert [label.get_text() for label in talk.get_yticklabels()] == ["prompt lookup", "tree 16", "tree 8", "tree auto"]
    assert [bar.get_width() for bar in talk.patches] == [1.5, 2.5, 2.0, 2.25]
    [spread] = [container for container in talk.containers if isinstance(container, ErrorbarContainer)]
    ends = [line.get_xdata() for line in spread.lines[1]]
    assert [list(end) for end in ends] == [[1.0, 2.0, 1.5, 1.75], [1.75, 2.75, 2.25, 2.5]]
    assert [axes.get_title() for axes in (talk, code)] == ["talk", "code"]


def test_phases_are_stacked_to_the_whole_step() -> None:
    talk, _ = step_cost(DATA, "greedy").axes
    assert [label.get_text() for label in talk.get_xticklabels()] == ["tree 16", "tree 8", "tree auto"]
    first = [container.patches[0] for container in talk.containers]
    assert [bar.get_height() for bar in first] == pytest.approx([2, 1, 4, 1, 1, 1])
    assert first[-1].get_y() + first[-1].get_height() == pytest.approx(10)


def test_acceptance_rises_over_the_budget_in_order() -> None:
    [axes] = acceptance_by_budget(DATA, "greedy").axes
    talk, auto, code = axes.lines
    assert (list(talk.get_xdata()), list(talk.get_ydata())) == ([8, 16], [2.5, 3.0])
    assert (list(auto.get_xdata()), list(auto.get_ydata())) == ([11.5], [2.75])
    assert len(code.get_xdata()) == 0  # it has no τ
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["talk", "code"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8", "16"]


def test_speed_stands_below_its_ceiling_and_beside_auto() -> None:
    talk, _ = speedup_by_budget(DATA, "greedy").axes
    lines = {line.get_label(): list(line.get_ydata()) for line in talk.lines}
    assert lines["ceiling"] == [3.0, 4.0]
    assert lines["measured"] == [3.0, 3.5]
    assert lines["auto"] == [3.25, 3.25]


def test_figures_without_data_are_left_out(tmp_path: Path) -> None:
    assert set(benchmark_figures(DATA)) == {
        "speedup-greedy", "step-cost-greedy", "acceptance-by-budget-greedy", "speedup-by-budget-greedy",
    }  # fmt: skip
    alone = {"summary": [row("plain", 1.0), row("prompt lookup", 2.0)]}
    [path] = save_benchmark(alone, tmp_path / "new")
    assert path == tmp_path / "new" / "speedup-greedy.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert benchmark_figures({"summary": [row("plain", 1.0)]}) == {}
