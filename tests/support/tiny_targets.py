"""Tiny random targets of many architectures, for exactness tests (float32, CPU, a few thousand weights each).

Weights are drawn large (std 1.5/sqrt(fan-in)), so that attention matters and a wrong mask or position shows: a plain
causal mask over a flattened tree gives logit errors of 1 to 12 here, a right tree mask 1e-5. Embeddings are untied: a
tied random target (gemma, minicpm3) repeats its first token for ever, and greedy equality on that text means nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GPTJForCausalLM, PreTrainedConfig, PreTrainedModel

# One value for every name that the architectures give to the same quantity; a config takes those it knows.
COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    # gpt2, gptj, opt, falcon, bloom, mpt
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "n_inner": 128,
    "ffn_dim": 128,
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 4,
    "num_layers": 2,
    "num_heads": 4,
    "word_embed_proj_dim": 64,
    "max_seq_len": 256,
    "ffn_hidden_size": 128,
    "attention_heads": 4,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent keys and values
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
MIXED = ["sliding_attention", "full_attention"] * 2
BOTH = ("sdpa", "eager")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a tiny target of one model type needs.

    Args:
        overrides: config fields besides `COMMON`.
        window: config fields that put some layers under a window (or chunk) of 4 tokens; None if it has no such layer.
        backends: attention implementations the architecture has.
    """

    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    window: dict[str, Any] | None = None
    backends: tuple[str, ...] = BOTH


WINDOW = {"sliding_window": 4}
HALF_ROTARY = {"partial_rotary_factor": 0.5}
FULL_HEADS = {"num_key_value_heads": 4}
PER_LAYER_INPUT = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "qwen2": Architecture({"use_sliding_window": False}, QWEN_WINDOW),
    "qwen3": Architecture({"use_sliding_window": False}, QWEN_WINDOW),
    "qwen2_moe": Architecture({"decoder_sparse_step": 1}, QWEN_WINDOW),
    "qwen3_moe": Architecture({"decoder_sparse_step": 1}, {"use_sliding_window": True, "sliding_window": 4}),
    "mistral": Architecture({"sliding_window": None}, WINDOW),
    "mixtral": Architecture({"sliding_window": None}, WINDOW),
    "starcoder2": Architecture({"sliding_window": None}, WINDOW),
    "phimoe": Architecture({"sliding_window": None}, WINDOW),
    "phi": Architecture(HALF_ROTARY),
    "phi3": Architecture({"original_max_position_embeddings": 256, "sliding_window": None}, WINDOW),
    "gemma": Architecture(),
    "gemma2": Architecture({"query_pre_attn_scalar": 16}, WINDOW, ("eager",)),
    "gemma3_text": Architecture(
        {"num_hidden_layers": 3, "query_pre_attn_scalar": 16, "layer_types": MIXED[:3]},
        WINDOW,
    ),
    "gemma3n_text": Architecture(
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 0,
            "layer_types": MIXED,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "altup_num_inputs": 2,
            **PER_LAYER_INPUT,
        },
        WINDOW,
    ),
    "gemma4_text": Architecture(
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": MIXED,
            "global_head_dim": 16,
            **PER_LAYER_INPUT,
        },
        WINDOW,
    ),
    "gpt_oss": Architecture(
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        WINDOW,
        ("eager",),
    ),
    "olmo2": Architecture(),
    "olmo3": Architecture({"num_hidden_layers": 4, "sliding_window": 64}, WINDOW),
    "olmoe": Architecture(),
    "granite": Architecture(),
    "granitemoe": Architecture(),
    "gpt2": Architecture(),
    "gpt_neox": Architecture(),
    "opt": Architecture(),
    "falcon": Architecture({"num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False}),
    "stablelm": Architecture(),
    "cohere": Architecture(),
    "cohere2": Architecture({"num_hidden_layers": 4}, WINDOW),
    "glm4": Architecture(HALF_ROTARY),
    "glm4_moe": Architecture(HALF_ROTARY),
    "deepseek_v2": Architecture({"topk_method": "greedy", **FULL_HEADS}),
    "deepseek_v3": Architecture(FULL_HEADS),
    "smollm3": Architecture(
        {}, {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
    ),
    "exaone4": Architecture({"num_hidden_layers": 4, "sliding_window": 64, "sliding_window_pattern": 4}, WINDOW),
    "ernie4_5": Architecture(),
    "llama4_text": Architecture(
        {
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 128,
            "attention_chunk_size": 64,
            "attn_temperature_tuning": False,
        },
        {"attention_chunk_size": 4},
    ),
    "seed_oss": Architecture(),
    "nemotron": Architecture(HALF_ROTARY),
    "minicpm3": Architecture(FULL_HEADS),
    "gptj": Architecture({"rotary_dim": 8}, backends=BOTH if GPTJForCausalLM._supports_sdpa else ("eager",)),
    "hunyuan_v1_dense": Architecture(),
    "ministral3": Architecture(),
    "apertus": Architecture(),
    "arcee": Architecture(),
    "nanochat": Architecture(),
}
# To be refused by name: tree verification is silently wrong on these, or impossible.
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "bloom": {"n_head": 4},
    "mpt": {"n_heads": 4},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": False, "multi_query": True, "alibi": True},
    "lfm2": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3_next": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}


def tiny_config(model_type: str, special: dict[str, Any], **overrides: Any) -> PreTrainedConfig:
    """A config of `model_type` with the common tiny sizes under whatever names it uses."""
    cls = CONFIG_MAPPING[model_type]
    if dataclasses.is_dataclass(cls):
        fields = {field.name for field in dataclasses.fields(cls)}
    else:
        fields = set(inspect.signature(cls.__init__).parameters)
    renamed = getattr(cls, "attribute_map", None) or {}
    values = {name: value for name, value in COMMON.items() if name in fields}
    for name, value in COMMON.items():
        if renamed.get(name) in fields:
            values.setdefault(renamed[name], value)
    return cls(**{**values, **special, **overrides})


def tiny_target(name: str, attn_implementation: str = "sdpa", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random target in evaluation mode, with a pad token and no EOS; the same arguments give the same weights."""
    special = ARCHITECTURES[name].overrides if name in ARCHITECTURES else UNSUPPORTED[name]
    special = {**special, **overrides}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(name, special)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).eval().float()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() >= 2 and "norm" not in key and "conv" not in key:
                weight.copy_(torch.randn(weight.shape, generator=generator) * (1.5 / weight.shape[-1] ** 0.5))
    model.generation_config.eos_token_id = None
    return model


def unsupported_target(name: str) -> PreTrainedModel:
    """A random target of an architecture that must be refused (`falcon` with alibi positions among them)."""
    config = tiny_config(name, UNSUPPORTED[name])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval().float()
