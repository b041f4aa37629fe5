"""The speed benchmark's command, on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.bench.speed import load, main, parse
from support.char_tokenizer import letter_tokenizer

SUMMARY_FIELDS = {
    "task", "decoding", "method", "prompts", "new_tokens", "mean_acceptance_length", "tokens_per_second", "speedup",
    "identical", "largest_margin", "phase_shares",
}  # fmt: skip
RUN_FIELDS = {
    "task", "id", "decoding", "method", "prompt_tokens", "new_tokens", "seconds", "target_forwards", "phase_seconds",
    "first_difference", "margin",
}  # fmt: skip
PHASE_SHARES = {"draft", "build", "verify", "accept", "commit", "rest"}


@pytest.fixture
def folders(tmp_path: Path, target: PreTrainedModel) -> list[str]:
    """The arguments for a saved target with its tokenizer, a fresh head, and two prompt files."""
    target.generation_config = GenerationConfig(eos_token_id=[2, 3], pad_token_id=0, repetition_penalty=1.5, top_k=1)
    target.generation_config.do_sample = True
    target.save_pretrained(tmp_path / "target")
    letter_tokenizer().save_pretrained(tmp_path / "target")
    JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=4).save_pretrained(tmp_path / "head")
    (tmp_path / "code.jsonl").write_text('{"prompt": "define"}\n{"prompt": "return"}\n{"prompt": "left out"}\n')
    (tmp_path / "chat.jsonl").write_text('{"id": "c", "task": "talk", "turns": ["hello", "bye"]}\n')
    prompts = [str(tmp_path / name) for name in ("code.jsonl", "chat.jsonl")]
    return ["--target", str(tmp_path / "target"), "--head", str(tmp_path / "head"), "--prompts", *prompts]


def test_the_command_prints_tables_and_writes_json(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decodings = ["greedy", "penalised", "sampled"]
    main([
        *folders, "--limit", "2", "--max-new-tokens", "8", "--dtype", "float32", "--threads", "1", "--tree-budget", "2",
        "5", "--decoding", *decodings, "--chain", "--prompt-lookup", "--json", str(tmp_path / "speed.json"),
    ])  # fmt: skip
    printed = capsys.readouterr().out
    text = (tmp_path / "speed.json").read_text(encoding="utf-8")
    found = json.loads(text)
    methods = ["plain", "prompt lookup", "chain", "tree 2", "tree 5"]

    assert set(found) == {"machine", "settings", "summary", "runs"}
    assert [(row["task"], row["decoding"], row["method"]) for row in found["summary"]] == [
        (task, decoding, method) for task in ("code", "talk") for decoding in decodings for method in methods
    ]
    assert len(found["runs"]) == 3 * len(decodings) * len(methods)
    for row in found["summary"]:
        assert set(row) == SUMMARY_FIELDS
        assert row["prompts"] == {"code": 2, "talk": 1}[row["task"]]
        if row["method"] == "plain":
            assert (row["mean_acceptance_length"], row["speedup"]) == (1.0, [1.0, 1.0, 1.0])
        if row["method"] != "prompt lookup" or row["decoding"] != "sampled":
            assert row["identical"] == row["prompts"], f"{row['method']} differs from plain decoding, {row['decoding']}"
        assert (row["phase_shares"] is None) == (row["method"] in ("plain", "prompt lookup"))
        assert row["phase_shares"] is None or set(row["phase_shares"]) == PHASE_SHARES
    assert all(set(run) == RUN_FIELDS for run in found["runs"])
    assert {run["id"] for run in found["runs"]} == {"0", "1", "c"}
    assert found["settings"] == {
        "target": "target", "head": "head", "prompts": ["code.jsonl", "chat.jsonl"], "limit": 2, "max_new_tokens": 8,
        "dtype": "float32", "threads": 1, "tree_budget": [2, 5], "chain": True, "prompt_lookup": True, "repeats": 1,
        "seed": 0, "tree_width": 16, "draft_depth": 3,
        "decoding": {
            "greedy": {"do_sample": False, "repetition_penalty": 1.0},
            "penalised": {"do_sample": False, "repetition_penalty": 1.2},
            "sampled": {
                "do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0,
            },
        },
    }  # fmt: skip
    assert str(tmp_path) not in text + printed

    assert "torch threads: 1;" in printed
    assert f"torch {torch.__version__}" in printed
    assert "**code** (prompts: 2)" in printed
    assert "| greedy, tree 5 " in printed


def test_half_precision_reaches_target_and_head(folders: list[str]) -> None:
    target, head, _ = load(parse([*folders, "--dtype", "bfloat16"]))
    assert target.dtype == head.dtype == torch.bfloat16
    assert not target.training
    assert not head.training


def test_what_a_target_recommends_is_not_used(folders: list[str]) -> None:
    target, _, _ = load(parse([*folders, "--dtype", "float32"]))
    assert target.generation_config is not None
    kept = target.generation_config.to_diff_dict()
    kept.pop("transformers_version", None)
    assert kept == {"eos_token_id": [2, 3], "pad_token_id": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "argument --limit: must be an integer of at least 1, got '0'"),
        (["--max-new-tokens", "1"], "argument --max-new-tokens: must be an integer of at least 2, got '1'"),
        (["--tree-budget", "8", "x"], "argument --tree-budget: must be an integer of at least 1, got 'x'"),
        (["--tree-budget", "8", "8"], "--tree-budget must not repeat a value, got 8 8"),
        (["--decoding", "greedy", "greedy"], "--decoding must not repeat a value, got greedy greedy"),
        (["--decoding", "beam"], "invalid choice: 'beam'"),
        (["--threads", "-1"], "must be an integer of at least 1, got '-1'"),
        (["--json", "no_such_folder/out.json"], "--json must lie in a folder that exists, got no_such_folder/out.json"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--target", "nowhere", "--head", "nowhere", "--prompts", "nowhere", *arguments])
    assert message in capsys.readouterr().err
