"""Medians, quartiles, ceilings and tables, from hand-made runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from jetspec_hf.bench.measurement import Measurement, own_work_share, quartiles
from jetspec_hf.bench.report import Memory, as_json, memory_table, summarise, tables
from jetspec_hf.bench.runner import Case, Difference, Differences, Run
from jetspec_hf.bench.tasks import Prompt


def run(
    names: str,
    method: str,
    seconds: float,
    tokens: int = 10,
    forwards: int = 10,
    prefill: float = 0.0,
    steps: Sequence[dict[str, float]] = (),
    sizes: Sequence[int] = (),
    task: str = "a",
) -> Run:
    """A greedy run of prompts of three tokens, a letter each."""
    prompts = tuple(Prompt(name, task, "text") for name in names)
    ids = torch.zeros(len(names), 3, dtype=torch.long)
    measurement = Measurement(
        tuple(tuple(range(tokens)) for _ in names),
        seconds,
        prefill_seconds=prefill,
        forwards=forwards,
        row_forwards=len(names) * (forwards - 1),
        tree_sizes=tuple(sizes),
        step_seconds=tuple(steps),
        phased_seconds=seconds - prefill,
    )
    return Run(Case(prompts, ids, torch.ones_like(ids), "greedy", seed=0), method, measurement)


RUNS = [
    run("x", "plain", 10.0),
    run("x", "tree", 5.0, forwards=4),  # 0.5 s a token against 1 s
    run("y", "tree", 2.0, forwards=7),  # 0.2 s against 0.8 s
    run("y", "plain", 8.0),
    run("z", "plain", 4.0, tokens=2, forwards=2),  # ends early: 2 s a token
    run("z", "tree", 10.0, forwards=10),  # 1 s a token
]
DIFFERENCES: Differences = {
    ("a", "y", "greedy", "tree"): [Difference(4, 0.25)],
    ("a", "z", "greedy", "tree"): [Difference(2, None)],
}
STEP = {"draft": 1.0, "build": 0.25, "verify": 2.0, "accept": 0.25, "commit": 0.25}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], (3.0, 3.0, 3.0)),
        ([2.0, 1.0], (1.25, 1.5, 1.75)),
        ([5.0, 1.0, 3.0, 2.0, 4.0], (2.0, 3.0, 4.0)),
        ([4.0, 1.0, 3.0, 2.0], (1.75, 2.5, 3.25)),
    ],
)
def test_quartiles_lie_between_the_values(values: list[float], expected: tuple[float, float, float]) -> None:
    assert quartiles(values) == expected


def test_a_method_is_compared_prompt_by_prompt_and_token_by_token() -> None:
    plain, tree = summarise(RUNS, DIFFERENCES)
    assert (plain.method, tree.method) == ("plain", "tree")
    assert plain.speedup == (1.0, 1.0, 1.0)
    assert tree.speedup == (2.0, 2.0, 3.0)  # of 2, 4 and 2
    assert tree.tokens_per_second == 2.0  # of 2, 5 and 1
    assert plain.tokens_per_second == 1.0  # of 1, 1.25 and 0.5
    assert (plain.prompts, tree.prompts) == (3, 3)
    assert (plain.new_tokens, tree.new_tokens) == (10, 10)


def test_tau_pools_the_prompts_without_their_prefills() -> None:
    plain, tree = summarise(RUNS, DIFFERENCES)
    assert plain.mean_acceptance_length == 1.0
    assert tree.mean_acceptance_length == 27 / (3 + 6 + 9)


def test_nothing_after_the_prefill_has_no_tau_and_no_speed() -> None:
    [row] = summarise([run("x", "plain", 1.0, tokens=1, forwards=1)], {})
    assert row.mean_acceptance_length is None
    assert row.decoding_speedup is None


def test_identical_texts_are_counted_and_the_largest_margin_told() -> None:
    plain, tree = summarise(RUNS, DIFFERENCES)
    assert (plain.identical, plain.largest_margin) == (3, None)
    assert (tree.identical, tree.largest_margin) == (1, 0.25)
    wider = {**DIFFERENCES, ("a", "x", "greedy", "tree"): [Difference(0, 0.5)]}
    assert summarise(RUNS, wider)[1].largest_margin == 0.5


def test_the_texts_of_a_batch_are_counted_row_by_row() -> None:
    runs = [run("xy", "plain", 10.0), run("xy", "tree", 5.0, forwards=4)]
    plain, tree = summarise(runs, {("a", "x y", "greedy", "tree"): [None, Difference(1, 0.5)]})
    assert (plain.prompts, plain.tokens_per_second) == (2, 2.0)
    assert (tree.identical, tree.mean_acceptance_length) == (1, 18 / 6)


def test_repeats_of_a_prompt_count_once_at_their_median_time() -> None:
    runs = [run("x", "plain", 10.0)] * 3 + [run("x", "tree", seconds) for seconds in (9.0, 5.0, 4.0)]
    tree = summarise(runs, {})[1]
    assert tree.prompts == 1
    assert tree.speedup == (2.0, 2.0, 2.0)


def test_steps_are_averaged_over_all_generations() -> None:
    runs = [
        run("x", "plain", 9.0),
        run("x", "tree 4", 9.0, prefill=1.0, steps=[STEP, STEP], sizes=[4, 4]),
        run("y", "plain", 9.0),
        run("y", "tree 4", 5.0, prefill=1.0, steps=[{"verify": 3.5}], sizes=[1]),  # a step that drafts nothing
    ]
    plain, tree = summarise(runs, {})
    assert plain.step_seconds is None
    assert tree.tree_size == 3.0
    assert tree.step_seconds == pytest.approx(
        {
            "draft": 2 / 3,
            "build": 0.5 / 3,
            "verify": 2.5,
            "accept": 0.5 / 3,
            "commit": 0.5 / 3,
            "rest": 1 / 3,
            "step": 4,
        }
    )
    assert own_work_share(tree.step_seconds or {}) == pytest.approx(1 - (2 / 3 + 2.5) / 4)


def tree_run(method: str, seconds: float, step: dict[str, float]) -> Run:
    """Nine tokens in three steps after a prefill of a second."""
    return run("x", method, seconds, forwards=4, prefill=1.0, steps=[step] * 3, sizes=[8] * 3)


def test_the_ceiling_is_tau_times_a_plain_step_over_the_two_forwards() -> None:
    runs = [run("x", "plain", 19.0, prefill=1.0), tree_run("tree 8", 13.0, STEP)]
    plain, tree = summarise(runs, {})
    assert (plain.decoding_speedup, plain.ceiling, plain.ceiling_share) == (1.0, None, None)
    assert tree.mean_acceptance_length == 3.0
    assert tree.decoding_speedup == 18 / 12
    assert tree.ceiling == 3 * 2 / (1 + 2)  # t_plain is 18 s for 9 tokens
    assert tree.ceiling_share == 0.75


def test_the_automatic_budget_is_held_against_the_highest_ceiling_of_all_trees() -> None:
    quick = {**STEP, "verify": 1.0}
    runs = [
        run("x", "plain", 19.0, prefill=1.0),
        tree_run("tree 4", 10.0, quick),  # a ceiling of 3 * 2 / (1 + 1)
        tree_run("tree 8", 13.0, STEP),  # and of 2
        tree_run("tree auto", 10.0, STEP),
    ]
    shares = [row.ceiling_share for row in summarise(runs, {})]
    assert shares == pytest.approx([None, 2 / 3, 0.75, 2 / 3])


def test_tasks_have_tables_of_their_own() -> None:
    runs = [*RUNS, run("w", "plain", 1.0, task="b"), run("w", "tree", 1.0, task="b")]
    lines = tables(summarise(runs, DIFFERENCES)).splitlines()
    assert lines[0] == "**a** (prompts: 3)"
    assert cells(lines[2]) == [
        "", "tokens", "τ", "nodes", "tokens/s", "speed-up", "ceiling", "share, %", "identical", "margin",
    ]  # fmt: skip
    assert cells(lines[4]) == ["greedy, plain", "10", "1.00", "-", "1.00", "1", "-", "-", "-", "-"]
    assert cells(lines[5]) == [
        "greedy, tree", "10", "1.50", "-", "2.00", "2.00 (2.00–3.00)", "-", "-", "✗ 1 of 3", "0.250",
    ]  # fmt: skip
    assert lines[7] == "**b** (prompts: 1)"
    assert cells(lines[12])[8] == "✓ 1 of 1"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_steps_have_a_table_of_their_own() -> None:
    lines = tables(summarise([run("x", "plain", 19.0, prefill=1.0), tree_run("tree 8", 13.0, STEP)], {})).splitlines()
    assert cells(lines[7]) == ["ms per step", "draft", "build", "verify", "accept", "commit", "rest", "step"]
    assert cells(lines[9]) == ["greedy, tree 8", "1000", "250", "2000", "250", "250", "250", "4000"]


def test_memory_stands_beside_that_of_plain_decoding() -> None:
    memory = Memory("counted", {"target": 5_000_000}, {"plain": 2_000_000, "tree 8": 3_500_000, "other": None})
    lines = memory_table(memory).splitlines()
    assert [cells(line) for line in lines[2:5]] == [
        ["plain", "2.0", "+0.0"], ["tree 8", "3.5", "+1.5"], ["other", "-", "-"],
    ]  # fmt: skip
    assert lines[6] == "Memory: counted. Models: target 5.0 MB."


def test_everything_goes_into_the_json() -> None:
    runs = [*RUNS, tree_run("tree 8", 13.0, STEP)]
    rows = summarise(RUNS, DIFFERENCES)
    memory = Memory("counted", {"target": 5}, {"plain": None})
    parts: dict[str, Any] = {"skipped": {"other": "why"}, "memory": memory, "complete": False}
    found = json.loads(
        json.dumps(as_json({"cores": 2}, {"seed": 0}, rows, runs, DIFFERENCES, **parts), allow_nan=False)
    )
    assert (found["machine"], found["settings"], found["skipped"]) == ({"cores": 2}, {"seed": 0}, {"other": "why"})
    assert found["memory"] == {"source": "counted", "models": {"target": 5}, "peaks": {"plain": None}}
    assert found["complete"] is False
    assert found["summary"][1] == {
        "task": "a", "decoding": "greedy", "method": "tree", "prompts": 3, "new_tokens": 10,
        "mean_acceptance_length": 1.5, "tree_size": None, "tokens_per_second": 2.0, "speedup": [2.0, 2.0, 3.0],
        "decoding_speedup": pytest.approx(22 / 19 / (17 / 27)), "ceiling": None, "ceiling_share": None, "identical": 1,
        "largest_margin": 0.25, "step_seconds": None,
    }  # fmt: skip
    assert len(found["runs"]) == 7
    assert found["runs"][2] == {
        "task": "a", "ids": ["y"], "decoding": "greedy", "method": "tree", "prompt_tokens": [3], "new_tokens": [10],
        "seconds": 2.0, "prefill_seconds": 0.0, "target_forwards": 7, "mean_acceptance_length": 1.5,
        "phase_seconds": {}, "tree_sizes": {}, "reasons": {}, "first_differences": [4], "margins": [0.25],
    }  # fmt: skip
    assert found["runs"][6]["tree_sizes"] == {"8": 3}
    assert found["runs"][6]["phase_seconds"] == {
        "draft": 3.0, "build": 0.75, "verify": 6.0, "accept": 0.75, "commit": 0.75, "rest": 0.75,
    }  # fmt: skip
