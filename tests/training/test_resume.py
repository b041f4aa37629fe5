"""A run that is killed and resumed is the run that was never killed; one on other data or another target is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from jetspec_hf.training.provenance import complete_checkpoints, summarise_rows, target_fingerprint
from support.tiny_targets import tiny_target
from support.training_runs import make_trainer, random_rows, run, start, tiny_head

HEAD = {"branch_rank": 4, "attention_dropout": 0.2}  # dropout draws from the random state that has to be restored
# 5 optimiser steps in each of 2 epochs, of 2 batches each
RUN = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "anchors_per_row": 5,
    "learning_rate": 1e-2,
    "save_strategy": "steps",
    "save_steps": 3,
    "logging_steps": 2,
}


def options(folder: Path, name: str, **fields: Any) -> dict[str, Any]:
    return {
        "rows": 20,
        "folder": str(folder / name),
        "out": str(folder / f"{name}.safetensors"),
        "head": HEAD,
        "arguments": RUN,
        **fields,
    }


@pytest.mark.parametrize("optimizer", [{}, {"muon_learning_rate": 1e-2}], ids=["adamw", "muon"])
def test_a_run_killed_in_the_middle_of_an_epoch_goes_on_as_if_it_had_not_been(
    optimizer: dict[str, float], tmp_path: Path
) -> None:
    """Bit for bit: weights and logged losses, in the first epoch (step 3) and in the second (step 6)."""
    if optimizer and not hasattr(torch.optim, "Muon"):
        pytest.skip("This torch has no Muon.")
    settings = {"arguments": {**RUN, **optimizer}}
    process = start([options(tmp_path, "killed", **settings)])
    assert process.stdout is not None
    run(options(tmp_path, "whole", **settings))
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line.strip())
        if line.startswith("step 4"):
            break
    process.kill()  # SIGKILL
    process.wait(timeout=60)
    process.stdout.close()
    assert "saved 3" in seen
    assert not (tmp_path / "killed.safetensors").exists()
    shutil.rmtree(tmp_path / "killed" / "checkpoint-6", ignore_errors=True)  # it may have come that far meanwhile

    run(options(tmp_path, "killed", resume=True, **settings))
    whole = load_file(tmp_path / "whole.safetensors")
    resumed = load_file(tmp_path / "killed.safetensors")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    logs = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "killed")]
    losses = [{entry["step"]: entry["loss"] for entry in log if "loss" in entry} for log in logs]
    assert losses[0].keys() == {2, 4, 6, 8, 10}
    for step in (6, 8, 10):  # what is logged at step 4 also counts the step before the kill
        assert losses[1][step] == losses[0][step]

    shutil.copytree(tmp_path / "whole" / "checkpoint-6", tmp_path / "second" / "checkpoint-6")
    run(options(tmp_path, "second", resume=True, **settings))
    second = load_file(tmp_path / "second.safetensors")
    assert all(torch.equal(whole[name], second[name]) for name in whole)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with the checkpoint of a run of one step over `random_rows(4)` for the tiny llama."""
    trainer = make_trainer(tmp_path, train=random_rows(4), max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    return tmp_path


def fingerprints(folder: Path) -> tuple[str, str]:
    written = json.loads((folder / "checkpoint-1" / "training_provenance.json").read_text())
    return written["data"]["fingerprint"], written["target"]["fingerprint"]


@pytest.mark.parametrize("change", ["another row", "another order", "another mask", "a shorter cut"])
def test_resuming_on_other_data_is_refused_with_both_fingerprints(change: str, checkpoint: Path) -> None:
    rows, fields = random_rows(4), {}
    if change == "another row":
        rows[2] = random_rows(1, seed=9)[0]
    elif change == "another order":
        rows = rows[::-1]
    elif change == "another mask":
        rows[1]["loss_mask"] = [*rows[1]["loss_mask"][:-1], 0]
    else:
        fields = {"max_length": max(len(row["input_ids"]) for row in rows) - 1}
    trainer = make_trainer(checkpoint, train=rows, max_steps=2, **fields)
    expected, _ = fingerprints(checkpoint)
    with pytest.raises(ValueError, match=f"data fingerprint is {expected}, this run's is [0-9a-f]+") as error:
        trainer.train(resume_from_checkpoint=True)
    assert str(error.value).count(expected) == 1


@pytest.mark.parametrize("change", ["weights", "config", "dtype"])
def test_resuming_for_another_target_is_refused_with_both_fingerprints(change: str, checkpoint: Path) -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    if change == "weights":
        with torch.no_grad():
            target.model.layers[0].mlp.up_proj.weight += 1e-3
    elif change == "config":
        target.config.rms_norm_eps = 1e-3
    else:
        target.to(torch.bfloat16)
    trainer = make_trainer(checkpoint, target=target, head=head, train=random_rows(4), max_steps=2)
    _, expected = fingerprints(checkpoint)
    with pytest.raises(ValueError, match=f"target fingerprint is {expected}, this run's is [0-9a-f]+"):
        trainer.train(resume_from_checkpoint=str(checkpoint / "checkpoint-1"))


def test_resuming_the_same_run_is_let_through(checkpoint: Path) -> None:
    trainer = make_trainer(checkpoint, train=random_rows(4), max_steps=2)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(checkpoint: Path) -> None:
    shutil.copytree(checkpoint / "checkpoint-1", checkpoint / "checkpoint-12")
    (checkpoint / "checkpoint-12" / "trainer_state.json").unlink()
    shutil.copytree(checkpoint / "checkpoint-1", checkpoint / "checkpoint-9")
    state = (checkpoint / "checkpoint-9" / "trainer_state.json").read_text()
    (checkpoint / "checkpoint-9" / "trainer_state.json").write_text(state[:-5])
    assert complete_checkpoints(checkpoint) == [str(checkpoint / "checkpoint-1")]


def test_resuming_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, train=random_rows(4), max_steps=1)
    with pytest.raises(ValueError, match="`resume_from_checkpoint` needs a checkpoint"):
        trainer.train(resume_from_checkpoint=True)


def test_a_fingerprint_of_rows_follows_what_training_reads_of_them() -> None:
    rows = random_rows(5)
    expected = summarise_rows(rows)
    same = Dataset.from_list([{**row, "id": str(index)} for index, row in enumerate(rows)])
    assert summarise_rows(same).fingerprint == expected.fingerprint
    assert summarise_rows(same).lengths.tolist() == [len(row["input_ids"]) for row in rows]
    assert summarise_rows(same.select(range(4))).fingerprint != expected.fingerprint
    assert summarise_rows(same.select([1, 0, 2, 3, 4])).fingerprint != expected.fingerprint
    cut = summarise_rows(rows, max_length=18)
    assert cut.fingerprint == summarise_rows([{k: v[:18] for k, v in row.items()} for row in rows]).fingerprint
    assert cut.supervised_tokens == sum(sum(row["loss_mask"][:18]) for row in rows)


def test_a_fingerprint_of_a_target_does_not_follow_where_it_came_from(tmp_path: Path) -> None:
    target = tiny_target("gemma3_text")
    expected = target_fingerprint(target)
    target.save_pretrained(tmp_path)
    assert target_fingerprint(type(target).from_pretrained(tmp_path)) == expected
    assert target_fingerprint(tiny_target("gemma3_text", seed=1)) != expected
