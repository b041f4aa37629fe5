"""The largest logit, found block by block."""

from __future__ import annotations

import math

import pytest
import torch

from jetspec_hf.decoding.accept import first_largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 2, 3, 4, 15, 16, 17, 99, 1000, 4097])
def test_it_is_argmax_also_among_equals(vocabulary: int, dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(vocabulary)
    for levels in (2, 5, 10_000):  # few levels: many equals
        logits = torch.randint(levels, (vocabulary,), generator=draws).to(dtype)
        assert first_largest(logits) == int(logits.argmax())


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 7, 49, 99, 102])  # of 103: ten blocks of ten, and three more
def test_it_is_argmax_where_logits_are_not_finite(special: float, place: int) -> None:
    logits = torch.linspace(0.0, 1.0, 103).roll(40)
    logits[place] = special
    assert first_largest(logits) == int(logits.argmax())
    everywhere = torch.full((103,), special)
    assert first_largest(everywhere) == int(everywhere.argmax()) == 0
