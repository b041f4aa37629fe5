"""The draft head: causality, windows, rotary precision, loading and making."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, PreTrainedModel
from transformers.cache_utils import DFlashCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from jetspec_hf import JetSpecConfig, JetSpecDraftHead, JetSpecHead
from jetspec_hf.decoding.drafter import DraftContext, DraftingState, GrowingKeyValueCache
from support.tiny_targets import ARCHITECTURES, tiny_target

FIXTURES = Path(__file__).parent / "fixtures"
BLOCK, CONTEXT = 6, 10


def make_head(**fields: Any) -> JetSpecDraftHead:
    config = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "num_target_layers": 6,
        "mask_token_id": 127,
        "block_size": BLOCK,
        "initializer_range": 0.3,
        **fields,
    }
    return JetSpecDraftHead(JetSpecConfig(**config)).eval()


def inputs_of(head: JetSpecDraftHead, batch: int = 1, context: int = CONTEXT) -> dict[str, torch.Tensor]:
    width = head.config.hidden_size
    return {
        "noise_embeds": torch.randn(batch, BLOCK, width),
        "context_hidden_states": torch.randn(batch, context, len(head.config.target_layer_ids) * width),
    }


@torch.no_grad()
def run(head: JetSpecDraftHead, inputs: dict[str, torch.Tensor], **more: Any) -> torch.Tensor:
    states: torch.Tensor = head(**inputs, **more).last_hidden_state
    return states


def changed_rows(head: JetSpecDraftHead, inputs: dict[str, torch.Tensor], name: str, position: int) -> list[int]:
    """The block rows whose output changes when one position of an input changes."""
    other = {key: value.clone() for key, value in inputs.items()}
    other[name][:, position] += 1.0
    difference = (run(head, inputs) - run(head, other)).abs().amax(dim=(0, 2))
    return [row for row, value in enumerate(difference.tolist()) if value > 1e-6]


@pytest.mark.parametrize("position", range(BLOCK))
def test_in_a_causal_head_a_position_reaches_itself_and_later_rows_only(position: int) -> None:
    head = make_head()
    assert changed_rows(head, inputs_of(head), "noise_embeds", position) == list(range(position, BLOCK))


@pytest.mark.parametrize("position", range(BLOCK))
def test_in_a_bidirectional_head_a_position_reaches_every_row(position: int) -> None:
    head = make_head(causal=False)
    assert changed_rows(head, inputs_of(head), "noise_embeds", position) == list(range(BLOCK))


def test_causality_is_chosen_per_layer_kind() -> None:
    kinds = {"layer_types": ["sliding_attention"], "sliding_window": 100, "num_hidden_layers": 1}
    causal = {"full_attention": False, "sliding_attention": True}
    head = make_head(causal=causal, **kinds)
    assert changed_rows(head, inputs_of(head), "noise_embeds", 3) == [3, 4, 5]
    head = make_head(causal=causal, num_hidden_layers=1)
    assert changed_rows(head, inputs_of(head), "noise_embeds", 3) == list(range(BLOCK))


@pytest.mark.parametrize("position", range(CONTEXT))
def test_a_sliding_layer_sees_its_window_the_query_included(position: int) -> None:
    window = 4
    head = make_head(layer_types=["sliding_attention"], sliding_window=window, num_hidden_layers=1)
    expected = [row for row in range(BLOCK) if CONTEXT + row - position < window]
    assert changed_rows(head, inputs_of(head), "context_hidden_states", position) == expected


@pytest.mark.parametrize("layer_types", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cache_class", [GrowingKeyValueCache, None])
def test_a_context_fed_in_pieces_gives_what_it_gives_at_once(
    layer_types: list[str], causal: bool, cache_class: Any
) -> None:
    window = 4 if "sliding_attention" in layer_types else None
    head = make_head(layer_types=layer_types, sliding_window=window, causal=causal)
    inputs = inputs_of(head, context=100)
    expected = run(head, inputs)
    cache = cache_class() if cache_class else DFlashCache(config=head.config)
    if cache_class is None:
        cache.activate_past_recording()
    start = 0
    for end in (7, 8, 80, 100):
        piece = {**inputs, "context_hidden_states": inputs["context_hidden_states"][:, start:end]}
        positions = torch.arange(start, end + BLOCK)[None]
        states = run(head, piece, position_ids=positions, cache=cache)
        cache.crop(-BLOCK)
        start = end
    assert (states - expected).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 3])
def test_padding_and_holes_in_the_context_are_as_if_they_were_not_there(window: int | None) -> None:
    kind = "full_attention" if window is None else "sliding_attention"
    head = make_head(layer_types=[kind] * 2, sliding_window=window)
    inputs = inputs_of(head, batch=2)
    context_mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 0, 0, 1, 1]])
    mask = torch.cat([context_mask, torch.ones(2, BLOCK, dtype=torch.long)], dim=1)
    states = run(head, inputs, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    for row in range(2):
        alone = {
            "noise_embeds": inputs["noise_embeds"][row : row + 1],
            "context_hidden_states": inputs["context_hidden_states"][row : row + 1, context_mask[row].bool()],
        }
        assert (states[row] - run(head, alone)[0]).abs().max() < 1e-5


def test_rotary_frequencies_stay_float32_under_a_cast() -> None:
    head = make_head(rope_theta=1e6)
    before = head.rotary_emb.inv_freq.clone()
    head.to(torch.bfloat16)
    assert head.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(head.rotary_emb.inv_freq, before)
    expected = 1.0 / 1e6 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8)
    assert torch.equal(before, expected)


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}])
def test_scaled_rotary_embeddings_are_those_of_transformers(rope: dict[str, Any]) -> None:
    rope = {"rope_theta": 1e4, "original_max_position_embeddings": 64, **rope}
    head = make_head(rope_parameters=rope, max_position_embeddings=256)
    positions = torch.arange(300)[None]
    cos, sin = head.rotary_emb(positions, torch.float32)
    expected = Qwen3RotaryEmbedding(head.config)(torch.zeros(1), positions)
    assert (cos[:, 0] - expected[0]).abs().max() < 1e-6
    assert (sin[:, 0] - expected[1]).abs().max() < 1e-6


def test_a_saved_head_loads_the_same_through_both_names_and_automodel(tmp_path: Path) -> None:
    head = make_head(branch_rank=3, causal=False)
    head.generation_config.tree_budget = 9
    head.save_pretrained(tmp_path)
    inputs = inputs_of(head)
    for loader in (JetSpecHead, JetSpecDraftHead, AutoModel):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is JetSpecDraftHead
        assert torch.equal(run(loaded, inputs), run(head, inputs))
        assert torch.equal(loaded.branch.parent_proj.weight, head.branch.parent_proj.weight)
        assert loaded.generation_config.tree_budget == 9
        assert not loaded.training


def test_a_head_loads_in_another_dtype(tmp_path: Path) -> None:
    make_head().save_pretrained(tmp_path)
    assert JetSpecHead.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert JetSpecHead.from_pretrained(tmp_path, dtype="auto").dtype == torch.float32


def test_a_head_can_be_made_from_a_bare_state_dict() -> None:
    head = make_head()
    loaded = JetSpecHead.from_pretrained(None, config=head.config, state_dict=head.state_dict())
    assert torch.equal(loaded.fc.weight, head.fc.weight)


def test_a_published_head_loads_from_a_subfolder_in_both_spellings(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "official_causal" / "head", tmp_path / "deep" / "er")
    first = JetSpecHead.from_pretrained(str(tmp_path), subfolder="deep/er")
    second = JetSpecHead.from_pretrained(f"{tmp_path}::deep/er")
    assert torch.equal(first.fc.weight, second.fc.weight)
    assert first.generation_config.tree_budget == "auto"


@pytest.mark.parametrize("problem", ["missing", "unexpected", "shape"])
def test_a_checkpoint_whose_tensors_are_not_the_heads_is_refused(tmp_path: Path, problem: str) -> None:
    shutil.copytree(FIXTURES / "official_causal" / "head", tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    file.chmod(0o644)
    tensors = load_file(file)
    if problem == "missing":
        del tensors["fc.weight"]
    elif problem == "unexpected":
        tensors["candidate_selector.successor_codebook"] = torch.zeros(2, 2)
    else:
        tensors["fc.weight"] = torch.zeros(64, 64)
    save_file(tensors, file, metadata={"format": "pt"})
    name = "candidate_selector" if problem == "unexpected" else "fc.weight"
    with pytest.raises((ValueError, RuntimeError), match=name):
        JetSpecHead.from_pretrained(tmp_path / "head")


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "official_causal" / "head", tmp_path / "head")
    config = tmp_path / "head" / "config.json"
    config.chmod(0o644)
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}))
    (tmp_path / "head" / "dflash.py").write_text("raise SystemExit('remote code ran')")
    assert JetSpecHead.from_pretrained(tmp_path / "head").config.block_size == 8


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_fresh_head_fits_any_supported_target(name: str) -> None:
    target = tiny_target(name, ARCHITECTURES[name].backends[0])
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=4)
    head.check_target(target)
    assert head.config.hidden_size == target.get_input_embeddings().weight.shape[1]
    assert head.config.mask_token_id not in (0, 1, 2)
    assert not head.training


def test_a_fresh_head_takes_the_targets_dtype_and_special_tokens(target: PreTrainedModel) -> None:
    head = JetSpecDraftHead.from_target(copy.deepcopy(target).to(torch.bfloat16), num_hidden_layers=1)
    assert head.dtype == torch.bfloat16
    assert (head.config.pad_token_id, head.config.bos_token_id, head.config.eos_token_id) == (0, 1, 2)


def test_a_subclass_makes_heads_of_its_own_kind(target: PreTrainedModel) -> None:
    class Custom(JetSpecDraftHead):
        pass

    assert type(Custom.from_target(target, num_hidden_layers=1)) is Custom


@pytest.mark.parametrize(("field", "value"), [("vocab_size", 129), ("hidden_size", 32), ("num_target_layers", 3)])
def test_a_head_for_another_target_is_refused_with_both_values(target: PreTrainedModel, field: str, value: int) -> None:
    fields: dict[str, Any] = {"hidden_size": 64, "num_target_layers": 2, "target_layer_ids": [1], field: value}
    head = make_head(**fields)
    with pytest.raises(ValueError, match=rf"{field}.*{value}"):
        head.check_target(target)


def test_block_positions_default_to_those_after_the_context() -> None:
    head = make_head()
    inputs = inputs_of(head)
    explicit = run(head, inputs, position_ids=torch.arange(CONTEXT + BLOCK)[None])
    assert torch.equal(run(head, inputs), explicit)


class PlainState:
    """A drafting state with an identity for the target's embedding and `lm_head`, and no context."""

    def __init__(self, head: JetSpecDraftHead) -> None:
        self.anchor_positions = torch.zeros(1, dtype=torch.long)
        self.draft_depth = head.config.block_size - 1
        self.width = head.config.hidden_size

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.sin(token_ids[..., None] + torch.arange(self.width))

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * 10

    def run_block(self, head: JetSpecDraftHead, noise_embeds: torch.Tensor) -> torch.Tensor:
        empty = torch.zeros(1, 0, len(head.config.target_layer_ids) * self.width)
        return run(head, {"noise_embeds": noise_embeds, "context_hidden_states": empty})


@torch.no_grad()
def test_the_logits_are_scaled_and_then_capped_as_the_config_says() -> None:
    head = make_head()
    anchor, state = torch.tensor([5]), PlainState(head)
    bare = head.draft_logits(anchor, state)
    head.config.logit_scale = 0.5
    assert torch.equal(head.draft_logits(anchor, state), bare * 0.5)
    head.config.final_logit_softcapping = 3.0
    assert torch.allclose(head.draft_logits(anchor, state), 3.0 * torch.tanh(bare * 0.5 / 3.0))


@torch.no_grad()
def test_the_block_is_the_anchor_and_masks_under_the_scaled_embedding() -> None:
    head = make_head()
    state = PlainState(head)
    head.config.embedding_scale = 2.0
    block = torch.tensor([[5, *[head.config.mask_token_id] * (BLOCK - 1)]])
    expected = state.project(state.run_block(head, state.embed(block) * 2.0)[:, 1:])
    assert torch.equal(head.draft_logits(torch.tensor([5]), state), expected)


@torch.no_grad()
@pytest.mark.parametrize("depth", [1, 3])
def test_a_causal_head_drafts_fewer_tokens_from_a_shorter_block_with_the_same_logits(depth: int) -> None:
    head = make_head()
    state = PlainState(head)
    whole = head.draft_logits(torch.tensor([5]), state)
    state.draft_depth = depth
    assert (head.draft_logits(torch.tensor([5]), state) - whole[:, :depth]).abs().max() < 1e-4


# A part of the vocabulary ---------------------------------------------------------------------------------------------

# Half precision rounds most of these.
LARGE_IDS = [0, 1, 257, 4099, 65_537, 99_998, 99_999]


def large_head(**fields: Any) -> JetSpecDraftHead:
    fields = {"vocab_size": 100_000, "mask_token_id": 9, "draft_vocab_size": len(LARGE_IDS), **fields}
    head = make_head(**fields)
    head.draft_token_ids = torch.tensor(LARGE_IDS)
    return head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_draft_vocabulary_is_saved_and_loaded_to_the_last_digit(tmp_path: Path, dtype: torch.dtype) -> None:
    head = large_head(branch_rank=2).to(dtype)
    assert head.draft_token_ids.tolist() == LARGE_IDS
    head.save_pretrained(tmp_path)
    for load_dtype in ("auto", torch.float32, torch.bfloat16, torch.float16):
        for loader in (JetSpecHead, AutoModel):
            loaded = loader.from_pretrained(tmp_path, dtype=load_dtype)
            assert loaded.draft_token_ids.dtype == torch.long
            assert loaded.draft_token_ids.tolist() == LARGE_IDS
            assert loaded.config.draft_vocab_size == len(LARGE_IDS)
            assert loaded.dtype == (dtype if load_dtype == "auto" else load_dtype)


def test_a_copied_or_halved_head_keeps_its_draft_vocabulary() -> None:
    head = large_head()
    for other in (copy.deepcopy(head), head.half(), head.bfloat16(), head.double()):
        assert other.draft_token_ids.dtype == torch.long
        assert other.draft_token_ids.tolist() == LARGE_IDS


def test_a_head_without_a_draft_vocabulary_saves_none(tmp_path: Path) -> None:
    make_head().save_pretrained(tmp_path)
    assert "draft_token_ids" not in load_file(tmp_path / "model.safetensors")
    assert JetSpecHead.from_pretrained(tmp_path).draft_token_ids is None


@pytest.mark.parametrize(
    "token_ids", [[3, 5, 127], (0,), range(128), torch.tensor([4, 9]), torch.tensor([4, 9], dtype=torch.int32)]
)
def test_a_head_is_made_with_the_tokens_it_shall_draft(target: PreTrainedModel, token_ids: Any) -> None:
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, draft_token_ids=token_ids)
    assert head.draft_token_ids.dtype == torch.long
    assert head.draft_token_ids.tolist() == [int(token) for token in token_ids]
    assert head.config.draft_vocab_size == len(token_ids)


REFUSED_LISTS = {
    "unsorted": ([3, 9, 7, 20], "7 after 9"),
    "repeated": ([3, 9, 9, 20], "9 after 9"),
    "below 0": ([-2, 3, 9, 20], "-2"),
    "beyond the vocabulary": ([3, 9, 20, 128], "128 after 20"),
}
refused_lists = pytest.mark.parametrize(("token_ids", "message"), REFUSED_LISTS.values(), ids=list(REFUSED_LISTS))


@refused_lists
def test_a_wrong_draft_vocabulary_is_refused_with_its_first_wrong_token(
    target: PreTrainedModel, token_ids: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"`draft_token_ids` must be .* 0 to 127 .*{message}"):
        JetSpecDraftHead.from_target(target, num_hidden_layers=1, draft_token_ids=token_ids)


def test_an_empty_draft_vocabulary_is_refused(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"`draft_vocab_size` must be `None` or an integer from 1 .* got 0"):
        JetSpecDraftHead.from_target(target, num_hidden_layers=1, draft_token_ids=[])


def test_a_draft_vocabulary_of_another_size_than_asked_for_is_refused(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"`draft_token_ids` must have `draft_vocab_size=3` tokens, got 2"):
        JetSpecDraftHead.from_target(target, num_hidden_layers=1, draft_token_ids=[3, 4], draft_vocab_size=3)


@refused_lists
def test_a_checkpoint_with_a_wrong_draft_vocabulary_is_refused(
    tmp_path: Path, token_ids: list[int], message: str
) -> None:
    head = make_head(draft_vocab_size=4)
    head.draft_token_ids = torch.tensor(token_ids)
    head.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"`draft_token_ids` must be .* 0 to 127 .*{message}"):
        JetSpecHead.from_pretrained(tmp_path)


@pytest.mark.parametrize("problem", ["missing", "shorter", "unexpected"])
def test_a_checkpoint_whose_draft_vocabulary_is_not_that_of_its_config_is_refused(tmp_path: Path, problem: str) -> None:
    head = make_head(draft_vocab_size=None if problem == "unexpected" else 4)
    head.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("draft_token_ids", None)
    if problem != "missing":
        tensors["draft_token_ids"] = torch.arange(3)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match="draft_token_ids"):
        JetSpecHead.from_pretrained(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"logit_scale": 0.5, "final_logit_softcapping": 2.0}])
def test_a_draft_vocabulary_gives_the_columns_of_its_tokens(target: PreTrainedModel, fields: dict[str, Any]) -> None:
    drafted = [3, 5, 70, 71, 127]
    make = functools.partial(JetSpecDraftHead.from_target, target, num_hidden_layers=1, block_size=BLOCK, **fields)
    part, whole = make(draft_token_ids=drafted), make()
    whole.load_state_dict({name: value for name, value in part.state_dict().items() if name != "draft_token_ids"})
    logits = {}
    for head in (part, whole):
        state = DraftingState(target, head, DraftContext(head, 2, 0), BLOCK - 1)
        logits[head] = head.draft_logits(torch.tensor([5, 6]), state)
    assert logits[part].shape == (2, BLOCK - 1, len(drafted))
    torch.testing.assert_close(logits[part], logits[whole][..., drafted], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("made_for", "given", "warnings"),
    [
        ("google/gemma-3-270m", "google/gemma-3-270m", 0),
        ("google/gemma-3-270m", "/models/gemma-3-270m/", 0),
        ("google/gemma-3-270m", "C:\\models\\gemma-3-270m", 0),
        ("google/gemma-3-270m", "google/gemma-3-270m-it", 1),
        ("google/gemma-3-270m", "", 0),
    ],
)
def test_a_target_of_another_name_is_a_warning_and_a_copy_in_a_folder_is_not(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, made_for: str, given: str, warnings: int
) -> None:
    target.config.name_or_path = given
    head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, target_name_or_path=made_for)
    messages: list[str] = []
    monkeypatch.setattr("jetspec_hf.target.logger.warning_once", messages.append)
    head.check_target(target)
    assert len(messages) == warnings
    assert all(made_for in message and given in message for message in messages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draft_token_ids": [[1, 2]]}, "`draft_token_ids` must be a list of tokens, got torch.int64 of shape"),
        ({"draft_token_ids": [3.5, 7.7]}, "`draft_token_ids` must be a list of tokens, got torch.float32"),
        ({"draft_vocab_size": 5}, "`draft_token_ids` must be given with `draft_vocab_size`, got none for 5"),
    ],
)
def test_a_draft_vocabulary_that_is_none_is_refused(
    target: PreTrainedModel, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        JetSpecDraftHead.from_target(target, num_hidden_layers=1, **arguments)
