"""Trains one head per recipe on equal data in equal steps, and prints what the target accepts of each as one table.

    python examples/compare_recipes.py examples/recipes/qwen2.5-coder-1.5b-instruct.json --target TARGET \
        --answers answers.jsonl --heldout_ids heldout_ids.txt --output_dir comparison
    ... --extra_variants '{"wide": {"intermediate_size": 6144}}'   # or a JSON file of them

A variant is a set of options of `train_head.py` that come on top of the recipe's: `dflash` (bidirectional blocks, hard
labels, weights that decay with the depth), `jetspec` (causal blocks, the target's own distribution), `jetspec+branch`,
and those you add. Each is evaluated with its own settings. `--output_dir` has the head of each, and `comparison.json`.
Called again, for instance after it was killed or with one variant more, it trains only what is not there yet.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jetspec_hf.training.recipe import TrainingRun, option_parser, read_options, train_head

DEFAULT_BRANCH_RANK = 256  # where the recipe has no branch term

Options = dict[str, Any]


@dataclass
class Comparison:
    """What is compared."""

    variants: list[str] = field(
        default_factory=lambda: ["dflash", "jetspec", "jetspec+branch"], metadata={"help": "Of the three known ones."}
    )
    extra_variants: str | None = field(
        default=None, metadata={"help": "Options by the name of the variant: JSON, or a JSON file."}
    )

    def overrides(self, recipe: Options) -> dict[str, Options]:
        """By name, the options of each variant that come on top of the recipe's."""
        jetspec = {"causal": True, "loss": "forward_kl", "depth_decay": None, "branch_rank": 0}
        known = {
            "dflash": {"causal": False, "loss": "hard_labels", "depth_decay": 4.0, "branch_rank": 0},
            "jetspec": jetspec,
            "jetspec+branch": {**jetspec, "branch_rank": recipe["branch_rank"] or DEFAULT_BRANCH_RANK},
        }
        if unknown := sorted(set(self.variants) - set(known)):
            raise ValueError(f"`variants` must be of {', '.join(known)}, got {', '.join(unknown)}.")
        extra = self.extra_variants or "{}"
        added = json.loads(Path(extra).read_text(encoding="utf-8") if extra.endswith(".json") else extra)
        return {**{name: known[name] for name in self.variants}, **added}


def check_fair(name: str, overrides: Options) -> None:
    """Checks that a variant has the data and the steps of the others.

    Raises:
        ValueError: If not, or if the variant has no folder of its own.
    """
    steps = {"max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps"}
    shared = {option.name for option in fields(TrainingRun)} | steps | {"max_length", "output_dir"}
    if unfair := sorted(shared & set(overrides)):
        raise ValueError(f"{', '.join(f'`{option}`' for option in unfair)} must be the same in all variants: {name}.")
    if not name or Path(name).name != name:
        raise ValueError(f"The name of a variant must be one of a folder, got {name!r}.")


def train_or_recall(options: Options) -> Options:
    """What `train_head` measured with these options, now or in an earlier call."""
    file = Path(options["output_dir"]) / "variant.json"
    options = json.loads(json.dumps(options, default=str))  # as read again later
    if file.is_file():
        kept: Options = json.loads(file.read_text(encoding="utf-8"))
        if kept["options"] == options:
            return kept
    measured = train_head(*option_parser().parse_dict(options))
    kept = {"options": options, **measured}
    file.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return kept


def compare(recipe: Options, variants: Mapping[str, Options]) -> dict[str, Options]:
    """By variant, its seconds of training and τ by tree budget."""
    folder = Path(recipe["output_dir"])
    measured = {}
    for name, overrides in variants.items():
        print(f"\n{name}: {overrides}", flush=True)
        measured[name] = train_or_recall({**recipe, **overrides, "output_dir": str(folder / name)})
    text = json.dumps(measured, indent=2) + "\n"
    (folder / "comparison.json").write_text(text, encoding="utf-8")
    return measured


def comparison_table(measured: Mapping[str, Options], budgets: Sequence[str]) -> str:
    """A Markdown table of held-out τ, tokens committed per target forward, and of the seconds of training."""
    lines = [["held-out τ", *budgets, "seconds of training"], ["---"] * (len(budgets) + 2)]
    for how in ("simulated", "decoded"):
        for name, found in measured.items():
            if how in found:
                shown = name if how == "simulated" else f"{name}, decoded"
                lengths = [f"{found[how][budget]:.2f}" for budget in budgets]
                lines.append([shown, *lengths, f"{found['training_seconds']:.0f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the options, as `train_head.py` does, trains all variants and prints the table."""
    parser = option_parser(Comparison, description=(__doc__ or "").splitlines()[0])
    recipe = read_options(parser, sys.argv[1:] if arguments is None else arguments)
    comparison = Comparison(**{option.name: recipe.pop(option.name) for option in fields(Comparison)})
    variants = comparison.overrides(recipe)
    for name, overrides in variants.items():
        check_fair(name, overrides)
        option_parser().parse_dict({**recipe, **overrides})  # before hours of training
    measured = compare(recipe, variants)
    print("\n" + comparison_table(measured, recipe["budgets"]))


if __name__ == "__main__":
    main()
