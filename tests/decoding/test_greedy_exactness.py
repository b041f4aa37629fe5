"""Greedy tree decoding returns plain `generate`'s tokens: every architecture, tree shape, batch and draft quality."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from jetspec_hf import JetSpecDraftHead
from support.oracle import OracleHead
from support.references import PROMPT_LENGTHS, Reference, greedy_reference, left_padded, plain_greedy, random_prompts
from support.tiny_targets import ARCHITECTURES, tiny_target

pytestmark = pytest.mark.exactness

DEPTH = 5
NEW_TOKENS = 3 * (DEPTH + 1) + 1  # the prompt's own token, then three fully accepted paths and their bonus tokens
SHAPES: dict[str, dict[str, int]] = {
    "chain": {"tree_width": 1, "tree_budget": DEPTH, "draft_depth": DEPTH},
    "binary": {"tree_width": 2, "tree_budget": 14, "draft_depth": DEPTH},
    "wide": {"tree_width": 8, "tree_budget": 24, "draft_depth": DEPTH},
    "single node": {"tree_width": 1, "tree_budget": 1, "draft_depth": 1},
    "root only": {"tree_width": 2, "tree_budget": 0, "draft_depth": DEPTH},
    "budget beyond the tree": {"tree_width": 2, "tree_budget": 64, "draft_depth": 3},
}
GRID = list(itertools.product(SHAPES, (0.0, 0.5, 0.9, 1.0), PROMPT_LENGTHS))
# Each variant meets every STRIDE-th cell from its own start; STRIDE has no factor in common with the grid's axes.
STRIDE = 11
VARIANTS = [
    (name, backend, windowed)
    for name, architecture in ARCHITECTURES.items()
    for backend in architecture.backends
    for windowed in ([False] if architecture.window is None else [False, True])
]


class Case:
    """A target with an oracle head and the plain texts of its batches."""

    def __init__(self, target: PreTrainedModel, number: int = 0) -> None:
        self.target = target
        self.number = number
        self.head = OracleHead.from_target(target, block_size=DEPTH + 1)
        self.reference = functools.cache(self._reference)

    def _reference(self, *lengths: int) -> Reference:
        return greedy_reference(self.target, lengths, NEW_TOKENS + DEPTH + 3)

    def decode(self, reference: Reference, shape: str, new_tokens: int = NEW_TOKENS, **oracle: Any) -> torch.Tensor:
        self.head.know(reference.texts, **oracle).draft_with(**SHAPES[shape])
        return self.target.generate(
            **reference.inputs, assistant_model=self.head, max_new_tokens=new_tokens, do_sample=False
        )


@pytest.fixture(scope="module", params=VARIANTS, ids=["-".join([n, b] + ["window"] * w) for n, b, w in VARIANTS])
def case(request: pytest.FixtureRequest) -> Case:
    """One variant; pytest runs all tests of a variant before the next, so that its references are made once."""
    name, backend, windowed = request.param
    window = ARCHITECTURES[name].window if windowed else None
    return Case(tiny_target(name, backend, **(window or {})), VARIANTS.index(request.param))


def check_cells(case: Case, cells: list[tuple[str, float, int]]) -> None:
    for shape, accuracy, batch in cells:
        reference = case.reference(*PROMPT_LENGTHS[batch])
        decoded = case.decode(reference, shape, accuracy=accuracy, runner_up_rate=0.3, seed=batch)
        assert torch.equal(decoded, reference.first(NEW_TOKENS)), (shape, accuracy, batch)


def test_tokens_equal_plain_generate(case: Case) -> None:
    check_cells(case, GRID[case.number % STRIDE :: STRIDE])


@pytest.mark.fixed_budget
def test_right_drafts_are_accepted_in_full(case: Case) -> None:
    for shape, batch in (("binary", 1), ("chain", 3)):
        reference = case.reference(*PROMPT_LENGTHS[batch])
        decoded = case.decode(reference, shape)
        assert torch.equal(decoded, reference.first(NEW_TOKENS))
        acceptance = case.head.last_acceptance
        assert acceptance.accepted_lengths == [[DEPTH + 1] * 3] * batch
        assert acceptance.steps == 3


def test_decoding_ends_at_every_length_within_and_past_the_first_tree(case: Case) -> None:
    reference = case.reference(*PROMPT_LENGTHS[1])
    for new_tokens in range(1, DEPTH + 4):
        decoded = case.decode(reference, "binary", new_tokens)
        assert torch.equal(decoded, reference.first(new_tokens)), new_tokens


def test_a_prompt_of_one_token_is_enough(case: Case) -> None:
    reference = case.reference(1)
    for shape, accuracy in (("wide", 1.0), ("binary", 0.7)):
        decoded = case.decode(reference, shape, accuracy=accuracy, runner_up_rate=0.3)
        assert torch.equal(decoded, reference.first(NEW_TOKENS)), shape


@pytest.mark.slow
def test_tokens_equal_plain_generate_on_the_whole_grid(case: Case) -> None:
    check_cells(case, GRID)


@pytest.mark.slow
def test_batches_end_at_every_length(case: Case) -> None:
    for batch, new_tokens in itertools.product((3, 8), range(1, DEPTH + 4)):
        reference = case.reference(*PROMPT_LENGTHS[batch])
        decoded = case.decode(reference, "wide", new_tokens, accuracy=0.8, runner_up_rate=0.3)
        assert torch.equal(decoded, reference.first(new_tokens)), (batch, new_tokens)


def test_rows_that_meet_eos_early_are_padded(case: Case) -> None:
    reference = case.reference(*PROMPT_LENGTHS[3])
    eos = int(reference.new_tokens[0, 7])
    plain = case.target.generate(
        **reference.inputs, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=eos, pad_token_id=0
    )
    case.head.know(reference.texts_until(eos), accuracy=0.8, runner_up_rate=0.3).draft_with(**SHAPES["wide"])
    decoded = case.target.generate(
        **reference.inputs,
        assistant_model=case.head,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    assert torch.equal(decoded, plain)


def test_a_long_prompt_far_past_the_window_is_exact() -> None:
    case = Case(tiny_target("gemma3_text", sliding_window=4))
    reference = case.reference(150, 40)
    decoded = case.decode(reference, "wide", accuracy=0.8, runner_up_rate=0.3)
    assert torch.equal(decoded, reference.first(NEW_TOKENS))


def test_a_long_continuation_crosses_the_window_while_decoding() -> None:
    case = Case(tiny_target("mistral", sliding_window=24))
    reference = greedy_reference(case.target, (6, 3, 10), 80)
    decoded = case.decode(reference, "binary", new_tokens=70, accuracy=0.8, runner_up_rate=0.3)
    assert torch.equal(decoded, reference.first(70))


@pytest.mark.parametrize("window", [2, 3, 5, 6, 7])
def test_windows_around_the_depth_of_the_tree_are_exact(window: int) -> None:
    case = Case(tiny_target("mistral", sliding_window=window))
    for batch in (1, 3):
        reference = case.reference(*PROMPT_LENGTHS[batch])
        decoded = case.decode(reference, "wide", accuracy=0.9, runner_up_rate=0.3)
        assert torch.equal(decoded, reference.first(NEW_TOKENS)), batch


@pytest.mark.parametrize("chunk", [2, 3, 5, 8])
def test_chunk_borders_inside_the_tree_are_exact(chunk: int) -> None:
    case = Case(tiny_target("llama4_text", attention_chunk_size=chunk))
    for batch in (1, 3):
        reference = case.reference(*PROMPT_LENGTHS[batch])
        decoded = case.decode(reference, "wide", accuracy=0.9, runner_up_rate=0.3)
        assert torch.equal(decoded, reference.first(NEW_TOKENS)), batch


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_no_node_lies_beyond_the_table_of_positions(name: str) -> None:
    case = Case(tiny_target(name, **{"max_position_embeddings" if name == "opt" else "n_positions": 32}))
    for lengths in ((20,), (20, 3, 11)):
        reference = greedy_reference(case.target, lengths, 12)
        for accuracy in (0.6, 1.0):
            decoded = case.decode(reference, "wide", new_tokens=12, accuracy=accuracy, runner_up_rate=0.3)
            assert torch.equal(decoded, reference.sequences), (lengths, accuracy)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3_text", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("windowed", [False, True])
def test_prompt_tokens_that_are_masked_out_anywhere_stay_out(name: str, windowed: bool) -> None:
    architecture = ARCHITECTURES[name]
    case = Case(tiny_target(name, architecture.backends[0], **((architecture.window or {}) if windowed else {})))
    for lengths in ((12,), (12, 7, 9)):
        ids, mask = left_padded(random_prompts(lengths, 8))
        mask[:, 5] = mask[:, 8] = 0
        mask[-1, 9] = 0
        reference = plain_greedy(case.target, ids, mask, NEW_TOKENS)
        case.head.know(reference.texts, accuracy=0.8, runner_up_rate=0.3).draft_with(**SHAPES["wide"])
        decoded = case.target.generate(
            **reference.inputs, assistant_model=case.head, max_new_tokens=NEW_TOKENS, do_sample=False
        )
        assert torch.equal(decoded, reference.sequences), lengths


def test_an_untrained_head_changes_no_token(target: PreTrainedModel) -> None:
    head = JetSpecDraftHead.from_target(target, block_size=DEPTH + 1)
    head.generation_config.tree_budget = 24
    for batch, lengths in PROMPT_LENGTHS.items():
        reference = greedy_reference(target, lengths, NEW_TOKENS)
        decoded = target.generate(**reference.inputs, assistant_model=head, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert torch.equal(decoded, reference.sequences), batch


def test_the_default_knobs_are_exact(target: PreTrainedModel, head: OracleHead) -> None:
    for batch, lengths in PROMPT_LENGTHS.items():
        reference = greedy_reference(target, lengths, 40)
        head.know(reference.texts, accuracy=0.8, runner_up_rate=0.3)
        decoded = target.generate(**reference.inputs, assistant_model=head, max_new_tokens=40, do_sample=False)
        assert torch.equal(decoded, reference.sequences), batch


def test_tied_embeddings_are_exact() -> None:
    case = Case(tiny_target("qwen3", tie_word_embeddings=True))
    reference = case.reference(*PROMPT_LENGTHS[3])
    decoded = case.decode(reference, "wide", accuracy=0.8, runner_up_rate=0.3)
    assert torch.equal(decoded, reference.first(NEW_TOKENS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_differs_from_plain_decoding_only_at_a_tie(dtype: torch.dtype) -> None:
    """Every token is the target's choice in the verify pass: at the first difference both are best within rounding."""
    target = tiny_target("llama").to(dtype)
    head = OracleHead.from_target(target, block_size=DEPTH + 1)
    for seed in range(5):
        reference = greedy_reference(target, (12,), 40, seed)
        head.know(reference.texts, accuracy=0.8, must_match=False)
        decoded = target.generate(**reference.inputs, assistant_model=head, max_new_tokens=40, do_sample=False)
        different = (decoded != reference.sequences)[0].nonzero()
        if len(different):
            at = int(different[0])
            logits = target(reference.sequences[:, :at]).logits[0, -1].float()
            chosen, plain = logits[decoded[0, at]], logits[reference.sequences[0, at]]
            assert (chosen - plain).abs() <= 8 * torch.finfo(dtype).eps * logits.abs().max()
