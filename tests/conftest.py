"""Settings every test runs under: no network, one thread, seeded."""

import os
import random
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from transformers import PreTrainedModel

from jetspec_hf.decoding import loop
from jetspec_hf.decoding.budget import TreeBudget, make_budget
from jetspec_hf.decoding.step_costs import LearnedCosts
from support.oracle import OracleHead
from support.tiny_targets import tiny_target

pytest_plugins = ["support.exactness_record"]

torch.set_num_threads(1)  # tiny tensors: more threads are slower, and results then depend on the machine


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--auto-budget",
        action="store_true",
        help="oracle heads draft with automatic budgets, under costs that jump from step to step",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--auto-budget"):
        left_out = [item for item in items if item.get_closest_marker("fixed_budget")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _made_up_costs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the machine: automatic budgets see made-up times. Those of a machine on which nodes are cheap,
    or with `--auto-budget` wild ones, as if it stalled now and then.

    Without that option, heads with the default budget, among them untrained ones with which drafting never pays, draft
    in every step of the exactness tests, so that there is something to verify.
    """
    if not request.config.getoption("--auto-budget"):
        _observe(monkeypatch, draft=lambda: 0.1, verify=lambda nodes: 1.0 + 0.01 * nodes)
        if request.node.nodeid.split("/")[1] in ("decoding", "integration") and not request.node.get_closest_marker(
            "auto_budget"
        ):
            monkeypatch.setattr(loop, "make_budget", _fixed_where_automatic)
        return
    draws = random.Random(request.node.nodeid)
    _observe(
        monkeypatch,
        draft=lambda: draws.uniform(0, 0.2),  # so that it does draft
        verify=lambda nodes: draws.uniform(1, 10) if nodes else draws.uniform(2, 10),
    )
    know = OracleHead.draft_with

    def draft_with(self: OracleHead, **knobs: int) -> OracleHead:
        know(self, **{name: value for name, value in knobs.items() if name != "tree_budget"})
        self.generation_config.tree_budget = "auto"
        return self

    monkeypatch.setattr(OracleHead, "draft_with", draft_with)


def _fixed_where_automatic(tree_budget: Any, *arguments: Any) -> TreeBudget:
    return make_budget(32 if tree_budget == "auto" else tree_budget, *arguments)


def _observe(monkeypatch: pytest.MonkeyPatch, draft: Any, verify: Any) -> None:
    observe_draft, observe_verify = LearnedCosts.observe_draft, LearnedCosts.observe_verify
    monkeypatch.setattr(LearnedCosts, "observe_draft", lambda self, _: observe_draft(self, draft()))
    monkeypatch.setattr(
        LearnedCosts, "observe_verify", lambda self, nodes, _: observe_verify(self, nodes, verify(nodes))
    )


@pytest.fixture
def target() -> PreTrainedModel:
    """A tiny llama of the test's own."""
    return tiny_target("llama")


@pytest.fixture
def head(target: PreTrainedModel) -> OracleHead:
    """An oracle head for `target` with a draft depth of 5, which knows nothing yet."""
    return OracleHead.from_target(target, block_size=6)
