"""Interleaved runs on tiny targets: what is counted, in which order, and where texts are found to part."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from jetspec_hf.bench.phases import Measurement
from jetspec_hf.bench.runner import DECODINGS, Benchmark, Case, Method, Run, ending, first_difference, methods
from jetspec_hf.bench.tasks import Prompt
from jetspec_hf.decoding.drafter import DraftingKnobs
from support.oracle import OracleHead
from support.recording import Fingerprint, RecordingStreamer
from support.references import greedy_reference, random_prompts
from support.tiny_targets import tiny_target

NEW_TOKENS = 24
KNOBS = DraftingKnobs(tree_budget=16, tree_width=3, draft_depth=5, temperature=1.0)
PLAIN, LOOKUP, CHAIN, TREE = methods(KNOBS, [6], chain=True, prompt_lookup=True)


def case_of(input_ids: torch.Tensor, decoding: str = "greedy", name: str = "0") -> Case:
    return Case(Prompt(name, "task", "text"), input_ids, decoding, seed=3)


@pytest.fixture
def known(target: PreTrainedModel, head: OracleHead) -> tuple[Benchmark, Case]:
    """A benchmark whose head knows the greedy text of the case, mostly."""
    reference = greedy_reference(target, (9,), NEW_TOKENS)
    head.know(reference.texts, accuracy=0.7, must_match=False)
    return Benchmark(target, head, NEW_TOKENS), case_of(reference.input_ids)


def test_methods_are_plain_lookup_chain_and_each_budget() -> None:
    shape = {"tree_width": 3, "draft_depth": 5}
    assert methods(KNOBS, [4, 8], chain=True, prompt_lookup=True) == [
        Method("plain"),
        Method("prompt lookup", {"prompt_lookup_num_tokens": 10}),
        Method("chain", {"tree_width": 1, "draft_depth": 5, "tree_budget": 5}, uses_head=True),
        Method("tree 4", {**shape, "tree_budget": 4}, uses_head=True),
        Method("tree 8", {**shape, "tree_budget": 8}, uses_head=True),
    ]
    assert [method.name for method in methods(KNOBS, [4])] == ["plain", "tree 4"]


def test_plain_decoding_has_one_token_per_forward(known: tuple[Benchmark, Case]) -> None:
    benchmark, case = known
    run = benchmark.run(case, PLAIN)
    assert run.target_forwards == len(run.measurement.tokens) == NEW_TOKENS
    assert run.measurement.mean_acceptance_length == 1.0
    assert run.measurement.phase_seconds == {}


@pytest.mark.parametrize("method", [CHAIN, TREE], ids=lambda method: method.name)
def test_tau_is_that_of_the_acceptance_statistics(known: tuple[Benchmark, Case], method: Method) -> None:
    benchmark, case = known
    benchmark.run(case, method)  # the target's self-test, at the first meeting, has forwards of its own
    run = benchmark.run(case, method)
    stats = benchmark.head.last_acceptance
    assert stats is not None
    assert run.target_forwards == 1 + stats.steps
    assert 1.5 < run.measurement.mean_acceptance_length == pytest.approx(stats.mean_acceptance_length, rel=1e-12)
    assert len(run.measurement.step_seconds) == stats.steps
    assert stats.tree_sizes[0] == {"chain": 5, "tree 6": 6}[method.name]


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
    assert run.target_forwards == len(pieces) < NEW_TOKENS / 2
    assert sum(len(call[2][0]) for call in pieces) == len(run.measurement.tokens)


@pytest.mark.exactness
@pytest.mark.parametrize("decoding", DECODINGS)
def test_methods_with_the_head_write_what_plain_decoding_writes(known: tuple[Benchmark, Case], decoding: str) -> None:
    benchmark, case = known
    runs = benchmark.run_all([[dataclasses.replace(case, decoding=decoding)]], [PLAIN, CHAIN, TREE])
    assert runs[0].measurement.tokens == runs[1].measurement.tokens == runs[2].measurement.tokens
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
        assert run.measurement.tokens == tuple(expected[0, case.input_ids.shape[1] :].tolist())


def test_the_first_method_rotates_over_prompts_decodings_and_repeats(known: tuple[Benchmark, Case]) -> None:
    benchmark, case = known
    benchmark = dataclasses.replace(benchmark, max_new_tokens=2)
    cases = [[case_of(case.input_ids, decoding, name) for decoding in ("greedy", "sampled")] for name in "ab"]
    runs = benchmark.run_all(cases, [PLAIN, LOOKUP, TREE], repeats=2)
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
    text = benchmark.run(case, PLAIN).measurement.tokens
    eos = text[5]
    assert benchmark.target.generation_config is not None
    benchmark.target.generation_config.eos_token_id = eos
    for method in (PLAIN, TREE):
        assert benchmark.run(case, method).measurement.tokens == text[: text.index(eos) + 1]


def altered(run: Run, method: str, position: int, *tail: int) -> Run:
    """A run of another method that agrees up to a position."""
    tokens = (*run.measurement.tokens[:position], *tail)
    return Run(run.case, method, Measurement(tokens, 1.0, {}), len(tokens))


@pytest.mark.parametrize("decoding", ["greedy", "penalised"])
def test_the_margin_is_the_gap_between_the_two_tokens_under_plain_decoding(
    known: tuple[Benchmark, Case], decoding: str
) -> None:
    benchmark, case = known
    plain = benchmark.run(dataclasses.replace(case, decoding=decoding), PLAIN)
    tokens = plain.measurement.tokens
    other = (tokens[7] + 1) % 128
    found = benchmark.differences([plain, altered(plain, "tree", 7, other, 5, 5), altered(plain, "same", NEW_TOKENS)])

    prefix = torch.cat([case.input_ids, torch.tensor([tokens[:7]])], dim=1)
    with torch.no_grad():
        logits = benchmark.target(prefix).logits[:, -1]
    if decoding == "penalised":
        logits = RepetitionPenaltyLogitsProcessor(1.2)(prefix, logits)
    assert set(found) == {("task", "0", decoding, "tree")}
    difference = found["task", "0", decoding, "tree"]
    assert difference.position == 7
    # float32 logits of a whole prefix against those of one token at a time
    assert difference.margin == pytest.approx(float(logits[0, tokens[7]] - logits[0, other]), abs=1e-3)
    assert difference.margin > 0


def test_the_earliest_difference_of_repeats_counts(known: tuple[Benchmark, Case]) -> None:
    benchmark, case = known
    plain = benchmark.run(case, PLAIN)
    tokens = plain.measurement.tokens
    late, early = (altered(plain, "tree", at, (tokens[at] + 1) % 128) for at in (9, 4))
    [difference] = benchmark.differences([plain, late, early, late]).values()
    assert difference.position == 4


@pytest.mark.parametrize("tail", [(), (1, 2, 3)])
def test_a_text_that_ends_elsewhere_has_no_margin(known: tuple[Benchmark, Case], tail: tuple[int, ...]) -> None:
    benchmark, case = known
    plain = benchmark.run(case, PLAIN)
    position = NEW_TOKENS if tail else 6
    [difference] = benchmark.differences([plain, altered(plain, "tree", position, *tail)]).values()
    assert (difference.position, difference.margin) == (position, None)


def test_a_drawn_text_has_no_margin(known: tuple[Benchmark, Case]) -> None:
    benchmark, case = known
    plain = benchmark.run(dataclasses.replace(case, decoding="sampled"), PLAIN)
    other = (plain.measurement.tokens[2] + 1) % 128
    [difference] = benchmark.differences([plain, altered(plain, "tree", 2, other)]).values()
    assert (difference.position, difference.margin) == (2, None)


def test_the_target_is_left_as_it_was(known: tuple[Benchmark, Case]) -> None:
    benchmark, case = known
    before = Fingerprint.of(benchmark.target)
    for method in (PLAIN, LOOKUP, TREE):
        benchmark.run(case, method)
    with pytest.raises(ValueError, match="`tree_budget`"):
        benchmark.run(case, Method("bad", {"tree_budget": -1}, uses_head=True))
    before.assert_unchanged(benchmark.target)


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
