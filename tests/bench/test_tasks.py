"""Prompt files, and what a target sees of a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec_hf.bench.tasks import Prompt, batches, encode, left_padded, read_tasks
from support.char_tokenizer import letter_tokenizer


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_first_turn_is_asked(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"id": "mt-81", "task": "mt_bench", "turns": ["Compose.", "Rewrite."]})
    assert read_tasks([path]) == [Prompt("mt-81", "mt_bench", "Compose.")]


def test_a_plain_prompt_is_named_by_its_file_and_its_place(tmp_path: Path) -> None:
    path = written(tmp_path / "stories.jsonl", {"prompt": "Once"}, {"prompt": "Twice", "turns": None, "id": 7})
    assert read_tasks([path]) == [Prompt("0", "stories", "Once"), Prompt("7", "stories", "Twice")]


def test_the_limit_counts_in_each_task_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    first = tmp_path / "a.jsonl"
    rows = ("", {"prompt": "x"}, "", {"prompt": "other", "task": "c"}, {"prompt": "y"}, {"prompt": "left out"})
    first.write_text("".join(f"{json.dumps(row) if row else ''}\n" for row in rows), encoding="utf-8")
    second = written(tmp_path / "b.jsonl", {"prompt": "z"}, {"prompt": "also", "task": "c", "id": "another"})
    read = read_tasks([first, second], limit=2)
    assert [(prompt.task, prompt.text) for prompt in read] == [
        ("a", "x"), ("c", "other"), ("a", "y"), ("b", "z"), ("c", "also"),
    ]  # fmt: skip


def test_spec_bench_names_are_read(tmp_path: Path) -> None:
    row = {"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."], "reference": []}
    assert read_tasks([written(tmp_path / "question.jsonl", row)]) == [Prompt("81", "writing", "Compose.")]
    with pytest.raises(ValueError, match=r"`category` in line 1 of question\.jsonl must be a text, got 3\."):
        read_tasks([written(tmp_path / "question.jsonl", {**row, "category": 3})])


def prompts(task: str, count: int) -> list[Prompt]:
    return [Prompt(str(number), task, "text") for number in range(count)]


def test_batches_hold_neighbours_of_a_task_and_leave_the_last_ones_out() -> None:
    a, b = prompts("a", 5), prompts("b", 2)
    mixed = [a[0], b[0], *a[1:], b[1]]
    assert batches(mixed, 2) == [(a[0], a[1]), (a[2], a[3]), (b[0], b[1])]
    assert batches(mixed, 1) == [(prompt,) for prompt in (*a, *b)]
    with pytest.raises(ValueError, match=r"`batch_size` must be at most .* every task, got 3 for 2 of 'b'\."):
        batches(mixed, 3)


def test_shorter_prompts_of_a_batch_are_padded_on_the_left() -> None:
    ids, mask = left_padded([torch.tensor([[5, 6, 7]]), torch.tensor([[8]])], pad_token_id=9)
    assert ids.tolist() == [[5, 6, 7], [9, 9, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "one\u2028two"}\n', encoding="utf-8")
    assert read_tasks([path])[0].text == "one\u2028two"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "a"}, r"A prompt must have `prompt` or `turns`, got neither in line 2 of Tasks\.jsonl\."),
        ({"prompt": "a", "turns": ["b"]}, r"must have `prompt` or `turns`, got prompt and turns in line 2"),
        ({"turns": []}, r"`turns` in line 2 of Tasks\.jsonl must be a list of texts that are not empty, got \[\]\."),
        ({"turns": "one"}, r"`turns` in line 2 of Tasks\.jsonl must be a list of texts that are not empty, got 'one'"),
        ({"turns": ["a", 2]}, r"must be a list of texts that are not empty, got \['a', 2\]"),
        ({"prompt": ""}, r"`prompt` in line 2 of Tasks\.jsonl must be a text that is not empty, got ''\."),
        ({"prompt": ["a"]}, r"`prompt` in line 2 of Tasks\.jsonl must be a text that is not empty, got \['a'\]"),
        ({"prompt": "a", "task": 3}, r"`task` in line 2 of Tasks\.jsonl must be a text, got 3\."),
        ({"prompt": "a", "id": True}, r"`id` in line 2 of Tasks\.jsonl must be a text or a number, got True\."),
        ([1], r"A prompt must be a JSON object, got '\[1\]' in line 2 of Tasks\.jsonl\."),
    ],
)
def test_a_bad_line_is_refused_with_its_place(tmp_path: Path, row: Any, message: str) -> None:
    path = written(tmp_path / "Tasks.jsonl", {"prompt": "good"}, row)
    with pytest.raises(ValueError, match=message):
        read_tasks([path])


def test_a_line_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("id,prompt\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"A prompt must be a JSON object, got 'id,prompt' in line 1 of a\.jsonl: "):
        read_tasks([path])


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl must have a prompt at least, got none\."):
        read_tasks([path])


def test_an_id_may_be_there_once_in_a_task(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"id": 1, "prompt": "x"}, {"id": 1, "task": "b", "prompt": "y"})
    assert len(read_tasks([path])) == 2
    with pytest.raises(ValueError, match=r"`id` must be there once in a task, got '1' again in 'a'\."):
        read_tasks([path, path])


def test_without_a_chat_template_the_text_stands_as_it_is() -> None:
    # "h" and "i" are the letters 7 and 8 after three special tokens
    assert encode(Prompt("0", "a", "hi"), letter_tokenizer()).tolist() == [[10, 11]]


def test_with_a_chat_template_the_text_is_what_the_user_says() -> None:
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'][0] }}{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}z{% endif %}"
    )
    assert encode(Prompt("0", "a", "hi"), tokenizer).tolist() == [[23, 10, 11, 28]]


def test_a_prompt_of_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"The prompt of id '0' must have a token at least, got none\."):
        encode(Prompt("0", "a", "123"), letter_tokenizer())
