"""How much faster a draft head makes generation, measured beside everything a user could pick instead.

    python -m jetspec_hf.bench --target FOLDER --head FOLDER --prompts humaneval.jsonl gsm8k.jsonl \
        --limit 8 --dtype bfloat16 --threads 2 --all --decoding greedy sampled --json speed.json --plots pictures

One process. Every prompt is answered by each method in turn, the first one rotating from prompt to prompt so that none
always runs on a cooler or busier machine. Times are those of whole `generate` calls, prefill included, per generated
token: texts may end at EOS, and below float32 not always at the same place.

An accelerator works while the host runs on. There, times of calls wait for it at their ends only, and the phases of a
step are from another generation, which waits for it at the ends of every phase.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..command_line import at_least
from ..decoding.drafter import DraftingKnobs
from .machine import PeakMemory, bytes_of, machine, machine_lines
from .methods import AUTO, DECODINGS, FIXED_BUDGETS, PROMPT_LOOKUP_TOKENS, STOCK_CHAIN, Method, methods
from .options import (
    INTERRUPTED,
    add_machine_options,
    add_model_options,
    add_prompt_options,
    check_options,
    command,
    ending,
    head_name,
    load_models,
    load_target,
    tree_budget,
    write_json,
)
from .report import NOTES, Memory, as_json, memory_table, summarise, tables
from .runner import Benchmark, Case, Run
from .tasks import Prompt, batches, encode, left_padded, read_tasks

NO_ORACLE = "an oracle cannot tell transformers' own chain drafter what it knows"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Args:
        arguments (`Sequence[str]`, *optional*): Those of the process if not given.
    """
    parser = command("", __doc__)
    add_model_options(parser)
    add_prompt_options(parser)
    add_machine_options(parser)
    add = parser.add_argument
    add("--max-new-tokens", type=at_least(2), default=96, help="most tokens of an answer (%(default)s)")
    add("--batch-size", type=at_least(1), default=1, help="prompts of a task answered at once (%(default)s)")
    add(
        "--tree-budget",
        type=tree_budget,
        nargs="+",
        help=f'nodes besides the root, or "auto" (auto; with --all {" ".join(map(str, FIXED_BUDGETS))} auto)',
    )
    add("--decoding", choices=DECODINGS, nargs="+", default=["greedy"], help="(greedy)")
    add("--all", action="store_true", help="all of the methods below, and trees of every size")
    add("--chain", action="store_true", help="also draft a single path of full depth")
    add("--stock-chain", action="store_true", help="also run the head in transformers' own DFlash chain drafter")
    add("--prompt-lookup", action="store_true", help=f"also transformers' own, {PROMPT_LOOKUP_TOKENS} tokens at once")
    add("--assistant", type=Path, nargs="+", default=[], help="folders of small models, also as assistants")
    add("--repeats", type=at_least(1), default=1, help="of everything; times are medians (%(default)s)")
    add("--seed", type=int, default=0, help="of sampling, the same for each method (%(default)s)")
    add("--json", type=Path, help="file to write everything to, again after each prompt")
    add("--plots", type=Path, help="folder to draw plots into; needs matplotlib")
    options = parser.parse_args(arguments)
    if options.tree_budget is None:
        options.tree_budget = [*FIXED_BUDGETS, AUTO] if options.all else [AUTO]
    for name in ("chain", "stock_chain", "prompt_lookup"):
        setattr(options, name, getattr(options, name) or options.all)
    check_options(parser, options, unique=("tree_budget", "decoding"))
    names = [folder.name for folder in options.assistant]
    if len(set(names)) < len(names):
        parser.error(f"--assistant must name folders of different names, got {' '.join(names)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints.

    Args:
        arguments (`Sequence[str]`, *optional*): The command line; that of the process if not given.
    """
    options = parse(arguments)
    prompts = batches(read_tasks(options.prompts, options.limit), options.batch_size)
    target, head, tokenizer = load_models(options)
    knobs = DraftingKnobs.resolve(head, target, GenerationConfig())
    pad_token_id = ending(target.generation_config)["pad_token_id"]
    cases = [
        [_case(batch, tokenizer, pad_token_id, decoding, options.seed + number) for decoding in options.decoding]
        for number, batch in enumerate(prompts)
    ]
    cases = [[case.to(options.device) for case in of_prompt] for of_prompt in cases]
    wanted = methods(
        knobs,
        options.tree_budget,
        chain=options.chain,
        stock_chain=options.stock_chain and options.oracle is None,
        prompt_lookup=options.prompt_lookup,
        assistants={folder.name: load_target(folder, options) for folder in options.assistant},
    )
    place, settings = machine(options.device), _settings(options, knobs)
    print(machine_lines(place))
    print(f"{_description(options, knobs)}\n", flush=True)

    benchmark = Benchmark(target, head, options.max_new_tokens, options.oracle)
    compared, skipped = benchmark.usable(cases[0][0], wanted)
    if options.stock_chain and options.oracle is not None:
        skipped[STOCK_CHAIN] = NO_ORACLE
    report = _Report(benchmark, compared, place, settings, skipped, options.json)
    try:
        for run in benchmark.run_all(cases, compared, options.repeats):
            report.add(run)
        report.finish(cases)
    except KeyboardInterrupt:
        print("\ninterrupted: what follows is of the prompts that all methods have answered")
        report.show(options.plots)
        raise SystemExit(INTERRUPTED) from None
    report.show(options.plots)


class _Report:
    """Collects runs, and keeps what is known so far in a file."""

    def __init__(
        self,
        benchmark: Benchmark,
        compared: Sequence[Method],
        place: dict[str, Any],
        settings: dict[str, Any],
        skipped: dict[str, str],
        path: Path | None,
    ) -> None:
        self._benchmark, self._methods, self._path = benchmark, compared, path
        self._place, self._settings, self._skipped = place, settings, skipped
        self._runs: list[Run] = []
        self._memory: Memory | None = None
        self._complete = False

    def add(self, run: Run) -> None:
        """Takes in a run; what all methods have answered is written."""
        self._runs.append(run)
        if len(self._runs) % len(self._methods) == 0:
            self._write(self._found(margins=False))

    def finish(self, cases: Sequence[Sequence[Case]]) -> None:
        """Once all runs are there: peak memory, on the longest prompt."""
        longest = max((case for of_prompt in cases for case in of_prompt), key=lambda case: case.input_ids.numel())
        device, head = self._benchmark.target.device, self._benchmark.head
        self._memory = Memory(
            PeakMemory.source(device),
            {"target": bytes_of(self._benchmark.target), "head": bytes_of(head)},
            {method.name: self._benchmark.peak_memory(longest, method) for method in self._methods},
        )
        self._complete = True

    def show(self, plots: Path | None) -> None:
        """Prints the tables, writes the file for the last time, and draws."""
        found, rows = self._found(margins=True)
        if not rows:
            print("nothing was measured")
            return
        print(tables(rows))
        if self._memory is not None:
            print(memory_table(self._memory))
        for name, reason in self._skipped.items():
            print(f"{name}: n/a: {reason}\n")
        print(NOTES)
        self._write((found, rows))
        if plots is not None:
            from ..plots import save_benchmark  # noqa: PLC0415  # matplotlib is optional

            save_benchmark(found, plots)

    def _found(self, margins: bool) -> tuple[dict[str, Any], list[Any]]:
        runs = self._runs[: len(self._runs) // len(self._methods) * len(self._methods)]
        differences = self._benchmark.differences(runs, margins)
        rows = summarise(runs, differences)
        found = as_json(
            self._place,
            self._settings,
            rows,
            runs,
            differences,
            skipped=self._skipped,
            memory=self._memory,
            complete=self._complete,
        )
        return found, rows

    def _write(self, found: tuple[dict[str, Any], list[Any]]) -> None:
        write_json(found[0], self._path)


def _case(
    prompts: tuple[Prompt, ...], tokenizer: PreTrainedTokenizerBase, pad_token_id: int, decoding: str, seed: int
) -> Case:
    input_ids, attention_mask = left_padded([encode(prompt, tokenizer) for prompt in prompts], pad_token_id)
    return Case(prompts, input_ids, attention_mask, decoding, seed)


def _description(options: argparse.Namespace, knobs: DraftingKnobs) -> str:
    return (
        f"target {options.target.name}, head {head_name(options)}, {options.dtype}, batch size {options.batch_size}, "
        f"at most {options.max_new_tokens} new tokens, repeats: {options.repeats}; trees at most {knobs.tree_width} "
        f"wide and {knobs.draft_depth} deep; seed {options.seed}"
    )


def _settings(options: argparse.Namespace, knobs: DraftingKnobs) -> dict[str, Any]:
    """The command line without the machine's folders, and what follows from the head."""
    left_out = ("json", "plots", "all", "device", "untrained", "block_size")
    settings = {name: value for name, value in vars(options).items() if name not in left_out}
    return {
        **settings,
        "target": options.target.name,
        "head": head_name(options),
        "prompts": [path.name for path in options.prompts],
        "assistant": [path.name for path in options.assistant],
        "decoding": {name: DECODINGS[name] for name in options.decoding},
        "tree_width": knobs.tree_width,
        "draft_depth": knobs.draft_depth,
    }
