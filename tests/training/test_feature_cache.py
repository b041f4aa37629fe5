"""The target's states on disk: they are those of the online run, take what is announced, and survive a kill."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jetspec_hf.training.feature_cache import CachedRows
from jetspec_hf.training.rows import RowCollator
from jetspec_hf.training.target_reader import TargetReader
from jetspec_hf.training.trainer import JetSpecTrainer
from support.tiny_targets import tiny_target
from support.training_runs import arguments, make_trainer, random_rows, tiny_head

WIDTH = 3 * 64  # two taps and the last hidden state of the tiny llama


def cached_trainer(folder: Path, **fields: Any) -> JetSpecTrainer:
    return make_trainer(folder / "run", feature_cache_dir=str(folder / "cache"), **fields)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("states.bin"))


@pytest.mark.parametrize("side", ["right", "left"])
def test_states_on_disk_are_those_of_each_row_alone(side: str, tmp_path: Path) -> None:
    target, rows = tiny_target("llama"), random_rows(7)
    trainer = JetSpecTrainer(
        model=tiny_head(target),
        target=target,
        args=arguments(
            tmp_path,
            feature_cache_dir=str(tmp_path / "cache"),
            feature_cache_dtype="auto",
            per_device_eval_batch_size=3,
            max_length=20,
        ),
        train_dataset=rows,
        data_collator=RowCollator(0, padding_side=side),
    )
    reader = TargetReader(target, [0, 1])
    for index in range(7):
        ids = torch.tensor([rows[index]["input_ids"][:20]])
        alone = reader.read(ids, torch.zeros_like(ids))
        states = pickle.loads(pickle.dumps(trainer.train_dataset))[index]["target_states"]
        assert (states - torch.cat([alone.features, alone.last_hidden], dim=-1)[0]).abs().max() < 1e-4


def test_a_run_from_the_cache_equals_the_online_run(tmp_path: Path) -> None:
    """Up to what float32 rounds differently where rows are padded to other lengths."""
    fields: dict[str, Any] = {
        "train": random_rows(8),
        "evaluation": random_rows(4, seed=1),
        "max_steps": 6,
        "anchors_per_row": 6,
        "learning_rate": 1e-2,
        "optim": "sgd",  # Adam divides by gradients, which may be rounding alone
        "lr_scheduler_type": "constant",
    }
    online = make_trainer(tmp_path / "online", **fields)
    exact = cached_trainer(tmp_path / "exact", feature_cache_dtype="auto", **fields)
    rounded = cached_trainer(tmp_path / "rounded", **fields)
    for trainer in (online, exact, rounded):
        trainer.train()
    start = tiny_head(tiny_target("llama")).state_dict()
    for name, value in online.head.state_dict().items():
        assert (exact.head.state_dict()[name] - value).abs().max() < 1e-5, name
        assert not torch.equal(start[name], value), name
    losses = [trainer.evaluate()["eval_loss"] for trainer in (online, exact, rounded)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=2e-2)  # bfloat16 states


def test_the_size_is_told_before_anything_is_written_and_is_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(5)
    tokens = sum(len(row["input_ids"]) for row in rows)
    told: list[str] = []
    plain = TargetReader.read

    def note(self: Any, *args: Any) -> Any:
        told.append(caplog.text)
        return plain(self, *args)

    monkeypatch.setattr(TargetReader, "read", note)
    with caplog.at_level("WARNING", "jetspec_hf.training.feature_cache"):
        cached_trainer(tmp_path, train=rows)
    (file,) = files(tmp_path)
    assert file.stat().st_size == tokens * WIDTH * 2
    assert f"{tokens:,} tokens take {tokens * WIDTH * 2 / 1e6:.2f} MB" in told[-1]
    assert not list(tmp_path.rglob("*.part"))


def test_a_full_disk_is_refused_before_the_target_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "jetspec_hf.training.feature_cache.shutil.disk_usage", lambda _folder: SimpleNamespace(free=1000)
    )
    with pytest.raises(OSError, match=r"`feature_cache_dir` must have room for 0\.0\d MB more, got 0\.00 MB"):
        cached_trainer(tmp_path, train=random_rows(5))
    assert not list(tmp_path.rglob("states.bin*"))


def test_a_killed_run_loses_and_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(9)
    lengths = [len(row["input_ids"]) for row in rows]
    cached_trainer(tmp_path / "whole", train=rows, per_device_eval_batch_size=1)
    (whole,) = files(tmp_path / "whole")
    part = tmp_path / "killed" / "cache" / whole.parent.name / "states.bin.part"
    read: list[int] = []
    plain = TargetReader.read

    def count(self: Any, ids: torch.Tensor, documents: torch.Tensor) -> Any:
        read.append(len(ids))
        return plain(self, ids, documents)

    monkeypatch.setattr(TargetReader, "read", count)
    for kept, complete in ((0, 0), (lengths[0] * WIDTH * 2, 1), (sum(lengths[:4]) * WIDTH * 2 + 77, 4), (10**6, 9)):
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(whole.read_bytes()[:kept])
        read.clear()
        cached_trainer(tmp_path / "killed", train=rows, per_device_eval_batch_size=1)
        (killed,) = files(tmp_path / "killed")
        assert killed.read_bytes() == whole.read_bytes()
        assert len(read) - 1 == 9 - complete  # one is the reader's own look at the logits
        killed.unlink()


def test_a_cache_is_used_again_for_the_same_rows_target_and_taps_alone(tmp_path: Path) -> None:
    rows = random_rows(4)
    cached_trainer(tmp_path, train=rows)
    (first,) = files(tmp_path)
    written = first.stat().st_mtime_ns
    cached_trainer(tmp_path, train=rows)
    assert (files(tmp_path), first.stat().st_mtime_ns) == ([first], written)
    target = tiny_target("llama", seed=3)
    for fields in (
        {"train": rows[::-1]},
        {"train": rows, "target": target},
        {"train": rows, "head": tiny_head(tiny_target("llama"), target_layer_ids=[1, 0])},
        {"train": rows, "feature_cache_dtype": "auto"},
        {"train": rows, "max_length": 10**3},
    ):
        before = len(files(tmp_path))
        cached_trainer(tmp_path, **fields)
        assert len(files(tmp_path)) == before + ("max_length" not in fields)  # a cut that cuts nothing changes nothing


def test_several_held_out_sets_are_kept_as_well(tmp_path: Path) -> None:
    sets = {"a": random_rows(3, seed=1), "b": random_rows(3, seed=2)}
    trainer = cached_trainer(tmp_path, evaluation=sets)
    assert all(isinstance(rows, CachedRows) for rows in trainer.eval_dataset.values())
    found, expected = trainer.evaluate(), make_trainer(tmp_path, evaluation=sets).evaluate()
    for name in ("eval_a_loss", "eval_b_loss"):
        assert found[name] == pytest.approx(expected[name], rel=2e-2)
