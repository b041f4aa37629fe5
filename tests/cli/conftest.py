"""A tiny target that speaks letters and a head for it, in folders; and the command line in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import transformers
from typer.testing import CliRunner, Result

from jetspec_hf.cli.app import app
from support.char_tokenizer import letter_tokenizer
from support.random_heads import random_head
from support.tiny_targets import tiny_target

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)

Run = Callable[..., Result]


@dataclass(frozen=True)
class Folders:
    """Where the target, the same one without a chat template, and the head are."""

    target: Path
    plain_target: Path
    head: Path


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """With 200 nodes the random head's tree has most tokens of the first depth, so that some are accepted."""
    root = tmp_path_factory.mktemp("models")
    made = Folders(root / "target", root / "plain_target", root / "head")
    target, tokenizer = tiny_target("llama"), letter_tokenizer()
    for folder, template in ((made.plain_target, None), (made.target, TEMPLATE)):
        tokenizer.chat_template = template
        target.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    head = random_head(target, block_size=4, target_name_or_path=str(made.target))
    head.generation_config.tree_width = 128
    head.generation_config.tree_budget = 200
    head.save_pretrained(made.head)
    return made


@pytest.fixture
def run() -> Iterator[Run]:
    """Runs `jetspec` with these arguments."""

    def run(*arguments: object, stdin: str = "", **environment: str) -> Result:
        return CliRunner(env=environment).invoke(app, list(map(str, arguments)), input=stdin, prog_name="jetspec")

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.disable_progress_bar()
    yield run
    transformers.logging.enable_progress_bar()
    transformers.logging.set_verbosity(verbosity)
