"""What cannot be exact is refused before any token, by name, and the target is left as it was, whatever raises.

Other assistants, beams and other threads are not disturbed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicLayer

from jetspec_hf import JetSpecDraftHead
from support.char_tokenizer import letter_tokenizer
from support.oracle import OracleHead
from support.recording import Fingerprint, RaisingStreamer, RecordingStreamer
from support.references import PROMPT_LENGTHS, Reference, greedy_reference, left_padded, random_prompts
from support.tiny_targets import UNSUPPORTED, tiny_target, unsupported_target
from support.versions import CACHE

NEW_TOKENS = 16


def head_of_size(target: PreTrainedModel) -> OracleHead:
    """A head whose sizes fit `target`, made for a llama: only what kind of target it is can be refused."""
    text_config = target.config.get_text_config(decoder=True)
    llama = tiny_target("llama", num_hidden_layers=text_config.num_hidden_layers)
    return OracleHead.from_target(llama, block_size=6).know([[5] * 40])


def assert_refused(
    target: PreTrainedModel,
    head: OracleHead,
    message: str,
    error: type[Exception] = ValueError,
    **kwargs: Any,
) -> None:
    """The call raises `error` with `message`, generates and drafts nothing, and changes nothing."""
    ids, mask = left_padded(random_prompts((7,), 1))
    before, streamer = Fingerprint.of(target), RecordingStreamer()
    settings = {"do_sample": False, "max_new_tokens": 8, "streamer": streamer, **kwargs}
    with pytest.raises(error, match=message):
        target.generate(ids, attention_mask=mask, assistant_model=head, **settings)
    assert streamer.generated == []
    assert head.calls == 0
    before.assert_unchanged(target)


class TestTargets:
    @pytest.mark.parametrize("name", UNSUPPORTED)
    def test_a_target_without_exact_trees_is_refused_by_generate(self, name: str) -> None:
        target = unsupported_target(name)
        assert_refused(target, head_of_size(target), type(target).__name__)

    @pytest.mark.parametrize("name", UNSUPPORTED)
    def test_a_target_without_exact_trees_gets_no_head(self, name: str) -> None:
        target = unsupported_target(name)
        with pytest.raises(ValueError, match=type(target).__name__):
            JetSpecDraftHead.from_target(target)
        with pytest.raises(ValueError, match=type(target).__name__):
            head_of_size(target).check_target(target)

    @pytest.mark.parametrize("backend", ["flash_attention_2", "flash_attention_3", "flex_attention"])
    def test_an_attention_backend_without_4d_masks_is_refused(self, target: PreTrainedModel, backend: str) -> None:
        head = head_of_size(target)
        target.config._attn_implementation = backend
        assert_refused(target, head, f"{backend}.*sdpa")

    def test_an_encoder_decoder_is_refused(self) -> None:
        config = T5Config(
            vocab_size=128,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=2,
        )
        target = T5ForConditionalGeneration(config).eval()
        assert_refused(target, head_of_size(target), "encoder-decoder")

    @pytest.mark.parametrize(
        ("field", "sizes"),
        [
            ("vocab_size", {"vocab_size": 96}),
            ("hidden_size", {"hidden_size": 32, "head_dim": 8}),
            ("num_target_layers", {"num_hidden_layers": 3}),
        ],
    )
    def test_a_head_for_another_target_is_refused(
        self, target: PreTrainedModel, field: str, sizes: dict[str, int]
    ) -> None:
        head = OracleHead.from_target(tiny_target("llama", **sizes), block_size=6).know([[5] * 40])
        with pytest.raises(ValueError, match=field):
            head.check_target(target)
        assert_refused(target, head, field)

    def test_a_target_of_another_name_is_warned_about(
        self, target: PreTrainedModel, head: OracleHead, caplog: pytest.LogCaptureFixture
    ) -> None:
        head.config.target_name_or_path, target.config.name_or_path = "made-for/this", "used-with/that"
        reference = greedy_reference(target, PROMPT_LENGTHS[1], NEW_TOKENS)
        head.know(reference.texts)
        with caplog.at_level(logging.WARNING):
            decoded = target.generate(
                **reference.inputs, do_sample=False, max_new_tokens=NEW_TOKENS, assistant_model=head
            )
        assert torch.equal(decoded, reference.sequences)
        assert "made-for/this" in caplog.text
        assert "used-with/that" in caplog.text

    def test_code_that_masks_in_its_own_way_is_found_by_the_numbers(self, target: PreTrainedModel) -> None:
        """A target that looks like any other, but whose attention ignores the mask it is given."""
        head = head_of_size(target)
        for layer in target.model.layers:
            attention = layer.self_attn
            attention.forward = _without_mask(attention.forward)
        assert_refused(target, head, type(target).__name__)


def _without_mask(forward: Callable[..., Any]) -> Callable[..., Any]:
    def causal_only(*args: Any, **kwargs: Any) -> Any:
        kwargs["attention_mask"] = None
        return forward(*args, **kwargs)

    return causal_only


class UnknownLayer(DynamicLayer):
    """A cache layer of a kind nobody has checked."""


class TestArguments:
    def test_a_quantised_cache_is_refused(self, target: PreTrainedModel, head: OracleHead) -> None:
        head.know([[5] * 40])
        assert_refused(target, head, "quantized", cache_implementation="quantized")

    def test_a_cache_of_unknown_layers_is_refused(self, target: PreTrainedModel, head: OracleHead) -> None:
        head.know([[5] * 40])
        cache = DynamicCache(config=target.config)
        cache.layers = [UnknownLayer() for _ in cache.layers]
        assert_refused(target, head, "UnknownLayer", **{CACHE: cache})

    def test_a_static_cache_longer_than_the_window_is_refused(self) -> None:
        target = tiny_target("mistral", sliding_window=4)
        head = OracleHead.from_target(target, block_size=6).know([[5] * 40])
        assert_refused(target, head, "window", cache_implementation="static")

    def test_an_assistant_tokenizer_is_refused(self, target: PreTrainedModel, head: OracleHead) -> None:
        head.know([[5] * 40])
        tokenizer = letter_tokenizer()
        assert_refused(target, head, "assistant_tokenizer", tokenizer=tokenizer, assistant_tokenizer=letter_tokenizer())

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("assistant_ensemble_weight", 0.5),
            ("use_cache", False),
            ("num_return_sequences", 2),
            ("prompt_lookup_num_tokens", 3),
            ("assistant_early_exit", 1),
        ],
    )
    def test_what_contradicts_exact_drafting_is_refused_by_name(
        self, target: PreTrainedModel, head: OracleHead, name: str, value: object
    ) -> None:
        head.know([[5] * 40])
        settings = {"do_sample": True} if name == "num_return_sequences" else {}
        assert_refused(target, head, name, **{name: value}, **settings)

    @pytest.mark.parametrize("name", ["output_attentions"])
    def test_attentions_are_refused(self, target: PreTrainedModel, head: OracleHead, name: str) -> None:
        head.know([[5] * 40])
        target.set_attn_implementation("eager")
        assert_refused(target, head, name, return_dict_in_generate=True, **{name: True})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("tree_budget", -1),
            ("tree_budget", 2.5),
            ("tree_budget", 10**9),
            ("tree_budget", "many"),
            ("tree_width", 0),
            ("tree_width", "wide"),
            ("draft_depth", 0),
            ("draft_depth", 6),
        ],
    )
    def test_a_knob_out_of_range_is_refused(
        self, target: PreTrainedModel, head: OracleHead, name: str, value: object
    ) -> None:
        head.know([[5] * 40])
        setattr(head.generation_config, name, value)
        assert_refused(target, head, name)


class FaultyProcessor(LogitsProcessor):
    """Raises at its fifth call."""

    def __init__(self) -> None:
        self.left = 4

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.left == 0:
            raise RuntimeError("the processor broke")
        self.left -= 1
        return scores


class FaultyCriterion(StoppingCriteria):
    """Raises at its fifth call."""

    def __init__(self) -> None:
        self.left = 4

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.left == 0:
            raise RuntimeError("the criterion broke")
        self.left -= 1
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class FaultyHead(OracleHead):
    """Raises at its second draft."""

    def draft_logits(self, anchor_ids: torch.Tensor, state: Any) -> torch.Tensor:
        if self.calls == 1:
            raise RuntimeError("the head broke")
        return super().draft_logits(anchor_ids, state)


def faulty_forward(target: PreTrainedModel) -> None:
    """Makes the second layer raise in the third forward of a generation; the self-test must be over by then."""
    calls = iter(range(100))

    def hook(*_: Any) -> None:
        if next(calls) == 2:
            raise RuntimeError("the target broke")

    target.get_decoder().layers[1].register_forward_pre_hook(hook)


FAULTS: dict[str, Callable[[], dict[str, Any]]] = {
    "streamer": lambda: {"streamer": RaisingStreamer(5)},
    "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([FaultyCriterion()])},
    "processor": lambda: {"logits_processor": LogitsProcessorList([FaultyProcessor()])},
    "head": dict,
    "target": dict,
}


class TestAfterAnException:
    def raise_in_the_loop(self, target: PreTrainedModel, reference: Reference, fault: str, **kwargs: Any) -> OracleHead:
        """Generates until the fault raises, and checks that the target is what it was before."""
        cls = FaultyHead if fault == "head" else OracleHead
        head = cls.from_target(target, block_size=6, num_hidden_layers=1).know(reference.texts)
        target.generate(**reference.inputs, max_new_tokens=1, assistant_model=head)  # runs the self-test
        if fault == "target":
            faulty_forward(target)
        before = Fingerprint.of(target)
        with pytest.raises(RuntimeError, match=r"broke|hung up"):
            target.generate(
                **reference.inputs,
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                assistant_model=head,
                **FAULTS[fault](),
                **kwargs,
            )
        before.assert_unchanged(target)
        return head

    @pytest.mark.parametrize("fault", FAULTS)
    @pytest.mark.parametrize("batch", [1, 3])
    def test_the_target_is_as_it_was_and_decodes_on(self, target: PreTrainedModel, batch: int, fault: str) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
        self.raise_in_the_loop(target, reference, fault)
        settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
        assert torch.equal(target.generate(**reference.inputs, **settings), reference.sequences)
        head = OracleHead.from_target(target, block_size=6).know(reference.texts)
        decoded = target.generate(**reference.inputs, assistant_model=head, **settings)
        assert torch.equal(decoded, reference.sequences)

    @pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "target"])
    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize("name", ["llama", "gemma3_text"])
    def test_a_given_cache_holds_committed_tokens_only(self, name: str, batch: int, fault: str) -> None:
        """Its keys are those of the plain text, slot by slot, and it may be used on."""
        target = tiny_target(name)
        reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
        plain = DynamicCache(config=target.config)
        settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
        target.generate(**reference.inputs, **settings, **{CACHE: plain})
        cache = DynamicCache(config=target.config)
        self.raise_in_the_loop(target, reference, fault, **{CACHE: cache})
        length = cache.get_seq_length()
        assert 12 <= length < reference.sequences.shape[1]
        for ours, theirs in zip(cache.layers, plain.layers, strict=True):
            visible = reference.attention_mask[:, None, :, None].bool()
            same = (ours.keys[:, :, :12] - theirs.keys[:, :, :12]).abs() < 1e-4
            assert (same | ~visible).all()
            if batch == 1:  # rows of a batch advance raggedly, and the shorter ones are aligned to the right
                torch.testing.assert_close(ours.keys, theirs.keys[:, :, :length], atol=1e-4, rtol=1e-4)


class TestBesideOthers:
    @pytest.fixture
    def propagating(self) -> Iterator[None]:
        transformers.logging.enable_propagation()
        yield
        transformers.logging.disable_propagation()

    @pytest.mark.usefixtures("propagating")
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_beams_ignore_the_head_with_a_warning(
        self, target: PreTrainedModel, head: OracleHead, caplog: pytest.LogCaptureFixture, do_sample: bool
    ) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[3], NEW_TOKENS)
        head.know(reference.texts)
        settings = {"num_beams": 3, "do_sample": do_sample, "max_new_tokens": NEW_TOKENS}
        torch.manual_seed(1)
        plain = target.generate(**reference.inputs, **settings)
        torch.manual_seed(1)
        with caplog.at_level(logging.WARNING):
            decoded = target.generate(**reference.inputs, assistant_model=head, **settings)
        assert torch.equal(decoded, plain)
        assert "assistant_model" in caplog.text
        assert head.calls == 0

    def test_another_assistant_works_as_ever(self, target: PreTrainedModel) -> None:
        assistant = tiny_target("llama", num_hidden_layers=1)
        reference = greedy_reference(target, PROMPT_LENGTHS[1], NEW_TOKENS)
        settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
        decoded = target.generate(**reference.inputs, assistant_model=assistant, **settings)
        assert torch.equal(decoded, reference.sequences)

    def test_prompt_lookup_works_as_ever(self, target: PreTrainedModel) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[1], NEW_TOKENS)
        settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
        decoded = target.generate(**reference.inputs, prompt_lookup_num_tokens=3, **settings)
        assert torch.equal(decoded, reference.sequences)

    def test_a_successful_generation_leaves_the_target_as_it_was(
        self, target: PreTrainedModel, head: OracleHead
    ) -> None:
        target.train()  # the tiny target has no dropout: training mode changes nothing but the flag
        for parameter in list(target.parameters())[::2]:
            parameter.requires_grad_(False)
        before = Fingerprint.of(target)
        for batch in (1, 3):
            reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
            head.know(reference.texts)
            target.generate(**reference.inputs, do_sample=False, max_new_tokens=NEW_TOKENS, assistant_model=head)
        before.assert_unchanged(target)

    def test_the_head_stays_as_it_was(self, target: PreTrainedModel) -> None:
        head = JetSpecDraftHead.from_target(target, block_size=6)
        before = Fingerprint.of(head)
        reference = greedy_reference(target, PROMPT_LENGTHS[3], NEW_TOKENS)
        target.generate(**reference.inputs, do_sample=False, max_new_tokens=NEW_TOKENS, assistant_model=head)
        now = Fingerprint.of(head)
        for field in ("hooks", "config", "generation_config", "training", "gradients"):
            assert getattr(now, field) == getattr(before, field), field


class DraftRecorder(JetSpecDraftHead):
    """An untrained head that keeps what it drafted: its logits depend on the target features it was shown."""

    def draft_logits(self, anchor_ids: torch.Tensor, state: Any) -> torch.Tensor:
        logits = super().draft_logits(anchor_ids, state)
        self.drafts[threading.get_ident()].append(logits.clone())
        return logits


class TestThreads:
    """Two generations at once on one target: each gets its own text and its own features."""

    def run_together(self, *tasks: Callable[[], Any]) -> list[Any]:
        results: list[Any] = [None] * len(tasks)
        barrier = threading.Barrier(len(tasks))

        def work(index: int) -> None:
            barrier.wait()
            try:
                results[index] = tasks[index]()
            except BaseException as error:  # handed to the test's own thread below
                results[index] = error

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(tasks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def test_two_heads_on_one_target_do_not_disturb_each_other(self, target: PreTrainedModel) -> None:
        references = [greedy_reference(target, PROMPT_LENGTHS[batch], 40) for batch in (1, 3)]
        before = Fingerprint.of(target)

        def task(reference: Reference) -> Callable[[], torch.Tensor]:
            head = OracleHead.from_target(target, block_size=6).know(reference.texts, accuracy=0.7)
            return lambda: target.generate(**reference.inputs, do_sample=False, max_new_tokens=40, assistant_model=head)

        for _ in range(4):
            decoded = self.run_together(*(task(reference) for reference in references))
            for sequences, reference in zip(decoded, references, strict=True):
                assert torch.equal(sequences, reference.sequences)
        before.assert_unchanged(target)

    @pytest.mark.parametrize("heads", [1, 2])
    def test_each_draft_sees_its_own_features(self, target: PreTrainedModel, heads: int) -> None:
        references = [greedy_reference(target, (length,), 24) for length in (12, 7)]
        made = [DraftRecorder.from_target(target, block_size=6, num_hidden_layers=1) for _ in range(heads)] * (
            3 - heads
        )

        def generate(index: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
            made[index].drafts[threading.get_ident()] = []
            sequences = target.generate(
                **references[index].inputs, do_sample=False, max_new_tokens=24, assistant_model=made[index]
            )
            return sequences, made[index].drafts[threading.get_ident()]

        for head in made:
            head.drafts = {}
            head.generation_config.tree_budget = 16  # an automatic one drafts by what another generation taught it
        alone = [generate(index) for index in range(2)]
        for _ in range(4):
            together = self.run_together(lambda: generate(0), lambda: generate(1))
            for (sequences, drafts), (expected, expected_drafts) in zip(together, alone, strict=True):
                assert torch.equal(sequences, expected)
                torch.testing.assert_close(drafts, expected_drafts, atol=1e-4, rtol=1e-4)

    def test_plain_decoding_in_another_thread_is_not_disturbed(self, target: PreTrainedModel) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[1], 40)
        head = OracleHead.from_target(target, block_size=6).know(reference.texts, accuracy=0.7)
        settings = {**reference.inputs, "do_sample": False, "max_new_tokens": 40}
        for _ in range(4):
            decoded = self.run_together(
                lambda: target.generate(**settings), lambda: target.generate(**settings, assistant_model=head)
            )
            assert all(torch.equal(sequences, reference.sequences) for sequences in decoded)
