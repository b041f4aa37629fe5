"""The training forward against the cached inference path: the same draft logits and branch scores at every anchor.

Inference meets one document at a time, or a batch in step, and its features in pieces; training meets all documents of
a pack and all anchors at once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.decoding.drafter import CommittedTokens, DraftContext, DraftingState
from jetspec_hf.decoding.taps import FeatureTaps
from jetspec_hf.training.blocks import branch_states, draft_states, make_blocks
from support.oracle import OracleHead
from support.packed_rows import Document, Layout, layouts
from support.random_heads import random_head
from support.references import left_padded, random_prompts
from support.tiny_targets import tiny_target

BLOCK_SIZE, DEPTH, TAPPED = 5, 4, [0, 2]
SHAPE = {"block_size": BLOCK_SIZE, "target_layer_ids": TAPPED}
TOLERANCE = 1e-5
TARGET = tiny_target("llama", num_hidden_layers=3)
DRAFTED = [token for token in range(3, 128) if token % 6]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
SLIDING, FULL = "sliding_attention", "full_attention"


def sliding(window: int, *layer_types: str) -> dict[str, Any]:
    return {"layer_types": list(layer_types), "num_hidden_layers": len(layer_types), "sliding_window": window}


HEADS: dict[str, dict[str, Any]] = {
    "full, causal": {},
    "full, bidirectional": {"causal": False},
    "window of 1": sliding(1, SLIDING),
    "window of 2, bidirectional": {"causal": False, **sliding(2, SLIDING, SLIDING)},
    "window of 3, mixed": sliding(3, SLIDING, FULL, SLIDING),
    "causal in sliding layers": {"causal": {FULL: False, SLIDING: True}, **sliding(3, SLIDING, FULL)},
    "causal in full layers": {"causal": {FULL: True, SLIDING: False}, **sliding(4, FULL, SLIDING, FULL)},
    "three layers, yarn": {"num_hidden_layers": 3, "rope_parameters": YARN},
    "branch term": {"branch_rank": 6},
    "draft vocabulary": {"draft_token_ids": DRAFTED},
    "branch term and draft vocabulary": {"branch_rank": 3, "draft_token_ids": DRAFTED, **sliding(3, SLIDING, FULL)},
    "scaled and capped": {"embedding_scale": 3.0, "logit_scale": 0.7, "final_logit_softcapping": 2.0, "branch_rank": 2},
}
LAYOUTS = {
    "unpadded": Layout.of((0, [11])),
    "right padding": Layout.of((0, [11]), (0, [4]), (0, [8]), right=1),
    "left padding": Layout.of((0, [11]), (7, [4]), (3, [8])),
    "packed": Layout.of((0, [6, 9, 1, 3]), (2, [11]), (1, [3, 8, 4]), right=2),
}
every_head = pytest.mark.parametrize("fields", HEADS.values(), ids=list(HEADS))


@torch.no_grad()
def features_of(target: PreTrainedModel, tokens: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    taps = FeatureTaps(target, TAPPED)
    with taps.attached(), taps.recording():
        target(tokens, **inputs)
    return taps.take()


class Batch:
    """Random documents laid out in rows; what lies in the padding must not matter, so it is random too."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        shape = layout.document_ids.shape
        self.input_ids = torch.randint(3, 128, shape)
        self.features = torch.randn(*shape, len(TAPPED) * TARGET.config.hidden_size) * 10
        for document in layout.documents:
            self.features[document.row, document.slots] = features_of(TARGET, self.tokens(document))[0]

    def tokens(self, document: Document) -> torch.Tensor:
        return self.input_ids[document.row, None, document.slots]


class TargetParts:
    """The target's embedding, as training borrows it."""

    def __init__(self, target: PreTrainedModel) -> None:
        self.embed = target.get_input_embeddings()


@torch.no_grad()
def training_drafts(
    head: JetSpecDraftHead, target: PreTrainedModel, input_ids: torch.Tensor, layout_ids: torch.Tensor, features: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draft logits and branch scores with every slot as an anchor, of shape `(batch, length, depth, drafted)`."""
    batch, length = input_ids.shape
    anchors, used = torch.arange(length).expand(batch, -1), layout_ids >= 0
    blocks = make_blocks(input_ids, torch.ones_like(used), layout_ids, anchors * used, used, BLOCK_SIZE)
    parts = TargetParts(target)
    states = draft_states(head, parts, input_ids, layout_ids, features, blocks)
    drafted = torch.arange(head.config.vocab_size) if head.draft_token_ids is None else head.draft_token_ids
    logits = head.finish_logits(target.get_output_embeddings()(states)[..., drafted])
    paths = branch_states(head, parts, input_ids, states, blocks)
    if head.branch is None or paths is None:
        return logits, None
    return logits, paths @ head.branch.table(head.embed(drafted, parts)).T


class Inference:
    """A generation in progress, fed by hand."""

    def __init__(self, head: JetSpecDraftHead, target: PreTrainedModel, batch_size: int = 1) -> None:
        self.head = head
        self.context = DraftContext(head, batch_size, 0)
        self.state = DraftingState(target, head, self.context, DEPTH)

    def commit(self, features: torch.Tensor, start: int | torch.Tensor, visible: torch.Tensor | None = None) -> None:
        """Features of new tokens, of shape `(batch, new, width)`, the first of which stand at `start`."""
        positions = torch.as_tensor(start).view(-1, 1) + torch.arange(features.shape[1])
        length = self.context.length + features.shape[1]
        self.context.append(CommittedTokens(features, positions.expand(features.shape[:2]), visible, length))

    @torch.no_grad()
    def draft(self, anchor_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.state.anchor_positions = positions
        return self.head.draft_logits(anchor_ids, self.state)

    @torch.no_grad()
    def branch_scores(self, path: torch.Tensor) -> list[torch.Tensor]:
        """Scores below the anchor and each token after it, for one row; each of shape `(drafted,)`."""
        term, states, scores = self.head.branch_term(self.state), None, []
        ids = self.head.draft_token_ids
        columns = torch.arange(self.head.config.vocab_size if ids is None else len(ids))[None]
        assert term is not None
        for depth, token in enumerate(path[:DEPTH]):
            if depth and ids is not None and token not in ids:
                break  # nothing is drafted below a token that cannot be drafted
            score, states = term(depth, token.view(1, 1), states, columns)
            scores.append(score[0, 0])
        return scores


def check_document(head: JetSpecDraftHead, batch: Batch, document: Document, stride: int, drafts: Any) -> None:
    """Compares the anchors that a generation with `stride` tokens a step meets; its first has any prompt."""
    logits, scores = drafts
    tokens, features = batch.tokens(document)[0], batch.features[document.row, None, document.slots]
    inference, known = Inference(head, TARGET), 0
    for anchor in range(stride - 1, document.length, stride):
        middle = (known + anchor) // 2
        for start, end in ((known, middle), (middle, anchor)):  # as a prompt in chunks, or two commits before a draft
            inference.commit(features[:, start:end], start)
        known = anchor
        drafted = inference.draft(tokens[anchor, None], torch.tensor([anchor]))[0]
        slot = document.start + anchor
        torch.testing.assert_close(drafted, logits[document.row, slot], rtol=0, atol=TOLERANCE)
        if scores is not None:
            for depth, found in enumerate(inference.branch_scores(tokens[anchor:])):
                torch.testing.assert_close(found, scores[document.row, slot, depth], rtol=0, atol=TOLERANCE)


@every_head
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_every_anchor_drafts_as_in_a_generation(layout: Layout, fields: dict[str, Any]) -> None:
    head, batch = random_head(TARGET, **SHAPE, **fields), Batch(layout)
    drafts = training_drafts(head, TARGET, batch.input_ids, layout.document_ids, batch.features)
    for document in layout.documents:
        for stride in (1, 3):
            check_document(head, batch, document, stride, drafts)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_head_drafts_as_in_a_generation_on_any_rows(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from([SLIDING, FULL]), min_size=1, max_size=3), label="layers")
    fields: dict[str, Any] = sliding(data.draw(st.integers(1, 9), label="window"), *kinds)
    causal = st.booleans() | st.fixed_dictionaries({FULL: st.booleans(), SLIDING: st.booleans()})
    fields["causal"] = data.draw(causal, label="causal")
    fields["branch_rank"] = data.draw(st.sampled_from([0, 1, 8]), label="branch rank")
    if data.draw(st.booleans(), label="draft vocabulary"):
        ids = data.draw(st.sets(st.integers(0, 127), min_size=1), label="tokens")
        fields["draft_token_ids"] = sorted(ids)
    if data.draw(st.booleans(), label="yarn"):
        fields["rope_parameters"] = YARN
    layout = data.draw(layouts(max_length=8), label="rows")
    stride = data.draw(st.integers(1, 5), label="stride")
    seed = data.draw(st.integers(0, 2**32 - 1), label="seed")
    torch.manual_seed(seed)
    head, batch = random_head(TARGET, seed=seed, **SHAPE, **fields), Batch(layout)
    drafts = training_drafts(head, TARGET, batch.input_ids, layout.document_ids, batch.features)
    for document in layout.documents:
        check_document(head, batch, document, stride, drafts)


@every_head
def test_a_batch_in_step_drafts_as_in_training(fields: dict[str, Any]) -> None:
    """Rows of three lengths, padded on the left, then commits of different lengths, which leave holes."""
    layout = LAYOUTS["left padding"]
    prompt, commits = [5, 1, 3], [[3, 0, 1], [1, 1, 3], [1, 1, 0]]
    head, batch = random_head(TARGET, **SHAPE, **fields), Batch(layout)
    logits, _ = training_drafts(head, TARGET, batch.input_ids, layout.document_ids, batch.features)
    inference, rows = Inference(head, TARGET, 3), torch.arange(3)
    starts = torch.tensor([document.start for document in layout.documents])
    known = torch.zeros(3, dtype=torch.long)
    for step, counts in enumerate([prompt, *commits]):
        new, longest = torch.tensor(counts), max(counts)
        offsets = torch.arange(longest)
        visible = offsets < new[:, None] if step else offsets >= longest - new[:, None]
        first = known if step else new - longest  # a prompt's padding stands before position 0
        slots = starts[:, None] + first[:, None] + offsets
        features = torch.where(visible[..., None], batch.features[rows[:, None], slots.clamp(0, 10)], torch.tensor(7.0))
        inference.commit(features, first, visible)
        known = known + new
        drafted = inference.draft(batch.input_ids[rows, starts + known], known)
        torch.testing.assert_close(drafted, logits[rows, starts + known], rtol=0, atol=TOLERANCE)


class RecordingOracle(OracleHead):
    """Drafts as an oracle does, so that paths are accepted, and keeps what it would have drafted by itself."""

    def draft_logits(self, anchor_ids: torch.Tensor, state: Any) -> torch.Tensor:
        own = JetSpecDraftHead.draft_logits(self, anchor_ids, state)
        self.recorded.append((state.anchor_positions.clone(), own[:, : state.draft_depth]))
        return super().draft_logits(anchor_ids, state)


@every_head
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_training_on_the_text_of_a_generation_drafts_what_the_generation_drafted(
    name: str, fields: dict[str, Any]
) -> None:
    """The real loop: features of a left-padded prefill and of accepted tree nodes, at the positions the loop counts."""
    target = TARGET if name == "llama" else tiny_target(name, sliding_window=4)
    head = random_head(target, RecordingOracle, **SHAPE, **fields).draft_with(tree_budget=12, tree_width=3)
    prompts, masks = left_padded(random_prompts((7, 1, 4), seed=0))
    new_tokens = 14
    plain = target.generate(prompts, attention_mask=masks, max_new_tokens=new_tokens + DEPTH, do_sample=False)
    texts = [row[mask.argmax() :].tolist() for row, mask in zip(plain, masks, strict=True)]
    head.recorded = []
    head.know(texts, accuracy=0.8, runner_up_rate=0.3)
    sequences = target.generate(
        prompts, attention_mask=masks, assistant_model=head, max_new_tokens=new_tokens, do_sample=False
    )
    padding = (1 - masks).sum(dim=1)
    visible = torch.arange(sequences.shape[1]) >= padding[:, None]
    positions = (visible.cumsum(dim=1) - 1).clamp(min=0)
    features = features_of(target, sequences, attention_mask=visible.long(), position_ids=positions)
    logits, _ = training_drafts(head, target, sequences, visible.long() - 1, features)
    compared = 0
    for anchor_positions, own in head.recorded:
        for row, slot in enumerate((anchor_positions + padding).tolist()):
            if slot < sequences.shape[1] - 1:
                # one target forward over all gives features that differ in the last digits from those of many
                expected = logits[row, slot, : own.shape[1]]
                torch.testing.assert_close(own[row], expected, rtol=0, atol=5 * TOLERANCE)
                compared += 1
    assert compared >= 3 * new_tokens / (DEPTH + 1)
    assert head.last_acceptance.mean_acceptance_length > 1.3
