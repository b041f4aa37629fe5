"""What the commands of this package have in common: their models, and where and in what dtype these run."""

import argparse
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from ..command_line import at_least, check_model, check_writable, existing_file, usable_device
from ..decoding.drafter import MOST_NODES
from ..modeling_jetspec import JetSpecDraftHead
from .oracle import OracleHead
from .tasks import batches, read_tasks

DTYPES = ("float32", "bfloat16", "float16")
INTERRUPTED = 130  # the exit code of a process that Ctrl-C ended


def command(module: str, documentation: str | None) -> argparse.ArgumentParser:
    """A parser with the first line of a module's documentation as its description.

    Args:
        module (`str`): Its name below this package, empty for the package itself.
        documentation (`str`, *optional*): Its documentation.
    """
    name = ".".join(filter(None, ("jetspec_hf.bench", module)))
    return argparse.ArgumentParser(prog=f"python -m {name}", description=(documentation or "").splitlines()[0])


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--dtype`, `--device` and `--threads`.

    Args:
        parser (`argparse.ArgumentParser`): The command.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of all models (%(default)s)")
    parser.add_argument("--device", type=usable_device, default=torch.device(device), help="(%(default)s)")
    parser.add_argument(
        "--threads", type=at_least(1), default=torch.get_num_threads(), help="torch threads (%(default)s)"
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--target`, and `--head`, `--untrained` and `--oracle`, which say what drafts.

    Args:
        parser (`argparse.ArgumentParser`): The command.
    """
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    heads = parser.add_mutually_exclusive_group(required=True)
    heads.add_argument("--head", type=Path, help="folder of the head")
    heads.add_argument(
        "--untrained", type=at_least(1), metavar="LAYERS", help="a fresh head of so many layers, right by chance only"
    )
    parser.add_argument("--block-size", type=at_least(2), default=8, help="of an untrained head (%(default)s)")
    parser.add_argument(
        "--oracle",
        type=_probability,
        metavar="P",
        help="let the head know the text and be right with this probability at each depth, at the cost of its forward",
    )


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--prompts` and `--limit`.

    Args:
        parser (`argparse.ArgumentParser`): The command.
    """
    parser.add_argument(
        "--prompts",
        type=existing_file,
        nargs="+",
        required=True,
        help="JSONL files with `turns` or `prompt` in each line, Spec-Bench's question.jsonl among them",
    )
    parser.add_argument("--limit", type=at_least(1), help="takes the first prompts of each task only (default: all)")


@contextmanager
def ending_at_ctrl_c() -> Iterator[None]:
    """Ends the process with 130 and without a traceback when it is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        print("\ninterrupted")
        raise SystemExit(INTERRUPTED) from None


def write_json(found: Mapping[str, Any], file: Path | None) -> None:
    """Writes what was found, so that the file is never half written.

    Args:
        found (`Mapping[str, Any]`): What JSON can hold.
        file (`Path`, *optional*): Where to; nothing is written without it.
    """
    if file is not None:
        partial = file.with_name(file.name + ".part")
        partial.write_text(json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
        partial.replace(file)


def load_models(options: argparse.Namespace) -> tuple[PreTrainedModel, JetSpecDraftHead, PreTrainedTokenizerBase]:
    """Loads target, head and tokenizer.

    Args:
        options (`argparse.Namespace`): The command line.

    Returns:
        `tuple`: In evaluation mode, in the dtype and on the device that were asked for. The target's generation config
        keeps EOS and padding alone: what else it recommends (penalties, top-k, ...) would be filled in below the
        decodings that are compared.
    """
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)  # of a fresh head's weights
    target = load_target(options.target, options)
    target.generation_config = GenerationConfig(**ending(target.generation_config))
    kind = JetSpecDraftHead if options.oracle is None else OracleHead
    if options.head is None:
        head = kind.from_target(target, num_hidden_layers=options.untrained, block_size=options.block_size)
    else:
        head = kind.from_pretrained(options.head, dtype=getattr(torch, options.dtype)).to(options.device).eval()
    return target, head, AutoTokenizer.from_pretrained(options.target)


def load_target(folder: Path, options: argparse.Namespace) -> Any:
    """Loads a language model as the command line says.

    Args:
        folder (`Path`): Where it is.
        options (`argparse.Namespace`): The command line.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype))
    return model.to(options.device).eval()


def head_name(options: argparse.Namespace) -> str:
    """What drafts, in words and without the machine's folders.

    Args:
        options (`argparse.Namespace`): The command line.
    """
    if options.head is not None:
        name = str(options.head.name)
    else:
        name = f"untrained, layers: {options.untrained}, block size {options.block_size}"
    return name if options.oracle is None else f"oracle at {options.oracle:g} ({name})"


def ending(config: GenerationConfig | None) -> dict[str, Any]:
    """EOS and padding; only the first EOS is asked for where padding is missing."""
    eos = getattr(config, "eos_token_id", None)
    pad = getattr(config, "pad_token_id", None)
    if pad is None:
        pad = 0 if eos is None else eos if isinstance(eos, int) else eos[0]
    return {"eos_token_id": eos, "pad_token_id": pad}


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must lie between 0 and 1, both left out, got {text!r}")
    return value


def tree_budget(text: str) -> int | str:
    """The type of an option that is a tree budget: a number of nodes, or `auto`."""
    return text if text == "auto" else _nodes(text, ' or "auto"')


def tree_size(text: str) -> int:
    """The type of an option that is a number of nodes."""
    return _nodes(text)


def _nodes(text: str, instead: str = "") -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_NODES:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to {MOST_NODES}{instead}, got {text!r}")
    return int(text)


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace, unique: Sequence[str] = ()) -> None:
    """Refuses models and prompts that are not there, values given twice, and places that cannot be written to.

    Args:
        parser (`argparse.ArgumentParser`): The command, which ends the process with a message.
        options (`argparse.Namespace`): The command line.
        unique (`Sequence[str]`): Options whose values must differ.
    """
    for name in unique:
        values = getattr(options, name)
        if len(set(values)) < len(values):
            parser.error(f"--{name.replace('_', '-')} must not repeat a value, got {' '.join(map(str, values))}")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json must lie in a folder that exists, got {options.json}")
    if options.json is not None:
        try:
            check_writable(options.json, "--json")
        except OSError as error:
            parser.error(str(error))
    plots = getattr(options, "plots", None)
    if plots is not None and plots.exists() and not plots.is_dir():
        parser.error(f"--plots must be a folder, got the file {plots}")
    if plots is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plots needs matplotlib: pip install 'jetspec_hf[plots]'")
    _check_inputs(parser, options)


def _check_inputs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    try:
        check_model(str(options.target), "--target", is_target=True)
        if options.head is not None:
            check_model(str(options.head), "--head")
        if getattr(options, "prompts", None) is not None:
            batches(read_tasks(options.prompts, options.limit), getattr(options, "batch_size", 1))
    except (OSError, ValueError) as error:
        parser.error(str(error))
