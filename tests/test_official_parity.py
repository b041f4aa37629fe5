"""The head computes what the official JetSpec code computes (golden outputs in tests/fixtures)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DFlashCache

from jetspec_hf import JetSpecHead, build_tree
from jetspec_hf.decoding.drafter import CommittedTokens, DraftContext, DraftingState
from support.versions import CACHE

FIXTURES = Path(__file__).parent / "fixtures"
TOLERANCE = 1e-5  # float32 sums of another order; the logits' standard deviation is about 1

pytestmark = pytest.mark.contract


class Golden:
    """One fixture: the target, the head, and the official code's outputs."""

    def __init__(self, name: str) -> None:
        self.target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(FIXTURES / name / "target").eval()
        self.target.generation_config.eos_token_id = None
        self.head = JetSpecHead.from_pretrained(FIXTURES / name / "head")
        self.expected = load_file(FIXTURES / name / "expected.safetensors")

    def calls(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Per official draft call: context ids, the features that call added, and the draft logits."""
        first, second = (self.expected[f"call{call}_target_hidden"] for call in (1, 2))
        features = (first, second[:, first.shape[1] :])
        return [
            (self.expected[f"call{call}_context_ids"], feature, self.expected[f"call{call}_draft_logits"])
            for call, feature in zip((1, 2), features, strict=True)
        ]


@pytest.fixture(params=["official_causal", "official_causal_taps", "official_bidirectional"])
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


@torch.no_grad()
def test_both_incremental_draft_calls_give_the_official_logits(golden: Golden) -> None:
    context = DraftContext(golden.head, batch_size=1, start=0)
    state = DraftingState(golden.target, golden.head, context, golden.head.config.block_size - 1)
    for ids, features, expected in golden.calls():
        anchor = ids.shape[1] - 1
        positions = torch.arange(anchor - features.shape[1], anchor)[None]
        context.append(CommittedTokens(features, positions, None, anchor))
        state.anchor_positions = torch.tensor([anchor])
        assert (golden.head.draft_logits(ids[:, -1], state) - expected).abs().max() < TOLERANCE


@torch.no_grad()
def test_the_stock_dflash_cache_gives_the_official_logits_too(golden: Golden) -> None:
    block = golden.head.config.block_size
    cache = DFlashCache(config=golden.head.config)
    cache.activate_past_recording()
    for ids, features, expected in golden.calls():
        anchor = ids.shape[1] - 1
        block_ids = torch.full((1, block), golden.head.config.mask_token_id)
        block_ids[:, 0] = ids[:, -1]
        inputs: dict[str, Any] = {CACHE: cache}
        states = golden.head(
            noise_embeds=golden.target.get_input_embeddings()(block_ids),
            context_hidden_states=features,
            position_ids=torch.arange(anchor - features.shape[1], anchor + block)[None],
            **inputs,
        ).last_hidden_state
        cache.crop(-block)
        assert (golden.target.lm_head(states[:, 1:]) - expected).abs().max() < TOLERANCE


def test_a_tree_covers_at_least_the_probability_of_the_official_tree_of_its_size(golden: Golden) -> None:
    official = golden.expected["tree_cum_logprob"].flatten()
    depth = golden.expected["tree_depth"].flatten()
    nodes = int((depth > 0).sum())
    logits = golden.expected["call1_draft_logits"]
    tree = build_tree(golden.expected["call1_context_ids"][:, -1], logits, tree_budget=nodes, tree_width=4)
    assert tree.num_nodes == nodes + 1
    assert tree.log_probs[0, 1:].exp().sum() >= official[depth > 0].exp().sum() - 1e-6


@pytest.mark.parametrize("tree_budget", [0, 1, 16, 60])
def test_generate_with_the_head_gives_the_official_greedy_tokens(golden: Golden, tree_budget: int) -> None:
    prompt, expected = golden.expected["prompt"], golden.expected["greedy_new_tokens"].flatten()
    golden.head.generation_config.tree_budget = tree_budget
    output = golden.target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=golden.head,
        max_new_tokens=len(expected),
        do_sample=False,
    )
    assert output[0, prompt.shape[1] :].tolist() == expected.tolist()
