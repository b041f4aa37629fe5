"""Plain `generate` as the oracle: prompts, left padding, and the texts that tree decoding must return."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

# Prompt lengths of the batches the tests use; the longest row needs no padding, and one prompt has a single token.
PROMPT_LENGTHS = {1: (12,), 3: (12, 1, 5), 8: (9, 1, 5, 12, 3, 7, 2, 10)}
FIRST_PLAIN_TOKEN = 3  # tiny targets keep 0, 1 and 2 for pad, BOS and EOS


@dataclasses.dataclass(frozen=True)
class Reference:
    """A left-padded batch of prompts and what plain decoding makes of it.

    Args:
        input_ids: prompts of shape `(batch, prompt_length)`, left-padded.
        attention_mask: 1 for prompt tokens, of the same shape.
        sequences: plain `generate`'s output of shape `(batch, prompt_length + new_tokens)`.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    sequences: torch.Tensor

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What to hand to `generate`."""
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}

    @property
    def new_tokens(self) -> torch.Tensor:
        """The plain continuation, of shape `(batch, new_tokens)`."""
        return self.sequences[:, self.input_ids.shape[1] :]

    @property
    def texts(self) -> list[list[int]]:
        """Each row's prompt and continuation without the tokens that are masked out."""
        width = self.input_ids.shape[1]
        return [
            [*row[:width][mask.bool()].tolist(), *row[width:].tolist()]
            for row, mask in zip(self.sequences, self.attention_mask, strict=True)
        ]

    def texts_until(self, *eos_token_ids: int) -> list[list[int]]:
        """`texts`, each cut after the first of these tokens that its row generated."""
        cut = []
        for text, row in zip(self.texts, self.new_tokens.tolist(), strict=True):
            ends = [at for at, token in enumerate(row) if token in eos_token_ids]
            cut.append(text[: len(text) - len(row) + ends[0] + 1] if ends else text)
        return cut

    def first(self, new_tokens: int) -> torch.Tensor:
        """The sequences after `new_tokens` tokens: what greedy decoding returns when it is cut there."""
        return self.sequences[:, : self.input_ids.shape[1] + new_tokens]


def left_padded(rows: Sequence[Sequence[int]], pad_token_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask of a batch of prompts, padded on the left."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad_token_id] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def random_prompts(lengths: Sequence[int], seed: int, vocab_size: int = 128) -> list[list[int]]:
    """Prompts of the given lengths, without special tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(FIRST_PLAIN_TOKEN, vocab_size) for _ in range(length)] for length in lengths]


def plain_greedy(
    target: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor, new_tokens: int, **kwargs: Any
) -> Reference:
    """Plain greedy decoding of a batch."""
    sequences = target.generate(
        input_ids, attention_mask=attention_mask, max_new_tokens=new_tokens, do_sample=False, **kwargs
    )
    return Reference(input_ids, attention_mask, sequences)


def no_options() -> dict[str, Any]:
    """Nothing besides the prompts and the number of new tokens."""
    return {}


def greedy_reference(
    target: PreTrainedModel,
    lengths: Sequence[int],
    new_tokens: int,
    seed: int = 0,
    options: Callable[[], dict[str, Any]] = no_options,
) -> Reference:
    """A batch whose plain greedy text has a clear choice at every token.

    Random targets now and then have two best logits within rounding of each other, where one-token decoding itself
    depends on the batch shape. The first prompts without such a tie, and whose text does not repeat a single token, are
    taken: a margin of 1e-3 of the logits' standard deviation, a hundred times the rounding error of tree verification.

    Args:
        target: the model.
        lengths: prompt length of each row.
        new_tokens: tokens to generate.
        seed: seed of the prompts.
        options: makes the further arguments of one `generate` call (a factory, since logits processors keep state).
    """
    for attempt in range(100):
        prompts = random_prompts(lengths, seed * 1000 + attempt, target.config.get_text_config().vocab_size)
        ids, mask = left_padded(prompts)
        plain = target.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
            **options(),
        )
        logits = torch.stack(plain.logits)
        best, second = torch.stack(plain.scores).topk(2).values.unbind(-1)
        varied = len(set(plain.sequences[0, ids.shape[1] :].tolist())) >= min(4, new_tokens)
        if varied and (best - second).min() > 1e-3 * logits.std():
            return Reference(ids, mask, plain.sequences)
    raise AssertionError(f"no decisive prompts of lengths {lengths} found for {type(target).__name__}")
