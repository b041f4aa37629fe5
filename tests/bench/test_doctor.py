"""The doctor: its arithmetic on hand-made runs, and its command on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.bench.doctor import diagnose, examine, main, parse
from jetspec_hf.bench.measurement import Measurement
from jetspec_hf.bench.runner import Case, Difference, Run
from jetspec_hf.bench.tasks import Prompt
from jetspec_hf.decoding.drafter import DraftingKnobs
from jetspec_hf.decoding.step_costs import StepCosts
from jetspec_hf.plots import doctor_figure
from support.char_tokenizer import letter_tokenizer
from support.oracle import OracleHead


def run(method: str, nodes: int, steps: int, draft: float, verify: float, seconds: float) -> Run:
    """12 tokens after the first, in so many steps of the same cost."""
    ids = torch.zeros(1, 3, dtype=torch.long)
    step = {"verify": verify - 0.2, "accept": 0.1, "commit": 0.1}
    if nodes:
        step |= {"draft": draft, "build": 0.5}
    measurement = Measurement(
        (tuple(range(13)),),
        seconds + 1.0,
        prefill_seconds=1.0,
        forwards=steps + 1,
        row_forwards=steps,
        tree_sizes=() if method == "plain" else (nodes,) * steps,
        step_seconds=() if method == "plain" else (step,) * steps,
        phased_seconds=seconds,
    )
    return Run(Case((Prompt("0", "prompts", "x"),), ids, torch.ones_like(ids), "greedy", 0), method, measurement)


def runs(verify_4: float = 3.0, steps_4: int = 4, auto_seconds: float = 20.0) -> list[Run]:
    return [
        run("plain", 0, 12, 0.0, 2.0, seconds=24.0),  # 2 s a token
        run("tree 0", 0, 12, 0.0, 2.0, seconds=26.0),
        run("tree 16", 16, 3, 0.5, 9.0, seconds=30.0),
        run("tree 4", 4, steps_4, 0.5, verify_4, seconds=18.0),
        run("tree auto", 4, 4, 0.5, 3.0, seconds=auto_seconds),
    ]


def test_a_prediction_weighs_tokens_against_the_cost_of_a_step() -> None:
    plain, four, sixteen = diagnose(runs(), {}).sizes
    assert (plain.nodes, plain.seconds, plain.predicted_speedup) == (0, pytest.approx(2.0), 1.0)
    assert (four.draft_seconds, four.build_seconds, four.verify_seconds) == (0.5, 0.5, pytest.approx(3.0))
    assert (four.mean_acceptance_length, sixteen.mean_acceptance_length) == (3.0, 4.0)
    assert four.predicted_speedup == pytest.approx(3 * 2 / 4)  # 3 tokens in 4 s, instead of 2 s each
    assert sixteen.predicted_speedup == pytest.approx(4 * 2 / 10)
    assert (four.measured_speedup, sixteen.measured_speedup) == (pytest.approx(24 / 18), pytest.approx(24 / 30))


def test_the_budget_of_the_highest_prediction_is_chosen_and_the_head_recommended() -> None:
    found = diagnose(runs(), {})
    assert found.tree_budget == 4
    assert found.verdict == (
        'Use this head, and leave `tree_budget` at "auto": a step of 4 nodes takes as long as 2.00 plain ones and '
        "commits 3.00 tokens: 1.50 times as fast as plain decoding by that, 1.33 by the clock, 1.20 with "
        '`tree_budget="auto"`.'
    )


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        (
            {"verify_4": 8.0},
            "Do not use this head here, verifying trees costs too much here: at best a step of 16 nodes",
        ),
        ({"steps_4": 11, "verify_4": 8.0}, "Do not use this head here, verifying trees costs too much"),
    ],
)
def test_a_head_that_loses_is_not_recommended(changes: dict[str, Any], verdict: str) -> None:
    found = diagnose(runs(**changes), {})
    assert found.tree_budget == 0
    assert found.verdict.startswith(verdict)


def test_drafts_that_are_hardly_accepted_are_called_that() -> None:
    few = [each for each in runs(steps_4=10, verify_4=3.0) if each.method != "tree 16"]
    assert diagnose(few, {}).verdict.startswith("Do not use this head here, its drafts are hardly accepted: at best")


def test_a_prediction_that_the_clock_does_not_confirm_is_said_to_hardly_pay() -> None:
    slow = [each for each in runs(auto_seconds=24.0) if each.method != "tree 4"]
    slow.append(run("tree 4", 4, 4, 0.5, 3.0, seconds=23.9))
    assert diagnose(slow, {}).verdict.startswith("This head hardly pays here: a step of 4 nodes")


def test_step_costs_are_those_of_everything_but_draft_and_build() -> None:
    found = diagnose(runs(), {})
    assert found.step_costs == StepCosts.from_dict({"draft": 1.0, "verify": {"0": 2.0, "4": 3.0, "16": 9.0}})
    assert found.to_dict()["step_costs"]["verify"] == {"0": 2.0, "4": 3.0, "16": 9.0}


def test_a_size_that_no_tree_reaches_is_left_out() -> None:
    small = [*runs(), run("tree 64", 40, 3, 0.5, 9.0, seconds=30.0)]
    assert [size.nodes for size in diagnose(small, {}).sizes] == [0, 4, 16]


def test_texts_that_differ_are_counted() -> None:
    found = diagnose(runs(), {("prompts", "0", "greedy", "tree 4"): [Difference(3, None)]})
    assert [size.identical for size in found.sizes] == [1, 0, 1]
    assert "0 of 1" in str(found)


def test_answers_without_steps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`prompts` must be answered with a few tokens each.*`max_new_tokens`"):
        diagnose([run("plain", 0, 12, 0.0, 2.0, seconds=24.0)], {})


def test_a_head_for_another_target_is_told_so_and_nothing_is_run(target: PreTrainedModel) -> None:
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1)
    head.config.vocab_size = 77
    found = examine(target, head, prompts=[torch.tensor([[5, 6]])])
    assert found.verdict.startswith("Do not use this head with this target: The head's `vocab_size` must equal")
    assert (found.sizes, found.tree_budget) == ((), 0)
    with pytest.raises(ValueError, match=r"`step_costs` need a head that fits the target"):
        _ = found.step_costs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": [0, 4]}, r"`sizes` must be at least 1 each, one or more, got \[0, 4\]"),
        ({"prompts": ["hello"]}, r"`tokenizer` must be given for prompts that are texts, got none for 'hello'"),
    ],
)
def test_what_cannot_be_examined_is_refused(
    target: PreTrainedModel, head: OracleHead, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        examine(target, head, **arguments)


def test_acceptance_is_measured_in_real_generations(target: PreTrainedModel, head: OracleHead) -> None:
    target.generation_config.eos_token_id = None
    prompt = torch.tensor([[5, 6, 7]])
    text = target.generate(prompt, max_new_tokens=13, do_sample=False)[0].tolist()
    head.know([text]).generation_config.step_costs = {"draft": 9.0, "verify": {"0": 1.0}}
    found = examine(target, head, prompts=[prompt], sizes=[8], max_new_tokens=13)
    # The first token is the prefill's; of 12 more, each step of a tree that holds the text to depth 5 commits 6.
    assert [(size.nodes, size.mean_acceptance_length, size.identical) for size in found.sizes] == [
        (0, 1.0, 1),
        (8, 6.0, 1),
    ]
    assert found.auto_nodes is not None
    assert head.generation_config.step_costs == {"draft": 9.0, "verify": {"0": 1.0}}  # another machine's, hidden


@pytest.fixture
def folders(tmp_path: Path, target: PreTrainedModel) -> list[str]:
    """The arguments for a saved target with its tokenizer, and a fresh head."""
    target.generation_config = GenerationConfig(pad_token_id=0)
    target.save_pretrained(tmp_path / "target")
    letter_tokenizer().save_pretrained(tmp_path / "target")
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=4)
    head.generation_config.tree_width = 5
    head.save_pretrained(tmp_path / "head")
    machine = ["--dtype", "float32", "--threads", "1", "--device", "cpu"]
    return ["--target", str(tmp_path / "target"), "--head", str(tmp_path / "head"), *machine, "--max-new-tokens", "6"]


def test_the_command_prints_saves_and_draws(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "define"}\n{"prompt": "return"}\n', encoding="utf-8")
    json_path, picture = tmp_path / "found.json", tmp_path / "found.png"
    options = ["--sizes", "4", "1", "--save", "--json", str(json_path), "--plot", str(picture)]
    main([*folders, "--prompts", str(prompts), *options])
    found = json.loads(json_path.read_text(encoding="utf-8"))
    printed = capsys.readouterr().out

    assert [size["nodes"] for size in found["sizes"]] == [0, 1, 4]
    assert all(size["identical"] == found["prompts"] == 2 for size in found["sizes"])
    assert found["verdict"] in printed
    assert "torch threads: 1;" in printed
    assert str(tmp_path) not in printed + json_path.read_text(encoding="utf-8")
    assert picture.stat().st_size > 1000

    # the saved head drafts by the table, and keeps its other knobs
    head = JetSpecDraftHead.from_pretrained(tmp_path / "head")
    silent: Any = SimpleNamespace(generation_config=GenerationConfig())
    knobs = DraftingKnobs.resolve(head, silent, GenerationConfig())
    assert knobs.step_costs == StepCosts.from_dict(found["step_costs"])
    assert (knobs.tree_budget, knobs.tree_width) == ("auto", 5)


def test_a_misfit_ends_the_command_with_a_reason(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "head" / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**fields, "num_target_layers": 99}), encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        main([*folders, "--save"])
    assert end.value.code == 1
    assert "Do not use this head with this target: The head's `num_target_layers`" in capsys.readouterr().out
    saved = (tmp_path / "head" / "generation_config.json").read_text(encoding="utf-8")
    assert json.loads(saved)["step_costs"] is None


def test_ctrl_c_ends_the_command_without_a_traceback(
    folders: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_args: Any, **_options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("jetspec_hf.bench.doctor.examine", interrupted)
    with pytest.raises(SystemExit, match="130"):
        main(folders)
    assert capsys.readouterr().out.endswith("\ninterrupted\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--save"], "--save needs a head in a folder, got missing/head"),
        (["--plot", "missing/a.png"], "--plot must lie in a folder that exists, got missing/a.png"),
        (["--sizes", "4", "4"], "--sizes must not repeat a value, got 4 4"),
        (["--sizes", "5000"], "argument --sizes: must be an integer from 1 to 4096, got '5000'"),
        (["--prompts", "nowhere"], "argument --prompts: must be a file that is there, got nowhere"),
    ],
)
def test_a_command_line_that_must_fail_does_so_before_anything_is_loaded(
    folders: list[str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([*folders, "--head", "missing/head", *options])
    assert message in capsys.readouterr().err


def test_the_picture_shows_cost_and_gain_by_size() -> None:
    cost, gain = doctor_figure(diagnose(runs(), {}).to_dict()).axes
    assert [label.get_text() for label in cost.get_xticklabels()] == ["0", "4", "16"]
    heights = [[bar.get_height() for bar in container.patches] for container in cost.containers]
    assert [sum(of_size) for of_size in zip(*heights, strict=True)] == pytest.approx([2000, 4000, 10000])
    lines = {line.get_label(): list(line.get_ydata()) for line in gain.lines}
    assert lines["τ"] == [3.0, 4.0]
    assert lines["predicted speed-up"] == pytest.approx([1.5, 0.8])
    assert lines["measured, auto"] == pytest.approx([1.2, 1.2])
