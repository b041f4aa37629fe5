"""Text as it is accepted, and where it comes from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from jetspec_hf.cli.streaming import AcceptanceStreamer
from support.char_tokenizer import letter_tokenizer
from support.oracle import OracleHead

PROMPT = [5, 17, 99, 42, 8]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, as byte-level tokenizers spell what they have no token for."""
    tokenizer = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, []))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentence_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens that begin with a space, which the decoder drops at the start of a text."""
    vocab = {"▁one": 0, "▁two": 1, "s": 2}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def streamed(tokenizer: Any, token_ids: list[int], head: Any = None) -> list[str]:
    """The pieces in which these tokens come out."""
    pieces: list[str] = []
    head = head or type("Head", (), {"last_acceptance": type("Stats", (), {"accepted_lengths": [[]]})})
    streamer = AcceptanceStreamer(tokenizer, head, lambda piece, _drafted: pieces.append(piece))
    streamer.put(torch.tensor([PROMPT]))
    for token in token_ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    return pieces


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"eos_token_id": 40}], ids=str)
def test_each_piece_is_told_to_be_drafted_or_the_targets_own(target: PreTrainedModel, options: Any) -> None:
    prompt = torch.tensor([PROMPT])
    options = {"max_new_tokens": 40, "attention_mask": torch.ones_like(prompt), **options}
    torch.manual_seed(0)
    plain = target.generate(prompt, **options)[0].tolist()
    head = OracleHead.from_target(target, block_size=6).draft_with(tree_budget=8)
    head.know([plain], accuracy=0.8, runner_up_rate=0.2)
    tokenizer, shown = letter_tokenizer(), []
    streamer = AcceptanceStreamer(tokenizer, head, lambda piece, drafted: shown.append((piece, drafted)))
    torch.manual_seed(0)
    output = target.generate(prompt, assistant_model=head, streamer=streamer, return_dict_in_generate=True, **options)
    lengths = output.acceptance.accepted_lengths[0]
    drafted = [False] + [token < length - 1 for length in lengths for token in range(length)]
    new_tokens = plain[len(PROMPT) :]
    tokens = [(tokenizer.decode([token]), mark) for token, mark in zip(new_tokens, drafted, strict=True) if token > 2]
    assert shown == tokens
    assert {1, 2, 3} < set(lengths)


def test_characters_come_whole() -> None:
    text = "é€😀x"
    assert streamed(byte_tokenizer(), list(text.encode())) == ["é", "€", "😀", "x"]


def test_a_character_that_is_never_finished_comes_at_the_end() -> None:
    assert "".join(streamed(byte_tokenizer(), [*b"ab", 0xE2, 0x82])).startswith("ab\N{REPLACEMENT CHARACTER}")


def test_spaces_between_tokens_are_kept() -> None:
    assert streamed(sentence_tokenizer(), [0, 2, 1, 1, 2]) == ["one", "s", " two", " two", "s"]
