"""The commands together, and what a failure looks like: one line on stderr, and an exit code."""

import json
import sys
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from . import bench, chat, convert, doctor, generate, push, regenerate, train
from .forwarding import FORWARDED, UsageError
from .options import examples

# Packages that some commands need, and the extra that brings them.
EXTRAS = {"datasets": "train", "filelock": "train", "peft": "train", "matplotlib": "plots"}


class Commands(TyperGroup):
    """Ends with 0, with 1 after a failure, with 2 after a mistake on the command line, with 130 after Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command; what it raises becomes one line."""
        try:
            return super().invoke(ctx)
        except (UsageError, typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.params["traceback"]:
                raise
            typer.echo(f"error: {in_one_line(error)}", err=True)
            raise typer.Exit(1) from None

    def main(self, *args: Any, **options: Any) -> Any:
        """Runs the command line, and exits."""
        options["standalone_mode"] = False  # or typer would print errors its own way
        try:
            code = super().main(*args, **options)
        except UsageError as error:
            path = error.ctx.command_path if error.ctx else "jetspec"
            typer.echo(f"error: {in_one_line(error)} (see `{path} --help`)", err=True)
            code = error.exit_code
        except typer.Abort:
            code = 1
        sys.exit(code or 0)


def in_one_line(error: Exception) -> str:
    """What an error says, with its type where that says more, and with what to install where that is all it takes.

    Args:
        error (`Exception`): The error.
    """
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return f"this command needs `{error.name}`: pip install 'jetspec_hf[{EXTRAS[error.name]}]'"
    said = error.format_message() if isinstance(error, UsageError) else str(error)
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None and error.strerror:
        said = f"{error.filename}: {error.strerror}"
    message = " ".join(said.split())
    said_by_python = isinstance(error, json.JSONDecodeError | UnicodeError)  # of what, it does not say
    known = isinstance(error, (UsageError, ValueError, OSError, RuntimeError)) and message and not said_by_python
    return message if known else f"{type(error).__name__}: {message}"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jetspec_hf {installed_version('jetspec_hf')}")
        raise typer.Exit


def jetspec(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    """JetSpec speculative decoding: the same text in fewer forwards of the big model."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app = typer.Typer(cls=Commands, rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
app.callback(invoke_without_command=True, epilog=examples("jetspec generate --help"))(jetspec)
app.command("generate", epilog=examples(*generate.EXAMPLES))(generate.generate)
app.command("chat", epilog=examples(*chat.EXAMPLES))(chat.chat)
app.command("regenerate", context_settings=FORWARDED)(regenerate.regenerate)
app.command("train", context_settings=FORWARDED)(train.train)
app.command("bench", context_settings=FORWARDED)(bench.bench)
app.command("doctor", context_settings=FORWARDED)(doctor.doctor)
app.command("convert", epilog=examples(*convert.EXAMPLES))(convert.convert)
app.command("push", epilog=examples(*push.EXAMPLES))(push.push)
