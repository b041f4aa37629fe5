"""On a static cache the verify pass has a fixed shape, is compiled as plain decoding is, and never compiled again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import CompileConfig, PreTrainedModel

from support.oracle import OracleHead
from support.random_heads import random_head
from support.references import PROMPT_LENGTHS, Reference, greedy_reference
from support.tiny_targets import tiny_target

pytestmark = pytest.mark.exactness

NEW_TOKENS = 26  # the prompt's own, four fully accepted paths of 6, and one for which only the root is left
BUDGET = 14


class CountingCompiler:
    """A compile configuration for the CPU whose backend counts graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

        def backend(graph: Any, _example: Any) -> Any:
            self.graphs += 1
            return graph.forward

        # a graph that breaks is an error
        self.config = CompileConfig(backend=backend, mode="default", fullgraph=True)
        self.config._compile_all_devices = True

    def generate(self, target: PreTrainedModel, head: Any, reference: Reference, **kwargs: Any) -> torch.Tensor:
        settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "cache_implementation": "static", **kwargs}
        return target.generate(**reference.inputs, assistant_model=head, compile_config=self.config, **settings)


@pytest.fixture
def compiler() -> Iterator[CountingCompiler]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield CountingCompiler()
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def deep_target() -> PreTrainedModel:
    return tiny_target("llama", num_hidden_layers=4)


def oracle(target: PreTrainedModel, reference: Reference, accuracy: float, **fields: Any) -> OracleHead:
    head = OracleHead.from_target(target, num_hidden_layers=1, block_size=6, **fields)
    head.draft_with(tree_budget=BUDGET, tree_width=2)
    return head.know(reference.texts, accuracy=accuracy, must_match=False)


@pytest.mark.parametrize(("accuracy", "batch"), [(1.0, 1), (0.6, 3)])
@pytest.mark.fixed_budget
def test_one_graph_serves_every_step_to_the_last(
    deep_target: PreTrainedModel, compiler: CountingCompiler, accuracy: float, batch: int
) -> None:
    """Even where fewer tokens remain than the tree is deep, and it has fewer nodes or its root alone."""
    reference = greedy_reference(deep_target, PROMPT_LENGTHS[batch], NEW_TOKENS)
    head = oracle(deep_target, reference, accuracy)
    for _ in range(2):  # the second generation finds the graph of the first
        assert torch.equal(compiler.generate(deep_target, head, reference), reference.sequences)
        assert compiler.graphs == 1
    assert accuracy < 1 or head.last_acceptance.tree_sizes == [BUDGET] * 4 + [0]


def test_compiled_forwards_give_the_head_the_same_features(
    deep_target: PreTrainedModel, compiler: CountingCompiler
) -> None:
    reference = greedy_reference(deep_target, PROMPT_LENGTHS[3], NEW_TOKENS)
    head = random_head(deep_target, num_hidden_layers=2, block_size=6, target_layer_ids=[0, 2])
    head.generation_config.tree_budget = BUDGET
    trees = []
    for config in (compiler.config, None):
        compiler.config = config
        assert torch.equal(compiler.generate(deep_target, head, reference, max_new_tokens=9), reference.first(9))
        trees.append((head.last_acceptance.last_tree.token_ids.tolist(), head.last_acceptance.accepted_lengths))
    assert trees[0] == trees[1]
    assert compiler.graphs == 1


def test_a_last_layer_that_is_tapped_keeps_the_target_from_being_compiled(
    deep_target: PreTrainedModel, compiler: CountingCompiler
) -> None:
    """Its output is not among the hidden states, which end with a normalised one."""
    reference = greedy_reference(deep_target, PROMPT_LENGTHS[1], NEW_TOKENS)
    head = oracle(deep_target, reference, 0.8, target_layer_ids=[3])
    assert torch.equal(compiler.generate(deep_target, head, reference), reference.sequences)
    assert compiler.graphs == 0


def test_a_user_may_forbid_to_compile(deep_target: PreTrainedModel, compiler: CountingCompiler) -> None:
    reference = greedy_reference(deep_target, PROMPT_LENGTHS[1], NEW_TOKENS)
    head = oracle(deep_target, reference, 0.8)
    assert torch.equal(compiler.generate(deep_target, head, reference, disable_compile=True), reference.sequences)
    assert compiler.graphs == 0


def test_plain_decoding_before_and_after_has_graphs_of_its_own(deep_target: PreTrainedModel) -> None:
    torch._dynamo.reset()
    compiler = CountingCompiler()
    reference = greedy_reference(deep_target, PROMPT_LENGTHS[1], NEW_TOKENS)
    head = oracle(deep_target, reference, 0.8)
    head.generation_config.tree_budget = 0  # forwards of one token, as plain decoding's
    for assistant in (None, head, None, head):
        assert torch.equal(compiler.generate(deep_target, assistant, reference), reference.sequences)
    assert compiler.graphs == 2
    torch._dynamo.reset()
