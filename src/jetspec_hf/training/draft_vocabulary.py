"""Which tokens a draft head may draft: those that the target writes most often.

A head multiplies its states by these rows of the target's `lm_head` only. What the target writes beside them is
verified as ever, and merely never drafted.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that a head may draft.

    Attributes:
        token_ids (`list[int]`): In ascending order.
        coverage (`float`): Share of the tokens to be predicted that are among them.
    """

    token_ids: list[int]
    coverage: float


def choose_draft_token_ids(
    rows: Iterable[Mapping[str, Any]],
    coverage: float | None = None,
    size: int | None = None,
    always: Iterable[int] = (),
) -> DraftVocabulary:
    """Takes the most frequent of the tokens to be predicted, of equally frequent ones those of lower id.

    With neither `coverage` nor `size` every such token is taken, with both the fewest that reach the coverage, `size`
    of them at most.

    Args:
        rows (iterable of `dict`): Rows with `input_ids` and `loss_mask`, for example a `datasets.Dataset`.
        coverage (`float`, *optional*): Share of the tokens to be predicted that must be among the taken ones.
        size (`int`, *optional*): How many tokens are taken at most, `always` included.
        always (iterable of `int`, *optional*): Tokens that are taken in any case, above all the target's EOS ids.

    Returns:
        [`DraftVocabulary`]

    Raises:
        ValueError: If `coverage` is not in (0, 1], if `size` has no room for `always` or for any token, or if no token
            is to be predicted.
    """
    always = list(always)
    if odd := [token for token in always if not isinstance(token, int)]:
        raise ValueError(f"`always` must be token ids, got {odd[0]!r}.")
    taken = set(always)
    if coverage is not None and not 0 < coverage <= 1:
        raise ValueError(f"`coverage` must be above 0 and at most 1, got {coverage}.")
    if size is not None and size < max(1, len(taken)):
        raise ValueError(f"`size` must be at least 1 and have room for the {len(taken)} of `always`, got {size}.")
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update(map(int, compress(row["input_ids"], row["loss_mask"])))
    total = counts.total()
    if total == 0:
        raise ValueError("`rows` must have a token to be predicted, got none.")
    covered = sum(counts[token] for token in taken)
    for token, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(taken) == size or (coverage is not None and covered >= coverage * total):
            break
        if token not in taken:
            taken.add(token)
            covered += count
    return DraftVocabulary(sorted(taken), covered / total)
