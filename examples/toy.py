"""A target and a draft head small enough to be made in a minute on one CPU core, for the notebooks.

The target is a llama of four layers that reads and writes single characters and goes on with a date: given
`Mon 27 Feb,` it writes the five days that follow. Both are trained when they are first needed, and kept in the
system's folder of temporary files. A notebook takes `load()`, and real models in their place if it is given them.
"""

import datetime
import logging
import random
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from filelock import FileLock
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from jetspec_hf import JetSpecHead
from jetspec_hf.training import (
    JetSpecTrainer,
    JetSpecTrainingArguments,
    choose_draft_token_ids,
    rows_from_answers,
)
from jetspec_hf.training.regenerate import regenerate

PAD, EOS = "<pad>", "</s>"
ANSWER_TOKENS = 80  # a whole answer: five dates of twelve characters, and the EOS


@dataclass(frozen=True)
class Toy:
    """What a notebook works with.

    Args:
        target (`PreTrainedModel`): The model to be sped up.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        head (`JetSpecHead`): A head that was trained for it.
        prompts (`list[str]`): Prompts that neither was trained on.
    """

    target: Any
    tokenizer: Any
    head: JetSpecHead
    prompts: list[str]


def load(target: str | None = None, head: str | None = None, dtype: str = "float32") -> Toy:
    """Loads the toy, or a real target with its head.

    Args:
        target (`str`, *optional*): Folder or Hub id of a target; the toy if not given.
        head (`str`, *optional*): Folder or Hub id of its head.
        dtype (`str`, defaults to `"float32"`): What a real target is loaded in.

    Raises:
        ValueError: If only one of `target` and `head` is given.
    """
    quiet()
    if (target is None) != (head is None):
        raise ValueError(f"`target` and `head` must be given together or not at all, got {target!r} and {head!r}.")
    if target is None or head is None:
        toy, tokenizer = toy_target()
        return Toy(toy, tokenizer, toy_head(), [prompt(day) for day in random_days(8, seed=1)])
    real = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
    prompts = ["The three primary colours are", "def fibonacci(n):\n", "Natalia sold clips to 48 of her friends."]
    return Toy(
        real,
        transformers.AutoTokenizer.from_pretrained(target),
        JetSpecHead.from_pretrained(head, dtype=real.dtype),
        prompts,
    )


def quiet() -> None:
    """Seeds, takes one thread, which a tiny model is faster on, and turns progress bars and hints off."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("jetspec_hf").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)


def dates(first: datetime.date, count: int = 6) -> str:
    """For example `Mon 27 Feb, Tue 28 Feb, Wed 01 Mar`."""
    days = [first + datetime.timedelta(days=number) for number in range(count)]
    return ", ".join(day.strftime("%a %d %b") for day in days)


def random_days(count: int, seed: int) -> list[datetime.date]:
    """Days of the years 1990 to 2017."""
    draws = random.Random(seed)
    return [datetime.date(1990, 1, 1) + datetime.timedelta(days=draws.randrange(10_000)) for _ in range(count)]


def prompt(day: datetime.date) -> str:
    """What the target goes on from."""
    return dates(day, 1) + ","


def toy_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token for each printable character."""
    tokens = [PAD, EOS, *map(chr, range(32, 127))]
    by_character = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=PAD))
    by_character.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    by_character.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=by_character,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def toy_target() -> tuple[Any, Any]:
    """The target and its tokenizer, trained in about half a minute or read from where they are kept."""
    folder = _kept("target", _train_target)
    target = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return target, transformers.AutoTokenizer.from_pretrained(folder)


def toy_head() -> JetSpecHead:
    """The head, trained in about half a minute on what the target writes, or read from where it is kept."""
    return JetSpecHead.from_pretrained(_kept("head", _train_head))


def _kept(name: str, make: Any) -> Path:
    """The folder of what `make(folder)` writes; another version of this file has another one."""
    version = zlib.crc32(Path(__file__).read_bytes())
    place = Path(tempfile.gettempdir()) / f"jetspec-toy-{version:08x}"
    place.mkdir(exist_ok=True)
    with FileLock(place / f"{name}.lock"):
        if not (place / name).is_dir():
            make(place / f"{name}.unfinished")
            (place / f"{name}.unfinished").rename(place / name)
    return place / name


def _train_target(folder: Path) -> None:
    tokenizer = toy_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    target = transformers.LlamaForCausalLM(config)
    steps, rows = 300, 8
    optimizer = torch.optim.AdamW(target.parameters(), lr=4e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        texts = [dates(day) + EOS for day in random_days(rows, seed=1000 + step)]
        input_ids = tokenizer(texts, return_tensors="pt")["input_ids"]  # all of one length
        target(input_ids=input_ids, labels=input_ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _train_head(folder: Path) -> None:
    """As in the notebook `03_train_a_head`, which says what each part is for."""
    target, tokenizer = toy_target()
    with tempfile.TemporaryDirectory() as scratch:
        answers = f"{scratch}/answers.jsonl"
        prompts = [{"id": str(day), "prompt": prompt(day)} for day in sorted(set(random_days(230, seed=2)))]
        regenerate(target, tokenizer, prompts, answers, batch_size=64, max_new_tokens=ANSWER_TOKENS)
        rows = rows_from_answers(answers)
        head = new_head(target, choose_draft_token_ids(rows, always=[tokenizer.eos_token_id]).token_ids)
        arguments = training_arguments(scratch, logging_steps=1000, report_to="none")
        trainer = JetSpecTrainer(model=head, target=target, args=arguments, train_dataset=rows)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    head.generation_config.tree_budget = 16  # a fixed size, so that two runs of a notebook draw the same trees
    head.save_pretrained(folder)


def new_head(target: Any, draft_token_ids: list[int]) -> JetSpecHead:
    """An untrained head of one layer that drafts blocks of eight, with a branch term."""
    torch.manual_seed(0)
    return JetSpecHead.from_target(
        target,
        num_hidden_layers=1,
        block_size=8,
        target_layer_ids=[0, 1, 2],
        draft_token_ids=draft_token_ids,
        branch_rank=32,
    )


def training_arguments(folder: str, **options: Any) -> JetSpecTrainingArguments:
    """Sixty steps, which is enough for the toy."""
    return JetSpecTrainingArguments(
        folder,
        max_steps=60,
        per_device_train_batch_size=16,
        anchors_per_row=16,
        learning_rate=3e-3,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
