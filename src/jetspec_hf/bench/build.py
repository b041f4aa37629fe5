"""What building a token tree costs once the draft logits are there.

    python -m jetspec_hf.bench.build --tree-budget 256 --depth 15 --vocabulary 152000 --threads 2

Needs no model: the logits are random, of a normal distribution of standard deviation 3, which makes some tokens of each
depth likely and most of them not, as a head's are.
"""

import argparse
import time
from collections.abc import Sequence

import torch

from ..command_line import at_least
from ..tree import build_tree
from .machine import machine, machine_lines, wait_for
from .markdown import format_table, milliseconds
from .measurement import quartiles
from .options import add_machine_options, command

WARM_UP = 3
SPREAD = 3.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line.

    Args:
        arguments (`Sequence[str]`, *optional*): Those of the process if not given.
    """
    parser = command("build", __doc__)
    add_machine_options(parser)
    add = parser.add_argument
    add("--tree-budget", type=at_least(1), nargs="+", default=[16, 64, 256], help="(16 64 256)")
    add("--tree-width", type=at_least(1), default=16, help="(%(default)s)")
    add("--depth", type=at_least(1), default=15, help="(%(default)s)")
    add("--vocabulary", type=at_least(1), default=152_000, help="(%(default)s)")
    add("--batch-size", type=at_least(1), default=1, help="(%(default)s)")
    add("--repeats", type=at_least(1), default=50, help="(%(default)s)")
    return parser.parse_args(arguments)


def measure(logits: torch.Tensor, tree_budget: int, tree_width: int, repeats: int) -> list[float]:
    """Seconds of several builds of a tree of the same logits.

    Args:
        logits (`torch.Tensor` of shape `(batch, depth, vocabulary)`): The draft logits.
        tree_budget (`int`): Nodes besides the root.
        tree_width (`int`): Children per node.
        repeats (`int`): How many.
    """
    anchor_ids = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
    seconds = []
    for _ in range(WARM_UP + repeats):
        wait_for(logits.device)
        start = time.perf_counter()
        build_tree(anchor_ids, logits, tree_budget=tree_budget, tree_width=tree_width)
        wait_for(logits.device)
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints.

    Args:
        arguments (`Sequence[str]`, *optional*): The command line; that of the process if not given.
    """
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch_size, options.depth, options.vocabulary)
    logits = SPREAD * torch.randn(shape, generator=generator)
    logits = logits.to(options.device, getattr(torch, options.dtype))
    rows = []
    for budget in options.tree_budget:
        lower, middle, upper = quartiles(measure(logits, budget, options.tree_width, options.repeats))
        rows.append((str(budget), milliseconds(middle), f"{milliseconds(lower)}–{milliseconds(upper)}"))
    print(machine_lines(machine(options.device)))
    print(
        f"{options.dtype} logits, batch size {options.batch_size}, depth {options.depth}, vocabulary "
        f"{options.vocabulary}, width {options.tree_width}, repeats: {options.repeats}\n"
    )
    print(format_table(("nodes", "ms per build", "quartiles"), rows))


if __name__ == "__main__":
    main()
