"""The branch term: what it adds along a path while a tree is built is what it learns with the true path given."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from jetspec_hf import JetSpecConfig, JetSpecDraftHead
from jetspec_hf.branch import JetSpecBranch
from jetspec_hf.decoding.drafter import CommittedTokens, DraftContext, DraftingState
from jetspec_hf.tree import TokenTree, build_tree
from support.random_heads import random_head

DEPTH, RANK, CONTEXT = 3, 4, 7
DRAFTED = [3, 20, 21, 64, 127]
HEADS: dict[str, dict[str, Any]] = {
    "whole vocabulary": {},
    "draft vocabulary": {"draft_token_ids": DRAFTED},
    "scaled embeddings": {"draft_token_ids": DRAFTED, "embedding_scale": 3.0},
    "bidirectional": {"draft_token_ids": DRAFTED, "causal": False},
}
every_head = pytest.mark.parametrize("fields", HEADS.values(), ids=list(HEADS))


class Block:
    """A block of two rows, as a generation drafts it after some context."""

    def __init__(self, target: PreTrainedModel, head: JetSpecDraftHead) -> None:
        self.head, self.anchors = head, torch.tensor([5, 9])
        context = DraftContext(head, 2, 0)
        features = torch.randn(2, CONTEXT, head.fc.in_features)
        context.append(CommittedTokens(features, torch.arange(CONTEXT).expand(2, -1), None, CONTEXT))
        self.state = DraftingState(target, head, context, DEPTH)
        self.state.anchor_positions = torch.tensor([CONTEXT, CONTEXT])
        with torch.no_grad():
            self.logits = head.draft_logits(self.anchors, self.state)
        ids = head.draft_token_ids
        self.tokens = torch.arange(head.config.vocab_size) if ids is None else ids

    def tree(self, budget: int, width: int = 200, **knobs: Any) -> TokenTree:
        ids = self.head.draft_token_ids
        branch = self.head.branch_term(self.state)
        return build_tree(
            self.anchors, self.logits, tree_budget=budget, tree_width=width, branch=branch, token_ids=ids, **knobs
        )

    @torch.no_grad()
    def teacher_forced(self, row: int, path: list[int]) -> torch.Tensor:
        """What is added to every drafted token after a path, the anchor its first token; as in training."""
        assert self.head.branch is not None
        assert self.state.block_states is not None
        parents = self.head.embed(torch.tensor(path), self.state)
        states = self.head.branch.states(parents, self.state.block_states[row, 1 : len(path) + 1])
        return states[-1] @ self.head.branch.table(self.head.embed(self.tokens, self.state)).T


@torch.no_grad()
def test_states_follow_the_recurrence() -> None:
    config = JetSpecConfig(vocab_size=64, hidden_size=8, num_attention_heads=2, mask_token_id=63, branch_rank=RANK)
    branch = JetSpecBranch(config).double()
    for weight in branch.parameters():
        weight.copy_(torch.randn_like(weight))
    parents, blocks = torch.randn(2, 5, DEPTH, 8).double(), torch.randn(2, 5, DEPTH, 8).double()
    found = branch.states(parents, blocks)
    for row, column in itertools.product(range(2), range(5)):
        state = torch.zeros(RANK).double()
        for depth in range(DEPTH):
            parent = parents[row, column, depth]
            normed = parent / (parent.square().mean() + config.rms_norm_eps).sqrt() * branch.parent_norm.weight
            inputs = branch.parent_proj.weight @ normed + branch.state_proj.weight @ blocks[row, column, depth]
            inputs += branch.previous_proj.weight @ state
            state = inputs * inputs.sigmoid()
            torch.testing.assert_close(found[row, column, depth], state, rtol=0, atol=1e-5)  # norms count in float32
    token = parents[0, 0, 0]
    normed = token / (token.square().mean() + config.rms_norm_eps).sqrt() * branch.child_norm.weight
    torch.testing.assert_close(branch.table(parents)[0, 0, 0], branch.child_proj.weight @ normed, rtol=0, atol=1e-5)


@every_head
@torch.no_grad()
def test_scores_along_a_path_are_those_of_teacher_forcing(target: PreTrainedModel, fields: dict[str, Any]) -> None:
    block = Block(target, random_head(target, block_size=DEPTH + 1, branch_rank=RANK, **fields))
    term = block.head.branch_term(block.state)
    assert term is not None
    columns = torch.randint(len(block.tokens), (DEPTH, 2, 6))
    paths = [[[int(anchor)]] for anchor in block.anchors]
    states = None
    for depth in range(DEPTH):
        last = torch.tensor([[path[-1] for path in row] for row in paths])
        scores, states = term(depth, last, states, columns[depth])
        for row, number in itertools.product(range(2), range(len(paths[0]))):
            expected = block.teacher_forced(row, paths[row][number])[columns[depth, row]]
            torch.testing.assert_close(scores[row, number], expected, rtol=0, atol=1e-5)
        # three children of each path, in another order in each row
        keep = torch.stack([torch.randperm(3 * len(paths[0])) % len(paths[0]) for _ in range(2)])
        drafted = block.tokens[torch.randint(len(block.tokens), keep.shape)].tolist()
        paths = [
            [[*paths[row][at], token] for at, token in zip(keep[row].tolist(), drafted[row], strict=True)]
            for row in range(2)
        ]
        states = states.gather(1, keep[:, :, None].expand(-1, -1, RANK))


@every_head
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_a_tree_is_the_optimum_under_the_scores_of_teacher_forcing(
    target: PreTrainedModel, fields: dict[str, Any], temperature: float
) -> None:
    block = Block(target, random_head(target, block_size=DEPTH + 1, branch_rank=RANK, **fields))
    depth, budget = DEPTH if "draft_token_ids" in fields else 2, 60  # 128 ** 3 paths would be too many
    block.logits = block.logits[:, :depth]
    tree = block.tree(budget, temperature=temperature)
    for row, anchor in enumerate(block.anchors.tolist()):
        known = {(anchor,): 0.0}
        level = [(anchor,)]
        for index in range(depth):
            children = {}
            for path in level:
                logits = (block.logits[row, index] + block.teacher_forced(row, list(path))).double() / temperature
                for token, score in zip(block.tokens.tolist(), logits.log_softmax(-1).tolist(), strict=True):
                    children[(*path, token)] = known[path] + score
            known |= children
            level = list(children)
        optimum = sorted(known.values(), reverse=True)[: budget + 1]
        assert tree.log_probs[row].tolist() == pytest.approx(optimum, abs=1e-4)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tree.token_ids[row].tolist(), tree.parents[row].tolist(), strict=True):
            paths.append((*paths[parent], token) if parent >= 0 else (token,))
        assert len(set(paths)) == len(paths)
        assert tree.log_probs[row].tolist() == pytest.approx([known[path] for path in paths], abs=1e-4)


@every_head
def test_siblings_do_not_have_the_same_children(target: PreTrainedModel, fields: dict[str, Any]) -> None:
    block = Block(target, random_head(target, block_size=DEPTH + 1, branch_rank=RANK, **fields))
    scores = torch.stack([block.teacher_forced(0, [5, token]) for token in DRAFTED])
    assert (scores - scores[0])[1:].abs().amax(dim=1).min() > 0.1


@pytest.mark.parametrize("fields", [{}, {"draft_token_ids": DRAFTED}])
def test_an_untrained_branch_term_changes_no_tree(target: PreTrainedModel, fields: dict[str, Any]) -> None:
    head = JetSpecDraftHead.from_target(
        target, num_hidden_layers=1, block_size=DEPTH + 1, branch_rank=RANK, initializer_range=0.3, **fields
    )
    block = Block(target, head)
    branched = block.tree(40, width=4)
    assert head.branch is not None
    assert head.branch.parent_proj.weight.ne(0).all()  # the child's side alone is 0, so that it can learn
    assert head.branch.state_proj.weight.ne(0).all()
    head.branch = None
    plain = block.tree(40, width=4)
    assert branched.token_ids.tolist() == plain.token_ids.tolist()
    assert branched.parents.tolist() == plain.parents.tolist()
    torch.testing.assert_close(branched.log_probs, plain.log_probs, rtol=0, atol=1e-5)


def test_a_head_without_a_rank_has_no_branch_term(target: PreTrainedModel) -> None:
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1)
    assert head.branch is None
    assert head.branch_term(Block(target, head).state) is None
    assert not any("branch" in name for name in head.state_dict())


def test_the_factors_of_a_draft_vocabulary_are_made_once_in_a_generation(target: PreTrainedModel) -> None:
    head = random_head(target, block_size=DEPTH + 1, branch_rank=RANK, draft_token_ids=DRAFTED)
    embedded: list[list[int]] = []
    target.get_input_embeddings().register_forward_hook(
        lambda _module, args, _output: embedded.append(args[0].flatten().tolist())
    )
    block = Block(target, head)
    for _ in range(2):
        block.tree(10)
    assert embedded.count(DRAFTED) == 1
    Block(target, head).tree(10)  # another generation, before which the head may have been trained
    assert embedded.count(DRAFTED) == 2


def test_a_bfloat16_head_scores_in_its_own_precision(target: PreTrainedModel) -> None:
    head = random_head(target, block_size=DEPTH + 1, branch_rank=RANK, draft_token_ids=DRAFTED)
    block = Block(target, head.to(torch.bfloat16))
    tree = block.tree(20)
    assert tree.log_probs.dtype == torch.float32
    assert tree.log_probs[:, 1:].lt(0).all()


@pytest.mark.parametrize("fields", [{}, {"draft_token_ids": DRAFTED}])
def test_building_with_a_branch_term_does_not_wait_for_the_device(
    target: PreTrainedModel, fields: dict[str, Any]
) -> None:
    """A tensor without data shows it: there is nothing to wait for."""
    head = random_head(target, block_size=DEPTH + 1, branch_rank=RANK, **fields)
    block = Block(target, head)
    head.to("meta")
    target.to("meta")
    block.anchors, block.logits = block.anchors.to("meta"), block.logits.to("meta")
    block.state.block_states = block.state.block_states.to("meta")
    assert block.tree(20, width=4).token_ids.shape == (2, 21)


def test_an_lm_head_with_more_rows_than_the_vocabulary_is_drafted_with(target: PreTrainedModel) -> None:
    wide = torch.nn.Linear(64, 160, bias=False)
    with torch.no_grad():
        wide.weight[:128] = target.lm_head.weight
        wide.weight[128:] = 0.0
    target.lm_head = wide
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=4, branch_rank=3)
    torch.nn.init.normal_(head.branch.child_proj.weight)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 12, "do_sample": False}
    plain = target.generate(**inputs)
    assert target.generate(**inputs, assistant_model=head).tolist() == plain.tolist()
