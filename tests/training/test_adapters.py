"""LoRA on a head: it adapts to a changed target, and what is saved is an ordinary head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.training.adapters import add_lora, has_lora, load_lora, merge_lora, merged_state_dict
from support.tiny_targets import tiny_target
from support.training_runs import make_trainer, random_rows, sampled_rows, tiny_head, walking_target

pytest.importorskip("peft")


def outputs(head: JetSpecDraftHead) -> torch.Tensor:
    """What a head makes of a fixed block and context."""
    draws = torch.Generator().manual_seed(3)
    noise, context = torch.randn(1, 4, 64, generator=draws), torch.randn(1, 6, 128, generator=draws)
    with torch.no_grad():
        states: torch.Tensor = head.eval()(noise.to(head.dtype), context.to(head.dtype)).last_hidden_state
    return states


def stir(head: JetSpecDraftHead, size: float = 0.1) -> None:
    """Gives fresh adapters, which change nothing, weights that do."""
    draws = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draws) * size)


def test_fresh_adapters_change_nothing_and_leave_only_themselves_to_train() -> None:
    head = tiny_head(tiny_target("llama"))
    expected = outputs(head)
    assert add_lora(head, rank=4) is head
    assert torch.equal(outputs(head), expected)
    trainable = {name for name, parameter in head.named_parameters() if parameter.requires_grad}
    assert trainable
    assert all(".lora_" in name for name in trainable)
    adapted = {name.split(".lora_")[0].split(".")[-1] for name in trainable}
    assert adapted == {"fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_merging_gives_the_same_outputs_and_an_ordinary_head() -> None:
    head = tiny_head(tiny_target("llama"), branch_rank=4)
    names = set(head.state_dict())
    plain = outputs(head)
    add_lora(head, rank=4, alpha=12)
    stir(head)
    adapted = outputs(head)
    assert (adapted - plain).abs().max() > 0.1
    merged = merged_state_dict(head)
    assert set(merged) == names
    assert has_lora(head)
    assert torch.equal(outputs(head), adapted)
    merge_lora(head)
    assert not has_lora(head)
    assert set(head.state_dict()) == names
    assert all(torch.equal(head.state_dict()[name], value) for name, value in merged.items())
    assert (outputs(head) - adapted).abs().max() < 1e-5
    assert all(parameter.requires_grad for parameter in head.parameters())


def test_adapters_of_a_half_precision_head_are_float32() -> None:
    head = add_lora(tiny_head(tiny_target("llama")).to(torch.bfloat16), rank=4)
    stir(head)
    dtypes = {parameter.dtype for name, parameter in head.named_parameters() if parameter.requires_grad}
    assert dtypes == {torch.float32}
    adapted = outputs(head)
    assert {value.dtype for value in merged_state_dict(head).values()} == {torch.bfloat16}
    assert (outputs(merge_lora(head)) - adapted).abs().max() < 0.1 * adapted.abs().max()


def test_adapting_a_head_to_a_changed_target_beats_the_unadapted_head(tmp_path: Path) -> None:
    target, tuned = walking_target(), walking_target(swaps=6)
    head = tiny_head(target)
    recipe: dict[str, Any] = {"max_steps": 60, "learning_rate": 1e-2}
    make_trainer(tmp_path, target=target, head=head, train=sampled_rows(target, 64), **recipe).train()

    rows = sampled_rows(tuned, 80, seed=1)
    held_out = rows[64:]
    before = make_trainer(tmp_path, target=tuned, head=head, evaluation=held_out).evaluate()
    frozen = {name: value.clone() for name, value in head.state_dict().items()}
    add_lora(head, rank=8)
    trainer = make_trainer(tmp_path / "lora", target=tuned, head=head, train=rows[:64], evaluation=held_out, **recipe)
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.5 * before["eval_loss"]
    assert after["eval_agreement"] > before["eval_agreement"] + 0.15
    assert after["eval_accept_length_proxy"] > before["eval_accept_length_proxy"] + 0.5

    trainer.save_model()
    assert has_lora(head)
    loaded = JetSpecDraftHead.from_pretrained(tmp_path / "lora")
    assert set(loaded.state_dict()) == set(frozen)
    assert (outputs(loaded) - outputs(head)).abs().max() < 1e-5
    assert torch.equal(loaded.norm.weight, frozen["norm.weight"])
    saved = make_trainer(tmp_path / "again", target=tuned, head=loaded, evaluation=held_out).evaluate()
    assert saved["eval_loss"] == pytest.approx(after["eval_loss"], abs=1e-4)


def test_a_run_with_adapters_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def trained(folder: Path, resume: bool) -> JetSpecDraftHead:
        head = add_lora(tiny_head(tiny_target("llama")), rank=4)
        trainer = make_trainer(
            folder,
            head=head,
            train=random_rows(8),
            max_steps=4,
            learning_rate=1e-2,
            per_device_train_batch_size=2,
            save_strategy="steps",
            save_steps=2,
        )
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
        return head

    torch.manual_seed(0)
    whole = trained(tmp_path, resume=False).state_dict()
    torch.manual_seed(1)  # other fresh adapters, which the checkpoint replaces
    resumed = trained(tmp_path, resume=True).state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not has_lora(JetSpecDraftHead.from_pretrained(tmp_path / "checkpoint-2"))


class Ruin(TrainerCallback):
    """Makes the head useless after its first evaluation."""

    def on_step_end(self, _args: Any, state: Any, _control: Any, model: Any = None, **_kwargs: Any) -> None:
        if state.global_step == 2:
            stir(model, size=30.0)


def test_the_best_adapters_are_loaded_at_the_end(tmp_path: Path) -> None:
    head = add_lora(tiny_head(tiny_target("llama")), rank=4)
    trainer = make_trainer(
        tmp_path,
        head=head,
        train=random_rows(8),
        evaluation=random_rows(4, seed=1),
        callbacks=[Ruin()],
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    trainer.train()
    assert trainer.state.best_global_step == 1
    loaded = JetSpecDraftHead.from_pretrained(tmp_path / "checkpoint-1")
    assert (outputs(loaded) - outputs(head)).abs().max() < 1e-5
    last = JetSpecDraftHead.from_pretrained(tmp_path / "checkpoint-3")
    assert (outputs(last) - outputs(head)).abs().max() > 0.1


def test_other_adapters_than_the_checkpoints_are_refused(tmp_path: Path) -> None:
    def trainer(rank: int | None) -> Any:
        head = tiny_head(tiny_target("llama"))
        head = head if rank is None else add_lora(head, rank=rank)
        return make_trainer(tmp_path, head=head, train=random_rows(4), max_steps=2, save_strategy="steps", save_steps=1)

    trainer(4).train()
    with pytest.raises(ValueError, match="difference at"):
        trainer(8).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-2" / "lora_weights.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lora_weights.safetensors, got .*checkpoint-2 without one"):
        load_lora(add_lora(tiny_head(tiny_target("llama")), rank=4), tmp_path / "checkpoint-2")


def test_adapters_upon_adapters_and_a_rank_of_nothing_are_refused() -> None:
    head = tiny_head(tiny_target("llama"))
    with pytest.raises(ValueError, match="`rank` must be at least 1, got 0"):
        add_lora(head, rank=0)
    with pytest.raises(ValueError, match="merge_lora"):
        add_lora(add_lora(head, rank=2), rank=2)


def test_a_head_with_adapters_drafts(tmp_path: Path) -> None:
    target = tiny_target("llama")
    head = add_lora(tiny_head(target), rank=4)
    stir(head)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(target.generate(**inputs, assistant_model=head), target.generate(**inputs))
    assert json.dumps(head.last_acceptance.accepted_lengths)


def test_a_head_with_adapters_is_not_saved_as_an_ordinary_one_until_they_are_merged(tmp_path: Path) -> None:
    head = add_lora(tiny_head(tiny_target("llama")), rank=2)
    with pytest.raises(ValueError, match="merge_lora"):
        head.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
    merge_lora(head).save_pretrained(tmp_path)
    assert torch.equal(outputs(JetSpecDraftHead.from_pretrained(tmp_path)), outputs(head))
