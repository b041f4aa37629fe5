"""What is compared: ways to generate, and decodings that each of them runs under."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from ..decoding.drafter import DraftingKnobs

PLAIN = "plain"
PROMPT_LOOKUP = "prompt lookup"
STOCK_CHAIN = "stock chain"
CHAIN = "chain"
TREE = "tree"
AUTO = "auto"
PROMPT_LOOKUP_TOKENS = 10
FIXED_BUDGETS = (8, 16, 32, 64, 128)
# Complete, so that nothing is filled in from a target's own generation config or from transformers' defaults.
DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "repetition_penalty": 1.0},
    "penalised": {"do_sample": False, "repetition_penalty": 1.2},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0},
}


@dataclass(frozen=True)
class Method:
    """A way to generate.

    Args:
        name (`str`): Its name in tables.
        options (`dict`): Fields of `GenerationConfig` that it needs.
        uses_head (`bool`): Whether the draft head is the assistant.
        assistant (`PreTrainedModel`, *optional*): A model that is the assistant.
        is_stock (`bool`): Whether the drafting is transformers' own.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    uses_head: bool = False
    assistant: PreTrainedModel | None = None
    is_stock: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether our trees are decoded."""
        return self.uses_head and not self.is_stock


def tree_method(knobs: DraftingKnobs, tree_budget: int | str) -> Method:
    """Our trees of one budget.

    Args:
        knobs (`DraftingKnobs`): Width and depth of the trees.
        tree_budget (`int` or `str`): Nodes verified besides the root, or `"auto"`.
    """
    shape = {"tree_width": knobs.tree_width, "draft_depth": knobs.draft_depth}
    return Method(f"{TREE} {tree_budget}", {**shape, "tree_budget": tree_budget}, uses_head=True)


def methods(
    knobs: DraftingKnobs,
    tree_budgets: Iterable[int | str],
    *,
    chain: bool = False,
    stock_chain: bool = False,
    prompt_lookup: bool = False,
    assistants: Mapping[str, PreTrainedModel] | None = None,
) -> list[Method]:
    """Everything to be compared, plain decoding first.

    Args:
        knobs (`DraftingKnobs`): Width and depth of the trees.
        tree_budgets (`Iterable[int | str]`): Nodes verified besides the root, or `"auto"`, a method each.
        chain (`bool`): Whether to draft a single path of full depth too.
        stock_chain (`bool`): Whether to run the head in transformers' own chain drafter (`speculation_type="dflash"`).
        prompt_lookup (`bool`): Whether to run transformers' prompt lookup too.
        assistants (`Mapping[str, PreTrainedModel]`, *optional*): Small models for transformers' assisted generation, by
            name.
    """
    found = [Method(PLAIN)]
    if prompt_lookup:
        found.append(Method(PROMPT_LOOKUP, {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}, is_stock=True))
    for name, model in (assistants or {}).items():
        found.append(Method(f"assistant {name}", assistant=model, is_stock=True))
    if stock_chain:
        found.append(Method(STOCK_CHAIN, {"speculation_type": "dflash"}, uses_head=True, is_stock=True))
    if chain:
        shape = {"tree_width": 1, "draft_depth": knobs.draft_depth, "tree_budget": knobs.draft_depth}
        found.append(Method(CHAIN, shape, uses_head=True))
    return found + [tree_method(knobs, budget) for budget in tree_budgets]
