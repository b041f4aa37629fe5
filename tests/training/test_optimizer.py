"""Muon for matrices, AdamW for the rest: who trains what, and that both do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec_hf.training.adapters import add_lora
from jetspec_hf.training.arguments import JetSpecTrainingArguments
from jetspec_hf.training.optimizer import MuonAndAdamW
from jetspec_hf.training.trainer import JetSpecTrainer
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


@needs_muon
def test_lora_alone_leaves_adamw_nothing_to_do(tmp_path: Path) -> None:
    target = walking_target()
    head = tiny_head(target)
    add_lora(head, rank=2)
    trainer = make_trainer(
        tmp_path, target=target, head=head, train=random_rows(8), max_steps=2, muon_learning_rate=0.1
    )
    before = {name: parameter.detach().clone() for name, parameter in head.named_parameters() if "lora_B" in name}
    trainer.train()
    after = dict(head.named_parameters())
    assert len(before) > 0
    assert all(not torch.equal(old, after[name]) for name, old in before.items())


@needs_muon
@pytest.mark.parametrize(
    "schedule",
    [
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}},
        {"lr_scheduler_type": "polynomial"},
        {"lr_scheduler_type": "cosine_warmup_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}},
    ],
    ids=lambda schedule: schedule["lr_scheduler_type"],
)
def test_schedules_to_an_absolute_rate_bring_both_down_alike(schedule: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, train=random_rows(8), max_steps=3, muon_learning_rate=1e-2, learning_rate=1e-3, **schedule
    )
    trainer.train()
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert rates[0] == pytest.approx(10 * rates[-1])
    assert 0 < rates[-1] < 1e-3


@needs_muon
def test_a_copy_steps_as_the_original_does() -> None:
    weight = torch.nn.Parameter(torch.eye(3))
    both = copy.deepcopy(MuonAndAdamW(torch.optim.SGD([weight], lr=0.5), learning_rate=0.5))
    (copied,) = both.param_groups[0]["params"]
    copied.grad = torch.ones(3, 3)
    both.step()
    assert torch.equal(copied.detach(), torch.eye(3) - 0.5)
    assert torch.equal(weight.detach(), torch.eye(3))


@pytest.mark.parametrize("own", ["optimizers", "optimizer_cls_and_kwargs"])
def test_an_optimiser_of_ones_own_beside_muon_is_refused(own: str, tmp_path: Path) -> None:
    target = walking_target()
    head = tiny_head(target)
    given: Any = {
        "optimizers": (torch.optim.SGD(head.parameters(), lr=0.1), None),
        "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1}),
    }[own]
    with pytest.raises(ValueError, match=f"`muon_learning_rate` must be None with `{own}`"):
        JetSpecTrainer(
            model=head,
            target=target,
            args=JetSpecTrainingArguments(str(tmp_path), muon_learning_rate=1e-2),
            train_dataset=random_rows(4),
            **{own: given},
        )


@needs_muon
@pytest.mark.parametrize(("first", "then"), [(1e-2, None), (None, 1e-2)], ids=["without", "with"])
def test_a_run_goes_on_with_its_own_optimiser(first: float | None, then: float | None, tmp_path: Path) -> None:
    target = walking_target()
    rows = random_rows(8)
    make_trainer(
        tmp_path, target=target, train=rows, max_steps=2, save_strategy="steps", save_steps=1, muon_learning_rate=first
    ).train()
    other = make_trainer(
        tmp_path, target=target, train=rows, max_steps=3, save_strategy="steps", save_steps=1, muon_learning_rate=then
    )
    with pytest.raises(ValueError, match=r"needs the optimiser of the run that it goes on with: its `muon_"):
        other.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("rate", [0, -1e-3, float("nan"), float("inf"), "fast", True, 10**400])
def test_a_rate_that_is_none_is_refused(rate: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`muon_learning_rate` must be a finite number above 0, got"):
        JetSpecTrainingArguments(str(tmp_path), muon_learning_rate=rate)


def test_another_optimiser_beside_muon_is_refused(tmp_path: Path) -> None:
    for name in ("adafactor", "adamw_torch_8bit"):
        with pytest.raises(ValueError, match=f"`optim` must be left as it is with `muon_learning_rate`, got .*{name}"):
            JetSpecTrainingArguments(str(tmp_path), muon_learning_rate=1e-3, optim=name)


def test_both_take_a_closure() -> None:
    weight, bias = torch.nn.Parameter(torch.eye(3)), torch.nn.Parameter(torch.ones(3))
    both = MuonAndAdamW(torch.optim.SGD([weight], lr=0.5), torch.optim.SGD([bias], lr=0.1), learning_rate=0.1)

    def closure() -> torch.Tensor:
        both.zero_grad()
        loss = weight.sum() + bias.sum()
        loss.backward()
        return loss

    assert both.step(closure) == 6.0
    assert torch.equal(weight.detach(), torch.eye(3) - 0.5)
    assert torch.equal(bias.detach(), torch.full((3,), 0.9))
