"""Heads with a branch term, and heads that draft a part of the vocabulary, decode what plain `generate` does."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from support.oracle import OracleHead
from support.random_heads import random_head
from support.references import PROMPT_LENGTHS, Reference, greedy_reference, left_padded, random_prompts
from support.tiny_targets import tiny_target
from support.versions import CACHE

pytestmark = pytest.mark.exactness

DEPTH, NEW_TOKENS = 5, 19
DRAFTED = [token for token in range(128) if token % 3]
HEADS: dict[str, dict[str, Any]] = {
    "draft vocabulary": {"draft_token_ids": DRAFTED},
    "branch term": {"branch_rank": 4},
    "branch term and draft vocabulary": {"branch_rank": 4, "draft_token_ids": DRAFTED},
    "bidirectional, branch term": {"branch_rank": 4, "causal": False},
    "a single drafted token": {"branch_rank": 2, "draft_token_ids": [60]},
}
every_head = pytest.mark.parametrize("fields", HEADS.values(), ids=list(HEADS))
SHAPES = (
    {"tree_width": 1, "tree_budget": DEPTH, "draft_depth": DEPTH},
    {"tree_width": 4, "tree_budget": 24, "draft_depth": DEPTH},
    {"tree_width": 3, "tree_budget": 200, "draft_depth": 3},
)
CHAIN, WIDE, _ = SHAPES
TARGETS = {"llama": tiny_target("llama"), "gemma3_text": tiny_target("gemma3_text", sliding_window=4)}
TARGET = TARGETS["llama"]


@functools.cache
def known(batch: int, name: str = "llama") -> Reference:
    """A batch whose plain text is known far enough for two turns."""
    return greedy_reference(TARGETS[name], PROMPT_LENGTHS[batch], 2 * NEW_TOKENS + DEPTH)


def oracle(target: PreTrainedModel, **fields: Any) -> OracleHead:
    head: OracleHead = random_head(target, OracleHead, block_size=DEPTH + 1, **fields)
    return head


def decode(target: PreTrainedModel, head: OracleHead, reference: Reference, **kwargs: Any) -> torch.Tensor:
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **kwargs}
    return target.generate(**reference.inputs, assistant_model=head, **settings)


@every_head
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_tokens_are_those_of_plain_decoding(name: str, fields: dict[str, Any], batch: int) -> None:
    head, reference = oracle(TARGETS[name], **fields), known(batch, name)
    for seed, shape in enumerate(SHAPES):
        head.know(reference.texts, accuracy=0.9, runner_up_rate=0.2, seed=seed).draft_with(**shape)
        assert torch.equal(decode(TARGETS[name], head, reference), reference.first(NEW_TOKENS)), shape


@every_head
def test_what_a_head_drafts_by_itself_changes_no_token(fields: dict[str, Any]) -> None:
    head = random_head(TARGET, block_size=DEPTH + 1, **fields)
    head.generation_config.tree_budget = 40
    for batch in (1, 3):
        assert torch.equal(decode(TARGET, head, known(batch)), known(batch).first(NEW_TOKENS))


@every_head
@pytest.mark.parametrize("options", [{"top_k": 0}, {"temperature": 0.7, "top_p": 0.9}])
def test_the_same_seed_samples_the_tokens_of_plain_decoding(fields: dict[str, Any], options: dict[str, Any]) -> None:
    head = oracle(TARGET, **fields).draft_with(**WIDE)
    for seed, accuracy in ((1, 1.0), (2, 0.8), (3, 0.5)):
        ids, mask = left_padded(random_prompts(PROMPT_LENGTHS[1], seed))
        torch.manual_seed(seed)
        plain = TARGET.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=NEW_TOKENS, **options)
        afterwards = torch.get_rng_state()
        reference = Reference(ids, mask, plain)
        head.know(reference.texts, accuracy=accuracy, runner_up_rate=0.3)
        torch.manual_seed(seed)
        assert torch.equal(decode(TARGET, head, reference, do_sample=True, **options), plain)
        assert torch.equal(torch.get_rng_state(), afterwards)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.fixed_budget
def test_a_right_chain_is_accepted_up_to_the_first_token_that_cannot_be_drafted(batch: int) -> None:
    reference = known(batch)
    head = oracle(TARGET, draft_token_ids=DRAFTED).know(reference.texts).draft_with(**CHAIN)
    assert torch.equal(decode(TARGET, head, reference), reference.first(NEW_TOKENS))
    for row, tokens in enumerate(reference.new_tokens[:, :NEW_TOKENS].tolist()):
        expected, position = [], 1  # the prompt's own forward gives the first token
        while position < NEW_TOKENS:
            drafted = list(itertools.takewhile(lambda token: token % 3, tokens[position : position + DEPTH]))
            expected.append(min(len(drafted) + 1, NEW_TOKENS - position))
            position += expected[-1]
        assert head.last_acceptance.accepted_lengths[row][: len(expected)] == expected


@pytest.mark.fixed_budget
def test_only_drafted_tokens_stand_in_a_tree() -> None:
    reference = known(3)
    head = oracle(TARGET, draft_token_ids=DRAFTED, branch_rank=4).know(reference.texts).draft_with(**WIDE)
    decode(TARGET, head, reference, max_new_tokens=4)
    nodes = head.last_acceptance.last_tree.token_ids[:, 1:]
    assert nodes.numel() > 0
    assert set(nodes.flatten().tolist()) <= set(DRAFTED)


@every_head
@pytest.mark.parametrize("drafted", [True, False])
def test_a_row_ends_at_its_eos_whether_that_can_be_drafted_or_not(fields: dict[str, Any], drafted: bool) -> None:
    reference = known(3)
    eos = next(token for token in reference.new_tokens[0, 4:].tolist() if (token % 3 != 0) is drafted)
    stop = {"eos_token_id": eos, "pad_token_id": 0}
    plain = TARGET.generate(**reference.inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **stop)
    head = oracle(TARGET, **fields).know(reference.texts_until(eos), accuracy=0.9).draft_with(**WIDE)
    assert torch.equal(decode(TARGET, head, reference, **stop), plain)


@every_head
def test_a_head_in_half_precision_drafts_for_a_target_in_single(fields: dict[str, Any]) -> None:
    reference = known(3)
    for head in (oracle(TARGET, **fields), random_head(TARGET, block_size=DEPTH + 1, **fields)):
        head.to(torch.bfloat16)
        if isinstance(head, OracleHead):
            head.know(reference.texts, accuracy=0.9)
        assert torch.equal(decode(TARGET, head, reference), reference.first(NEW_TOKENS))


@every_head
def test_a_conversation_goes_on_from_a_returned_cache(fields: dict[str, Any]) -> None:
    reference = known(1)
    head = oracle(TARGET, **fields).know(reference.texts, accuracy=0.9).draft_with(**WIDE)
    first = decode(TARGET, head, reference, return_dict_in_generate=True)
    second = TARGET.generate(
        first.sequences,
        **{CACHE: first[CACHE]},
        assistant_model=head,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    assert torch.equal(second, reference.first(2 * NEW_TOKENS))


@pytest.mark.fixed_budget
def test_a_branch_term_decides_which_children_a_node_has() -> None:
    """The oracle's logits rank the right token second or third; a branch term that knows the text puts it first."""
    reference = known(1)
    following = dict(itertools.pairwise(reference.texts[0]))

    def knows(depth: int, parents: torch.Tensor, states: Any, columns: torch.Tensor) -> tuple[torch.Tensor, None]:
        right = torch.tensor([[following.get(token, -1) for token in row] for row in parents.tolist()])
        return (columns[:, None, :] == right[:, :, None]) * 20.0, None

    lengths = []
    for branch in (None, knows):
        head = oracle(TARGET, branch_rank=1).know(reference.texts, runner_up_rate=1.0).draft_with(**CHAIN)
        head.branch_term = lambda state, branch=branch: branch  # type: ignore[method-assign, misc]
        assert torch.equal(decode(TARGET, head, reference), reference.first(NEW_TOKENS))
        lengths.append(head.last_acceptance.mean_acceptance_length)
    assert lengths[0] == 1.0
    assert lengths[1] > 2.5
