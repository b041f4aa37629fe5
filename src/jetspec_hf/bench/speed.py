"""How much faster a draft head makes generation, measured beside plain `generate` and stock prompt lookup.

    python -m jetspec_hf.bench.speed --target FOLDER --head FOLDER --prompts humaneval.jsonl gsm8k.jsonl \
        --limit 8 --dtype bfloat16 --threads 2 --tree-budget 4 8 16 --decoding greedy penalised sampled \
        --chain --prompt-lookup --json speed.json

One process, batch size 1. Every prompt is answered by each method in turn, the first one rotating from prompt to prompt
so that none always runs on a cooler or busier machine. Times are those of whole `generate` calls, prefill included,
per generated token: texts may end at EOS, and below float32 not always at the same place.

Measured on the CPU, where a phase's time on the clock is its work; an accelerator would need synchronisation.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..decoding.drafter import DraftingKnobs
from ..modeling_jetspec import JetSpecDraftHead
from .report import NOTES, as_json, machine, summarise, tables
from .runner import DECODINGS, PROMPT_LOOKUP_TOKENS, Benchmark, Case, ending, methods
from .tasks import encode, read_tasks


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Args:
        arguments (`Sequence[str]`, *optional*): Those of the process if not given.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jetspec_hf.bench.speed", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the target")
    add("--head", type=Path, required=True, help="folder of the head")
    add("--prompts", type=Path, nargs="+", required=True, help="JSONL files with `turns` or `prompt` in each line")
    add("--limit", type=_at_least(1), help="takes the first prompts of each file only (default: all)")
    add("--max-new-tokens", type=_at_least(2), default=96, help="most tokens of an answer (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="(%(default)s)")
    add("--threads", type=_at_least(1), default=torch.get_num_threads(), help="torch threads (%(default)s)")
    add("--tree-budget", type=_at_least(1), nargs="+", default=[16], help="tree nodes besides the root (16)")
    add("--decoding", choices=DECODINGS, nargs="+", default=["greedy"], help="(greedy)")
    add("--chain", action="store_true", help="also draft a single path of full depth")
    add("--prompt-lookup", action="store_true", help=f"also transformers' own, {PROMPT_LOOKUP_TOKENS} tokens at once")
    add("--repeats", type=_at_least(1), default=1, help="of everything; times are medians (%(default)s)")
    add("--seed", type=int, default=0, help="of sampling, the same for each method (%(default)s)")
    add("--json", type=Path, help="file to write everything to")
    options = parser.parse_args(arguments)
    for name in ("tree_budget", "decoding"):
        values = getattr(options, name)
        if len(set(values)) < len(values):
            parser.error(f"--{name.replace('_', '-')} must not repeat a value, got {' '.join(map(str, values))}")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json must lie in a folder that exists, got {options.json}")
    return options


def _at_least(smallest: int) -> Any:
    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {smallest}, got {text!r}")
        return int(text)

    return integer


def load(options: argparse.Namespace) -> tuple[PreTrainedModel, JetSpecDraftHead, PreTrainedTokenizerBase]:
    """Loads target, head and tokenizer.

    Args:
        options (`argparse.Namespace`): The command line.
    """
    dtype = getattr(torch, options.dtype)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype).eval()
    # What else it recommends (penalties, top-k, ...) would be filled in below the decodings that are compared.
    target.generation_config = GenerationConfig(**ending(target.generation_config))
    head = JetSpecDraftHead.from_pretrained(options.head, dtype=dtype).eval()
    return target, head, AutoTokenizer.from_pretrained(options.target)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints.

    Args:
        arguments (`Sequence[str]`, *optional*): The command line; that of the process if not given.
    """
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    prompts = read_tasks(options.prompts, options.limit)
    target, head, tokenizer = load(options)
    knobs = DraftingKnobs.resolve(head, target, GenerationConfig())
    compared = methods(knobs, options.tree_budget, options.chain, options.prompt_lookup)
    cases = [
        [Case(prompt, input_ids, decoding, options.seed + number) for decoding in options.decoding]
        for number, (prompt, input_ids) in enumerate((prompt, encode(prompt, tokenizer)) for prompt in prompts)
    ]
    place = machine()
    flags = ", ".join(flag if there else f"no {flag}" for flag, there in place["flags"].items())
    print(f"{place['description']}\ncores: {place['cores']}, torch threads: {options.threads}; {flags}")
    print(
        f"target {options.target.name}, head {options.head.name}, {options.dtype}, batch size 1, at most "
        f"{options.max_new_tokens} new tokens, repeats: {options.repeats}; trees at most {knobs.tree_width} wide and "
        f"{knobs.draft_depth} deep; seed {options.seed}\n",
        flush=True,
    )
    benchmark = Benchmark(target, head, options.max_new_tokens)
    runs = benchmark.run_all(cases, compared, options.repeats)
    differences = benchmark.differences(runs)
    rows = summarise(runs, differences)
    print(f"{tables(rows)}\n{NOTES}")
    if options.json is not None:
        found = as_json(place, _settings(options, knobs), rows, runs, differences)
        options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


def _settings(options: argparse.Namespace, knobs: DraftingKnobs) -> dict[str, Any]:
    """The command line without the machine's folders, and what follows from the head."""
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    settings |= {"target": options.target.name, "head": options.head.name}
    settings |= {"prompts": [path.name for path in options.prompts]}
    decodings = {name: DECODINGS[name] for name in options.decoding}
    return {**settings, "decoding": decodings, "tree_width": knobs.tree_width, "draft_depth": knobs.draft_depth}


if __name__ == "__main__":
    main()
