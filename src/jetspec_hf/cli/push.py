"""`jetspec push`: a head goes to the Hub with its card and its code."""

from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import constants
from transformers import AutoTokenizer

from ..command_line import check_model
from ..hub import push_head
from ..modeling_jetspec import JetSpecDraftHead
from .models import only_show_progress_to_people

EXAMPLES = (
    "jetspec push my_head user/my_head --license apache-2.0",
    "jetspec push my_head user/my_head --private --tokenizer TARGET --results speed.json",
)


def push(
    head: Annotated[str, typer.Argument(help="Folder of the draft head.", show_default=False)],
    repo_id: Annotated[str, typer.Argument(help="Where to; made if it does not exist.", show_default=False)],
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Folder or Hub id of the target, whose tokenizer goes along.")
    ] = None,
    results: Annotated[
        list[Path] | None, typer.Option("--results", help="What `jetspec bench --json` wrote; for the card.")
    ] = None,
    licence: Annotated[str | None, typer.Option("--license", help="The Hub's name of the head's licence.")] = None,
    private: Annotated[bool | None, typer.Option("--private/--public", help="Of a repository that is made.")] = None,
    message: Annotated[str, typer.Option("--message", help="Of the commit.")] = "Upload draft head",
) -> None:
    """Push a head to the Hub in one commit: weights, knobs, model card, and code for those without this library.

    A card that is there is brought up to date, not replaced. Who you are: `hf auth login`.
    """
    only_show_progress_to_people()
    check_model(head, "HEAD")
    if tokenizer is not None:
        check_model(tokenizer, "`--tokenizer`")
    loaded = JetSpecDraftHead.from_pretrained(head, dtype="auto")
    tokens = None if tokenizer is None else AutoTokenizer.from_pretrained(tokenizer)
    try:
        commit = push_head(
            loaded,
            repo_id,
            tokenizer=tokens,
            results=results or (),
            license=licence,
            private=private,
            commit_message=message,
        )
    except ValueError:  # of the head or its card, not of the way there
        raise
    except Exception as error:  # which HTTP library it is from depends on the version of huggingface_hub
        raise OSError(f"{repo_id} could not be pushed to {constants.ENDPOINT}: {error}") from error
    typer.echo(commit)
