"""A head decodes with the code that travels with it, where the library is not installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import check_python_requirements, get_relative_import_files

import jetspec_hf
from jetspec_hf.hub.custom_generate import custom_generate_files, write_custom_generate
from jetspec_hf.hub.generate import generate
from support.random_heads import random_head
from support.tiny_targets import tiny_target

PACKAGE = Path(jetspec_hf.__file__).parent
NEW_TOKENS = 24
PROMPT = [[5, 17, 99, 42, 8]]

# A process in which the library cannot be imported, however it is installed.
WITHOUT_LIBRARY = """
import json, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "jetspec_hf":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Hidden())
import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
target = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
target.generation_config.eos_token_id = None
settings = dict(inputs=torch.tensor([[5, 17, 99, 42, 8]]), max_new_tokens=24, trust_remote_code=True)

def decode(**kwargs):
    torch.manual_seed(7)
    return target.generate(**settings, **kwargs)

found = []
for head in sys.argv[2:]:
    output = decode(custom_generate=head, do_sample=False, return_dict_in_generate=True)
    stats = output.acceptance
    found.append({
        "greedy": output.sequences.tolist(),
        "sampled": decode(custom_generate=head, do_sample=True, temperature=1.2).tolist(),
        "accepted_lengths": stats.accepted_lengths,
        "tree_sizes": stats.tree_sizes,
        "class": type(output).__module__,
    })
assert "jetspec_hf" not in sys.modules
print(json.dumps(found))
"""


def run_without_library(target: Path, *heads: str | Path, **environment: str) -> list[dict[str, Any]]:
    """What each head makes of the prompt, in a process of its own."""
    command = [sys.executable, "-I", "-c", WITHOUT_LIBRARY, str(target), *map(str, heads)]
    ended = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def decode_here(target: PreTrainedModel, head: Any = None, **kwargs: Any) -> Any:
    torch.manual_seed(7)
    return target.generate(torch.tensor(PROMPT), max_new_tokens=NEW_TOKENS, assistant_model=head, **kwargs)


def saved_head(target: PreTrainedModel, folder: Path, budget: int, **fields: Any) -> Any:
    head = random_head(target, block_size=6, **fields)
    head.generation_config.tree_budget = budget
    head.save_pretrained(folder, custom_generate=True)
    return head


def expected(target: PreTrainedModel, head: Any) -> dict[str, Any]:
    """Plain decoding's text, and the drafting of the head in this process, where the library is."""
    stats = decode_here(target, head, do_sample=False, return_dict_in_generate=True).acceptance
    assert stats.mean_acceptance_length > 1
    return {
        "greedy": decode_here(target, do_sample=False).tolist(),
        "sampled": decode_here(target, do_sample=True, temperature=1.2).tolist(),
        "accepted_lengths": stats.accepted_lengths,
        "tree_sizes": stats.tree_sizes,
    }


@pytest.mark.contract
def test_two_heads_draft_the_same_without_the_library(tmp_path: Path) -> None:
    """Each brings classes of its own, which must not be taken for those of the other."""
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    first = saved_head(target, tmp_path / "first-0.1", 40, seed=1)
    second = saved_head(target, tmp_path / "second", 24, seed=2, branch_rank=4, draft_token_ids=range(3, 100))
    found = run_without_library(
        tmp_path / "target", tmp_path / "first-0.1", tmp_path / "second", HF_MODULES_CACHE=str(tmp_path / "modules")
    )
    places = [result.pop("class") for result in found]
    assert all(re.fullmatch(r"transformers_modules\..*\.custom_generate\.decoding_output", place) for place in places)
    assert places[0] != places[1]
    assert found == [expected(target, first), expected(target, second)]


def test_the_code_is_the_library_s_but_for_relative_imports(tmp_path: Path) -> None:
    files = custom_generate_files()
    requirements = files.pop("requirements.txt")
    sources = {
        "_".join(part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    sources["generate"] = sources["hub_generate"]
    for name, text in files.items():
        lines = text.splitlines()[1:]
        original = sources[name.removesuffix(".py")].read_text(encoding="utf-8").splitlines()
        assert len(lines) == len(original)
        for line, before in zip(lines, original, strict=True):
            if line != before:
                words, words_before = line.split(), before.split()
                assert (words[0], words[2:]) == ("from", words_before[2:])
                assert re.fullmatch(r"\.\w+", words[1])
        (tmp_path / name).write_text(text, encoding="utf-8")
    # What transformers itself finds by following relative imports is all there is, and all that is needed.
    needed = {Path(file).name for file in get_relative_import_files(tmp_path / "generate.py")}
    assert needed | {"generate.py"} == set(files)
    (tmp_path / "requirements.txt").write_text(requirements)
    check_python_requirements(tmp_path)
    (tmp_path / "requirements.txt").write_text(requirements.replace("5.20", "99.0"))
    with pytest.raises(ImportError, match=r"transformers>=99\.0"):
        check_python_requirements(tmp_path)


class TestWithTheLibrary:
    def test_a_folder_is_loaded_once_and_by_the_installed_classes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = tiny_target("llama")
        saved_head(target, tmp_path / "head", 40)
        kwargs = {"inputs": torch.tensor(PROMPT), "max_new_tokens": 4, "do_sample": False}
        generate(target, assistant_model=tmp_path / "head", **kwargs)
        monkeypatch.setattr(jetspec_hf.JetSpecDraftHead, "from_pretrained", None)
        output = generate(target, assistant_model=tmp_path / "head", return_dict_in_generate=True, **kwargs)
        assert type(output) is jetspec_hf.JetSpecGenerateOutput

    def test_a_head_given_as_an_object_is_used(self) -> None:
        target = tiny_target("llama")
        head = random_head(target, block_size=6)
        tokens = generate(
            target, assistant_model=head, inputs=torch.tensor(PROMPT), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        assert torch.equal(tokens, decode_here(target, do_sample=False))
        assert head.last_acceptance.steps > 0

    def test_without_a_name_it_says_what_to_give(self) -> None:
        with pytest.raises(ValueError, match="`assistant_model` must be a draft head, or its folder or Hub id"):
            generate(tiny_target("llama"), inputs=torch.tensor(PROMPT), max_new_tokens=4)


def test_modules_of_an_earlier_version_go_and_an_author_s_own_stay(tmp_path: Path) -> None:
    place = tmp_path / "custom_generate"
    place.mkdir()
    (place / "decoding_old.py").write_text("# From jetspec_hf 0.0.1 (Apache-2.0), which is the place to change it.\n")
    (place / "mine.py").write_text("MINE = 1\n")
    write_custom_generate(tmp_path)
    assert {file.name for file in place.iterdir()} == {*custom_generate_files(), "mine.py"}


def test_a_head_saved_anew_is_loaded_anew(tmp_path: Path) -> None:
    target = tiny_target("llama")
    head = saved_head(target, tmp_path, budget=4)
    depths = []
    for budget in (4, 0):
        head.generation_config.tree_budget = budget
        head.save_pretrained(tmp_path)
        output = generate(target, tmp_path, inputs=torch.tensor(PROMPT), max_new_tokens=8, return_dict_in_generate=True)
        depths.append(sum(output.acceptance.tree_sizes) > 0)
    assert depths == [True, False]
