"""Where the seconds of a tree decoding step go, measured beside plain generation.

    python -m jetspec_hf.bench.phases --target FOLDER [--head FOLDER] --dtype bfloat16 --tree-budget 64

Prints two tables. The first gives the time per step and phase, and the share of everything besides the two forwards,
*draft* (the head's forward and its `lm_head` product; the tree is made in *build*) and *verify* (the target's forward
over the tree). The second compares steps early and late in one long generation: our own work (*build*, *accept*,
*commit*) must not grow with the text.

Measured on the CPU, where a phase's time on the clock is its work; an accelerator would need synchronisation.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GenerationMixin

from ..modeling_jetspec import JetSpecDraftHead

PHASES = ("draft", "build", "verify", "accept", "commit")
FORWARDS = ("draft", "verify")
OWN_WORK = tuple(phase for phase in PHASES if phase not in FORWARDS)
OWN_WORK_GOAL = 0.08

PROMPT = (
    "The lighthouse stood at the end of a long spit of sand and stone, and for eighty years a keeper had climbed its "
    "stairs every evening to light the lamp. When the last of them retired, the town decided that the tower should not "
    "be left to the gulls. They met in the school hall on a wet Tuesday in November to talk about what could be done "
    "with it, and"
)


@dataclass(frozen=True)
class Measurement:
    """One generation.

    Args:
        tokens (`tuple[int, ...]`): The new tokens.
        seconds (`float`): Duration of the whole `generate` call.
        phase_seconds (`dict[str, float]`): Sum per phase, `prefill` included; empty for plain generation.
        step_seconds (`tuple[dict[str, float], ...]`): The same per step, without `prefill`.
        mean_acceptance_length (`float`): Tokens committed per target forward.
    """

    tokens: tuple[int, ...]
    seconds: float
    phase_seconds: Mapping[str, float]
    step_seconds: tuple[Mapping[str, float], ...] = ()
    mean_acceptance_length: float = 1.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of the whole call, prefill included."""
        return len(self.tokens) / self.seconds

    def per_step(self) -> dict[str, float]:
        """Seconds per step: every phase, `rest` (what no phase claims) and `step` (their sum)."""
        steps = len(self.step_seconds)
        decoding = self.seconds - self.phase_seconds.get("prefill", 0.0)
        phases = {phase: self.phase_seconds[phase] / steps for phase in PHASES}
        return {**phases, "rest": decoding / steps - sum(phases.values()), "step": decoding / steps}


def median_per_step(runs: Sequence[Measurement]) -> dict[str, float]:
    """Median over repeats of `Measurement.per_step`, entry by entry.

    Args:
        runs (`Sequence[Measurement]`): Repeats of the same generation.
    """
    rows = [run.per_step() for run in runs]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def own_work_share(per_step: Mapping[str, float]) -> float:
    """Share of a step spent outside the two forwards.

    Args:
        per_step (`Mapping[str, float]`): As `median_per_step` returns it.
    """
    return 1.0 - sum(per_step[phase] for phase in FORWARDS) / per_step["step"]


def early_and_late(step_seconds: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Median seconds per step in the first and in the last quarter of a generation.

    Args:
        step_seconds (`Sequence[Mapping[str, float]]`): Seconds per phase of each step, in order.

    Returns:
        `dict[str, tuple[float, float]]`: First and last quarter for every phase and for `own work`.

    Raises:
        ValueError: If there are fewer than 4 steps.
    """
    if len(step_seconds) < 4:
        raise ValueError(f"`step_seconds` must have at least 4 steps to be quartered, got {len(step_seconds)}.")
    quarter = len(step_seconds) // 4
    parts = (step_seconds[:quarter], step_seconds[-quarter:])
    groups = {**{phase: (phase,) for phase in PHASES}, "own work": OWN_WORK}

    def median_of(group: tuple[str, ...], part: Sequence[Mapping[str, float]]) -> float:
        return statistics.median(sum(step.get(phase, 0.0) for phase in group) for step in part)

    return {name: (median_of(group, parts[0]), median_of(group, parts[1])) for name, group in groups.items()}


def agreement(plain: Sequence[int], tree: Sequence[int]) -> str:
    """A sentence on whether two texts are the same, and else where they part.

    Args:
        plain (`Sequence[int]`): Tokens of plain generation.
        tree (`Sequence[int]`): Tokens of tree generation.
    """
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain, tree, strict=False)))
    if same == len(plain) == len(tree):
        return "same tokens as plain generation: yes"
    return (
        f"same tokens as plain generation: the first {same} of {len(plain)} (below float32, texts may part where two "
        "logits lie within rounding of each other)"
    )


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, first column left-aligned, the others right-aligned, that also reads well as plain text.

    Args:
        header (`Sequence[str]`): Column titles.
        rows (`Sequence[Sequence[str]]`): Cells, one sequence per row.
    """
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cells[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)),
        ]
        return f"| {' | '.join(padded)} |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(header), line(rule), *(line(row) for row in rows)])


def phase_table(per_step: Mapping[str, float]) -> str:
    """The first table: milliseconds per step and share of the step, by phase.

    Args:
        per_step (`Mapping[str, float]`): As `median_per_step` returns it.
    """
    rows = [
        (name, f"{1e3 * per_step[name]:.2f}", f"{100 * per_step[name] / per_step['step']:.1f} %")
        for name in (*PHASES, "rest", "step")
    ]
    return format_table(("phase", "ms per step", "share"), rows)


def growth_table(quarters: Mapping[str, tuple[float, float]]) -> str:
    """The second table: milliseconds per step early and late in a generation.

    Args:
        quarters (`Mapping[str, tuple[float, float]]`): As `early_and_late` returns it.
    """
    rows = [
        (name, f"{1e3 * first:.2f}", f"{1e3 * last:.2f}", f"{last / first:.2f}" if first > 0 else "-")
        for name, (first, last) in quarters.items()
    ]
    return format_table(("phase", "first quarter, ms", "last quarter, ms", "last / first"), rows)


def measure(
    target: GenerationMixin, input_ids: torch.Tensor, max_new_tokens: int, head: JetSpecDraftHead | None = None
) -> Measurement:
    """Runs one greedy generation and times it.

    Args:
        target (`GenerationMixin`): The model that is sped up.
        input_ids (`torch.LongTensor` of shape `(1, prompt)`): The prompt.
        max_new_tokens (`int`): Tokens to generate.
        head ([`JetSpecDraftHead`], *optional*): The draft head; plain generation without it.
    """
    options: dict[str, Any] = {} if head is None else {"assistant_model": head}
    start = time.perf_counter()
    output = target.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        **options,
    )
    seconds = time.perf_counter() - start
    tokens = tuple(output.sequences[0, input_ids.shape[1] :].tolist())
    if head is None:
        return Measurement(tokens, seconds, {})
    stats = output.acceptance
    return Measurement(tokens, seconds, stats.seconds, tuple(stats.step_seconds), stats.mean_acceptance_length)


def load(options: argparse.Namespace) -> tuple[GenerationMixin, JetSpecDraftHead, torch.Tensor]:
    """Loads target and head, and encodes the prompt.

    Args:
        options (`argparse.Namespace`): The command line.
    """
    dtype = getattr(torch, options.dtype)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype).eval()
    # Greedy, and no EOS: every repeat generates the same number of tokens.
    target.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    if options.head is None:
        head = JetSpecDraftHead.from_target(target, num_hidden_layers=1, block_size=8)
    else:
        head = JetSpecDraftHead.from_pretrained(options.head)
    head = head.to(dtype).eval()
    head.generation_config.tree_budget = options.tree_budget
    input_ids = AutoTokenizer.from_pretrained(options.target)(PROMPT, return_tensors="pt")["input_ids"]
    return target, head, input_ids


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Args:
        arguments (`Sequence[str]`, *optional*): Those of the process if not given.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jetspec_hf.bench.phases", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--head", type=Path, help="folder of a head (default: a fresh one, one layer, block size 8)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="(%(default)s)")
    parser.add_argument("--tree-budget", type=int, default=64, help="tree nodes besides the root (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens of a repeat (%(default)s)")
    parser.add_argument("--long-tokens", type=int, default=96, help="tokens of the long generation (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved with plain generation (%(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints.

    Args:
        arguments (`Sequence[str]`, *optional*): The command line; that of the process if not given.
    """
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    target, head, input_ids = load(options)
    for assistant in (None, head):
        measure(target, input_ids, 4, assistant)  # first calls allocate, compile kernels and fill caches

    plain, tree = [], []
    for repeat in range(options.repeats):
        print(f"repeat {repeat + 1} of {options.repeats}", flush=True)
        plain.append(measure(target, input_ids, options.max_new_tokens))
        tree.append(measure(target, input_ids, options.max_new_tokens, head))
    print(f"long generation, {options.long_tokens} tokens", flush=True)
    long = measure(target, input_ids, options.long_tokens, head)

    per_step = median_per_step(tree)
    share = own_work_share(per_step)
    speeds = [statistics.median(run.tokens_per_second for run in runs) for runs in (plain, tree)]
    print(f"\n{describe_machine()}")
    print(f"target {options.target.name}, head {options.head or 'fresh (untrained)'}, {options.dtype}, batch size 1")
    print(
        f"{options.threads} threads, {options.tree_budget} nodes, {input_ids.shape[1]} prompt tokens, "
        f"{options.max_new_tokens} new tokens, medians of {options.repeats} repeats\n"
    )
    print(phase_table(per_step))
    print(f"\neverything besides the two forwards: {share:.1%} of a step (goal: below {OWN_WORK_GOAL:.0%})")
    print(f"tau {tree[0].mean_acceptance_length:.2f}, plain {speeds[0]:.2f} tokens/s, tree {speeds[1]:.2f} tokens/s")
    print(f"{agreement(plain[0].tokens, tree[0].tokens)}\n")
    print(growth_table(early_and_late(long.step_seconds)))


def describe_machine() -> str:
    """One line: processor, operating system, versions."""
    return (
        f"{_processor_name()}, {platform.system()} {platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown processor"


if __name__ == "__main__":
    main()
