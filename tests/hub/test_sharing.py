"""Saving and pushing a head with what lies beside it.

What a push sends and a download fetches goes over HTTP to a local stand-in of the Hub's routes
(`support.hub_stand_in`), in processes of their own: huggingface_hub reads `HF_ENDPOINT` when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModel, PreTrainedModel

from jetspec_hf import JetSpecConfig, JetSpecDraftHead, JetSpecHead
from jetspec_hf.hub import write_checkpoint
from support.char_tokenizer import letter_tokenizer
from support.hub_stand_in import HubStandIn, running_hub
from support.random_heads import random_head
from support.tiny_targets import tiny_target

from .test_card import PROVENANCE, RESULTS
from .test_custom_generate import WITHOUT_LIBRARY, expected

PUSH_AND_FETCH = """
import json, sys
import torch
from huggingface_hub import HfApi
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from jetspec_hf import JetSpecHead

torch.set_num_threads(1)
target_folder, head_folder, results = sys.argv[1:]
target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
target.generation_config.eos_token_id = None
head = JetSpecHead.from_pretrained(head_folder)
address = head.push_to_hub("user/head", tokenizer=AutoTokenizer.from_pretrained(target_folder), results=results)
api = HfApi()
card = api.hf_hub_download("user/head", "README.md")
text = open(card, encoding="utf-8").read().replace("Be careful with it.", "Written on the Hub.")
api.upload_file(repo_id="user/head", path_in_repo="README.md", path_or_fileobj=text.encode())
api.upload_file(repo_id="user/head", path_in_repo="custom_generate/old_module.py", path_or_fileobj=b"pass")
for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors"):
    api.upload_file(repo_id="user/head", path_in_repo=name, path_or_fileobj=b"in shards, earlier")
head.push_to_hub("user/head", commit_message="Again")

fetched = JetSpecHead.from_pretrained("user/head")
assert type(AutoModel.from_pretrained("user/head")) is JetSpecHead
stats = target.generate(
    torch.tensor([[5, 17, 99, 42, 8]]), max_new_tokens=24, do_sample=False, assistant_model=fetched,
    return_dict_in_generate=True,
).acceptance
print(json.dumps({
    "address": address,
    "letters": AutoTokenizer.from_pretrained("user/head").vocab_size,
    "weights": all(torch.equal(value, fetched.state_dict()[name]) for name, value in head.state_dict().items()),
    "accepted_lengths": stats.accepted_lengths,
    "tree_sizes": stats.tree_sizes,
}))
"""


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target("llama")


@pytest.fixture(scope="module")
def folder(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, and a head whose author has written a card."""
    place = tmp_path_factory.mktemp("sharing")
    target.save_pretrained(place / "target")
    letter_tokenizer().save_pretrained(place / "target")
    head = random_head(target, block_size=6, seed=1)
    head.config.target_name_or_path = str(place / "target")
    head.generation_config.tree_budget = 40
    (place / "head").mkdir()
    (place / "head" / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n\nBe careful with it.\n")
    (place / "head" / "training_provenance.json").write_text(json.dumps(PROVENANCE))
    head.save_pretrained(place / "head")
    return place


@pytest.fixture(scope="module")
def hub() -> Iterator[HubStandIn]:
    with running_hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def fetched(hub: HubStandIn, folder: Path) -> dict[str, Any]:
    """What came of pushing, editing on the Hub, pushing again and fetching."""
    (folder / "speed.json").write_text(json.dumps(RESULTS))
    return run(hub, folder, PUSH_AND_FETCH, folder / "target", folder / "head", folder / "speed.json")


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class TestSaving:
    def test_a_saved_head_has_a_card_that_tells_of_its_training(self, folder: Path) -> None:
        plain = {"config.json", "generation_config.json", "model.safetensors", "README.md", "training_provenance.json"}
        assert names_in(folder / "head") == plain
        card = ModelCard.load(folder / "head" / "README.md")
        assert card.data.license == "mit"
        assert "Be careful with it." in card.text
        assert "On 835 rows" in card.text

    def test_more_is_written_when_asked_for(self, target: PreTrainedModel, tmp_path: Path) -> None:
        head = random_head(target, block_size=6)
        head.save_pretrained(
            tmp_path, tokenizer=letter_tokenizer(), results=RESULTS, license="mit", custom_generate=True, name="me/it"
        )
        assert {"tokenizer.json", "tokenizer_config.json", "custom_generate"} < names_in(tmp_path)
        text = (tmp_path / "README.md").read_text(encoding="utf-8")
        for part in ('from_pretrained("me/it"', 'custom_generate="me/it"', "pipeline(", "| tree 16 | 2.43 |", "`mit`"):
            assert part in text

    def test_only_the_main_process_writes(self, target: PreTrainedModel, tmp_path: Path) -> None:
        random_head(target, block_size=6).save_pretrained(tmp_path, is_main_process=False)
        assert names_in(tmp_path) == set()

    def test_the_auto_classes_load_a_head(self, folder: Path) -> None:
        head = AutoModel.from_pretrained(folder / "head")
        assert type(head) is JetSpecDraftHead
        assert type(AutoConfig.from_pretrained(folder / "head")) is JetSpecConfig
        saved = JetSpecHead.from_pretrained(folder / "head")
        assert all(torch.equal(value, head.state_dict()[name]) for name, value in saved.state_dict().items())
        assert head.generation_config.tree_budget == 40

    def test_pushing_goes_one_way(self, target: PreTrainedModel, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"call `head.push_to_hub\(repo_id\)`"):
            random_head(target, block_size=6).save_pretrained(tmp_path, push_to_hub=True)
        assert names_in(tmp_path) == set()


class TestPushing:
    def test_a_head_comes_back_as_it_was(
        self, hub: HubStandIn, fetched: dict[str, Any], target: PreTrainedModel, folder: Path
    ) -> None:
        here = expected(target, JetSpecHead.from_pretrained(folder / "head"))
        assert fetched["weights"]
        assert fetched["accepted_lengths"] == here["accepted_lengths"]
        assert fetched["tree_sizes"] == here["tree_sizes"]
        assert fetched["letters"] == letter_tokenizer().vocab_size
        assert fetched["address"].startswith(f"{hub.endpoint}/user/head/commit/")

    def test_everything_lies_beside_the_weights(self, hub: HubStandIn, fetched: dict[str, Any], folder: Path) -> None:
        files = hub.repositories["user/head"]
        assert {"README.md", "config.json", "generation_config.json", "model.safetensors"} < files.keys()
        assert {"tokenizer.json", "custom_generate/generate.py", "training_provenance.json"} < files.keys()
        assert "custom_generate/old_module.py" not in files
        assert hub.commits[0::5] == ["Upload draft head", "Again"]
        assert all(str(folder).encode() not in text for text in files.values())
        assert json.loads(files["config.json"])["target_name_or_path"] == "target"

    def test_the_card_on_the_hub_is_brought_up_to_date(self, hub: HubStandIn, fetched: dict[str, Any]) -> None:
        card = ModelCard(hub.repositories["user/head"]["README.md"].decode())
        assert "# Mine\n\nWritten on the Hub." in card.text
        assert "On 835 rows" in card.text
        assert card.data.license == "mit"
        assert "Measured" not in card.text  # the second push came without results
        assert 'custom_generate="user/head"' in card.text

    def test_it_decodes_from_the_hub_without_the_library(
        self, hub: HubStandIn, fetched: dict[str, Any], target: PreTrainedModel, folder: Path
    ) -> None:
        (found,) = run(hub, folder, WITHOUT_LIBRARY, folder / "target", "user/head")
        assert found.pop("class").startswith("transformers_modules.user.head.")
        assert found == expected(target, JetSpecHead.from_pretrained(folder / "head"))

    def test_other_weights_do_not_go_by_the_record_of_the_earlier_ones(self, folder: Path, tmp_path: Path) -> None:
        from jetspec_hf.hub.sharing import _collect  # noqa: PLC0415  # the seam before anything is sent

        head = JetSpecHead.from_pretrained(folder / "head")
        for dtype in (torch.float32, torch.bfloat16):
            (tmp_path / str(dtype)).mkdir()
            _collect(head.to(dtype), tmp_path / str(dtype), None)
            assert names_in(tmp_path / str(dtype)) == {"README.md", "training_provenance.json"}
        with torch.no_grad():
            head.norm.weight[0] += 1
        (tmp_path / "trained").mkdir()
        _collect(head, tmp_path / "trained", None)
        assert names_in(tmp_path / "trained") == set()


def run(hub: HubStandIn, folder: Path, script: str, *arguments: Any) -> Any:
    """The JSON that a script prints, in a process whose Hub is the stand-in."""
    places = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "cache"), "HF_TOKEN": "hf_stand_in"}
    environment = {**os.environ, **places, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


BROKEN_BESIDE: dict[str, tuple[str, bytes]] = {
    "latin-1": ("README.md", "---\nlicense: mit\n---\nMålt".encode("latin-1")),
    "YAML": ("README.md", b"---\na: [1\n---\nMine"),
    "no metadata": ("README.md", b"---\n- 1\n---\nMine"),
    "shape": ("training_provenance.json", b"[]"),
    "syntax": ("training_provenance.json", b"{"),
    "keys": ("training_provenance.json", b'{"data": {"rows": 3}}'),
    "kinds": ("training_provenance.json", b'{"data": 3, "target": []}'),
}


@pytest.mark.parametrize("problem", BROKEN_BESIDE)
def test_nothing_is_saved_where_the_card_cannot_be_written(tmp_path: Path, problem: str) -> None:
    name, content = BROKEN_BESIDE[problem]
    (tmp_path / name).write_bytes(content)
    head = random_head(tiny_target("llama"), block_size=4)
    with pytest.raises(ValueError, match=name):
        head.save_pretrained(tmp_path, custom_generate=True)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_head_written_for_another_target_has_it_in_its_card_and_keeps_its_own(tmp_path: Path) -> None:
    head = random_head(tiny_target("llama"), block_size=4, target_name_or_path="some/target")
    write_checkpoint(head, tmp_path, "jetspec", target_name_or_path="some/other")
    assert JetSpecConfig.from_pretrained(tmp_path).target_name_or_path == "some/other"
    assert ModelCard.load(tmp_path / "README.md").data.base_model == "some/other"
    assert "some/target" not in (tmp_path / "README.md").read_text()
    assert head.config.target_name_or_path == "some/target"
