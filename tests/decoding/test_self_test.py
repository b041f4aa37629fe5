"""The numeric self-test lets right targets through and stops targets that would be silently wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from jetspec_hf.decoding.self_test import check_tree_logits
from support.oracle import OracleHead
from support.tiny_targets import ARCHITECTURES, tiny_target

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_supported_architecture_passes(name: str) -> None:
    check_tree_logits(tiny_target(name, ARCHITECTURES[name].backends[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe"])
def test_half_precision_passes(name: str, dtype: torch.dtype) -> None:
    check_tree_logits(tiny_target(name).to(dtype))


def test_a_short_table_of_positions_is_enough() -> None:
    check_tree_logits(tiny_target("gpt2", n_positions=5))


def ignoring(argument: str, model: PreTrainedModel) -> PreTrainedModel:
    """The model with a forward that ignores what it is told, as code of another style might."""
    forward = model.forward

    def deaf(*args: Any, position_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        told = {"position_ids": position_ids, "attention_mask": attention_mask}
        del told[argument]
        return forward(*args, **told, **kwargs)

    model.forward = deaf
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("argument", ["position_ids", "attention_mask"])
def test_a_target_that_ignores_positions_or_masks_is_refused(argument: str, dtype: torch.dtype) -> None:
    target = ignoring(argument, tiny_target("llama").to(dtype))
    with pytest.raises(ValueError, match="cannot be verified with a tree"):
        check_tree_logits(target)


def test_a_target_with_dropout_is_told_to_go_to_evaluation_mode() -> None:
    target = tiny_target("llama", attention_dropout=0.5).train()
    with pytest.raises(ValueError, match=r"target.eval\(\)"):
        check_tree_logits(target)


def test_it_runs_once_per_kind_of_target(target: PreTrainedModel, head: OracleHead) -> None:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    prompt = torch.tensor([[5, 6, 7]])
    handle = target.register_forward_hook(count)
    counts = []
    for _ in range(2):
        calls = 0
        head.know([[5, 6, 7]], must_match=False)
        target.generate(
            prompt, attention_mask=torch.ones_like(prompt), assistant_model=head, max_new_tokens=1, do_sample=False
        )
        counts.append(calls)
    handle.remove()
    assert counts[1] == 1  # the prefill alone
    assert counts[0] > 1
    assert len(head.tested_targets) == 1


def test_it_leaves_the_random_state_alone(target: PreTrainedModel) -> None:
    state = torch.get_rng_state()
    check_tree_logits(target)
    assert torch.equal(torch.get_rng_state(), state)
