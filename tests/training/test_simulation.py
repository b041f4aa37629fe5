"""Simulated acceptance against the real loop: the same lengths, sizes and depths, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedModel

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.decoding.budget import BudgetDecision
from jetspec_hf.decoding.output import AcceptanceStats
from jetspec_hf.training import simulation
from jetspec_hf.training.blocks import branch_states, draft_states, make_blocks, sample_anchors
from jetspec_hf.training.rows import RowCollator
from jetspec_hf.training.simulation import Budget, evaluating, pool_acceptance, simulate_acceptance, simulate_budgets
from jetspec_hf.training.target_reader import TargetReader
from support.oracle import OracleHead
from support.references import greedy_reference
from support.tiny_targets import ARCHITECTURES, tiny_target

BUDGETS: list[Budget] = ["chain", 0, 1, 5, 16, 48]
PROMPTS = (9, 1, 5)
Row = dict[str, list[int]]


def written_rows(target: PreTrainedModel, prompts: Sequence[int] = PROMPTS, new_tokens: int = 18) -> list[Row]:
    """Rows of several lengths that the target wrote greedily."""
    rows = []
    for index, length in enumerate(prompts):
        count = new_tokens - 4 * index
        (text,) = greedy_reference(target, (length,), count, seed=index).texts
        rows.append({"input_ids": text, "loss_mask": [0] * length + [1] * count})
    return rows


def fit(head: JetSpecDraftHead, reader: TargetReader, rows: Sequence[Row], steps: int = 25) -> None:
    """Trains a head on the very rows, so that it drafts some of them right."""
    batch = RowCollator(pad_token_id=0)(rows)
    ids, loss_mask, documents = (batch[name] for name in ("input_ids", "loss_mask", "document_ids"))
    features = reader.read(ids, documents).features
    drafted = torch.arange(128) if head.draft_token_ids is None else head.draft_token_ids
    columns = torch.full((128,), -100).scatter(0, drafted, torch.arange(len(drafted)))
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(steps):
        anchors, used = sample_anchors(loss_mask, documents, 8)
        blocks = make_blocks(ids, loss_mask, documents, anchors, used, head.config.block_size)
        states = draft_states(head, reader, ids, documents, features, blocks)
        logits = reader.draft_logits(states, head.draft_token_ids)
        paths = branch_states(head, reader, ids, states, blocks)
        if head.branch is not None and paths is not None:
            logits = logits + paths @ head.branch.table(head.embed(drafted, reader)).T
        F.cross_entropy(logits[blocks.supervised], columns[blocks.labels[blocks.supervised]]).backward()
        optimizer.step()
        optimizer.zero_grad()


def decode(
    target: PreTrainedModel,
    head: JetSpecDraftHead,
    row: Row,
    budget: Budget,
    tree_width: int = 16,
    draft_depth: int | None = None,
    max_new_tokens: int | None = None,
) -> AcceptanceStats:
    """What the real loop does with one row's prompt, having checked that it writes the row."""
    depth = head.config.block_size - 1 if draft_depth is None else draft_depth
    prompt, new_tokens = row["loss_mask"].index(1), sum(row["loss_mask"])
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=new_tokens if max_new_tokens is None else max_new_tokens,
        tree_budget=depth if budget == "chain" else budget,
        tree_width=1 if budget == "chain" else tree_width,
        draft_depth=depth,
        return_dict_in_generate=True,
    )
    ids = torch.tensor([row["input_ids"][:prompt]])
    output: Any = target.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=head, generation_config=config
    )
    assert output.sequences[0].tolist() == row["input_ids"]
    acceptance: AcceptanceStats = output.acceptance
    return acceptance


def counts(stats: AcceptanceStats) -> dict[str, Any]:
    """Everything but times and trees."""
    names = ("accepted_lengths", "steps", "tree_sizes", "reached_by_depth", "accepted_by_depth")
    return {name: getattr(stats, name) for name in names}


def assert_as_decoded(
    target: PreTrainedModel, head: JetSpecDraftHead, rows: Sequence[Row], budgets: Sequence[Budget], **knobs: Any
) -> dict[Budget, AcceptanceStats]:
    reader = TargetReader(target, head.config.target_layer_ids)
    simulated = simulate_budgets(head, reader, rows, budgets, progress=False, **knobs)
    for budget in budgets:
        real = pool_acceptance([decode(target, head, row, budget, **knobs) for row in rows])
        assert counts(simulated[budget]) == counts(real), budget
    return simulated


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


@pytest.mark.exactness
@pytest.mark.parametrize(
    ("name", "windowed", "fields"),
    [
        ("llama", False, {}),
        ("qwen3", True, SLIDING),
        ("gemma2", True, {"causal": False}),
        ("gemma3_text", True, {**SLIDING, "causal": {"sliding_attention": True, "full_attention": False}}),
        ("gpt2", False, {"branch_rank": 8}),
        ("mistral", True, {**SLIDING, "branch_rank": 8, "draft_token_ids": list(range(1, 128, 2))}),
        ("qwen2", False, {"draft_token_ids": list(range(40, 128)), "logit_scale": 0.5}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_simulation_accepts_step_by_step_what_the_real_loop_accepts(
    name: str, windowed: bool, fields: dict[str, Any]
) -> None:
    architecture = ARCHITECTURES[name]
    target = tiny_target(name, architecture.backends[0], **((architecture.window or {}) if windowed else {}))
    rows = written_rows(target)
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=2, block_size=6, target_layer_ids=[0, 1], **fields)
    fit(head, TargetReader(target, [0, 1]), rows)
    simulated = assert_as_decoded(target, head, rows, ["chain", 5, 48])
    assert simulated[48].mean_acceptance_length > 1.2


class PositionOracle(OracleHead):
    """An oracle whose draws at an anchor depend on its position alone, whatever else is drafted and when."""

    def draft_logits(self, anchor_ids: torch.Tensor, state: Any) -> torch.Tensor:
        drafts = []
        for anchor_id, position in zip(anchor_ids, state.anchor_positions, strict=True):
            self.draws.manual_seed(1000 + int(position))
            one: Any = type("State", (), {"anchor_positions": position[None]})
            drafts.append(super().draft_logits(anchor_id[None], one))
        return torch.cat(drafts)


@pytest.mark.exactness
@pytest.mark.parametrize(
    "knobs", [{}, {"tree_width": 2}, {"draft_depth": 3}, {"tree_width": 1, "draft_depth": 1}], ids=str
)
def test_an_oracle_that_is_often_right_is_accepted_as_in_the_real_loop(
    target: PreTrainedModel, knobs: dict[str, int]
) -> None:
    (row,) = written_rows(target, (7,), 30)
    head = PositionOracle.from_target(target, block_size=6)
    head.know([row["input_ids"]], accuracy=0.85, runner_up_rate=0.3)
    simulated = assert_as_decoded(target, head, [row], BUDGETS, **knobs)
    assert simulated[16].mean_acceptance_length > 1.4


class ChainOfTruth(JetSpecDraftHead):
    """Drafts a text it knows, sure of it."""

    text: Sequence[int] = ()

    def draft_logits(self, anchor_ids: torch.Tensor, state: Any) -> torch.Tensor:
        logits = torch.zeros(len(anchor_ids), state.draft_depth, self.config.vocab_size)
        for row, position in enumerate(state.anchor_positions.tolist()):
            for depth, token in enumerate(self.text[position + 1 : position + 1 + state.draft_depth]):
                logits[row, depth, token] = 50.0
        return logits


@pytest.mark.parametrize(("stopped", "last_size", "reached"), [(False, 0, 2), (True, 4, 3)])
def test_a_perfect_chain_commits_the_depth_and_a_bonus_until_the_end_of_the_answer(
    target: PreTrainedModel, stopped: bool, last_size: int, reached: int
) -> None:
    """By hand: of 12 tokens the prefill gives one; a depth of 4 commits 5, 5, and then the last token alone.

    Where `max_new_tokens` cut the answer no token can be drafted there; where the target ended it a tree was drafted.
    """
    head = ChainOfTruth.from_target(target, block_size=5)
    head.text = list(range(10, 25))
    row = {"input_ids": list(head.text), "loss_mask": [0] * 3 + [1] * 12}
    reader = TargetReader(target, head.config.target_layer_ids)
    stops = [head.text[-1]] if stopped else []
    stats = simulate_acceptance(head, reader, [row], "chain", stop_token_ids=stops, progress=False)
    assert stats.accepted_lengths == [[5, 5, 1]]
    assert stats.tree_sizes == [4, 4, last_size]
    assert stats.accepted_by_depth == [2] * 4
    assert stats.reached_by_depth == [reached] * 4


@pytest.mark.exactness
def test_an_answer_that_ends_in_the_targets_eos_is_accepted_as_in_a_generation_with_room_for_more(
    target: PreTrainedModel,
) -> None:
    (row,) = written_rows(target, (7,), 30)
    answer = row["input_ids"][7:]
    end = next(index for index in range(12, 30) if answer[index] not in answer[:index])
    row = {name: values[: 7 + end + 1] for name, values in row.items()}
    target.generation_config.eos_token_id = answer[end]
    head = PositionOracle.from_target(target, block_size=6)
    head.know([row["input_ids"]], accuracy=0.9, runner_up_rate=0.3, must_match=False)
    reader = TargetReader(target, head.config.target_layer_ids)
    simulated = simulate_budgets(head, reader, [row], BUDGETS, progress=False)
    for budget in BUDGETS:
        assert counts(simulated[budget]) == counts(decode(target, head, row, budget, max_new_tokens=60)), budget


def fitted(target: PreTrainedModel, rows: Sequence[Row], **fields: Any) -> tuple[JetSpecDraftHead, TargetReader]:
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=5, **fields)
    reader = TargetReader(target, head.config.target_layer_ids)
    fit(head, reader, rows, steps=25)
    return head, reader


@pytest.mark.parametrize("positions", [1, 12, 33])
def test_how_many_blocks_and_rows_go_through_the_head_at_once_changes_nothing(
    target: PreTrainedModel, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = written_rows(target)
    head, reader = fitted(target, rows, branch_rank=4)
    expected = simulate_budgets(head, reader, rows, BUDGETS, progress=False)
    monkeypatch.setattr(simulation, "_POSITIONS_AT_ONCE", positions)
    found = simulate_budgets(head, reader, rows, BUDGETS, batch_size=2, progress=False)
    assert {budget: counts(found[budget]) for budget in BUDGETS} == {
        budget: counts(expected[budget]) for budget in BUDGETS
    }


def test_a_single_budget_gives_what_it_gives_among_others(target: PreTrainedModel) -> None:
    rows = written_rows(target)
    head, reader = fitted(target, rows)
    together = simulate_budgets(head, reader, rows, BUDGETS, progress=False)
    for budget in BUDGETS:
        alone = simulate_acceptance(head, reader, rows, budget, progress=False)
        assert counts(alone) == counts(together[budget])


def test_every_answer_of_a_conversation_is_decoded_after_all_that_came_before(target: PreTrainedModel) -> None:
    (row,) = written_rows(target, (7,), 30)
    head, reader = fitted(target, [row])
    ids = row["input_ids"]
    turns = {"input_ids": ids, "loss_mask": [0] * 7 + [1] * 12 + [0] * 3 + [1] * 15}
    alone = [
        {"input_ids": ids[:19], "loss_mask": [0] * 7 + [1] * 12},
        {"input_ids": ids, "loss_mask": [0] * 22 + [1] * 15},
    ]
    together = simulate_acceptance(head, reader, [turns], 16, progress=False)
    apart = simulate_acceptance(head, reader, alone, 16, progress=False)
    assert len(together.accepted_lengths) == 2
    assert counts(together) == counts(apart)


def test_the_documents_of_a_pack_are_decoded_as_if_each_stood_alone(target: PreTrainedModel) -> None:
    rows = written_rows(target)
    head, reader = fitted(target, rows, **{"layer_types": ["sliding_attention"], "sliding_window": 4})
    pack = {name: [value for row in rows for value in row[name]] for name in ("input_ids", "loss_mask")}
    pack["document_ids"] = [index for index, row in enumerate(rows) for _ in row["input_ids"]]
    packed = simulate_budgets(head, reader, [pack], BUDGETS, progress=False)
    apart = simulate_budgets(head, reader, rows, BUDGETS, progress=False)
    for budget in BUDGETS:
        assert counts(packed[budget]) == counts(apart[budget])


def test_an_answer_of_one_token_takes_no_step(target: PreTrainedModel) -> None:
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=5)
    reader = TargetReader(target, head.config.target_layer_ids)
    row = {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}
    stats = simulate_acceptance(head, reader, [row], 16, progress=False)
    assert (stats.accepted_lengths, stats.steps, stats.mean_acceptance_length) == ([[]], 0, 0.0)


def test_pooled_statistics_are_those_of_one_generation_after_the_other() -> None:
    one = AcceptanceStats([[3, 1]], 2, [4, 4], [2, 2], [1, 1], 0.5, [{"draft": 1.0}, {}])
    two = AcceptanceStats([[2], []], 1, [2], [1], [1], 0.25, [{"draft": 2.0}])
    pooled = pool_acceptance([one, two])
    assert pooled == AcceptanceStats(
        [[3, 1], [2], []], 3, [4, 4, 2], [3, 2], [2, 1], 0.75, [{"draft": 1.0}, {}, {"draft": 2.0}]
    )
    assert pooled.mean_acceptance_length == 2.0
    one.decisions, two.decisions = [BudgetDecision(4, "fixed")] * 2, [BudgetDecision(2, "best rate")]
    assert pool_acceptance([one, two]).reasons == {"fixed": 2, "best rate": 1}
    assert pool_acceptance([]).steps == 0


def test_every_module_gets_its_own_mode_back_also_after_an_error() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()), nn.Dropout())
    model[1].eval()
    before = [module.training for module in model.modules()]
    modes = []

    def lose() -> None:
        with evaluating(model):
            modes.extend(module.training for module in model.modules())
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        lose()
    assert not any(modes)
    assert [module.training for module in model.modules()] == before == [True, True, False, False, True]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"tree_budgets": [-1]}, "`tree_budget` must be .* got -1"),
        ({"tree_budgets": ["auto"]}, "`tree_budget` must be .* got 'auto'"),
        ({"tree_budgets": []}, "`tree_budgets` must have a budget"),
        ({"tree_width": 0}, "`tree_width` must be at least 1, got 0"),
        ({"draft_depth": 5}, "`draft_depth` must be from 1 to .* 4, got 5"),
        ({"draft_depth": 0}, "`draft_depth` must be from 1 to .* 4, got 0"),
        ({"rows": [{"input_ids": [5, 6], "loss_mask": [0, 0]}]}, "`rows` must have an answer.* got none in 1 rows"),
    ],
    ids=str,
)
def test_what_cannot_be_simulated_is_named(target: PreTrainedModel, knobs: dict[str, Any], message: str) -> None:
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=5)
    reader = TargetReader(target, head.config.target_layer_ids)
    arguments = {"rows": [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}], "tree_budgets": [16], **knobs}
    with pytest.raises(ValueError, match=message):
        simulate_budgets(head, reader, progress=False, **arguments)
