"""A batch samples from the target's own distribution: many equal rows against probabilities found by enumeration.

Rows of two prompts alternate, so that the batch is padded and rows advance raggedly; the vocabulary has 8 tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from support.oracle import OracleHead
from support.references import Reference, left_padded
from support.statistics import chi_square_p_value, continuation_probabilities, count_continuations
from support.tiny_targets import tiny_target

pytestmark = pytest.mark.exactness

VOCABULARY = 8
PROMPTS = ([3, 5, 4, 7], [6, 3])
ROWS_PER_PROMPT = 400
BATCHES = 6
LENGTH = 4
# A right implementation fails one such comparison in 10,000; the seeds are fixed.
SMALLEST_P_VALUE = 1e-4


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target("llama", vocab_size=VOCABULARY)


def known_continuations(target: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, drafts: str) -> torch.Tensor:
    """What the rows' drafts are made from, of shape `(batch, LENGTH)`."""
    if drafts == "random":
        return torch.randint(0, VOCABULARY, (len(ids), LENGTH))
    plain = target.generate(
        ids, attention_mask=mask, do_sample=drafts == "sampled", max_new_tokens=LENGTH, min_new_tokens=LENGTH
    )
    return plain[:, ids.shape[1] :]


def sample(target: PreTrainedModel, drafts: str, **kwargs: Any) -> list[torch.Tensor]:
    """New tokens of each prompt's rows, of shape `(BATCHES * ROWS_PER_PROMPT, LENGTH)`."""
    head = OracleHead.from_target(target, block_size=4).draft_with(tree_width=2, tree_budget=9, draft_depth=3)
    ids, mask = left_padded(PROMPTS * ROWS_PER_PROMPT)
    collected, lengths = [], []
    for batch in range(BATCHES):
        torch.manual_seed(100 + batch)
        known = known_continuations(target, ids, mask, drafts)
        texts = Reference(ids, mask, torch.cat([ids, known], dim=1)).texts
        head.know(texts, accuracy=0.9, runner_up_rate=0.2, must_match=False, seed=batch)
        decoded = target.generate(
            ids, attention_mask=mask, assistant_model=head, do_sample=True, max_new_tokens=LENGTH, **kwargs
        )
        collected.append(decoded[:, ids.shape[1] :])
        lengths.append(head.last_acceptance.mean_acceptance_length)
    assert sum(lengths) > BATCHES  # some drafts were accepted
    tokens = torch.cat(collected)
    return [tokens[row :: len(PROMPTS)] for row in range(len(PROMPTS))]


def assert_distribution(target: PreTrainedModel, tokens: list[torch.Tensor], **warpers: Any) -> None:
    """Compares every pair of neighbouring tokens with the enumerated probabilities."""
    for prompt, rows in zip(PROMPTS, tokens, strict=True):
        joint = continuation_probabilities(target, prompt, LENGTH, **warpers)
        for first in range(LENGTH - 1):
            others = [level for level in range(LENGTH) if level not in (first, first + 1)]
            counts = count_continuations(rows[:, first : first + 2], VOCABULARY)
            assert chi_square_p_value(counts, joint.sum(others)) > SMALLEST_P_VALUE, (prompt, first)


@pytest.mark.parametrize("drafts", ["likeliest", "sampled", "random"])
def test_tokens_follow_the_target_whatever_is_drafted(target: PreTrainedModel, drafts: str) -> None:
    assert_distribution(target, sample(target, drafts, top_k=0))


def test_tokens_follow_the_target_after_temperature_and_top_k(target: PreTrainedModel) -> None:
    tokens = sample(target, "sampled", temperature=0.7, top_k=5)
    assert_distribution(target, tokens, temperature=0.7, top_k=5)


def test_rows_are_independent(target: PreTrainedModel) -> None:
    tokens = sample(target, "likeliest", top_k=0)[0]
    single = continuation_probabilities(target, PROMPTS[0], LENGTH).sum((0, 1, 3))
    counts = count_continuations(torch.stack([tokens[0::2, 2], tokens[1::2, 2]], dim=1), VOCABULARY)
    assert chi_square_p_value(counts, single[:, None] * single[None]) > SMALLEST_P_VALUE


def test_a_slightly_different_distribution_would_be_noticed(target: PreTrainedModel) -> None:
    tokens = sample(target, "sampled", temperature=0.85, top_k=0)
    with pytest.raises(AssertionError):
        assert_distribution(target, tokens)
