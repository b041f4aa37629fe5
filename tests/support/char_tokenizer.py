"""A tokenizer for tiny targets: tokens of one or two letters, joined without spaces."""

from __future__ import annotations

import itertools
import string

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<p>", "<s>", "</s>")  # ids 0, 1 and 2, as in the tiny targets' configs


def letter_tokenizer(vocab_size: int = 128) -> PreTrainedTokenizerFast:
    """The alphabet, then pairs of letters: a stop string may begin and end inside a token."""
    room = vocab_size - len(SPECIAL_TOKENS) - len(string.ascii_lowercase)
    pairs = list(itertools.islice(itertools.product("stkmpdlrng", "aeioubyjhw"), room))
    tokens = [*SPECIAL_TOKENS, *string.ascii_lowercase, *map("".join, pairs)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    tokenizer.decoder = decoders.Fuse()
    pad, bos, eos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, padding_side="left"
    )
