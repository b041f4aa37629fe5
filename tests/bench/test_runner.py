"""Interleaved runs on tiny targets: what is counted, in which order, and where texts are found to part."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from jetspec_hf.bench.measurement import Measurement
from jetspec_hf.bench.methods import DECODINGS, Method, methods
from jetspec_hf.bench.options import ending
from jetspec_hf.bench.oracle import OracleHead as LibraryOracle
from jetspec_hf.bench.runner import Benchmark, Case, Run, first_difference
from jetspec_hf.bench.tasks import Prompt
from jetspec_hf.decoding.drafter import DraftingKnobs
from support.oracle import OracleHead
from support.random_heads import random_head
from support.recording import Fingerprint, RecordingStreamer
from support.references import greedy_reference, random_prompts
from support.tiny_targets import tiny_target

NEW_TOKENS = 24
KNOBS = DraftingKnobs(tree_budget=16, tree_width=3, draft_depth=5, temperature=1.0)
PLAIN, LOOKUP, STOCK_CHAIN, CHAIN, TREE = methods(KNOBS, [6], chain=True, stock_chain=True, prompt_lookup=True)


def case_of(input_ids: torch.Tensor, decoding: str = "greedy", name: str = "0") -> Case:
    prompts = tuple(Prompt(name, "task", "text") for _ in input_ids)
    return Case(prompts, input_ids, torch.ones_like(input_ids), decoding, seed=3)


@pytest.fixture
def known(target: PreTrainedModel, head: OracleHead) -> tuple[Benchmark, Case]:
    """A benchmark whose head knows the greedy text of the case, mostly."""
    reference = greedy_reference(target, (9,), NEW_TOKENS)
    head.know(reference.texts, accuracy=0.7, must_match=False)
    return Benchmark(target, head, NEW_TOKENS), case_of(reference.input_ids)


def test_methods_are_plain_what_transformers_has_the_chain_and_each_budget() -> None:
    shape = {"tree_width": 3, "draft_depth": 5}
    small: Any = object()
    assert methods(
        KNOBS, [4, "auto"], chain=True, stock_chain=True, prompt_lookup=True, assistants={"small": small}
    ) == [
        Method("plain"),
        Method("prompt lookup", {"prompt_lookup_num_tokens": 10}, is_stock=True),
        Method("assistant small", assistant=small, is_stock=True),
        Method("stock chain", {"speculation_type": "dflash"}, uses_head=True, is_stock=True),
        Method("chain", {"tree_width": 1, "draft_depth": 5, "tree_budget": 5}, uses_head=True),
        Method("tree 4", {**shape, "tree_budget": 4}, uses_head=True),
        Method("tree auto", {**shape, "tree_budget": "auto"}, uses_head=True),
    ]
    assert [method.name for method in methods(KNOBS, [4])] == ["plain", "tree 4"]


def test_plain_decoding_has_one_token_per_forward(known: tuple[Benchmark, Case]) -> None:
    benchmark, case = known
    run = benchmark.run(case, PLAIN)
    assert run.measurement.forwards == run.measurement.tokens == NEW_TOKENS
    assert run.measurement.mean_acceptance_length == 1.0
    assert run.measurement.phase_seconds() == {}
    assert 0 < run.measurement.prefill_seconds < run.measurement.seconds


@pytest.mark.parametrize("method", [CHAIN, TREE], ids=lambda method: method.name)
def test_tau_is_that_of_the_acceptance_statistics(known: tuple[Benchmark, Case], method: Method) -> None:
    benchmark, case = known
    benchmark.run(case, method)  # the target's self-test, at the first meeting, has forwards of its own
    run = benchmark.run(case, method)
    stats = benchmark.head.last_acceptance
    assert stats is not None
    assert run.measurement.forwards == 1 + stats.steps
    assert 1.5 < run.measurement.mean_acceptance_length == pytest.approx(stats.mean_acceptance_length, rel=1e-12)
    assert len(run.measurement.step_seconds) == stats.steps
    assert run.measurement.tree_sizes[0] == {"chain": 5, "tree 6": 6}[method.name]
    phases = run.measurement.phase_seconds()
    assert sum(phases.values()) == pytest.approx(run.measurement.decoding_seconds)
    assert all(phases[phase] > 0 for phase in ("draft", "build", "verify", "accept", "commit", "rest"))


def test_forwards_of_prompt_lookup_are_the_pieces_that_it_streams() -> None:
    target = tiny_target("gemma", tie_word_embeddings=True)  # repeats itself, so that there is something to look up
    head = OracleHead.from_target(target, block_size=4)
    case = case_of(torch.tensor([random_prompts((8,), seed=1)[0]]))
    run = Benchmark(target, head, NEW_TOKENS).run(case, LOOKUP)
    streamer = RecordingStreamer()
    target.generate(
        case.input_ids,
        attention_mask=torch.ones_like(case.input_ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        prompt_lookup_num_tokens=10,
        streamer=streamer,
    )
    pieces = [call for call in streamer.generated if call[0] == "put"]
    assert run.measurement.forwards == len(pieces) < NEW_TOKENS / 2
    assert sum(len(call[2][0]) for call in pieces) == run.measurement.tokens


@pytest.mark.exactness
@pytest.mark.parametrize("decoding", DECODINGS)
def test_methods_with_the_head_write_what_plain_decoding_writes(known: tuple[Benchmark, Case], decoding: str) -> None:
    benchmark, case = known
    runs = list(benchmark.run_all([[dataclasses.replace(case, decoding=decoding)]], [PLAIN, CHAIN, TREE]))
    assert runs[0].measurement.texts == runs[1].measurement.texts == runs[2].measurement.texts
    assert benchmark.differences(runs) == {}


def test_decodings_are_those_of_generate(known: tuple[Benchmark, Case]) -> None:
    benchmark, case = known
    target: Any = benchmark.target
    options: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "penalised": {"do_sample": False, "repetition_penalty": 1.2},
        "sampled": {"do_sample": True, "temperature": 0.8, "top_k": None, "top_p": None},
    }
    for decoding, arguments in options.items():
        run = benchmark.run(dataclasses.replace(case, decoding=decoding), PLAIN)
        torch.manual_seed(case.seed)
        expected = target.generate(case.input_ids, max_new_tokens=NEW_TOKENS, pad_token_id=0, **arguments)
        assert run.measurement.texts == (tuple(expected[0, case.input_ids.shape[1] :].tolist()),)


def test_the_first_method_rotates_over_prompts_decodings_and_repeats(known: tuple[Benchmark, Case]) -> None:
    benchmark, case = known
    benchmark = dataclasses.replace(benchmark, max_new_tokens=2)
    cases = [[case_of(case.input_ids, decoding, name) for decoding in ("greedy", "sampled")] for name in "ab"]
    runs = list(benchmark.run_all(cases, [PLAIN, LOOKUP, TREE], repeats=2))
    order = ["plain", "prompt lookup", "tree 6"] * 2
    turns = [runs[start : start + 3] for start in range(0, len(runs), 3)]
    assert [[run.method for run in turn] for turn in turns] == [
        order[first : first + 3] for first in (0, 1, 1, 2, 1, 2, 2, 0)
    ]
    assert [turn[0].case.key for turn in turns] == [
        ("task", "a", "greedy"), ("task", "a", "sampled"), ("task", "b", "greedy"), ("task", "b", "sampled"),
    ] * 2  # fmt: skip


def test_an_answer_ends_at_eos(known: tuple[Benchmark, Case]) -> None:
    benchmark, case = known
    [text] = benchmark.run(case, PLAIN).measurement.texts
    eos = text[5]
    assert benchmark.target.generation_config is not None
    benchmark.target.generation_config.eos_token_id = eos
    for method in (PLAIN, TREE):
        assert benchmark.run(case, method).measurement.texts == (text[: text.index(eos) + 1],)


def altered(run: Run, method: str, position: int, *tail: int) -> Run:
    """A run of another method that agrees up to a position."""
    tokens = (*run.measurement.texts[0][:position], *tail)
    return Run(run.case, method, Measurement((tokens,), 1.0))


@pytest.mark.parametrize("decoding", ["greedy", "penalised"])
def test_the_margin_is_the_gap_between_the_two_tokens_under_plain_decoding(
    known: tuple[Benchmark, Case], decoding: str
) -> None:
    benchmark, case = known
    plain = benchmark.run(dataclasses.replace(case, decoding=decoding), PLAIN)
    [tokens] = plain.measurement.texts
    other = (tokens[7] + 1) % 128
    found = benchmark.differences([plain, altered(plain, "tree", 7, other, 5, 5), altered(plain, "same", NEW_TOKENS)])

    prefix = torch.cat([case.input_ids, torch.tensor([tokens[:7]])], dim=1)
    with torch.no_grad():
        logits = benchmark.target(prefix).logits[:, -1]
    if decoding == "penalised":
        logits = RepetitionPenaltyLogitsProcessor(1.2)(prefix, logits)
    assert set(found) == {("task", "0", decoding, "tree")}
    [difference] = found["task", "0", decoding, "tree"]
    assert difference is not None
    assert difference.position == 7
    # float32 logits of a whole prefix against those of one token at a time
    assert difference.margin == pytest.approx(float(logits[0, tokens[7]] - logits[0, other]), abs=1e-3)
    assert difference.margin is not None
    assert difference.margin > 0
    [positions_only] = benchmark.differences([plain, altered(plain, "tree", 7, other)], margins=False).values()
    assert [(found.position, found.margin) for found in positions_only if found] == [(7, None)]


def test_the_earliest_difference_of_repeats_counts(known: tuple[Benchmark, Case]) -> None:
    benchmark, case = known
    plain = benchmark.run(case, PLAIN)
    [tokens] = plain.measurement.texts
    late, early = (altered(plain, "tree", at, (tokens[at] + 1) % 128) for at in (9, 4))
    [[difference]] = benchmark.differences([plain, late, early, late]).values()
    assert difference is not None
    assert difference.position == 4


@pytest.mark.parametrize("tail", [(), (1, 2, 3)])
def test_a_text_that_ends_elsewhere_has_no_margin(known: tuple[Benchmark, Case], tail: tuple[int, ...]) -> None:
    benchmark, case = known
    plain = benchmark.run(case, PLAIN)
    position = NEW_TOKENS if tail else 6
    [[difference]] = benchmark.differences([plain, altered(plain, "tree", position, *tail)]).values()
    assert difference is not None
    assert (difference.position, difference.margin) == (position, None)


def test_a_drawn_text_has_no_margin(known: tuple[Benchmark, Case]) -> None:
    benchmark, case = known
    plain = benchmark.run(dataclasses.replace(case, decoding="sampled"), PLAIN)
    other = (plain.measurement.texts[0][2] + 1) % 128
    [[difference]] = benchmark.differences([plain, altered(plain, "tree", 2, other)]).values()
    assert difference is not None
    assert (difference.position, difference.margin) == (2, None)


def test_the_target_is_left_as_it_was(known: tuple[Benchmark, Case]) -> None:
    benchmark, case = known
    before = Fingerprint.of(benchmark.target)
    for method in (PLAIN, LOOKUP, TREE):
        benchmark.run(case, method)
    with pytest.raises(ValueError, match="`tree_budget`"):
        benchmark.run(case, Method("bad", {"tree_budget": -1}, uses_head=True))
    before.assert_unchanged(benchmark.target)


def padded_batch(target: PreTrainedModel) -> tuple[Any, Case]:
    """Two rows of different lengths, and what plain decoding makes of them."""
    reference = greedy_reference(target, (9, 4), NEW_TOKENS)
    prompts = (Prompt("a", "task", "text"), Prompt("b", "task", "text"))
    return reference, Case(prompts, reference.input_ids, reference.attention_mask, "greedy", seed=3)


@pytest.mark.exactness
def test_a_batch_is_measured_row_by_row(target: PreTrainedModel, head: OracleHead) -> None:
    reference, case = padded_batch(target)
    head.know(reference.texts, accuracy=0.7, must_match=False)
    benchmark = Benchmark(target, head, NEW_TOKENS)
    eos = reference.new_tokens[1, 5].item()
    assert target.generation_config is not None
    target.generation_config.eos_token_id = eos
    plain, tree = (benchmark.run(case, method).measurement for method in (PLAIN, TREE))
    expected = tuple(tuple(text[-NEW_TOKENS:]) for text in reference.texts)
    expected = tuple(text[: text.index(eos) + 1] if eos in text else text for text in expected)
    assert plain.texts == tree.texts == expected
    assert len(expected[1]) <= 6
    assert plain.tokens == sum(map(len, expected))
    assert plain.mean_acceptance_length == 1.0
    assert head.last_acceptance is not None
    lengths = [length for row in head.last_acceptance.accepted_lengths for length in row]
    assert tree.mean_acceptance_length == pytest.approx(sum(lengths) / len(lengths))
    assert case.key == ("task", "a b", "greedy")


def test_the_rows_of_a_batch_part_one_by_one(target: PreTrainedModel, head: OracleHead) -> None:
    _, case = padded_batch(target)
    benchmark = Benchmark(target, head, NEW_TOKENS)
    plain = benchmark.run(case, PLAIN)
    first, second = plain.measurement.texts
    changed = (first, (*second[:3], (second[3] + 1) % 128))
    [[same, departed]] = benchmark.differences([plain, Run(case, "tree", Measurement(changed, 1.0))]).values()
    assert same is None
    assert departed is not None
    assert departed.position == 3
    assert departed.margin is not None
    assert departed.margin > 0


def test_what_transformers_refuses_is_left_out_with_its_reason(target: PreTrainedModel, head: OracleHead) -> None:
    _, case = padded_batch(target)
    head.know([[0] * 9, [0] * 4], must_match=False)
    working, reasons = Benchmark(target, head, NEW_TOKENS).usable(case, [PLAIN, LOOKUP, STOCK_CHAIN, TREE])
    assert working == [PLAIN, TREE]
    assert set(reasons) == {"prompt lookup", "stock chain"}
    assert all("batch_size = 1" in reason for reason in reasons.values())
    with pytest.raises(ValueError, match="`tree_budget`"):
        Benchmark(target, head, NEW_TOKENS).usable(case, [Method("bad", {"tree_budget": -1}, uses_head=True)])


@pytest.mark.parametrize("fields", [{}, {"draft_token_ids": range(40, 100), "branch_rank": 4}], ids=["all", "reduced"])
def test_the_stock_chain_drafts_with_the_head_on_embeddings_of_its_own_scale(
    target: PreTrainedModel, fields: dict[str, Any]
) -> None:
    reference = greedy_reference(target, (9,), NEW_TOKENS)
    benchmark = Benchmark(target, random_head(target, block_size=6, embedding_scale=0.25, **fields), NEW_TOKENS)
    case = case_of(reference.input_ids)
    seen = []
    forward = benchmark.head.forward

    def recording(**kwargs: Any) -> Any:
        seen.append(kwargs["noise_embeds"])
        return forward(**kwargs)

    benchmark.head.forward = recording
    run = benchmark.run(case, STOCK_CHAIN)
    assert run.measurement.texts == (tuple(reference.new_tokens[0].tolist()),)
    assert run.measurement.step_seconds == ()
    mask = target.get_input_embeddings()(torch.tensor([benchmark.head.config.mask_token_id]))
    assert len(seen) > 3
    assert all(torch.equal(embeds[:, 1:], 0.25 * mask.expand(1, 5, -1)) for embeds in seen)
    assert not benchmark.head._forward_pre_hooks


def test_an_oracle_is_taught_the_text_and_right_as_often_as_asked(target: PreTrainedModel) -> None:
    case = case_of(greedy_reference(target, (9,), 8).input_ids)
    head = LibraryOracle.from_target(target, num_hidden_layers=1, block_size=6)
    benchmark = Benchmark(target, head, max_new_tokens=200, accuracy=0.8)
    [method] = methods(KNOBS, [5])[1:]
    plain, tree = (benchmark.run(case, each) for each in (PLAIN, method))
    assert tree.measurement.texts == plain.measurement.texts
    # the chain of favourites is accepted up to the first that is wrong: (1 - 0.8^6) / (1 - 0.8) = 3.69 of 6 at most;
    # over some 54 steps the standard error is 0.25
    assert tree.measurement.mean_acceptance_length == pytest.approx(3.69, abs=0.8)


def test_an_oracle_learns_the_text_that_a_method_really_writes(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in half precision, where a tree may write another text than plain decoding."""
    case = case_of(greedy_reference(target, (9,), 8).input_ids)
    head = LibraryOracle.from_target(target, num_hidden_layers=1, block_size=6)
    benchmark = Benchmark(target, head, NEW_TOKENS, accuracy=0.9)
    lesson = Benchmark.texts
    monkeypatch.setattr(  # what it believes plain decoding to have written is wrong from the fourth token on
        Benchmark, "texts", lambda *args: tuple((*text[:3], *[77] * (len(text) - 3)) for text in lesson(*args))
    )
    benchmark.learn(case, TREE)
    monkeypatch.undo()
    run = benchmark.run(case, TREE)
    assert run.measurement.mean_acceptance_length > 2
    assert run.measurement.texts == benchmark.run(case, PLAIN).measurement.texts


def test_an_automatic_budget_learns_nothing_while_an_oracle_is_taught(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(greedy_reference(target, (9,), 8).input_ids)
    head = LibraryOracle.from_target(target, num_hidden_layers=1, block_size=6)
    benchmark = Benchmark(target, head, NEW_TOKENS, accuracy=0.9)
    [auto] = methods(KNOBS, ["auto"])[1:]
    lesson = Benchmark.texts
    monkeypatch.setattr(Benchmark, "texts", lambda *args: tuple((*[77] * len(text),) for text in lesson(*args)))
    benchmark.learn(case, auto)
    monkeypatch.undo()
    run = benchmark.run(case, auto)
    [experience] = head.experience.values()
    assert experience.costs.steps == len(run.measurement.step_seconds)  # those of the last generation, prefill aside


def test_memory_is_measured_without_touching_the_text(known: tuple[Benchmark, Case]) -> None:
    benchmark, case = known
    peak = benchmark.peak_memory(case, PLAIN)
    assert peak is None or 0 <= peak < 2**30


@pytest.mark.parametrize(
    ("plain", "other", "position"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1,), 1), ((1,), (1, 2), 1), ((1, 2), (3, 2), 0)],
)
def test_texts_part_at_the_first_token_that_differs(
    plain: tuple[int, ...], other: tuple[int, ...], position: int | None
) -> None:
    assert first_difference(plain, other) == position


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, (None, 0)),
        (GenerationConfig(eos_token_id=[5, 6]), ([5, 6], 5)),
        (GenerationConfig(eos_token_id=5), (5, 5)),
        (GenerationConfig(eos_token_id=5, pad_token_id=0), (5, 0)),
    ],
)
def test_padding_is_taken_from_eos_only_where_it_is_missing(config: Any, expected: tuple[Any, int]) -> None:
    assert ending(config) == dict(zip(("eos_token_id", "pad_token_id"), expected, strict=True))
