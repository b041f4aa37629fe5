"""Architectures beyond the 46: indexed caches, several residual streams, more mixtures of layer kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from jetspec_hf import JetSpecDraftHead
from support.oracle import OracleHead
from support.references import PROMPT_LENGTHS, greedy_reference
from support.tiny_targets import tiny_config

pytestmark = pytest.mark.exactness

NEW_TOKENS = 16
# The indexer keeps more keys than there are: below that, its ties make plain decoding itself depend on the cache.
INDEXED = {"num_key_value_heads": 4, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 16}
FURTHER: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": INDEXED,
    "deepseek_v32": INDEXED,
    "axk2": INDEXED,
    "hy_v4": INDEXED,
    "granite_swa": {"sliding_window": 4},
    "mimo_v2_flash": {"sliding_window": 4},
    "vaultgemma": {"sliding_window": 4},
    "cwm": {"sliding_window": 4},
    "afmoe": {},
    "exaone_moe": {},
    "minimax_m2": {},
}


def make_target(name: str) -> PreTrainedModel:
    config = tiny_config(name, FURTHER[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() >= 2 and "norm" not in key:
                weight.copy_(torch.randn(weight.shape, generator=draws) * 1.5 / weight.shape[-1] ** 0.5)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", FURTHER)
def test_tokens_equal_plain_generate(name: str, batch: int) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"needs a transformers release with {name}")
    target = make_target(name)
    reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
    head = OracleHead.from_target(target, num_hidden_layers=1, block_size=5).draft_with(tree_budget=32)
    for accuracy in (0.5, 1.0):
        head.know(reference.texts, accuracy=accuracy, runner_up_rate=0.3)
        output = target.generate(**reference.inputs, assistant_model=head, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert torch.equal(output, reference.sequences), accuracy
    if head.generation_config.tree_budget == 32:
        assert head.last_acceptance.mean_acceptance_length > 3


@pytest.mark.parametrize("name", FURTHER)
def test_an_untrained_head_reads_the_targets_features(name: str) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"needs a transformers release with {name}")
    target = make_target(name)
    reference = greedy_reference(target, PROMPT_LENGTHS[3], NEW_TOKENS)
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=5)
    output = target.generate(**reference.inputs, assistant_model=head, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(output, reference.sequences)
