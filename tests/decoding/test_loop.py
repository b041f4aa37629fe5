"""The loop beyond single calls: knobs, ranks that wait for each other, and what a conversation keeps."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer

from jetspec_hf import JetSpecDraftHead
from support.oracle import OracleHead
from support.references import greedy_reference, left_padded, random_prompts
from support.tiny_targets import tiny_target
from support.versions import CACHE

pytestmark = pytest.mark.exactness


def test_a_rank_that_has_finished_idles_while_others_work_and_changes_nothing(
    target: PreTrainedModel, head: OracleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = greedy_reference(target, (7,), 12)
    waits = iter([True] * 3)

    def others_work(_self: Any, this_peer_finished: bool, synced_gpus: bool, device: Any) -> bool:
        assert synced_gpus
        return not this_peer_finished or next(waits, False)

    monkeypatch.setattr(type(target), "_has_unfinished_sequences", others_work)
    head.know(reference.texts)
    output = target.generate(
        **reference.inputs,
        assistant_model=head,
        max_new_tokens=12,
        do_sample=False,
        synced_gpus=True,
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, reference.sequences)
    assert output[CACHE].get_seq_length() == output.sequences.shape[1] - 1
    assert next(waits, None) is None  # the idle forwards were really run


@pytest.mark.auto_budget
@pytest.mark.parametrize(
    ("call", "of_target", "of_head", "expected"),
    [(None, None, None, None), (None, None, 3, 3), (None, 4, 3, 4), (5, 4, 3, 5), ("auto", 4, 3, None)],
)
def test_the_calls_knob_beats_the_targets_and_the_targets_the_heads(
    target: PreTrainedModel, head: OracleHead, call: Any, of_target: Any, of_head: Any, expected: int | None
) -> None:
    reference = greedy_reference(target, (7,), 8)
    for config, value in ((target.generation_config, of_target), (head.generation_config, of_head)):
        if value is not None:
            config.tree_budget = value
    config = GenerationConfig(max_new_tokens=8, do_sample=False)
    if call is not None:
        config.tree_budget = call
    head.know(reference.texts)
    target.generate(**reference.inputs, assistant_model=head, generation_config=config)
    first = head.last_acceptance.decisions[0]
    assert (first.tree_budget, first.reason) == (expected, "fixed") if expected else first.reason == "best rate"


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("tree_budget", -1),
        ("tree_budget", 2.5),
        ("tree_budget", "big"),
        ("tree_width", 0),
        ("tree_width", "auto"),
        ("draft_depth", 0),
        ("draft_depth", 6),
        ("draft_depth", True),
    ],
)
def test_a_knob_out_of_range_is_named(target: PreTrainedModel, head: OracleHead, knob: str, value: Any) -> None:
    setattr(head.generation_config, knob, value)
    prompt = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match=knob):
        target.generate(prompt, attention_mask=torch.ones_like(prompt), assistant_model=head)


@pytest.mark.fixed_budget
@pytest.mark.parametrize("batch", [(9,), (9, 4)])
def test_a_conversation_on_a_returned_cache_keeps_the_heads_context(
    target: PreTrainedModel, batch: tuple[int, ...]
) -> None:
    """The second turn drafts what a head that sees the whole text at once drafts."""
    reference = greedy_reference(target, batch, 10)
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=4)
    kwargs: dict[str, Any] = {"assistant_model": head, "do_sample": False, "return_dict_in_generate": True}
    first = target.generate(**reference.inputs, max_new_tokens=5, **kwargs)
    mask = torch.cat([reference.attention_mask, torch.ones(len(batch), 5, dtype=torch.long)], dim=1)
    drafts: dict[str, torch.Tensor] = {}

    def recording(name: str) -> Any:
        class Recording(JetSpecDraftHead):
            def draft_logits(self, anchor_ids: torch.Tensor, state: Any) -> torch.Tensor:
                logits = super().draft_logits(anchor_ids, state)
                drafts.setdefault(name, logits)
                return logits

        return Recording

    for name, cache in (("kept", first[CACHE]), ("whole", DynamicCache(config=target.config))):
        head.__class__ = recording(name)
        second: dict[str, Any] = {CACHE: cache}
        target.generate(first.sequences, attention_mask=mask, max_new_tokens=4, **second, **kwargs)
    assert (drafts["kept"] - drafts["whole"]).abs().max() < 1e-4


def test_another_head_does_not_take_over_a_context_that_is_not_its_own(target: PreTrainedModel) -> None:
    reference = greedy_reference(target, (9,), 10)
    heads = [JetSpecDraftHead.from_target(target, num_hidden_layers=layers, block_size=4) for layers in (1, 2)]
    kwargs: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True}
    first = target.generate(**reference.inputs, max_new_tokens=5, assistant_model=heads[0], **kwargs)
    cache: dict[str, Any] = {CACHE: first[CACHE]}
    mask = torch.ones_like(first.sequences)
    second = target.generate(
        first.sequences, attention_mask=mask, max_new_tokens=5, assistant_model=heads[1], **cache, **kwargs
    )
    assert torch.equal(second.sequences, reference.sequences)


def test_a_returned_cache_can_be_pickled_and_continued(target: PreTrainedModel) -> None:
    reference = greedy_reference(target, (9,), 10)
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=4)
    kwargs: dict[str, Any] = {"assistant_model": head, "do_sample": False, "return_dict_in_generate": True}
    first = target.generate(**reference.inputs, max_new_tokens=5, **kwargs)
    cache: dict[str, Any] = {CACHE: pickle.loads(pickle.dumps(first[CACHE]))}
    mask = torch.ones_like(first.sequences)
    second = target.generate(first.sequences, attention_mask=mask, max_new_tokens=5, **cache, **kwargs)
    assert torch.equal(second.sequences, reference.sequences)


def test_a_head_cast_between_two_turns_starts_a_context_of_its_new_kind(target: PreTrainedModel) -> None:
    reference = greedy_reference(target, (9,), 10)
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=4)
    kwargs: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True}
    first = target.generate(**reference.inputs, max_new_tokens=5, assistant_model=head, **kwargs)
    cache: dict[str, Any] = {CACHE: first[CACHE], "attention_mask": torch.ones_like(first.sequences)}
    second = target.generate(
        first.sequences, max_new_tokens=5, assistant_model=head.to(torch.bfloat16), **cache, **kwargs
    )
    assert torch.equal(second.sequences, reference.sequences)


def test_a_head_in_training_mode_with_dropout_leaves_the_random_state_to_the_target(target: PreTrainedModel) -> None:
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=4, attention_dropout=0.5).train()
    prompt = torch.tensor([[5, 6, 7]])
    kwargs: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": True}
    torch.manual_seed(1)
    plain = target.generate(prompt, **kwargs)
    torch.manual_seed(1)
    assert torch.equal(target.generate(prompt, assistant_model=head, **kwargs), plain)
    assert head.training


def test_prompts_of_another_integer_type_give_plain_tokens_of_plain_type(target: PreTrainedModel) -> None:
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=4)
    prompt = torch.tensor([[5, 6, 7]], dtype=torch.int32)
    kwargs: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    plain, tree = target.generate(prompt, **kwargs), target.generate(prompt, assistant_model=head, **kwargs)
    assert torch.equal(tree, plain)
    assert tree.dtype == plain.dtype


def test_autocast_is_let_through(target: PreTrainedModel) -> None:
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=4)
    prompt = torch.tensor([[5, 6, 7]])
    with torch.autocast("cpu", torch.bfloat16):
        output = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, assistant_model=head
        )
    assert output.shape == (1, 11)


def test_a_streamer_that_writes_into_what_it_gets_changes_nothing(target: PreTrainedModel, head: OracleHead) -> None:
    class Scribbler(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            if value.dim() == 1:  # a token; the prompt is the caller's own tensor in plain decoding too
                value.zero_()

        def end(self) -> None:
            pass

    reference = greedy_reference(target, (7,), 12)
    output = target.generate(
        **reference.inputs,
        assistant_model=head.know(reference.texts),
        max_new_tokens=12,
        do_sample=False,
        streamer=Scribbler(),
    )
    assert torch.equal(output, reference.sequences)


def test_depths_that_only_padding_reached_are_not_counted(target: PreTrainedModel, head: OracleHead) -> None:
    reference = greedy_reference(target, (9, 4), 14)
    stop = int(reference.new_tokens[1, 2])
    kwargs: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": stop}
    kwargs |= {"output_scores": True, "return_dict_in_generate": True}  # recorded scores keep the rows in lockstep
    plain = target.generate(**reference.inputs, **kwargs)
    output = target.generate(
        **reference.inputs, assistant_model=head.know(reference.texts_until(stop), must_match=False), **kwargs
    )
    assert torch.equal(output.sequences, plain.sequences)
    assert len(output.acceptance.acceptance_by_depth) <= head.config.block_size - 1
    assert all(0 <= share <= 1 for share in output.acceptance.acceptance_by_depth)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_dtype_does_not_matter(target: PreTrainedModel, head: OracleHead, dtype: torch.dtype) -> None:
    reference = greedy_reference(target, (7,), 12)
    head.know(reference.texts).draft_with(tree_budget=8)
    torch.set_default_dtype(dtype)
    try:
        output = target.generate(**reference.inputs, assistant_model=head, max_new_tokens=12, do_sample=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(output, reference.sequences)


def test_a_static_cache_too_short_for_the_text_says_so(target: PreTrainedModel, head: OracleHead) -> None:
    reference = greedy_reference(target, (7,), 12)
    cache: dict[str, Any] = {CACHE: StaticCache(config=target.config, max_cache_len=12)}
    with pytest.raises(ValueError, match="max_cache_len"):
        target.generate(
            **reference.inputs,
            assistant_model=head.know(reference.texts),
            max_new_tokens=12,
            do_sample=False,
            **cache,
        )


@pytest.mark.parametrize("padding", [0, 8])
def test_longrope_is_refused_where_positions_or_slots_cross_its_switch(padding: int) -> None:
    target = tiny_target("phi3", original_max_position_embeddings=16)
    factors = [1.0] * 8
    target.config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 16,
    }
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=4)
    ids, mask = left_padded(random_prompts((10,), seed=0))
    ids, mask = (torch.nn.functional.pad(tensor, (padding, 0)) for tensor in (ids, mask))
    with pytest.raises(ValueError, match="switches its rotary embeddings"):
        target.generate(ids, attention_mask=mask, assistant_model=head, max_new_tokens=12, do_sample=False)


@pytest.mark.fixed_budget
@pytest.mark.parametrize("batch", [(9,), (9, 4)])
def test_an_error_inside_the_heads_forward_leaves_no_half_drafted_block(
    target: PreTrainedModel, batch: tuple[int, ...]
) -> None:
    reference = greedy_reference(target, batch, 10)
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=2, block_size=4)
    kwargs: dict[str, Any] = {"assistant_model": head, "do_sample": False, "return_dict_in_generate": True}
    first = target.generate(**reference.inputs, max_new_tokens=5, **kwargs)
    mask = torch.cat([reference.attention_mask, torch.ones(len(batch), 5, dtype=torch.long)], dim=1)
    second: dict[str, Any] = {"attention_mask": mask, CACHE: first[CACHE], **kwargs}

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = head.layers[1].register_forward_hook(interrupt)  # the first layer has the block's keys already
    with pytest.raises(KeyboardInterrupt):
        target.generate(first.sequences, max_new_tokens=5, **second)
    handle.remove()
    assert not hasattr(first[CACHE], "jetspec_context")
    # the cache holds the second turn's prompt; the token that followed it was chosen before the interruption
    second["attention_mask"] = torch.cat([mask, mask.new_ones(len(batch), 1)], dim=1)
    output = target.generate(reference.first(6), max_new_tokens=4, **second)
    assert torch.equal(output.sequences, reference.sequences)


@pytest.mark.fixed_budget
def test_without_drafting_no_features_are_kept(target: PreTrainedModel, head: OracleHead) -> None:
    reference = greedy_reference(target, (9,), 10)
    output = target.generate(
        **reference.inputs,
        assistant_model=head.know(reference.texts).draft_with(tree_budget=0),
        max_new_tokens=10,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, reference.sequences)
    assert not hasattr(output[CACHE], "jetspec_context")


def test_an_expanded_prompt_is_decoded(target: PreTrainedModel, head: OracleHead) -> None:
    reference = greedy_reference(target, (7,), 12)
    prompt = reference.inputs["input_ids"].expand(3, -1)
    head.know(reference.texts * 3)
    output = target.generate(prompt, assistant_model=head, max_new_tokens=12, do_sample=False)
    assert torch.equal(output, reference.sequences.expand(3, -1))
