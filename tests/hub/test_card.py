"""The model card: what it tells of a head, and what it leaves to its author."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.bench.speed import main as measure
from jetspec_hf.hub import make_card
from jetspec_hf.hub.card import BEGIN, END, public_name
from support.char_tokenizer import letter_tokenizer
from support.tiny_targets import tiny_target

ROW = {
    "task": "gsm8k", "decoding": "greedy", "method": "tree 16", "prompts": 3, "new_tokens": 48.0,
    "mean_acceptance_length": 2.4349, "tokens_per_second": 11.06, "speedup": [1.4, 1.56, 1.71], "identical": 3,
    "largest_margin": None, "phase_shares": None,
}  # fmt: skip
RESULTS = {
    "machine": {"description": "Some CPU, torch 2.13.0", "device": "cpu", "cores": 2, "threads": 1, "flags": {}},
    "settings": {"target": "llama", "dtype": "float32", "batch_size": 1, "max_new_tokens": 48, "repeats": 1},
    "summary": [
        {**ROW, "method": "plain", "mean_acceptance_length": 1.0, "speedup": [1.0, 1.0, 1.0]},
        {**ROW, "method": "prompt lookup", "mean_acceptance_length": 1.5},
        ROW,
    ],
    "runs": [],
}
PROVENANCE = {
    "data": {"fingerprint": "d1", "rows": 835, "tokens": 139312, "supervised_tokens": 80344},
    "target": {"name": "llama", "class": "LlamaForCausalLM", "fingerprint": "t1"},
    "tokenizer": None,
    "versions": {"python": "3.11.7", "jetspec_hf": "0.1.0", "peft": None},
    "arguments": {"max_steps": 900, "learning_rate": 0.002, "max_length": None, "disable_tqdm": False},
}
WRITTEN_BY_HAND = """---
license: mit
library_name: other
tags: [mine, jetspec]
datasets: [me/answers]
model-index:
- name: my name
  results:
  - task: {type: text-generation}
    dataset: {name: Mine, type: me/mine}
    metrics: [{type: accuracy, value: 0.5}]
---
# My head

Be careful with it.
"""


def head_for(name: str | None = "meta-llama/tiny", **fields: Any) -> JetSpecDraftHead:
    head = JetSpecDraftHead.from_target(tiny_target("llama"), num_hidden_layers=1, block_size=6, **fields)
    head.config.target_name_or_path = name
    return head


def test_a_new_card_has_the_metadata_by_which_a_head_is_found() -> None:
    data = make_card(
        head_for(), "me/my-head", results=RESULTS, license="apache-2.0", custom_generate=True
    ).data.to_dict()
    metrics = data.pop("model-index")
    assert data == {
        "base_model": "meta-llama/tiny",
        "base_model_relation": "adapter",
        "library_name": "jetspec_hf",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-head", "jetspec", "custom_generate"],
    }
    (index,) = metrics
    assert index["name"] == "my-head"
    assert [(found["type"], found["value"]) for found in index["results"][0]["metrics"]] == [
        ("mean_acceptance_length", 2.435),
        ("speedup", 1.56),
    ]  # of the head alone: plain decoding and prompt lookup are no merit of it


def test_a_new_card_tells_what_was_measured_and_how_it_was_trained() -> None:
    text = make_card(
        head_for(draft_token_ids=range(3, 100), branch_rank=4),
        "me/my-head",
        results=[RESULTS, {**RESULTS, "machine": {**RESULTS["machine"], "device": "A GPU"}}],
        provenance=PROVENANCE,
        tokenizer=True,
    ).text
    assert "| gsm8k (3 prompts) | greedy | tree 16 | 2.43 | 1.56 (1.40–1.71) | 11.1 | 3 of 3 |" in text
    assert "| gsm8k (3 prompts) | greedy | prompt lookup | 1.50 |" in text
    assert "| plain |" not in text
    assert (
        "Some CPU, torch 2.13.0; device: cpu; cores: 2, torch threads: 1; target llama, float32, batch size 1," in text
    )
    assert "device: A GPU;" in text
    assert "On 835 rows of 139,312 tokens, 80,344 of them to be predicted (fingerprint `d1`)." in text
    assert "With `max_steps=900`, `learning_rate=0.002`." in text
    assert "By python 3.11.7, jetspec_hf 0.1.0." in text
    assert "| draft vocabulary | 97 of 128 tokens |" in text
    assert "| block | 6 positions, causal: at most 5 tokens deep |" in text
    assert 'JetSpecHead.from_pretrained("me/my-head", dtype=target.dtype)' in text
    assert 'pipeline("text-generation", "meta-llama/tiny", assistant_model="me/my-head")' in text
    assert "2606.18394" in text


def test_what_is_not_known_is_not_told() -> None:
    card = make_card(head_for(None), "my-head")
    assert not {"license", "base_model", "base_model_relation", "model-index"} & card.data.to_dict().keys()
    for heading in ("Measured", "Training", "None"):
        assert heading not in card.text
    assert "custom_generate" not in card.content
    assert "Its author has not named a licence" in card.text


def test_an_author_s_text_and_metadata_stay() -> None:
    head = head_for()
    card = make_card(head, "me/my-head", results=RESULTS, existing=ModelCard(WRITTEN_BY_HAND))
    data = card.data.to_dict()
    assert card.text.startswith("# My head\n\nBe careful with it.\n\n" + BEGIN)
    assert (data["license"], data["library_name"], data["datasets"]) == ("mit", "other", ["me/answers"])
    assert data["tags"] == ["mine", "jetspec", "speculative-decoding", "draft-head"]
    assert data["base_model"] == "meta-llama/tiny"
    assert "The head: `mit`." in card.text
    (index,) = data["model-index"]
    assert index["name"] == "my name"
    assert [found["dataset"]["name"] for found in index["results"]] == ["Mine", "gsm8k"]

    # The author writes on around our section; with the next weights nothing of the old figures is left.
    card.text = card.text.replace(END, END + "\n\nAfterword.\n")
    card.data.base_model = "me/fine-tune"
    again = make_card(head, "me/my-head", existing=card)
    assert again.text.startswith("# My head\n\nBe careful with it.\n\n" + BEGIN)
    assert again.text.rstrip().endswith(END + "\n\nAfterword.")
    assert again.text.count(BEGIN) == again.text.count(END) == 1
    assert again.data.base_model == "me/fine-tune"
    assert "Measured" not in again.text
    assert [found["dataset"]["name"] for found in again.data.to_dict()["model-index"][0]["results"]] == ["Mine"]
    assert make_card(head, "me/my-head", existing=again).content == again.content


def test_a_licence_that_is_named_replaces_the_earlier_one() -> None:
    card = make_card(head_for(), "my-head", license="apache-2.0", existing=ModelCard(WRITTEN_BY_HAND))
    assert card.data.license == "apache-2.0"
    assert "The head: `apache-2.0`." in card.text


@pytest.mark.parametrize("text", [BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"])
def test_torn_markers_are_an_error_and_nothing_is_guessed(text: str) -> None:
    existing = ModelCard(f"---\nlicense: mit\n---\nMine\n{text}\nmine\n")
    with pytest.raises(ValueError, match=r"once each or not at all, got \d and \d"):
        make_card(head_for(), "my-head", existing=existing)


@pytest.mark.parametrize(
    "results", [{"machine": {}}, {**RESULTS, "settings": {}}, {**RESULTS, "summary": [{"method": "tree 4"}]}]
)
def test_other_results_are_refused(results: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`results` must be what .* writes, got something without '"):
        make_card(head_for(), "my-head", results=results)
    (tmp_path / "speed.json").write_text(json.dumps(results))
    with pytest.raises(ValueError, match="`results` must be"):
        make_card(head_for(), "my-head", results=tmp_path / "speed.json")


def changed_results(place: str, key: str, value: Any) -> dict[str, Any]:
    if place == "row":
        return {**RESULTS, "summary": [{**ROW, key: value}]}
    return {**RESULTS, key: value}


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ("row", "speedup", None),
        ("row", "speedup", [1.0, float("nan"), 1.0]),
        ("row", "speedup", [1.0, float("inf"), 1.0]),
        ("row", "speedup", [1.0]),
        ("row", "speedup", ["1", "2", "3"]),
        ("row", "tokens_per_second", 10**400),
        ("row", "mean_acceptance_length", "2"),
        ("row", "method", 3),
        ("top", "summary", 3),
        ("top", "machine", []),
    ],
)
def test_results_with_figures_that_are_none_are_refused_and_the_file_is_named(
    tmp_path: Path, place: str, key: str, value: Any
) -> None:
    (tmp_path / "speed.json").write_text(json.dumps(changed_results(place, key, value)))
    with pytest.raises(ValueError, match=r"`results` must be what .* writes, got something .*speed\.json"):
        make_card(head_for(), "my-head", results=tmp_path / "speed.json")


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000])
def test_results_that_are_no_report_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "speed.json").write_text(text)
    with pytest.raises(ValueError, match=r"speed\.json"):
        make_card(head_for(), "my-head", results=tmp_path / "speed.json")
    with pytest.raises(ValueError, match=r"`results` must be .* got None"):
        make_card(head_for(), "my-head", results=None)


def test_no_name_in_the_results_breaks_the_table_or_the_section() -> None:
    row = {**ROW, "task": f"a|b\nc {END}"}
    head = head_for()
    card = make_card(head, "my-head", results={**RESULTS, "summary": [row]})
    assert "\n| a\\|b c &lt;!-- jetspec_hf: up to here --> (3 prompts) | greedy | tree 16 | 2.43 |" in card.text
    assert make_card(head, "my-head", existing=card).text.count(END) == 1


def test_metadata_that_yaml_takes_for_something_else_and_a_name_without_figures_stay() -> None:
    head = head_for()
    existing = ModelCard("---\nlanguage: no\nmodel_name: Kari\n---\nMine\n")
    once = make_card(head, "my-head", existing=existing)
    assert (once.data.language, once.data.model_name) == ("no", "Kari")
    assert "language: 'no'\nmodel_name: Kari\n" in once.content
    listed = make_card(head, "my-head", existing=ModelCard("---\nlanguage: [en, no]\n---\nMine\n"))
    assert listed.data.language == ["en", "no"]


def test_a_card_with_the_line_ends_of_windows_keeps_them_and_does_not_change_again(tmp_path: Path) -> None:
    head, file = head_for(), tmp_path / "README.md"
    file.write_bytes(WRITTEN_BY_HAND.replace("\n", "\r\n").encode())
    seen = []
    for _ in range(2):
        make_card(head, "my-head", existing=ModelCard.load(file)).save(file)
        seen.append(file.read_bytes())
    assert seen[0] == seen[1]
    assert seen[0].count(b"\r\n") == seen[0].count(b"\n") == seen[0].count(b"\r")


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("google/gemma-3-270m", "google/gemma-3-270m"),
        ("gpt2", "gpt2"),
        ("/home/somebody/models/gemma", "gemma"),
        ("./models/gemma", "gemma"),
        ("a/b/c", "c"),
        (None, None),
        ("", None),
    ],
)
def test_of_a_path_only_the_last_part_is_told(name: str | None, public: str | None) -> None:
    assert public_name(name) == public


def test_a_folder_that_looks_like_an_id_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "targets" / "gemma").mkdir(parents=True)
    assert public_name("targets/gemma") == "gemma"
    assert make_card(head_for("targets/gemma"), "my-head").data.base_model is None


def test_engines_are_told_how_to_serve_it_or_why_they_cannot() -> None:
    text = make_card(head_for(branch_rank=4), "me/my-head").text
    assert 'jetspec_hf.hub.write_checkpoint(head, "HEAD_FOLDER", "published")' in text
    speculation = '{"method": "dflash", "model": "HEAD_FOLDER", "num_speculative_tokens": 5}'
    assert f"\nvllm serve meta-llama/tiny --speculative-config '{speculation}'\n" in text
    assert "\npython -m sglang.launch_server --model-path meta-llama/tiny --speculative-algorithm DFLASH" in text
    assert "- `branch_rank`: the branch term is left out" in text
    refused = make_card(head_for(embedding_scale=0.5), "me/my-head").text
    assert "vLLM and SGLang cannot serve this head." in refused
    assert "`embedding_scale` must be 1 in this format" in refused
    assert "vllm serve" not in refused


def test_what_the_speed_benchmark_writes_is_understood(tmp_path: Path) -> None:
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    letter_tokenizer().save_pretrained(tmp_path / "target")
    JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=4).save_pretrained(tmp_path / "head")
    (tmp_path / "code.jsonl").write_text('{"prompt": "define"}\n')
    folders = [word for name in ("target", "head") for word in (f"--{name}", str(tmp_path / name))]
    files = ["--prompts", str(tmp_path / "code.jsonl"), "--json", str(tmp_path / "speed.json")]
    measure([*folders, *files, "--max-new-tokens", "3", "--dtype", "float32", "--threads", "1", "--tree-budget", "4"])
    text = make_card(head_for(), "me/my-head", results=str(tmp_path / "speed.json")).text
    assert "| code (1 prompts) | greedy | tree 4 |" in text
    assert "target target, float32, batch size 1, at most 3 new tokens, repeats: 1." in text
