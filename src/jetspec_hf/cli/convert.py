"""`jetspec convert`: a head in the checkpoint format of another engine, and how to serve it there."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from transformers import AutoModelForCausalLM

from ..command_line import check_model
from ..hub import FORMATS, read_checkpoint, serve_command, write_checkpoint
from ..hub.serving import ENGINES
from .models import only_show_progress_to_people

EXAMPLES = (
    "jetspec convert my_head for_vllm --to published --target Qwen/Qwen3-8B",
    "jetspec convert some/speculators-head my_head --to jetspec",
)


def _known(name: str | None) -> str | None:
    if name is not None and name not in FORMATS:
        raise typer.BadParameter(f"must be one of {', '.join(FORMATS)}, got {name!r}.")
    return name


def convert(
    head: Annotated[str, typer.Argument(help="Folder or Hub id of the draft head.", show_default=False)],
    folder: Annotated[Path, typer.Argument(help="Where to; it must hold no head yet.", show_default=False)],
    to: Annotated[
        str, typer.Option("--to", callback=_known, help=f"Format to write: {', '.join(FORMATS)}.", show_default=False)
    ],
    source: Annotated[
        str | None, typer.Option("--from", callback=_known, help="Format to read (default: found out).")
    ] = None,
    target: Annotated[str | None, typer.Option("--target", help="Folder or Hub id of the target, to record.")] = None,
    load_target: Annotated[
        bool, typer.Option("--load-target", help="Load it, too; the speculators format may ask for that.")
    ] = False,
    head_type: Annotated[
        Literal["jetspec", "dflash"] | None,
        typer.Option("--head-type", help="Causal or bidirectional blocks, where the keys contradict each other."),
    ] = None,
) -> None:
    """Write a head in another checkpoint format, and print the commands that serve it, if an engine reads it.

    What the format or its engines cannot say of the head is told on standard error.
    """
    only_show_progress_to_people()
    check_model(head, "HEAD")
    loaded = None
    if load_target:
        if target is None:
            raise typer.BadParameter("needs `--target`", param_hint="--load-target")
        check_model(target, "`--target`", is_target=True)
        loaded = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    read = read_checkpoint(head, source, target=loaded, head_type=head_type)
    for warning in write_checkpoint(read, folder, to, target=loaded, target_name_or_path=target):
        typer.echo(f"warning: {warning}", err=True)
    engines = [engine for engine, formats in ENGINES.items() if to in formats]
    for engine in engines:
        typer.echo(serve_command(folder, engine, target or read.config.target_name_or_path or "TARGET"))
    if not engines:
        typer.echo(f"The head is in {folder}, in the {to} format.")
