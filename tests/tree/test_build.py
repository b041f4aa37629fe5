"""The builder against the optimum: brute force over all paths, and best-first search where those are too many.

Both oracles compute in double precision with Python's floats and know nothing of tensors, levels or budgets per depth.
"""

import heapq
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_hf.tree import TokenTree, build, build_tree

Path = tuple[int, ...]
Children = Callable[[Path], dict[int, float]]  # path from the anchor on -> log-probability of every candidate

# Sums of up to 15 float32 numbers against sums in double precision; large sums are exact to as many digits.
TOLERANCE, DIGITS = 2e-5, 1e-6
STATE = 3  # numbers in the state of a branch term


def waiting(forbidden: bool) -> Any:
    """A context in which the builder must not look at values, as on an accelerator, or may, as on the CPU."""
    return mock.patch.object(build, "_host_may_look", return_value=not forbidden)


def log_softmax(scores: list[float]) -> list[float]:
    peak = max(scores)
    if peak == -math.inf:
        return scores
    total = math.fsum(math.exp(score - peak) for score in scores)
    return [score - peak - math.log(total) for score in scores]


def by_depth(logits: list[list[float]], temperature: float) -> Children:
    """Score children by depth and token."""
    scores = [dict(enumerate(log_softmax([logit / temperature for logit in row]))) for row in logits]
    return lambda path: scores[len(path) - 1]


def by_parent(logits: list[list[float]], temperature: float, extra: list[list[float]], candidates: int) -> Children:
    """Score children by depth, token and the parent's token, among the best candidates of the depth."""
    return by_path(logits, temperature, lambda path: extra[path[-1]], candidates, list(range(len(logits[0]))))


def by_path(
    logits: list[list[float]],
    temperature: float,
    extra: Callable[[Path], list[float]],
    candidates: int,
    token_ids: list[int],
) -> Children:
    """Score children by depth, token and the whole path, among the best candidates of the depth."""

    def children(path: Path) -> dict[int, float]:
        row, more = logits[len(path) - 1], extra(path)
        columns = sorted(range(len(row)), key=lambda column: -row[column])[:candidates]
        scores = log_softmax([(row[column] + more[column]) / temperature for column in columns])
        return dict(zip([token_ids[column] for column in columns], scores, strict=True))

    return children


def best(scores: dict[int, float], width: int) -> list[tuple[int, float]]:
    return sorted(scores.items(), key=lambda child: -child[1])[:width]


def all_paths(
    children: Children, depth: int, width: int, path: Path, log_prob: float = 0.0
) -> Iterator[tuple[Path, float]]:
    """List every path below `path`, whose first token is the anchor."""
    if len(path) > depth:
        return
    for token, score in best(children(path), width):
        yield (*path, token), log_prob + score
        yield from all_paths(children, depth, width, (*path, token), log_prob + score)


def best_first(children: Children, depth: int, width: int, anchor: int, budget: int) -> list[float]:
    """Pop the most probable path again and again, pushing its children: exact, because they are never more probable."""
    frontier: list[tuple[float, Path]] = [(0.0, (anchor,))]
    popped: list[float] = []
    while frontier and len(popped) <= budget:
        cost, path = heapq.heappop(frontier)
        popped.append(-cost)
        if len(path) <= depth:
            for token, score in best(children(path), width):
                heapq.heappush(frontier, (cost - score, (*path, token)))
    return popped[1:]


def paths_of(tree: TokenTree, row: int) -> list[Path]:
    """Return each node's tokens from the root on, and check that the tree is one."""
    tokens, parents, depths = tree.token_ids[row].tolist(), tree.parents[row].tolist(), tree.depths[row].tolist()
    assert parents[0] == -1
    paths: list[Path] = [(tokens[0],)]
    for node in range(1, tree.num_nodes):
        assert 0 <= parents[node] < node  # hence every prefix of the nodes is a tree too
        paths.append((*paths[parents[node]], tokens[node]))
    assert depths == [len(path) - 1 for path in paths]
    assert max(depths) <= tree.depth_limit
    assert len(set(paths)) == len(paths)
    return paths


def check_row(
    tree: TokenTree, row: int, children: Children, width: int, optimum: list[float], tolerance: float = TOLERANCE
) -> None:
    """Check that a row is a tree of right scores whose sorted path probabilities are the optimum."""

    def near(values: Any) -> Any:
        return pytest.approx(values, abs=tolerance, rel=DIGITS)

    paths, log_probs = paths_of(tree, row), tree.log_probs[row].tolist()
    assert log_probs[0] == 0.0
    assert log_probs == sorted(log_probs, reverse=True)
    for node, parent in enumerate(tree.parents[row].tolist()[1:], start=1):
        scores = children(paths[parent])
        score = scores[paths[node][-1]]
        assert log_probs[node] == near(log_probs[parent] + score)
        assert log_probs[node] <= log_probs[parent]
        worst = best(scores, width)[-1][1]
        assert score >= worst or score == near(worst)  # one of the best children, by value
    siblings = tree.parents[row].tolist()[1:]
    assert all(siblings.count(parent) <= width for parent in siblings)
    assert log_probs[1:] == near(optimum)
    covered, coverable = (math.fsum(map(math.exp, values)) for values in (log_probs[1:], optimum))
    assert covered == pytest.approx(coverable, rel=2 * tolerance)


def as_stored(logits: torch.Tensor) -> list[Any]:
    """Return the numbers a tensor holds after rounding to its dtype."""
    return logits.double().tolist()


@st.composite
def draft_logits(draw: st.DrawFn, batch: int, depth: int, vocabulary: int) -> torch.Tensor:
    """Logits full of exact ties, or without any; flat, peaked or absurdly peaked; some tokens forbidden."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    shape = (batch, depth, vocabulary)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([0.1, 1.0, 30.0, 1000.0]))
    if draw(st.booleans()):
        logits = torch.randint(-2, 3, shape, generator=generator) * scale
    else:
        logits = torch.randn(shape, generator=generator) * scale
    forbidden = draw(st.sampled_from([0.0, 0.0, 0.3, 0.8, 1.0]))
    logits = logits.masked_fill(torch.rand(shape, generator=generator) < forbidden, -math.inf)
    return logits.to(dtype)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_the_nodes_are_the_best_of_all_paths(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3), label="batch")
    depth = data.draw(st.integers(1, 4), label="depth")
    vocabulary = data.draw(st.integers(1, 6), label="vocabulary")
    width = data.draw(st.integers(1, 8), label="width")
    budget = data.draw(st.integers(0, 40) | st.just(2000), label="budget")
    temperature = data.draw(st.sampled_from([1.0, 1, 0.3, 2.5]), label="temperature")
    logits = data.draw(draft_logits(batch, depth, vocabulary), label="logits")
    anchors = torch.arange(batch) + 100

    with waiting(forbidden=data.draw(st.booleans(), label="waiting is forbidden")):
        tree = build_tree(anchors, logits, tree_budget=budget, tree_width=width, temperature=temperature)

    for row in range(batch):
        children = by_depth(as_stored(logits[row]), temperature)
        every = sorted((log_prob for _, log_prob in all_paths(children, depth, width, (0,))), reverse=True)
        assert tree.num_nodes == 1 + min(budget, len(every))
        check_row(tree, row, children, width, every[:budget])
    assert tree.token_ids[:, 0].tolist() == anchors.tolist()


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_the_nodes_are_the_best_of_all_paths_under_a_branch_term(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3), label="batch")
    depth = data.draw(st.integers(1, 4), label="depth")
    vocabulary = data.draw(st.integers(1, 6), label="vocabulary")
    budget = data.draw(st.integers(0, 40) | st.just(2000), label="budget")
    temperature = data.draw(st.sampled_from([1.0, 0.3, 2.5]), label="temperature")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]), label="dtype of the branch term")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    if data.draw(st.booleans(), label="ties"):
        # Which of several equal tokens is a child decides what is below it: with ties, all of them must be children.
        width = data.draw(st.integers(vocabulary, 8), label="width")
        candidates = data.draw(st.integers(vocabulary, 9), label="candidates")
        logits = data.draw(draft_logits(batch, depth, vocabulary), label="logits")
        extra = torch.randint(-1, 2, (vocabulary, vocabulary), generator=generator).to(dtype)
    else:
        width = data.draw(st.integers(1, 8), label="width")
        candidates = data.draw(st.integers(1, 9), label="candidates")
        order = torch.rand(batch, depth, vocabulary, generator=generator).argsort(dim=-1)
        logits = order * 0.75 - data.draw(st.sampled_from([0.0, 40.0]))
        extra = torch.randn(vocabulary, vocabulary, generator=generator).mul(2).to(dtype)
    anchors = torch.randint(vocabulary, (batch,), generator=generator)

    with waiting(forbidden=data.draw(st.booleans(), label="waiting is forbidden")):
        tree = build_tree(
            anchors,
            logits,
            tree_budget=budget,
            tree_width=width,
            temperature=temperature,
            branch=lambda _depth, parents, _states, tokens: (extra[parents[:, :, None], tokens[:, None, :]], None),
            branch_candidates=candidates,
        )

    # A float32 logit of 1000 holds the branch term to four digits.
    tolerance = TOLERANCE + 1e-6 * logits.nan_to_num(neginf=0.0).abs().max().item() / temperature
    for row, anchor in enumerate(anchors.tolist()):
        children = by_parent(as_stored(logits[row]), temperature, as_stored(extra), candidates)
        every = sorted((log_prob for _, log_prob in all_paths(children, depth, width, (anchor,))), reverse=True)
        assert tree.num_nodes == 1 + min(budget, len(every))
        check_row(tree, row, children, width, every[:budget], tolerance)


class Recurrence:
    """A branch term whose state is a function of the whole path, and of its order: `s = tanh(M s' + e_u + p_d)`."""

    def __init__(self, depth: int, tokens: int, columns: int, generator: torch.Generator, scale: float) -> None:
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.matrix, self.embeds, self.places = random(STATE, STATE), random(tokens, STATE), random(depth, STATE)
        self.factors = random(columns, STATE) * scale

    def __call__(
        self, depth: int, parent_ids: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The term as `build_tree` asks for it."""
        assert (states is None) == (depth == 0)
        inputs = self.embeds[parent_ids] + self.places[depth]
        states = (inputs if states is None else inputs + states @ self.matrix.T).tanh()
        return states @ self.factors[columns].transpose(1, 2), states

    def along(self, path: Path) -> list[float]:
        """What it adds to every column below a path, in Python's floats."""
        matrix, embeds, places = as_stored(self.matrix), as_stored(self.embeds), as_stored(self.places)
        state = [0.0] * STATE
        for token, place in zip(path, places, strict=False):
            state = [
                math.tanh(embeds[token][i] + place[i] + math.fsum(matrix[i][j] * state[j] for j in range(STATE)))
                for i in range(STATE)
            ]
        return [math.fsum(map(operator.mul, state, factors)) for factors in as_stored(self.factors)]

    def to(self, device: str) -> "Recurrence":
        """Moves it."""
        vars(self).update({name: value.to(device) for name, value in vars(self).items()})
        return self


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_the_nodes_are_the_best_of_all_paths_under_a_branch_term_with_states(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3), label="batch")
    depth = data.draw(st.integers(1, 4), label="depth")
    vocabulary = data.draw(st.integers(1, 5), label="vocabulary")
    width = data.draw(st.integers(1, 6), label="width")
    candidates = data.draw(st.integers(1, 6), label="candidates")
    budget = data.draw(st.integers(0, 40) | st.just(1000), label="budget")
    temperature = data.draw(st.sampled_from([1.0, 0.3, 2.5]), label="temperature")
    scale = data.draw(st.sampled_from([0.3, 3.0]), label="scale of the branch term")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    token_ids = None
    if data.draw(st.booleans(), label="draft vocabulary"):
        token_ids = torch.randperm(9, generator=generator)[:vocabulary]  # sorted or not, and the anchor may be in it
    logits = torch.rand(batch, depth, vocabulary, generator=generator).argsort(dim=-1) * 0.75
    recurrence = Recurrence(depth, 9, vocabulary, generator, scale)
    anchors = torch.randint(9, (batch,), generator=generator)

    with waiting(forbidden=data.draw(st.booleans(), label="waiting is forbidden")):
        tree = build_tree(
            anchors,
            logits,
            tree_budget=budget,
            tree_width=width,
            temperature=temperature,
            branch=recurrence,
            branch_candidates=candidates,
            token_ids=token_ids,
        )

    columns = list(range(vocabulary)) if token_ids is None else token_ids.tolist()
    for row, anchor in enumerate(anchors.tolist()):
        children = by_path(as_stored(logits[row]), temperature, recurrence.along, candidates, columns)
        every = sorted((log_prob for _, log_prob in all_paths(children, depth, width, (anchor,))), reverse=True)
        assert tree.num_nodes == 1 + min(budget, len(every))
        check_row(tree, row, children, width, every[:budget])


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("budget", [60, 256])
def test_large_trees_are_those_of_best_first_search(budget: int, scale: float) -> None:
    logits = torch.randn(2, 15, 50) * scale
    tree = build_tree(torch.tensor([1, 2]), logits, tree_budget=budget, tree_width=16)
    for row in range(2):
        children = by_depth(as_stored(logits[row]), 1.0)
        check_row(tree, row, children, 16, best_first(children, 15, 16, 0, budget))


@pytest.mark.parametrize("budget", [60, 256])
def test_large_trees_under_a_branch_term_are_those_of_best_first_search(budget: int) -> None:
    logits, extra = torch.randn(2, 15, 50) * 3, torch.randn(50, 50) * 2
    tree = build_tree(
        torch.tensor([1, 2]),
        logits,
        tree_budget=budget,
        tree_width=8,
        branch=lambda _depth, parents, _states, tokens: (extra[parents[:, :, None], tokens[:, None, :]], None),
        branch_candidates=20,
    )
    for row in range(2):
        children = by_parent(as_stored(logits[row]), 1.0, as_stored(extra), 20)
        check_row(tree, row, children, 8, best_first(children, 15, 8, row + 1, budget))


@pytest.mark.parametrize("budget", [60, 256])
def test_large_trees_under_a_branch_term_with_states_are_those_of_best_first_search(budget: int) -> None:
    logits = torch.randn(2, 15, 50) * 3
    recurrence = Recurrence(15, 50, 50, torch.Generator().manual_seed(0), scale=1.0)
    anchors = torch.tensor([1, 2])
    tree = build_tree(anchors, logits, tree_budget=budget, tree_width=8, branch=recurrence, branch_candidates=20)
    for row, anchor in enumerate(anchors.tolist()):
        children = by_path(as_stored(logits[row]), 1.0, recurrence.along, 20, list(range(50)))
        check_row(tree, row, children, 8, best_first(children, 15, 8, anchor, budget))


def test_a_state_is_that_of_the_paths_own_parent() -> None:
    # The state is the number that the path's tokens spell after the anchor, which a child's score must find again.
    states_seen = []

    def spelled(
        depth: int, parents: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = parents[:, :, None] if states is None else 10 * states + parents[:, :, None]
        states_seen.append(states[..., 0].tolist())
        return torch.zeros(*parents.shape, columns.shape[1]), states

    # Depth 1: 0.6, 0.4; depth 2: 0.9, 0.1: the paths below which depth 3 is scored are 0.54, 0.36, 0.06 and 0.04.
    logits = torch.tensor([[[0.6, 0.4], [0.1, 0.9], [0.5, 0.5]]]).log()
    build_tree(
        torch.tensor([5]),
        logits,
        tree_budget=20,
        tree_width=2,
        branch=spelled,
        token_ids=torch.tensor([3, 8]),
    )
    assert states_seen == [[[5]], [[53, 58]], [[538, 588, 533, 583]]]


@pytest.mark.parametrize(("forbidden", "paths_asked"), [(False, [1, 2]), (True, [1, 2, 2])])
def test_children_that_cannot_be_among_the_best_are_not_scored_where_the_host_may_know(
    forbidden: bool, paths_asked: list[int]
) -> None:
    # Depth 1: 0.6, 0.4; depth 2: 0.3, 0.3, 0.2, 0.2. The three best are 0.6, 0.4 and 0.3: nothing below 0.3 is.
    logits, asked = torch.tensor([[[0.6, 0.4], [0.5, 0.5], [0.9, 0.1]]]).log(), []

    def branch(
        depth: int, parents: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        asked.append(parents.shape[1])
        return no_branch(depth, parents, states, columns)

    with waiting(forbidden):
        tree = build_tree(torch.tensor([5]), logits, tree_budget=3, tree_width=2, branch=branch)
    assert asked == paths_asked
    assert tree.log_probs[0].exp().tolist() == pytest.approx([1.0, 0.6, 0.4, 0.3])


def test_columns_are_renamed_to_the_tokens_they_stand_for() -> None:
    logits, anchors = torch.randn(2, 4, 6), torch.tensor([9, 0])
    token_ids = torch.tensor([4, 0, 7, 100, 99, 5])
    plain = build_tree(anchors, logits, tree_budget=30, tree_width=4)
    named = build_tree(anchors, logits, tree_budget=30, tree_width=4, token_ids=token_ids)
    assert named.token_ids[:, 1:].tolist() == token_ids[plain.token_ids[:, 1:]].tolist()
    assert named.token_ids[:, 0].tolist() == [9, 0]
    assert named.parents.tolist() == plain.parents.tolist()
    assert torch.equal(named.log_probs, plain.log_probs)


def test_the_most_probable_paths_are_taken_before_wider_or_deeper_ones() -> None:
    # Depth 1: 0.6, 0.4; depth 2: 0.9, 0.1. In order: 0.6, 0.54, 0.4, 0.36, 0.06, 0.04.
    logits = torch.tensor([[[0.6, 0.4], [0.1, 0.9]]]).log()
    tree = build_tree(torch.tensor([5]), logits, tree_budget=4, tree_width=2)
    assert tree.token_ids.tolist() == [[5, 0, 1, 1, 1]]
    assert tree.parents.tolist() == [[-1, 0, 1, 0, 3]]
    assert tree.depths.tolist() == [[0, 1, 2, 1, 2]]
    assert tree.log_probs.exp().tolist() == [pytest.approx([1.0, 0.6, 0.54, 0.4, 0.36])]


def test_the_temperature_changes_which_paths_are_the_best() -> None:
    # At temperature 1 the best path of depth 2 has 0.8 * 0.5 = 0.4 > 0.2. At temperature 4 the tokens of depth 1 have
    # 0.8 ** 0.25 : 0.2 ** 0.25 = 0.586 : 0.414, and the best path of depth 2 has 0.586 * 0.5 = 0.293 < 0.414.
    logits = torch.tensor([[[0.8, 0.2], [0.5, 0.5]]]).log()
    depths = {
        temperature: build_tree(
            torch.tensor([0]), logits, tree_budget=2, tree_width=2, temperature=temperature
        ).depths.tolist()
        for temperature in (1.0, 4.0)
    }
    assert depths == {1.0: [[0, 1, 2]], 4.0: [[0, 1, 1]]}


def test_width_1_is_the_chain_of_the_best_tokens() -> None:
    logits = torch.randn(2, 4, 30)
    tree = build_tree(torch.tensor([3, 4]), logits, tree_budget=10, tree_width=1)
    assert tree.token_ids[:, 1:].tolist() == logits.argmax(dim=-1).tolist()
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]] * 2


@pytest.mark.parametrize(("depth", "budget"), [(3, 0), (0, 7), (0, 0)])
def test_without_budget_or_depth_only_the_root_is_left(depth: int, budget: int) -> None:
    tree = build_tree(torch.tensor([7, 8]), torch.randn(2, depth, 5), tree_budget=budget, tree_width=3)
    assert tree.token_ids.tolist() == [[7], [8]]
    assert tree.max_depth == 0


def test_an_empty_batch_makes_an_empty_tree() -> None:
    tree = build_tree(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3, 9000), tree_budget=5, tree_width=2)
    assert tree.token_ids.shape == (0, 6)


@pytest.mark.parametrize("vocabulary", [8191, 8192, 8255, 20_011, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 16, 200])
def test_the_best_tokens_of_a_large_vocabulary_are_found(vocabulary: int, dtype: torch.dtype, width: int) -> None:
    # The halves of one tensor, as a head that drafts more than it needs hands them over; bfloat16 makes many ties.
    logits = (torch.randn(2, 3, 2 * vocabulary) * 3).to(dtype)[:, 1:, :vocabulary]
    tree = build_tree(torch.tensor([0, 1]), logits[:, :1], tree_budget=width, tree_width=width)
    expected = logits[:, 0].double().log_softmax(dim=-1)
    torch.testing.assert_close(
        tree.log_probs[:, 1:].double(), expected.sort(descending=True).values[:, :width], rtol=0, atol=TOLERANCE
    )
    torch.testing.assert_close(
        tree.log_probs[:, 1:].double(), expected.gather(1, tree.token_ids[:, 1:]), rtol=0, atol=TOLERANCE
    )
    assert all(len(set(tokens)) == width for tokens in tree.token_ids[:, 1:].tolist())


@pytest.mark.parametrize("place", [0, 63, 64, 9_999, 19_998, 19_999])
def test_the_only_allowed_token_of_a_large_vocabulary_is_certain(place: int) -> None:
    logits = torch.full((1, 2, 20_000), -math.inf)
    logits[..., place] = -3.0
    tree = build_tree(torch.tensor([0]), logits, tree_budget=6, tree_width=4)
    assert tree.token_ids[0, :3].tolist() == [0, place, place]
    assert tree.log_probs[0].tolist() == [0.0, 0.0, 0.0, *[-math.inf] * 4]


def test_half_precision_logits_are_summed_in_float32() -> None:
    # 70 000 equal tokens: their number is beyond float16, and bfloat16 would stop counting at 256.
    for dtype in (torch.float16, torch.bfloat16):
        tree = build_tree(torch.tensor([0]), torch.zeros(1, 1, 70_000, dtype=dtype), tree_budget=3, tree_width=3)
        assert tree.log_probs[0, 1:].tolist() == pytest.approx([-math.log(70_000)] * 3, abs=1e-5)


def test_a_depth_without_any_allowed_token_stands_last() -> None:
    logits = torch.zeros(1, 2, 3)
    logits[:, 1] = -math.inf
    tree = build_tree(torch.tensor([0]), logits, tree_budget=7, tree_width=3)
    assert tree.depths.tolist() == [[0, 1, 1, 1, 2, 2, 2, 2]]
    assert tree.log_probs[0].tolist() == pytest.approx([0.0, *[-math.log(3)] * 3, *[-math.inf] * 4])


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("vocabulary", [6, 9000])
def test_a_head_gone_wrong_still_makes_a_tree(number: float, vocabulary: int) -> None:
    logits = torch.zeros(2, 3, vocabulary)
    logits[0, 1, 2] = number
    tree = build_tree(torch.tensor([0, 0]), logits, tree_budget=50, tree_width=4)
    for row in range(2):
        paths_of(tree, row)
    first = tree.log_probs[0].tolist()
    assert first == sorted(first, reverse=True)
    assert [log_prob for log_prob, depth in zip(first, tree.depths[0].tolist(), strict=True) if depth > 1] == [
        -math.inf
    ] * 46
    assert tree.log_probs[1].isfinite().all()


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures_leave_numbers(temperature: float) -> None:
    tree = build_tree(torch.tensor([0]), torch.randn(1, 3, 9), tree_budget=30, tree_width=3, temperature=temperature)
    assert not tree.log_probs.isnan().any()
    paths_of(tree, 0)


def test_among_equally_probable_nodes_the_shallower_stand_first() -> None:
    # Every token is certain: all paths of the only allowed tokens have probability 1.
    logits = torch.full((1, 4, 9), -math.inf)
    logits[..., 2] = 0.0
    tree = build_tree(torch.tensor([0]), logits, tree_budget=4, tree_width=3)
    assert tree.depths.tolist() == [[0, 1, 2, 3, 4]]
    assert tree.log_probs.tolist() == [[0.0] * 5]


@pytest.mark.parametrize("forbidden", [False, True])
@pytest.mark.parametrize("branched", [False, True])
def test_a_tree_is_the_prefix_of_a_larger_one_though_many_paths_are_equally_probable(
    forbidden: bool, branched: bool
) -> None:
    logits, anchors = torch.randint(0, 3, (2, 5, 30)).float(), torch.tensor([3, 4])
    branch = no_branch if branched else None
    with waiting(forbidden):
        large = build_tree(anchors, logits, tree_budget=200, tree_width=6, branch=branch)
        for budget in (6, 17, 60, 199):
            tree, prefix = (
                build_tree(anchors, logits, tree_budget=budget, tree_width=6, branch=branch),
                large.prefix(budget),
            )
            assert torch.equal(tree.token_ids, prefix.token_ids)
            assert torch.equal(tree.parents, prefix.parents)


def no_branch(
    depth: int, parents: torch.Tensor, states: torch.Tensor | None, tokens: torch.Tensor
) -> tuple[torch.Tensor, None]:
    return torch.zeros(*parents.shape, tokens.shape[1], device=parents.device), None


def test_a_branch_term_of_0_over_all_tokens_changes_nothing() -> None:
    logits, anchors = torch.randn(2, 5, 40), torch.tensor([1, 2])
    plain = build_tree(anchors, logits, tree_budget=30, tree_width=5)
    branched = build_tree(anchors, logits, tree_budget=30, tree_width=5, branch=no_branch)
    assert branched.token_ids.tolist() == plain.token_ids.tolist()
    assert branched.parents.tolist() == plain.parents.tolist()
    torch.testing.assert_close(branched.log_probs, plain.log_probs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("branch", [None, no_branch])
def test_building_does_not_wait_for_the_device(branch: Any, no_host_sync: Any) -> None:
    anchors, logits = torch.tensor([1, 2]), torch.randn(2, 4, 9000)
    with waiting(forbidden=True), no_host_sync:
        build_tree(anchors, logits, tree_budget=20, tree_width=4, branch=branch)
    # A tensor without data shows it too: there is nothing to wait for.
    tree = build_tree(anchors.to("meta"), logits.to("meta"), tree_budget=20, tree_width=4, branch=branch)
    assert (tree.token_ids.shape, tree.device.type) == ((2, 21), "meta")


def test_building_with_states_and_a_draft_vocabulary_does_not_wait_for_the_device(no_host_sync: Any) -> None:
    anchors, logits, token_ids = torch.tensor([1, 2]), torch.randn(2, 4, 9000), torch.arange(1, 9001)
    recurrence = Recurrence(4, 9001, 9000, torch.Generator().manual_seed(0), scale=1.0)
    with waiting(forbidden=True), no_host_sync:
        build_tree(anchors, logits, tree_budget=20, tree_width=4, branch=recurrence, token_ids=token_ids)
    tree = build_tree(
        anchors.to("meta"),
        logits.to("meta"),
        tree_budget=20,
        tree_width=4,
        branch=recurrence.to("meta"),
        token_ids=token_ids.to("meta"),
    )
    assert (tree.token_ids.shape, tree.device.type) == ((2, 21), "meta")


def test_a_tree_carries_no_gradient() -> None:
    logits = torch.randn(1, 3, 9, requires_grad=True)
    assert not build_tree(torch.tensor([0]), logits, tree_budget=5, tree_width=2).log_probs.requires_grad


def test_the_logits_are_left_as_they_are() -> None:
    logits = torch.randn(1, 3, 9)
    before = logits.clone()
    build_tree(torch.tensor([0]), logits, tree_budget=5, tree_width=2, temperature=0.5)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"anchor_ids": torch.tensor([[1]])},
            r"`anchor_ids` must be a torch.LongTensor of shape \(batch,\), got .* \(1, 1\)",
        ),
        ({"anchor_ids": torch.tensor([1.0])}, r"`anchor_ids` must be a torch.LongTensor .* got torch.float32"),
        ({"anchor_ids": torch.tensor([1, 2])}, r"must have the same batch size and device, got 2 on cpu and 1 on cpu"),
        ({"anchor_ids": torch.tensor([1], device="meta")}, r"same batch size and device, got 1 on meta and 1 on cpu"),
        ({"draft_logits": torch.zeros(1, 9)}, r"`draft_logits` must be a floating tensor of shape .* got .* \(1, 9\)"),
        (
            {"draft_logits": torch.zeros(1, 3, 9, dtype=torch.int64)},
            r"`draft_logits` must be a floating .* got torch.int64",
        ),
        ({"draft_logits": torch.zeros(1, 3, 0)}, r"the vocabulary at least 1, got .* \(1, 3, 0\)"),
        ({"tree_budget": -1}, r"`tree_budget` must be an int of at least 0, got -1"),
        ({"tree_budget": "auto"}, r"`tree_budget` must be an int of at least 0, got 'auto'"),
        ({"tree_budget": True}, r"`tree_budget` must be an int of at least 0, got True"),
        ({"tree_width": 0}, r"`tree_width` must be an int of at least 1, got 0"),
        ({"tree_width": 2.0}, r"`tree_width` must be an int of at least 1, got 2.0"),
        ({"branch_candidates": 0}, r"`branch_candidates` must be an int of at least 1, got 0"),
        ({"temperature": 0.0}, r"`temperature` must be positive and finite, got 0.0"),
        ({"temperature": -1.0}, r"`temperature` must be positive and finite, got -1.0"),
        ({"temperature": math.inf}, r"`temperature` must be positive and finite, got inf"),
        ({"temperature": math.nan}, r"`temperature` must be positive and finite, got nan"),
        ({"token_ids": torch.arange(8)}, r"`token_ids` must be a torch.LongTensor .* here \(9,\), .* got .* \(8,\) on"),
        ({"token_ids": torch.arange(9.0)}, r"`token_ids` must be a torch.LongTensor .* got torch.float32 of shape"),
        ({"token_ids": torch.arange(9, device="meta")}, r"on the device of `draft_logits`, got .* on meta: pass the"),
        (
            {"branch": lambda depth, parents, states, tokens: (torch.zeros(1, 1, 2), None)},
            r"`branch` must return scores of shape \(batch, paths, candidates\), here \(1, 1, 9\), got \(1, 1, 2\)",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "anchor_ids": torch.tensor([1]),
        "draft_logits": torch.zeros(1, 3, 9),
        "tree_budget": 5,
        "tree_width": 2,
    }
    with pytest.raises(ValueError, match=message):
        build_tree(**{**arguments, **changes})
