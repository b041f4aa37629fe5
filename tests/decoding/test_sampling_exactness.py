"""At batch size 1 sampling returns plain sampling's tokens for the same seed, under every logits processor.

Every processor is also run greedily, alone and in a ragged batch, where plain `generate` is matched token by token.
What a ragged batch samples is in `test_sampling_distribution.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from support.oracle import OracleHead
from support.references import PROMPT_LENGTHS, Reference, greedy_reference, left_padded, random_prompts
from support.tiny_targets import ARCHITECTURES, tiny_target

pytestmark = pytest.mark.exactness

NEW_TOKENS = 24
WIDE = {"tree_width": 4, "tree_budget": 24, "draft_depth": 5}
EOS = [7, 90, 91, 92]  # several, so that plain sampling meets one now and then


class RisingBias(LogitsProcessor):
    """Favours another token at every call: one call too many or too few changes all that follows."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, (37 * self.calls) % scores.shape[-1]] += 3.0
        return scores


class SeesEveryPrefixOnce(LogitsProcessor):
    """Raises unless each call's ids are the last call's ids and one token more."""

    def __init__(self) -> None:
        self.seen: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert self.seen is None or torch.equal(input_ids[:, :-1], self.seen)
        self.seen = input_ids.clone()
        return scores


class OddTokensAfterEvenOnes(LogitsProcessor):
    """A stateless processor that transformers does not know."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        same_parity = (input_ids[:, -1:] + torch.arange(scores.shape[-1])) % 2 == 0
        return scores - 2.0 * same_parity


def allowed_tokens(batch_id: int, ids: torch.Tensor) -> list[int]:
    """A third of the vocabulary, by row, length and last token."""
    return [token for token in range(128) if (token + batch_id + len(ids) + int(ids[-1])) % 3 == 0]


def processors(*made: LogitsProcessor) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList(made)}


# For both greedy decoding and sampling: name -> the arguments of one call.
PROCESSORS: dict[str, Callable[[], dict[str, Any]]] = {
    "repetition_penalty": lambda: {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": lambda: {"no_repeat_ngram_size": 2},
    "bad_words_ids": lambda: {"bad_words_ids": [[5], [6, 7], *([a, b] for a in range(20, 90) for b in (a + 1, a + 2))]},
    "forced_eos_token_id": lambda: {"forced_eos_token_id": 12},
    "suppress_tokens": lambda: {"suppress_tokens": list(range(3, 128, 2))},
    "begin_suppress_tokens": lambda: {"begin_suppress_tokens": list(range(3, 128, 2))},
    "sequence_bias": lambda: {"sequence_bias": [[[a, (a * 7) % 128], 4.0] for a in range(3, 128)]},
    "exponential_decay_length_penalty": lambda: {
        "exponential_decay_length_penalty": (4, 1.3),
        "eos_token_id": EOS,
    },
    "min_new_tokens": lambda: {"min_new_tokens": 9, "eos_token_id": list(range(3, 60))},
    "min_length": lambda: {"min_length": 20, "eos_token_id": list(range(3, 60))},
    "prefix_allowed_tokens_fn": lambda: {"prefix_allowed_tokens_fn": allowed_tokens},
    "guidance_scale": lambda: {"guidance_scale": 1.7},
    "watermarking_config": lambda: {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")},
    "watermarking_config, left hash": lambda: {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "synthid": lambda: {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 14, 15, 92, 65])},
    "remove_invalid_values, renormalize_logits": lambda: {"remove_invalid_values": True, "renormalize_logits": True},
    "custom, stateful": lambda: processors(RisingBias()),
    "custom, checks its prefixes": lambda: processors(SeesEveryPrefixOnce()),
    "custom, stateless": lambda: processors(OddTokensAfterEvenOnes()),
    "penalty, n-grams, bad words, custom": lambda: {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[9], [10, 11]],
        **processors(RisingBias(), SeesEveryPrefixOnce()),
    },
    "guidance, watermark, penalty": lambda: {
        "guidance_scale": 1.4,
        "repetition_penalty": 1.2,
        "watermarking_config": WatermarkingConfig(),
    },
}
# For sampling only.
WARPERS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": lambda: {"top_k": 0},
    "temperature 0.3": lambda: {"temperature": 0.3, "top_k": 0},
    "temperature 1.5": lambda: {"temperature": 1.5, "top_k": 0},
    "top_k": lambda: {"top_k": 5},
    "top_p": lambda: {"top_p": 0.7, "top_k": 0},
    "min_p": lambda: {"min_p": 0.1, "top_k": 0},
    "typical_p": lambda: {"typical_p": 0.6, "top_k": 0},
    "epsilon_cutoff": lambda: {"epsilon_cutoff": 0.02, "top_k": 0},
    "eta_cutoff": lambda: {"eta_cutoff": 0.02, "top_k": 0},
    "top_h": lambda: {"top_h": 0.5, "top_k": 0},
    "temperature, top_k, top_p, min_p": lambda: {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "temperature, top_p, penalty, eos": lambda: {
        "temperature": 1.2,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "eos_token_id": EOS,
    },
}
every_sampling_case = pytest.mark.parametrize(
    "options", [*PROCESSORS.values(), *WARPERS.values()], ids=[*PROCESSORS, *WARPERS]
)
every_processor = pytest.mark.parametrize("options", PROCESSORS.values(), ids=list(PROCESSORS))


def decode(target: PreTrainedModel, head: OracleHead | None, reference: Reference, **kwargs: Any) -> torch.Tensor:
    return target.generate(**reference.inputs, assistant_model=head, max_new_tokens=NEW_TOKENS, **kwargs)


def sampled_reference(target: PreTrainedModel, lengths: tuple[int, ...], seed: int, **kwargs: Any) -> Reference:
    """What plain sampling returns under torch seed `seed`."""
    ids, mask = left_padded(random_prompts(lengths, seed))
    torch.manual_seed(seed)
    sequences = target.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=NEW_TOKENS, **kwargs)
    return Reference(ids, mask, sequences)


@every_sampling_case
def test_the_same_seed_gives_the_tokens_of_plain_sampling(
    target: PreTrainedModel, head: OracleHead, options: Callable[[], dict[str, Any]]
) -> None:
    head.draft_with(**WIDE)
    for seed, accuracy in ((1, 1.0), (2, 0.8), (3, 0.5)):
        reference = sampled_reference(target, PROMPT_LENGTHS[1], seed, **options())
        head.know(reference.texts, accuracy=accuracy, runner_up_rate=0.3)
        torch.manual_seed(seed)
        assert torch.equal(decode(target, head, reference, do_sample=True, **options()), reference.sequences)
        if accuracy == 1.0 and head.generation_config.tree_budget != "auto":
            assert head.last_acceptance.mean_acceptance_length > 2


@pytest.mark.parametrize(
    "name", ["gemma3_text", "gemma4_text", "gpt_oss", "llama4_text", "mixtral", "deepseek_v3", "gpt2"]
)
def test_other_architectures_give_the_tokens_of_plain_sampling(name: str) -> None:
    architecture = ARCHITECTURES[name]
    target = tiny_target(name, architecture.backends[0], **(architecture.window or {}))
    head = OracleHead.from_target(target, block_size=6).draft_with(**WIDE)
    for seed in range(4):
        reference = sampled_reference(target, PROMPT_LENGTHS[1], seed, top_p=0.9)
        head.know(reference.texts, accuracy=0.8, runner_up_rate=0.3)
        torch.manual_seed(seed)
        assert torch.equal(decode(target, head, reference, do_sample=True, top_p=0.9), reference.sequences), seed


@every_processor
def test_greedy_tokens_are_plain_under_every_processor(
    target: PreTrainedModel, head: OracleHead, options: Callable[[], dict[str, Any]]
) -> None:
    reference = greedy_reference(target, PROMPT_LENGTHS[1], NEW_TOKENS, options=options)
    head.know(reference.texts, accuracy=0.8, runner_up_rate=0.3).draft_with(**WIDE)
    assert torch.equal(decode(target, head, reference, do_sample=False, **options()), reference.sequences)


@every_processor
def test_greedy_tokens_of_a_padded_batch_are_plain_under_every_processor(
    target: PreTrainedModel, head: OracleHead, options: Callable[[], dict[str, Any]]
) -> None:
    reference = greedy_reference(target, PROMPT_LENGTHS[3], NEW_TOKENS, options=options)
    head.know(reference.texts, accuracy=0.8, runner_up_rate=0.3).draft_with(**WIDE)
    assert torch.equal(decode(target, head, reference, do_sample=False, **options()), reference.sequences)


@pytest.mark.parametrize(
    "name",
    ["guidance_scale", "synthid", "custom, stateful", "custom, stateless", "penalty, n-grams, bad words, custom"],
)
def test_a_batch_in_lockstep_samples_the_same_tokens_from_the_same_seed(
    target: PreTrainedModel, head: OracleHead, name: str
) -> None:
    for seed in range(3):
        reference = sampled_reference(target, PROMPT_LENGTHS[3], seed, **PROCESSORS[name]())
        head.know(reference.texts, accuracy=0.9, runner_up_rate=0.2).draft_with(**WIDE)
        torch.manual_seed(seed)
        assert torch.equal(decode(target, head, reference, do_sample=True, **PROCESSORS[name]()), reference.sequences)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_forced_first_token_follows_a_prompt_of_one_token(
    target: PreTrainedModel, head: OracleHead, rows: int
) -> None:
    def options() -> dict[str, Any]:
        return {"forced_bos_token_id": 11, "begin_suppress_tokens": list(range(3, 128, 2))}

    reference = greedy_reference(target, (1,) * rows, NEW_TOKENS, options=options)
    assert (reference.new_tokens[:, 0] == 11).all()
    head.know(reference.texts, accuracy=0.8, runner_up_rate=0.3).draft_with(**WIDE)
    assert torch.equal(decode(target, head, reference, do_sample=False, **options()), reference.sequences)


def test_negative_prompts_guide_as_in_plain_decoding(target: PreTrainedModel, head: OracleHead) -> None:
    def options() -> dict[str, Any]:
        return {
            "guidance_scale": 2.0,
            "negative_prompt_ids": torch.tensor([[20, 21, 22]]),
            "negative_prompt_attention_mask": torch.ones(1, 3, dtype=torch.long),
        }

    reference = sampled_reference(target, PROMPT_LENGTHS[1], 4, **options())
    head.know(reference.texts).draft_with(**WIDE)
    torch.manual_seed(4)
    assert torch.equal(decode(target, head, reference, do_sample=True, **options()), reference.sequences)


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_the_random_stream_is_left_where_plain_sampling_leaves_it(
    target: PreTrainedModel, head: OracleHead, accuracy: float
) -> None:
    reference = sampled_reference(target, PROMPT_LENGTHS[1], 5)
    afterwards = torch.get_rng_state()
    head.know(reference.texts, accuracy=accuracy).draft_with(**WIDE)
    torch.manual_seed(5)
    decode(target, head, reference, do_sample=True)
    assert torch.equal(torch.get_rng_state(), afterwards)


def test_greedy_decoding_draws_nothing(target: PreTrainedModel, head: OracleHead) -> None:
    reference = greedy_reference(target, PROMPT_LENGTHS[3], NEW_TOKENS)
    before = torch.get_rng_state()
    head.know(reference.texts).draft_with(**WIDE)
    decode(target, head, reference, do_sample=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_many_seeds_give_the_tokens_of_plain_sampling(target: PreTrainedModel, head: OracleHead) -> None:
    for seed in range(20):
        reference = sampled_reference(target, PROMPT_LENGTHS[1], seed, temperature=1.2)
        head.know(reference.texts, accuracy=seed / 20, runner_up_rate=0.3, seed=seed).draft_with(**WIDE)
        torch.manual_seed(seed)
        decoded = decode(target, head, reference, do_sample=True, temperature=1.2)
        assert torch.equal(decoded, reference.sequences), seed


CHANGES_NOTHING = {"remove_invalid_values, renormalize_logits", "custom, checks its prefixes"}


@pytest.mark.parametrize("name", sorted(set(PROCESSORS) - CHANGES_NOTHING))
def test_each_processor_here_changes_the_plain_text(target: PreTrainedModel, name: str) -> None:
    plain = [sampled_reference(target, PROMPT_LENGTHS[3], seed).sequences for seed in range(3)]
    processed = [
        sampled_reference(target, PROMPT_LENGTHS[3], seed, **PROCESSORS[name]()).sequences for seed in range(3)
    ]
    assert any(not torch.equal(*pair) for pair in zip(plain, processed, strict=True))
