"""The numerics report: what departs where, and by how much."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.bench.methods import Method
from jetspec_hf.bench.numerics import Text, compare, main, spacing, summarise, table, variants
from jetspec_hf.bench.runner import Benchmark
from jetspec_hf.bench.tasks import Prompt
from support.char_tokenizer import letter_tokenizer
from support.references import random_prompts

PROMPTS = [
    (Prompt(str(number), "task", "text"), torch.tensor([ids])) for number, ids in enumerate(random_prompts((7, 20), 1))
]


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1.0, torch.bfloat16, 2**-7),
        (-1.5, torch.bfloat16, 2**-7),
        (20.0, torch.bfloat16, 2**-3),
        (0.75, torch.bfloat16, 2**-8),
        (20.0, torch.float16, 2**-6),
    ],
)
def test_steps_are_the_distances_of_neighbouring_numbers(value: float, dtype: torch.dtype, expected: float) -> None:
    assert spacing(value, dtype) == expected
    number = torch.tensor(abs(value), dtype=dtype)
    assert float(torch.nextafter(number, number * 2) - number) == expected


def test_departures_are_counted_per_token_written_up_to_them() -> None:
    texts = [
        Text("plain, again", "task", "0", compared=96),
        Text("tree 8", "task", "0", 11, 10, 0.125, 1.0),
        Text("plain, again", "task", "1", compared=96),
        Text("tree 8", "task", "1", 31, 30, 0.5, 2.0),
        Text("tree 8", "task", "2", 8, 7, None),
        Text("tree 8", "task", "3", compared=30),
    ]
    plain, tree = summarise(texts)
    assert dataclasses.astuple(plain) == ("plain, again", 2, 0, 0.0, None, None, None)
    assert dataclasses.astuple(tree) == ("tree 8", 4, 3, 1000 * 3 / 80, 10, (0.3125, 0.5), (1.5, 2.0))
    last = [cell.strip() for cell in table([plain, tree]).splitlines()[-1].split("|")[1:-1]]
    assert last == ["tree 8", "3 of 4", "37.50", "10", "0.312", "0.5", "1.5", "2"]


def test_plain_decoding_is_compared_in_other_shapes() -> None:
    made = variants(PROMPTS, [Method("tree 8", uses_head=True)], pad_token_id=0)
    assert list(made) == [
        "plain, again", "plain, twice in a batch", "plain, with 3 others, left-padded",
        "plain, prompt in chunks of 16", "tree 8",
    ]  # fmt: skip
    cases = [variant(1)[0] for variant in made.values()]
    assert [tuple(case.input_ids.shape) for case in cases] == [(1, 20), (2, 20), (4, 21), (1, 20), (1, 20)]
    padded = cases[2]
    assert padded.attention_mask.sum(dim=1).tolist() == [20, 7, 20, 7]
    assert padded.input_ids[0, 1:].tolist() == PROMPTS[1][1][0].tolist()
    assert made["plain, prompt in chunks of 16"](0)[2] == {"prefill_chunk_size": 16}


def test_in_float32_no_shape_changes_a_text(target: PreTrainedModel) -> None:
    benchmark = Benchmark(target, JetSpecDraftHead.from_target(target, block_size=4), max_new_tokens=10)
    trees = [Method("tree 5", {"tree_budget": 5}, uses_head=True)]
    texts = compare(benchmark, PROMPTS, variants(PROMPTS, trees, pad_token_id=0))
    assert [(text.variant, text.id, text.position, text.compared) for text in texts] == [
        (name, number, None, 10) for number in "01" for name in variants(PROMPTS, trees, 0)
    ]


def test_a_departure_has_the_margin_of_plain_decoding(target: PreTrainedModel) -> None:
    class Altered(Benchmark):
        """Whose trees write another fourth token."""

        def texts(self, case: Any, sequences: torch.Tensor) -> Any:
            rows = super().texts(case, sequences)
            other = self.head.last_acceptance is not None
            return tuple((*row[:3], (row[3] + 1) % 128, *row[4:]) if other else row for row in rows)

    benchmark = Altered(target, JetSpecDraftHead.from_target(target, block_size=4), max_new_tokens=8)
    trees = {"tree 5": variants(PROMPTS, [Method("tree 5", {"tree_budget": 5}, uses_head=True)], 0)["tree 5"]}
    [text] = compare(benchmark, PROMPTS[:1], trees)
    tokens: Any = target.generate(PROMPTS[0][1], max_new_tokens=8, do_sample=False, pad_token_id=0)  # type: ignore[operator]
    with torch.no_grad():
        logits = target(tokens[:, :-5]).logits[0, -1]
    chosen = int(tokens[0, -5])
    assert (text.position, text.compared) == (3, 4)
    # float32 logits of a whole prefix against those of one token at a time
    assert text.margin == pytest.approx(float(logits[chosen] - logits[(chosen + 1) % 128]), abs=1e-3)
    assert text.margin_steps == pytest.approx(text.margin / spacing(float(logits[chosen]), torch.float32), rel=0.01)


def test_the_command_prints_a_table_and_writes_json(
    target: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target.save_pretrained(tmp_path / "target")
    letter_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "code.jsonl").write_text('{"prompt": "define"}\n{"prompt": "return"}\n{"prompt": "left out"}\n')
    main([
        "--target", str(tmp_path / "target"), "--untrained", "1", "--block-size", "4", "--prompts",
        str(tmp_path / "code.jsonl"), "--limit", "2", "--max-new-tokens", "6", "--tree-budget", "3", "auto", "--dtype",
        "bfloat16", "--device", "cpu", "--threads", "1", "--json", str(tmp_path / "numerics.json"),
    ])  # fmt: skip
    found = json.loads((tmp_path / "numerics.json").read_text(encoding="utf-8"))
    assert [row["variant"] for row in found["summary"]][-2:] == ["tree 3", "tree auto"]
    again = found["summary"][0]
    assert (again["variant"], again["texts"], again["departed"]) == ("plain, again", 2, 0)
    assert len(found["texts"]) == 2 * 6
    assert found["settings"]["complete"] is True
    printed = capsys.readouterr().out
    assert "bfloat16, greedy, prompts: 2" in printed
    assert str(tmp_path) not in printed + json.dumps(found)


def test_ctrl_c_keeps_the_prompts_that_are_finished(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, calls = Benchmark.generate, []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 8:  # of the second prompt: one has a plain text and five others
            raise KeyboardInterrupt
        return generate(*args, **options)

    monkeypatch.setattr(Benchmark, "generate", interrupted)
    target.save_pretrained(tmp_path / "target")
    letter_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "code.jsonl").write_text('{"prompt": "define"}\n{"prompt": "return"}\n')
    with pytest.raises(SystemExit, match="130"):
        main([
            "--target", str(tmp_path / "target"), "--untrained", "1", "--block-size", "4", "--prompts",
            str(tmp_path / "code.jsonl"), "--max-new-tokens", "6", "--tree-budget", "3", "--dtype", "bfloat16",
            "--device", "cpu", "--threads", "1", "--json", str(tmp_path / "numerics.json"),
        ])  # fmt: skip
    found = json.loads((tmp_path / "numerics.json").read_text(encoding="utf-8"))
    assert found["settings"]["complete"] is False
    assert {text["id"] for text in found["texts"]} == {"0"}
