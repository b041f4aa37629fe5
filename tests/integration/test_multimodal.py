"""Vision-language targets: text and image prompts give plain `generate`'s tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from support.oracle import OracleHead
from support.references import left_padded, random_prompts

pytestmark = pytest.mark.exactness

IMAGE_TOKEN = 120
NEW_TOKENS = 16
TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def llava() -> PreTrainedModel:
    config = LlavaConfig(text_config=LlamaConfig(**TEXT), vision_config=VISION, image_token_index=IMAGE_TOKEN)
    return LlavaForConditionalGeneration(config)


def gemma3() -> PreTrainedModel:
    text = {**TEXT, "sliding_window": 4, "query_pre_attn_scalar": 16}
    text["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3Config(
        text_config=text,
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=121,
        eoi_token_index=122,
        tie_word_embeddings=False,
    )
    return Gemma3ForConditionalGeneration(config)


def qwen2_5_vl() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 64}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        video_token_id=121,
        vision_start_token_id=122,
        vision_end_token_id=123,
        tie_word_embeddings=False,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def with_large_weights(target: PreTrainedModel) -> PreTrainedModel:
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if weight.dim() >= 2 and "norm" not in name:
                weight.copy_(torch.randn(weight.shape, generator=draws) * 1.5 / weight.shape[-1] ** 0.5)
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    return target.eval()


def check(target: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> None:
    plain = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    texts = [row[mask.numel() - int(mask.sum()) :].tolist() for row, mask in zip(plain, full_mask(inputs), strict=True)]
    head = OracleHead.from_target(target, num_hidden_layers=1, block_size=5).know(texts, accuracy=0.8)
    decoded = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=head)
    assert torch.equal(decoded, plain)
    assert head.last_acceptance.mean_acceptance_length > 1.5


def full_mask(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    mask = inputs["attention_mask"]
    return torch.cat([mask, torch.ones(mask.shape[0], NEW_TOKENS, dtype=mask.dtype)], dim=1)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("build", [llava, gemma3, qwen2_5_vl])
def test_a_text_prompt_is_exact(build: Any, batch: int) -> None:
    ids, mask = left_padded(random_prompts((9, 5)[:batch], seed=batch, vocab_size=100))
    check(with_large_weights(build()), {"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize("build", [llava, gemma3])
def test_an_image_prompt_is_exact(build: Any) -> None:
    before, after = (torch.tensor(rows) for rows in (random_prompts((4,), 1, 100), random_prompts((5,), 2, 100)))
    ids = torch.cat([before, torch.full((1, 4), IMAGE_TOKEN), after], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 3, 28, 28)}
    if build is gemma3:
        inputs["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    check(with_large_weights(build()), inputs)
