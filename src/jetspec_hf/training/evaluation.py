"""What a target accepts of a head's drafts: measured by real decoding beside the training loss, or simulated.

`python -m jetspec_hf.training.evaluation --help` tells how to get a table of a finished head's simulated acceptance.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging

from ..decoding.output import AcceptanceStats
from ..modeling_jetspec import JetSpecDraftHead
from .rows import rows_from_answers
from .simulation import Budget, bare_head, evaluating, pool_acceptance, simulate_budgets
from .target_reader import TargetReader

if TYPE_CHECKING:
    from .trainer import JetSpecTrainer

DEFAULT_BUDGETS: tuple[Budget, ...] = ("chain", 16, 64)


def measure_acceptance(
    head: nn.Module,
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    tree_budgets: Sequence[Budget] = DEFAULT_BUDGETS,
    *,
    tree_width: int = 16,
    draft_depth: int | None = None,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    progress: bool = True,
    **options: Any,
) -> dict[Budget, AcceptanceStats]:
    """What the target accepts in real decoding, at several tree budgets.

    Head and target stay in the modes they are in, and torch's random state stays as it is.

    Args:
        head (`JetSpecDraftHead`): The head, perhaps wrapped by PEFT, DDP or `torch.compile`.
        target (`PreTrainedModel`): The model it drafts for.
        prompts (`Sequence[Sequence[int]]`): Token ids of each prompt.
        tree_budgets (`Sequence`): Nodes verified besides the root, or `"chain"` for the single path of the most
            probable tokens.
        tree_width (`int`, defaults to 16): Children per node of a tree.
        draft_depth (`int`, *optional*): Longest path; the head's block size minus one when missing.
        max_new_tokens (`int`, defaults to 128): Most tokens to generate after each prompt.
        batch_size (`int`, defaults to 8): Prompts to generate at once.
        progress (`bool`, defaults to `True`): Whether to show a progress bar.
        options: Any other field of `GenerationConfig`; decoding is greedy unless they say otherwise.

    Returns:
        `dict`: By budget, the [`AcceptanceStats`] of all prompts, `accepted_lengths` in their order.
    """
    if not prompts or not all(prompts):
        raise ValueError(f"`prompts` must be token ids, got an empty one or none at all in {len(prompts)} prompts.")
    head = bare_head(head)
    batches = [
        _left_padded(prompts[start : start + batch_size], target) for start in range(0, len(prompts), batch_size)
    ]
    depth = head.config.draft_depth if draft_depth is None else draft_depth
    bar = logging.tqdm(total=len(prompts) * len(tree_budgets), desc="Decoding", unit="prompt", disable=not progress)
    found: dict[Budget, AcceptanceStats] = {}
    with evaluating(head), evaluating(target), _random_state_kept(head, target), bar:
        for budget in tree_budgets:
            nodes, width = (depth, 1) if budget == "chain" else (budget, tree_width)
            knobs = {"tree_budget": nodes, "tree_width": width, "draft_depth": depth}
            parts = []
            for batch in batches:
                config = GenerationConfig(**{"do_sample": False, "max_new_tokens": max_new_tokens, **options, **knobs})
                cast(Any, target).generate(**batch, assistant_model=head, generation_config=config)
                parts.append(head.last_acceptance)
                bar.update(len(batch["input_ids"]))
            found[budget] = pool_acceptance(parts)
    return found


def _left_padded(prompts: Sequence[Sequence[int]], target: PreTrainedModel) -> dict[str, torch.Tensor]:
    pad = getattr(target.generation_config, "pad_token_id", None) or 0
    width = max(map(len, prompts))
    token_ids = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor(token_ids, device=target.device),
        "attention_mask": torch.tensor(mask, device=target.device),
    }


@contextmanager
def _random_state_kept(*models: PreTrainedModel) -> Iterator[None]:
    devices = {model.device for model in models if model.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        yield


class AcceptanceCallback(TrainerCallback):
    """Generates with the head in training on held-out prompts, and logs what the target accepts next to the loss.

    After an evaluation the log and the evaluation's metrics (so that `metric_for_best_model="eval_tau_16"` works) have,
    for the chain and every tree budget, `eval_tau_16`, the tokens committed per target forward, and
    `eval_acceptance_16_depth_1`, ..., the share of the trees reaching a depth whose node there was accepted. With
    several evaluation datasets this follows the first one's. Training goes on as it would have without.

    The main process generates while others wait, with a head and a target that are whole in its memory.

    Args:
        trainer ([`JetSpecTrainer`]): The trainer, to which the callback has to be added.
        prompts (`Sequence`): Held-out prompts: token ids, or texts for the trainer's tokenizer, with the chat template
            already applied.
        tree_budgets (`Sequence`): Nodes verified besides the root, or `"chain"` for the single path of the most
            probable tokens.
        every (`int`, defaults to 1): Generates after the first of so many evaluations.
        options: Other arguments of [`measure_acceptance`], such as `max_new_tokens`.

    Example:
        ```python
        >>> trainer.add_callback(AcceptanceCallback(trainer, heldout_prompts, max_new_tokens=64))
        ```
    """

    def __init__(
        self,
        trainer: "JetSpecTrainer",
        prompts: Sequence[str | Sequence[int]],
        tree_budgets: Sequence[Budget] = DEFAULT_BUDGETS,
        every: int = 1,
        **options: Any,
    ) -> None:
        if every < 1:
            raise ValueError(f"`every` must be at least 1, got {every}: it counts evaluations.")
        self._trainer = trainer
        self._prompts = [self._token_ids(prompt) for prompt in prompts]
        self._tree_budgets = tree_budgets
        self._every = every
        self._options = options
        self._evaluations = 0

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        tokenizer = cast(Any, self._trainer.processing_class)
        if tokenizer is None:
            raise ValueError("`prompts` must be token ids, got texts for a trainer without a `processing_class`.")
        token_ids: list[int] = tokenizer(prompt)["input_ids"]
        return token_ids

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Generates, and adds what was accepted to the log and to `metrics`."""
        metrics = {} if metrics is None else metrics
        if not self._is_due(metrics):
            return
        logs = [self._measure(progress=not args.disable_tqdm) if state.is_world_process_zero else None]
        (found,) = broadcast_object_list(logs)  # every process has to choose the same best model
        metrics.update(found)
        self._trainer.log(dict(found))

    def _is_due(self, metrics: dict[str, float]) -> bool:
        datasets = self._trainer.eval_dataset
        if isinstance(datasets, dict) and not any(name.startswith(f"eval_{next(iter(datasets))}_") for name in metrics):
            return False
        self._evaluations += 1
        return (self._evaluations - 1) % self._every == 0

    def _measure(self, progress: bool) -> dict[str, float]:
        found = measure_acceptance(
            self._trainer.head,
            self._trainer.target,
            self._prompts,
            self._tree_budgets,
            **{"progress": progress, **self._options},
        )
        logs = {f"eval_tau_{budget}": stats.mean_acceptance_length for budget, stats in found.items()}
        for budget, stats in found.items():
            for depth, share in enumerate(stats.acceptance_by_depth, start=1):
                logs[f"eval_acceptance_{budget}_depth_{depth}"] = share
        return logs


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table of the acceptance that is simulated on answers of the target."""
    parser = argparse.ArgumentParser(
        prog="python -m jetspec_hf.training.evaluation",
        description="Simulates greedy decoding with a draft head on answers that its target wrote greedily.",
    )
    parser.add_argument("--target", required=True, help="folder or Hub id of the target")
    parser.add_argument("--head", required=True, help="folder or Hub id of the head")
    parser.add_argument("--rows", required=True, type=Path, help="answers of the target, as `regenerate` writes them")
    parser.add_argument("--heldout-ids", type=Path, help="file with the ids of the answers to take, one a line")
    parser.add_argument("--budgets", nargs="+", type=_budget, default=["chain", 16, 32, 64], help="chain, or nodes")
    parser.add_argument("--tree-width", type=int, default=16, help="children per node")
    parser.add_argument("--draft-depth", type=int, help="longest path; the head's block size minus one")
    parser.add_argument("--batch-size", type=int, default=8, help="answers at once")
    parser.add_argument("--dtype", default="auto", help="of target and head, for example float32; as saved")
    parser.add_argument("--device", default="cpu", help="of target and head")
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    rows = rows_from_answers(options.rows)
    if options.heldout_ids is not None:
        wanted = set(options.heldout_ids.read_text(encoding="utf-8").splitlines())
        rows = rows.filter(lambda name: str(name) in wanted, input_columns="id")
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype).to(options.device).eval()
    head = JetSpecDraftHead.from_pretrained(options.head, dtype=options.dtype).to(options.device)
    reader = TargetReader(target, head.config.target_layer_ids)
    found = simulate_budgets(
        head, reader, rows, options.budgets, options.tree_width, options.draft_depth, options.batch_size
    )
    sources = rows["source"] if "source" in rows.column_names else None
    print(acceptance_table(found, sources))


def _budget(text: str) -> Budget:
    return "chain" if text == "chain" else int(text)


def acceptance_table(found: dict[Budget, AcceptanceStats], sources: Sequence[str] | None = None) -> str:
    """A Markdown table of τ, tokens committed per target forward, for every budget.

    Args:
        found (`dict`): By budget, statistics of the same answers.
        sources (`Sequence[str]`, *optional*): Where each answer comes from; each source has a line of its own.
    """
    kept = [list(column) for column in zip(*(stats.accepted_lengths for stats in found.values()), strict=True)]
    groups = {"all": kept}
    for source, lengths in zip(sources or [], kept, strict=bool(sources)):
        groups.setdefault(source, []).append(lengths)
    lines = [["τ", "answers", *(f"{budget}" for budget in found)], ["---"] * (2 + len(found))]
    for name, answers in groups.items():
        columns = [AcceptanceStats(accepted_lengths=list(column)) for column in zip(*answers, strict=True)]
        lines.append([name, str(len(answers)), *(f"{column.mean_acceptance_length:.3f}" for column in columns)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
