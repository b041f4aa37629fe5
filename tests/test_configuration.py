"""Configurations: every field has a rule, and the published layout is translated or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from jetspec_hf import JetSpecConfig

TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "num_target_layers": 6, "vocab_size": 320}
TINY["mask_token_id"] = 316
PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "block_size": 8,
    "dflash_config": {"causal_head": True, "mask_token_id": 316},
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 6,
    "rope_theta": 10000.0,
    "vocab_size": 320,
}

# field -> values that break its rule
BROKEN: dict[str, list[Any]] = {
    "vocab_size": [0, -1, 1.5, "320", None, True],
    "hidden_size": [0, "64", None],
    "intermediate_size": [0, 2.0],
    "num_hidden_layers": [0, "2"],
    "num_attention_heads": [0, None],
    "num_key_value_heads": [3, 0, "2"],
    "head_dim": [0, 15, 8.0],
    "hidden_act": [3, None, "no_such_activation"],
    "rms_norm_eps": [0.0, -1e-6, float("nan"), "1e-6"],
    "attention_bias": [1, None],
    "attention_dropout": [1.0, -0.1, "0"],
    "max_position_embeddings": [0, None],
    "initializer_range": [0.0, float("inf")],
    "layer_types": [["full_attention"], ["full_attention", "linear_attention"], "full_attention", [1, 2]],
    "sliding_window": [0, 1.5, "4"],
    "block_size": [1, 0, 2.5, "8", True],
    "mask_token_id": [320, -1, None, 1.0],
    "target_layer_ids": [[], [6], [-1], [1, 1], ["1"], 3],
    "num_target_layers": [0, 1.5],
    "causal": [None, "yes", 1, {"sliding_attention": True}, {"full_attention": 1}, {"conv": True}],
    "branch_rank": [-1, 1.5, None],
    "draft_vocab_size": [0, 1.5, 151937],
    "final_logit_softcapping": [0.0, -1.0, "30"],
    "logit_scale": [0.0, None],
    "embedding_scale": [-1.0, float("nan")],
    "target_name_or_path": [3],
    "pad_token_id": ["0", 1.5],
    "bos_token_id": ["0"],
    "eos_token_id": ["0", [1, "2"]],
    "tie_word_embeddings": [True, 1],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 0.0},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "no_such_type", "rope_theta": 1e4},
    ],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BROKEN.items() for value in values])
def test_a_field_that_breaks_its_rule_is_named_with_its_value(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        JetSpecConfig(**{**TINY, field: value})


def test_every_field_of_its_own_has_a_broken_example() -> None:
    inherited = {"rope_parameters", "tie_word_embeddings"}
    own = set(JetSpecConfig.__annotations__) - {"keys_to_ignore_at_inference"}
    assert own <= set(BROKEN) | inherited


def test_sliding_layers_need_a_window() -> None:
    with pytest.raises(ValueError, match="sliding_window"):
        JetSpecConfig(**TINY, layer_types=["full_attention", "sliding_attention"])


@pytest.mark.parametrize(
    ("draft_layers", "target_layers", "expected"),
    [(1, 6, [3]), (2, 6, [1, 3]), (5, 40, [1, 10, 19, 28, 37]), (5, 36, [1, 9, 17, 25, 33]), (5, 2, [0, 1])],
)
def test_taps_default_to_the_published_spread(draft_layers: int, target_layers: int, expected: list[int]) -> None:
    fields = {**TINY, "num_hidden_layers": draft_layers, "num_target_layers": target_layers}
    assert JetSpecConfig(**fields).target_layer_ids == expected


def test_saving_and_loading_keeps_every_field(tmp_path: Path) -> None:
    config = JetSpecConfig(
        **TINY,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=16,
        causal={"full_attention": False, "sliding_attention": True},
        branch_rank=4,
        rope_theta=5e5,
        eos_token_id=[1, 2],
    )
    config.save_pretrained(tmp_path)
    loaded = JetSpecConfig.from_pretrained(tmp_path)
    for field in BROKEN:
        assert getattr(loaded, field) == getattr(config, field), field
    assert AutoConfig.from_pretrained(tmp_path).causal == config.causal


def load(folder: Path, config: dict[str, Any], **kwargs: Any) -> JetSpecConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return JetSpecConfig.from_pretrained(folder, **kwargs)


def test_a_published_config_is_translated(tmp_path: Path) -> None:
    config = load(tmp_path, PUBLISHED)
    assert (config.block_size, config.mask_token_id, config.causal) == (8, 316, True)
    assert (config.target_layer_ids, config.num_target_layers) == ([1, 3], 6)
    assert config.rope_parameters["rope_theta"] == 10000.0


def changed(**changes: Any) -> dict[str, Any]:
    """The published config with keys replaced; `dflash_config` keys are merged, `None` removes a key."""
    dflash = {**PUBLISHED["dflash_config"], **changes.pop("dflash_config", {})}
    merged = {**PUBLISHED, "dflash_config": dflash, **changes}
    for place in (merged, dflash):
        for key in [key for key, value in place.items() if value is None]:
            del place[key]
    return merged


@pytest.mark.parametrize(
    ("config", "field", "expected"),
    [
        (changed(block_size=None, dflash_config={"block_size": 6}), "block_size", 6),
        (changed(dflash_config={"target_layer_ids": [0, 2, 4]}), "target_layer_ids", [0, 2, 4]),
        (changed(dflash_config={"causal_head": None}), "causal", False),
        (changed(dflash_config={"causal_head": None, "causal": True}), "causal", True),
        (changed(is_causal=True), "causal", True),
        (
            changed(
                dflash_config={"causal_head": None},
                layer_types=["sliding_attention", "full_attention"],
                sliding_window=32,
            ),
            "causal",
            {"full_attention": False, "sliding_attention": True},
        ),
        (changed(sliding_window=4096), "sliding_window", None),
        (
            changed(layer_types=["sliding_attention", "full_attention"], sliding_window=32),
            "layer_types",
            ["sliding_attention", "full_attention"],
        ),
        (
            changed(rope_theta=None, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
            "rope_parameters",
            {"rope_theta": 1e6, "rope_type": "default"},
        ),
        (changed(architectures=["Qwen3DFlashDraftModel"]), "block_size", 8),
        (changed(logit_scale=0.5), "logit_scale", 0.5),
    ],
)
def test_published_variants_are_translated(tmp_path: Path, config: dict[str, Any], field: str, expected: Any) -> None:
    assert getattr(load(tmp_path, config), field) == expected


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (changed(architectures=["DFlash2DraftModel"]), "DFlash 2"),
        (changed(dflash_config={"selector_rank": 256}), "DFlash 2"),
        (changed(dflash_config={"projector_type": "domino"}), "Domino"),
        (changed(dflash_config={"projector_type": "dspark"}), "DSpark"),
        (changed(dflash_config={"markov_rank": 8}), "DSpark"),
        (changed(architectures=["JetSpecSpeculator"], speculators_model_type="jetspec"), "AR read-out"),
        (changed(architectures=["DFlashSpeculator"], speculators_model_type="dflash"), "speculators"),
        (changed(dflash_config={"shift_label": True}), "shift_label"),
        (changed(dflash_config={"target_hidden_size": 128}), "target_hidden_size"),
        (changed(dflash_config={"attention_sink_bias": True}), "attention_sink_bias"),
        (changed(draft_vocab_size=100), "draft_vocab_size"),
        (changed(block_size=None), "block_size"),
        (changed(dflash_config={"block_size": 9}), "block_size"),
        (changed(dflash_config={"mask_token_id": None}), "mask_token_id"),
        (changed(rope_theta=None), "rope_theta"),
        (changed(num_target_layers=None), "target_layer_ids"),
        (changed(dflash_config={"causal": False}), "causal_head.*head_type"),
        (changed(is_causal=False, dflash_config={"causal_head": None, "causal": True}), "NeMo"),
        ({**TINY, "model_type": "llama"}, "model_type"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load(tmp_path, config)


@pytest.mark.parametrize(("head_type", "causal"), [("jetspec", True), ("dflash", False)])
def test_contradicting_causality_can_be_settled_by_the_caller(tmp_path: Path, head_type: str, causal: bool) -> None:
    assert load(tmp_path, changed(dflash_config={"causal": False}), head_type=head_type).causal is causal


@pytest.mark.parametrize(
    "key",
    [
        *("_attn_implementation", "_experts_implementation", "auto_map", "custom_pipelines", "draft_depth"),
        *("check_fields", "to_dict", "attribute_map", "id2label", "__class__", "_name_or_path", "per_layer_config"),
    ],
)
def test_a_key_that_is_no_field_leaves_no_trace(tmp_path: Path, key: str) -> None:
    sound = JetSpecConfig(**TINY)
    sound.save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_text()
    for loader in (JetSpecConfig, AutoConfig):
        (tmp_path / "config.json").write_text(json.dumps({**json.loads(before), key: {"0": "somebody/kernel"}}))
        loaded = loader.from_pretrained(tmp_path)
        assert loaded.draft_depth == 15
        loaded.check_fields()
        loaded.save_pretrained(tmp_path)
        assert (tmp_path / "config.json").read_text() == before


@pytest.mark.parametrize(
    ("keys", "named"), [({"is_causal": False}, "is_causal"), ({"dflash_config": {"causal": False}}, "dflash_config")]
)
def test_a_key_of_another_format_cannot_contradict_causal(tmp_path: Path, keys: dict[str, Any], named: str) -> None:
    ours = {**TINY, "model_type": "jetspec", "causal": True}
    with pytest.raises(ValueError, match=f"`{named}.*must not contradict `causal`.*got False and True"):
        load(tmp_path, {**ours, **keys})
    assert load(tmp_path, {**ours, "is_causal": True}).is_causal("full_attention")


def test_an_unknown_head_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="head_type"):
        load(tmp_path, PUBLISHED, head_type="eagle")
