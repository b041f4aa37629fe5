"""Nothing in a checkpoint runs, nothing is written, and what is wrong with one is named: a field, a tensor, a file."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, PreTrainedModel

from jetspec_hf import JetSpecConfig, JetSpecDraftHead
from jetspec_hf.hub import read_checkpoint, write_checkpoint
from support.random_heads import random_head
from support.tiny_targets import tiny_target

LOADERS: dict[str, Callable[..., JetSpecDraftHead]] = {
    "from_pretrained": JetSpecDraftHead.from_pretrained,
    "read_checkpoint": read_checkpoint,
}
loaders = pytest.mark.parametrize("load", LOADERS.values(), ids=list(LOADERS))


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target("llama")


@pytest.fixture(params=["jetspec", "published"])
def folder(request: pytest.FixtureRequest, target: PreTrainedModel, tmp_path: Path) -> Path:
    """A sound checkpoint in a format that both loaders read."""
    head = random_head(target, block_size=4, target_layer_ids=[0])
    write_checkpoint(head, tmp_path / "head", request.param, target=target)
    return tmp_path / "head"


@pytest.fixture
def ours(target: PreTrainedModel, tmp_path: Path) -> Path:
    random_head(target, block_size=4, target_layer_ids=[0]).save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def set_keys(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# Nothing runs ---------------------------------------------------------------------------------------------------------


class Trap:
    """What it does when it is unpickled would be seen."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> Any:
        return (open, (self.file, "w"))


@loaders
def test_code_in_a_checkpoint_never_runs_and_nothing_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[..., JetSpecDraftHead]
) -> None:
    code = "raise SystemExit('code of a checkpoint ran')"
    for name in ("dflash.py", "modeling_jetspec.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    for name in ("training_state.pt", "pytorch_model.bin", "head.ckpt"):
        (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "trapped")))
    set_keys(
        folder,
        auto_map={"AutoModel": "dflash.DFlashDraftModel", "AutoConfig": "modeling_jetspec.JetSpecConfig"},
        attn_implementation="somebody/kernel",
        experts_implementation="somebody/kernel",
        _attn_implementation="somebody/kernel",
        _experts_implementation="somebody/kernel",
        transformers_weights="adapter_model.bin",
        fusion_config={"patch": True},
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    before = contents(tmp_path)
    head = load(folder)
    assert head.config._attn_implementation in ("sdpa", "eager")
    assert contents(tmp_path) == before
    assert not (tmp_path / "trapped").exists()


def test_not_even_trust_makes_code_of_a_checkpoint_run(folder: Path) -> None:
    (folder / "dflash.py").write_text("raise SystemExit('code of a checkpoint ran')")
    set_keys(folder, auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    assert JetSpecDraftHead.from_pretrained(folder, trust_remote_code=True).config.block_size == 4


def test_automodel_ignores_how_a_config_says_it_should_run(ours: Path) -> None:
    set_keys(ours, attn_implementation="somebody/kernel", transformers_weights="other.safetensors")
    assert AutoModel.from_pretrained(ours).config._attn_implementation in ("sdpa", "eager")


@loaders
@pytest.mark.parametrize("name", ["pytorch_model.bin", "training_state.pt", "head.ckpt"])
def test_pickles_are_refused_with_the_reason(
    folder: Path, tmp_path: Path, load: Callable[..., JetSpecDraftHead], name: str
) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "trapped")))
    with pytest.raises(OSError, match=r"safetensors files alone: to read a pickle .* is to run whatever it says"):
        load(folder)
    assert not (tmp_path / "trapped").exists()


def test_pickles_stay_refused_when_they_are_asked_for(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="to read a pickle"):
        JetSpecDraftHead.from_pretrained(folder, use_safetensors=False)


def test_a_mask_embedding_of_its_own_is_refused(folder: Path) -> None:
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"mask_embedding\.pt"):
        read_checkpoint(folder)


@loaders
@pytest.mark.parametrize("text", ['{"peft_type": "LORA", "base_model_name_or_path": "some/other"}', "[]"])
def test_adapters_beside_the_weights_are_refused_whatever_they_are(
    folder: Path, load: Callable[..., JetSpecDraftHead], text: str
) -> None:
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"must have no adapters beside the weights, got an `adapter_config\.json`"):
        load(folder)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000])
def test_broken_knobs_are_named_and_not_taken_for_missing_ones(ours: Path, text: str) -> None:
    (ours / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json must"):
        JetSpecDraftHead.from_pretrained(ours)


# Wrong tensors --------------------------------------------------------------------------------------------------------

Q_PROJ = "layers.0.self_attn.q_proj.weight"
EDITS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda tensors: tensors.pop("fc.weight"), r"missing.*fc\.weight"),
    "extra": (lambda tensors: tensors.update({"selector.weight": torch.ones(2)}), r"selector\.weight"),
    "shape": (lambda tensors: tensors.update({"fc.weight": torch.ones(64, 65)}), r"fc\.weight"),
    "transposed": (
        lambda tensors: tensors.update({"layers.0.mlp.up_proj.weight": torch.ones(64, 128)}),
        r"up_proj\.weight",
    ),
    "nan": (lambda tensors: tensors[Q_PROJ].view(-1)[7:8].fill_(float("nan")), rf"`{Q_PROJ}` must have finite"),
    "infinity": (lambda tensors: tensors["norm.weight"].fill_(float("-inf")), r"`norm\.weight` must have finite"),
}


@loaders
@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_a_weight_of_a_wrong_type_is_named(
    folder: Path, load: Callable[..., JetSpecDraftHead], dtype: torch.dtype
) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(64).to(dtype)}))
    with pytest.raises(ValueError, match=r"`norm\.weight` of .* must be of type F16, BF16, F32, F64, got"):
        load(folder)


@loaders
def test_a_draft_vocabulary_of_fractions_is_named(
    target: PreTrainedModel, tmp_path: Path, load: Callable[..., JetSpecDraftHead]
) -> None:
    random_head(target, block_size=4, draft_token_ids=[3, 5, 9]).save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update(draft_token_ids=torch.tensor([3.0, 5.0, 9.5])))
    with pytest.raises(ValueError, match=r"`draft_token_ids` of .* must be integers, got F32"):
        load(tmp_path)


@loaders
def test_weights_of_several_types_are_told_of_unless_one_is_asked_for(
    folder: Path, load: Callable[..., JetSpecDraftHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(64).half()}))
    told: list[str] = []
    monkeypatch.setattr("jetspec_hf.weight_files.logger.warning", told.append)
    load(folder, dtype=torch.float32)
    assert told == []
    load(folder)
    assert len(told) == 1
    assert "types F16 and F32" in told[0]


@loaders
@pytest.mark.parametrize("problem", EDITS)
def test_a_wrong_tensor_is_named(folder: Path, load: Callable[..., JetSpecDraftHead], problem: str) -> None:
    edit, message = EDITS[problem]
    edit_tensors(folder, edit)
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize("format", ["speculators", "transformers"])
@pytest.mark.parametrize("problem", ["missing", "extra", "nan"])
def test_a_wrong_tensor_of_another_format_is_named(
    target: PreTrainedModel, tmp_path: Path, format: str, problem: str
) -> None:
    head = random_head(target, block_size=4, causal=False, target_layer_ids=[0], target_name_or_path="some/target")
    write_checkpoint(head, tmp_path, format)
    edit, message = EDITS[problem]
    if (format, problem) == ("transformers", "missing"):
        edit = lambda tensors: tensors.pop("encoder.fc.weight")  # noqa: E731
    edit_tensors(tmp_path, edit)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path)


def test_weights_that_are_no_numbers_are_not_written(target: PreTrainedModel, tmp_path: Path) -> None:
    head = random_head(target, block_size=4, target_layer_ids=[0])
    head.norm.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match=r"`norm\.weight` must have finite numbers"):
        write_checkpoint(head, tmp_path / "head", "published")
    assert not (tmp_path / "head").exists()


@loaders
@pytest.mark.parametrize("kept", [0, 5, 40, -1000, -1])
def test_a_file_that_was_cut_short_is_named(folder: Path, load: Callable[..., JetSpecDraftHead], kept: int) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    with pytest.raises(ValueError, match=rf"{folder}.* damaged"):
        load(folder)


def test_the_first_tensor_that_was_cut_off_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    size = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + size])
    start, end = header[Q_PROJ]["data_offsets"]
    file.write_bytes(file.read_bytes()[: 8 + size + (start + end) // 2])
    with pytest.raises(ValueError, match=rf"`{Q_PROJ}` is cut off"):
        read_checkpoint(folder)


# Shards ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(ours: Path) -> Path:
    head = JetSpecDraftHead.from_pretrained(ours)
    shutil.copy(ours / "model.safetensors", ours.parent / "whole.safetensors")
    head.save_pretrained(ours, max_shard_size="60KB")
    assert not (ours / "model.safetensors").exists()
    assert len(list(ours.glob("*.safetensors"))) > 2
    return ours


@loaders
def test_shards_are_read_as_one(sharded: Path, load: Callable[..., JetSpecDraftHead]) -> None:
    weights = load(sharded).state_dict()
    expected = load_file(sharded.parent / "whole.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "load", [JetSpecDraftHead.from_pretrained, lambda folder: read_checkpoint(folder, "published")]
)
def test_a_missing_shard_is_named(sharded: Path, load: Callable[..., JetSpecDraftHead]) -> None:
    sorted(sharded.glob("*.safetensors"))[1].unlink()
    with pytest.raises((OSError, ValueError), match=r"model-00002-of-"):
        load(sharded)


@loaders
@pytest.mark.parametrize("name", ["../whole.safetensors", "/whole.safetensors", "weights.bin", "..\\x.safetensors", 3])
def test_an_index_cannot_name_files_elsewhere(sharded: Path, load: Callable[..., JetSpecDraftHead], name: Any) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    with pytest.raises(ValueError, match=r"`weight_map` .* must name safetensors files beside it"):
        load(sharded)


@loaders
@pytest.mark.parametrize(
    "text", ["[]", "{", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "a.safetensors"}, "metadata": 3}']
)
def test_a_malformed_index_is_named(sharded: Path, load: Callable[..., JetSpecDraftHead], text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json must"):
        load(sharded)


def test_an_index_on_the_hub_is_looked_at_before_its_shards(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../whole.safetensors"}}))
    asked = []

    def fetch(path: str, name: str, **places: Any) -> str | None:
        asked.append((path, name, places["revision"]))
        return str(sharded / name) if (sharded / name).exists() else None

    monkeypatch.setattr("jetspec_hf.weight_files.cached_file", fetch)
    with pytest.raises(ValueError, match=r"`weight_map` .* must name safetensors files beside it"):
        JetSpecDraftHead.from_pretrained("somebody/head", revision="v1")
    assert ("somebody/head", index.name, "v1") in asked


@loaders
def test_a_whole_file_beside_an_index_is_refused(sharded: Path, load: Callable[..., JetSpecDraftHead]) -> None:
    shutil.copy(sharded.parent / "whole.safetensors", sharded / "model.safetensors")
    with pytest.raises(ValueError, match=r"an index of shards, got both"):
        load(sharded)


@loaders
def test_what_was_saved_last_is_loaded_whole_or_in_shards(sharded: Path, load: Callable[..., JetSpecDraftHead]) -> None:
    head = load(sharded)
    for value, size in ((2.0, "50GB"), (3.0, "60KB"), (4.0, "40KB"), (5.0, "50GB")):
        head.norm.weight.data.fill_(value)
        head.save_pretrained(sharded, max_shard_size=size)
        assert load(sharded).norm.weight[0] == value
    assert [file.name for file in sharded.glob("model*")] == ["model.safetensors"]


def test_what_another_process_writes_is_left_alone(sharded: Path) -> None:
    (sharded / "model.safetensors").write_bytes(b"of somebody else")
    head = random_head(tiny_target("llama"), block_size=4, target_layer_ids=[0])
    head.save_pretrained(sharded, is_main_process=False, max_shard_size="60KB")
    assert (sharded / "model.safetensors").read_bytes() == b"of somebody else"


# Wrong configurations -------------------------------------------------------------------------------------------------

WRONG = ("x", "32", -1, 1.5, [], ["x"], {"a": 1})
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "block_size",
    "num_target_layers",
)


@loaders
def test_a_size_of_a_wrong_type_is_named_with_its_value(folder: Path, load: Callable[..., JetSpecDraftHead]) -> None:
    sound = json.loads((folder / "config.json").read_text())
    for key in SIZES:
        for value in WRONG:
            set_keys(folder, **{**sound, key: value})
            with pytest.raises(ValueError, match=key):
                load(folder)


WRONG_KEYS: list[tuple[str, Any]] = [
    ("layer_types", 3),
    ("layer_types", ["full_attention", 1]),
    ("rope_parameters", "yarn"),
    ("rope_parameters", [1]),
    ("rope_scaling", [1]),
    ("rms_norm_eps", "1e-6"),
    ("hidden_act", ["silu"]),
    ("attention_bias", "yes"),
    ("dtype", "float99"),
    ("dtype", "int8"),
    ("dtype", ["float32"]),
    ("dtype", "float8_e4m3fn"),
    ("dtype", "complex64"),
    ("eos_token_id", "2"),
    ("pad_token_id", [1]),
    ("bos_token_id", 10**400),
    ("rms_norm_eps", 10**400),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 10**400}),
    ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": [1]}),
    ("num_hidden_layers", 2**30),
    ("hidden_size", 10**400),
    ("quantization_config", {"quant_method": "fp8"}),
]


@loaders
@pytest.mark.parametrize(("key", "value"), WRONG_KEYS, ids=lambda value: str(value)[:30])
def test_a_key_of_a_wrong_type_is_named(
    folder: Path, load: Callable[..., JetSpecDraftHead], key: str, value: Any
) -> None:
    set_keys(folder, **{key: value})
    with pytest.raises(ValueError, match=key):
        load(folder)


@loaders
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"dflash_config": [1], "architectures": ["DFlashDraftModel"], "model_type": "qwen3"},
            "`dflash_config` must be a dict",
        ),
        ({"architectures": "DFlashDraftModel", "model_type": "qwen3"}, "`architectures` must be a list"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dflash_config": None}, "llama"),
    ],
)
def test_a_config_of_another_kind_is_named(
    ours: Path, load: Callable[..., JetSpecDraftHead], keys: dict[str, Any], message: str
) -> None:
    set_keys(ours, **keys)
    file = ours / "config.json"
    file.write_text(
        json.dumps({key: value for key, value in json.loads(file.read_text()).items() if value is not None})
    )
    with pytest.raises(ValueError, match=message):
        load(ours)


@loaders
@pytest.mark.parametrize("text", ["[]", "3", '"x"', "{", "", "[" * 100_000])
def test_a_config_that_is_no_dictionary_is_named(ours: Path, load: Callable[..., JetSpecDraftHead], text: str) -> None:
    (ours / "config.json").write_text(text)
    with pytest.raises((ValueError, OSError), match=r"config\.json"):
        load(ours)


def test_a_config_of_a_head_too_large_for_its_tensors_is_refused_before_it_is_made(folder: Path) -> None:
    set_keys(folder, intermediate_size=2**31)
    with pytest.raises(ValueError, match=r"`layers\.0\.mlp\.\w+\.weight` must be of shape .*2147483648"):
        read_checkpoint(folder)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"must have a `config\.json`"):
        read_checkpoint(tmp_path)


SPECULATORS: list[tuple[str, dict[str, Any]]] = [
    ("block_size", {"block_size": "3"}),
    ("transformer_layer_config", {"transformer_layer_config": [1]}),
    ("num_hidden_layers", {"transformer_layer_config": {"num_hidden_layers": []}}),
    ("layer_types", {"transformer_layer_config": {"layer_types": 5}}),
]
ASSISTANTS: list[tuple[str, dict[str, Any]]] = [
    ("num_hidden_layers", {"num_hidden_layers": "3"}),
    ("num_hidden_layers", {"num_hidden_layers": []}),
    ("layer_types", {"layer_types": 5}),
]


@pytest.mark.parametrize(
    ("format", "key", "keys"),
    [("speculators", *case) for case in SPECULATORS] + [("transformers", *case) for case in ASSISTANTS],
)
def test_a_key_of_a_wrong_type_in_another_format_is_named(
    target: PreTrainedModel, tmp_path: Path, format: str, key: str, keys: dict[str, Any]
) -> None:
    head = random_head(target, block_size=4, causal=False, target_layer_ids=[0], target_name_or_path="some/target")
    write_checkpoint(head, tmp_path, format)
    set_keys(tmp_path, **keys)
    with pytest.raises(ValueError, match=rf"`{key}` must be an? \w+, got"):
        read_checkpoint(tmp_path, target=target)


def test_offsets_that_lead_out_of_the_vocabulary_are_named(target: PreTrainedModel, tmp_path: Path) -> None:
    head = random_head(target, block_size=4, causal=False, target_layer_ids=[0], draft_token_ids=[1, 2, 3])
    write_checkpoint(head, tmp_path, "speculators", target=target, target_name_or_path="some/target")
    edit_tensors(tmp_path, lambda tensors: tensors.update(d2t=torch.tensor([0, 1, 10**9])))
    with pytest.raises(ValueError, match="`d2t` must lead to tokens from 0 to"):
        read_checkpoint(tmp_path, target=target)


def test_a_fused_projection_without_rows_is_named(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"layers.0.self_attn.qkv_proj.weight": torch.tensor(1.0)}))
    with pytest.raises(ValueError, match=r"qkv_proj\.weight` must have \d+ rows, got shape \(\)"):
        read_checkpoint(folder, "published")


@loaders
def test_what_a_caller_takes_a_head_of_ours_for_must_be_what_it_is(
    ours: Path, load: Callable[..., JetSpecDraftHead]
) -> None:
    assert load(ours, head_type="jetspec").config.causal is True
    with pytest.raises(ValueError, match="`head_type` must not contradict `causal`"):
        load(ours, head_type="dflash")
    with pytest.raises(ValueError, match="`head_type` must be"):
        load(ours, head_type="eagle")


@pytest.mark.parametrize("format", ["speculators", "transformers"])
def test_what_a_caller_takes_a_bidirectional_head_for_must_be_what_it_is(
    target: PreTrainedModel, tmp_path: Path, format: str
) -> None:
    head = random_head(target, block_size=4, causal=False, target_layer_ids=[0], target_name_or_path="some/target")
    write_checkpoint(head, tmp_path, format)
    assert read_checkpoint(tmp_path, target=target, head_type="dflash").config.causal is False
    with pytest.raises(ValueError, match="`head_type` must"):
        read_checkpoint(tmp_path, target=target, head_type="jetspec")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_not_even_a_link_to_nowhere_is_written_through(target: PreTrainedModel, tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(tmp_path.parent / "nowhere")
    with pytest.raises(FileExistsError, match=name):
        write_checkpoint(random_head(target, block_size=4, target_layer_ids=[0]), tmp_path, "published")


# What must go on working ----------------------------------------------------------------------------------------------


def test_a_head_loads_on_the_meta_device(ours: Path) -> None:
    head = JetSpecDraftHead.from_pretrained(ours, device_map="meta")
    assert {weight.device.type for weight in head.parameters()} == {"meta"}


def test_tensors_of_another_shape_are_made_anew_only_where_asked_for(ours: Path) -> None:
    set_keys(ours, target_layer_ids=[0, 1])
    head = JetSpecDraftHead.from_pretrained(ours, ignore_mismatched_sizes=True)
    assert head.fc.weight.shape == (64, 128)
    assert torch.equal(head.norm.weight, load_file(ours / "model.safetensors")["norm.weight"])
    with pytest.raises(ValueError, match=r"mismatched_keys.*fc\.weight"):
        JetSpecDraftHead.from_pretrained(ours)


def test_a_config_of_its_own_says_nothing_of_how_it_runs() -> None:
    config = JetSpecConfig.from_dict({"model_type": "jetspec", "attn_implementation": "somebody/kernel"})
    assert config._attn_implementation != "somebody/kernel"


def test_of_a_repository_only_json_and_safetensors_are_fetched(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fetch(name: str, **arguments: Any) -> str:
        asked.update(name=name, **arguments)
        return str(ours.parent)

    monkeypatch.setattr("jetspec_hf.hub.files.snapshot_download", fetch)
    assert read_checkpoint("somebody/heads::head", revision="v1").config.block_size == 4
    assert asked["name"] == "somebody/heads"
    assert asked["revision"] == "v1"
    assert asked["allow_patterns"] == ["head/*.json", "head/*.safetensors"]
