"""Rows for training a draft head: token ids, and which of them the target wrote.

A row has `input_ids` and `loss_mask` (1 = the target wrote this token, so it is to be predicted), and `document_ids` if
it holds several documents (0, 1, 2, ..., -1 = padding). Rows that are already token ids need nothing from here: any
`datasets.Dataset` with these columns trains.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .answers import read_answers

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.get_logger(__name__)

Row = dict[str, Any]
COLUMNS = {"input_ids": "int32", "loss_mask": "int8", "document_ids": "int32"}
# As transformers recognises a template that marks what the assistant says.
GENERATION_TAG = re.compile(r"\{\%-?\s*generation\s*-?\%\}")


def rows_from_answers(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]], max_length: int | None = None
) -> "Dataset":
    """Rows of what a target answered, in which all of the answer, its EOS included, is to be predicted.

    Args:
        source (`str`, `os.PathLike` or iterable of `dict`): What `regenerate` wrote, all shards of it, or dicts with
            `prompt_ids` and `response_ids`.
        max_length (`int`, *optional*): Where rows are cut. Rows without an answer left are dropped.

    Returns:
        `datasets.Dataset`: Columns `input_ids` and `loss_mask`; `id` and `source` if every answer has them.

    Raises:
        ValueError: If there is no row, or an answer cannot be read.
    """
    answers = read_answers(source) if isinstance(source, str | os.PathLike) else source
    return _dataset((_row_of_answer(answer) for answer in answers), max_length, kept=("id", "source"))


def rows_from_messages(
    conversations: Iterable[Any],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    *,
    row_per_turn: bool = False,
    eos_token_ids: Sequence[int] | None = None,
    **template_kwargs: Any,
) -> "Dataset":
    """Rows of conversations in which the target has the role `assistant`.

    What it said is known from the `{% generation %}` tags of the chat template; without them, from the difference
    between the conversation with and without an answer. The EOS after an answer is to be predicted too, what a template
    puts after the EOS is not.

    Args:
        conversations (iterable): Lists of messages, or dicts with such a list as `messages`, as a `datasets.Dataset`
            has them.
        tokenizer (`PreTrainedTokenizerBase`): The target's, a fast one with a chat template.
        max_length (`int`, *optional*): Where rows are cut. Rows without an answer left are dropped.
        row_per_turn (`bool`, *optional*, defaults to `False`): Makes a row of the conversation up to each answer, in
            which only this answer is to be predicted. Needed where a template changes earlier answers, for example
            drops their reasoning.
        eos_token_ids (`Sequence[int]`, *optional*): What ends an answer, for example the target's
            `generation_config.eos_token_id`; the tokenizer's EOS when not given.
        template_kwargs (*optional*): Variables of the template, for example `enable_thinking`.

    Returns:
        `datasets.Dataset`: Columns `input_ids` and `loss_mask`.

    Raises:
        ValueError: If the tokenizer is not as described, if a conversation up to an answer is not how the whole one
            begins, or if there is no row.
    """
    if tokenizer.chat_template is None or not tokenizer.is_fast:
        raise ValueError(
            "`tokenizer` must be a fast tokenizer with a chat template, got "
            f"{'no chat template' if tokenizer.chat_template is None else 'a slow one'}."
        )
    if eos_token_ids is None:
        eos_token_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    reader = _ConversationReader(tokenizer, frozenset(eos_token_ids), template_kwargs)
    rows = (
        row
        for conversation in conversations
        for row in reader.rows(
            conversation["messages"] if isinstance(conversation, Mapping) else conversation, row_per_turn
        )
    )
    return _dataset(rows, max_length)


def pack_rows(rows: Iterable[Mapping[str, Any]], length: int) -> "Dataset":
    """Puts several rows, now called documents, into one, first-fit with the longest first.

    A document is never split; one that is longer than `length` is cut there, and dropped if no answer is left of it.

    Args:
        rows (iterable of `dict`): Rows with `input_ids` and `loss_mask`, for example a `datasets.Dataset`.
        length (`int`): Tokens that a row holds at most.

    Returns:
        `datasets.Dataset`: Columns `input_ids`, `loss_mask` and `document_ids`; no row is padded.

    Raises:
        ValueError: If `length` is not positive, if a row is packed already, or if there is no row.
    """
    if length < 1:
        raise ValueError(f"`length` must be at least 1, got {length}.")
    documents = []
    for number, row in enumerate(rows):
        if row.get("document_ids") is not None:
            raise ValueError(f"`rows` must not be packed yet, got `document_ids` in row {number}.")
        documents.append(_cut(row, length))
    kept = _supervised_only(documents)
    packs = first_fit([len(document["input_ids"]) for document in kept], length)
    return _dataset(_join([kept[index] for index in pack]) for pack in packs)


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Puts each item, the largest first, into the first bin that has room for it.

    Args:
        sizes (`Sequence[int]`): Sizes of the items, none above `capacity`.
        capacity (`int`): What a bin holds.

    Returns:
        `list[list[int]]`: The items of each bin, in the order in which they were put there.
    """
    bins: list[list[int]] = [[] for _ in sizes]
    # A full binary tree over the bins, its root at 1: each node knows the most room of the bins below it, so that the
    # first bin with enough is found in logarithmic time.
    leaves = 1 << max(0, len(sizes) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < sizes[item])
        bins[node - leaves].append(item)
        room[node] -= sizes[item]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [items for items in bins if items]


@dataclass
class RowCollator:
    """Makes a padded batch of rows, for the `data_collator` of a trainer.

    Args:
        pad_token_id (`int`): What fills `input_ids`.
        padding_side (`str`, *optional*, defaults to `"right"`): `"right"` or `"left"`.
    """

    pad_token_id: int
    padding_side: str = "right"

    def __post_init__(self) -> None:
        if self.padding_side not in ("right", "left"):
            raise ValueError(f"`padding_side` must be 'right' or 'left', got {self.padding_side!r}.")

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Makes a batch.

        Args:
            rows (`Sequence[Mapping]`): Rows; other columns than those below are left out.

        Returns:
            `dict[str, torch.Tensor]`: `input_ids` (`torch.LongTensor`), `loss_mask` (`torch.BoolTensor`) and
            `document_ids` (`torch.LongTensor`: 0, 1, 2, ..., -1 = padding), all of shape `(batch, length)`.

        Raises:
            ValueError: If the columns of a row differ in length.
        """
        for row in rows:
            _check_lengths(row, COLUMNS)
        return {
            "input_ids": self._pad([row["input_ids"] for row in rows], self.pad_token_id),
            "loss_mask": self._pad([row["loss_mask"] for row in rows], 0).bool(),
            "document_ids": self._pad([_document_ids(row) for row in rows], -1),
        }

    def _pad(self, columns: Sequence[Any], filler: int) -> torch.Tensor:
        width = max(map(len, columns))
        padded = torch.full((len(columns), width), filler, dtype=torch.long)
        for into, values in zip(padded, columns, strict=True):
            start = 0 if self.padding_side == "right" else width - len(values)
            into[start : start + len(values)] = torch.as_tensor(values)
        return padded


@dataclass(frozen=True)
class _ConversationReader:
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: frozenset[int]
    template_kwargs: Mapping[str, Any]

    def rows(self, messages: Sequence[Mapping[str, Any]], row_per_turn: bool) -> Iterator[Row]:
        """The row of a conversation, or the rows of its answers."""
        messages = list(messages)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if row_per_turn:
            for index in answers:
                yield self._row_by_differences(messages[: index + 1], [index])
        elif GENERATION_TAG.search(self._template()):
            yield self._row_by_tags(messages)
        else:
            yield self._row_by_differences(messages, answers)

    def _template(self) -> str:
        kwargs = self.template_kwargs
        template: str = self.tokenizer.get_chat_template(kwargs.get("chat_template"), kwargs.get("tools"))
        return template

    def _row_by_tags(self, messages: Sequence[Mapping[str, Any]]) -> Row:
        tokenizer: Any = self.tokenizer  # the declared result depends on the arguments
        encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, **self.template_kwargs)
        ids, tagged = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        mask, ended = [], False
        for index, token in enumerate(ids):
            # A template may close the tag before the EOS, or after what follows it.
            is_eos = token in self.eos_token_ids and any(tagged[max(0, index - 1) : index + 1])
            mask.append(int((is_eos or tagged[index]) and not ended))
            ended = is_eos or (ended and bool(tagged[index]))
        return {"input_ids": ids, "loss_mask": mask}

    def _row_by_differences(self, messages: Sequence[Mapping[str, Any]], answers: Sequence[int]) -> Row:
        text = self._render(messages)
        spans = [self._span(messages, index, text) for index in answers]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        mask = [0] * len(ids)
        for start, end in spans:
            for index, (token_start, token_end) in enumerate(encoded["offset_mapping"]):
                if token_start < end and token_end > start:
                    mask[index] = 1
                    if ids[index] in self.eos_token_ids:
                        break
        return {"input_ids": ids, "loss_mask": mask}

    def _span(self, messages: Sequence[Mapping[str, Any]], index: int, text: str) -> tuple[int, int]:
        """Where an answer stands in the text of the conversation."""
        before = self._render(messages[:index], add_generation_prompt=True)
        through = self._render(messages[: index + 1])
        for part, name in ((before, "before"), (through, "through")):
            if not text.startswith(part):
                at = next((at for at, (a, b) in enumerate(zip(text, part, strict=False)) if a != b), len(text))
                raise ValueError(
                    f"The conversation {name} message {index} must be rendered as the whole one begins, got "
                    f"{part[at : at + 40]!r} instead of {text[at : at + 40]!r} after {text[max(0, at - 40) : at]!r}. "
                    "The chat template changes earlier messages, as those of reasoning models do: pass "
                    "`row_per_turn=True`. Or variables such as `enable_thinking` do not fit the answers."
                )
        return len(before), len(through)

    def _render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        tokenizer: Any = self.tokenizer
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **kwargs, **self.template_kwargs))


def _row_of_answer(answer: Mapping[str, Any]) -> Row:
    prompt, response = answer["prompt_ids"], answer["response_ids"]
    mask = [0] * len(prompt) + [1] * len(response)
    names = {name: answer.get(name) for name in ("id", "source")}
    return {**names, "input_ids": [*prompt, *response], "loss_mask": mask}


def _cut(row: Mapping[str, Any], length: int | None) -> Row:
    """A row up to a length, as arrays: lists of numbers take ten times the memory."""
    _check_lengths(row, COLUMNS)
    cut = {name: np.asarray(row[name][:length], dtype=COLUMNS[name]) for name in COLUMNS if row.get(name) is not None}
    return {**row, **cut}


def check_row(row: Mapping[str, Any], place: str, num_tokens: int | None = None) -> None:
    """Checks that a row is what training reads: a conversion to integers would hide what is wrong with it.

    Args:
        row (`Mapping`): The row.
        place (`str`): What to call it in an error.
        num_tokens (`int`, *optional*): The number of tokens there are.

    Raises:
        ValueError: If a column is missing, of another kind, of another length, or has a value out of range.
    """
    bounds = {"input_ids": (0, num_tokens), "loss_mask": (0, 2), "document_ids": (-1, None)}
    for name, (least, above) in bounds.items():
        if row.get(name) is None:
            if name == "document_ids":
                continue
            raise ValueError(f"`{name}` of {place} must be there, got columns {', '.join(sorted(row))}.")
        values = np.asarray(row[name])
        if values.ndim != 1 or (values.dtype.kind not in "iub" and values.size):
            raise ValueError(
                f"`{name}` of {place} must be a list of integers, got {values.dtype} of shape {values.shape}."
            )
        wrong = (values < least) | (values >= above if above is not None else False)
        if wrong.any():
            rule = f"at least {least}" if above is None else f"from {least} to {above - 1}"
            raise ValueError(f"`{name}` of {place} must be {rule}, got {values[wrong][0]}.")
    try:
        _check_lengths(row, COLUMNS)
    except ValueError as error:
        raise ValueError(f"{error} ({place})") from None


def _check_lengths(row: Mapping[str, Any], names: Iterable[str]) -> None:
    count = len(row["input_ids"])
    for name in names:
        if row.get(name) is not None and len(row[name]) != count:
            raise ValueError(f"`{name}` of a row must be as long as its `input_ids`, {count}, got {len(row[name])}.")


def _supervised_only(rows: Iterable[Row]) -> list[Row]:
    rows = list(rows)
    kept = [row for row in rows if row["loss_mask"].any()]
    if len(kept) < len(rows):
        logger.warning(f"{len(rows) - len(kept)} of {len(rows)} rows have no token to be predicted and are dropped.")
    return kept


def _document_ids(row: Mapping[str, Any]) -> Any:
    given = row.get("document_ids")
    return [0] * len(row["input_ids"]) if given is None else given


def _join(documents: Sequence[Row]) -> Row:
    return {
        "input_ids": np.concatenate([document["input_ids"] for document in documents]),
        "loss_mask": np.concatenate([document["loss_mask"] for document in documents]),
        "document_ids": np.repeat(range(len(documents)), [len(document["input_ids"]) for document in documents]),
    }


def _dataset(rows: Iterable[Row], max_length: int | None = None, kept: Sequence[str] = ()) -> "Dataset":
    """A dataset in memory of the rows that have something to predict."""
    from datasets import Dataset, Features, List, Value  # noqa: PLC0415  (optional dependency)

    supervised = _supervised_only(_cut(row, max_length) for row in rows)
    if not supervised:
        raise ValueError("`rows` must have a row with a token to be predicted, got none.")
    features = {name: List(Value(kind)) for name, kind in COLUMNS.items() if name in supervised[0]}
    features |= {name: Value("string") for name in kept if all(row.get(name) is not None for row in supervised)}
    return Dataset.from_dict(
        {name: [row[name] for row in supervised] for name in features}, features=Features(features)
    )
