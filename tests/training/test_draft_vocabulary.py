"""The choice of draft tokens from counts worked out by hand."""

from typing import Any

import pytest

from jetspec_hf.training.draft_vocabulary import choose_draft_token_ids
from jetspec_hf.training.rows import rows_from_answers

# To be predicted: 7 five times, 4 three times, 9 and 5 once each; 8 stands in prompts only.
ROWS = [
    {"input_ids": [8, 8, 8, 7, 7, 7, 4], "loss_mask": [0, 0, 0, 1, 1, 1, 1]},
    {"input_ids": [8, 7, 7, 4, 4, 9, 5], "loss_mask": [0, 1, 1, 1, 1, 1, 1]},
]


@pytest.mark.parametrize(
    ("arguments", "token_ids", "coverage"),
    [
        ({}, [4, 5, 7, 9], 1.0),
        ({"coverage": 0.5}, [7], 0.5),
        ({"coverage": 0.51}, [4, 7], 0.8),
        ({"coverage": 0.85}, [4, 5, 7], 0.9),
        ({"size": 1}, [7], 0.5),
        ({"size": 3}, [4, 5, 7], 0.9),
        ({"size": 99}, [4, 5, 7, 9], 1.0),
        ({"size": 2, "coverage": 0.99}, [4, 7], 0.8),
        ({"size": 3, "coverage": 0.4}, [7], 0.5),
        ({"size": 3, "always": [2, 9]}, [2, 7, 9], 0.6),
        ({"coverage": 0.6, "always": [2, 9]}, [2, 7, 9], 0.6),
        ({"size": 2, "always": [3, 2, 3]}, [2, 3], 0.0),
    ],
)
def test_the_most_frequent_tokens_are_taken(arguments: dict[str, Any], token_ids: list[int], coverage: float) -> None:
    chosen = choose_draft_token_ids(ROWS, **arguments)
    assert chosen.token_ids == token_ids
    assert chosen.coverage == pytest.approx(coverage)


def test_a_dataset_gives_the_same_as_its_rows() -> None:
    rows = rows_from_answers([{"prompt_ids": [8, 8, 8], "response_ids": [7, 7, 4]}])
    for given in (rows, rows.with_format("numpy"), rows.with_format("torch")):
        (token,) = choose_draft_token_ids(given, size=1).token_ids
        assert (type(token), token) == (int, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coverage": 0.0}, r"`coverage` must be above 0 and at most 1, got 0\.0"),
        ({"coverage": 1.1}, r"`coverage` must be above 0 and at most 1, got 1\.1"),
        ({"size": 0}, "`size` must be at least 1 and have room for the 0 of `always`, got 0"),
        ({"size": 1, "always": [1, 2]}, "`size` must be at least 1 and have room for the 2 of `always`, got 1"),
    ],
)
def test_impossible_wishes_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_draft_token_ids(ROWS, **arguments)


def test_rows_without_a_token_to_be_predicted_are_refused() -> None:
    with pytest.raises(ValueError, match="`rows` must have a token to be predicted, got none"):
        choose_draft_token_ids([{"input_ids": [1, 2], "loss_mask": [0, 0]}])
