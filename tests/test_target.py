"""What the library reads off a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPTNeoConfig, GPTNeoForCausalLM, PreTrainedModel

import jetspec_hf.target as target_module
from jetspec_hf import JetSpecDraftHead, check_target
from jetspec_hf.target import (
    AttentionKind,
    OutputRows,
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


# Some rows of the lm_head ---------------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """A quantised layer as libraries make them: no `nn.Linear`, and no weight that could be read as one."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.scales = nn.Buffer(linear.weight.detach().abs().amax(dim=1) / 127)
        self.weight = nn.Buffer((linear.weight.detach() / self.scales[:, None]).round().to(torch.int8))
        self.dtype = dtype

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return (states.float() @ (self.weight.float() * self.scales[:, None]).T).to(self.dtype)


class ScaledLinear(nn.Linear):
    """A subclass that does more than its weight says."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states) * 0.5


def with_lm_head(make: Callable[[nn.Linear], nn.Module], **fields: Any) -> PreTrainedModel:
    target = tiny_target("llama", **fields)
    target.lm_head = make(target.lm_head)
    return target


def with_bias(linear: nn.Linear) -> nn.Linear:
    linear.bias = nn.Parameter(torch.randn(linear.out_features))
    return linear


def scaled(linear: nn.Linear) -> nn.Linear:
    other = ScaledLinear(linear.in_features, linear.out_features)
    with torch.no_grad():
        other.weight.copy_(linear.weight)
    return other


def hooked(linear: nn.Linear) -> nn.Linear:
    linear.register_forward_hook(lambda _module, _args, output: output * 2 + 1)
    return linear


def adapted(lora: bool) -> PreTrainedModel:
    """A model whose `lm_head` has an adapter, or is saved as a whole; its weights are far from the base model's."""
    fields: dict[str, Any] = {"target_modules": ["lm_head"]} if lora else {"modules_to_save": ["lm_head"]}
    config = LoraConfig(r=4, init_lora_weights=False, **{"target_modules": ["q_proj"], **fields})
    target = get_peft_model(tiny_target("llama"), config).eval()
    for name, weight in target.named_parameters():
        if "modules_to_save" in name:
            nn.init.normal_(weight)
    return target.base_model.model


LM_HEADS: dict[str, Callable[[], PreTrainedModel]] = {
    "plain": lambda: tiny_target("llama"),
    "tied": lambda: tiny_target("qwen3", tie_word_embeddings=True),
    "bias": lambda: with_lm_head(with_bias),
    "bias of its architecture": lambda: tiny_target("phi"),
    "quantised": lambda: with_lm_head(lambda linear: PackedLinear(linear, torch.float32)),
    "quantised, wider": lambda: with_lm_head(lambda linear: PackedLinear(linear, torch.float32), hidden_size=144),
    "subclass": lambda: with_lm_head(scaled),
    "hooked": lambda: with_lm_head(hooked),
    "offloaded": lambda: with_lm_head(lambda linear: cpu_offload(with_bias(linear), execution_device="cpu")),
    "adapter": lambda: adapted(lora=True),
    "saved as a whole": lambda: adapted(lora=False),
}
DRAFTED = torch.tensor([0, 5, 6, 63, 64, 100, 127])
# peft 0.21.2 reads an attribute that transformers 5.24 has renamed
with_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@with_peft
@pytest.mark.parametrize("make", LM_HEADS.values(), ids=list(LM_HEADS))
def test_rows_of_the_lm_head_give_its_own_logits_of_their_tokens(make: Callable[[], PreTrainedModel]) -> None:
    target = make()
    states = torch.randn(2, 3, target.get_input_embeddings().weight.shape[1], requires_grad=True)
    logits = OutputRows(target, DRAFTED)(states)
    expected = target.get_output_embeddings()(states)[..., DRAFTED]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    gradient, expected_gradient = (
        torch.autograd.grad(values.square().sum(), states)[0] for values in (logits, expected)
    )
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-3)


@with_peft
@pytest.mark.parametrize("name", ["plain", "bias", "quantised", "adapter"])
def test_rows_of_a_half_precision_lm_head_are_right_within_its_rounding(name: str) -> None:
    target = LM_HEADS[name]().to(torch.bfloat16)
    if name == "quantised":
        target.lm_head.dtype = torch.bfloat16
    states = torch.randn(5, target.config.hidden_size, dtype=torch.bfloat16)
    logits = OutputRows(target, DRAFTED)(states)
    expected = target.get_output_embeddings()(states)[..., DRAFTED]
    assert logits.dtype == torch.bfloat16
    # Logits are up to 6 here, with 2 ** -6 between neighbours; the adapter's rounding enters twice.
    torch.testing.assert_close(logits, expected, rtol=2**-6, atol=2**-5)


def test_rows_work_in_the_precision_of_the_states_they_get() -> None:
    target = tiny_target("llama").to(torch.bfloat16)
    rows, states = OutputRows(target, DRAFTED), torch.randn(5, target.config.hidden_size)
    expected = states @ target.lm_head.weight[DRAFTED].float().T
    assert torch.equal(rows(states), expected)
    assert rows(states.to(torch.bfloat16)).dtype == torch.bfloat16
    assert torch.equal(rows(states), expected)  # which were rounded to half precision to begin with


def test_rows_leave_the_lm_head_as_it_is() -> None:
    target = tiny_target("llama")
    weight = target.lm_head.weight
    OutputRows(target, DRAFTED)(torch.randn(2, target.config.hidden_size, dtype=torch.float64))
    assert target.lm_head.weight is weight
    assert (weight.dtype, weight.requires_grad, weight.grad) == (torch.float32, True, None)
