"""The trainer: its loss is the paper's, its target stays as it is, and how a batch is split changes nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.target import decoder_layers
from jetspec_hf.training.arguments import JetSpecTrainingArguments
from jetspec_hf.training.batches import TrainingCollator, draw_blocks
from jetspec_hf.training.rows import RowCollator, pack_rows
from jetspec_hf.training.trainer import JetSpecTrainer
from support.char_tokenizer import letter_tokenizer
from support.tiny_targets import tiny_target
from support.training_runs import (
    MASK,
    arguments,
    make_trainer,
    random_rows,
    run,
    sampled_rows,
    start,
    tiny_head,
    walking_target,
)


def read_whole(target: PreTrainedModel, layer_ids: list[int], ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tapped features of shape `(1, length, taps * hidden)` and logits of shape `(length, vocab)` of one row."""
    tapped: dict[int, torch.Tensor] = {}

    def keep(layer_id: int) -> Any:
        return lambda _module, _args, out: tapped.__setitem__(layer_id, out if torch.is_tensor(out) else out[0])

    handles = [decoder_layers(target)[i].register_forward_hook(keep(i)) for i in layer_ids]
    logits = target(ids[None]).logits[0]
    for handle in handles:
        handle.remove()
    return torch.cat([tapped[i] for i in layer_ids], dim=-1), logits


def naive_loss(
    head: JetSpecDraftHead, target: PreTrainedModel, rows: list[dict[str, Any]], hard: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss and agreement per depth over every block, drafted one by one as inference does, of whole logits."""
    losses: list[torch.Tensor] = []
    agree: list[list[bool]] = [[] for _ in range(head.config.block_size - 1)]
    lm_head, embed = target.get_output_embeddings(), target.get_input_embeddings()
    kept = slice(None) if head.draft_token_ids is None else head.draft_token_ids
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        features, teacher = read_whole(target, head.config.target_layer_ids, ids)
        for anchor in range(len(ids) - 1):
            block = torch.full((1, head.config.block_size), head.config.mask_token_id)
            block[0, 0] = ids[anchor]
            drafted = lm_head(head(embed(block), features[:, :anchor]).last_hidden_state)[0]
            for depth in range(1, head.config.block_size):
                place = anchor + depth
                if place >= len(ids) or not row["loss_mask"][place]:
                    break
                student = drafted[depth][kept].log_softmax(-1)
                wanted = teacher[place - 1][kept].log_softmax(-1)
                divergence = (wanted.exp() * (wanted - student)).sum()
                losses.append(-student[ids[place]] if hard else divergence)
                agree[depth - 1].append(bool(student.argmax() == wanted.argmax()))
    return torch.stack(losses).mean(), torch.tensor([sum(hits) / len(hits) for hits in agree])


@pytest.mark.parametrize("case", ["all tokens", "draft vocabulary", "bidirectional, hard labels"])
@torch.no_grad()
def test_the_loss_is_that_of_every_block_drafted_alone(case: str, tmp_path: Path) -> None:
    target, rows, hard = tiny_target("llama"), random_rows(4), case == "bidirectional, hard labels"
    fields: dict[str, Any] = {"causal": not hard}
    if case == "draft vocabulary":
        fields["draft_token_ids"] = list(range(3, 90))
    head = tiny_head(target, **fields)
    loss, agreement = naive_loss(head, target, rows, hard)
    trainer = make_trainer(
        tmp_path, target=target, head=head, evaluation=rows, loss="hard_labels" if hard else "forward_kl"
    )
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(float(loss), abs=1e-5)
    for depth, share in enumerate(agreement.tolist(), start=1):
        assert found[f"eval_agreement_{depth}"] == pytest.approx(share, abs=1e-6)
    first, second, third = agreement.tolist()
    expected = 1 + first + first * second + first * second * third
    assert found["eval_accept_length_proxy"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_held_out_loss_is_a_mean_over_places_whatever_the_batches(batch_size: int, tmp_path: Path) -> None:
    rows = random_rows(6)
    whole = make_trainer(tmp_path, evaluation=rows, per_device_eval_batch_size=6).evaluate()["eval_loss"]
    parts = make_trainer(tmp_path, evaluation=rows, per_device_eval_batch_size=batch_size).evaluate()["eval_loss"]
    assert parts == pytest.approx(whole, abs=1e-5)


def test_packing_and_padding_at_the_left_change_no_loss(tmp_path: Path) -> None:
    rows = random_rows(6)
    target = tiny_target("llama")
    expected = make_trainer(tmp_path, target=target, evaluation=rows).evaluate()
    packed = make_trainer(tmp_path, target=target, evaluation=pack_rows(rows, length=48)).evaluate()
    left = JetSpecTrainer(
        model=tiny_head(target),
        target=target,
        args=arguments(tmp_path),
        eval_dataset=rows,
        data_collator=RowCollator(0, padding_side="left"),
    ).evaluate()
    for name in ("eval_loss", "eval_agreement", "eval_accept_length_proxy"):
        assert packed[name] == pytest.approx(expected[name], abs=1e-5)
        assert left[name] == pytest.approx(expected[name], abs=1e-5)


def test_training_lowers_the_held_out_loss_and_logs_what_it_does(tmp_path: Path) -> None:
    target = walking_target()
    rows = sampled_rows(target, 80)
    trainer = make_trainer(
        tmp_path,
        target=target,
        head=tiny_head(target, branch_rank=8),
        train=rows[:64],
        evaluation=rows[64:],
        max_steps=60,
        learning_rate=1e-2,
        logging_steps=20,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_base_loss"] < 0.4 * before["eval_base_loss"]
    assert after["eval_branch_loss"] < 0.4 * before["eval_branch_loss"]
    assert before["eval_agreement"] < 0.1
    assert after["eval_agreement"] > 0.7
    logged = [entry for entry in trainer.state.log_history if "base_loss" in entry]
    assert [entry["step"] for entry in logged] == [20, 40, 60]
    for name in ("agreement_1", "agreement_3", "branch_agreement", "accept_length_proxy", "grad_norm"):
        assert name in logged[0]
    # both are means over 20 steps, one of which weighs the steps alike and the other the places in them
    assert logged[0]["loss"] == pytest.approx(logged[0]["base_loss"] + logged[0]["branch_loss"], rel=0.05)


def snapshot(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], list[bool], list[bool], int]:
    """Weights, modes, gradient flags and number of hooks."""
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        [module.training for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()),
    )


def assert_untouched(model: PreTrainedModel, before: tuple[Any, ...]) -> None:
    after = snapshot(model)
    assert before[1:] == after[1:]
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert all(parameter.grad is None for parameter in model.parameters())


class Watch(TrainerCallback):
    """Notes how the target is while the head trains, and stops the run with an error if asked to."""

    def __init__(self, target: PreTrainedModel, fail: bool) -> None:
        self.target, self.fail, self.seen = target, fail, False

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        assert not any(module.training for module in self.target.modules())
        assert not any(parameter.requires_grad for parameter in self.target.parameters())
        self.seen = True
        if self.fail:
            raise RuntimeError("stopped")


@pytest.mark.parametrize("fail", [False, True])
def test_the_target_is_frozen_meanwhile_and_untouched_afterwards(fail: bool, tmp_path: Path) -> None:
    target = tiny_target("llama").train()
    target.model.norm.eval()
    target.lm_head.requires_grad_(False)
    head = tiny_head(target)
    before, watch = snapshot(target), Watch(target, fail)
    trainer = make_trainer(
        tmp_path,
        target=target,
        head=head,
        train=random_rows(4),
        evaluation=random_rows(2, seed=1),
        callbacks=[watch],
        max_steps=2,
        learning_rate=0.1,
        eval_strategy="steps",
        eval_steps=1,
    )
    if fail:
        with pytest.raises(RuntimeError, match="stopped"):
            trainer.train()
    else:
        trainer.train()
        trainer.evaluate()
    assert watch.seen
    assert_untouched(target, before)
    known = {id(parameter) for parameter in head.parameters()}
    assert {id(p) for group in trainer.optimizer.param_groups for p in group["params"]} == known


def test_a_saved_head_is_an_ordinary_one_with_its_provenance(tmp_path: Path) -> None:
    target, rows = tiny_target("llama"), random_rows(6)
    trainer = JetSpecTrainer(
        model=tiny_head(target),
        target=target,
        args=arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, depth_decay=4.0),
        train_dataset=rows,
        processing_class=letter_tokenizer(),
    )
    trainer.train()
    trainer.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        loaded = JetSpecDraftHead.from_pretrained(folder)
        assert all(torch.equal(loaded.state_dict()[name], value) for name, value in trainer.head.state_dict().items())
        written = json.loads((folder / "training_provenance.json").read_text())
        assert written["data"]["rows"] == 6
        assert written["data"]["tokens"] == sum(len(row["input_ids"]) for row in rows)
        assert written["data"]["supervised_tokens"] == sum(sum(row["loss_mask"]) for row in rows)
        assert written["target"]["class"] == "LlamaForCausalLM"
        assert written["tokenizer"]["vocabulary"]
        assert written["versions"]["torch"] == torch.__version__
        assert written["arguments"]["depth_decay"] == 4.0
        assert written["arguments"]["learning_rate"] == 3e-4
        assert str(tmp_path) not in json.dumps(written)
    assert "use_cache" not in json.loads((tmp_path / "config.json").read_text())
    card = (tmp_path / "README.md").read_text()
    trainer.create_model_card(model_name="mine")  # as a push by the trainer does
    assert (tmp_path / "README.md").read_text() == card
    assert "JetSpec" in card


def trained_weights(folder: Path, **fields: Any) -> dict[str, torch.Tensor]:
    """Weights after three steps over global batches of four rows, in float64."""
    target = tiny_target("llama").to(torch.float64)
    trainer = make_trainer(
        folder,
        target=target,
        head=tiny_head(target, branch_rank=4),
        train=random_rows(12),
        num_train_epochs=1,
        anchors_per_row=6,
        learning_rate=0.1,
        optim="sgd",  # Adam would hide a wrong scale
        **fields,
    )
    trainer.train()
    return dict(trainer.head.state_dict())


# The weights are float64; the share of a batch in its step is float32, so its relative error is below 1e-7.
SPLIT_TOLERANCE = 1e-6


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= tolerance, name


def test_gradient_accumulation_equals_a_bigger_batch(tmp_path: Path) -> None:
    whole = trained_weights(tmp_path, per_device_train_batch_size=4)
    for size in (1, 2):
        parts = trained_weights(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=4 // size)
        assert_same_weights(parts, whole, SPLIT_TOLERANCE)


@pytest.mark.parametrize("loss", ["forward_kl", "hard_labels"])
def test_a_step_divides_by_the_weights_of_the_places_that_count(loss: str, tmp_path: Path) -> None:
    """Places whose label is not in the draft vocabulary do not count for hard labels."""
    target = tiny_target("llama")
    trainer = make_trainer(
        tmp_path,
        target=target,
        head=tiny_head(target, draft_token_ids=list(range(3, 60))),
        train=random_rows(4),
        max_steps=1,
        loss=loss,
        depth_decay=2.0,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(logged["base_loss"], abs=1e-5)


def test_a_mean_of_the_parts_means_would_not_equal_a_bigger_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained_weights(tmp_path, per_device_train_batch_size=4)
    plain = JetSpecTrainer.compute_loss

    def mean_of_means(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return plain(self, model, inputs, return_outputs) / 4

    monkeypatch.setattr(JetSpecTrainer, "compute_loss", mean_of_means)
    parts = trained_weights(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert max((parts[name] - whole[name]).abs().max() for name in whole) > 100 * SPLIT_TOLERANCE


def test_two_processes_train_to_the_same_head_as_one(tmp_path: Path) -> None:
    common = {
        "num_train_epochs": 2,
        "anchors_per_row": 6,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "epoch",
    }
    cases = ({}, {"loss": "hard_labels", "depth_decay": 2.0})
    head = {"branch_rank": 4, "draft_token_ids": list(range(3, 90))}

    def options(name: str, batch_size: int, accumulation: int, objective: dict[str, Any]) -> dict[str, Any]:
        split = {"gradient_accumulation_steps": accumulation}
        split |= {f"per_device_{name}_batch_size": batch_size for name in ("train", "eval")}
        run = {"rows": 12, "folder": str(tmp_path), "out": str(tmp_path / f"{name}.safetensors"), "head": head}
        return {**run, "arguments": {**common, **split, **objective}}

    two = [options(f"two{index}", 1, 2, case) for index, case in enumerate(cases)]
    two[0]["shard"] = True  # no process holds all of the target's layers
    process = start(two, processes=2)
    for index, case in enumerate(cases):
        run(options(f"one{index}", 4, 1, case))
    process.communicate(timeout=300)
    assert process.returncode == 0
    for index in range(len(cases)):
        one, two = (tmp_path / f"{name}{index}.safetensors" for name in ("one", "two"))
        assert_same_weights(load_file(two), load_file(one), SPLIT_TOLERANCE)
        logs = [json.loads(file.with_suffix(".json").read_text()) for file in (one, two)]
        compared = ("loss", "base_loss", "branch_loss", "agreement", "branch_agreement_2", "eval_loss")
        assert len(logs[0]) == 6 + 2 + 1
        for expected, found in zip(*logs, strict=True):
            for name in expected.keys() & compared:
                assert found[name] == pytest.approx(expected[name], abs=1e-5), (expected["step"], name)


def test_the_anchors_of_a_row_depend_on_the_row_the_seed_and_the_epoch_alone() -> None:
    rows = random_rows(8, shortest=20, longest=60)

    def anchors(index: int, batch: list[dict[str, Any]], side: str = "right", seed: int = 1, epoch: int = 2) -> Any:
        collated = TrainingCollator(RowCollator(0, padding_side=side))(batch)
        blocks = draw_blocks(collated, count=5, block_size=4, seed=seed, epoch=epoch)
        shift = int((collated["document_ids"][index] >= 0).long().argmax())
        return (blocks.anchors[index][blocks.used[index]] - shift).tolist()

    alone = [anchors(0, [row]) for row in rows]
    assert [anchors(index, rows) for index in range(8)] == alone
    assert [anchors(index, rows, side="left") for index in range(8)] == alone
    assert [anchors(index, rows, seed=2) for index in range(8)] != alone
    assert [anchors(index, rows, epoch=3) for index in range(8)] != alone


def test_each_epoch_draws_other_anchors_and_evaluation_always_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[int, list[Any]] = {}
    plain = draw_blocks

    def note(batch: Any, **fields: Any) -> Any:
        blocks = plain(batch, **fields)
        drawn.setdefault(fields["epoch"], []).append(blocks.anchors.tolist())
        return blocks

    monkeypatch.setattr("jetspec_hf.training.trainer.draw_blocks", note)
    rows = random_rows(1, shortest=60, longest=60)
    trainer = make_trainer(
        tmp_path, train=rows, evaluation=rows, num_train_epochs=3, anchors_per_row=4, eval_strategy="epoch"
    )
    trainer.train()
    assert sorted(drawn) == [-1, 0, 1, 2]
    assert len({json.dumps(drawn[epoch]) for epoch in (0, 1, 2)}) == 3
    assert len(drawn[-1]) == 3
    assert len({json.dumps(anchors) for anchors in drawn[-1]}) == 1


@pytest.mark.parametrize("sampling", ["random", "sequential", "group_by_length"])
@pytest.mark.parametrize("workers", [0, 1])
def test_trainers_own_samplers_and_workers_take_a_dataset(sampling: str, workers: int, tmp_path: Path) -> None:
    rows = Dataset.from_list([{**row, "id": f"row {index}"} for index, row in enumerate(random_rows(6))])
    trainer = make_trainer(
        tmp_path,
        train=rows,
        max_steps=2,
        train_sampling_strategy=sampling,
        dataloader_num_workers=workers,
        feature_cache_dir=str(tmp_path / "cache") if workers else None,
    )
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.skipif(not JetSpecDraftHead.supports_gradient_checkpointing, reason="needs layers that are checkpointed")
def test_checkpointed_activations_give_the_same_head(tmp_path: Path) -> None:
    known = {field.name for field in dataclasses.fields(JetSpecTrainingArguments)}
    name = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in known)
    plain, checkpointed = (trained_weights(tmp_path, **{name: wanted}) for wanted in (False, True))
    assert all(torch.equal(plain[name], value) for name, value in checkpointed.items())


def test_mixed_precision_over_a_bfloat16_target_trains(tmp_path: Path) -> None:
    target = tiny_target("gemma2", "eager").to(torch.bfloat16)
    head = tiny_head(target, branch_rank=4, draft_token_ids=list(range(3, 90))).float()
    trainer = make_trainer(tmp_path, target=target, head=head, train=random_rows(6), max_steps=3, bf16=True)
    result = trainer.train()
    assert 0 < result.training_loss < 100
    assert all(parameter.dtype == torch.float32 and parameter.isfinite().all() for parameter in head.parameters())
    assert next(target.parameters()).dtype == torch.bfloat16


def test_weights_of_half_precision_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_target("llama").to(torch.bfloat16)
    logger = "jetspec_hf.training.checks"
    with caplog.at_level("WARNING", logger):
        make_trainer(tmp_path, target=target)
    assert "small updates are lost" in caplog.text


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"anchors_per_row": 0}, "`anchors_per_row` must be an integer of at least 1, got 0"),
        ({"max_length": 1}, "`max_length` must be an integer of at least 2, got 1"),
        ({"loss": "mse"}, "`loss` must be one of"),
        ({"kl_temperature": 0.0}, "`kl_temperature` must be a positive number, got 0.0"),
        ({"depth_decay": -1.0}, "`depth_decay` must be a positive number"),
        ({"chunk_rows": 0}, "`chunk_rows` must be an integer of at least 1, got 0"),
        ({"feature_cache_dtype": "int8"}, "`feature_cache_dtype` must be one of"),
        ({"remove_unused_columns": True}, "`remove_unused_columns` must be False"),
    ],
)
def test_an_argument_out_of_range_is_refused_by_name(fields: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=word):
        arguments(tmp_path, **fields)


def test_batches_are_pinned_where_there_is_an_accelerator_unless_it_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for available in (True, False):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda value=available: value)
        for chosen, pinned in ((None, available), (True, True), (False, False)):
            args = JetSpecTrainingArguments(str(tmp_path), dataloader_pin_memory=chosen)
            assert args.dataloader_pin_memory is pinned


def test_the_defaults_are_the_recipe_and_any_schedule_may_be_chosen(tmp_path: Path) -> None:
    args = JetSpecTrainingArguments(str(tmp_path), report_to="none")
    assert (args.learning_rate, args.adam_beta1, args.adam_beta2, args.weight_decay) == (3e-4, 0.9, 0.95, 0.0)
    assert args.get_warmup_steps(1000) == 40
    trainer = make_trainer(tmp_path, train=random_rows(4), max_steps=100, learning_rate=1.0)
    trainer.create_optimizer_and_scheduler(100)
    rates = []
    for _ in range(100):
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        rates.append(trainer.lr_scheduler.get_last_lr()[0])
    assert rates[3] == pytest.approx(1.0)  # 4 % of 100 steps
    assert rates[-1] == pytest.approx(0.1)  # 10 % of the peak
    assert arguments(tmp_path, lr_scheduler_type="linear").lr_scheduler_kwargs is None


@pytest.mark.parametrize(
    ("mask", "word"),
    [(0, "`pad_token_id` of the target's config"), (2, "`eos_token_id` of the target's config")],
)
def test_a_mask_token_that_stands_in_text_is_refused(mask: int, word: str, tmp_path: Path) -> None:
    target = tiny_target("llama")
    with pytest.raises(ValueError, match=f"`mask_token_id` must be .* got {mask}, the {word}"):
        make_trainer(tmp_path, target=target, head=tiny_head(target, mask_token_id=mask))


def test_a_mask_token_that_is_one_of_several_ends_or_the_tokenizers_padding_is_refused(tmp_path: Path) -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    target.generation_config.eos_token_id = [2, MASK]
    with pytest.raises(ValueError, match="`eos_token_id` of the target's generation config"):
        make_trainer(tmp_path, target=target, head=head)
    target.generation_config.eos_token_id = None
    tokenizer = letter_tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(MASK)
    with pytest.raises(ValueError, match="`pad_token_id` of the tokenizer"):
        JetSpecTrainer(model=head, target=target, args=arguments(tmp_path), processing_class=tokenizer)


def test_a_mask_token_without_an_embedding_is_refused(tmp_path: Path) -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    head.config.mask_token_id = 128
    with pytest.raises(ValueError, match=r"`mask_token_id` must be one of the target's 128 embeddings, got 128"):
        make_trainer(tmp_path, target=target, head=head)


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]},
        {"input_ids": [5, 6, 7], "loss_mask": [1, 0, 0]},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 0], "document_ids": [0, 0, 1, 1]},
        {"input_ids": [5, 6, 7, 8, 9, 10, 11, 12, 13], "loss_mask": [0] * 8 + [1]},
    ],
    ids=["no token", "only the first", "only the first of a document", "only beyond `max_length`"],
)
def test_a_row_without_a_token_to_predict_is_refused(row: dict[str, Any], tmp_path: Path) -> None:
    good = {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}
    with pytest.raises(ValueError, match=r"`train_dataset` must have a token to be predicted .* row 1"):
        make_trainer(tmp_path, train=[good, row], max_length=8)
    with pytest.raises(ValueError, match=r"`eval_dataset\['x'\]` must have"):
        make_trainer(tmp_path, evaluation={"x": [good, row]}, max_length=8)


def test_a_head_for_another_target_or_wrapped_by_peft_is_refused(tmp_path: Path) -> None:
    head = tiny_head(tiny_target("llama", hidden_size=32))
    with pytest.raises(ValueError, match="`hidden_size`"):
        make_trainer(tmp_path, head=head)
    with pytest.raises(ValueError, match="`model` must be a JetSpecDraftHead, got Linear"):
        make_trainer(tmp_path, head=nn.Linear(2, 2))  # type: ignore[arg-type]
