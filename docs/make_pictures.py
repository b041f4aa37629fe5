"""Makes the pictures of the documentation, in docs/images.

    python docs/make_pictures.py
    python docs/make_pictures.py --target gemma-3-270m

Without a target only the drawing of the method is made. With gemma-3-270m (`make demo` prepares it) and the head of
`examples/heads` one short text is generated: a tree of it is drawn, and how deep trees of several sizes were accepted.
"""

import argparse
from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

from jetspec_hf import AcceptanceStats, JetSpecHead, draw_tree

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
HEAD = ROOT / "examples" / "heads" / "gemma-3-270m"
PROMPT = (
    "Question: A farmer has 12 cows. He buys 5 more cows and sells 3 of them. How many cows does he have?\n"
    "Answer: He had"
)
NEW_TOKENS = 96

GREY, INK, PALE, GREEN, MINT, BLUE, SKY, ORANGE, CREAM = (
    "#8b949e",
    "#1f2328",
    "#f6f8fa",
    "#2da44e",
    "#d3f5dc",
    "#0969da",
    "#ddf4ff",
    "#bc4c00",
    "#fff1e5",
)
KINDS = {
    "plain": (GREY, PALE),
    "accepted": (GREEN, MINT),
    "bonus": (BLUE, SKY),
    "anchor": (ORANGE, CREAM),
}


# The method, drawn by hand -------------------------------------------------------------------------------------------


class Drawing:
    """Pieces of an SVG.

    Args:
        width (`int`): In pixels.
        height (`int`): In pixels.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, size: float = 13, colour: str = INK, **style: str) -> None:
        """Writes a line that is centred on `x`, its baseline at `y`."""
        extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
        anchor = "" if "text_anchor" in style else ' text-anchor="middle"'
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}"{anchor}{extra}>{escape(text)}</text>'
        )

    def token(self, x: float, y: float, text: str, kind: str = "plain", width: float | None = None) -> float:
        """Draws a token's box from `x` on, its middle at `y`, and returns where it ends."""
        width = 8.4 * len(text) + 16 if width is None else width
        line, fill = KINDS[kind]
        self.parts.append(
            f'<rect x="{x:g}" y="{y - 13:g}" width="{width:g}" height="26" rx="6" fill="{fill}" stroke="{line}" '
            f'stroke-width="{1.2 if kind == "plain" else 2}"/>'
        )
        self.text(x + width / 2, y + 4.5, text, 13, font_family="ui-monospace,'DejaVu Sans Mono',Menlo,monospace")
        return x + width

    def line(
        self, points: Sequence[tuple[float, float]], colour: str = GREY, width: float = 1.4, arrow: bool = False
    ) -> None:
        """Draws straight lines through points."""
        way = "L".join(f"{x:g} {y:g}" for x, y in points)
        head = ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(f'<path d="M{way}" fill="none" stroke="{colour}" stroke-width="{width:g}"{head}/>')

    def panel(self, x: float, y: float, width: float, height: float, step: str, what: str) -> None:
        """Draws a frame with a step's name and what it costs."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="10" fill="#ffffff" stroke="#d0d7de"/>'
        )
        self.text(x + 14, y + 24, step, 15, text_anchor="start", font_weight="600")
        self.text(x + width - 14, y + 24, what, 12, GREY, text_anchor="end")

    def svg(self, title: str) -> str:
        """The whole drawing."""
        arrow = (
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker></defs>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" '
                "font-family=\"system-ui,'Segoe UI','DejaVu Sans',Helvetica,Arial,sans-serif\">",
                f"<title>{escape(title)}</title>",
                arrow,
                f'<rect width="{self.width}" height="{self.height}" rx="12" fill="{PALE}"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


# Token, parent, depth and row of the tree in the drawing; the first of each depth is the likeliest.
NODES = (
    ("are", None, 0, 0),
    ("red", 0, 1, 0),
    (",", 1, 2, 0),
    ("blue", 2, 3, 0),
    (",", 3, 4, 0),
    ("yellow", 2, 3, 1),
    ("and", 1, 2, 2),
    ("the", 0, 1, 3),
    (",", 7, 2, 3),
)
ACCEPTED = (0, 1, 2, 5)
BONUS = ","
DEPTHS = (("red", "the"), (",", "and"), ("blue", "yellow"), (",", "and"))
SHARES = ((0.62, 0.21), (0.71, 0.18), (0.48, 0.33), (0.55, 0.3))
TEXT = ("The", "three", "primary", "colours", "are")
PANEL = (340, 200)  # width and height


def draw_draft(drawing: Drawing, left: float, top: float) -> None:
    """The block that goes into the head, and the distributions that come out."""
    drawing.panel(left, top, *PANEL, "draft", "one forward of the head")
    for depth, (words, shares) in enumerate(zip(DEPTHS, SHARES, strict=True)):
        x = left + 72 + 64 * depth
        for row, (word, share) in enumerate(zip(words, shares, strict=True)):
            y = top + 58 + 24 * row
            drawing.parts.append(
                f'<rect x="{x:g}" y="{y - 9:g}" width="{54 * share:g}" height="18" rx="3" fill="#b6d7ff"/>'
            )
            drawing.text(x + 3, y + 4.5, word, 12, text_anchor="start")
        drawing.line([(x + 24, top + 136), (x + 24, top + 100)], arrow=True)
        drawing.token(x, top + 152, "MASK", width=50)
    drawing.token(left + 14, top + 152, "are", "anchor", width=50)
    drawing.text(left + 170, top + 190, "a distribution for each place to come", 12, GREY)


def draw_build(drawing: Drawing, left: float, top: float, accepted: Sequence[int], note: str) -> None:
    """The tree; with accepted nodes, also the target's own next token."""
    columns, widths = (14, 82, 146, 200, 290), (46, 46, 36, 70, 36)
    boxes = [(left + columns[depth], top + 58 + 32 * row, widths[depth]) for _, _, depth, row in NODES]
    for kept in (False, True):  # accepted edges on top
        for index, (_, parent, _, _) in enumerate(NODES):
            if parent is None or (index in accepted) != kept:
                continue
            (px, py, pw), (x, y, _) = boxes[parent], boxes[index]
            bend = x - 9
            drawing.line([(px + pw, py), (bend, py), (bend, y), (x, y)], GREEN if kept else GREY, 2.6 if kept else 1.3)
    for index, ((word, _, depth, _), (x, y, width)) in enumerate(zip(NODES, boxes, strict=True)):
        kind = "anchor" if depth == 0 else "accepted" if index in accepted else "plain"
        drawing.token(x, y, word, kind, width)
    if accepted:
        x, y, width = boxes[accepted[-1]]
        drawing.line([(x + width, y), (x + width + 18, y)], BLUE, 2.2)
        drawing.token(x + width + 18, y, BONUS, "bonus", 36)
    drawing.text(left + 170, top + 190, note, 12, GREY)


def draw_verify(drawing: Drawing, left: float, top: float) -> None:
    """The tree mask: what each node sees."""
    drawing.panel(left, top, *PANEL, "verify", "one forward of the target")
    size, x0, y0 = 14, left + 66, top + 42
    for row in range(len(NODES)):
        path, node = set(), row
        while node is not None:
            path.add(node)
            node = NODES[node][1]
        drawing.text(x0 - 6, y0 + size * row + 11, NODES[row][0], 11, text_anchor="end")
        for column in range(-4, len(NODES)):
            fill = "#b6bcc4" if column < 0 else "#57ab6e" if column in path else "#ffffff"
            draw_cell(drawing, x0 + size * (column + 4), y0 + size * row, size, fill)
    for y, fill, said in ((90, "#b6bcc4", "text so far"), (112, "#57ab6e", "own path")):
        draw_cell(drawing, left + 258, top + y, size, fill)
        drawing.text(left + 276, top + y + 11, said, 11, GREY, text_anchor="start")
    drawing.text(left + 170, top + 190, "what each node of the tree sees", 12, GREY)


def draw_cell(drawing: Drawing, x: float, y: float, size: float, fill: str) -> None:
    """One entry of a mask."""
    drawing.parts.append(
        f'<rect x="{x:g}" y="{y:g}" width="{size - 1.5:g}" height="{size - 1.5:g}" fill="{fill}" stroke="#d0d7de" '
        'stroke-width="0.5"/>'
    )


def draw_method() -> str:
    """One step of decoding in one picture."""
    drawing = Drawing(772, 600)
    (width, height), left, right, upper, lower = PANEL, 24, 408, 84, 332
    end = draw_text(drawing, 35, "before", [(word, "plain") for word in TEXT[:-1]] + [(TEXT[-1], "anchor")])
    drawing.text(end + 8, 40, "the anchor: not seen by the target yet", 12, ORANGE, text_anchor="start")

    middle = left + width / 2
    drawing.line([(middle, 54), (middle, upper - 3)], arrow=True)
    draw_draft(drawing, left, upper)
    drawing.line([(left + width + 3, upper + 100), (right - 3, upper + 100)], arrow=True)
    drawing.panel(right, upper, *PANEL, "build", "a token tree")
    draw_build(drawing, right, upper, (), "the most probable paths")
    turn = (upper + height + lower) / 2
    drawing.line(
        [(right + width / 2, upper + height + 3), (right + width / 2, turn), (middle, turn), (middle, lower - 3)],
        arrow=True,
    )
    draw_verify(drawing, left, lower)
    drawing.line([(left + width + 3, lower + 100), (right - 3, lower + 100)], arrow=True)
    drawing.panel(right, lower, *PANEL, "accept", "the target's own choices")
    draw_build(drawing, right, lower, ACCEPTED, "as far as the target agrees, and its own next token")
    drawing.line([(right + width / 2, lower + height + 3), (right + width / 2, 549)], arrow=True)

    new = [(NODES[node][0], "accepted") for node in ACCEPTED[1:]] + [(BONUS, "bonus")]
    end = draw_text(drawing, 566, "after", [(word, "plain") for word in TEXT] + new)
    drawing.text(end + 8, 571, f"{len(new)} tokens for one forward", 12, GREEN, text_anchor="start", font_weight="600")
    return drawing.svg("One step: draft, build, verify, accept, commit")


def draw_text(drawing: Drawing, y: float, when: str, tokens: Sequence[tuple[str, str]]) -> float:
    """Draws a text as a row of tokens of some kinds, and returns where it ends."""
    drawing.text(24, y + 5, when, 13, GREY, text_anchor="start")
    x = 76.0
    for text, kind in tokens:
        x = drawing.token(x, y, text, kind) + 5
    return x


# Pictures of a real head ---------------------------------------------------------------------------------------------


class StopAt(StoppingCriteria):
    """Stops at a length without cutting a tree short."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs: object) -> torch.BoolTensor:
        """Whether each row is to stop."""
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


def draw_depths(found: dict[str, AcceptanceStats]) -> Figure:
    """The share of steps that accepted a node at each depth."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for (name, stats), marker in zip(found.items(), "osD^", strict=False):
        shares = [count / stats.steps for count in stats.accepted_by_depth]
        label = f"{name}: τ {stats.mean_acceptance_length:.2f}"
        axes.plot(range(1, len(shares) + 1), shares, f"{marker}-", label=label)
    axes.set(xlabel="depth", ylabel="share of steps accepted this deep", ylim=(0, 1))
    axes.set_xticks(range(1, 1 + max(len(stats.accepted_by_depth) for stats in found.values())))
    axes.set_title(f"gemma-3-270m with its demo head, one text of {NEW_TOKENS} tokens", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def draw_real(folder: Path) -> None:
    """Generates one text and draws a tree of it, and acceptance by depth."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    head = JetSpecHead.from_pretrained(HEAD, dtype=torch.float32)
    inputs = tokenizer(PROMPT, return_tensors="pt")

    def decode(**options: object) -> AcceptanceStats:
        target.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            assistant_model=head,
            **options,
        )
        return head.last_acceptance

    found = {}
    for name, knobs in {
        "chain": {"tree_width": 1, "tree_budget": head.config.draft_depth},
        "8 nodes": {"tree_width": 16, "tree_budget": 8},
        "16 nodes": {"tree_width": 16, "tree_budget": 16},
        "64 nodes": {"tree_width": 16, "tree_budget": 64},
    }.items():
        head.generation_config.update(**knobs)
        found[name] = decode()
    draw_depths(found).savefig(IMAGES / "acceptance_by_depth.png", dpi=110)

    head.generation_config.tree_budget = 16
    lengths = found["16 nodes"].accepted_lengths[0]
    step = lengths.index(max(lengths[:-1]))  # a step that went well
    length = inputs["input_ids"].shape[1] + 1 + sum(lengths[: step + 1])
    stats = decode(stopping_criteria=StoppingCriteriaList([StopAt(length)]))
    picture = draw_tree(stats.last_tree, accepted=stats.last_path[0], tokenizer=tokenizer)
    (IMAGES / "tree.svg").write_text(picture.to_svg() + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the pictures.

    Args:
        arguments (`Sequence[str]`, *optional*): The command line; that of the process if not given.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, help="folder of gemma-3-270m")
    options = parser.parse_args(arguments)
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "method.svg").write_text(draw_method(), encoding="utf-8")
    if options.target is not None:
        draw_real(options.target)


if __name__ == "__main__":
    main()
