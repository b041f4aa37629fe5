"""`jetspec generate`: one answer, streamed."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from . import options
from .answers import answer, summary
from .models import Models, generation_options, reading_text

EXAMPLES = (
    'jetspec generate "Why is the sky blue?" --head JetSpec/jetspec-qwen3-8b --target Qwen/Qwen3-8B',
    "jetspec generate --head HEAD --target TARGET --temperature 0 < prompt.txt > answer.txt",
)


def generate(
    head: options.Head,
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer (default: standard input).", show_default=False)
    ] = None,
    target: options.Target = None,
    max_new_tokens: options.MaxNewTokens = 512,
    temperature: options.Temperature = None,
    seed: options.Seed = 0,
    tree_budget: options.TreeBudget = None,
    chat_template: Annotated[
        bool, typer.Option("--chat-template/--no-chat-template", help="Whether to use one, where the tokenizer has it.")
    ] = True,
    thinking: options.Thinking = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Answer a prompt; text and figures tell what was drafted and what is the target's own.

    The text goes to standard output, in colours on a terminal. Acceptance length τ (tokens per forward of the target)
    and speed go to standard error.
    """
    if prompt is None:
        if sys.stdin.isatty():
            raise typer.BadParameter("give it, or pipe it in", param_hint="PROMPT")
        with reading_text():
            prompt = sys.stdin.read()
    if not prompt.strip():
        raise typer.BadParameter("must have text to go on from, got none", param_hint="PROMPT")
    models = Models.load(head, target, dtype, device, tree_budget)
    input_ids = models.prompt_ids(prompt, chat_template, thinking)
    given = answer(models, input_ids, None, Console(), **generation_options(max_new_tokens, temperature, seed))
    Console(stderr=True).print(summary([given]), soft_wrap=True)
