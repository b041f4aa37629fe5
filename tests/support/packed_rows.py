"""Rows of documents between padding, as heads are trained on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from hypothesis import strategies as st


@dataclasses.dataclass(frozen=True)
class Document:
    """Where a document lies.

    Args:
        row: its row in the batch.
        start: the slot of its first token.
        length: its tokens.
    """

    row: int
    start: int
    length: int

    @property
    def slots(self) -> slice:
        """Its slots in its row."""
        return slice(self.start, self.start + self.length)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Documents in rows.

    Args:
        document_ids: the document of each slot, counted from 0 in each row, -1 for padding; shape `(batch, length)`.
        documents: the documents, in order.
    """

    document_ids: torch.Tensor
    documents: list[Document]

    @classmethod
    def of(cls, *rows: tuple[int, Sequence[int]], right: int = 0) -> Layout:
        """Lays out rows of (slots of padding in front, documents' lengths), and `right` slots after the longest row."""
        width = max(left + sum(lengths) for left, lengths in rows) + right
        ids, documents = torch.full((len(rows), width), -1), []
        for row, (left, lengths) in enumerate(rows):
            for number, length in enumerate(lengths):
                documents.append(Document(row, left + sum(lengths[:number]), length))
                ids[row, documents[-1].slots] = number
        return cls(ids, documents)


@st.composite
def layouts(draw: st.DrawFn, max_rows: int = 3, max_documents: int = 3, max_length: int = 6) -> Layout:
    """Any batch of short documents with padding at both sides; a row may be nothing but padding."""
    lengths = st.lists(st.integers(1, max_length), max_size=max_documents)
    rows = draw(st.lists(st.tuples(st.integers(0, 2), lengths), min_size=1, max_size=max_rows))
    empty = not any(left + sum(lengths) for left, lengths in rows)
    return Layout.of(*rows, right=draw(st.integers(int(empty), 2)))
