"""The scripts of `examples/` are imported by name, as each of them imports the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import transformers

from jetspec_hf.training.regenerate import regenerate
from support.char_tokenizer import letter_tokenizer
from support.training_runs import MASK, walking_target

EXAMPLES = Path(__file__).parents[2] / "examples"
EOS = 2  # of the tiny target, which never writes it


@pytest.fixture(autouse=True)
def _examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny target that walks round a circle of tokens, and its answers to 60 prompts."""
    folder = tmp_path_factory.mktemp("data")
    target, tokenizer = walking_target(), letter_tokenizer()
    target.generation_config.eos_token_id = EOS
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    prompts = [
        {"id": f"prompt-{number}", "source": "vowels" if number % 2 else "consonants", "prompt": first + second}
        for number, (first, second) in enumerate(product("abcdefghij", "uvwxyz"))
    ]
    regenerate(target, tokenizer, prompts, folder / "answers.jsonl", max_new_tokens=14, batch_size=60)
    return folder


@pytest.fixture
def recipe(data: Path, tmp_path: Path) -> Callable[..., str]:
    """Writes a recipe for a tiny head that learns in 30 steps; `None` takes an option out."""

    def write(**options: Any) -> str:
        usual = {
            "target": str(data / "target"),
            "answers": [str(data / "answers.jsonl")],
            "output_dir": str(tmp_path / "head"),
            "heldout_share": 0.2,
            "budgets": ["chain", "4"],
            "num_hidden_layers": 1,
            "block_size": 4,
            "target_layer_ids": [0, 1],
            "mask_token_id": MASK,
            "max_steps": 30,
            "learning_rate": 1e-2,
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
        }
        file = tmp_path / "recipe.json"
        file.write_text(json.dumps({**usual, **options}))
        return str(file)

    return write
