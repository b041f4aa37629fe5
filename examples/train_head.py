"""Trains a draft head for a target from the target's own answers, and measures what the target accepts of its drafts.

    python -m jetspec_hf.training.regenerate --target TARGET --prompts prompts.jsonl --output answers.jsonl
    python examples/train_head.py --target TARGET --answers answers.jsonl --output_dir my_head
    python examples/train_head.py examples/recipes/gemma-3-270m.json   # the same options from a file

Options are those of `TrainingRun` and `HeadShape` below and of `JetSpecTrainingArguments`, which has all of
transformers' own. The head, its provenance and a table of held-out acceptance are written to `--output_dir`.
"""

import hashlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel, set_seed

from jetspec_hf import JetSpecDraftHead
from jetspec_hf.training import (
    JetSpecTrainer,
    JetSpecTrainingArguments,
    TargetReader,
    choose_draft_token_ids,
    rows_from_answers,
    simulate_budgets,
)
from jetspec_hf.training.evaluation import acceptance_table


@dataclass
class TrainingRun:
    """What is trained on what."""

    target: str = field(metadata={"help": "Folder or Hub id of the target."})
    answers: list[str] = field(metadata={"help": "Files that `jetspec_hf.training.regenerate` wrote."})
    target_dtype: str = field(default="auto", metadata={"help": "Of the target while it is read."})
    threads: int | None = field(default=None, metadata={"help": "Of torch on the CPU."})
    max_answers: int | None = field(default=None, metadata={"help": "Takes the first answers only."})
    heldout_ids: str | None = field(default=None, metadata={"help": "File with ids to evaluate on, one a line."})
    heldout_share: float = field(default=0.05, metadata={"help": "Share of prompts held out without such a file."})
    simulated: int = field(default=60, metadata={"help": "Held-out answers to simulate acceptance on; 0 for none."})
    budgets: list[str] = field(default_factory=lambda: ["chain", "16", "32", "64"], metadata={"help": "Tree budgets."})


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
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Most frequent tokens to draft; without, all of the target's vocabulary."}
    )

    def make(self, target: PreTrainedModel, rows: Dataset) -> JetSpecDraftHead:
        """The head to train, in float32: small updates would be lost in bfloat16 weights."""
        if self.warm_start is not None:
            return JetSpecDraftHead.from_pretrained(self.warm_start, dtype=torch.float32)
        fields = {name: value for name, value in vars(self).items() if name not in ("warm_start", "draft_vocab_size")}
        token_ids = None
        if self.draft_vocab_size is not None:
            vocabulary = choose_draft_token_ids(rows, size=self.draft_vocab_size, always=end_tokens(target))
            print(f"draft vocabulary: {len(vocabulary.token_ids)} tokens, {vocabulary.coverage:.2%} of those written")
            token_ids = vocabulary.token_ids
        head: Any = JetSpecDraftHead.from_target(target, draft_token_ids=token_ids, **fields)
        trained: JetSpecDraftHead = head.float()
        return trained


def end_tokens(target: PreTrainedModel) -> list[int]:
    """The target's EOS tokens, which a head must be able to draft."""
    found = target.generation_config.eos_token_id
    return [] if found is None else found if isinstance(found, list) else [found]


def split_rows(run: TrainingRun, max_length: int | None) -> tuple[Dataset, Dataset]:
    """Rows to train on and held-out rows; all answers to one prompt are on the same side."""
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
    sides = [[index for index, held in enumerate(is_heldout) if held == wanted] for wanted in (False, True)]
    return rows.select(sides[0]), rows.select(sides[1])


def share_of(name: str) -> float:
    """A number from 0 to 1 that follows from an id."""
    return int.from_bytes(hashlib.blake2b(str(name).encode(), digest_size=8).digest(), "big") / 2**64


def report(
    run: TrainingRun, head: JetSpecDraftHead, target: PreTrainedModel, rows: Dataset, folder: Path
) -> dict[str, float]:
    """Simulates greedy decoding on held-out answers, prints τ and saves it beside the head."""
    reader = TargetReader(target, head.config.target_layer_ids)
    budgets = [budget if budget == "chain" else int(budget) for budget in run.budgets]
    rows = rows.select(range(min(run.simulated, len(rows))))
    found = simulate_budgets(head, reader, rows, budgets)
    print(acceptance_table(found, rows["source"] if "source" in rows.column_names else None))
    lengths = {str(budget): stats.mean_acceptance_length for budget, stats in found.items()}
    (folder / "heldout_acceptance.json").write_text(json.dumps(lengths, indent=2) + "\n", encoding="utf-8")
    return lengths


def train_head(run: TrainingRun, shape: HeadShape, args: JetSpecTrainingArguments) -> dict[str, float]:
    """Trains and evaluates one head; returns τ by tree budget."""
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    set_seed(args.seed)
    target = AutoModelForCausalLM.from_pretrained(run.target, dtype=run.target_dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.target)
    rows, heldout = split_rows(run, args.max_length)
    print(f"{len(rows)} answers to train on, {len(heldout)} held out")
    head = shape.make(target, rows)
    print(f"head: {head.num_parameters() / 1e6:.1f}M parameters, taps {head.config.target_layer_ids}")
    trainer = JetSpecTrainer(
        model=head,
        target=target,
        args=args,
        train_dataset=rows,
        eval_dataset=heldout if args.eval_strategy != "no" else None,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    return report(run, head.eval(), target, heldout, Path(args.output_dir)) if run.simulated else {}


def main(arguments: list[str] | None = None) -> None:
    """Reads the options, from the command line or a JSON file, and trains."""
    parser = HfArgumentParser((TrainingRun, HeadShape, JetSpecTrainingArguments))
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0].endswith(".json"):
        options = {**json.loads(Path(arguments[0]).read_text(encoding="utf-8"))}
        overrides = parser.parse_args_into_dataclasses([*as_arguments(options), *arguments[1:]])
        train_head(*overrides)
    else:
        train_head(*parser.parse_args_into_dataclasses(arguments))


def as_arguments(options: dict[str, Any]) -> list[str]:
    """Options of a file as those of a command line, so that later ones override them."""
    found = []
    for name, value in options.items():
        found += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return found


if __name__ == "__main__":
    main()
