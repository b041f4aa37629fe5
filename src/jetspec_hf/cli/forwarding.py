"""Commands whose options are defined once, in the library module that is also `python -m MODULE`.

Such a module has `parse(arguments)`, which reads them with argparse, and `main(arguments)`.
"""

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from typing import Any

import typer

from .options import examples

# Settings of a command that leaves all of its arguments, `--help` among them, to a module.
FORWARDED: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

# The class of a mistake on the command line; typer has no public name for it.
UsageError: Any = typer.BadParameter.__base__


def forward(context: typer.Context, module_name: str, commands: Sequence[str]) -> None:
    """Runs a module with the arguments of a command.

    Args:
        context (`typer.Context`): The command's.
        module_name (`str`): The module.
        commands (`Sequence[str]`): Examples, printed below the module's own help.

    Raises:
        UsageError: If the module does not take the arguments.
    """
    module = import_module(module_name)  # not before it is wanted: it may need an extra
    shown, refused = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(shown), redirect_stderr(refused):
            module.parse(context.args)
    except SystemExit as stop:
        if stop.code:
            raise UsageError(refused.getvalue().partition(": error: ")[2], ctx=context) from None
        typer.echo(_renamed(shown.getvalue(), context.command_path))
        typer.echo(examples(*commands).removeprefix("\b\n"))
        raise typer.Exit from None
    module.main(context.args)


def _renamed(help_text: str, command: str) -> str:
    """A module's help under the name of the command."""
    return re.sub(r"^usage: python -m \S+", f"Usage: {command}", help_text)
