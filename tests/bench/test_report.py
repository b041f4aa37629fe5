"""Medians, quartiles, shares and tables, from hand-made runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from jetspec_hf.bench.phases import Measurement
from jetspec_hf.bench.report import as_json, machine, processor_flags, quartiles, summarise, tables
from jetspec_hf.bench.runner import Case, Difference, Run, RunKey
from jetspec_hf.bench.tasks import Prompt


def run(
    name: str, method: str, seconds: float, tokens: int = 10, forwards: int = 10, phases: Any = None, task: str = "a"
) -> Run:
    """A greedy run of a prompt of three tokens."""
    case = Case(Prompt(name, task, "text"), torch.zeros(1, 3, dtype=torch.long), "greedy", seed=0)
    measurement = Measurement(tuple(range(tokens)), seconds, phases or {}, ({},) if phases else ())
    return Run(case, method, measurement, forwards)


RUNS = [
    run("x", "plain", 10.0),
    run("x", "tree", 5.0, forwards=4),  # 0.5 s a token against 1 s
    run("y", "tree", 2.0, forwards=7),  # 0.2 s against 0.8 s
    run("y", "plain", 8.0),
    run("z", "plain", 4.0, tokens=2, forwards=2),  # ends early: 2 s a token
    run("z", "tree", 10.0, forwards=10),  # 1 s a token
]
DIFFERENCES: dict[RunKey, Difference] = {
    ("a", "y", "greedy", "tree"): Difference(4, 0.25),
    ("a", "z", "greedy", "tree"): Difference(2, None),
}


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


def test_nothing_after_the_prefill_has_no_tau() -> None:
    [row] = summarise([run("x", "plain", 1.0, tokens=1, forwards=1)], {})
    assert row.mean_acceptance_length is None


def test_identical_texts_are_counted_and_the_largest_margin_told() -> None:
    plain, tree = summarise(RUNS, DIFFERENCES)
    assert (plain.identical, plain.largest_margin) == (3, None)
    assert (tree.identical, tree.largest_margin) == (1, 0.25)
    wider = {**DIFFERENCES, ("a", "x", "greedy", "tree"): Difference(0, 0.5)}
    assert summarise(RUNS, wider)[1].largest_margin == 0.5


def test_repeats_of_a_prompt_count_once_at_their_median_time() -> None:
    runs = [run("x", "plain", 10.0)] * 3 + [run("x", "tree", seconds) for seconds in (9.0, 5.0, 4.0)]
    tree = summarise(runs, {})[1]
    assert tree.prompts == 1
    assert tree.speedup == (2.0, 2.0, 2.0)


def test_phases_share_the_time_after_the_prefill() -> None:
    phases = {"prefill": 1.0, "draft": 1.0, "build": 0.5, "verify": 2.0, "accept": 0.25, "commit": 0.0}
    runs = [run("x", "plain", 9.0), run("x", "tree", 5.0, phases=phases), run("y", "plain", 9.0)]
    runs.append(run("y", "tree", 5.0, phases={**phases, "draft": 0.0, "verify": 3.0}))
    plain, tree = summarise(runs, {})
    assert plain.phase_shares is None
    assert tree.phase_shares == {
        "draft": 0.125, "build": 0.125, "verify": 0.625, "accept": 0.0625, "commit": 0.0, "rest": 0.0625,
    }  # fmt: skip


def test_tasks_have_tables_of_their_own() -> None:
    runs = [*RUNS, run("w", "plain", 1.0, task="b"), run("w", "tree", 1.0, task="b")]
    lines = tables(summarise(runs, DIFFERENCES)).splitlines()
    assert lines[0] == "**a** (prompts: 3)"
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == [
        "", "tokens", "τ", "tokens/s", "speed-up", "identical", "margin",
        "draft, %", "build, %", "verify, %", "accept, %", "commit, %", "rest, %",
    ]  # fmt: skip
    plain, tree = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[4:6])
    assert plain[:7] == ["greedy, plain", "10", "1.00", "1.00", "1", "-", "-"]
    assert tree == ["greedy, tree", "10", "1.50", "2.00", "2.00 (2.00–3.00)", "1 of 3", "0.250", *"------"]
    assert lines[7] == "**b** (prompts: 1)"


def test_everything_goes_into_the_json() -> None:
    rows = summarise(RUNS, DIFFERENCES)
    found = json.loads(json.dumps(as_json({"cores": 2}, {"seed": 0}, rows, RUNS, DIFFERENCES), allow_nan=False))
    assert (found["machine"], found["settings"]) == ({"cores": 2}, {"seed": 0})
    assert found["summary"][1] == {
        "task": "a", "decoding": "greedy", "method": "tree", "prompts": 3, "new_tokens": 10,
        "mean_acceptance_length": 1.5, "tokens_per_second": 2.0, "speedup": [2.0, 2.0, 3.0], "identical": 1,
        "largest_margin": 0.25, "phase_shares": None,
    }  # fmt: skip
    assert len(found["runs"]) == 6
    assert found["runs"][2] == {
        "task": "a", "id": "y", "decoding": "greedy", "method": "tree", "prompt_tokens": 3, "new_tokens": 10,
        "seconds": 2.0, "target_forwards": 7, "phase_seconds": {}, "first_difference": 4, "margin": 0.25,
    }  # fmt: skip


def test_flags_are_whole_words_of_the_processor_file() -> None:
    text = "model name\t: avx2 in a name\nflags\t\t: fpu avx2x avx512_bf16 amx_tile\n\nflags\t\t: fpu\n"
    assert processor_flags(text) == {"avx2": False, "avx512_bf16": True, "amx_bf16": False}
    assert processor_flags("") == dict.fromkeys(("avx2", "avx512_bf16", "amx_bf16"), False)


def test_the_machine_is_described() -> None:
    found = machine()
    assert set(found) == {"description", "cores", "flags"}
    assert f"torch {torch.__version__}" in found["description"]
