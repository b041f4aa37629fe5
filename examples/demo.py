"""Plain generation and tree generation side by side on gemma-3-270m, streaming, on the CPU.

    make demo
    python examples/demo.py --tree-budget 32 --prompt "The capital of France is"

Prints, for each prompt, tokens per second of both, the acceptance length (tokens committed per target forward) and
whether both texts are identical; at the end, one token tree with its accepted path. The head is the small one in
`examples/heads/`; `--head` takes another.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import torch
from prepare_target import DEFAULT_FOLDER, prepare
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

from jetspec_hf import AcceptanceStats, JetSpecHead, TreePicture, draw_tree

HEAD = Path(__file__).parent / "heads" / "gemma-3-270m"
PROMPTS = (
    "Question: A farmer has 12 rows of 8 apple trees. Each tree bears 20 apples. How many apples are there?\nAnswer:",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
)


@dataclass(frozen=True)
class Timed:
    """One generation: its new tokens, its duration, and the acceptance statistics where a head drafted."""

    tokens: list[int]
    seconds: float
    acceptance: AcceptanceStats | None

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, prefill included."""
        return len(self.tokens) / self.seconds


def generate(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, max_new_tokens: int, **options: Any
) -> Timed:
    """Generates greedily, streaming the text to the terminal."""
    inputs = tokenizer(prompt, return_tensors="pt")
    start = time.perf_counter()
    output = target.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        streamer=TextStreamer(tokenizer),
        **options,
    )
    seconds = time.perf_counter() - start
    new_tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return Timed(new_tokens, seconds, getattr(output, "acceptance", None))


class LongerThan(StoppingCriteria):
    """Stops once a text has more than `length` tokens: unlike `max_new_tokens` it cuts no tree short."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs: Any) -> torch.BoolTensor:
        """Per row, whether it is to stop."""
        return torch.full((input_ids.shape[0],), input_ids.shape[1] > self.length, device=input_ids.device)


def picture_of_a_tree(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, head: JetSpecHead
) -> TreePicture:
    """A few steps into the text, the token tree of one step with its accepted path; 16 nodes, whatever they cost."""
    head.generation_config.tree_budget = 16
    inputs = tokenizer(prompt, return_tensors="pt")
    stop = StoppingCriteriaList([LongerThan(inputs["input_ids"].shape[1] + 3)])
    target.generate(**inputs, max_new_tokens=64, do_sample=False, stopping_criteria=stop, assistant_model=head)
    stats = head.last_acceptance
    return draw_tree(stats.last_tree, accepted=stats.last_path[0], tokenizer=tokenizer)


def physical_cores() -> int:
    """Physical cores this process may use: for one small model more threads than cores are slower."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return min(cores, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else cores


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--head", type=Path, default=HEAD, help="folder of a draft head (%(default)s)")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where targets are kept (%(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="in float32 the texts must be identical; in bfloat16 they may part where two logits tie (%(default)s)",
    )
    parser.add_argument("--threads", type=int, default=physical_cores(), help="torch threads (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="per prompt (%(default)s)")
    parser.add_argument(
        "--tree-budget",
        type=lambda text: text if text == "auto" else int(text),
        default="auto",
        help="tree nodes besides the root, or auto: what pays on this machine (%(default)s)",
    )
    parser.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the demonstration."""
    options = parse(arguments)
    folder = prepare("gemma-3-270m", options.folder.expanduser())
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype)).eval()
    head = JetSpecHead.from_pretrained(options.head, dtype=target.dtype)
    head.generation_config.tree_budget = options.tree_budget
    print(
        f"\ngemma-3-270m, {options.dtype}, {options.threads} threads, tree budget {options.tree_budget}, {options.head}"
    )
    for assistant in ({}, {"assistant_model": head}):  # first calls are slower
        target.generate(**tokenizer("Hello", return_tensors="pt"), max_new_tokens=2, do_sample=False, **assistant)

    prompts = options.prompt or PROMPTS
    identical = []
    for number, prompt in enumerate(prompts, start=1):
        print(f"\n=== prompt {number}: plain ===")
        plain = generate(target, tokenizer, prompt, options.max_new_tokens)
        print(f"\n=== prompt {number}: token tree ===")
        tree = generate(target, tokenizer, prompt, options.max_new_tokens, assistant_model=head)
        identical.append(plain.tokens == tree.tokens)
        print(
            f"\n--- plain {plain.tokens_per_second:.1f} tokens/s, tree {tree.tokens_per_second:.1f} tokens/s, "
            f"tau {tree.acceptance.mean_acceptance_length:.2f}, {mean(tree.acceptance.tree_sizes):.1f} nodes a step, "
            f"identical: {'yes' if identical[-1] else 'no'}"
        )

    print("\nOne token tree of the last prompt and its accepted path:\n")
    print(picture_of_a_tree(target, tokenizer, prompts[-1], head))
    print(f"\nidentical: {'yes' if all(identical) else 'no'} ({sum(identical)} of {len(identical)} prompts)")
    if not all(identical) and options.dtype == "float32":
        raise SystemExit(
            "error: in float32 tree generation must give the text of plain generation; please report this."
        )


if __name__ == "__main__":
    main()
