"""The tables of the phase benchmark, from hand-made timings, and its command on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from jetspec_hf.bench import build
from jetspec_hf.bench.markdown import format_table, milliseconds
from jetspec_hf.bench.measurement import Measurement, median_of, own_work_share
from jetspec_hf.bench.phases import agreement, growth_table, main, phase_table, stretches
from support.char_tokenizer import letter_tokenizer


def measurement(seconds: float, verify: float) -> Measurement:
    """Two steps and ten tokens; 1 s of prefill and, per step, 1 s draft, 0.25 s each for build, accept and commit."""
    step = {"draft": 1.0, "build": 0.25, "verify": verify, "accept": 0.25, "commit": 0.25}
    return Measurement(
        (tuple(range(10)),), seconds, prefill_seconds=1.0, step_seconds=(step, step), phased_seconds=seconds - 1
    )


def test_what_no_phase_claims_is_the_rest() -> None:
    per_step = measurement(seconds=11.0, verify=3.0).per_step()
    assert per_step == {
        "draft": 1.0, "build": 0.25, "verify": 3.0, "accept": 0.25, "commit": 0.25, "rest": 0.25, "step": 5.0,
    }  # fmt: skip


def test_a_generation_without_steps_has_none_to_divide_by() -> None:
    with pytest.raises(ValueError, match="must have steps to be divided by them, got none"):
        Measurement(((1,),), 1.0).per_step()


def test_medians_are_taken_entry_by_entry() -> None:
    runs = [measurement(11.0, 3.0), measurement(21.0, 1.0), measurement(13.0, 2.0)]
    per_step = median_of([run.per_step() for run in runs])
    assert per_step["verify"] == 2.0
    assert per_step["step"] == 6.0


def test_own_work_is_everything_besides_the_two_forwards() -> None:
    assert own_work_share({"draft": 1.0, "verify": 3.0, "step": 5.0}) == pytest.approx(0.2)


def test_stretches_are_medians_of_equal_parts_in_order() -> None:
    steps = [{"draft": 1.0, "build": 0.5, "verify": float(i), "accept": 0.25, "commit": 0.25 * i} for i in range(9)]
    parts = stretches(steps, 4)  # the ninth is left out
    assert [part["verify"] for part in parts] == [0.5, 2.5, 4.5, 6.5]
    assert (parts[0]["own work"], parts[-1]["own work"]) == (0.875, 2.375)


def test_a_step_without_a_draft_took_no_time_for_it() -> None:
    steps = [{"verify": 1.0, "accept": 0.5, "commit": 0.5}] * 4
    assert stretches(steps, 2)[0]["draft"] == 0.0


def test_fewer_steps_than_stretches_are_a_stretch_each() -> None:
    assert [part["verify"] for part in stretches([{"verify": 1.0}, {"verify": 2.0}], 4)] == [1.0, 2.0]


def test_tokens_per_second_count_the_prefill() -> None:
    assert measurement(seconds=5.0, verify=0.5).tokens_per_second == 2.0


def test_tables_are_aligned_markdown() -> None:
    assert format_table(("phase", "ms"), [("draft", "1.00"), ("verify", "12.50")]) == (
        "| phase  |    ms |\n"
        "| :----- | ----: |\n"
        "| draft  |  1.00 |\n"
        "| verify | 12.50 |"
    )  # fmt: skip


@pytest.mark.parametrize(("seconds", "text"), [(0.0001234, "0.123"), (0.0123, "12.30"), (0.1, "100"), (2.0, "2000")])
def test_milliseconds_have_some_three_digits(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


def test_the_phase_table_ends_with_the_whole_step() -> None:
    last = phase_table(measurement(11.0, 3.0).per_step()).splitlines()[-1]
    assert last.split() == ["|", "step", "|", "5000", "|", "100.0", "%", "|"]


def test_the_growth_table_ends_with_the_last_stretch_over_the_first() -> None:
    rows = growth_table([{"build": 0.002, "commit": 0.0}, {"build": 0.003, "commit": 0.001}], steps=21).splitlines()
    assert [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:]] == [
        ["1–10", "2.00", "0.000"], ["11–20", "3.00", "1.00"], ["last / first", "1.50", "-"],
    ]  # fmt: skip


def test_the_agreement_counts_the_common_beginning() -> None:
    assert agreement((5, 6, 7), (5, 6, 7)) == "same tokens as plain generation: yes"
    assert agreement((5, 6, 7), (5, 9, 7)).startswith("same tokens as plain generation: the first 1 of 3 ")


def test_the_command_follows_a_long_generation(
    target: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target.save_pretrained(tmp_path / "target")
    letter_tokenizer().save_pretrained(tmp_path / "target")
    main([
        "--target", str(tmp_path / "target"), "--untrained", "1", "--block-size", "4", "--oracle", "0.7", "--threads",
        "1", "--dtype", "float32", "--device", "cpu", "--tree-budget", "5", "--max-new-tokens", "8", "--repeats", "1",
        "--long-tokens", "40", "--stretches", "3", "--json", str(tmp_path / "phases.json"),
    ])  # fmt: skip
    found = json.loads((tmp_path / "phases.json").read_text(encoding="utf-8"))
    assert len(found["long"]["stretches"]) == 3
    assert 39 / 4 <= found["long"]["steps"] <= 39
    assert set(found["long"]["memory"]) == set(found["tokens_per_second"]) == {"plain", "tree 5"}
    assert 0 < found["own_work_share"] < 1
    printed = capsys.readouterr().out
    assert "head oracle at 0.7 (untrained, layers: 1, block size 4), float32, batch size 1, tree 5" in printed
    assert "same tokens as plain generation: yes" in printed
    assert str(tmp_path) not in printed + json.dumps(found)


def test_ctrl_c_in_the_long_generation_keeps_the_first_table(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("jetspec_hf.bench.phases._long", interrupted)
    target.save_pretrained(tmp_path / "target")
    letter_tokenizer().save_pretrained(tmp_path / "target")
    with pytest.raises(SystemExit, match="130"):
        main([
            "--target", str(tmp_path / "target"), "--untrained", "1", "--block-size", "4", "--threads", "1", "--dtype",
            "float32", "--device", "cpu", "--tree-budget", "5", "--max-new-tokens", "8", "--repeats", "1", "--json",
            str(tmp_path / "phases.json"),
        ])  # fmt: skip
    found = json.loads((tmp_path / "phases.json").read_text(encoding="utf-8"))
    assert "long" not in found
    assert found["per_step"]["step"] > 0
    assert capsys.readouterr().out.endswith("\ninterrupted\n")


def test_trees_are_built_as_often_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(build.measure(torch.randn(1, 3, 20), tree_budget=4, tree_width=2, repeats=5)) == 5
    build.main([
        "--tree-budget", "4", "9", "--depth", "3", "--vocabulary", "50", "--repeats", "2", "--threads", "1",
        "--device", "cpu",
    ])  # fmt: skip
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed[-2:]] == ["4", "9"]
    assert "depth 3, vocabulary 50, width 16, repeats: 2" in printed[2]
