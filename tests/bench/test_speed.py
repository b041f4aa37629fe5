"""The speed benchmark's command, on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.bench.options import load_models
from jetspec_hf.bench.runner import Benchmark
from jetspec_hf.bench.speed import main, parse
from support.char_tokenizer import letter_tokenizer

PHASES = {"draft", "build", "verify", "accept", "commit", "rest"}


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
    machine = ["--dtype", "float32", "--threads", "1", "--device", "cpu"]
    return ["--target", str(tmp_path / "target"), "--head", str(tmp_path / "head"), "--prompts", *prompts, *machine]


def test_the_command_prints_tables_and_writes_json(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decodings = ["greedy", "sampled"]
    main([
        *folders, "--limit", "2", "--max-new-tokens", "6", "--tree-budget", "5", "auto", "--decoding", *decodings,
        "--all", "--assistant", str(tmp_path / "target"), "--json", str(tmp_path / "speed.json"),
    ])  # fmt: skip
    printed = capsys.readouterr().out
    text = (tmp_path / "speed.json").read_text(encoding="utf-8")
    found = json.loads(text)
    stock = ["prompt lookup", "assistant target", "stock chain"]
    ours = ["chain", "tree 5", "tree auto"]

    assert set(found) == {"complete", "machine", "settings", "skipped", "summary", "memory", "runs"}
    assert (found["complete"], found["skipped"]) == (True, {})
    assert [(row["task"], row["decoding"], row["method"]) for row in found["summary"]] == [
        (task, decoding, method)
        for task in ("code", "talk")
        for decoding in decodings
        for method in ("plain", *stock, *ours)
    ]
    assert len(found["runs"]) == 3 * len(decodings) * 7
    for row in found["summary"]:
        assert row["prompts"] == {"code": 2, "talk": 1}[row["task"]]
        if row["method"] == "plain":
            assert (row["mean_acceptance_length"], row["speedup"]) == (1.0, [1.0, 1.0, 1.0])
        if row["method"] not in stock or row["decoding"] != "sampled":
            assert row["identical"] == row["prompts"], f"{row['method']} differs from plain decoding, {row['decoding']}"
        if row["method"] in ours:
            assert set(row["step_seconds"]) == {*PHASES, "step"}
            assert row["ceiling"] > row["decoding_speedup"]
            assert 0 < row["ceiling_share"] < 1
        else:
            assert row["step_seconds"] is row["ceiling"] is row["ceiling_share"] is None
    assert {name for run in found["runs"] for name in run["ids"]} == {"0", "1", "c"}
    assert all(set(run["phase_seconds"]) == (PHASES if run["method"] in ours else set()) for run in found["runs"])
    auto = [run for run in found["runs"] if run["method"] == "tree auto"]
    assert all(sum(run["reasons"].values()) == sum(run["tree_sizes"].values()) > 0 for run in auto)
    assert set(found["memory"]["peaks"]) == {"plain", *stock, *ours}
    assert found["settings"] == {
        "target": "target", "head": "head", "oracle": None, "prompts": ["code.jsonl", "chat.jsonl"], "limit": 2,
        "max_new_tokens": 6, "batch_size": 1, "dtype": "float32", "threads": 1, "tree_budget": [5, "auto"],
        "chain": True, "stock_chain": True, "prompt_lookup": True, "assistant": ["target"], "repeats": 1, "seed": 0,
        "tree_width": 16, "draft_depth": 3,
        "decoding": {
            "greedy": {"do_sample": False, "repetition_penalty": 1.0},
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
    assert "| peak memory " in printed


def test_a_batch_with_an_oracle_leaves_out_what_cannot_be_compared(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([
        *folders[:2], "--untrained", "1", "--block-size", "4", "--oracle", "0.8", "--prompts", folders[5],
        *folders[7:], "--batch-size", "3", "--max-new-tokens", "8", "--all", "--tree-budget", "auto", "--json",
        str(tmp_path / "speed.json"), "--plots", str(tmp_path / "pictures"),
    ])  # fmt: skip
    found = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))
    assert [(row["method"], row["prompts"], row["identical"]) for row in found["summary"]] == [
        ("plain", 3, 3), ("chain", 3, 3), ("tree auto", 3, 3),
    ]  # fmt: skip
    assert set(found["skipped"]) == {"prompt lookup", "stock chain"}
    assert found["settings"]["head"] == "oracle at 0.8 (untrained, layers: 1, block size 4)"
    assert "\nprompt lookup: n/a: ValueError: assisted generate" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"speedup-greedy.png", "step-cost-greedy.png"}


def test_an_interrupted_run_keeps_what_all_methods_have_answered(
    folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, calls = Benchmark.run, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 4:  # the second method of the second prompt
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(Benchmark, "run", interrupted)
    path = tmp_path / "speed.json"
    with pytest.raises(SystemExit, match="130"):
        main([*folders, "--tree-budget", "3", "--max-new-tokens", "4", "--json", str(path)])
    found = json.loads(path.read_text(encoding="utf-8"))
    assert (found["complete"], found["memory"]) == (False, None)
    assert [(run["ids"], run["method"]) for run in found["runs"]] == [(["0"], "plain"), (["0"], "tree 3")]
    assert [row["method"] for row in found["summary"]] == ["plain", "tree 3"]
    assert "interrupted" in capsys.readouterr().out
    assert sorted(each.name for each in tmp_path.glob("speed*")) == ["speed.json"]


def test_half_precision_reaches_target_and_head(folders: list[str]) -> None:
    target, head, _ = load_models(parse([*folders, "--dtype", "bfloat16"]))
    assert target.dtype == head.dtype == torch.bfloat16
    assert not target.training
    assert not head.training


def test_what_a_target_recommends_is_not_used(folders: list[str]) -> None:
    target, _, _ = load_models(parse([*folders, "--dtype", "float32"]))
    assert target.generation_config is not None
    kept = target.generation_config.to_diff_dict()
    kept.pop("transformers_version", None)
    assert kept == {"eos_token_id": [2, 3], "pad_token_id": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "argument --limit: must be an integer of at least 1, got '0'"),
        (["--max-new-tokens", "1"], "argument --max-new-tokens: must be an integer of at least 2, got '1'"),
        (["--tree-budget", "8", "x"], "argument --tree-budget: must be an integer from 1 to 4096 or \"auto\", got 'x'"),
        (["--tree-budget", "8", "8"], "--tree-budget must not repeat a value, got 8 8"),
        (["--decoding", "greedy", "greedy"], "--decoding must not repeat a value, got greedy greedy"),
        (["--untrained", "1"], "argument --untrained: not allowed with argument --head"),
        (["--oracle", "1"], "argument --oracle: must lie between 0 and 1, both left out, got '1'"),
        (["--assistant", "a/b", "c/b"], "--assistant must name folders of different names, got b b"),
        (["--decoding", "beam"], "invalid choice: 'beam'"),
        (["--threads", "-1"], "must be an integer of at least 1, got '-1'"),
        (["--json", "no_such_folder/out.json"], "--json must lie in a folder that exists, got no_such_folder/out.json"),
        (["--plots", __file__], "--plots must be a folder, got the file"),
        (["--prompts", "nowhere"], "argument --prompts: must be a file that is there, got nowhere"),
        (["--prompts", __file__], "A prompt must be a JSON object"),
        (["--batch-size", "100"], "`batch_size` must be at most the number of prompts of every task, got 100"),
        (
            ["--target", "no/where/at/all"],
            "--target must be a folder or a Hub id, and there is no folder no/where/at/all",
        ),
        (["--head", "no/where/at/all"], "--head must be a folder or a Hub id, and there is no folder no/where/at/all"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_loaded(
    arguments: list[str],
    message: str,
    folders: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jetspec_hf.bench.speed.load_models", None)
    with pytest.raises(SystemExit) as ended:
        main([*folders, *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
