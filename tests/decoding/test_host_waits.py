"""How often a step makes the host wait for the device: every wait drains the queue of an accelerator.

Counted on the CPU, where reading a tensor does not wait but is the same call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.decoding import accept
from jetspec_hf.tree import build

READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
SIZED_BY_VALUES = ("nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero")


class Waits(TorchDispatchMode):
    """Counts what would wait: reads of a tensor's values, and operations whose result's size depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in SIZED_BY_VALUES
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    waits = Waits()

    def counting(original: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            waits.count += 1
            return original(*args, **kwargs)

        return read

    with monkeypatch.context() as patch, waits:
        for name in READS:
            patch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name)))
        yield waits


def waits_per_step(target: PreTrainedModel, head: JetSpecDraftHead, monkeypatch: pytest.MonkeyPatch) -> float:
    """From two generations, so that what is read once per generation falls out."""
    monkeypatch.setattr(accept, "has_queue", lambda device: True)
    monkeypatch.setattr(build, "_host_may_look", lambda tensor: False)
    prompt, counts, steps = torch.tensor([[5, 6, 7, 8]]), [], []
    for new_tokens in (8, 8, 40):  # the first of all pays for the self-test
        with counted(monkeypatch) as waits:
            target.generate(prompt, assistant_model=head, max_new_tokens=new_tokens, min_new_tokens=None)
        counts.append(waits.count)
        steps.append(head.last_acceptance.steps)
    return (counts[2] - counts[1]) / (steps[2] - steps[1])


@pytest.fixture
def untrained(target: PreTrainedModel) -> JetSpecDraftHead:
    target.generation_config.eos_token_id = None
    return JetSpecDraftHead.from_target(target, block_size=6)


def test_the_count_sees_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch) as waits:
        ones = torch.ones(3)
        assert ones.sum() > 2
        ones.nonzero()
        ones.tolist()
    assert waits.count == 3


def test_a_greedy_step_of_fixed_size_waits_once(
    target: PreTrainedModel, untrained: JetSpecDraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    untrained.generation_config.tree_budget = 12
    assert waits_per_step(target, untrained, monkeypatch) == 1.0


@pytest.mark.auto_budget
def test_a_draft_whose_size_is_chosen_waits_once_more(
    target: PreTrainedModel, untrained: JetSpecDraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    untrained.generation_config.step_costs = {"draft": 0.0, "verify": {"0": 1.0, "1": 1.0}}  # nodes are free
    assert waits_per_step(target, untrained, monkeypatch) == 2.0
