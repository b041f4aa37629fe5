"""What training reads off a target: each document of a row as if it stood alone, and the target's own logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from jetspec_hf.target import decoder_layers
from jetspec_hf.training.target_reader import TargetReader, TargetStates
from support.tiny_targets import ARCHITECTURES, tiny_target, unsupported_target

LENGTHS = ((9, 1, 6), (13,), (2, 7))  # of the documents of three rows
WINDOWED = [name for name, architecture in ARCHITECTURES.items() if architecture.window]
# float32 rounding, in units of the states' own size: other kernels and other orders of sums
TOLERANCE = 1e-5


def make_target(name: str, **overrides: Any) -> PreTrainedModel:
    return tiny_target(name, ARCHITECTURES[name].backends[0], **overrides)


def make_rows(lengths: tuple[tuple[int, ...], ...], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and document ids of rows of documents, padded at one side."""
    longest = max(map(sum, lengths))
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    documents = torch.full_like(ids, -1)
    for row, counts in enumerate(lengths):
        start = longest - sum(counts) if side == "left" else 0
        for index, count in enumerate(counts):
            ids[row, start : start + count] = torch.randint(3, 128, (count,))
            documents[row, start : start + count] = index
            start += count
    return ids, documents


def read_alone(target: PreTrainedModel, layer_ids: list[int], ids: torch.Tensor) -> TargetStates:
    """The states of one document: the target's own forward, without mask and positions, and plain hooks."""
    tapped: dict[int, torch.Tensor] = {}

    def hook(layer_id: int) -> Any:
        def keep(_module: Any, _args: Any, output: Any) -> None:
            state = output[0] if isinstance(output, tuple) else output
            # of several copies of the residual stream, gemma3n's first is the active one
            tapped[layer_id] = state[target.config.altup_active_idx] if state.dim() == 4 else state

        return keep

    handles = [decoder_layers(target)[i].register_forward_hook(hook(i)) for i in layer_ids]
    with torch.no_grad():
        decoder = target.base_model if target.base_model is not target else target.model  # llama4 misnames its own
        last = decoder(input_ids=ids[None]).last_hidden_state
    for handle in handles:
        handle.remove()
    return TargetStates(torch.cat([tapped[i] for i in layer_ids], dim=-1), last)


def assert_documents_stand_alone(target: PreTrainedModel, lengths: tuple[tuple[int, ...], ...], side: str) -> None:
    layer_ids = [0, target.config.num_hidden_layers - 1]
    ids, documents = make_rows(lengths, side)
    states = TargetReader(target, layer_ids).read(ids, documents)
    for row in range(len(lengths)):
        for document in range(len(lengths[row])):
            place = documents[row] == document
            alone = read_alone(target, layer_ids, ids[row, place])
            for name in ("features", "last_hidden"):
                expected = getattr(alone, name)[0]
                error = (getattr(states, name)[row, place] - expected).abs().max() / expected.abs().max()
                assert error < TOLERANCE, (name, row, document, float(error))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_document_of_a_packed_row_is_read_as_if_alone(name: str, side: str) -> None:
    assert_documents_stand_alone(make_target(name), LENGTHS, side)


@pytest.mark.parametrize("lengths", [LENGTHS, ((3,), (11,))], ids=["packed", "unpacked"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", WINDOWED)
def test_windows_and_chunks_count_the_positions_of_the_document(
    name: str, side: str, lengths: tuple[tuple[int, ...], ...]
) -> None:
    assert_documents_stand_alone(make_target(name, **(ARCHITECTURES[name].window or {})), lengths, side)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "gemma3_text", "gemma4_text", "deepseek_v3", "falcon"])
def test_a_padded_row_is_read_as_if_alone(name: str, side: str) -> None:
    assert_documents_stand_alone(make_target(name), ((5,), (11,), (1,)), side)


def test_layers_that_share_keys_are_read_as_generation_runs_them() -> None:
    target = make_target("gemma3n_text", num_kv_shared_layers=2)
    ids, documents = make_rows(((7, 4),), "right")
    states = TargetReader(target, [3]).read(ids, documents)
    with torch.no_grad():
        logits = target(input_ids=ids[:, 7:], use_cache=True).logits
    assert (TargetReader(target, [3]).teacher_logits(states.last_hidden[:, 7:]) - logits).abs().max() < 1e-4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_teacher_logits_are_the_targets_own(name: str) -> None:
    target = make_target(name)
    ids = torch.randint(3, 128, (2, 9))
    reader = TargetReader(target, [0])
    hidden = reader.read(ids, torch.zeros_like(ids)).last_hidden
    with torch.no_grad():
        expected = target(input_ids=ids).logits
    assert (reader.teacher_logits(hidden) - expected).abs().max() < TOLERANCE * expected.abs().max()
    some = torch.tensor([1, 5, 70, 127])
    assert (reader.teacher_logits(hidden, some) - expected[..., some]).abs().max() < TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "fields", "factor", "cap"),
    [
        ("llama", {}, 1.0, None),
        ("granite", {"logits_scaling": 8.0}, 0.125, None),
        ("cohere", {"logit_scale": 0.0625}, 0.0625, None),
        ("gemma2", {"final_logit_softcapping": 2.0}, 1.0, 2.0),
        ("nanochat", {"final_logit_softcapping": 15.0}, 1.0, 15.0),
    ],
)
def test_scale_and_cap_are_found(name: str, fields: dict[str, Any], factor: float, cap: float | None) -> None:
    target = make_target(name, **fields)
    reader = TargetReader(target, [0])
    hidden = torch.randn(5, 64)
    bare = torch.nn.functional.linear(hidden, target.get_output_embeddings().weight) * factor
    expected = bare if cap is None else cap * torch.tanh(bare / cap)
    assert (reader.teacher_logits(hidden) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scale_and_cap_are_found_in_half_precision(dtype: torch.dtype) -> None:
    for name, fields in (("gemma2", {"final_logit_softcapping": 30.0}), ("granite", {"logits_scaling": 8.0})):
        target = make_target(name, **fields).to(dtype)
        ids = torch.randint(3, 128, (1, 9))
        reader = TargetReader(target, [0])
        logits = reader.teacher_logits(reader.read(ids, torch.zeros_like(ids)).last_hidden)
        expected = target(input_ids=ids).logits
        assert (logits - expected).abs().max() < 2e-2 * expected.abs().max()


def test_logits_that_are_no_function_we_know_are_refused() -> None:
    target = make_target("llama")
    parent = type(target)

    class Squared(parent):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            outputs.logits = outputs.logits**2
            return outputs

    target.__class__ = Squared
    with pytest.raises(ValueError, match=r"Squared deviate by \d"):
        TargetReader(target, [0])


def test_draft_logits_are_the_bare_output_layer_with_a_gradient_to_the_states_alone() -> None:
    target = make_target("gemma2", final_logit_softcapping=2.0)
    reader = TargetReader(target, [0])
    weight = target.get_output_embeddings().weight
    for token_ids in (None, torch.tensor([4, 9, 100])):
        hidden = torch.randn(3, 64, requires_grad=True)
        logits = reader.draft_logits(hidden, token_ids)
        rows = weight if token_ids is None else weight[token_ids]
        assert torch.allclose(logits, hidden @ rows.T, atol=1e-4)
        (gradient,) = torch.autograd.grad(logits.sum(), hidden)
        assert torch.allclose(gradient, rows.sum(dim=0).expand(3, -1), atol=1e-4)


def test_another_draft_vocabulary_replaces_the_rows_of_the_last() -> None:
    target = make_target("llama")
    reader, hidden = TargetReader(target, [0]), torch.randn(2, 64)
    full = reader.draft_logits(hidden)
    for token_ids in ([1, 2], [1, 2, 3], [4, 5]):
        assert torch.allclose(reader.draft_logits(hidden, torch.tensor(token_ids)), full[:, token_ids], atol=1e-5)


def test_reading_leaves_no_trace_and_runs_no_output_layer() -> None:
    target = make_target("llama")
    target.requires_grad_(True)
    reader = TargetReader(target, [0, 1])
    hooks = [len(module._forward_hooks) for module in target.modules()]
    called: list[Any] = []
    handle = target.get_output_embeddings().register_forward_hook(lambda *_: called.append(1))
    states = reader.read(*make_rows(LENGTHS, "right"))
    handle.remove()
    assert not called
    assert [len(module._forward_hooks) for module in target.modules()] == hooks
    assert not states.features.requires_grad
    assert not states.last_hidden.requires_grad
    assert not reader.embed(torch.tensor([1])).requires_grad


@pytest.mark.parametrize(("name", "word"), [("falcon", "alibi"), ("lfm2", "conv"), ("qwen3_next", "recurrent")])
def test_an_architecture_that_cannot_hold_documents_apart_is_refused(name: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        TargetReader(unsupported_target(name), [0])


def test_rotary_embeddings_that_look_at_the_longest_document_refuse_a_mixed_batch() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8, **factors}
    target = make_target("phi3", original_max_position_embeddings=8, rope_parameters=rope)
    with pytest.raises(ValueError, match="8 tokens"):
        TargetReader(target, [0]).read(*make_rows(((9,), (5,)), "right"))
    assert_documents_stand_alone(target, ((8, 8), (5,)), "right")  # the padding is longer than the limit
    assert_documents_stand_alone(target, ((9, 12),), "left")


# peft 0.21.2 reads an attribute that transformers 5.24 has renamed
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_learned_prompts_are_refused_and_adapters_are_read() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        make_target("llama"), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    ).eval()
    ids = torch.randint(3, 128, (1, 6))
    reader = TargetReader(adapted, [0])
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
    assert torch.allclose(
        reader.teacher_logits(reader.read(ids, torch.zeros_like(ids)).last_hidden), expected, atol=1e-4
    )
    prompted = peft.get_peft_model(
        make_target("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(ValueError, match="PromptTuningConfig"):
        TargetReader(prompted, [0])


def test_documents_whose_ids_come_again_do_not_see_each_other() -> None:
    reader = TargetReader(tiny_target("llama"), [0, 1])
    ids = torch.arange(3, 11)[None]
    again, distinct = torch.tensor([[0, 0, 1, 1, 0, 0, 0, 0]]), torch.tensor([[0, 0, 1, 1, 2, 2, 2, 2]])
    assert torch.equal(reader.read(ids, again).last_hidden, reader.read(ids, distinct).last_hidden)
