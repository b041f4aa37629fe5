"""The command line `jetspec`, each command a thin file over the library; needs the extra `cli`."""

import sys


def main() -> None:
    """Runs the command line of the process."""
    try:
        from .app import app  # noqa: PLC0415  (typer and rich are optional)
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"error: the `jetspec` command needs `{error.name}`: pip install 'jetspec_hf[cli]'")
    app(prog_name="jetspec")
