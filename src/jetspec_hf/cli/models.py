"""Target, head and tokenizer of a command, and what it asks of `generate`."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from ..command_line import check_model
from ..modeling_jetspec import JetSpecDraftHead


@dataclass(frozen=True)
class Models:
    """What a command generates with.

    Args:
        target (`PreTrainedModel`): The model to be sped up.
        head ([`JetSpecDraftHead`]): The draft head.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
    """

    target: Any
    head: JetSpecDraftHead
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(
        cls, head: str, target: str | None, dtype: str, device: str, tree_budget: str | None, chat: bool = False
    ) -> "Models":
        """Loads them.

        Args:
            head (`str`): Folder or Hub id.
            target (`str`, *optional*): Folder or Hub id; what the head was made for when missing.
            dtype (`str`): Of both.
            device (`str`): Of both; `"auto"` spreads them.
            tree_budget (`str`, *optional*): A number or `"auto"`; the head's own when missing.
            chat (`bool`, defaults to `False`): Whether a chat template is needed.

        Raises:
            ValueError: If no target is given and the head does not name one, if the target is a head itself, or if a
                chat template is needed and missing.
            OSError: If a model is not there.
        """
        only_show_progress_to_people()
        check_model(head, "`--head`")
        loaded = JetSpecDraftHead.from_pretrained(head, dtype=dtype, device_map=device)
        if tree_budget is not None:
            loaded.generation_config.tree_budget = int(tree_budget) if tree_budget.isdecimal() else tree_budget
        name = loaded.config.target_name_or_path if target is None else target
        if name is None:
            raise ValueError(f"`--target` must be given, got none: the head {head} does not name the one it is for.")
        named = f"`--target`, which is not given and which the head {head} names,"
        check_model(name, "`--target`" if target is not None else named, is_target=True)
        tokenizer = AutoTokenizer.from_pretrained(name)
        if chat and tokenizer.chat_template is None:
            raise ValueError(
                f"A chat needs a tokenizer with a chat template, got {name} without: use `jetspec generate`."
            )
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device).eval()
        return cls(target=model, head=loaded, tokenizer=tokenizer)

    def prompt_ids(self, prompt: str, chat_template: bool, thinking: bool | None) -> list[int]:
        """The token ids of a prompt.

        Args:
            prompt (`str`): What the user says.
            chat_template (`bool`): Whether it goes through the chat template, if the tokenizer has one.
            thinking (`bool`, *optional*): See [`render`].

        Raises:
            ValueError: If there is nothing to go on from.
        """
        if chat_template and self.tokenizer.chat_template is not None:
            ids = self.encode(self.render([{"role": "user", "content": prompt}], thinking))
        else:
            ids = list(self.tokenizer(prompt)["input_ids"])
        if not ids:
            raise ValueError("`PROMPT` must have a token at least, got none.")
        return ids

    def render(self, messages: list[dict[str, str]], thinking: bool | None) -> str:
        """The text after which the target answers.

        Args:
            messages (`list[dict]`): The conversation.
            thinking (`bool`, *optional*): The chat template's `enable_thinking`; its own default when missing.
        """
        options = {} if thinking is None else {"enable_thinking": thinking}
        tokenizer: Any = self.tokenizer  # the declared result depends on the arguments
        text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
        return text

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that has its special tokens in it.

        Args:
            text (`str`): A rendered conversation, or a part of it.
        """
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


@contextlib.contextmanager
def reading_text() -> Iterator[None]:
    """Says of which encoding standard input must be where it is of another."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"Standard input must be text in {error.encoding}, got other bytes.") from error


def only_show_progress_to_people() -> None:
    """Keeps transformers' progress bars, of loading for instance, out of files and pipes."""
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def generation_options(max_new_tokens: int, temperature: float | None, seed: int) -> dict[str, Any]:
    """Options of `generate`; the target's generation config stands for those not given.

    Args:
        max_new_tokens (`int`): Where an answer is cut.
        temperature (`float`, *optional*): 0 is greedy.
        seed (`int`): Of sampling, from here on.
    """
    set_seed(seed)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if temperature is not None:
        options["do_sample"] = temperature > 0
        if temperature > 0:
            options["temperature"] = temperature
    return options
