"""Chi-square tests against a distribution found by enumeration, with torch alone."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

SMALLEST_EXPECTED_COUNT = 5.0  # the usual rule for the chi-square approximation; rarer cells are pooled


def chi_square_p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Probability of counts at least this far from `probabilities`, if they were drawn from it.

    Args:
        counts: how often each outcome was seen, any shape.
        probabilities: the outcomes' probabilities, of the same shape, with sum 1.
    """
    observed, expected = counts.flatten().double(), probabilities.flatten().double() * counts.sum()
    assert observed[expected == 0].sum() == 0, "an outcome of probability 0 was drawn"
    rare = expected < SMALLEST_EXPECTED_COUNT
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2, dtype=torch.float64), statistic / 2))


@torch.no_grad()
def continuation_probabilities(
    target: PreTrainedModel, prompt: list[int], depth: int, temperature: float = 1.0, top_k: int | None = None
) -> torch.Tensor:
    """Probability of every continuation, of shape `(vocab,) * depth`, by running the target over every prefix."""
    vocab_size = target.config.vocab_size
    tokens = torch.arange(vocab_size)
    prefixes = torch.cartesian_prod(*[tokens] * (depth - 1)).reshape(-1, depth - 1)
    ids = torch.cat([torch.tensor(prompt).expand(len(prefixes), -1), prefixes], dim=1)
    logits = target(ids).logits[:, len(prompt) - 1 :].double() / temperature
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], float("-inf"))
    conditional = logits.softmax(-1)  # (prefixes, depth, vocab)
    joint = conditional[:, -1]
    for level in range(depth - 1):
        joint = joint * conditional[:, level].gather(1, prefixes[:, level : level + 1])
    return joint.reshape((vocab_size,) * depth)


def count_continuations(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """How often each continuation occurs among rows of shape `(rows, depth)`; shape `(vocab,) * depth`."""
    depth = tokens.shape[1]
    weights = vocab_size ** torch.arange(depth - 1, -1, -1)
    return torch.bincount((tokens * weights).sum(1), minlength=vocab_size**depth).reshape((vocab_size,) * depth)
