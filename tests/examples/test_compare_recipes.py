"""The comparison of recipes on equal data in equal steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jetspec_hf import JetSpecDraftHead

Recipe = Callable[..., str]


@pytest.fixture
def script() -> ModuleType:
    """`examples/compare_recipes.py`."""
    import compare_recipes  # noqa: PLC0415  (on the path in these tests only)

    return compare_recipes


def provenance(folder: Path) -> Any:
    return json.loads((folder / "training_provenance.json").read_text())


def table_lines(printed: str) -> list[list[str]]:
    """The cells of the last table."""
    lines = printed[printed.index("| held-out τ") :].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_variant_is_trained_with_its_own_settings_on_the_same_data(
    script: ModuleType, recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "comparison"
    extra = {"deep": {"num_hidden_layers": 2, "depth_decay": 3}}
    features = str(tmp_path / "features")
    file = recipe(max_steps=10, branch_rank=5, causal=False, depth_decay=2, feature_cache_dir=features)
    script.main([file, "--output_dir", str(folder), "--extra_variants", json.dumps(extra), "--decoded", "60"])

    names = ["dflash", "jetspec", "jetspec+branch", "deep"]
    configs = [JetSpecDraftHead.from_pretrained(folder / name).config for name in names]
    assert [config.causal for config in configs] == [False, True, True, False]
    assert [config.branch_rank for config in configs] == [0, 0, 5, 5]
    assert [config.num_hidden_layers for config in configs] == [1, 1, 1, 2]
    runs = [provenance(folder / name) for name in names]
    assert [run["arguments"]["loss"] for run in runs] == ["hard_labels", "forward_kl", "forward_kl", "forward_kl"]
    assert [run["arguments"]["depth_decay"] for run in runs] == [4.0, None, None, 3.0]
    assert {run["arguments"]["max_steps"] for run in runs} == {10}
    assert len({json.dumps(run["data"], sort_keys=True) for run in runs}) == 1
    assert len(list(Path(features).iterdir())) == 1  # the target was read once for all

    lines = table_lines(capsys.readouterr().out)
    assert lines[0] == ["held-out τ", "chain", "4", "seconds of training"]
    assert [line[0] for line in lines[2:]] == [*names, *(f"{name}, decoded" for name in names)]
    found = json.loads((folder / "comparison.json").read_text())
    assert list(found) == names
    for line in lines[2:]:
        name, _, how = line[0].partition(", ")
        beside = json.loads((folder / name / "heldout_acceptance.json").read_text())[how or "simulated"]
        assert line[1:3] == [f"{beside['chain']:.2f}", f"{beside['4']:.2f}"]
        assert found[name][how or "simulated"] == beside


def test_a_second_call_trains_what_is_new_or_changed(
    script: ModuleType, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []

    def no_training(_run: Any, shape: Any, args: Any) -> dict[str, Any]:
        trained.append((Path(args.output_dir).name, shape.num_hidden_layers, args.learning_rate))
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        return {"training_seconds": 1.5, "simulated": {"chain": 1.0, "4": 2.0}}

    monkeypatch.setattr(script, "train_head", no_training)
    common = [recipe(output_dir=str(tmp_path)), "--variants", "jetspec"]
    script.main(common)
    script.main(common)
    assert trained == [("jetspec", 1, 1e-2)]
    variants = tmp_path / "variants.json"
    variants.write_text('{"deep": {"num_hidden_layers": 2}}')
    script.main([*common, "--extra_variants", str(variants)])
    assert trained[1:] == [("deep", 2, 1e-2)]
    script.main([*common, "--learning_rate", "0.5"])
    assert trained[2:] == [("jetspec", 1, 0.5)]


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ({"longer": {"max_steps": 40}}, "`max_steps` must be the same in all variants: longer"),
        ({"more": {"max_answers": 9, "loss": "forward_kl"}}, "`max_answers` must be the same in all variants: more"),
        ({"a/b": {}}, "must be one of a folder, got 'a/b'"),
        ({"typo": {"brunch_rank": 4}}, "brunch_rank"),
        ({"no loss": {"loss": "mse"}}, "`loss` must be"),
    ],
    ids=str,
)
def test_variants_that_cannot_be_compared_are_refused_before_training(
    script: ModuleType,
    recipe: Recipe,
    variants: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script, "train_head", lambda *_parts: pytest.fail("it was trained"))
    with pytest.raises(ValueError, match=message):
        script.main([recipe(output_dir=str(tmp_path)), "--extra_variants", json.dumps(variants)])


def test_an_unknown_variant_is_refused(script: ModuleType, recipe: Recipe) -> None:
    with pytest.raises(ValueError, match=r"of dflash, jetspec, jetspec\+branch, got eagle"):
        script.main([recipe(), "--variants", "jetspec", "eagle"])
