"""Formats of checkpoints: golden files are read as what they are, what is written means the same to its readers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, PreTrainedModel
from transformers.generation import candidate_generator
from transformers.models.auto import CONFIG_MAPPING

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.decoding.drafter import CommittedTokens, DraftContext, DraftingState
from jetspec_hf.hub import FORMATS, detect_format, read_checkpoint, serve_command, write_checkpoint
from support.random_heads import random_head
from support.tiny_targets import tiny_target

GOLDEN = Path(__file__).parent.parent / "fixtures" / "formats"
SLIDING, FULL = "sliding_attention", "full_attention"
NATIVE = pytest.mark.skipif(
    "muse_glimmer_assistant" not in CONFIG_MAPPING, reason="needs a transformers with `muse_glimmer_assistant`"
)


# Golden files ---------------------------------------------------------------------------------------------------------


def golden_values(name: str, shape: torch.Size) -> torch.Tensor:
    """The formula of tests/fixtures/formats/README.md."""
    start = sum(name.encode())
    numbers = [((7 * index + start) % 17 - 8) / 16 for index in range(math.prod(shape))]
    return torch.tensor(numbers).view(shape)


def golden_target(rows: torch.Tensor | None = None) -> PreTrainedModel:
    """A target of the goldens' sizes, whose `lm_head` has the rows that README.md gives."""
    target = tiny_target(
        "llama",
        hidden_size=8,
        vocab_size=16,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        intermediate_size=12,
    )
    if rows is None:
        rows = torch.tensor([((5 * index) % 13 - 6) / 8 for index in range(128)]).view(16, 8)
    target.lm_head.weight.data = rows
    return target


COMMON = {
    "vocab_size": 16,
    "hidden_size": 8,
    "block_size": 4,
    "mask_token_id": 15,
    "target_layer_ids": [1, 4],
    "num_key_value_heads": 1,
    "head_dim": 4,
}
# folder -> what to read it with, its format, and the fields it must come to
GOLDENS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "published_causal": ({}, "published", {"causal": True, "num_target_layers": 6, "layer_types": [FULL] * 2}),
    "published_interleaved": (
        {},
        "published",
        {
            "causal": {FULL: False, SLIDING: True},
            "layer_types": [SLIDING, FULL],
            "sliding_window": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "published_fused": ({}, "published", {"causal": False}),
    "nemo/epoch_0_step_10": ({"head_type": "jetspec"}, "nemo", {"causal": True, "num_target_layers": 6}),
    "speculators": (
        {},
        "speculators",
        {"causal": False, "target_name_or_path": "some/target", "draft_vocab_size": None},
    ),
    "speculators_reduced": (
        {"target": golden_target()},
        "speculators",
        {"causal": True, "layer_types": [SLIDING] * 2, "sliding_window": 6, "draft_vocab_size": 5},
    ),
    "transformers": (
        {"vocab_size": 16},
        "transformers",
        {"causal": False, "layer_types": [SLIDING, FULL], "sliding_window": 7, "eos_token_id": 2},
    ),
}


@pytest.mark.parametrize("folder", GOLDENS)
def test_a_golden_checkpoint_is_read_to_the_head_it_describes(folder: str) -> None:
    arguments, _, expected = GOLDENS[folder]
    head = read_checkpoint(GOLDEN / folder, **arguments)
    for field, value in {**COMMON, **expected}.items():
        assert getattr(head.config, field) == value, field
    assert not head.training
    names = dict(head.named_parameters())
    assert len(names) == 11 * 2 + 3
    for name, weight in names.items():
        assert torch.equal(weight, golden_values(name, weight.shape)), name


@pytest.mark.parametrize("folder", GOLDENS)
def test_the_format_of_a_golden_checkpoint_is_found_out(folder: str) -> None:
    file = next((GOLDEN / folder).rglob("config.json"))
    assert detect_format(json.loads(file.read_text())) == GOLDENS[folder][1]


def test_offsets_of_a_reduced_vocabulary_become_the_targets_tokens() -> None:
    head = read_checkpoint(GOLDEN / "speculators_reduced", target=golden_target())
    assert head.draft_token_ids.tolist() == [0, 3, 4, 9, 15]


def test_the_vocabulary_an_assistant_does_not_record_comes_from_its_target() -> None:
    head = read_checkpoint(GOLDEN / "transformers", target=golden_target())
    assert (head.config.vocab_size, head.config.num_target_layers) == (16, 6)


def test_a_folder_within_a_folder_is_read_in_both_spellings() -> None:
    for path, more in ((f"{GOLDEN}::speculators", {}), (GOLDEN, {"subfolder": "speculators"})):
        assert read_checkpoint(path, **more).config.target_layer_ids == [1, 4]


def test_a_published_checkpoint_loads_through_from_pretrained_too() -> None:
    for folder in ("published_causal", "published_interleaved"):
        loaded = JetSpecDraftHead.from_pretrained(GOLDEN / folder)
        read = read_checkpoint(GOLDEN / folder)
        assert loaded.config.to_dict().items() >= {**COMMON, "causal": read.config.causal}.items()
        assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in read.state_dict().items())


@pytest.mark.parametrize("folder", ["speculators", "transformers"])
def test_from_pretrained_names_the_reader_of_other_formats(folder: str) -> None:
    with pytest.raises(ValueError, match=r"jetspec_hf\.hub\.read_checkpoint"):
        JetSpecDraftHead.from_pretrained(GOLDEN / folder)


# What cannot be read --------------------------------------------------------------------------------------------------


def changed(tmp_path: Path, folder: str, changes: dict[str, Any]) -> Path:
    """A golden checkpoint with keys of its config replaced (`None` removes one); `a.b` is a key within a dictionary."""
    source = next((GOLDEN / folder).rglob("config.json")).parent
    config = json.loads((source / "config.json").read_text())
    for path, value in changes.items():
        *outer, key = path.split(".")
        place = config
        for name in outer:
            place = place[name]
        place[key] = value
        if value is None:
            del place[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "changes", "message"),
    [
        (
            "published_causal",
            {"dflash_config.causal": False},
            "`dflash_config.causal_head`=True, `dflash_config.causal`=F",
        ),
        ("published_causal", {"is_causal": False}, "`dflash_config.causal_head`=True, `is_causal`=False"),
        (
            "nemo/epoch_0_step_10",
            {},
            "`dflash_config.causal`=True, `is_causal`=False.*NeMo writes this pair.*head_type",
        ),
        ("published_causal", {"dflash_config.causal_head": "false"}, "`dflash_config.causal_head` must be .*'false'"),
        ("published_causal", {"target_layer_ids": [2, 5]}, r"`target_layer_ids` must be the same .*\[2, 5\]"),
        ("published_causal", {"logit_scale": 2.0, "output_multiplier": 3.0}, "`logit_scale` and `output_multiplier`"),
        ("published_causal", {"speculators_model_type": "dflash"}, "keys are those of published and speculators"),
        ("published_causal", {"model_type": "jetspec"}, "keys are those of jetspec"),
        (
            "published_causal",
            {"architectures": ["LlamaForCausalLM"], "dflash_config": None},
            "no known one.*LlamaForCausal",
        ),
        ("published_causal", {"head_dim": None}, "`head_dim` must be in the config"),
        ("published_causal", {"dflash_config.selector_rank": 8}, "DFlash 2"),
        (
            "speculators",
            {"speculators_model_type": "jetspec"},
            "`speculators_model_type` must be `dflash`, got 'jetspec'",
        ),
        (
            "speculators",
            {"speculators_model_type": "eagle3"},
            "`speculators_model_type` must be `dflash`, got 'eagle3'",
        ),
        ("speculators", {"projector_type": "domino"}, "`projector_type`"),
        ("speculators", {"sample_from_anchor": True}, "`sample_from_anchor`"),
        ("speculators", {"shift_label": True}, "`shift_label`"),
        ("speculators", {"target_hidden_size": 16}, "`target_hidden_size` must equal `hidden_size`, got 16 and 8"),
        ("speculators", {"aux_hidden_state_layer_ids": [0, 5]}, "`aux_hidden_state_layer_ids` must .* at least 1"),
        ("speculators", {"block_size": 3}, "`speculative_tokens` must be at most `block_size - 1`, got 3"),
        ("speculators", {"draft_vocab_size": 9}, "`d2t` must be among the tensors.*`draft_vocab_size=9` of 16"),
        ("speculators", {"mask_token_id": None}, "`mask_token_id`"),
        ("speculators", {"transformer_layer_config.rope_parameters": None}, "`rope_theta`"),
        ("speculators_reduced", {}, "`target` must be given .*`lm_head.weight`"),
        ("speculators_reduced", {"draft_vocab_size": 4}, "`d2t` must be `draft_vocab_size=4` integers"),
        ("transformers", {}, "`vocab_size` must be known"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_key(
    tmp_path: Path, folder: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_checkpoint(changed(tmp_path, folder, changes))


def test_a_tap_of_the_last_layer_is_refused_where_speculators_taps_it_elsewhere(tmp_path: Path) -> None:
    folder = changed(tmp_path, "speculators", {"aux_hidden_state_layer_ids": [2, 6]})
    with pytest.raises(ValueError, match=r"`aux_hidden_state_layer_ids` must be below the target's 6 layers"):
        read_checkpoint(folder, target=golden_target())


def test_a_table_of_its_own_that_is_not_the_targets_is_refused() -> None:
    rows = golden_target().lm_head.weight.detach().clone()
    rows[9, 3] += 0.5  # a drafted token
    with pytest.raises(ValueError, match=r"`lm_head\.weight` must be the target's own"):
        read_checkpoint(GOLDEN / "speculators_reduced", target=golden_target(rows))
    rows = golden_target().lm_head.weight.detach().clone()
    rows[8, 3] += 0.5  # not drafted
    assert read_checkpoint(GOLDEN / "speculators_reduced", target=golden_target(rows)).config.draft_vocab_size == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"format": "eagle"},
            "`format` must be one of jetspec, published, nemo, speculators, transformers, got 'eagle'",
        ),
        ({"hidden_dim": 4}, "`hidden_dim` must be a field of `JetSpecConfig`, got 4"),
        ({"head_type": "eagle"}, "`head_type` must be"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_checkpoint(GOLDEN / "published_causal", **arguments)


# What is written ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_target("llama")


@torch.no_grad()
def draft(target: PreTrainedModel, head: JetSpecDraftHead) -> torch.Tensor:
    """Draft logits after a fixed context."""
    draws = torch.Generator().manual_seed(5)
    features = torch.randn(1, 12, len(head.config.target_layer_ids) * 64, generator=draws).to(head.dtype)
    context = DraftContext(head, batch_size=1, start=0)
    context.append(CommittedTokens(features, torch.arange(12)[None], None, 12))
    state = DraftingState(target, head, context, head.config.block_size - 1)
    state.anchor_positions = torch.tensor([12])
    return head.draft_logits(torch.tensor([7]), state)


MIX = {"layer_types": [SLIDING, FULL], "sliding_window": 5, "num_hidden_layers": 2}
SLIDES = {"layer_types": [SLIDING], "sliding_window": 5}
YARN = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 64}
# The heads each format says everything of.
EXPRESSIBLE: dict[str, dict[str, dict[str, Any]]] = {
    "jetspec": {
        "all of it": {
            **MIX,
            "causal": {FULL: True, SLIDING: False},
            "branch_rank": 3,
            "draft_token_ids": [1, 5, 77],
            "embedding_scale": 2.0,
            "final_logit_softcapping": 5.0,
            "rope_parameters": YARN,
        },
    },
    "published": {
        "causal": {},
        "bidirectional": {"causal": False, "target_layer_ids": [0]},
        "interleaved": {**MIX, "causal": {FULL: False, SLIDING: True}},
        "biases": {"attention_bias": True, "rms_norm_eps": 1e-5},
        "scaled": {"logit_scale": 0.5, "final_logit_softcapping": 3.0},
        "yarn": {"rope_parameters": YARN},
    },
    "nemo": {"causal": {}, "bidirectional": {"causal": False}},
    "speculators": {
        "bidirectional": {"causal": False, "target_layer_ids": [0]},
        "sliding causal": {**SLIDES, "target_layer_ids": [0]},
        "sliding bidirectional": {**SLIDES, "causal": False, "target_layer_ids": [0]},
        "interleaved": {**MIX, "causal": {FULL: False, SLIDING: True}, "target_layer_ids": [0]},
        "part of the vocabulary": {"causal": False, "draft_token_ids": [0, 4, 99, 127], "target_layer_ids": [0]},
        "scaled": {"causal": False, "logit_scale": 0.5, "target_layer_ids": [0]},
    },
    "transformers": {
        "bidirectional": {"causal": False},
        "interleaved": {**MIX, "causal": False},
    },
}
CASES = [(format, name) for format, heads in EXPRESSIBLE.items() for name in heads]
# What a drafted token does not depend on, or what another format says in other words.
UNRECORDED = {
    "transformers_version",
    "architectures",
    "initializer_range",
    "attention_dropout",
    "_name_or_path",
    "dtype",
    "causal",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("format", "name"), CASES)
def test_a_round_trip_keeps_every_weight_and_draft(
    llama: PreTrainedModel, tmp_path: Path, format: str, name: str, dtype: torch.dtype
) -> None:
    head = random_head(llama, block_size=4, target_name_or_path="some/target", **EXPRESSIBLE[format][name]).to(dtype)
    write_checkpoint(head, tmp_path / "head", format, target=llama)
    read = read_checkpoint(tmp_path / "head", target=llama)
    assert read.dtype == dtype
    weights, expected = read.state_dict(), head.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    before, after = head.config.to_dict(), read.config.to_dict()
    assert {key for key in before | after if before.get(key) != after.get(key)} <= UNRECORDED
    assert [read.config.is_causal(kind) for kind in read.config.layer_types] == [
        head.config.is_causal(kind) for kind in head.config.layer_types
    ]
    assert torch.equal(draft(llama.to(dtype), read), draft(llama, head))
    llama.float()


def by_vllm(config: dict[str, Any], layer: int) -> bool:
    dflash = config["dflash_config"]
    said = config.get("is_causal")
    said = dflash.get("causal") if said is None else said
    return bool(config["layer_types"][layer] == SLIDING if said is None else said)


def by_sglang(config: dict[str, Any], layer: int) -> bool:
    return bool(config["layer_types"][layer] == SLIDING)


def by_the_official_code(config: dict[str, Any], layer: int) -> bool:
    return bool(config["dflash_config"].get("causal_head", False))


def by_nemo(config: dict[str, Any], layer: int) -> bool:
    return bool(config["dflash_config"].get("causal", False))


READERS: dict[str, Callable[[dict[str, Any], int], bool]] = {
    "vLLM": by_vllm,
    "SGLang": by_sglang,
    "official code": by_the_official_code,
    "NeMo": by_nemo,
}
LAYERS: dict[str, dict[str, Any]] = {
    "full": {"num_hidden_layers": 2},
    "sliding": {**SLIDES, "layer_types": [SLIDING] * 2, "num_hidden_layers": 2},
    "mixed": MIX,
}


@pytest.mark.parametrize("causal", [True, False, {FULL: False, SLIDING: True}])
@pytest.mark.parametrize("layers", LAYERS)
def test_who_reads_a_published_head_reads_its_causality_or_is_named_in_a_warning(
    llama: PreTrainedModel, tmp_path: Path, layers: str, causal: Any
) -> None:
    head = random_head(llama, block_size=4, causal=causal, **LAYERS[layers])
    warnings = write_checkpoint(head, tmp_path / "head", "published")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    meant = [head.config.is_causal(kind) for kind in head.config.layer_types]
    about = " ".join(warning for warning in warnings if warning.startswith("`causal`"))
    for name, reader in READERS.items():
        if [reader(config, layer) for layer in range(2)] != meant:
            assert name in about or name == "NeMo", (name, warnings)
    if isinstance(causal, bool):  # all the keys there are say it
        dflash = config["dflash_config"]
        assert (config["is_causal"], dflash["causal"], dflash["causal_head"]) == (causal, causal, causal)
        assert ("SGLang" in about) == (layers not in {False: ["full"], True: ["sliding"]}[causal])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("published", {"embedding_scale": 2.0}, "`embedding_scale` must be 1"),
    ("transformers", {"causal": False, "embedding_scale": 2.0}, "`embedding_scale` must be 1"),
    ("transformers", {"causal": False, "attention_bias": True}, "`attention_bias` must be false"),
    ("transformers", {}, "`causal` must be false"),
    ("transformers", {**MIX, "causal": {FULL: False, SLIDING: True}}, "`causal` must be false"),
    ("speculators", {"target_layer_ids": [0]}, "`causal` must be false for full-attention layers"),
    (
        "speculators",
        {"causal": False, "target_layer_ids": [0, 1]},
        "`target_layer_ids` must not have the target's last",
    ),
    ("published", {**MIX, "causal": {FULL: True, SLIDING: False}}, "`causal` must not be true of full-attention"),
]


@pytest.mark.parametrize(("format", "fields", "message"), REFUSED)
def test_a_head_is_refused_where_its_weights_would_mean_something_else(
    llama: PreTrainedModel, tmp_path: Path, format: str, fields: dict[str, Any], message: str
) -> None:
    head = random_head(llama, block_size=4, target_name_or_path="some/target", **fields)
    with pytest.raises(ValueError, match=message):
        write_checkpoint(head, tmp_path / "head", format, target=llama)
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("format", "fields", "word"),
    [
        ("published", {"branch_rank": 3}, "branch_rank"),
        ("speculators", {"branch_rank": 3, "causal": False, "target_layer_ids": [0]}, "branch_rank"),
        ("published", {"draft_token_ids": [3, 4]}, "draft_vocab_size"),
        ("transformers", {"draft_token_ids": [3, 4], "causal": False}, "draft_vocab_size"),
        ("published", {"hidden_act": "gelu"}, "hidden_act"),
        ("published", MIX, "layer_types"),
        ("transformers", {"causal": False, "logit_scale": 2.0}, "logit_scale"),
        ("speculators", {"causal": False, "final_logit_softcapping": 9.0, "target_layer_ids": [0]}, "final_logit_soft"),
        ("published", {"target_layer_ids": [0, 1]}, "target_layer_ids"),
        ("nemo", {}, "dflash_meta.pt"),
    ],
)
def test_what_an_engine_cannot_say_is_a_warning_and_the_rest_is_read_back(
    llama: PreTrainedModel, tmp_path: Path, format: str, fields: dict[str, Any], word: str
) -> None:
    head = random_head(llama, block_size=4, target_name_or_path="some/target", **fields)
    warnings = write_checkpoint(head, tmp_path / "head", format, target=llama)
    assert any(word in warning for warning in warnings)
    read = read_checkpoint(tmp_path / "head", target=llama)
    assert torch.equal(read.fc.weight, head.fc.weight)


def test_a_head_that_a_format_says_everything_of_is_written_without_a_warning(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    head = random_head(llama, block_size=4, causal=False, target_layer_ids=[0], target_name_or_path="some/target")
    for format in set(FORMATS) - {"nemo"}:
        assert write_checkpoint(head, tmp_path / format, format, target=llama) == [], format


def test_a_folder_with_a_checkpoint_is_not_written_over(llama: PreTrainedModel, tmp_path: Path) -> None:
    head = random_head(llama, block_size=4)
    write_checkpoint(head, tmp_path, "published")
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match=r"`folder` must hold no checkpoint"):
        write_checkpoint(random_head(llama, block_size=4, seed=1), tmp_path, "jetspec")
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_target_can_be_named_when_a_head_is_written(llama: PreTrainedModel, tmp_path: Path) -> None:
    head = random_head(llama, block_size=4, causal=False, target_layer_ids=[0])
    for format in FORMATS:
        write_checkpoint(head, tmp_path / format, format, target_name_or_path="the/target")
        assert read_checkpoint(tmp_path / format).config.target_name_or_path == "the/target", format
    assert head.config.target_name_or_path is None
    with pytest.raises(ValueError, match="`target_name_or_path` must be given"):
        write_checkpoint(head, tmp_path / "nameless", "speculators")


def test_a_reduced_vocabulary_is_written_with_the_targets_rows_and_offsets(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    drafted = [2, 3, 60]
    head = random_head(llama, block_size=4, causal=False, target_layer_ids=[0], draft_token_ids=drafted)
    with pytest.raises(ValueError, match="`target` must be given to write a draft vocabulary"):
        write_checkpoint(head, tmp_path, "speculators", target_name_or_path="the/target")
    write_checkpoint(head, tmp_path, "speculators", target=llama, target_name_or_path="the/target")
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].tolist() == [2, 2, 58]
    assert tensors["t2d"].nonzero().flatten().tolist() == drafted
    assert torch.equal(tensors["lm_head.weight"], llama.lm_head.weight[drafted])
    assert json.loads((tmp_path / "config.json").read_text())["aux_hidden_state_layer_ids"] == [1]


# Serving --------------------------------------------------------------------------------------------------------------


def test_the_lines_that_serve_a_head(llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    head = random_head(llama, block_size=8, causal=False, target_layer_ids=[0], target_name_or_path="the/target")
    for format in ("published", "speculators", "transformers"):
        write_checkpoint(head, format, format)
    assert serve_command("published") == (
        "vllm serve the/target --speculative-config "
        '\'{"method": "dflash", "model": "published", "num_speculative_tokens": 7}\''
    )
    assert serve_command("published", "sglang", target="my target") == (
        "python -m sglang.launch_server --model-path 'my target' --speculative-algorithm DFLASH "
        "--speculative-draft-model-path published --speculative-num-draft-tokens 8"
    )
    assert serve_command("speculators") == "vllm serve speculators"
    for path, engine, message in (
        ("transformers", "vllm", "in the transformers one: write it"),
        ("speculators", "sglang", "sglang reads heads in the format published"),
        ("published", "tgi", "`engine` must be one of vllm, sglang"),
        (GOLDEN / "published_causal", "vllm", "`target` must be given"),
    ):
        with pytest.raises(ValueError, match=message):
            serve_command(path, engine)


# Stock transformers ---------------------------------------------------------------------------------------------------


def stock_drafts(target: PreTrainedModel, head: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens that transformers' own chain drafter proposes with this assistant, step by step."""
    drafted: list[list[int]] = []
    original = candidate_generator.DFlashTokenCandidateGenerator.get_candidates

    def spy(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        candidates = original(self, input_ids, *args, **kwargs)
        if candidates[0].shape[1] > input_ids.shape[1]:
            drafted.append(candidates[0][0, input_ids.shape[1] :].tolist())
        return candidates

    with monkeypatch.context() as patched:
        patched.setattr(candidate_generator.DFlashTokenCandidateGenerator, "get_candidates", spy)
        decode(target, head, speculation_type="dflash")
    return drafted


def decode(target: PreTrainedModel, head: Any, **kwargs: Any) -> torch.Tensor:
    prompt = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    tokens: torch.Tensor = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=head,
        max_new_tokens=12,
        do_sample=False,
        **kwargs,
    )
    return tokens


@pytest.mark.contract
@pytest.mark.parametrize("causal", [True, False])
def test_a_saved_head_drafts_the_same_in_stock_transformers(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    head = random_head(llama, block_size=5, causal=causal, num_hidden_layers=2, target_layer_ids=[0])
    ours: list[list[int]] = []
    original = head.draft_logits

    def spy(*args: Any) -> torch.Tensor:
        logits = original(*args)
        ours.append(logits[0].argmax(-1).tolist())
        return logits

    head.draft_logits = spy
    head.generation_config.update(tree_budget=4, tree_width=1)
    decode(llama, head)
    del head.draft_logits
    write_checkpoint(head, tmp_path, "jetspec")
    stock = stock_drafts(llama, AutoModel.from_pretrained(tmp_path), monkeypatch)
    assert len(stock) >= 8
    assert len({tuple(drafts) for drafts in stock}) > 3
    for mine, theirs in zip(ours, stock, strict=False):
        length = min(len(mine), len(theirs))
        assert mine[:length] == theirs[:length]


@NATIVE
@pytest.mark.contract
@pytest.mark.parametrize(("window", "exact"), [(None, True), (64, True), (5, False)])
def test_a_head_written_for_transformers_drafts_the_same_as_its_own_class_there(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int | None, exact: bool
) -> None:
    layers = {"num_hidden_layers": 2} if window is None else {**MIX, "sliding_window": window}
    head = random_head(llama, block_size=5, causal=False, target_layer_ids=[0], **layers)
    warnings = write_checkpoint(head, tmp_path, "transformers")
    assert any("`sliding_window`" in warning for warning in warnings) == (window is not None)
    assistant = AutoModel.from_pretrained(tmp_path)
    assert type(assistant).__name__ == "MuseGlimmerAssistantModel"
    theirs, ours = (stock_drafts(llama, model, monkeypatch) for model in (assistant, head))
    assert theirs[0] == ours[0]  # past the window later steps lack a position there
    assert not exact or theirs == ours
