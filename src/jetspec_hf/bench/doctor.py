"""Whether a draft head is worth using with a target on this machine, and with how many nodes.

    python -m jetspec_hf.bench.doctor --target FOLDER --head FOLDER --dtype bfloat16 --threads 2

A handful of prompts is answered plainly, with trees of several sizes and with the automatic budget, all interleaved. A
step of each size costs so much and commits so many tokens: what that comes to is predicted from the two, and measured.
`--save` keeps the costs in the head's generation config: `tree_budget="auto"` then depends on the text alone.

On an accelerator, costs are from generations that wait for it at the end of every phase; speeds are not.
"""

import argparse
import importlib.util
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..command_line import at_least, existing_file
from ..decoding.drafter import DraftingKnobs
from ..decoding.step_costs import StepCosts
from ..modeling_jetspec import JetSpecDraftHead
from .machine import machine, machine_lines
from .markdown import format_table, milliseconds
from .measurement import Measurement
from .methods import AUTO, PLAIN, TREE, Method, tree_method
from .options import add_machine_options, check_options, command, ending_at_ctrl_c, load_models, tree_size, write_json
from .report import AUTO_TREE, summarise
from .runner import Benchmark, Case, Differences, Run
from .tasks import Prompt, encode, read_tasks

SIZES = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, and explain it in one sentence.",
    "A train leaves at 9:40 and arrives at 12:05. How many minutes does the journey take? Think step by step.",
    "Why is the sky blue? Answer in a short paragraph.",
    "Write a short letter to a neighbour who has looked after my cat.",
)
WEAK = 1.5  # tokens per target forward below which the drafts are to blame, not the machine
WORTH_IT = 1.05  # times as fast as plain decoding
_VERIFY = ("verify", "accept", "commit")


@dataclass(frozen=True)
class SizeDiagnosis:
    """What trees of one size cost and gain.

    Args:
        nodes (`int`): Nodes besides the root; 0 for steps of plain decoding.
        draft_seconds (`float`): Median of a step's draft.
        build_seconds (`float`): Median of building its tree.
        verify_seconds (`float`): Median of everything else: verify, accept and commit.
        mean_acceptance_length (`float`): τ on the prompts.
        predicted_speedup (`float`): τ times the cost of a plain step, divided by that of such a step.
        measured_speedup (`float`): Plain time per token, prefill left out, divided by that of these trees.
        identical (`int`): Prompts whose text is that of plain decoding.
    """

    nodes: int
    draft_seconds: float
    build_seconds: float
    verify_seconds: float
    mean_acceptance_length: float
    predicted_speedup: float
    measured_speedup: float
    identical: int

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.draft_seconds + self.build_seconds + self.verify_seconds


@dataclass(frozen=True)
class Diagnosis:
    """What was found out about a head with a target on a machine.

    Args:
        misfit (`str`, *optional*): Why the head does not fit the target; then nothing else is known.
        notes (`tuple[str, ...]`): What may be wrong, in sentences.
        prompts (`int`): How many were answered.
        sizes (`tuple[SizeDiagnosis, ...]`): By size, plain steps first; sizes that no tree of this head reaches are
            left out.
        auto_speedup (`float`, *optional*): As `SizeDiagnosis.measured_speedup`, for the automatic budget, which learns
            meanwhile.
        auto_nodes (`float`, *optional*): Mean size of its trees.
    """

    misfit: str | None = None
    notes: tuple[str, ...] = ()
    prompts: int = 0
    sizes: tuple[SizeDiagnosis, ...] = ()
    auto_speedup: float | None = None
    auto_nodes: float | None = None

    @property
    def step_costs(self) -> StepCosts:
        """The costs in the form that `generation_config.step_costs` holds.

        Raises:
            ValueError: If nothing was measured, since the head does not fit.
        """
        if not self.sizes:
            raise ValueError(f"`step_costs` need a head that fits the target, got one that does not: {self.misfit}")
        largest = self.sizes[-1]  # its drafts too: the automatic budget builds large trees before it cuts them down
        return StepCosts(
            largest.draft_seconds + largest.build_seconds, {size.nodes: size.verify_seconds for size in self.sizes}
        )

    @property
    def tree_budget(self) -> int:
        """The size of the highest predicted speed-up; 0 if none is faster than plain decoding."""
        best = self._best()
        return best.nodes if best is not None and best.predicted_speedup > 1 else 0

    def _best(self) -> SizeDiagnosis | None:
        trees = [size for size in self.sizes if size.nodes]
        return max(trees, key=lambda size: size.predicted_speedup) if trees else None

    @property
    def verdict(self) -> str:
        """Whether to use the head, in plain words."""
        best = self._best()
        if best is None:
            return f"Do not use this head with this target: {self.misfit}"
        steps = best.seconds / self.sizes[0].seconds
        gain = (
            f"a step of {best.nodes} {'nodes' if best.nodes > 1 else 'node'} takes as long as {steps:.2f} plain ones "
            f"and commits {best.mean_acceptance_length:.2f} tokens: {best.predicted_speedup:.2f} times as fast as "
            f"plain decoding by that, {best.measured_speedup:.2f} by the clock"
        )
        auto = f', {self.auto_speedup:.2f} with `tree_budget="auto"`' if self.auto_speedup is not None else ""
        if self.tree_budget == 0:
            accepted = max(size.mean_acceptance_length for size in self.sizes)
            why = "its drafts are hardly accepted" if accepted < WEAK else "verifying trees costs too much here"
            return f"Do not use this head here, {why}: at best {gain}{auto}."
        if max(best.measured_speedup, self.auto_speedup or 0.0) < WORTH_IT:
            return f"This head hardly pays here: {gain}{auto}."
        return f'Use this head, and leave `tree_budget` at "auto": {gain}{auto}.'

    def __str__(self) -> str:
        """Table, notes and verdict."""
        header = ("nodes", "draft, ms", "build, ms", "verify, ms", "plain steps", "τ", "predicted", "measured", "same")
        rows = [
            (
                str(size.nodes),
                *(milliseconds(value) for value in (size.draft_seconds, size.build_seconds, size.verify_seconds)),
                f"{size.seconds / self.sizes[0].seconds:.2f}",
                f"{size.mean_acceptance_length:.2f}",
                f"{size.predicted_speedup:.2f}",
                f"{size.measured_speedup:.2f}",
                f"{size.identical} of {self.prompts}",
            )
            for size in self.sizes
        ]
        table = [format_table(header, rows) + "\n"] if rows else []
        return "\n".join([*table, *(f"- {note}" for note in self.notes), self.verdict])

    def to_dict(self) -> dict[str, Any]:
        """Everything, for `json.dump` and for `plots.doctor_figure`."""
        costs = self.step_costs.to_dict() if self.sizes else None
        return {**asdict(self), "tree_budget": self.tree_budget, "step_costs": costs, "verdict": self.verdict}


def examine(
    target: PreTrainedModel,
    head: JetSpecDraftHead,
    tokenizer: PreTrainedTokenizerBase | None = None,
    prompts: Sequence[str | torch.Tensor] | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    max_new_tokens: int = 48,
    repeats: int = 1,
) -> Diagnosis:
    """Finds out whether a head is worth using, by greedy generations that are timed.

    Args:
        target (`PreTrainedModel`): The model to be sped up.
        head ([`JetSpecDraftHead`]): The draft head.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's, needed for prompts that are texts.
        prompts (`Sequence[str | torch.Tensor]`, *optional*): What the target is asked, as texts or as
            `torch.LongTensor` of shape `(1, length)`; a few built-in questions if missing. The more they resemble what
            the head is to be used for, the better.
        sizes (`Sequence[int]`): Numbers of nodes besides the root to try, at least 1 each.
        max_new_tokens (`int`, defaults to 48): Most tokens of an answer.
        repeats (`int`, defaults to 1): How often everything is generated.

    Returns:
        [`Diagnosis`]: Also of a head that does not fit.

    Raises:
        ValueError: If a size is below 1, a text has no tokenizer, or the target's answers are too short to be timed.
    """
    if not sizes or min(sizes) < 1:
        raise ValueError(f"`sizes` must be at least 1 each, one or more, got {list(sizes)}: plain steps are added.")
    cases = [_case(number, prompt, tokenizer) for number, prompt in enumerate(PROMPTS if prompts is None else prompts)]
    try:
        head.check_target(target)
    except ValueError as error:
        return Diagnosis(misfit=str(error))
    benchmark = Benchmark(target, head, max_new_tokens)
    with _without_step_costs(head):
        knobs = DraftingKnobs.resolve(head, target, GenerationConfig())
        budgets: list[int | str] = [0, *sorted(set(sizes)), AUTO]
        methods = [Method(PLAIN), *(tree_method(knobs, budget) for budget in budgets)]
        placed = [[case.to(target.device)] for case in cases]
        benchmark.usable(placed[0][0], methods)
        runs = list(benchmark.run_all(placed, methods, repeats))
    return diagnose(runs, benchmark.differences(runs, margins=False), _notes(target, head))


def diagnose(runs: Sequence[Run], differences: Differences, notes: tuple[str, ...] = ()) -> Diagnosis:
    """What timed generations come to.

    Args:
        runs (`Sequence[Run]`): Plain ones, and ones with trees of fixed sizes, 0 among them, and automatic ones, all of
            one task and decoding.
        differences (`dict`): As `Benchmark.differences` returns them.
        notes (`tuple[str, ...]`): To be passed on.

    Raises:
        ValueError: If there was no step to be timed.
    """
    by_method = {row.method: row for row in summarise(runs, differences)}
    names = [method.removeprefix(f"{TREE} ") for method in by_method]
    found: list[SizeDiagnosis] = []
    for nodes in sorted(int(name) for name in names if name.isdecimal()):
        row = by_method[f"{TREE} {nodes}"]
        seconds = _median_seconds([run.measurement for run in runs if run.method == row.method], nodes)
        if seconds is None or row.mean_acceptance_length is None or row.decoding_speedup is None:
            continue
        tau, step = row.mean_acceptance_length, sum(seconds)
        predicted = tau * (found[0].seconds if found else step) / step
        found.append(SizeDiagnosis(nodes, *seconds, tau, predicted, row.decoding_speedup, row.identical))
    if len(found) < 2:
        raise ValueError(
            "`prompts` must be answered with a few tokens each, so that steps can be timed, got answers that end at "
            "once: give other prompts, or a larger `max_new_tokens`."
        )
    auto = by_method.get(AUTO_TREE)
    return Diagnosis(
        notes=notes,
        prompts=by_method[PLAIN].prompts,
        sizes=tuple(found),
        auto_speedup=None if auto is None else auto.decoding_speedup,
        auto_nodes=None if auto is None else auto.tree_size,
    )


def _median_seconds(measured: Sequence[Measurement], nodes: int) -> tuple[float, float, float] | None:
    """Draft, build and the rest of the steps that verified so many nodes, `None` if none did."""
    steps = [
        step
        for measurement in measured
        for size, step in zip(measurement.tree_sizes, measurement.step_seconds, strict=False)
        if size == nodes
    ]
    if not steps:
        return None

    def median(*phases: str) -> float:
        return statistics.median(sum(step.get(phase, 0.0) for phase in phases) for step in steps)

    return median("draft"), median("build"), median(*_VERIFY)


def _case(number: int, prompt: str | torch.Tensor, tokenizer: PreTrainedTokenizerBase | None) -> Case:
    text = prompt if isinstance(prompt, str) else ""
    asked = Prompt(str(number), "prompts", text)
    if isinstance(prompt, torch.Tensor):
        input_ids = prompt
    elif tokenizer is not None:
        input_ids = encode(asked, tokenizer)
    else:
        raise ValueError(f"`tokenizer` must be given for prompts that are texts, got none for {text[:40]!r}.")
    return Case((asked,), input_ids, torch.ones_like(input_ids), "greedy", seed=0)


@contextmanager
def _without_step_costs(head: JetSpecDraftHead) -> Iterator[None]:
    """Hides a table that was saved before: it may be another machine's."""
    config = _config_of(head)
    saved = getattr(config, "step_costs", None)
    config.step_costs = None
    try:
        yield
    finally:
        config.step_costs = saved


def _config_of(head: JetSpecDraftHead) -> Any:
    return cast(Any, head).generation_config


def _notes(target: PreTrainedModel, head: JetSpecDraftHead) -> tuple[str, ...]:
    notes = []
    if head.dtype != target.dtype:
        notes.append(
            f"The head is in {head.dtype}, the target in {target.dtype}: one of the two is converted at each step."
        )
    flags = machine(target.device)["flags"]
    if (
        target.dtype == torch.bfloat16
        and target.device.type == "cpu"
        and not (flags["amx_bf16"] or flags["avx512_bf16"])
    ):
        notes.append(
            "This processor has no bfloat16 instructions, so a forward over several nodes takes many times as long as "
            "one over a single token: try --dtype float32."
        )
    return tuple(notes)


def save_step_costs(head: JetSpecDraftHead, costs: StepCosts, folder: Path) -> None:
    """Keeps the costs in the generation config beside a head's weights, whose other fields stay.

    Args:
        head ([`JetSpecDraftHead`]): The head as loaded from the folder.
        costs ([`StepCosts`]): As `Diagnosis.step_costs` has them, of this machine alone.
        folder (`Path`): The head's.
    """
    config = _config_of(head)
    config.step_costs = costs.to_dict()
    config.save_pretrained(folder)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Args:
        arguments (`Sequence[str]`, *optional*): Those of the process if not given.
    """
    parser = command("doctor", __doc__)
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the target")
    add("--head", type=Path, required=True, help="folder of the head")
    add(
        "--prompts",
        type=existing_file,
        nargs="+",
        help="JSONL files with `turns` or `prompt` in each line (default: built-in)",
    )
    add("--limit", type=at_least(1), default=4, help="takes the first prompts of each task only (%(default)s)")
    add("--sizes", type=tree_size, nargs="+", default=list(SIZES), help="nodes to try (1 2 4 8 16 32 64)")
    add("--max-new-tokens", type=at_least(4), default=48, help="most tokens of an answer (%(default)s)")
    add("--repeats", type=at_least(1), default=1, help="of everything (%(default)s)")
    add_machine_options(parser)
    add("--save", action="store_true", help="keep the costs in the head's generation_config.json")
    add("--plot", type=Path, metavar="FILE", help="picture of cost and gain; needs matplotlib")
    add("--json", type=Path, metavar="FILE", help="file to write everything to")
    parser.set_defaults(oracle=None)  # which `load_models` would let draft in the head's place
    options = parser.parse_args(arguments)
    check_options(parser, options, unique=("sizes",))
    if options.save and not options.head.is_dir():
        parser.error(f"--save needs a head in a folder, got {options.head}")
    if options.plot is not None and not options.plot.parent.is_dir():
        parser.error(f"--plot must lie in a folder that exists, got {options.plot}")
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'jetspec_hf[plots]'")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints.

    Args:
        arguments (`Sequence[str]`, *optional*): The command line; that of the process if not given.
    """
    options = parse(arguments)
    texts = None if options.prompts is None else [prompt.text for prompt in read_tasks(options.prompts, options.limit)]
    target, head, tokenizer = load_models(options)
    place = machine(options.device)
    print(
        f"{machine_lines(place)}\ntarget {options.target.name}, head {options.head.name}, {options.dtype}\n", flush=True
    )
    with ending_at_ctrl_c():
        diagnosis = examine(
            target,
            head,
            tokenizer,
            texts,
            sizes=options.sizes,
            max_new_tokens=options.max_new_tokens,
            repeats=options.repeats,
        )
    print(diagnosis)
    found: Mapping[str, Any] = {"machine": place, "dtype": options.dtype, **diagnosis.to_dict()}
    write_json(found, options.json)
    if not diagnosis.sizes:
        raise SystemExit(1)
    if options.save:
        save_step_costs(head, diagnosis.step_costs, options.head)
    if options.plot is not None:
        from ..plots import doctor_figure  # noqa: PLC0415  # matplotlib is optional

        doctor_figure(found).savefig(options.plot, dpi=150)


if __name__ == "__main__":
    main()
