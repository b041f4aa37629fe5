"""Generation stops where plain `generate` stops, and streamers receive what plain decoding gives them.

The drafts are right beyond every stop, so that a loop that looks at stopping criteria once per step would overshoot.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from support.char_tokenizer import letter_tokenizer
from support.oracle import OracleHead
from support.recording import RecordingStreamer
from support.references import PROMPT_LENGTHS, Reference, greedy_reference, left_padded, random_prompts

pytestmark = pytest.mark.exactness

NEW_TOKENS = 18
batches = pytest.mark.parametrize("batch", [1, 3])


class FiresOnToken(StoppingCriteria):
    """Stops a row at a token, and keeps every prefix it was shown."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.prefixes: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.prefixes.append(input_ids.tolist())
        return input_ids[:, -1] == self.token


class FiresAfterCalls(StoppingCriteria):
    """Stops every row at its n-th call."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.left -= 1
        return torch.full((input_ids.shape[0],), self.left <= 0, dtype=torch.bool)


def criteria(*made: StoppingCriteria) -> StoppingCriteriaList:
    return StoppingCriteriaList(made)


@pytest.fixture
def knowing(target: PreTrainedModel, head: OracleHead) -> OracleHead:
    """The head, drafting trees with several right branches; call `know` to tell it the text."""
    return head.draft_with(tree_width=3, tree_budget=20, draft_depth=5)


def reference_of(target: PreTrainedModel, head: OracleHead, batch: int, accuracy: float = 1.0) -> Reference:
    """A reference that goes on beyond every stop, made known to the head.

    Rows that have stopped may hold anything, so in a batch the head does not insist on the known text.
    """
    reference = greedy_reference(target, PROMPT_LENGTHS[batch], NEW_TOKENS + 6)
    head.know(reference.texts, accuracy=accuracy, runner_up_rate=0.2, must_match=batch == 1)
    return reference


def assert_plain(target: PreTrainedModel, head: OracleHead, reference: Reference, **kwargs: Any) -> torch.Tensor:
    """Generates without and with the head, and returns the new tokens, which must be the same."""
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **kwargs}
    plain = target.generate(**reference.inputs, **settings)
    decoded = target.generate(**reference.inputs, assistant_model=head, **settings)
    assert torch.equal(decoded, plain)
    return plain[:, reference.input_ids.shape[1] :]


@pytest.mark.parametrize("place", range(NEW_TOKENS))
@batches
def test_every_greedy_token_in_turn_may_be_eos(
    target: PreTrainedModel, knowing: OracleHead, batch: int, place: int
) -> None:
    reference = reference_of(target, knowing, batch)
    eos = int(reference.new_tokens[-1, place])
    new_tokens = assert_plain(target, knowing, reference, eos_token_id=eos)
    assert batch > 1 or new_tokens[0, -1] == eos


@batches
def test_any_token_of_an_eos_list_ends_a_row(target: PreTrainedModel, knowing: OracleHead, batch: int) -> None:
    for accuracy in (1.0, 0.6):
        reference = reference_of(target, knowing, batch, accuracy)
        for first, second in ((0, 1), (9, 4), (17, 16), (5, 11)):
            eos = [int(reference.new_tokens[0, first]), int(reference.new_tokens[-1, second])]
            assert_plain(target, knowing, reference, eos_token_id=eos)


@batches
def test_the_configs_own_eos_ends_a_row(target: PreTrainedModel, knowing: OracleHead, batch: int) -> None:
    reference = reference_of(target, knowing, batch)
    target.generation_config.eos_token_id = [int(row[7]) for row in reference.new_tokens]
    assert assert_plain(target, knowing, reference).shape[1] < NEW_TOKENS


@batches
def test_neither_eos_nor_pad_is_needed(target: PreTrainedModel, knowing: OracleHead, batch: int) -> None:
    for config in (target.config, target.generation_config):
        config.eos_token_id = config.pad_token_id = None
    reference = reference_of(target, knowing, batch, accuracy=0.8)
    assert assert_plain(target, knowing, reference).shape[1] == NEW_TOKENS


@batches
def test_without_a_pad_token_finished_rows_get_eos(target: PreTrainedModel, knowing: OracleHead, batch: int) -> None:
    for config in (target.config, target.generation_config):
        config.pad_token_id = None
    reference = reference_of(target, knowing, batch, accuracy=0.8)
    assert_plain(target, knowing, reference, eos_token_id=int(reference.new_tokens[0, 7]))


@pytest.mark.parametrize("window", [1, 2, 3])
@batches
def test_a_stop_string_of_any_tokens_ends_the_text(
    target: PreTrainedModel, knowing: OracleHead, batch: int, window: int
) -> None:
    tokenizer = letter_tokenizer()
    reference = reference_of(target, knowing, batch)
    for place in range(NEW_TOKENS - window):
        stop = tokenizer.decode(reference.new_tokens[0, place : place + window])
        assert_plain(target, knowing, reference, stop_strings=[stop], tokenizer=tokenizer)


def test_a_stop_string_may_begin_and_end_inside_tokens(target: PreTrainedModel, knowing: OracleHead) -> None:
    tokenizer = letter_tokenizer()
    reference = reference_of(target, knowing, 1, accuracy=0.9)
    text = tokenizer.decode(reference.new_tokens[0])
    for start in range(0, len(text) - 4, 2):
        stops = [text[start + 1 : start + 4], "never seen"]
        assert_plain(target, knowing, reference, stop_strings=stops, tokenizer=tokenizer)


@pytest.mark.parametrize("eos", [True, False])
@batches
def test_a_custom_criterion_fires_inside_an_accepted_path(
    target: PreTrainedModel, knowing: OracleHead, batch: int, eos: bool
) -> None:
    """With an EOS token the rows that stopped get padding, without one they go on until all have stopped."""
    reference = reference_of(target, knowing, batch)
    settings = {"eos_token_id": int(reference.new_tokens[0, 14])} if eos else {}
    for place in range(0, NEW_TOKENS, 3):
        token = int(reference.new_tokens[0, place])
        plain, decoded = FiresOnToken(token), FiresOnToken(token)
        sequences = [
            target.generate(
                **reference.inputs,
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                stopping_criteria=criteria(criterion),
                assistant_model=assistant,
                **settings,
            )
            for criterion, assistant in ((plain, None), (decoded, knowing))
        ]
        assert torch.equal(*sequences)
        assert decoded.prefixes == plain.prefixes


@batches
def test_a_criterion_with_state_counts_tokens_as_in_plain_decoding(
    target: PreTrainedModel, knowing: OracleHead, batch: int
) -> None:
    reference = reference_of(target, knowing, batch, accuracy=0.8)
    for calls in range(1, 14):
        decoded = target.generate(
            **reference.inputs,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            stopping_criteria=criteria(FiresAfterCalls(calls)),
            assistant_model=knowing,
        )
        assert torch.equal(decoded, reference.first(calls))


@batches
def test_max_length_is_never_passed(target: PreTrainedModel, knowing: OracleHead, batch: int) -> None:
    reference = reference_of(target, knowing, batch)
    prompt_length = reference.input_ids.shape[1]
    for new_tokens in range(1, 14):
        settings = {"max_new_tokens": None, "max_length": prompt_length + new_tokens}
        assert assert_plain(target, knowing, reference, **settings).shape[1] == new_tokens


@batches
def test_max_new_tokens_is_never_passed(target: PreTrainedModel, knowing: OracleHead, batch: int) -> None:
    reference = reference_of(target, knowing, batch)
    for new_tokens in range(1, 14):
        assert assert_plain(target, knowing, reference, max_new_tokens=new_tokens).shape[1] == new_tokens


@batches
def test_min_new_tokens_holds_eos_back_for_every_row(target: PreTrainedModel, knowing: OracleHead, batch: int) -> None:
    reference = reference_of(target, knowing, batch)
    eos = [int(row[4]) for row in reference.new_tokens]
    for least in range(1, NEW_TOKENS, 2):
        settings = {"eos_token_id": eos, "min_new_tokens": least}
        plain = target.generate(**reference.inputs, do_sample=False, max_new_tokens=NEW_TOKENS, **settings)
        known = Reference(reference.input_ids, reference.attention_mask, plain)
        knowing.know(known.texts, must_match=batch == 1)
        assert assert_plain(target, knowing, reference, **settings).shape[1] >= least


def test_min_length_counts_the_prompt(target: PreTrainedModel, knowing: OracleHead) -> None:
    reference = reference_of(target, knowing, 1)
    knowing.know(reference.texts, must_match=False)
    for least in (13, 17, 20):
        eos = int(reference.new_tokens[0, 3])
        assert assert_plain(target, knowing, reference, eos_token_id=eos, min_length=least).shape[1] >= least - 12


class TickingClock:
    """A clock that advances by one second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0

    def time(self) -> float:
        self.now += 1
        return float(self.now)


@pytest.mark.parametrize("seconds", [0.5, 1.5, 4.5, 9.5])
def test_max_time_is_looked_at_after_every_token(
    target: PreTrainedModel, knowing: OracleHead, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    reference = reference_of(target, knowing, 1)
    sequences = []
    for assistant in (None, knowing):
        monkeypatch.setattr("transformers.generation.stopping_criteria.time", SimpleNamespace(time=TickingClock().time))
        sequences.append(
            target.generate(
                **reference.inputs,
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                max_time=seconds,
                assistant_model=assistant,
            )
        )
    assert torch.equal(*sequences)
    assert sequences[0].shape[1] == 12 + int(seconds) + 1


def test_no_time_at_all_still_gives_a_token_to_every_row(target: PreTrainedModel, knowing: OracleHead) -> None:
    reference = reference_of(target, knowing, 3)
    assert assert_plain(target, knowing, reference, max_time=1e-9).shape[1] == 1


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("eos_place", [None, 0, 4, 9])
@batches
def test_a_streamer_gets_the_calls_of_plain_decoding(
    target: PreTrainedModel, knowing: OracleHead, batch: int, eos_place: int | None, accuracy: float
) -> None:
    reference = reference_of(target, knowing, batch, accuracy)
    settings = {} if eos_place is None else {"eos_token_id": int(reference.new_tokens[0, eos_place])}
    plain, decoded = RecordingStreamer(), RecordingStreamer()
    assert_streams_equal(target, knowing, reference, plain, decoded, **settings)


def assert_streams_equal(
    target: PreTrainedModel,
    head: OracleHead,
    reference: Reference,
    plain: RecordingStreamer,
    decoded: RecordingStreamer,
    **settings: Any,
) -> None:
    for streamer, assistant in ((plain, None), (decoded, head)):
        target.generate(
            **reference.inputs,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            streamer=streamer,
            assistant_model=assistant,
            **settings,
        )
    assert decoded.calls == plain.calls


@batches
def test_a_streamer_gets_no_token_after_a_custom_stop(target: PreTrainedModel, knowing: OracleHead, batch: int) -> None:
    reference = reference_of(target, knowing, batch)
    for calls in (1, 4, 8):
        streamers = [RecordingStreamer(), RecordingStreamer()]
        for streamer, assistant in zip(streamers, (None, knowing), strict=True):
            target.generate(
                **reference.inputs,
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                streamer=streamer,
                stopping_criteria=criteria(FiresAfterCalls(calls)),
                assistant_model=assistant,
            )
        assert streamers[1].calls == streamers[0].calls


def test_a_streamer_has_every_token_before_the_next_step(
    target: PreTrainedModel, knowing: OracleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = reference_of(target, knowing, 1, accuracy=0.7)
    streamer = RecordingStreamer()
    draft_logits = type(knowing).draft_logits
    held_back = []

    def spy(head: OracleHead, anchor_ids: torch.Tensor, state: Any) -> torch.Tensor:
        held_back.append(int(state.anchor_positions[0]) + 1 - 12 - len(streamer.generated))
        return draft_logits(head, anchor_ids, state)

    monkeypatch.setattr(type(knowing), "draft_logits", spy)
    target.generate(
        **reference.inputs, do_sample=False, max_new_tokens=NEW_TOKENS, streamer=streamer, assistant_model=knowing
    )
    assert held_back
    assert set(held_back) == {0}


def test_a_sampled_stream_is_the_plain_one(target: PreTrainedModel, knowing: OracleHead) -> None:
    ids, mask = left_padded(random_prompts((12,), 1))
    streamers = [RecordingStreamer(), RecordingStreamer()]
    for streamer, assistant in zip(streamers, (None, knowing), strict=True):
        torch.manual_seed(7)
        sequences = target.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            max_new_tokens=NEW_TOKENS,
            streamer=streamer,
            assistant_model=assistant,
        )
        knowing.know(sequences.tolist())
    assert streamers[1].calls == streamers[0].calls


def test_text_pieces_of_an_iterating_streamer_are_the_plain_ones(target: PreTrainedModel, knowing: OracleHead) -> None:
    tokenizer = letter_tokenizer()
    reference = reference_of(target, knowing, 1)
    pieces = []
    for assistant in (None, knowing):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        target.generate(
            **reference.inputs,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            streamer=streamer,
            assistant_model=assistant,
        )
        pieces.append(list(streamer))
    assert pieces[1] == pieces[0]
    assert "".join(pieces[1]) == tokenizer.decode(reference.new_tokens[0, :NEW_TOKENS])


def test_stops_of_several_kinds_meet_in_one_call(target: PreTrainedModel, knowing: OracleHead) -> None:
    tokenizer = letter_tokenizer()
    for batch, (eos_at, stop_at, calls) in itertools.product((1, 3), ((3, 9, 14), (12, 5, 9), (9, 12, 4))):
        reference = reference_of(target, knowing, batch, accuracy=0.9)
        sequences = [
            target.generate(
                **reference.inputs,
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                eos_token_id=int(reference.new_tokens[-1, eos_at]),
                stop_strings=[tokenizer.decode(reference.new_tokens[0, stop_at : stop_at + 2])],
                tokenizer=tokenizer,
                stopping_criteria=criteria(FiresAfterCalls(calls)),
                assistant_model=assistant,
            )
            for assistant in (None, knowing)
        ]
        assert torch.equal(*sequences)
