"""Rows from answers and conversations, packing and padding, against values worked out by hand.

The letter tokenizer has `<s>` = 1, `</s>` = 2, and `a` = 3 to `z` = 28; the letters used here form no pairs.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from jetspec_hf.training.rows import RowCollator, check_row, first_fit, pack_rows, rows_from_answers, rows_from_messages
from support.char_tokenizer import letter_tokenizer

A, C, F, Q, U, V, X, Z = (3 + "abcdefghijklmnopqrstuvwxyz".index(letter) for letter in "acfquvxz")
BOS, EOS = 1, 2

QUESTION = "{% if m.role == 'user' %}u{{ m.content }}"
PLAIN = (
    "<s>{% for m in messages %}" + QUESTION + "{% else %}a{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
# The letter c stands for the line feed that many templates put after EOS.
LINE_AFTER_EOS = PLAIN.replace("</s>", "</s>c")
TAGGED = PLAIN.replace("{{ m.content }}</s>", "{% generation %}{{ m.content }}</s>{% endgeneration %}")
TAG_BEFORE_EOS = PLAIN.replace("{{ m.content }}</s>", "{%- generation -%}{{ m.content }}{% endgeneration %}</s>c")
TAG_AFTER_LINE = PLAIN.replace("{{ m.content }}</s>", "{% generation %}{{ m.content }}</s>c{% endgeneration %}")
# As reasoning models do it: q is dropped from all answers but the last.
FORGETFUL = PLAIN.replace("a{{ m.content }}", "a{{ m.content if loop.last else m.content.replace('q', '') }}")


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    made = letter_tokenizer()
    made.chat_template = template
    return made


def conversation(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def row(length: int, supervised: int = 1, token: int = 5) -> dict[str, list[int]]:
    """A row whose last tokens are to be predicted."""
    return {"input_ids": [token] * length, "loss_mask": [0] * (length - supervised) + [1] * supervised}


def test_all_of_an_answer_and_nothing_of_the_prompt_is_to_be_predicted() -> None:
    rows = rows_from_answers([{"id": "q1", "source": "s", "prompt_ids": [BOS, U, V, A], "response_ids": [X, EOS]}])
    assert rows[0] == {"id": "q1", "source": "s", "input_ids": [1, 23, 24, 3, 26, 2], "loss_mask": [0, 0, 0, 0, 1, 1]}


def test_rows_have_no_names_if_an_answer_has_none() -> None:
    rows = rows_from_answers(
        [{"id": "q1", "prompt_ids": [1], "response_ids": [2]}, {"prompt_ids": [3], "response_ids": [4]}]
    )
    assert rows.column_names == ["input_ids", "loss_mask"]


def test_answers_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"id": "q1", "prompt_ids": [7, 8], "response_ids": [9]}) + "\n")
    assert rows_from_answers(path)[0] == {"id": "q1", "input_ids": [7, 8, 9], "loss_mask": [0, 0, 1]}


def test_a_row_without_an_answer_after_cutting_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    answers = [
        {"prompt_ids": [7, 8], "response_ids": [9, 9]},
        {"prompt_ids": [7, 8, 9], "response_ids": [9]},
        {"prompt_ids": [7, 8, 9, 9], "response_ids": [9]},
        {"prompt_ids": [7], "response_ids": []},
    ]
    rows = rows_from_answers(answers, max_length=3)
    assert rows[:] == {"input_ids": [[7, 8, 9]], "loss_mask": [[0, 0, 1]]}
    assert [record.getMessage() for record in caplog.records] == [
        "3 of 4 rows have no token to be predicted and are dropped."
    ]


def test_no_row_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="`rows` must have a row with a token to be predicted, got none"):
        rows_from_answers([{"prompt_ids": [7], "response_ids": []}])


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_the_mask_of_six_tokens_has_the_answer_and_its_eos(template: str) -> None:
    rows = rows_from_messages([conversation("v", "x")], tokenizer(template))
    assert rows[0] == {"input_ids": [BOS, U, V, A, X, EOS], "loss_mask": [0, 0, 0, 0, 1, 1]}


@pytest.mark.parametrize("template", [LINE_AFTER_EOS, TAG_BEFORE_EOS, TAG_AFTER_LINE])
def test_what_a_template_puts_after_the_eos_is_not_to_be_predicted(template: str) -> None:
    rows = rows_from_messages([conversation("v", "xz", "f", "z")], tokenizer(template))
    assert rows[0]["input_ids"] == [BOS, U, V, A, X, Z, EOS, C, U, F, A, Z, EOS, C]
    assert rows[0]["loss_mask"] == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0]


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_every_answer_of_a_conversation_is_to_be_predicted(template: str) -> None:
    rows = rows_from_messages([{"messages": conversation("v", "x", "f", "zq", "c")}], tokenizer(template))
    assert rows[0]["input_ids"] == [BOS, U, V, A, X, EOS, U, F, A, Z, Q, EOS, U, C]
    assert rows[0]["loss_mask"] == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0]


def test_other_tokens_than_the_tokenizers_eos_may_end_an_answer() -> None:
    template = PLAIN.replace("</s>", "zc")
    rows = rows_from_messages([conversation("v", "x")], tokenizer(template), eos_token_ids=[Z])
    assert rows[0] == {"input_ids": [BOS, U, V, A, X, Z, C], "loss_mask": [0, 0, 0, 0, 1, 1, 0]}


def test_a_template_without_eos_has_all_it_adds_to_an_answer_predicted() -> None:
    rows = rows_from_messages([conversation("v", "x", "f", "z")], tokenizer(PLAIN.replace("</s>", "c")))
    assert rows[0]["input_ids"] == [BOS, U, V, A, X, C, U, F, A, Z, C]
    assert rows[0]["loss_mask"] == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]


def test_variables_go_to_the_template() -> None:
    template = PLAIN.replace("<s>", "<s>{{ extra }}")
    rows = rows_from_messages([conversation("v", "x")], tokenizer(template), extra="q")
    assert rows[0]["input_ids"] == [BOS, Q, U, V, A, X, EOS]


def test_a_template_that_changes_earlier_answers_is_an_error_that_names_the_way_out() -> None:
    with pytest.raises(
        ValueError, match=r"through message 1 .* got 'qx</s>' instead of 'x</s>ufaqz</s>' after '<s>uva'"
    ) as e:
        rows_from_messages([conversation("v", "qx", "f", "qz")], tokenizer(FORGETFUL))
    assert "pass `row_per_turn=True`" in str(e.value)


@pytest.mark.parametrize("template", [FORGETFUL, TAGGED])
def test_a_row_per_turn_shows_each_answer_as_it_was_written(template: str) -> None:
    rows = rows_from_messages([conversation("v", "qx", "f", "qz")], tokenizer(template), row_per_turn=True)
    earlier = [X] if template == FORGETFUL else [Q, X]
    first = [BOS, U, V, A]
    second = [BOS, U, V, A, *earlier, EOS, U, F, A]
    assert rows["input_ids"][:] == [[*first, Q, X, EOS], [*second, Q, Z, EOS]]
    assert rows["loss_mask"][:] == [[0] * len(first) + [1] * 3, [0] * len(second) + [1] * 3]


def test_a_conversation_without_an_answer_is_dropped() -> None:
    rows = rows_from_messages([conversation("v"), conversation("v", "x")], tokenizer(PLAIN))
    assert rows["input_ids"][:] == [[BOS, U, V, A, X, EOS]]


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(ValueError, match="`tokenizer` must be a fast tokenizer with a chat template, got no chat"):
        rows_from_messages([conversation("v", "x")], tokenizer(None))


def test_documents_are_packed_first_fit_with_the_longest_first() -> None:
    # 6 opens the first row, 5 the second; 4 fits into the first, 3 into the second, 2 into the second, 1 opens a third.
    rows = pack_rows([row(3, token=13), row(6, token=16), row(1, token=11), row(2, token=12), row(5, token=15),
                      row(4, token=14)], length=10)  # fmt: skip
    assert rows["input_ids"][:] == [[16] * 6 + [14] * 4, [15] * 5 + [13] * 3 + [12] * 2, [11]]
    assert rows["document_ids"][:] == [[0] * 6 + [1] * 4, [0] * 5 + [1] * 3 + [2] * 2, [0]]
    assert rows["loss_mask"][0] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 1]


def test_a_document_longer_than_a_row_is_cut_and_dropped_if_no_answer_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = pack_rows([row(6, supervised=4, token=7), row(6, supervised=1, token=8), row(2, token=9)], length=4)
    assert rows["input_ids"][:] == [[7] * 4, [9] * 2]
    assert rows["loss_mask"][:] == [[0, 0, 1, 1], [0, 1]]
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 3 rows have no token to be predicted and are dropped."
    ]


def test_packed_rows_are_not_packed_again() -> None:
    with pytest.raises(ValueError, match="`rows` must not be packed yet, got `document_ids` in row 0"):
        pack_rows(pack_rows([row(3)], 4), 8)


def naive_first_fit(sizes: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        for items in bins:
            if sum(sizes[other] for other in items) + sizes[item] <= capacity:
                items.append(item)
                break
        else:
            bins.append([item])
    return bins


@given(sizes=st.lists(st.integers(1, 12), max_size=40))
@settings(max_examples=100, deadline=None)
def test_first_fit_is_what_trying_bin_after_bin_gives(sizes: list[int]) -> None:
    assert first_fit(sizes, 12) == naive_first_fit(sizes, 12)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_batch_is_padded_on_the_side_asked_for(side: str) -> None:
    rows: list[dict[str, Any]] = [
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1], "document_ids": [0, 0, 1, 1], "source": "x"},
        {"input_ids": [9, 3], "loss_mask": [0, 1]},
    ]
    batch = RowCollator(pad_token_id=4, padding_side=side)(rows)
    right = side == "right"
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [9, 3, 4, 4] if right else [4, 4, 9, 3]]
    assert batch["document_ids"].tolist() == [[0, 0, 1, 1], [0, 0, -1, -1] if right else [-1, -1, 0, 0]]
    no, yes = False, True
    assert batch["loss_mask"].tolist() == [[no, yes, no, yes], [no, yes, no, no] if right else [no, no, no, yes]]
    assert batch["input_ids"].dtype == batch["document_ids"].dtype == torch.long


def test_a_batch_of_a_dataset_is_that_of_its_rows() -> None:
    rows = pack_rows([row(3, token=6), row(2, token=7), row(4, token=8)], 5)
    collator = RowCollator(pad_token_id=0)
    expected = {
        "input_ids": [[8, 8, 8, 8, 0], [6, 6, 6, 7, 7]],
        "loss_mask": [[False, False, False, True, False], [False, False, True, False, True]],
        "document_ids": [[0, 0, 0, 0, -1], [0, 0, 0, 1, 1]],
    }
    for given_rows in (list(rows), list(rows.with_format("torch")), list(rows.with_format("numpy"))):
        assert {name: value.tolist() for name, value in collator(given_rows).items()} == expected


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="`loss_mask` of a row must be as long as its `input_ids`, 3, got 2"):
        RowCollator(pad_token_id=0)([{"input_ids": [1, 2, 3], "loss_mask": [0, 1]}])
    with pytest.raises(ValueError, match="`loss_mask` of a row must be as long as its `input_ids`, 3, got 2"):
        pack_rows([{"input_ids": [1, 2, 3], "loss_mask": [0, 1]}], 4)


def test_an_unknown_padding_side_is_refused() -> None:
    with pytest.raises(ValueError, match="`padding_side` must be 'right' or 'left', got 'middle'"):
        RowCollator(pad_token_id=0, padding_side="middle")


def test_the_trainers_own_grouping_by_length_finds_the_lengths_of_rows(tmp_path: Path) -> None:
    lengths = [2, 9, 4, 7]
    rows = rows_from_answers([{"prompt_ids": [5], "response_ids": [6] * (length - 1)} for length in lengths])
    arguments = TrainingArguments(
        str(tmp_path),
        train_sampling_strategy="group_by_length",
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
    )
    trainer = Trainer(torch.nn.Linear(1, 1), arguments, RowCollator(pad_token_id=0), train_dataset=rows)
    sampler = trainer._get_train_sampler()
    assert isinstance(sampler, LengthGroupedSampler)
    assert sampler.lengths == lengths


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [3, 4]}, "`loss_mask` of row 7 must be there, got columns input_ids"),
        ({"input_ids": None, "loss_mask": [0, 1]}, "`input_ids` of row 7 must be there"),
        (
            {"input_ids": [3.0, 4.0], "loss_mask": [0, 1]},
            "`input_ids` of row 7 must be a list of integers, got float64",
        ),
        ({"input_ids": ["a", "b"], "loss_mask": [0, 1]}, "`input_ids` of row 7 must be a list of integers"),
        ({"input_ids": [[3, 4]], "loss_mask": [[0, 1]]}, "`input_ids` of row 7 must be a list of integers"),
        ({"input_ids": [3, 128], "loss_mask": [0, 1]}, "`input_ids` of row 7 must be from 0 to 127, got 128"),
        ({"input_ids": [3, -100], "loss_mask": [0, 1]}, "`input_ids` of row 7 must be from 0 to 127, got -100"),
        ({"input_ids": [3, 4], "loss_mask": [0, 2]}, "`loss_mask` of row 7 must be from 0 to 1, got 2"),
        ({"input_ids": [3, 4], "loss_mask": [0, 0.5]}, "`loss_mask` of row 7 must be a list of integers"),
        ({"input_ids": [3, 4], "loss_mask": [1]}, "`loss_mask` of a row must be as long as its `input_ids`, 2, got 1"),
        (
            {"input_ids": [3, 4], "loss_mask": [0, 1], "document_ids": [0, -2]},
            "`document_ids` of row 7 must be at least -1, got -2",
        ),
    ],
)
def test_a_row_that_is_none_is_refused_with_the_column_the_rule_and_the_value(
    row: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_row(row, "row 7", num_tokens=128)


@pytest.mark.parametrize("convert", [list, torch.tensor])
def test_a_row_of_lists_or_tensors_of_integers_is_let_through(convert: Any) -> None:
    check_row({"input_ids": convert([0, 127]), "loss_mask": convert([0, 1])}, "row 0", num_tokens=128)
