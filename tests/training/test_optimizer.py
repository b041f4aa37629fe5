"""Muon for matrices, AdamW for the rest: who trains what, and that both do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec_hf.training.arguments import JetSpecTrainingArguments
from jetspec_hf.training.optimizer import MuonAndAdamW
from support.training_runs import make_trainer, random_rows, sampled_rows, tiny_head, walking_target

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")


@needs_muon
def test_muon_trains_the_matrices_and_adamw_everything_else(tmp_path: Path) -> None:
    target = walking_target()
    head = tiny_head(target, branch_rank=4)
    trainer = make_trainer(
        tmp_path,
        target=target,
        head=head,
        train=random_rows(8),
        max_steps=2,
        muon_learning_rate=0.05,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        warmup_steps=0,
    )
    before = {name: parameter.detach().clone() for name, parameter in head.named_parameters()}
    trainer.train()
    matrices, *rest = trainer.optimizer.param_groups
    assert {id(parameter) for parameter in matrices["params"]} == {
        id(parameter)
        for name, parameter in head.named_parameters()
        if parameter.ndim == 2 and not name.startswith("branch.")
    }
    assert [matrices["lr"], *(group["lr"] for group in rest)] == [0.05, 0.01, 0.01]
    assert sum(len(group["params"]) for group in (matrices, *rest)) == len(before)
    assert all(not torch.equal(before[name], parameter) for name, parameter in head.named_parameters())
    # every direction of a matrix moves alike, by what AdamW would move its entries
    fusion = (head.fc.weight.detach() - before["fc.weight"]).svd().S
    assert fusion.max() < 5 * fusion.median()


@needs_muon
def test_it_learns(tmp_path: Path) -> None:
    target = walking_target()
    trainer = make_trainer(
        tmp_path,
        target=target,
        train=sampled_rows(target, 64),
        max_steps=120,
        muon_learning_rate=2e-2,
        learning_rate=1e-3,
        logging_steps=20,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0]


@needs_muon
def test_a_head_whose_matrices_are_frozen_is_refused(tmp_path: Path) -> None:
    target = walking_target()
    head = tiny_head(target)
    for parameter in head.parameters():
        parameter.requires_grad_(parameter.ndim == 1)
    trainer = make_trainer(tmp_path, target=target, head=head, train=random_rows(4), max_steps=1, muon_learning_rate=1)
    with pytest.raises(ValueError, match="needs a matrix to train"):
        trainer.train()


def test_a_torch_without_muon_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    trainer = make_trainer(tmp_path, train=random_rows(4), max_steps=1, muon_learning_rate=1e-3)
    with pytest.raises(ValueError, match=r"`muon_learning_rate` needs torch 2\.9"):
        trainer.train()


@pytest.mark.parametrize("rate", [0, -1e-3, float("nan"), float("inf"), "fast"])
def test_a_rate_that_is_none_is_refused(rate: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`muon_learning_rate` must be a finite number above 0, got"):
        JetSpecTrainingArguments(str(tmp_path), muon_learning_rate=rate)


def test_another_optimiser_beside_muon_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`optim` must be left as it is with `muon_learning_rate`, got .*adafactor"):
        JetSpecTrainingArguments(str(tmp_path), muon_learning_rate=1e-3, optim="adafactor")


def test_both_take_a_closure() -> None:
    weight, bias = torch.nn.Parameter(torch.eye(3)), torch.nn.Parameter(torch.ones(3))
    both = MuonAndAdamW(torch.optim.SGD([weight], lr=0.5), torch.optim.SGD([bias], lr=0.1))

    def closure() -> torch.Tensor:
        both.zero_grad()
        loss = weight.sum() + bias.sum()
        loss.backward()
        return loss

    assert both.step(closure) == 6.0
    assert torch.equal(weight.detach(), torch.eye(3) - 0.5)
    assert torch.equal(bias.detach(), torch.full((3,), 0.9))
