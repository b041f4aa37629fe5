"""What `generate` returns besides the tokens, and what it can be started from: outputs, caches, embeddings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.generation import GenerateDecoderOnlyOutput

from jetspec_hf import AcceptanceStats, JetSpecDraftHead, JetSpecGenerateOutput, TokenTree
from support.oracle import OracleHead
from support.references import PROMPT_LENGTHS, Reference, greedy_reference, left_padded, random_prompts
from support.tiny_targets import ARCHITECTURES, tiny_target
from support.versions import CACHE

pytestmark = pytest.mark.exactness

NEW_TOKENS = 20
# Logits of a tree differ from one-token decoding by 1.5e-5 at most on these targets.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
WINDOWED = ["mistral", "gemma3_text", "gemma4_text", "gpt_oss", "llama4_text"]
batches = pytest.mark.parametrize("batch", [1, 3])


def windowed_target(name: str) -> PreTrainedModel:
    architecture = ARCHITECTURES[name]
    return tiny_target(name, architecture.backends[0], **(architecture.window or {}))


def oracle_for(target: PreTrainedModel, reference: Reference | None = None, accuracy: float = 0.8) -> OracleHead:
    head = OracleHead.from_target(target, block_size=6).draft_with(tree_width=3, tree_budget=20, draft_depth=5)
    if reference is not None:
        head.know(reference.texts, accuracy=accuracy, runner_up_rate=0.2)
    return head


def generate_dict(target: PreTrainedModel, head: OracleHead | None, inputs: dict[str, Any], **kwargs: Any) -> Any:
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, **kwargs}
    return target.generate(**inputs, assistant_model=head, **settings)


WANTED = {"output_scores": True, "output_logits": True, "output_hidden_states": True}


class TestScoresLogitsAndHiddenStates:
    """One entry per new token, with plain decoding's shapes and values."""

    def assert_equal_outputs(self, target: PreTrainedModel, reference: Reference, **kwargs: Any) -> None:
        plain = generate_dict(target, None, reference.inputs, **WANTED, **kwargs)
        decoded = generate_dict(target, oracle_for(target, reference), reference.inputs, **WANTED, **kwargs)
        assert torch.equal(decoded.sequences, plain.sequences)
        for name in ("scores", "logits"):
            assert len(decoded[name]) == len(plain[name])
            torch.testing.assert_close(torch.stack(decoded[name]), torch.stack(plain[name]), **TOLERANCE)
        assert len(decoded.hidden_states) == len(plain.hidden_states)
        for ours, theirs in zip(decoded.hidden_states, plain.hidden_states, strict=True):
            assert len(ours) == len(theirs)
            for our_layer, their_layer in zip(ours, theirs, strict=True):
                torch.testing.assert_close(our_layer, their_layer, **TOLERANCE)

    @pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2", "mixtral", "deepseek_v3", "cohere2"])
    @batches
    def test_they_are_plain_decodings(self, name: str, batch: int) -> None:
        target = tiny_target(name, **(ARCHITECTURES[name].window or {}))
        self.assert_equal_outputs(target, greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS))

    @batches
    def test_scores_are_taken_after_the_processors(self, target: PreTrainedModel, batch: int) -> None:
        def options() -> dict[str, Any]:
            return {"repetition_penalty": 1.3, "suppress_tokens": [5, 6, 7]}

        reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS, options=options)
        self.assert_equal_outputs(target, reference, **options())

    @batches
    def test_rows_that_stopped_keep_having_entries(self, target: PreTrainedModel, batch: int) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
        eos = int(reference.new_tokens[0, 6])
        known = Reference(
            reference.input_ids,
            reference.attention_mask,
            target.generate(**reference.inputs, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=eos),
        )
        self.assert_equal_outputs(target, known, eos_token_id=eos)

    @pytest.mark.parametrize("name", ["output_scores", "output_logits", "output_hidden_states"])
    def test_each_is_returned_alone(self, target: PreTrainedModel, name: str) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[3], NEW_TOKENS)
        decoded = generate_dict(target, oracle_for(target, reference), reference.inputs, **{name: True})
        assert torch.equal(decoded.sequences, reference.sequences)
        returned = {field for field in ("scores", "logits", "hidden_states") if decoded.get(field) is not None}
        assert returned == {name.removeprefix("output_")}

    def test_sampled_scores_are_plain_samplings(self, target: PreTrainedModel) -> None:
        ids, mask = left_padded(random_prompts((12,), 5))
        wanted = {"do_sample": True, "top_k": 20, "temperature": 0.8, **WANTED}
        torch.manual_seed(3)
        plain = generate_dict(target, None, {"input_ids": ids, "attention_mask": mask}, **wanted)
        head = oracle_for(target, Reference(ids, mask, plain.sequences))
        torch.manual_seed(3)
        decoded = generate_dict(target, head, {"input_ids": ids, "attention_mask": mask}, **wanted)
        torch.testing.assert_close(torch.stack(decoded.scores), torch.stack(plain.scores), **TOLERANCE)

    def test_attentions_are_refused_before_any_token(self, target: PreTrainedModel) -> None:
        eager = tiny_target("llama", "eager")
        reference = greedy_reference(eager, PROMPT_LENGTHS[1], NEW_TOKENS)
        head = oracle_for(eager, reference)
        with pytest.raises(ValueError, match="output_attentions"):
            generate_dict(eager, head, reference.inputs, output_attentions=True)
        assert head.calls == 0


class TestReturnedCache:
    """The cache is one shorter than the sequence and carries a conversation on exactly."""

    def second_turn(self, first: torch.Tensor, mask: torch.Tensor, rows: int) -> dict[str, torch.Tensor]:
        """The first turn's sequences, and four more tokens from the user."""
        user = torch.tensor(random_prompts([4] * rows, 77))
        grown = torch.cat([mask, torch.ones(rows, first.shape[1] - mask.shape[1] + 4, dtype=mask.dtype)], dim=1)
        return {"input_ids": torch.cat([first, user], dim=1), "attention_mask": grown}

    def assert_conversation_goes_on(self, target: PreTrainedModel, batch: int, **kwargs: Any) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
        first = generate_dict(target, oracle_for(target, reference), reference.inputs, **kwargs)
        assert torch.equal(first.sequences, reference.sequences)
        assert int(first[CACHE].get_seq_length()) == first.sequences.shape[1] - 1
        inputs = self.second_turn(first.sequences, reference.attention_mask, batch)
        expected = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
        with_plain = generate_dict(target, None, inputs, **{CACHE: copy.deepcopy(first[CACHE])})
        assert torch.equal(with_plain.sequences, expected)
        known = Reference(inputs["input_ids"], inputs["attention_mask"], expected)
        with_head = generate_dict(target, oracle_for(target, known), inputs, **{CACHE: first[CACHE]})
        assert torch.equal(with_head.sequences, expected)
        assert int(with_head[CACHE].get_seq_length()) == expected.shape[1] - 1

    @batches
    def test_it_continues_a_conversation(self, target: PreTrainedModel, batch: int) -> None:
        self.assert_conversation_goes_on(target, batch)

    @pytest.mark.parametrize("name", WINDOWED)
    @batches
    def test_it_continues_a_conversation_past_the_window(self, name: str, batch: int) -> None:
        self.assert_conversation_goes_on(windowed_target(name), batch)

    @pytest.mark.parametrize("new_tokens", range(1, 9))
    def test_it_has_the_right_length_wherever_decoding_ends(self, target: PreTrainedModel, new_tokens: int) -> None:
        for batch in (1, 3):
            reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
            head = oracle_for(target, reference, accuracy=1.0)
            out = generate_dict(target, head, reference.inputs, max_new_tokens=new_tokens)
            assert int(out[CACHE].get_seq_length()) == reference.input_ids.shape[1] + new_tokens - 1

    @pytest.mark.parametrize("name", ["llama", *WINDOWED])
    def test_it_holds_what_plain_decoding_leaves_when_rows_stop_at_eos(self, name: str) -> None:
        """The next turn's mask leaves the padding after EOS out, in the middle of the row."""
        target = windowed_target(name)
        reference = greedy_reference(target, PROMPT_LENGTHS[3], NEW_TOKENS)
        eos = int(reference.new_tokens[0, 5])
        plain = generate_dict(target, None, reference.inputs, eos_token_id=eos)
        head = oracle_for(target)
        head.know(Reference(**reference.inputs, sequences=plain.sequences).texts_until(eos), accuracy=0.8)
        decoded = generate_dict(target, head, reference.inputs, eos_token_id=eos)
        assert torch.equal(decoded.sequences, plain.sequences)
        inputs = self.second_turn(plain.sequences, reference.attention_mask, 3)
        padding = (plain.sequences == eos).cumsum(1) - (plain.sequences == eos).int() > 0
        padding[:, : reference.input_ids.shape[1]] = False
        inputs["attention_mask"][:, : plain.sequences.shape[1]][padding] = 0
        again = copy.deepcopy(decoded[CACHE])
        continued = [
            target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, **{CACHE: cache})
            for cache in (plain[CACHE], decoded[CACHE])
        ]
        assert torch.equal(*continued)
        known = Reference(inputs["input_ids"], inputs["attention_mask"], continued[0])
        with_head = generate_dict(target, oracle_for(target, known), inputs, **{CACHE: again})
        assert torch.equal(with_head.sequences, continued[0])

    def test_three_turns_with_the_head(self, target: PreTrainedModel) -> None:
        ids, mask = left_padded(random_prompts((9,), 2))
        inputs, cache, head = {"input_ids": ids, "attention_mask": mask}, None, oracle_for(target)
        for _ in range(3):
            expected = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
            head.know(expected.tolist(), accuracy=0.9)
            out = generate_dict(target, head, inputs, **({} if cache is None else {CACHE: cache}))
            assert torch.equal(out.sequences, expected)
            inputs, cache = self.second_turn(out.sequences, inputs["attention_mask"], 1), out[CACHE]


class TestGivenCache:
    """Decoding may start from a cache that somebody filled."""

    def filled(self, target: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> DynamicCache:
        cache = DynamicCache(config=target.config)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            target(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE: cache})
        return cache

    @pytest.mark.parametrize("name", ["llama", *WINDOWED])
    @pytest.mark.parametrize("cached", [1, 7, 11])
    @batches
    def test_a_cached_prefix_is_not_fed_again(self, name: str, batch: int, cached: int) -> None:
        target = windowed_target(name)
        reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
        prefix = self.filled(target, reference.input_ids[:, :cached], reference.attention_mask[:, :cached])
        plain = generate_dict(target, None, reference.inputs, **{CACHE: copy.deepcopy(prefix)})
        head = oracle_for(target)
        head.know(Reference(**reference.inputs, sequences=plain.sequences).texts, accuracy=0.8)
        decoded = generate_dict(target, head, reference.inputs, **{CACHE: prefix})
        assert torch.equal(decoded.sequences, plain.sequences)
        assert decoded[CACHE] is prefix

    def test_a_cropped_cache_serves_another_continuation(self, target: PreTrainedModel) -> None:
        reference = greedy_reference(target, (14,), NEW_TOKENS)
        other = torch.cat([reference.input_ids[:, :9], torch.tensor([[50, 51, 52, 53]])], dim=1)
        cache = self.filled(target, other, torch.ones_like(other))
        cache.crop(-4)
        decoded = generate_dict(target, oracle_for(target, reference), reference.inputs, **{CACHE: cache})
        assert torch.equal(decoded.sequences, reference.sequences)

    def test_it_is_grown_in_place_without_a_returned_dict(self, target: PreTrainedModel) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[3], NEW_TOKENS)
        cache = self.filled(target, reference.input_ids[:, :11], reference.attention_mask[:, :11])
        decoded = target.generate(
            **reference.inputs,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            assistant_model=oracle_for(target, reference),
            **{CACHE: cache},
        )
        assert torch.equal(decoded, reference.sequences)
        assert cache.get_seq_length() == decoded.shape[1] - 1

    def test_an_empty_one_is_filled(self, target: PreTrainedModel) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[3], NEW_TOKENS)
        cache = DynamicCache(config=target.config)
        decoded = generate_dict(target, oracle_for(target, reference), reference.inputs, **{CACHE: cache})
        assert torch.equal(decoded.sequences, reference.sequences)


@pytest.mark.parametrize("name", ["llama", *WINDOWED])
@pytest.mark.parametrize("chunk", [1, 5, 64])
@batches
def test_a_prompt_may_be_prefilled_in_chunks(name: str, batch: int, chunk: int) -> None:
    target = windowed_target(name)
    reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
    plain = target.generate(**reference.inputs, do_sample=False, max_new_tokens=NEW_TOKENS, prefill_chunk_size=chunk)
    head = oracle_for(target)
    head.know(Reference(**reference.inputs, sequences=plain).texts, accuracy=0.8)
    decoded = generate_dict(target, head, reference.inputs, prefill_chunk_size=chunk)
    assert torch.equal(decoded.sequences, plain)


class TestEmbeddingsAsInput:
    """`inputs_embeds` instead of ids: ids start empty, positions do not."""

    def embeds(self, target: PreTrainedModel, reference: Reference) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            embeds = target.get_input_embeddings()(reference.input_ids)
        return {"inputs_embeds": embeds, "attention_mask": reference.attention_mask}

    @pytest.mark.parametrize("name", ["llama", "gemma3_text", "opt", "gpt2"])
    @batches
    def test_alone_they_give_the_plain_tokens(self, name: str, batch: int) -> None:
        target = tiny_target(name, **(ARCHITECTURES[name].window or {}))
        reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
        decoded = generate_dict(target, oracle_for(target, reference), self.embeds(target, reference))
        assert torch.equal(decoded.sequences, reference.new_tokens)
        assert decoded.acceptance.mean_acceptance_length > 1.5

    @batches
    def test_with_ids_they_give_the_plain_sequences(self, target: PreTrainedModel, batch: int) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
        inputs = {**self.embeds(target, reference), "input_ids": reference.input_ids}
        plain = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
        decoded = generate_dict(target, oracle_for(target, reference), inputs)
        assert torch.equal(decoded.sequences, plain)

    def test_every_length_and_a_sampled_text_are_plain(self, target: PreTrainedModel) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[1], NEW_TOKENS)
        head = oracle_for(target, reference, accuracy=1.0)
        inputs = self.embeds(target, reference)
        for new_tokens in range(1, 9):
            decoded = generate_dict(target, head, inputs, max_new_tokens=new_tokens)
            assert torch.equal(decoded.sequences, reference.new_tokens[:, :new_tokens])
        torch.manual_seed(1)
        plain = target.generate(**inputs, do_sample=True, max_new_tokens=NEW_TOKENS)
        head.know(Reference(**reference.inputs, sequences=torch.cat([reference.input_ids, plain], dim=1)).texts)
        torch.manual_seed(1)
        assert torch.equal(generate_dict(target, head, inputs, do_sample=True).sequences, plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, which offloaded caches are for")
@batches
def test_an_offloaded_cache_gives_the_plain_tokens(target: PreTrainedModel, batch: int) -> None:
    target.to("cuda")
    ids, mask = (tensor.to("cuda") for tensor in left_padded(random_prompts(PROMPT_LENGTHS[batch], 0)))
    reference = Reference(ids, mask, target.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS))
    decoded = generate_dict(target, oracle_for(target, reference), reference.inputs, cache_implementation="offloaded")
    assert torch.equal(decoded.sequences, reference.sequences)


class TestStaticCache:
    """The tree shrinks to the free slots, down to the last one."""

    @pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3", "gpt2", "gemma3_text"])
    @batches
    def test_tokens_are_plain_to_the_last_slot(self, name: str, batch: int) -> None:
        target = tiny_target(name)
        reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
        for accuracy in (0.5, 1.0):
            head = oracle_for(target, reference, accuracy)
            decoded = generate_dict(target, head, reference.inputs, cache_implementation="static")
            assert torch.equal(decoded.sequences, reference.sequences), accuracy

    @pytest.mark.parametrize("new_tokens", range(1, 9))
    @batches
    def test_it_may_be_as_short_as_the_text(self, target: PreTrainedModel, batch: int, new_tokens: int) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
        decoded = target.generate(
            **reference.inputs,
            do_sample=False,
            max_new_tokens=new_tokens,
            cache_implementation="static",
            assistant_model=oracle_for(target, reference, accuracy=1.0),
        )
        assert torch.equal(decoded, reference.first(new_tokens))

    @batches
    @pytest.mark.fixed_budget
    def test_one_with_room_to_spare_is_used_and_returned(self, target: PreTrainedModel, batch: int) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
        cache = StaticCache(config=target.config, max_cache_len=64)
        head = oracle_for(target, reference)
        decoded = generate_dict(target, head, reference.inputs, **{CACHE: cache})
        assert torch.equal(decoded.sequences, reference.sequences)
        assert decoded[CACHE] is cache
        assert int(cache.get_seq_length()) == reference.sequences.shape[1] - 1
        assert decoded.acceptance.mean_acceptance_length > 1.5

    def test_rows_may_stop_at_eos(self, target: PreTrainedModel) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[3], NEW_TOKENS)
        eos = int(reference.new_tokens[0, 6])
        plain = target.generate(**reference.inputs, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=eos)
        head = oracle_for(target)
        head.know(reference.texts_until(eos), accuracy=0.9)
        decoded = generate_dict(target, head, reference.inputs, cache_implementation="static", eos_token_id=eos)
        assert torch.equal(decoded.sequences, plain)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "llama4_text"])
@batches
def test_a_cache_that_keeps_everything_serves_a_windowed_target(name: str, batch: int) -> None:
    target = windowed_target(name)
    reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
    plain = target.generate(**reference.inputs, do_sample=False, max_new_tokens=NEW_TOKENS, **{CACHE: DynamicCache()})
    head = oracle_for(target)
    head.know(Reference(**reference.inputs, sequences=plain).texts, accuracy=0.8)
    decoded = generate_dict(target, head, reference.inputs, **{CACHE: DynamicCache()})
    assert torch.equal(decoded.sequences, plain)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
@batches
def test_an_untrained_head_may_start_from_anything(name: str, batch: int) -> None:
    """Its drafts are computed from the features that each start leaves it, and are nearly all rejected."""
    target = tiny_target(name)
    reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
    head = JetSpecDraftHead.from_target(target, block_size=6, num_hidden_layers=2)
    head.generation_config.tree_budget = 20
    first = generate_dict(target, head, reference.inputs, max_new_tokens=7)
    ids, mask = first.sequences, torch.ones_like(first.sequences)
    mask[:, : reference.input_ids.shape[1]] = reference.attention_mask
    with torch.no_grad():
        embeds = target.get_input_embeddings()(reference.input_ids)
    longer = {"input_ids": ids, "attention_mask": mask}
    starts: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (reference.inputs, {"prefill_chunk_size": 5}),
        (reference.inputs, {"cache_implementation": "static"}),
        ({"inputs_embeds": embeds, "attention_mask": reference.attention_mask}, {}),
        (longer, {CACHE: copy.deepcopy(first[CACHE]), "max_new_tokens": NEW_TOKENS - 7}),
        (longer, {CACHE: first[CACHE], "max_new_tokens": NEW_TOKENS - 7}),
    ]
    for inputs, settings in starts:
        decoded = generate_dict(target, head, inputs, **settings).sequences
        assert torch.equal(decoded, reference.sequences[:, -decoded.shape[1] :]), list(settings)


@pytest.mark.fixed_budget
class TestAcceptance:
    """Statistics are those that can be worked out by hand from what was drafted."""

    # The head's text is wrong at new tokens 4, 5 and 11 (the first is number 0 and comes from the prompt). A chain of 5
    # below the anchor commits: tokens 1-4 (three right, then the target's own), token 5, tokens 6-11, tokens 12-17.
    WRONG = (4, 5, 11)
    NEW = 18

    @pytest.fixture
    def head_with_faults(self, target: PreTrainedModel) -> tuple[OracleHead, Reference]:
        reference = greedy_reference(target, PROMPT_LENGTHS[1], self.NEW + 6)
        text = list(reference.texts[0])
        for place in self.WRONG:
            text[12 + place] = 3 + (text[12 + place] + 1) % 100
        head = OracleHead.from_target(target, block_size=6).draft_with(tree_width=1, tree_budget=5, draft_depth=5)
        return head.know([text], must_match=False), reference

    def test_it_is_what_the_drafts_imply(
        self, target: PreTrainedModel, head_with_faults: tuple[OracleHead, Reference]
    ) -> None:
        head, reference = head_with_faults
        out = generate_dict(target, head, reference.inputs, max_new_tokens=self.NEW)
        stats = out.acceptance
        assert stats.accepted_lengths == [[4, 1, 6, 6]]
        assert stats.steps == 4
        assert stats.tree_sizes == [5, 5, 5, 5]
        assert stats.mean_acceptance_length == 17 / 4
        assert stats.acceptance_by_depth == [0.75, 0.75, 0.75, 0.5, 0.5]

    def test_it_is_an_output_of_transformers_kind(
        self, target: PreTrainedModel, head_with_faults: tuple[OracleHead, Reference]
    ) -> None:
        head, reference = head_with_faults
        out = generate_dict(target, head, reference.inputs)
        assert isinstance(out, JetSpecGenerateOutput)
        assert isinstance(out, GenerateDecoderOnlyOutput)
        assert isinstance(out.acceptance, AcceptanceStats)
        assert set(out.acceptance.seconds) == {"prefill", "draft", "build", "verify", "accept", "commit"}
        assert all(seconds >= 0 for seconds in out.acceptance.seconds.values())

    def test_without_a_returned_dict_it_stays_on_the_head(
        self, target: PreTrainedModel, head_with_faults: tuple[OracleHead, Reference]
    ) -> None:
        head, reference = head_with_faults
        sequences = target.generate(**reference.inputs, do_sample=False, max_new_tokens=self.NEW, assistant_model=head)
        assert isinstance(sequences, torch.Tensor)
        assert head.last_acceptance.accepted_lengths == [[4, 1, 6, 6]]

    @pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
    @batches
    def test_committed_tokens_add_up(self, target: PreTrainedModel, batch: int, accuracy: float) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
        out = generate_dict(target, oracle_for(target, reference, accuracy), reference.inputs)
        stats = out.acceptance
        assert [1 + sum(row) for row in stats.accepted_lengths] == [NEW_TOKENS] * batch
        assert stats.steps == len(stats.tree_sizes) == max(len(row) for row in stats.accepted_lengths)
        assert all(size <= 20 for size in stats.tree_sizes)
        assert all(1 <= length <= 6 for row in stats.accepted_lengths for length in row)

    def test_a_row_counts_only_until_its_eos(self, target: PreTrainedModel) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[3], NEW_TOKENS)
        eos = int(reference.new_tokens[0, 6])
        texts = reference.texts_until(eos)
        head = oracle_for(target)
        head.know(texts, accuracy=0.8)
        out = generate_dict(target, head, reference.inputs, eos_token_id=eos)
        prompt_lengths = reference.attention_mask.sum(1).tolist()
        own = [len(text) - prompt for text, prompt in zip(texts, prompt_lengths, strict=True)]
        assert [1 + sum(row) for row in out.acceptance.accepted_lengths] == own

    @batches
    def test_the_last_path_carries_the_last_tokens(self, target: PreTrainedModel, batch: int) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS)
        stats = generate_dict(target, oracle_for(target, reference, 1.0), reference.inputs).acceptance
        tree, paths = stats.last_tree, stats.last_path
        assert isinstance(tree, TokenTree)
        assert tree.num_nodes == stats.tree_sizes[-1] + 1
        assert len(paths) == batch
        for row, path in enumerate(paths):
            if stats.accepted_lengths[row][-1] != len(path) or len(stats.accepted_lengths[row]) < stats.steps:
                continue  # the row had finished before the last step
            assert path[0] == 0
            assert [int(tree.parents[row, node]) for node in path[1:]] == path[:-1]
            tokens = [int(tree.token_ids[row, node]) for node in path]
            assert tokens == reference.sequences[row, -len(path) - 1 : -1].tolist()

    def test_a_prompt_of_the_whole_length_needs_no_step(self, target: PreTrainedModel) -> None:
        reference = greedy_reference(target, PROMPT_LENGTHS[1], NEW_TOKENS)
        out = generate_dict(target, oracle_for(target, reference), reference.inputs, max_new_tokens=1)
        assert out.acceptance.steps == 0
        assert out.acceptance.accepted_lengths == [[]]
        assert out.acceptance.tree_sizes == []
