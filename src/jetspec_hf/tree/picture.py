"""A picture of one token tree, for a terminal and for a notebook: tokens, probabilities and the accepted path.

For people alone: drawing copies the tree to the host.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .token_tree import TokenTree


_LONGEST_LABEL = 24
_ACCEPTED_MARK = "✓"

# Sizes of the drawing in pixels.
_CHARACTER, _FONT, _SMALL_FONT = 7.4, 12, 10.5
_ROW, _BOX, _PADDING, _GAP, _CORNER, _MARGIN = 26, 20, 7, 28, 6, 12

# A box brings its own background, and what stands outside boxes is of a middle tone: it reads on light and dark pages.
_STYLE = (
    ".jetspec-tree text{font-family:ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre}"
    ".jetspec-tree .edge{fill:none;stroke:#8b949e;stroke-width:1.2}"
    ".jetspec-tree .edge.accepted{stroke:#2da44e;stroke-width:3}"
    ".jetspec-tree .box{fill:#f1f3f5;stroke:#8b949e;stroke-width:1}"
    ".jetspec-tree .accepted .box{fill:#d3f5dc;stroke:#2da44e;stroke-width:2}"
    ".jetspec-tree .token{fill:#1f2328}"
    ".jetspec-tree .probability{fill:#57606a}"
    ".jetspec-tree .caption{fill:#7d8590}"
)


@dataclass(frozen=True)
class PictureNode:
    """One node as it is shown: its place in the tree, token, path probability, and whether it was accepted."""

    token_id: int
    parent: int
    depth: int
    label: str
    probability: float
    accepted: bool


@dataclass(frozen=True)
class TreePicture:
    """The picture of one token tree.

    `str()` draws it for a terminal, one node a line, `to_svg()` as a graphic; a notebook shows the latter.

    Args:
        title (`str`):
            The line above the tree.
        nodes (`tuple` of `PictureNode`):
            The nodes, parents before their children, the root first.
        probabilities (`bool`):
            Whether to show each path's probability.
    """

    title: str
    nodes: tuple[PictureNode, ...]
    probabilities: bool = True

    def __str__(self) -> str:
        """Draw one node a line, most probable siblings first, accepted nodes marked in the margin."""
        lines, children = [self.title], self._children()
        indents = [""] * len(self.nodes)  # what stands before the branches of a node's children
        for index in self._top_down():
            node = self.nodes[index]
            branch = ""
            if index > 0:
                last = index == children[node.parent][-1]
                branch = indents[node.parent] + ("└─ " if last else "├─ ")
                indents[index] = indents[node.parent] + ("   " if last else "│  ")
            probability = f" {_percent(node.probability)}" if self._shows_probability(index) else ""
            lines.append(f"{_ACCEPTED_MARK if node.accepted else ' '} {branch}{node.label}{probability}")
        return "\n".join(lines)

    def to_svg(self) -> str:
        """Draw a self-contained SVG: depth from left to right, and every node's most probable child on its own line."""
        widths = [self._box_width(index) for index in range(len(self.nodes))]
        columns = _column_starts([node.depth for node in self.nodes], widths)
        lines = self._lines()
        x = [columns[node.depth] for node in self.nodes]
        y = [_MARGIN + _ROW * (line + 1.5) for line in lines]
        edges, boxes = [], []
        # Accepted edges are drawn last, on top of those that leave from the same place.
        for index in sorted(range(1, len(self.nodes)), key=lambda index: self.nodes[index].accepted):
            parent = self.nodes[index].parent
            edges.append(self._svg_edge(index, (x[parent] + widths[parent], y[parent]), (x[index], y[index])))
        for index, width in enumerate(widths):
            boxes.append(self._svg_box(index, x[index], y[index], width))
        right = max(left + width for left, width in zip(x, widths, strict=True))
        full_width = max(right, _text_width(self.title, _FONT) + _MARGIN) + _MARGIN
        full_height = _ROW * (max(lines) + 2) + 2 * _MARGIN
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="jetspec-tree" role="img" width="{full_width:.0f}" '
                f'height="{full_height:.0f}" viewBox="0 0 {full_width:.0f} {full_height:.0f}">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{_STYLE}</style>",
                f'<text class="caption" x="{_MARGIN}" y="{_MARGIN + _FONT}" font-size="{_FONT}">'
                f"{escape(self.title)}</text>",
                *edges,
                *boxes,
                "</svg>",
            ]
        )

    def _repr_html_(self) -> str:
        """Show the SVG in a notebook, scrolled if it is wider than the page."""
        return f'<div style="overflow-x:auto">{self.to_svg()}</div>'

    def _shows_probability(self, index: int) -> bool:
        return self.probabilities and index > 0

    def _children(self) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes[1:], start=1):
            children[node.parent].append(index)
        return children

    def _top_down(self) -> list[int]:
        """Return the nodes as they stand from top to bottom: a node, then each child with all below it."""
        children, waiting, order = self._children(), [0], []
        while waiting:
            order.append(waiting.pop())
            waiting.extend(reversed(children[order[-1]]))
        return order

    def _lines(self) -> list[int]:
        """Return each node's line in the drawing: its parent's for a first child, else the next free one."""
        lines, last = [0] * len(self.nodes), 0
        first_children = {children[0] for children in self._children() if children}
        for index in self._top_down()[1:]:
            if index in first_children:
                lines[index] = lines[self.nodes[index].parent]
            else:
                last += 1
                lines[index] = last
        return lines

    def _box_width(self, index: int) -> float:
        node = self.nodes[index]
        width = _text_width(self._svg_label(node), _FONT) + 2 * _PADDING
        if self._shows_probability(index):
            width += _PADDING + _text_width(_percent(node.probability), _SMALL_FONT)
        return width

    def _svg_label(self, node: PictureNode) -> str:
        return f"{_ACCEPTED_MARK} {node.label}" if node.accepted else node.label

    def _svg_edge(self, index: int, start: tuple[float, float], end: tuple[float, float]) -> str:
        (left, top), (right, bottom) = start, end
        kind = "edge accepted" if self.nodes[index].accepted else "edge"
        line = f"M{left:.1f} {top:.1f}"
        if bottom > top:  # down where all edges to this depth turn, so that siblings share their way
            turn = right - _GAP / 2
            line += f"H{turn - _CORNER:.1f}q{_CORNER} 0 {_CORNER} {_CORNER}"
            line += f"V{bottom - _CORNER:.1f}q0 {_CORNER} {_CORNER} {_CORNER}"
        return f'<path class="{kind}" d="{line}H{right:.1f}"/>'

    def _svg_box(self, index: int, left: float, middle: float, width: float) -> str:
        node = self.nodes[index]
        baseline = middle + _FONT * 0.35
        parts = [
            f'<g class="{"node accepted" if node.accepted else "node"}">',
            f"<title>{escape(self._details(index))}</title>",
            f'<rect class="box" x="{left:.1f}" y="{middle - _BOX / 2:.1f}" width="{width:.1f}" height="{_BOX}" '
            'rx="5"/>',
            f'<text class="token" x="{left + _PADDING:.1f}" y="{baseline:.1f}" font-size="{_FONT}" '
            f'xml:space="preserve">{escape(self._svg_label(node))}</text>',
        ]
        if self._shows_probability(index):
            parts.append(
                f'<text class="probability" x="{left + width - _PADDING:.1f}" y="{baseline:.1f}" '
                f'font-size="{_SMALL_FONT}" text-anchor="end">{escape(_percent(node.probability))}</text>'
            )
        return "".join([*parts, "</g>"])

    def _details(self, index: int) -> str:
        """Return what a node says when it is pointed at."""
        node = self.nodes[index]
        probability = f", path probability {node.probability:.3g}" if self._shows_probability(index) else ""
        accepted = ", accepted" if node.accepted and index > 0 else ""
        return f"node {index}: token {node.token_id}, depth {node.depth}{probability}{accepted}"


def draw_tree(
    tree: TokenTree,
    row: int = 0,
    accepted: Sequence[int] | None = None,
    tokenizer: Any | None = None,
    probabilities: bool = True,
) -> TreePicture:
    """Draw one row's tree.

    Args:
        tree ([`TokenTree`]):
            The trees.
        row (`int`, *optional*, defaults to 0):
            Which of them to draw.
        accepted (`Sequence[int]`, *optional*):
            The nodes that the target accepted, the root first, as in `AcceptanceStats.last_path[row]`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Anything whose `decode([token_id])` returns a token's text. Without it nodes show token ids.
        probabilities (`bool`, *optional*, defaults to `True`):
            Whether to show the draft head's probability of the path to each node.

    Returns:
        [`TreePicture`]: `print` it, let a notebook show it, or save its `to_svg()`.

    Raises:
        ValueError: `row` is not a row of the tree, or `accepted` is not a path from its root.
    """
    if not 0 <= row < tree.batch_size:
        raise ValueError(f"`row` must be between 0 and {tree.batch_size - 1}, got {row}: choose a row of the batch.")
    token_ids, parents, depths = tree.token_ids[row].tolist(), tree.parents[row].tolist(), tree.depths[row].tolist()
    path = [int(node) for node in accepted] if accepted is not None else []
    _check_path(path, parents)
    nodes = tuple(
        PictureNode(
            token_id=token_id,
            parent=parent,
            depth=depth,
            label=_label(token_id, tokenizer),
            probability=math.exp(log_prob),
            accepted=index in path,
        )
        for index, (token_id, parent, depth, log_prob) in enumerate(
            zip(token_ids, parents, depths, tree.log_probs[row].tolist(), strict=True)
        )
    )
    title = f"token tree: {len(nodes) - 1} nodes besides the root, depth {max(depths)}"
    if path:
        title += f", {len(path) - 1} accepted"
    if probabilities:
        title += " (%: the draft's probability of the path)"
    return TreePicture(title, nodes, probabilities)


def _check_path(path: list[int], parents: list[int]) -> None:
    for above, node in zip([-1, *path], path, strict=False):
        if not 0 <= node < len(parents) or parents[node] != above:
            raise ValueError(
                f"`accepted` must be a path of node indices from the root, 0 first, in a tree of {len(parents)} nodes, "
                f"got {path}: node {node} does not follow {above if above >= 0 else 'the start'}."
            )


def _label(token_id: int, tokenizer: Any | None) -> str:
    """Return a token's text as Python would write it, so that blanks and line ends can be seen."""
    if tokenizer is None:
        return str(token_id)
    text = tokenizer.decode([token_id])
    if len(text) > _LONGEST_LABEL:
        text = text[: _LONGEST_LABEL - 1] + "…"
    return repr(text)


def _percent(probability: float) -> str:
    """Return a probability in at most five characters."""
    percent = 100 * probability
    if 0 < percent < 0.1:
        return "<0.1%"
    return f"{percent:.1f}%" if percent < 9.95 else f"{percent:.0f}%"


def _text_width(text: str, font: float) -> float:
    """Return about how wide a text is in a monospaced font, in which wide characters take two places."""
    places = sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
    return places * _CHARACTER * font / _FONT


def _column_starts(depths: list[int], widths: list[float]) -> list[float]:
    """Return where the boxes of each depth start: one gap after the widest of the depth before."""
    starts = [float(_MARGIN)]
    for depth in range(max(depths)):
        widest = max(width for node_depth, width in zip(depths, widths, strict=True) if node_depth == depth)
        starts.append(starts[-1] + widest + _GAP)
    return starts
