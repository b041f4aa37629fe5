"""Acceptance beside the training loss, and the table of a finished head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.decoding.output import AcceptanceStats
from jetspec_hf.training import evaluation
from jetspec_hf.training.arguments import JetSpecTrainingArguments
from jetspec_hf.training.evaluation import AcceptanceCallback, acceptance_table, main, measure_acceptance
from jetspec_hf.training.simulation import Budget
from jetspec_hf.training.trainer import JetSpecTrainer
from support.char_tokenizer import letter_tokenizer
from support.recording import Fingerprint
from support.references import greedy_reference, plain_greedy, random_prompts
from support.tiny_targets import tiny_target

PROMPTS = random_prompts((7, 2, 4), seed=5)
BUDGETS: list[Budget] = ["chain", 10]
NEW_TOKENS = 10


def new_head(target: PreTrainedModel, **fields: Any) -> JetSpecDraftHead:
    torch.manual_seed(0)
    return JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=4, **fields)


def new_trainer(target: PreTrainedModel, head: JetSpecDraftHead, folder: Path, **arguments: Any) -> JetSpecTrainer:
    """A trainer on what the target writes after the prompts, so that a few steps are enough to have drafts accepted."""
    rows = []
    for prompt in PROMPTS[:2]:
        ids = torch.tensor([prompt])
        text = plain_greedy(target, ids, torch.ones_like(ids), NEW_TOKENS).sequences[0].tolist()
        rows.append({"input_ids": text, "loss_mask": [0] * len(prompt) + [1] * NEW_TOKENS})
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
    }
    args = JetSpecTrainingArguments(**{**settings, **arguments})
    return JetSpecTrainer(head, target, args=args, train_dataset=rows * 4, eval_dataset=rows)


def decoded(target: PreTrainedModel, head: JetSpecDraftHead, budget: Budget, **options: Any) -> list[list[int]]:
    """The accepted lengths of the prompts, decoded one at a time."""
    nodes, width = (head.config.block_size - 1, 1) if budget == "chain" else (budget, 16)
    head.generation_config.tree_budget, head.generation_config.tree_width = nodes, width
    lengths = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output: Any = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=head,
            do_sample=False,
            return_dict_in_generate=True,
            **options,
        )
        lengths += output.acceptance.accepted_lengths
    return lengths


def mean(rows: Sequence[Sequence[int]]) -> float:
    lengths = [length for row in rows for length in row]
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_what_is_measured_is_what_generate_accepts(target: PreTrainedModel, batch_size: int, tmp_path: Path) -> None:
    head = new_head(target)
    new_trainer(target, head, tmp_path, max_steps=16, eval_strategy="no").train()
    found = measure_acceptance(
        head, target, PROMPTS, BUDGETS, max_new_tokens=NEW_TOKENS, batch_size=batch_size, progress=False
    )
    assert found[10].mean_acceptance_length > 1.2
    assert {budget: stats.accepted_lengths for budget, stats in found.items()} == {
        budget: decoded(target, head, budget, max_new_tokens=NEW_TOKENS) for budget in BUDGETS
    }


def test_measuring_leaves_head_target_and_random_state_as_they_were(target: PreTrainedModel) -> None:
    head = new_head(target)
    head.train()
    head.layers[0].eval()
    models, state = (head, target), torch.random.get_rng_state()
    before = [Fingerprint.of(model) for model in models]
    measure_acceptance(head, target, PROMPTS, BUDGETS, max_new_tokens=5, progress=False, do_sample=True)
    for fingerprint, model in zip(before, models, strict=True):
        fingerprint.assert_unchanged(model)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_options_of_the_generation_reach_it(target: PreTrainedModel) -> None:
    stats = measure_acceptance(
        new_head(target), target, PROMPTS, [5], max_new_tokens=9, min_new_tokens=9, draft_depth=1, progress=False
    )[5]
    assert [sum(lengths) for lengths in stats.accepted_lengths] == [8, 8, 8]  # one is the prefill's
    assert len(stats.reached_by_depth) == 1


@pytest.mark.parametrize("prompts", [[], [[5, 6], []]], ids=str)
def test_prompts_without_tokens_are_refused(target: PreTrainedModel, prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="`prompts` must be token ids"):
        measure_acceptance(new_head(target), target, prompts)


def test_the_callback_logs_acceptance_next_to_every_loss(target: PreTrainedModel, tmp_path: Path) -> None:
    head = new_head(target)
    trainer = new_trainer(target, head, tmp_path)
    trainer.add_callback(AcceptanceCallback(trainer, PROMPTS, BUDGETS, max_new_tokens=NEW_TOKENS, batch_size=1))
    trainer.train()
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "eval_tau_10" in entry}
    assert list(logged) == [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [2, 4, 6]
    for budget in BUDGETS:  # nothing has been learned since the last evaluation
        assert logged[6][f"eval_tau_{budget}"] == pytest.approx(
            mean(decoded(target, head, budget, max_new_tokens=NEW_TOKENS))
        )
    first = {name: value for name, value in logged[6].items() if name.endswith("_depth_1")}
    assert set(first) == {f"eval_acceptance_{budget}_depth_1" for budget in BUDGETS}
    rows = decoded(target, head, 10, max_new_tokens=NEW_TOKENS)
    drafted = [length > 1 for row in rows for at, length in enumerate(row) if sum(row[:at]) < NEW_TOKENS - 2]
    assert first["eval_acceptance_10_depth_1"] == pytest.approx(sum(drafted) / len(drafted))


def test_training_is_bit_identical_with_and_without_the_callback(target: PreTrainedModel, tmp_path: Path) -> None:
    weights, histories = [], []
    for watched in (False, True):
        head = new_head(target, attention_dropout=0.3)
        trainer = new_trainer(target, head, tmp_path)
        if watched:
            trainer.add_callback(AcceptanceCallback(trainer, PROMPTS, max_new_tokens=6, do_sample=True))
        trainer.train()
        weights.append(head.state_dict())
        histories.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(histories[0]) == 6
    assert histories[0] == histories[1]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


def test_metrics_of_an_evaluation_hold_acceptance_so_that_the_best_model_can_be_chosen_by_it(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    trainer = new_trainer(
        target, new_head(target), tmp_path, save_strategy="best", metric_for_best_model="eval_tau_chain"
    )
    trainer.add_callback(AcceptanceCallback(trainer, PROMPTS, ["chain"], max_new_tokens=NEW_TOKENS))
    trainer.train()
    logged = [entry["eval_tau_chain"] for entry in trainer.state.log_history if "eval_tau_chain" in entry]
    assert trainer.state.best_metric == max(logged)
    assert "eval_tau_chain" in trainer.evaluate()


def count_measurements(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def measure(head: nn.Module, *_args: Any, **_options: Any) -> dict[Budget, AcceptanceStats]:
        calls.append(head)
        return {"chain": AcceptanceStats([[2, 1]], 2, [3, 3], [2], [1])}

    monkeypatch.setattr(evaluation, "measure_acceptance", measure)
    return calls


def test_it_generates_after_the_first_of_every_few_evaluations(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_measurements(monkeypatch)
    trainer = new_trainer(target, new_head(target), tmp_path, eval_steps=1)
    trainer.add_callback(AcceptanceCallback(trainer, PROMPTS, every=3))
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_tau_chain" in entry] == [1, 4]


def test_several_evaluation_datasets_are_one_evaluation(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_measurements(monkeypatch)
    trainer = new_trainer(target, new_head(target), tmp_path)
    rows = trainer.eval_dataset
    trainer.eval_dataset = {"easy": rows, "hard": rows}
    trainer.add_callback(AcceptanceCallback(trainer, PROMPTS))
    metrics = trainer.evaluate()
    assert len(calls) == 1
    assert metrics["eval_tau_chain"] == 1.5
    assert {"eval_easy_loss", "eval_hard_loss"} <= set(metrics)


def test_only_the_main_process_generates_and_the_others_are_told(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_measurements(monkeypatch)
    trainer = new_trainer(target, new_head(target), tmp_path)
    callback = AcceptanceCallback(trainer, PROMPTS)
    monkeypatch.setattr(evaluation, "broadcast_object_list", lambda logs: [{"eval_tau_chain": 9.0}])
    trainer.state.is_world_process_zero = False
    metrics: dict[str, float] = {}
    callback.on_evaluate(trainer.args, trainer.state, trainer.control, metrics=metrics)
    assert calls == []
    assert metrics == {"eval_tau_chain": 9.0}


# peft 0.21.2 reads an attribute that transformers 5.24 has renamed
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_head_under_training_with_lora_or_ddp_is_unwrapped(target: PreTrainedModel) -> None:
    head = new_head(target)
    adapted = get_peft_model(head, LoraConfig(target_modules=["q_proj", "k_proj"], lora_dropout=0.5))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    adapted.train()
    lengths = [
        measure_acceptance(wrapped, target, PROMPTS, [20], max_new_tokens=NEW_TOKENS, progress=False)[
            20
        ].accepted_lengths
        for wrapped in (adapted, nn.DataParallel(adapted))
    ]
    assert adapted.training
    merged = adapted.merge_and_unload().eval()
    assert lengths == [decoded(target, merged, 20, max_new_tokens=NEW_TOKENS)] * 2


def test_texts_are_read_by_the_trainers_tokenizer(target: PreTrainedModel, tmp_path: Path) -> None:
    trainer = new_trainer(target, new_head(target), tmp_path)
    with pytest.raises(ValueError, match="without a `processing_class`"):
        AcceptanceCallback(trainer, ["sometext"])
    trainer.processing_class = tokenizer = letter_tokenizer()
    callback = AcceptanceCallback(trainer, ["sometext", [5, 6]])
    assert callback._prompts == [tokenizer("sometext")["input_ids"], [5, 6]]


def test_evaluations_are_counted_from_one(target: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`every` must be at least 1, got 0"):
        AcceptanceCallback(new_trainer(target, new_head(target), tmp_path), PROMPTS, every=0)


def test_the_table_has_a_line_for_all_answers_and_one_for_each_source() -> None:
    found: dict[Budget, AcceptanceStats] = {
        "chain": AcceptanceStats([[1, 2], [3], [1, 1, 1, 1]]),
        16: AcceptanceStats([[3], [3], [2, 2]]),
    }
    assert acceptance_table(found, ["maths", "code", "maths"]).splitlines() == [
        "| τ | answers | chain | 16 |",
        "| --- | --- | --- | --- |",
        "| all | 3 | 1.429 | 2.500 |",
        "| maths | 2 | 1.167 | 2.333 |",
        "| code | 1 | 3.000 | 3.000 |",
    ]


def test_the_command_prints_what_the_real_loop_accepts_on_the_held_out_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_target("qwen3")
    head = new_head(target)
    new_trainer(target, head, tmp_path / "trainer", max_steps=12, eval_strategy="no").train()
    answers, expected = [], {}
    for index, length in enumerate((7, 3, 5)):
        reference = greedy_reference(target, (length,), 15, seed=index)
        answers.append(
            {
                "id": f"prompt {index}",
                "source": "odd" if index % 2 else "even",
                "prompt_ids": reference.texts[0][:length],
                "response_ids": reference.new_tokens[0].tolist(),
                "finish": "length",
            }
        )
        stats = measure_acceptance(
            head, target, [reference.texts[0][:length]], ["chain", 20], max_new_tokens=15, progress=False
        )
        expected[index] = [stats["chain"].accepted_lengths[0], stats[20].accepted_lengths[0]]
    target.save_pretrained(tmp_path / "target")
    head.save_pretrained(tmp_path / "head")
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    (tmp_path / "ids.txt").write_text("prompt 0\nprompt 1\n")
    folders = [f"--{name}={tmp_path / name}" for name in ("target", "head")]
    files = [f"--rows={tmp_path / 'answers.jsonl'}", f"--heldout-ids={tmp_path / 'ids.txt'}"]
    capsys.readouterr()
    main([*folders, *files, "--budgets", "chain", "20", "--threads", "1", "--dtype", "float32"])
    chain, tree = ([expected[index][column] for index in (0, 1)] for column in (0, 1))
    assert capsys.readouterr().out.splitlines() == [
        "| τ | answers | chain | 20 |",
        "| --- | --- | --- | --- |",
        f"| all | 2 | {mean(chain):.3f} | {mean(tree):.3f} |",
        f"| even | 1 | {mean(chain[:1]):.3f} | {mean(tree[:1]):.3f} |",
        f"| odd | 1 | {mean(chain[1:]):.3f} | {mean(tree[1:]):.3f} |",
    ]
