"""Answers of tiny targets: what is kept of them, and that no kill, restart or sharing of the work changes them.

The letter tokenizer has `<s>` = 1, `</s>` = 2, and `a` = 3 to `z` = 28.
"""

import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from jetspec_hf.training import regenerate as module
from jetspec_hf.training.answers import AnswerFile, read_answers
from jetspec_hf.training.prompts import read_prompts
from jetspec_hf.training.regenerate import main, regenerate
from support.char_tokenizer import letter_tokenizer
from support.recording import Fingerprint
from support.tiny_targets import tiny_target

TEMPLATE = (
    "<s>{% if deep is defined and deep %}f{% endif %}{% for m in messages %}{{ m.role[0] }}{{ m.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
EOS = 2


def questions(count: int, seed: int = 0) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [{"id": f"q{n}", "prompt": "".join(rng.choices(LETTERS, k=rng.randint(1, 12)))} for n in range(count)]


def plain_answer(target: PreTrainedModel, prompt_ids: list[int], new_tokens: int) -> list[int]:
    """Greedy text after one prompt alone, without padding and beyond any EOS."""
    ids = torch.tensor([prompt_ids])
    generating: Any = target
    output = generating.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
    )
    return list(output[0, ids.shape[1] :].tolist())


def by_id(path: Path) -> dict[Any, dict[str, Any]]:
    return {(row["id"], row.get("turn", 0)): row for row in map(json.loads, path.read_text().splitlines())}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    made = letter_tokenizer()
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def test_answers_are_those_of_each_prompt_alone_up_to_the_eos(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path
) -> None:
    prompts = questions(10)
    plain = {q["id"]: plain_answer(target, tokenizer(q["prompt"])["input_ids"], 8) for q in prompts}
    eos = plain["q3"][4]
    regenerate(
        target, tokenizer, prompts, output,
        batch_size=4, max_new_tokens=8, chat_template=False, do_sample=False, eos_token_id=eos,
    )  # fmt: skip
    answers = by_id(output)
    assert len(answers) == len(output.read_text().splitlines()) == 10
    for question in prompts:
        answer, whole = answers[question["id"], 0], plain[question["id"]]
        cut = whole[: whole.index(eos) + 1] if eos in whole else whole
        assert answer == {
            "id": question["id"],
            "prompt_ids": tokenizer(question["prompt"])["input_ids"],
            "response_ids": cut,
            "finish": "eos" if eos in whole else "length",
        }
    assert {answer["finish"] for answer in answers.values()} == {"eos", "length"}


def test_prompts_go_through_the_chat_template_with_its_variables(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path
) -> None:
    prompts: list[dict[str, Any]] = [
        {"id": 1, "prompt": "v", "source": "letters", "messages": None},
        {"id": "two", "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "z"},
                                   {"role": "assistant", "content": "dropped"}]},
    ]  # fmt: skip
    regenerate(target, tokenizer, prompts, output, max_new_tokens=1, template_kwargs={"deep": True})
    answers = by_id(output)
    # <s> f u v </s> a, and <s> f s x </s> u z </s> a
    assert answers["1", 0]["prompt_ids"] == [1, 8, 23, 24, 2, 3]
    assert answers["1", 0]["source"] == "letters"
    assert answers["two", 0]["prompt_ids"] == [1, 8, 21, 26, 2, 23, 28, 2, 3]


def test_every_turn_is_answered_after_the_answers_before_it(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path
) -> None:
    prompts: list[dict[str, Any]] = [
        {"id": "one", "turns": ["v"]},
        {"id": "three", "turns": ["x", "z", "q"]},
        {"id": "asked", "prompt": "f"},
    ]
    regenerate(target, tokenizer, prompts, output, max_new_tokens=4, do_sample=False)
    answers = by_id(output)
    assert set(answers) == {("one", 0), ("three", 0), ("three", 1), ("three", 2), ("asked", 0)}
    assert "turn" not in answers["asked", 0]
    text = "<s>ux</s>"
    for turn, question in enumerate(["z", "q", None]):
        answer = answers["three", turn]
        assert answer["prompt_ids"] == tokenizer(text + "a")["input_ids"]
        assert answer["response_ids"] == plain_answer(target, answer["prompt_ids"], 4)
        text += f"a{tokenizer.decode(answer['response_ids'], skip_special_tokens=True)}</s>u{question}</s>"


def test_prompts_come_from_a_file_or_a_dataset_alike(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    prompts = [{"prompt": question["prompt"]} for question in questions(5)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, prompts)) + "\n\n")
    for name, given in (("a", prompts), ("b", file), ("c", Dataset.from_list(prompts))):
        regenerate(target, tokenizer, given, tmp_path / name, max_new_tokens=3, limit=4)
    written = (tmp_path / "a").read_bytes()
    assert len(written.splitlines()) == 4
    assert (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes() == written


def test_a_batch_holds_prompts_of_similar_length(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WINDOW_BATCHES", 2)
    prompts = [{"id": str(n), "prompt": "x" * n} for n in (1, 8, 2, 7, 5, 6, 3, 4)]
    regenerate(target, tokenizer, prompts, output, batch_size=2, max_new_tokens=1)
    assert [row["id"] for row in map(json.loads, output.read_text().splitlines())] == list("87216543")


def test_the_target_and_the_random_numbers_are_left_alone(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path
) -> None:
    before = Fingerprint.of(target)
    state = torch.get_rng_state()
    regenerate(target, tokenizer, questions(4), output, max_new_tokens=4, do_sample=True)
    assert torch.equal(torch.get_rng_state(), state)
    before.assert_unchanged(target)


def test_sampled_answers_follow_from_the_seed(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(ord(name))  # must not matter
        regenerate(target, tokenizer, questions(6), tmp_path / name, max_new_tokens=6, seed=seed, do_sample=True)
    written = [(tmp_path / name).read_bytes() for name in "abc"]
    assert written[0] == written[1] != written[2]


def test_a_file_cut_anywhere_is_gone_on_with_to_the_same_bytes(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path
) -> None:
    prompts: list[dict[str, Any]] = [*questions(4), {"id": "talk", "turns": ["v", "x"]}]

    def run() -> bytes:
        regenerate(target, tokenizer, prompts, output, batch_size=2, max_new_tokens=3, do_sample=True, temperature=2.0)
        return output.read_bytes()

    whole = run()
    line_ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    places = {0, *line_ends, *(end - 1 for end in line_ends), *random.Random(0).sample(range(len(whole)), 20)}
    for place in sorted(places):
        output.write_bytes(whole[:place])
        assert run() == whole, f"after a cut at byte {place}"
    output.unlink()
    assert run() == whole


def test_finished_answers_are_not_written_again(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regenerate(target, tokenizer, questions(4), output, batch_size=2, max_new_tokens=3)
    monkeypatch.setattr(target, "generate", None)
    assert regenerate(target, tokenizer, questions(4), output, batch_size=2, max_new_tokens=3) == output


def test_prompts_may_be_added_at_the_end_again_and_again(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    def run(name: str, limit: int) -> list[bytes]:
        regenerate(target, tokenizer, questions(12), tmp_path / name, batch_size=4, max_new_tokens=3, limit=limit)
        return (tmp_path / name).read_bytes().splitlines(keepends=True)

    first = run("a", 3)
    second = run("a", 10)
    assert second[:3] == first
    (tmp_path / "a").write_bytes(b"".join(second[:5])[:-1])
    assert run("a", 12)[:10] == second
    assert sorted(by_id(tmp_path / "a")) == sorted((question["id"], 0) for question in questions(12))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"temperature": 0.7}, r"`generate_options.temperature` must be what .* was started with, 0\.5, got 0\.7"),
        ({"top_k": 5}, "`generate_options.top_k` must be what .* was started with, None, got 5"),
        ({"max_new_tokens": 3}, "`generate_options.max_new_tokens` must be what .* was started with, 2, got 3"),
        ({"seed": 4}, "`seed` must be what .* was started with, 0, got 4"),
        ({"batch_size": 3}, "`batch_size` must be what .* was started with, 16, got 3"),
        (
            {"template_kwargs": {"deep": True}},
            "`template_kwargs.deep` must be what .* was started with, None, got True",
        ),
        ({"chat_template": False}, "`template_fingerprint` must be what .* was started with, '[0-9a-f]+', got None"),
        ({"prompts": questions(2)}, r"`prompts` must begin with the 3 prompts of which .* was made, got 2"),
        ({"prompts": questions(5, 1)}, r"`prompts` must begin with the 3 .*, got 5 that differ between 0 and 3"),
    ],
)
def test_other_settings_are_an_error_with_both_values(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path, changed: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {"prompts": questions(3), "max_new_tokens": 2, "do_sample": True, "temperature": 0.5}
    regenerate(target, tokenizer, output_path=output, **arguments)
    before = output.read_bytes()
    with pytest.raises(ValueError, match=message):
        regenerate(target, tokenizer, output_path=output, **{**arguments, **changed})
    assert output.read_bytes() == before


def test_another_target_or_a_changed_default_is_an_error(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path
) -> None:
    target.config.name_or_path = "first"
    regenerate(target, tokenizer, questions(2), output, max_new_tokens=2)
    target.generation_config.repetition_penalty = 1.5
    with pytest.raises(ValueError, match=r"`generation_config.repetition_penalty` must be .*, None, got 1\.5"):
        regenerate(target, tokenizer, questions(2), output, max_new_tokens=2)
    target.config.name_or_path = "second"
    target.generation_config.repetition_penalty = None
    with pytest.raises(ValueError, match=r"`target` must be what .* was started with, 'first', got 'second'"):
        regenerate(target, tokenizer, questions(2), output, max_new_tokens=2)


def test_a_file_that_is_not_of_this_run_is_not_touched(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path
) -> None:
    output.write_text(json.dumps({"id": "q9", "prompt_ids": [5], "response_ids": [6]}) + "\n")
    before = output.read_bytes()
    with pytest.raises(ValueError, match=r"must have its settings in answers.jsonl.settings.json, which is not there"):
        regenerate(target, tokenizer, questions(3), output, max_new_tokens=2)
    assert output.read_bytes() == before


def test_rows_that_were_moved_about_are_an_error(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path
) -> None:
    regenerate(target, tokenizer, questions(4), output, batch_size=2, max_new_tokens=2)
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[2:]))
    first, other = (", ".join(json.loads(line)["id"] for line in part) for part in (lines[:2], lines[2:]))
    with pytest.raises(ValueError, match=f"must go on with the answers of ids {first}, got those of {other}"):
        regenerate(target, tokenizer, questions(4), output, batch_size=2, max_new_tokens=2)
    assert output.read_bytes() == b"".join(lines[2:])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([{"id": "b", "prompt": "x"}, {"id": "a", "prompt": "v"}, {"id": "b", "prompt": "z"}], "got 1 ids .*: b"),
        ([{"prompt": "x"}, {"prompt": "x"}], "drop the repeated ones, or give them ids"),
        ([{"prompt": "x"}, {"text": "x"}], "Prompt 1 must have one of `prompt`, `messages` and `turns`, got none"),
        ([{"prompt": "x", "turns": ["x"]}], "Prompt 0 must have one of .*, got prompt and turns"),
        ([{"prompt": 7}], "`prompt` of prompt 0 must be text, got 7"),
        ([{"turns": []}], r"`turns` of prompt 0 must be a list of what the user says, got \[\]"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], "`messages` of prompt 0 must have a message"),
    ],
)
def test_prompts_that_cannot_be_answered_are_named(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path, prompts: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        regenerate(target, tokenizer, prompts, output)
    assert not output.exists()


def test_a_conversation_needs_a_chat_template(target: PreTrainedModel, output: Path) -> None:
    with pytest.raises(ValueError, match="`turns` of id 't' must have a chat template to be put in, got none"):
        regenerate(target, letter_tokenizer(), [{"id": "t", "turns": ["x"]}], output)
    with pytest.raises(ValueError, match="`chat_template` must be False for a tokenizer without a chat template"):
        regenerate(target, letter_tokenizer(), questions(1), output, chat_template=True)


def test_a_prompt_without_a_token_is_an_error(target: PreTrainedModel, output: Path) -> None:
    with pytest.raises(ValueError, match="The prompt of id 'empty' must have a token at least, got none"):
        regenerate(target, letter_tokenizer(), [{"id": "empty", "prompt": ""}], output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1, got 0"),
        ({"shard": (0, 2)}, r"`shard` must be a number from 1 to the count of shards, and that count, got \(0, 2\)"),
        ({"num_return_sequences": 2}, "`num_return_sequences` must not be given"),
        ({"stop_strings": ["x"]}, "`stop_strings` must not be given"),
        ({"logits_processor": [torch.nn.ReLU()]}, "`logits_processor` must be a JSON value"),
    ],
)
def test_arguments_that_do_not_make_sense_are_refused(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    output: Path,
    arguments: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        regenerate(target, tokenizer, questions(1), output, **arguments)


def test_a_target_in_training_mode_is_refused(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path
) -> None:
    with pytest.raises(ValueError, match=r"`target` must be in evaluation mode.*call `target.eval\(\)`"):
        regenerate(target.train(), tokenizer, questions(1), output)


def test_an_output_that_cannot_be_written_is_named_with_the_reason(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    taken = tmp_path / "file"
    taken.touch()
    for output, reason in ((tmp_path, "Is a directory"), (taken / "x.jsonl", "(File exists|Not a directory)")):
        with pytest.raises(OSError, match=f"`output_path` must be a file .* got {output}: {reason}"):
            regenerate(target, tokenizer, questions(1), output)


def test_a_prompts_file_without_a_prompt_or_with_something_else_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    cases = (
        (b"\n", "`prompts` must have a prompt at least, got none in"),
        (b'{"prompt": "x"}\n\n{"pro\n', "Line 3 of .*prompts.jsonl must be a JSON object, got"),
        (b"[]\n", "Line 1 of .*prompts.jsonl must be a JSON object, got"),
        (b'{"prompt": "\xff"}\n', "Line 1 of .*prompts.jsonl must be a JSON object, got"),
    )
    for content, message in cases:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_prompts(file)


def test_a_share_without_a_prompt_is_a_file_too(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path
) -> None:
    for number in (1, 2):
        regenerate(target, tokenizer, questions(1), output, max_new_tokens=1, shard=(number, 2))
    assert [answer["id"] for answer in read_answers(output)] == ["q0"]


def test_a_second_writer_is_turned_away(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path
) -> None:
    with AnswerFile(output), pytest.raises(RuntimeError, match="must have one writer, and another process is writing"):
        regenerate(target, tokenizer, questions(1), output, max_new_tokens=1)
    regenerate(target, tokenizer, questions(1), output, max_new_tokens=1)


def test_shares_are_read_together_once_all_are_there(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path
) -> None:
    def share(number: int, count: int) -> None:
        regenerate(target, tokenizer, questions(7), output, max_new_tokens=2, shard=(number, count))

    share(1, 3)
    share(3, 3)
    with pytest.raises(FileNotFoundError, match=r"must have all its 3 shards, missing \[2\]"):
        list(read_answers(output))
    share(2, 3)
    assert sorted(answer["id"] for answer in read_answers(output)) == [f"q{n}" for n in range(7)]
    assert {answer["id"] for answer in read_answers(f"{output}.shard-00003-of-00003")} == {"q2", "q5"}
    with pytest.raises(
        ValueError, match=r"`shard` must divide .* into as many shares as it was started with, 3, got 2"
    ):
        share(1, 2)
    with pytest.raises(
        ValueError, match=r"`shard` must divide .* into as many shares as it was started with, 3, got 1"
    ):
        regenerate(target, tokenizer, questions(7), output, max_new_tokens=2)


def test_an_answer_that_is_there_twice_is_an_error(output: Path) -> None:
    line = json.dumps({"id": "q1", "prompt_ids": [5], "response_ids": [6]}) + "\n"
    output.write_text(2 * line)
    with pytest.raises(ValueError, match="An answer must be there once, got that of id 'q1' again"):
        list(read_answers(output))


def test_a_damaged_line_is_an_error_and_an_unfinished_one_is_not(output: Path) -> None:
    line = json.dumps({"id": "q1", "prompt_ids": [5], "response_ids": [6]}) + "\n"
    output.write_text(line + line[:20])
    assert [answer["id"] for answer in read_answers(output)] == ["q1"]
    output.write_text(line + line[:20] + "\n" + line)
    with pytest.raises(ValueError, match=r"Line 2 of .*answers.jsonl must be the JSON object of an answer"):
        list(read_answers(output))


def test_answers_that_are_nowhere_are_an_error(output: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"There are no answers at .*, neither a file nor shards of it"):
        list(read_answers(output))


# In processes of their own -------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Arguments of the command, without the output, for a target whose sampled answers now and then reach EOS."""
    folder = tmp_path / "target"
    target = tiny_target("llama")
    target.generation_config.eos_token_id = EOS
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(question) + "\n" for question in questions(24)))
    numbers = {"batch-size": 4, "max-new-tokens": 24, "temperature": 2, "top-k": 0, "threads": 1}
    options = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    return ["--target", str(folder), "--prompts", str(prompts), "--device", "cpu", *options]


class Command:
    """Runs the command in processes forked from one that has it imported already."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([module.__name__])

    def start(self, arguments: list[str]) -> Any:
        process = self.context.Process(target=main, args=(arguments,))
        process.start()
        return process


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_run_killed_at_random_moments_writes_what_an_unharmed_run_writes(command: list[str], tmp_path: Path) -> None:
    rng = random.Random(0)
    processes = Command()
    unharmed, harmed = tmp_path / "unharmed.jsonl", tmp_path / "harmed.jsonl"
    whole = processes.start([*command, "--output", str(unharmed)])
    whole.join()
    assert whole.exitcode == 0
    kills_midway = 0
    for attempt in range(100):
        process = processes.start([*command, "--output", str(harmed)])
        before = size(harmed)
        while attempt % 3 and process.is_alive() and size(harmed) == before:
            time.sleep(0.001)  # two of three are left alive until they have written something, so that the test ends
        process.join(timeout=rng.uniform(0, 0.02))  # a batch takes about as long on a quick machine
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        kills_midway += 0 < size(harmed) < size(unharmed)
    assert process.exitcode == 0
    assert kills_midway >= 3
    assert harmed.read_bytes() == unharmed.read_bytes()
    ids = [json.loads(line)["id"] for line in harmed.read_text().splitlines()]
    assert sorted(ids) == sorted(question["id"] for question in questions(24))
    assert {json.loads(line)["finish"] for line in harmed.read_text().splitlines()} == {"eos", "length"}


def test_two_commands_share_the_work(command: list[str], tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    output = tmp_path / "answers.jsonl"
    greedy = [*command, "--output", str(output), "--temperature", "0", "--limit", "9", "--thinking"]
    processes = [Command().start([*greedy, "--shard", f"{number}/2"]) for number in (1, 2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    answers = {answer["id"]: answer for answer in read_answers(output)}
    assert set(answers) == {f"q{n}" for n in range(9)}
    target = tiny_target("llama")
    for question in questions(9):
        prompt_ids = tokenizer(f"<s>u{question['prompt']}</s>a")["input_ids"]
        whole = plain_answer(target, prompt_ids, 24)
        assert answers[question["id"]]["prompt_ids"] == prompt_ids
        assert answers[question["id"]]["response_ids"] == (whole[: whole.index(EOS) + 1] if EOS in whole else whole)
    settings = json.loads((tmp_path / "answers.jsonl.shard-00001-of-00002.settings.json").read_text())
    assert settings["template_kwargs"] == {"enable_thinking": True}


def test_launched_processes_share_the_work_by_themselves(command: list[str], tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # What `accelerate launch --cpu --num_processes 2 -m jetspec_hf.training.regenerate ...` sets for its processes.
    launch = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "jetspec_hf.training.regenerate", *command, "--output", str(output), "--limit", "5"],
            env={**os.environ, **launch, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    shards = [set(answer["id"] for answer in read_answers(f"{output}.shard-0000{n}-of-00002")) for n in (1, 2)]
    assert shards == [{"q0", "q2", "q4"}, {"q1", "q3"}]
    assert ["tokens/s" in error for error in errors] == [True, False]
