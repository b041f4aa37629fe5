"""The head works with what people put around a model: adapters, offloading, other dtypes, pipelines, stock decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import GenerationConfig, PreTrainedModel, pipeline

from jetspec_hf import JetSpecDraftHead, JetSpecHead
from support.char_tokenizer import letter_tokenizer
from support.oracle import OracleHead
from support.recording import Fingerprint
from support.references import PROMPT_LENGTHS, Reference, greedy_reference, left_padded, random_prompts
from support.tiny_targets import tiny_target
from support.versions import CACHE

NEW_TOKENS = 20
batches = pytest.mark.parametrize("batch", [1, 3])


def decode(target: Any, head: JetSpecDraftHead | None, reference: Reference, **kwargs: Any) -> torch.Tensor:
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **kwargs}
    return target.generate(**reference.inputs, assistant_model=head, **settings)


def peft_reference(model: Any, batch: int) -> Reference:
    """What the adapted model's own plain `generate` returns."""
    ids, mask = left_padded(random_prompts(PROMPT_LENGTHS[batch], 3))
    sequences = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS)
    return Reference(ids, mask, sequences)


# peft 0.21.2 reads an attribute and passes an argument that transformers 5.24 has renamed, and drops position ids.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache` are set:FutureWarning")
@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning")
class TestPeft:
    @batches
    def test_a_lora_target_decodes_its_own_text(self, target: PreTrainedModel, batch: int) -> None:
        unadapted = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
        model = get_peft_model(target, config).eval()
        plain = model.generate(**unadapted.inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
        assert not torch.equal(plain, unadapted.sequences)
        head = OracleHead.from_target(target, block_size=6)
        head.know(Reference(**unadapted.inputs, sequences=plain).texts, accuracy=0.8)
        before = Fingerprint.of(model)
        assert torch.equal(decode(model, head, unadapted), plain)
        assert head.last_acceptance.mean_acceptance_length > 1.5
        before.assert_unchanged(model)
        head.know(unadapted.texts, accuracy=0.8)
        with model.disable_adapter():
            assert torch.equal(decode(model, head, unadapted), unadapted.sequences)

    def test_a_head_can_be_made_for_a_lora_target(self, target: PreTrainedModel) -> None:
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(target, config).eval()
        head = JetSpecDraftHead.from_target(model, block_size=6)
        head.check_target(model)
        reference = peft_reference(model, 1)
        assert torch.equal(decode(model, head, reference), reference.sequences)

    @batches
    def test_prompt_tuning_is_exact_or_refused(self, target: PreTrainedModel, batch: int) -> None:
        """With transformers 5.24 peft 0.21.2 does not find the cache, and repeats its tokens at every step."""
        head = OracleHead.from_target(target, block_size=6)
        model = get_peft_model(target, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
        fed: list[int] = []
        hook = target.get_decoder().layers[0].register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1]))
        reference = peft_reference(model, batch)
        hook.remove()
        head.know([[0] * 4 + text for text in reference.texts], accuracy=0.8)  # virtual tokens count as positions
        if max(fed[1:]) > 1:
            with pytest.raises(ValueError, match="PEFT"):
                decode(model, head, reference)
            assert head.calls == 0
        else:
            assert torch.equal(decode(model, head, reference), reference.sequences)
            assert head.last_acceptance.mean_acceptance_length > 1.5

    @batches
    def test_prefix_tuning_is_exact_or_refused(self, target: PreTrainedModel, batch: int) -> None:
        """With transformers 5.24 peft 0.21.2 loses the prefix, but not its columns of the mask."""
        head = OracleHead.from_target(target, block_size=6)
        model = get_peft_model(target, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
        reference = peft_reference(model, batch)
        head.know(reference.texts, accuracy=0.8, must_match=False)
        refusal = None
        try:
            assert torch.equal(decode(model, head, reference), reference.sequences)
        except ValueError as error:
            refusal = error
        assert refusal is None or ("PEFT" in str(refusal) and head.calls == 0)


class TestDevicesAndTypes:
    @pytest.mark.parametrize("name", ["llama", "gemma3_text"])
    @batches
    def test_an_offloaded_target_gives_its_plain_tokens(self, name: str, batch: int) -> None:
        target = tiny_target(name)
        reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
        oracle = OracleHead.from_target(target, block_size=6).know(reference.texts, accuracy=0.8)
        untrained = JetSpecDraftHead.from_target(target, block_size=6)
        cpu_offload(target, execution_device="cpu")
        assert target.lm_head.weight.device.type == "meta"
        for head in (oracle, untrained, JetSpecDraftHead.from_target(target, block_size=6)):
            assert torch.equal(decode(target, head, reference), reference.sequences)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    @batches
    def test_a_head_of_another_dtype_drafts_for_a_float32_target(
        self, target: PreTrainedModel, batch: int, dtype: torch.dtype
    ) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
        head = JetSpecDraftHead.from_target(target, block_size=6).to(dtype)
        assert torch.equal(decode(target, head, reference), reference.sequences)
        assert head.dtype == dtype

    @batches
    def test_a_float32_head_drafts_for_a_bfloat16_target(self, target: PreTrainedModel, batch: int) -> None:
        """In bfloat16 tokens may differ from one-token decoding at a tie, so only their number is compared."""
        target.to(torch.bfloat16)
        head = JetSpecDraftHead.from_target(target, block_size=6)
        assert head.dtype == torch.bfloat16
        head.float()
        ids, mask = left_padded(random_prompts(PROMPT_LENGTHS[batch], 3))
        decoded = decode(target, head, Reference(ids, mask, ids))
        assert decoded.shape == (batch, ids.shape[1] + NEW_TOKENS)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
    @batches
    def test_head_and_target_may_be_on_different_devices(
        self, target: PreTrainedModel, devices: tuple[str, str], batch: int
    ) -> None:
        target.to(devices[0])
        head = JetSpecDraftHead.from_target(target, block_size=6).to(devices[1])
        ids, mask = (tensor.to(devices[0]) for tensor in left_padded(random_prompts(PROMPT_LENGTHS[batch], 3)))
        plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS)
        assert torch.equal(decode(target, head, Reference(ids, mask, plain)), plain)

    @batches
    def test_inference_mode_around_a_generation_changes_nothing(self, target: PreTrainedModel, batch: int) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
        oracle = OracleHead.from_target(target, block_size=6).know(reference.texts, accuracy=0.8)
        for head in (oracle, JetSpecDraftHead.from_target(target, block_size=6)):
            with torch.inference_mode():
                assert torch.equal(decode(target, head, reference), reference.sequences)
            assert torch.equal(decode(target, head, reference), reference.sequences)

    def test_a_cache_from_inference_mode_continues_outside_of_it(self, target: PreTrainedModel) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[1], NEW_TOKENS)
        head = JetSpecDraftHead.from_target(target, block_size=6)
        with torch.inference_mode():
            first = decode(target, head, reference, max_new_tokens=7, return_dict_in_generate=True)
        inputs = Reference(first.sequences.clone(), torch.ones_like(first.sequences).clone(), reference.sequences)
        decoded = decode(target, head, inputs, max_new_tokens=NEW_TOKENS - 7, **{CACHE: first[CACHE]})
        assert torch.equal(decoded, reference.sequences)


class TestTransformers:
    @pytest.fixture
    def spelling(self, target: PreTrainedModel) -> dict[str, Any]:
        """What a pipeline needs besides the head."""
        target.generation_config.max_new_tokens = NEW_TOKENS
        target.generation_config.do_sample = False
        return {"model": target, "tokenizer": letter_tokenizer()}

    def test_a_pipeline_writes_the_plain_text(self, target: PreTrainedModel, spelling: dict[str, Any]) -> None:
        head = OracleHead.from_target(target, block_size=6)
        prompt = "stakilomenu"
        plain = pipeline("text-generation", **spelling)(prompt)
        ids = spelling["tokenizer"](prompt).input_ids
        text = target.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long))
        head.know(text.tolist(), accuracy=0.9)
        assert pipeline("text-generation", **spelling, assistant_model=head)(prompt) == plain
        assert head.last_acceptance.mean_acceptance_length > 2

    def test_a_pipeline_over_several_prompts_writes_the_plain_texts(
        self, target: PreTrainedModel, spelling: dict[str, Any]
    ) -> None:
        head = JetSpecDraftHead.from_target(target, block_size=6)
        prompts = ["stakilomenu", "go", "nuhipajo"]
        plain = pipeline("text-generation", **spelling)(prompts, batch_size=3)
        assert pipeline("text-generation", **spelling, assistant_model=head)(prompts, batch_size=3) == plain

    def test_stock_decoding_runs_the_same_head_as_a_chain_drafter(self, target: PreTrainedModel) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[1], NEW_TOKENS)
        for causal in (True, False):
            head = JetSpecDraftHead.from_target(target, block_size=6, causal=causal)
            decoded = decode(target, head, reference, speculation_type="dflash")
            assert torch.equal(decoded, reference.sequences)
            assert getattr(head, "last_acceptance", None) is None

    def test_the_knobs_are_saved_beside_the_weights(self, target: PreTrainedModel, tmp_path: Path) -> None:
        head = JetSpecHead.from_target(target, block_size=6)
        head.generation_config.tree_budget = 7
        head.generation_config.tree_width = 2
        head.generation_config.draft_depth = 3
        head.save_pretrained(tmp_path)
        assert (tmp_path / "generation_config.json").exists()
        loaded = JetSpecHead.from_pretrained(tmp_path)
        knobs = loaded.generation_config
        assert (knobs.tree_budget, knobs.tree_width, knobs.draft_depth) == (7, 2, 3)
        reference = greedy_reference(target, PROMPT_LENGTHS[1], NEW_TOKENS)
        decode(target, loaded, reference)
        assert loaded.last_acceptance.tree_sizes[0] == 7
        assert loaded.last_acceptance.last_tree.max_depth <= 3

    def test_without_a_choice_the_budget_is_auto(self, target: PreTrainedModel, tmp_path: Path) -> None:
        head = JetSpecHead.from_target(target, block_size=6)
        assert head.generation_config.tree_budget == "auto"
        head.save_pretrained(tmp_path)
        assert JetSpecHead.from_pretrained(tmp_path).generation_config.tree_budget == "auto"

    def test_a_call_overrides_the_target_which_overrides_the_head(
        self, target: PreTrainedModel, head: OracleHead
    ) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[1], NEW_TOKENS)
        head.know(reference.texts).draft_with(tree_budget=3, tree_width=2)

        def first_tree_size(**kwargs: Any) -> int:
            assert torch.equal(decode(target, head, reference, **kwargs), reference.sequences)
            return head.last_acceptance.tree_sizes[0]

        assert first_tree_size() == 3
        target.generation_config.tree_budget = 5
        assert first_tree_size() == 5
        assert first_tree_size(tree_budget=9) == 9
        call = GenerationConfig(tree_budget=7, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        assert first_tree_size(generation_config=call) == 7
