"""How often half precision changes a text: trees beside plain decoding, and plain decoding beside itself.

    python -m jetspec_hf.bench.numerics --target FOLDER --head FOLDER --prompts gsm8k.jsonl --json out.json

A forward over another number of tokens or rows adds up in another order, so logits differ in their last bits, and two
tokens whose logits lie within rounding of each other may swap. That happens to trees, and to plain decoding as soon as
the shape of its batch changes. Each prompt is continued greedily by plain decoding, alone and in one piece; then in
other shapes by plain decoding, and by trees. What counts is where a text first leaves the plain one, and by how much
plain decoding preferred its own token there.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from ..command_line import at_least
from ..decoding.drafter import DraftingKnobs
from .machine import machine, machine_lines
from .markdown import format_table
from .methods import PLAIN, Method, tree_method
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
    tree_budget,
    write_json,
)
from .runner import Benchmark, Case, first_difference, margin
from .tasks import Prompt, encode, left_padded, read_tasks

NEIGHBOURS = 3
CHUNK = 16
NOTES = (
    "Departed: texts that leave that of plain decoding. Per 1,000: departures per 1,000 tokens written up to them. "
    "Margin: by how much plain decoding preferred its own token where a text departs; in steps of the dtype: divided "
    "by the distance of neighbouring numbers at the size of that logit."
)
Variant = Callable[[int], tuple[Case, Method, dict[str, Any]]]


@dataclass(frozen=True)
class Text:
    """A text beside the plain one.

    Args:
        variant (`str`): How it was generated.
        task (`str`): The prompt's task.
        id (`str`): The prompt.
        compared (`int`): Tokens written up to the departure, the departing one included, or all of them.
        position (`int`, *optional*): The first new token that differs, from 0; `None` if none does.
        margin (`float`, *optional*): Plain decoding's logit of its own token less that of the other one.
        margin_steps (`float`, *optional*): The margin divided by the distance of neighbouring numbers of the dtype.
    """

    variant: str
    task: str
    id: str
    compared: int
    position: int | None = None
    margin: float | None = None
    margin_steps: float | None = None


@dataclass(frozen=True)
class Row:
    """What becomes of all texts of a variant.

    Args:
        variant (`str`): How they were generated.
        texts (`int`): How many.
        departed (`int`): Those that are not plain decoding's.
        per_thousand (`float`): Departures per 1,000 tokens written up to them.
        position (`float`, *optional*): Median token at which they depart.
        margins (`tuple[float, float]`, *optional*): Median and largest margin.
        margin_steps (`tuple[float, float]`, *optional*): The same in steps of the dtype.
    """

    variant: str
    texts: int
    departed: int
    per_thousand: float
    position: float | None
    margins: tuple[float, float] | None
    margin_steps: tuple[float, float] | None


def spacing(value: float, dtype: torch.dtype) -> float:
    """Distance of a number to the next larger one of a dtype, subnormal numbers left out.

    Args:
        value (`float`): The number.
        dtype (`torch.dtype`): A floating dtype.
    """
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(torch.tensor(max(abs(value), info.tiny), dtype=torch.float64))
    return float(info.eps * 2.0 ** (int(exponent) - 1))


def summarise(texts: Sequence[Text]) -> list[Row]:
    """A row for each variant, in order.

    Args:
        texts (`Sequence[Text]`): Of all prompts.
    """
    rows = []
    for variant in dict.fromkeys(text.variant for text in texts):
        of_variant = [text for text in texts if text.variant == variant]
        positions = [text.position for text in of_variant if text.position is not None]
        margins = [text.margin for text in of_variant if text.margin is not None]
        steps = [text.margin_steps for text in of_variant if text.margin_steps is not None]
        rows.append(
            Row(
                variant,
                texts=len(of_variant),
                departed=len(positions),
                per_thousand=1000 * len(positions) / sum(text.compared for text in of_variant),
                position=statistics.median(positions) if positions else None,
                margins=(statistics.median(margins), max(margins)) if margins else None,
                margin_steps=(statistics.median(steps), max(steps)) if steps else None,
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """A Markdown table.

    Args:
        rows (`Sequence[Row]`): As `summarise` returns them.
    """
    header = ("", "departed", "per 1,000", "at token", "margin, median", "largest", "in steps, median", "largest")
    return format_table(header, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    pairs = [
        ("-", "-") if pair is None else tuple(f"{x:.3g}" for x in pair) for pair in (row.margins, row.margin_steps)
    ]
    position = "-" if row.position is None else f"{row.position:g}"
    cells = [row.variant, f"{row.departed} of {row.texts}", f"{row.per_thousand:.2f}", position]
    return [*cells, *pairs[0], *pairs[1]]


def variants(
    prompts: Sequence[tuple[Prompt, torch.Tensor]], trees: Sequence[Method], pad_token_id: int
) -> dict[str, Variant]:
    """What is compared with plain decoding, each a function from a prompt's number to what generates its text.

    Args:
        prompts (`Sequence[tuple[Prompt, torch.LongTensor]]`): All prompts and their token ids.
        trees (`Sequence[Method]`): Our methods.
        pad_token_id (`int`): What stands on the left of shorter prompts.
    """

    def batch(*numbers: int, extra: int = 0) -> Case:
        rows = [prompts[number % len(prompts)] for number in numbers]
        ids, mask = left_padded([input_ids for _, input_ids in rows], pad_token_id)
        ids = torch.nn.functional.pad(ids, (extra, 0), value=pad_token_id)
        mask = torch.nn.functional.pad(mask, (extra, 0))
        return Case(tuple(prompt for prompt, _ in rows), ids, mask, "greedy", seed=0)

    def plain(make: Callable[[int], Case], **options: Any) -> Variant:
        return lambda number: (make(number), Method(PLAIN), options)

    def tree(method: Method) -> Variant:
        return lambda number: (batch(number), method, {})

    return {
        "plain, again": plain(batch),
        "plain, twice in a batch": plain(lambda number: batch(number, number)),
        f"plain, with {NEIGHBOURS} others, left-padded": plain(
            lambda number: batch(*range(number, number + NEIGHBOURS + 1), extra=1)
        ),
        f"plain, prompt in chunks of {CHUNK}": plain(batch, prefill_chunk_size=CHUNK),
        **{method.name: tree(method) for method in trees},
    }


def compare(
    benchmark: Benchmark, prompts: Sequence[tuple[Prompt, torch.Tensor]], compared: dict[str, Variant]
) -> list[Text]:
    """Generates every prompt in every variant.

    Args:
        benchmark (`Benchmark`): Target and head.
        prompts (`Sequence[tuple[Prompt, torch.LongTensor]]`): All prompts and their token ids.
        compared (`dict[str, Variant]`): As `variants` returns them.

    Returns:
        `list[Text]`: Prompt by prompt; if interrupted, of those that are finished.
    """
    found: list[Text] = []
    device = benchmark.target.device
    try:
        with logging.tqdm(total=len(prompts) * len(compared), desc="Comparing", unit="text") as bar:
            for number, (prompt, input_ids) in enumerate(prompts):
                alone = Case((prompt,), input_ids, torch.ones_like(input_ids), "greedy", seed=0).to(device)
                plain = benchmark.generate(alone, Method(PLAIN), output_scores=True, return_dict_in_generate=True)
                reference, logits = benchmark.texts(alone, plain.sequences)[0], [step[0] for step in plain.scores]
                of_prompt = []
                for name, variant in compared.items():
                    case, method, options = variant(number)
                    case = case.to(device)
                    benchmark.learn(case, method)
                    text = benchmark.texts(case, benchmark.generate(case, method, **options))[0]
                    of_prompt.append(_beside(name, prompt, reference, logits, text, benchmark.target.dtype))
                    bar.update()
                found += of_prompt
    except KeyboardInterrupt:
        print("\ninterrupted: what follows is of the prompts that are finished")
    return found


def _beside(
    variant: str,
    prompt: Prompt,
    plain: Sequence[int],
    logits: Sequence[torch.Tensor],
    text: Sequence[int],
    dtype: torch.dtype,
) -> Text:
    position = first_difference(plain, text)
    if position is None:
        return Text(variant, prompt.task, prompt.id, compared=len(plain))
    gap, steps = margin(logits, position, plain, text), None
    if gap is not None:
        steps = gap / spacing(float(logits[position][plain[position]]), dtype)
    return Text(variant, prompt.task, prompt.id, position + 1, position, gap, steps)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Args:
        arguments (`Sequence[str]`, *optional*): Those of the process if not given.
    """
    parser = command("numerics", __doc__)
    add_model_options(parser)
    add_prompt_options(parser)
    add_machine_options(parser)
    add = parser.add_argument
    add("--max-new-tokens", type=at_least(2), default=96, help="most tokens of an answer (%(default)s)")
    add("--tree-budget", type=tree_budget, nargs="+", default=[8, 64], help='nodes besides the root, or "auto" (8 64)')
    add("--json", type=Path, help="file to write everything to")
    options = parser.parse_args(arguments)
    check_options(parser, options, unique=("tree_budget",))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints.

    Args:
        arguments (`Sequence[str]`, *optional*): The command line; that of the process if not given.
    """
    options = parse(arguments)
    asked = read_tasks(options.prompts, options.limit)
    target, head, tokenizer = load_models(options)
    prompts = [(prompt, encode(prompt, tokenizer)) for prompt in asked]
    knobs = DraftingKnobs.resolve(head, target, GenerationConfig())
    trees = [tree_method(knobs, budget) for budget in options.tree_budget]
    place = machine(options.device)
    print(machine_lines(place))
    print(
        f"target {options.target.name}, head {head_name(options)}, {options.dtype}, greedy, prompts: {len(prompts)}, "
        f"at most {options.max_new_tokens} new tokens; trees at most {knobs.tree_width} wide and {knobs.draft_depth} "
        "deep\n",
        flush=True,
    )
    benchmark = Benchmark(target, head, options.max_new_tokens, options.oracle)
    compared = variants(prompts, trees, ending(target.generation_config)["pad_token_id"])
    texts = compare(benchmark, prompts, compared)
    if not texts:
        print("nothing was measured")
        raise SystemExit(INTERRUPTED)
    rows = summarise(texts)
    print(f"{table(rows)}\n\n{NOTES}")
    if options.json is not None:
        settings = {
            "target": options.target.name,
            "head": head_name(options),
            "prompts": [path.name for path in options.prompts],
            "complete": len(texts) == len(prompts) * len(compared),
            **{name: getattr(options, name) for name in ("limit", "dtype", "max_new_tokens", "tree_budget")},
        }
        found = {
            "machine": place,
            "settings": settings,
            "summary": [asdict(row) for row in rows],
            "texts": [asdict(text) for text in texts],
        }
        write_json(found, options.json)
    if len(texts) < len(prompts) * len(compared):
        raise SystemExit(INTERRUPTED)


if __name__ == "__main__":
    main()
