"""What the library reads off a target."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import GPTNeoConfig, GPTNeoForCausalLM

import jetspec_hf.target as target_module
from jetspec_hf import JetSpecDraftHead, check_target
from jetspec_hf.target import (
    AttentionKind,
    attention_kinds,
    decoder_layers,
    length_limit_reason,
    takes_mask_per_kind,
    unsupported_reason,
)
from support.tiny_targets import ARCHITECTURES, UNSUPPORTED, tiny_target

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_supported_architecture_has_its_layers_and_no_reason_against_it(name: str) -> None:
    target = tiny_target(name, ARCHITECTURES[name].backends[0])
    assert unsupported_reason(target) is None
    assert len(decoder_layers(target)) == target.config.num_hidden_layers


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("bloom", "position_ids"),
        ("mpt", "position_ids"),
        ("falcon", "alibi"),
        ("lfm2", "conv"),
        ("qwen3_next", "recurrent"),
    ],
)
def test_an_unsupported_architecture_is_refused_for_its_own_reason(name: str, word: str) -> None:
    overrides = UNSUPPORTED[name] if name == "falcon" else {}
    target = tiny_target(name, "eager", **overrides)
    with pytest.raises(ValueError, match=word):
        JetSpecDraftHead.from_target(target, num_hidden_layers=1)


def test_gpt_neo_is_refused_for_its_local_layers() -> None:
    config = GPTNeoConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    )
    assert "local" in str(unsupported_reason(GPTNeoForCausalLM(config)))


@pytest.mark.parametrize(
    ("name", "field"),
    [("mistral", "sliding_window"), ("gemma3_text", "sliding_window"), ("llama4_text", "attention_chunk_size")],
)
def test_a_window_of_a_single_token_is_refused(name: str, field: str) -> None:
    assert "single token" in str(unsupported_reason(tiny_target(name, **{field: 1})))
    assert unsupported_reason(tiny_target(name, **{field: 2})) is None


def test_attention_kinds_tell_window_and_chunk() -> None:
    assert attention_kinds(tiny_target("llama")) == [AttentionKind("full_attention", 0)]
    assert attention_kinds(tiny_target("mistral", sliding_window=4)) == [
        AttentionKind("sliding_attention", 0, sliding_window=4)
    ]
    assert attention_kinds(tiny_target("gemma3_text", sliding_window=8)) == [
        AttentionKind("sliding_attention", 0, sliding_window=8),
        AttentionKind("full_attention", 1),
    ]
    assert attention_kinds(tiny_target("llama4_text", attention_chunk_size=16)) == [
        AttentionKind("chunked_attention", 0, chunk_size=16),
        AttentionKind("full_attention", 3),
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("llama", False), ("mistral", False), ("qwen3", True), ("gemma3_text", True), ("llama4_text", True)],
)
def test_models_of_several_kinds_take_a_mask_per_kind(name: str, expected: bool) -> None:
    assert takes_mask_per_kind(tiny_target(name)) is expected


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention", "paged|sdpa", None])
def test_an_attention_that_takes_no_tree_mask_is_refused(attention: Any) -> None:
    target = tiny_target("llama")
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1)
    target.config._attn_implementation_internal = attention
    with pytest.raises(ValueError, match="attn_implementation"):
        check_target(target, head.config)


def test_a_decoder_that_hands_its_arguments_on_takes_what_its_parent_takes() -> None:
    target = tiny_target("gemma3_text")
    parent = type(target.model)

    class Wrapped(parent):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    target.model.__class__ = Wrapped
    assert takes_mask_per_kind(target) is True


@pytest.mark.parametrize(("name", "expected"), [("llama", False), ("gemma3_text", True)])
def test_without_any_source_a_decoder_of_several_kinds_takes_a_mask_per_kind(
    name: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_module, "_tests_for_dict", lambda _forward: None)
    assert takes_mask_per_kind(tiny_target(name)) is expected


def test_a_target_whose_forward_hands_on_its_keywords_is_let_through() -> None:
    target = tiny_target("llama")
    parent = type(target)

    class Wrapped(parent):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids, **kwargs)

    target.__class__ = Wrapped
    assert unsupported_reason(target) is None


def test_a_vocabulary_of_special_tokens_needs_a_mask_token_from_the_caller() -> None:
    target = tiny_target("llama", vocab_size=3)
    with pytest.raises(ValueError, match="mask_token_id"):
        JetSpecDraftHead.from_target(target, num_hidden_layers=1)
    assert JetSpecDraftHead.from_target(target, num_hidden_layers=1, mask_token_id=1).config.mask_token_id == 1


def test_a_target_without_output_embeddings_is_refused() -> None:
    target = tiny_target("llama")
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1)
    target.get_output_embeddings = lambda: None
    with pytest.raises(ValueError, match="output embeddings"):
        head.check_target(target)


def test_decoder_layers_that_cannot_be_found_are_named() -> None:
    target = tiny_target("llama")
    target.model.layers = nn.Sequential(*target.model.layers)
    with pytest.raises(ValueError, match="2 decoder layers"):
        decoder_layers(target)


@pytest.mark.parametrize(
    ("rope", "length", "max_length", "word"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 10, 257, "rescales"),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 10, 256, None),
        ({"rope_type": "default", "rope_theta": 1e4}, 10, 10_000, None),
    ],
)
def test_rotary_embeddings_that_change_on_the_way_limit_the_length(
    rope: dict[str, Any], length: int, max_length: int, word: str | None
) -> None:
    reason = length_limit_reason(tiny_target("llama", rope_parameters=rope), length, max_length)
    assert (reason is None) if word is None else (word in str(reason))


@pytest.mark.parametrize(
    ("length", "max_length", "refused"), [(10, 64, False), (10, 65, True), (64, 65, True), (65, 200, False)]
)
def test_longrope_may_not_cross_its_switch(length: int, max_length: int, refused: bool) -> None:
    factors = [1.0] * 8
    target = tiny_target("phi3", original_max_position_embeddings=64)
    target.config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 64,
    }
    assert (length_limit_reason(target, length, max_length) is not None) is refused


@pytest.mark.parametrize(("max_length", "refused"), [(32, False), (33, True)])
def test_llama4_temperature_tuning_limits_the_length(max_length: int, refused: bool) -> None:
    target = tiny_target("llama4_text", attn_temperature_tuning=True, floor_scale=32)
    assert (length_limit_reason(target, 5, max_length) is not None) is refused
