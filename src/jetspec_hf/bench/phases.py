"""Where the seconds of a tree decoding step go, and whether they grow with the text.

    python -m jetspec_hf.bench.phases --target FOLDER --head FOLDER --dtype bfloat16 --tree-budget 64 --long-tokens 4000

Prints two tables. The first gives the time per step and phase, medians of repeats that are interleaved with plain
generation, and the share of everything besides the two forwards, *draft* (the head's forward and its `lm_head`
product; the tree is made in *build*) and *verify* (the target's forward over the tree). The second follows one long
generation from stretch to stretch: our own work (*build*, *accept*, *commit*) must not grow with the text. Below it
stands the memory that generation needed, beside plain generation of as many tokens.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..command_line import at_least
from ..decoding.drafter import DraftingKnobs
from ..decoding.output import PHASES
from ..modeling_jetspec import JetSpecDraftHead
from .machine import PeakMemory, machine, machine_lines
from .markdown import format_table, milliseconds
from .measurement import OWN_WORK, Measurement, median_of, own_work_share
from .methods import PLAIN, Method, tree_method
from .options import (
    add_machine_options,
    add_model_options,
    check_options,
    command,
    ending_at_ctrl_c,
    head_name,
    load_models,
    tree_budget,
    write_json,
)
from .runner import Benchmark, Case, first_difference
from .tasks import Prompt, left_padded

OWN = "own work"
PROMPT = (
    "The lighthouse stood at the end of a long spit of sand and stone, and for eighty years a keeper had climbed its "
    "stairs every evening to light the lamp. When the last of them retired, the town decided that the tower should not "
    "be left to the gulls. They met in the school hall on a wet Tuesday in November to talk about what could be done "
    "with it, and"
)


def stretches(step_seconds: Sequence[Mapping[str, float]], count: int) -> list[dict[str, float]]:
    """Median seconds per step in equal stretches of a generation, in order.

    Args:
        step_seconds (`Sequence[Mapping[str, float]]`): Seconds per phase of each step, in order.
        count (`int`): Stretches, or as many as there are steps if these are fewer; the last few steps may be left out.

    Returns:
        `list[dict[str, float]]`: For every phase and for `own work`.
    """
    count = min(count, len(step_seconds))
    length = len(step_seconds) // count
    groups = {**{phase: (phase,) for phase in PHASES}, OWN: OWN_WORK}
    parts = [step_seconds[start * length : (start + 1) * length] for start in range(count)]
    return [
        {
            name: statistics.median(sum(step.get(phase, 0.0) for phase in group) for step in part)
            for name, group in groups.items()
        }
        for part in parts
    ]


def phase_table(per_step: Mapping[str, float]) -> str:
    """The first table: milliseconds per step and share of the step, by phase.

    Args:
        per_step (`Mapping[str, float]`): As `Measurement.per_step` returns it.
    """
    rows = [
        (name, milliseconds(per_step[name]), f"{100 * per_step[name] / per_step['step']:.1f} %")
        for name in (*PHASES, "rest", "step")
    ]
    return format_table(("phase", "ms per step", "share"), rows)


def growth_table(parts: Sequence[Mapping[str, float]], steps: int) -> str:
    """The second table: milliseconds per step, stretch by stretch, and the last divided by the first.

    Args:
        parts (`Sequence[Mapping[str, float]]`): As `stretches` returns them.
        steps (`int`): Steps of the generation.
    """
    length = steps // len(parts)
    rows = [
        [f"{number * length + 1}–{(number + 1) * length}", *map(milliseconds, part.values())]
        for number, part in enumerate(parts)
    ]
    first, last = parts[0], parts[-1]
    growth = [f"{last[name] / first[name]:.2f}" if first[name] > 0 else "-" for name in first]
    return format_table(("steps, ms", *parts[0]), [*rows, ["last / first", *growth]])


def agreement(plain: Sequence[int], tree: Sequence[int]) -> str:
    """A sentence on whether two texts are the same, and else where they part.

    Args:
        plain (`Sequence[int]`): Tokens of plain generation.
        tree (`Sequence[int]`): Tokens of tree generation.
    """
    same = first_difference(plain, tree)
    if same is None:
        return "same tokens as plain generation: yes"
    return (
        f"same tokens as plain generation: the first {same} of {len(plain)} (below float32, texts may part where two "
        "logits lie within rounding of each other)"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Args:
        arguments (`Sequence[str]`, *optional*): Those of the process if not given.
    """
    parser = command("phases", __doc__)
    add_model_options(parser)
    add_machine_options(parser)
    add = parser.add_argument
    add("--tree-budget", type=tree_budget, default=64, help='tree nodes besides the root, or "auto" (%(default)s)')
    add("--max-new-tokens", type=at_least(4), default=64, help="tokens of a repeat (%(default)s)")
    add("--repeats", type=at_least(1), default=3, help="interleaved with plain generation (%(default)s)")
    add("--long-tokens", type=at_least(16), default=96, help="tokens of the long generation (%(default)s)")
    add("--stretches", type=at_least(2), default=4, help="of the long generation (%(default)s)")
    add("--json", type=Path, help="file to write everything to")
    options = parser.parse_args(arguments)
    check_options(parser, options)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints.

    Args:
        arguments (`Sequence[str]`, *optional*): The command line; that of the process if not given.
    """
    options = parse(arguments)
    target, head, tokenizer = load_models(options)
    case = _case(target, tokenizer).to(options.device)
    method = tree_method(DraftingKnobs.resolve(head, target, GenerationConfig()), options.tree_budget)
    place = machine(options.device)
    print(machine_lines(place))
    print(
        f"target {options.target.name}, head {head_name(options)}, {options.dtype}, batch size 1, {method.name}, "
        f"{case.input_ids.shape[1]} prompt tokens, {options.max_new_tokens} new tokens, medians of {options.repeats} "
        "repeats\n",
        flush=True,
    )
    with ending_at_ctrl_c():
        plain, tree = _repeats(Benchmark(target, head, options.max_new_tokens, options.oracle), case, method, options)
    per_step = median_of([run.per_step() for run in tree])
    speeds = [statistics.median(run.tokens_per_second for run in runs) for runs in (plain, tree)]
    print(phase_table(per_step))
    print(f"\neverything besides the two forwards: {own_work_share(per_step):.1%} of a step")
    tau = tree[0].mean_acceptance_length
    print(f"tau {tau:.2f}, plain {speeds[0]:.2f} tokens/s, tree {speeds[1]:.2f} tokens/s")
    print(f"{agreement(plain[0].texts[0], tree[0].texts[0])}\n")

    found = {
        "machine": place,
        "settings": {
            **{name: value for name, value in vars(options).items() if name not in ("json", "device")},
            **{"target": options.target.name, "head": head_name(options)},
        },
        "per_step": per_step,
        "own_work_share": own_work_share(per_step),
        "mean_acceptance_length": tau,
        "tokens_per_second": dict(zip((PLAIN, method.name), speeds, strict=True)),
    }
    write_json(found, options.json)

    print(f"long generation, {options.long_tokens} tokens", flush=True)
    with ending_at_ctrl_c():
        long, memory = _long(Benchmark(target, head, options.long_tokens, options.oracle), case, method)
    parts = stretches(long.step_seconds, options.stretches)
    print(growth_table(parts, len(long.step_seconds)))
    print(memory_lines(memory, target, head, long, case))
    write_json({**found, "long": {"steps": len(long.step_seconds), "stretches": parts, "memory": memory}}, options.json)


def memory_lines(
    memory: Mapping[str, int | None],
    target: PreTrainedModel,
    head: JetSpecDraftHead,
    long: Measurement,
    case: Case,
) -> str:
    """The memory of the long generation, and what drafting may take of it.

    Args:
        memory (`Mapping[str, int | None]`): Peak bytes above the loaded models, plain first.
        target (`PreTrainedModel`): The target.
        head ([`JetSpecDraftHead`]): The head.
        long (`Measurement`): The generation with trees.
        case (`Case`): Its prompt.
    """
    plain, tree = memory.values()
    if plain is None or tree is None:
        return "\nmemory: not measured, this system keeps no high-water mark that can be reset"
    size = target.dtype.itemsize
    logits = (max(long.tree_sizes) + 1) * head.config.vocab_size * size
    positions = case.input_ids.shape[1] + long.tokens
    features = positions * head.fc.in_features * size
    return (
        f"\nmemory above the loaded models: plain {plain / 1e6:.1f} MB, tree {tree / 1e6:.1f} MB; a row of logits for "
        f"each node and the root takes {logits / 1e6:.1f} MB, the tapped features of {positions} tokens "
        f"{features / 1e6:.1f} MB\n({PeakMemory.source(target.device)})"
    )


def _repeats(
    benchmark: Benchmark, case: Case, method: Method, options: argparse.Namespace
) -> tuple[list[Measurement], list[Measurement]]:
    methods = (Method(PLAIN), method)
    benchmark.usable(case, methods)
    runs = list(benchmark.run_all([[case]], methods, options.repeats))
    plain, tree = ([run.measurement for run in runs if run.method == method.name] for method in methods)
    return plain, tree


def _long(benchmark: Benchmark, case: Case, method: Method) -> tuple[Measurement, dict[str, int | None]]:
    memory: dict[str, int | None] = {}
    for each in (Method(PLAIN), method):
        benchmark.learn(case, each)  # an oracle's own plain generation is not counted
        with PeakMemory(benchmark.target.device) as peak:
            run = benchmark.run(case, each)
        memory[each.name] = peak.bytes
    return run.measurement, memory


def _case(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Case:
    """Greedy, without EOS: every repeat generates the same number of tokens."""
    target.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    encoded = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    return Case((Prompt("0", "phases", PROMPT),), *left_padded([encoded], 0), "greedy", seed=0)


if __name__ == "__main__":
    main()
