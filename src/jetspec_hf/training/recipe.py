"""Trains a draft head for a target from the target's own answers, and measures what the target accepts of its drafts.

    python -m jetspec_hf.training.regenerate --target TARGET --prompts prompts.jsonl --output answers.jsonl
    python -m jetspec_hf.training.recipe --target TARGET --answers answers.jsonl --output_dir my_head
    python -m jetspec_hf.training.recipe recipe.json --answers answers.jsonl --output_dir my_head

Options are those of `TrainingRun` and `HeadShape` below and of `JetSpecTrainingArguments`, which has all of
transformers' own. A recipe is a JSON file of the same options; those of the command line come on top. The head, its
provenance and its held-out acceptance are written to `--output_dir`. A run that was killed goes on
with `--resume_from_checkpoint true`.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel, set_seed

from ..command_line import check_model
from ..modeling_jetspec import JetSpecDraftHead
from .arguments import JetSpecTrainingArguments
from .draft_vocabulary import choose_draft_token_ids
from .evaluation import AcceptanceCallback, acceptance_table, measure_acceptance
from .prompts import read_objects
from .rows import rows_from_answers
from .simulation import Budget, simulate_budgets
from .target_reader import TargetReader
from .trainer import JetSpecTrainer


@dataclass
class TrainingRun:
    """What is trained on what."""

    target: str = field(metadata={"help": "Folder or Hub id of the target."})
    answers: list[str] = field(metadata={"help": "Files that `jetspec_hf.training.regenerate` wrote."})
    target_dtype: str = field(default="auto", metadata={"help": "Of the target while it is read."})
    head_dtype: str | None = field(default=None, metadata={"help": "What the head is saved in; the target's dtype."})
    threads: int | None = field(default=None, metadata={"help": "Of torch on the CPU."})
    max_answers: int | None = field(default=None, metadata={"help": "Takes the first answers only."})
    heldout_ids: str | None = field(default=None, metadata={"help": "File with ids to evaluate on, one a line."})
    heldout_share: float = field(default=0.05, metadata={"help": "Share of prompts held out without such a file."})
    budgets: list[str] = field(default_factory=lambda: ["chain", "16", "32", "64"], metadata={"help": "Tree budgets."})
    simulated: int = field(
        default=60, metadata={"help": "Held-out answers, greedy ones, to simulate acceptance on; 0 for none."}
    )
    decoded: int = field(
        default=0, metadata={"help": "Held-out prompts to decode for real, at every evaluation and at the end."}
    )

    @property
    def tree_budgets(self) -> list[Budget]:
        """The budgets as the evaluation wants them."""
        return ["chain" if budget == "chain" else int(budget) for budget in self.budgets]


# Options of a head that are no fields of its configuration.
NO_CONFIG_FIELDS = ("warm_start", "draft_vocab_size", "vocabulary_prompts")


@dataclass
class HeadShape:
    """The head; what is not given follows from the target."""

    warm_start: str | None = field(default=None, metadata={"help": "A trained head to go on from."})
    num_hidden_layers: int = field(default=2, metadata={"help": "Draft layers."})
    block_size: int = field(default=8, metadata={"help": "Positions of a block, the anchor included."})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Tapped layers."})
    intermediate_size: int | None = field(default=None, metadata={"help": "Width of the MLPs."})
    num_attention_heads: int | None = field(default=None, metadata={"help": "Query heads."})
    num_key_value_heads: int | None = field(default=None, metadata={"help": "Key and value heads."})
    head_dim: int | None = field(default=None, metadata={"help": "Width of an attention head."})
    embedding_scale: float = field(default=1.0, metadata={"help": "Factor on the target's embeddings."})
    mask_token_id: int | None = field(default=None, metadata={"help": "Row of the embedding for undrafted positions."})
    causal: bool = field(default=True, metadata={"help": "Causal blocks (JetSpec) or bidirectional ones (DFlash)."})
    branch_rank: int = field(default=0, metadata={"help": "Rank of the branch term; 0 for none."})
    target_name_or_path: str | None = field(default=None, metadata={"help": "The target's public name."})
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Most frequent tokens to draft; without, all of the target's vocabulary."}
    )
    vocabulary_prompts: str | None = field(
        default=None, metadata={"help": "JSONL whose `prompt` texts count, too, when those tokens are chosen."}
    )

    def make(self, target: PreTrainedModel, tokenizer: Any, rows: Dataset) -> JetSpecDraftHead:
        """The head to train, in float32: small updates would be lost in bfloat16 weights."""
        if self.warm_start is not None:
            return self._trained_head(self.warm_start)
        shape = {name: value for name, value in vars(self).items() if name not in NO_CONFIG_FIELDS}
        token_ids = None
        if self.draft_vocab_size is not None:
            texts = prompt_rows(self.vocabulary_prompts, tokenizer)
            vocabulary = choose_draft_token_ids(
                chain(rows, texts), size=self.draft_vocab_size, always=end_tokens(target)
            )
            print(f"draft vocabulary: {len(vocabulary.token_ids)} tokens, {vocabulary.coverage:.2%} of those written")
            token_ids = vocabulary.token_ids
        head: Any = JetSpecDraftHead.from_target(target, draft_token_ids=token_ids, **shape)
        fresh: JetSpecDraftHead = head.float()
        return fresh

    def _trained_head(self, folder: str) -> JetSpecDraftHead:
        head: JetSpecDraftHead = JetSpecDraftHead.from_pretrained(folder, dtype=torch.float32)
        for option in fields(self):
            has, wanted = getattr(head.config, option.name, None), getattr(self, option.name)
            if option.name != "warm_start" and wanted not in (option.default, has):
                raise ValueError(f"`{option.name}` must be {has}, that of the head in {folder}, got {wanted}.")
        return head


def prompt_rows(file: str | None, tokenizer: Any) -> Iterator[dict[str, list[int]]]:
    """The texts of a prompts file as rows of which every token counts.

    Args:
        file (`str`, *optional*): JSONL with `prompt` in each line; no rows without it.
        tokenizer (`PreTrainedTokenizerBase`): The target's.

    Raises:
        ValueError: If a line has no such text.
    """
    for row in () if file is None else read_objects(file):
        if not isinstance(row.get("prompt"), str):
            raise ValueError(f"`prompt` must be a text in each line of {file}, got {row.get('prompt')!r}.")
        token_ids = tokenizer(row["prompt"])["input_ids"]
        yield {"input_ids": token_ids, "loss_mask": [1] * len(token_ids)}


def end_tokens(target: PreTrainedModel) -> list[int]:
    """The target's EOS tokens, which a head must be able to draft.

    Args:
        target (`PreTrainedModel`): The target.
    """
    found = target.generation_config.eos_token_id
    return [] if found is None else found if isinstance(found, list) else [found]


def split_rows(run: TrainingRun, max_length: int | None = None) -> tuple[Dataset, Dataset]:
    """Rows to train on and held-out rows; all answers to one prompt are on the same side.

    Args:
        run (`TrainingRun`): The files, and what of them is held out.
        max_length (`int`, *optional*): Where rows are cut.

    Raises:
        ValueError: If nothing is held out and something is to be evaluated.
    """
    parts = [rows_from_answers(file, max_length) for file in run.answers]
    names = set.intersection(*(set(part.column_names) for part in parts))
    rows = concatenate_datasets([part.select_columns(sorted(names)) for part in parts])
    if run.max_answers is not None:
        rows = rows.select(range(min(run.max_answers, len(rows))))
    if run.heldout_ids is not None:
        heldout = set(Path(run.heldout_ids).read_text(encoding="utf-8").split())
        is_heldout = [name in heldout for name in rows["id"]]
    else:
        is_heldout = [share_of(name) < run.heldout_share for name in rows["id"]]
    if not any(is_heldout) and (run.simulated or run.decoded):
        raise ValueError(
            f"`heldout_ids` or `heldout_share` must hold out some of the {len(rows)} answers, got none; without "
            "evaluation, `simulated` and `decoded` are 0."
        )
    sides = [[index for index, held in enumerate(is_heldout) if held == wanted] for wanted in (False, True)]
    return rows.select(sides[0]), rows.select(sides[1])


def share_of(name: str) -> float:
    """A number from 0 to 1 that follows from an id.

    Args:
        name (`str`): The id.
    """
    return int.from_bytes(hashlib.blake2b(str(name).encode(), digest_size=8).digest(), "big") / 2**64


@dataclass(frozen=True)
class Decoding:
    """Held-out prompts, and as many new tokens as their longest answer has."""

    prompts: list[list[int]]
    max_new_tokens: int

    @classmethod
    def of(cls, rows: Dataset, count: int) -> "Decoding":
        """The first prompts.

        Args:
            rows (`Dataset`): Held-out rows.
            count (`int`): Most prompts.
        """
        rows = rows.select(range(min(count, len(rows))))
        starts = [row["loss_mask"].index(1) for row in rows]
        prompts = [row["input_ids"][:start] for row, start in zip(rows, starts, strict=True)]
        return cls(prompts, max(len(row["input_ids"]) - start for row, start in zip(rows, starts, strict=True)))


def evaluate(run: TrainingRun, target: PreTrainedModel, heldout: Dataset, folder: str) -> dict[str, Any]:
    """τ of a saved head by tree budget, simulated and decoded: printed, and written beside the head.

    Args:
        run (`TrainingRun`): What to measure.
        target (`PreTrainedModel`): The target.
        heldout (`Dataset`): Rows the head was not trained on.
        folder (`str`): The head's.

    Returns:
        `dict`: For `"simulated"` and `"decoded"`, where asked for, τ by tree budget.
    """
    head = JetSpecDraftHead.from_pretrained(folder, dtype=target.dtype).to(target.device)
    found = {}
    if run.simulated:
        rows = heldout.select(range(min(run.simulated, len(heldout))))
        reader = TargetReader(target, head.config.target_layer_ids)
        found["simulated"] = simulate_budgets(head, reader, rows, run.tree_budgets)
        print(
            f"simulated\n{acceptance_table(found['simulated'], rows['source'] if 'source' in rows.features else None)}"
        )
    if run.decoded:
        texts = Decoding.of(heldout, run.decoded)
        found["decoded"] = measure_acceptance(
            head, target, texts.prompts, run.tree_budgets, max_new_tokens=texts.max_new_tokens
        )
        print(f"decoded\n{acceptance_table(found['decoded'])}")
    acceptance = {
        how: {str(budget): stats.mean_acceptance_length for budget, stats in by_budget.items()}
        for how, by_budget in found.items()
    }
    (Path(folder) / "heldout_acceptance.json").write_text(json.dumps(acceptance, indent=2) + "\n", encoding="utf-8")
    return acceptance


def train_head(run: TrainingRun, shape: HeadShape, args: JetSpecTrainingArguments) -> dict[str, Any]:
    """Trains and evaluates one head.

    Args:
        run (`TrainingRun`): What is trained on what.
        shape (`HeadShape`): The head.
        args ([`JetSpecTrainingArguments`]): How it is trained.

    Returns:
        `dict`: `"training_seconds"`, and what [`evaluate`] returns.
    """
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    set_seed(args.seed)
    check_model(run.target, "`--target`", is_target=True)
    rows, heldout = split_rows(run, args.max_length)
    print(f"{len(rows)} answers to train on, {len(heldout)} held out")
    target = AutoModelForCausalLM.from_pretrained(run.target, dtype=run.target_dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.target)
    head = shape.make(target, tokenizer, rows)
    print(f"head: {head.num_parameters() / 1e6:.1f}M parameters, taps {head.config.target_layer_ids}")
    trainer = JetSpecTrainer(
        model=head,
        target=target,
        args=args,
        train_dataset=rows,
        eval_dataset=heldout if args.eval_strategy != "no" else None,
        processing_class=tokenizer,
    )
    if run.decoded:
        texts = Decoding.of(heldout, run.decoded)
        trainer.add_callback(
            AcceptanceCallback(trainer, texts.prompts, run.tree_budgets, max_new_tokens=texts.max_new_tokens)
        )
    resume = args.resume_from_checkpoint
    trained = trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    head.to(target.dtype if run.head_dtype is None else getattr(torch, run.head_dtype))
    trainer.save_model()
    acceptance = evaluate(run, target, heldout, str(args.output_dir)) if trainer.is_world_process_zero() else {}
    return {"training_seconds": trained.metrics["train_runtime"], **acceptance}


def option_parser(*more: Any, **settings: Any) -> HfArgumentParser:
    """The options of [`TrainingRun`], [`HeadShape`] and [`JetSpecTrainingArguments`].

    Args:
        more: Dataclasses whose options come first.
        settings: Of `argparse.ArgumentParser`.
    """
    parts: Any = (*more, TrainingRun, HeadShape, JetSpecTrainingArguments)
    return HfArgumentParser(parts, allow_abbrev=False, **settings)


def read_options(parser: HfArgumentParser, arguments: Sequence[str]) -> dict[str, Any]:
    """All options by name: the defaults, on top of them a recipe, on top of it the command line.

    Args:
        parser (`HfArgumentParser`): What the options are.
        arguments (`Sequence[str]`): The command line, whose first argument may be a recipe.
    """
    if arguments and arguments[0].endswith(".json"):
        try:
            recipe = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            parser.error(f"the recipe {arguments[0]} must be a file with a JSON object: {error}")
        if not isinstance(recipe, dict):
            parser.error(f"the recipe {arguments[0]} must be a file with a JSON object, got {recipe!r}")
        arguments = [*as_arguments(recipe), *arguments[1:]]
    return vars(parser.parse_args(arguments))


def as_arguments(recipe: dict[str, Any]) -> list[str]:
    """Options of a recipe as those of a command line.

    Args:
        recipe (`dict`): Values by name; `None` leaves an option out.
    """
    found = []
    for name, value in recipe.items():
        if value is not None:
            values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
            found += [f"--{name}", *map(str, values)]
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the options, from the command line and perhaps from a recipe.

    Args:
        arguments (`Sequence[str]`, *optional*): Those of the process if not given.
    """
    parser = option_parser(prog="python -m jetspec_hf.training.recipe", description=(__doc__ or "").splitlines()[0])
    return argparse.Namespace(**read_options(parser, sys.argv[1:] if arguments is None else arguments))


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and evaluates a head.

    Args:
        arguments (`Sequence[str]`, *optional*): The command line; that of the process if not given.
    """
    train_head(*option_parser().parse_dict(vars(parse(arguments))))


if __name__ == "__main__":
    main()
