"""The training command, from a recipe and answers to a head that drafts for its target."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.training import recipe as training_command

RECIPES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.json"))
EOS = 2  # of the tiny target, which never writes it

Recipe = Callable[..., str]


@pytest.fixture
def script() -> ModuleType:
    """What `examples/train_head.py` and `jetspec train` call."""
    return training_command


def test_the_example_is_the_training_command() -> None:
    import train_head  # noqa: PLC0415  (on the path in these tests only)

    assert train_head.main is training_command.main


def answers(data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / "answers.jsonl").read_text().splitlines()]


def measured(folder: Path) -> Any:
    return json.loads((folder / "heldout_acceptance.json").read_text())


def decoded_tau(data: Path, folder: Path, prompts: list[list[int]], budget: int | None) -> float:
    """Tokens per forward of the target while it really decodes; the text must be that of plain `generate`."""
    target = AutoModelForCausalLM.from_pretrained(data / "target")
    head = JetSpecDraftHead.from_pretrained(folder)
    head.generation_config.tree_budget, head.generation_config.tree_width = (3, 1) if budget is None else (budget, 16)
    lengths: list[int] = []
    for prompt in prompts:
        options: Any = {"do_sample": False, "max_new_tokens": 14, "attention_mask": torch.ones(1, len(prompt))}
        plain = target.generate(torch.tensor([prompt]), **options)
        output = target.generate(torch.tensor([prompt]), assistant_model=head, return_dict_in_generate=True, **options)
        assert output.sequences.tolist() == plain.tolist()
        lengths += output.acceptance.accepted_lengths[0]
    return statistics.fmean(lengths)


def test_a_recipe_gives_a_head_whose_reported_acceptance_is_that_of_decoding(
    script: ModuleType, recipe: Recipe, data: Path, tmp_path: Path
) -> None:
    script.main([recipe(), "--decoded", "60", "--eval_strategy", "steps", "--eval_steps", "15"])
    heldout = [row["prompt_ids"] for row in answers(data) if script.share_of(row["id"]) < 0.2]
    found = measured(tmp_path / "head")
    for name, budget in (("chain", None), ("4", 4)):
        tau = decoded_tau(data, tmp_path / "head", heldout, budget)
        assert found["simulated"][name] == pytest.approx(tau)
        assert found["decoded"][name] == pytest.approx(tau)
        assert tau > 2.5  # 3.25 if all is accepted, 1 if nothing
    assert (tmp_path / "head" / "training_provenance.json").is_file()


def test_options_of_the_command_line_come_on_top_of_a_recipe(script: ModuleType, recipe: Recipe) -> None:
    parser = script.option_parser()
    file = recipe(causal=False, branch_rank=None, lr_scheduler_kwargs={"min_lr_rate": 0.2}, depth_decay=4)
    options = script.read_options(parser, [file, "--max_steps", "7", "--target_layer_ids", "1", "--causal", "true"])
    run, shape, args = parser.parse_dict(options)
    assert (args.max_steps, shape.target_layer_ids, shape.causal) == (7, [1], True)  # the command line's
    assert (args.learning_rate, args.depth_decay, run.tree_budgets) == (1e-2, 4.0, ["chain", 4])  # the recipe's
    assert args.lr_scheduler_kwargs == {"min_lr_rate": 0.2}
    assert shape.branch_rank == 0  # the default
    assert script.HeadShape(**vars(shape)).causal is True
    assert parser.parse_dict(script.read_options(parser, [file]))[1].causal is False


def test_an_unknown_option_is_an_error(script: ModuleType, recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    for options, arguments in (({"max_step": 3}, []), ({}, ["--max_step", "3"])):
        with pytest.raises(SystemExit):
            script.main([recipe(**options), *arguments])
        assert "--max_step 3" in capsys.readouterr().err


def test_the_options_can_be_listed(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--help"])
    listed = capsys.readouterr().out
    assert all(option in listed for option in ("--heldout_ids", "--branch_rank", "--anchors_per_row"))


def test_a_head_with_a_draft_vocabulary_and_a_branch_term_is_trained_in_the_dtype_of_the_target(
    script: ModuleType, recipe: Recipe, data: Path, tmp_path: Path
) -> None:
    script.main([recipe(draft_vocab_size=20, branch_rank=6, target_dtype="bfloat16", max_steps=5)])
    head = JetSpecDraftHead.from_pretrained(tmp_path / "head")
    written = [row["response_ids"] for row in answers(data) if script.share_of(row["id"]) >= 0.2]
    counts = torch.tensor([token for ids in written for token in ids]).bincount(minlength=128)
    expected = sorted(range(128), key=lambda token: (-int(counts[token]), token))[:19]
    assert head.draft_token_ids.tolist() == sorted([EOS, *expected])
    assert head.config.branch_rank == 6
    assert head.branch.child_proj.weight.abs().max() > 0  # it is zero before training
    assert {tensor.dtype for tensor in head.parameters()} == {torch.bfloat16}


def test_a_warm_start_goes_on_from_a_trained_head(script: ModuleType, recipe: Recipe, tmp_path: Path) -> None:
    script.main([recipe(draft_vocab_size=20)])
    shutil.copytree(tmp_path / "head", tmp_path / "first")
    script.main([recipe(warm_start=str(tmp_path / "first"), learning_rate=1e-12, max_steps=1)])
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "head"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-9)


def test_a_warm_start_of_another_shape_is_refused(script: ModuleType, recipe: Recipe, tmp_path: Path) -> None:
    script.main([recipe(max_steps=1, simulated=0)])
    shutil.copytree(tmp_path / "head", tmp_path / "first")
    with pytest.raises(ValueError, match=r"`branch_rank` must be 0, .* got 6"):
        script.main([recipe(warm_start=str(tmp_path / "first"), branch_rank=6)])


def test_a_run_that_was_stopped_goes_on_to_the_same_head(script: ModuleType, recipe: Recipe, tmp_path: Path) -> None:
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "simulated": 0, "branch_rank": 4}
    script.main([recipe(**options)])
    checkpoint = tmp_path / "head" / "checkpoint-3"
    (tmp_path / "stopped").mkdir()
    shutil.copytree(checkpoint, tmp_path / "stopped" / "checkpoint-3")
    script.main([recipe(**options, output_dir=str(tmp_path / "stopped")), "--resume_from_checkpoint", "true"])
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("head", "stopped"))
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight, rtol=0, atol=1e-7)


def test_listed_ids_are_held_out(script: ModuleType, data: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("prompt-3\nprompt-40\nof another file\n")
    run = script.TrainingRun("", [str(data / "answers.jsonl")], heldout_ids=str(tmp_path / "ids.txt"))
    rows, heldout = script.split_rows(run)
    assert set(heldout["id"]) == {"prompt-3", "prompt-40"}
    assert sorted(rows["id"]) == sorted(f"prompt-{number}" for number in range(60) if number not in (3, 40))


def test_all_answers_to_a_prompt_are_on_one_side(script: ModuleType, data: Path, tmp_path: Path) -> None:
    shutil.copy(data / "answers.jsonl", tmp_path / "again.jsonl")
    files = [str(data / "answers.jsonl"), str(tmp_path / "again.jsonl")]
    rows, heldout = script.split_rows(script.TrainingRun("", files, heldout_share=0.3))
    assert not set(rows["id"]) & set(heldout["id"])
    assert (len(rows) + len(heldout), len(heldout)) == (120, 2 * len(set(heldout["id"])))
    assert 0.1 < len(heldout) / 120 < 0.5


def test_nothing_to_evaluate_on_is_an_error_before_training(script: ModuleType, data: Path) -> None:
    files = [str(data / "answers.jsonl")]
    with pytest.raises(ValueError, match="must hold out some of the 60 answers, got none"):
        script.split_rows(script.TrainingRun("", files, heldout_share=0.0))
    rows, heldout = script.split_rows(script.TrainingRun("", files, heldout_share=0.0, simulated=0))
    assert (len(rows), len(heldout)) == (60, 0)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipes_have_known_options_and_no_paths_of_a_machine(script: ModuleType, file: Path, tmp_path: Path) -> None:
    parser = script.option_parser()
    here = ["--target", "target", "--answers", "answers.jsonl", "--output_dir", str(tmp_path), "--use_cpu", "true"]
    parser.parse_dict(script.read_options(parser, [str(file), *here]))
    recipe = json.loads(file.read_text())
    values = [entry for value in recipe.values() for entry in (value if isinstance(value, list) else [value])]
    paths = [Path(value) for value in values if isinstance(value, str)]
    assert not [path for path in paths if path.is_absolute() or ".." in path.parts]
