"""Pictures of trees: what stands in them, not how they look."""

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import torch

from jetspec_hf.tree import TokenTree, build_tree, draw_tree

TEXTS = {7: "def", 8: " <b>&", 9: "\n\t", 10: " 'quoted' \"twice\"", 11: "日本語", 12: "x" * 90}
SVG = "{http://www.w3.org/2000/svg}"


class Tokenizer:
    """Decodes the few tokens of the tests."""

    def decode(self, token_ids: list[int]) -> str:
        (token_id,) = token_ids
        return TEXTS[token_id]


@pytest.fixture
def tree() -> TokenTree:
    """Two rows; the first is 7 -> (8 -> (10 -> 12, 11), 9)."""
    return TokenTree(
        token_ids=torch.tensor([[7, 8, 9, 10, 11, 12], [7, 7, 7, 7, 7, 7]]),
        parents=torch.tensor([[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 3, 4]]),
        depths=torch.tensor([[0, 1, 1, 2, 2, 3], [0, 1, 2, 3, 4, 5]]),
        log_probs=torch.tensor([[1.0, 0.5, 0.25, 0.125, 0.05, 0.0004], [1.0] * 6]).log(),
        depth_limit=5,
    )


def groups(svg: str) -> list[ElementTree.Element]:
    return [group for group in ElementTree.fromstring(svg).iter(f"{SVG}g") if "node" in group.attrib["class"].split()]


def token_texts(svg: str) -> list[str]:
    return [
        text.text or "" for group in groups(svg) for text in group.iter(f"{SVG}text") if text.get("class") == "token"
    ]


def test_the_text_shows_one_node_a_line_below_its_parent(tree: TokenTree) -> None:
    assert str(draw_tree(tree)).splitlines()[1:] == [
        "  7",
        "  ├─ 8 50%",
        "  │  ├─ 10 12%",
        "  │  │  └─ 12 <0.1%",
        "  │  └─ 11 5.0%",
        "  └─ 9 25%",
    ]


def test_the_text_marks_the_accepted_path(tree: TokenTree) -> None:
    lines = str(draw_tree(tree, accepted=[0, 1, 4])).splitlines()
    assert [line for line in lines if line.startswith("✓")] == ["✓ 7", "✓ ├─ 8 50%", "✓ │  └─ 11 5.0%"]
    assert lines[0].startswith("token tree: 5 nodes besides the root, depth 3, 2 accepted")


def test_the_path_may_come_as_a_tensor(tree: TokenTree) -> None:
    assert str(draw_tree(tree, accepted=torch.tensor([0, 1, 4]))) == str(draw_tree(tree, accepted=[0, 1, 4]))  # type: ignore[arg-type]


def test_without_a_path_nothing_is_marked(tree: TokenTree) -> None:
    for accepted in (None, []):
        picture = draw_tree(tree, accepted=accepted)
        assert "✓" not in str(picture)
        assert not any(
            "accepted" in element.get("class", "") for element in ElementTree.fromstring(picture.to_svg()).iter()
        )


def test_a_tokenizer_shows_each_token_as_python_would_write_it(tree: TokenTree) -> None:
    lines = str(draw_tree(tree, tokenizer=Tokenizer(), probabilities=False)).splitlines()
    assert lines[1:] == [
        "  'def'",
        "  ├─ ' <b>&'",
        "  │  ├─ ' \\'quoted\\' \"twice\"'",
        "  │  │  └─ '" + "x" * 23 + "…'",
        "  │  └─ '日本語'",
        "  └─ '\\n\\t'",
    ]
    assert lines[0] == "token tree: 5 nodes besides the root, depth 3"


def test_the_graphic_is_xml_that_shows_every_token(tree: TokenTree) -> None:
    svg = draw_tree(tree, tokenizer=Tokenizer()).to_svg()
    assert token_texts(svg) == [
        "'def'",
        "' <b>&'",
        "'\\n\\t'",
        "' \\'quoted\\' \"twice\"'",
        "'日本語'",
        "'" + "x" * 23 + "…'",
    ]
    assert "<b>" not in svg


def test_the_graphic_marks_the_accepted_path_by_more_than_colour(tree: TokenTree) -> None:
    svg = draw_tree(tree, accepted=[0, 1, 4]).to_svg()
    marked = ["accepted" in group.attrib["class"].split() for group in groups(svg)]
    assert marked == [True, True, False, False, True, False]
    assert token_texts(svg) == ["✓ 7", "✓ 8", "9", "10", "✓ 11", "12"]
    edges = [path.attrib["class"] for path in ElementTree.fromstring(svg).iter(f"{SVG}path")]
    assert sorted(edges) == ["edge"] * 3 + ["edge accepted"] * 2


def test_the_graphic_says_more_of_each_node_when_pointed_at(tree: TokenTree) -> None:
    titles = [group.findtext(f"{SVG}title") for group in groups(draw_tree(tree, accepted=[0, 1]).to_svg())]
    assert titles[:3] == [
        "node 0: token 7, depth 0",
        "node 1: token 8, depth 1, path probability 0.5, accepted",
        "node 2: token 9, depth 1, path probability 0.25",
    ]


def test_probabilities_can_be_left_out(tree: TokenTree) -> None:
    picture = draw_tree(tree, probabilities=False)
    assert "%" not in str(picture)
    assert "%" not in picture.to_svg()


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    rects = [rect for group in groups(svg) for rect in group.iter(f"{SVG}rect")]
    x, y, width, height = ([float(rect.attrib[name]) for rect in rects] for name in ("x", "y", "width", "height"))
    return list(zip(x, y, width, height, strict=True))


def test_no_two_boxes_of_a_large_tree_overlap_and_all_lie_inside() -> None:
    tree = build_tree(torch.tensor([0]), torch.randn(1, 7, 50) * 3, tree_budget=64, tree_width=8)
    svg = draw_tree(tree, accepted=[0, 1]).to_svg()
    places = boxes(svg)
    assert len(places) == 65
    for index, (x, y, width, height) in enumerate(places):
        for other_x, other_y, other_width, other_height in places[:index]:
            beside = x + width <= other_x or other_x + other_width <= x
            above = y + height <= other_y or other_y + other_height <= y
            assert beside or above
    root = ElementTree.fromstring(svg)
    assert max(x + width for x, _, width, _ in places) < float(root.attrib["width"])
    assert max(y + height for _, y, _, height in places) < float(root.attrib["height"])


def test_children_stand_right_of_their_parent_and_the_best_on_its_line(tree: TokenTree) -> None:
    places = boxes(draw_tree(tree).to_svg())
    for node, parent in enumerate(tree.parents[0].tolist()[1:], start=1):
        assert places[node][0] > places[parent][0] + places[parent][2]
    assert places[0][1] == places[1][1] == places[3][1] == places[5][1]
    assert len({place[1] for place in places}) == 3


def test_the_same_tree_gives_the_same_picture(tree: TokenTree) -> None:
    first, second = (draw_tree(tree, accepted=[0, 2], tokenizer=Tokenizer()) for _ in range(2))
    assert first == second
    assert first.to_svg() == second.to_svg()


def test_a_notebook_shows_the_first_row(tree: TokenTree) -> None:
    assert tree._repr_html_() == draw_tree(tree, row=0)._repr_html_()
    assert draw_tree(tree).to_svg() in tree._repr_html_()


def test_another_row_can_be_drawn(tree: TokenTree) -> None:
    assert str(draw_tree(tree, row=1, probabilities=False)).splitlines()[-1].split() == ["└─", "7"]


def test_a_root_alone_can_be_drawn() -> None:
    picture = draw_tree(TokenTree.root_only(torch.tensor([3])), accepted=[0])
    assert str(picture).splitlines()[1:] == ["✓ 3"]
    assert token_texts(picture.to_svg()) == ["✓ 3"]


def test_a_long_chain_can_be_drawn() -> None:
    picture = draw_tree(TokenTree.chain(torch.arange(1500)[None]))
    assert len(str(picture).splitlines()) == 1501


@pytest.mark.parametrize("accepted", [[1], [0, 3], [0, 1, 2], [0, 99], [0, -1], [0, 1, 1]])
def test_what_is_no_path_from_the_root_is_refused(tree: TokenTree, accepted: list[int]) -> None:
    with pytest.raises(ValueError, match=r"`accepted` must be a path of node indices from the root, 0 first"):
        draw_tree(tree, accepted=accepted)


@pytest.mark.parametrize("row", [2, -1])
def test_a_row_outside_the_batch_is_refused(tree: TokenTree, row: Any) -> None:
    with pytest.raises(ValueError, match=rf"`row` must be between 0 and 1, got {row}"):
        draw_tree(tree, row=row)
