"""What a step is taken to cost: tables, and what is learned from steps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jetspec_hf.decoding.step_costs import LADDER, LearnedCosts, StepCosts


@pytest.fixture(autouse=True)
def _made_up_costs() -> None:
    """These tests say themselves what is observed."""


def learned(*observations: tuple[int, float]) -> LearnedCosts:
    costs = LearnedCosts()
    for nodes, seconds in observations:
        costs.observe_verify(nodes, seconds)
    return costs


def test_a_table_is_read_along_straight_lines() -> None:
    costs = StepCosts(0.5, {0: 1.0, 4: 2.0, 8: 6.0})
    assert [costs.verify(nodes) for nodes in (0, 2, 4, 5, 8)] == [1.0, 1.5, 2.0, 3.0, 6.0]
    assert costs.verify(16) == 6.0 + 8 * (6.0 - 2.0) / 4


def test_a_table_of_a_plain_step_alone_says_that_nodes_are_free() -> None:
    assert StepCosts(0.0, {0: 1.0}).verify(9) == 1.0


def test_in_a_table_that_falls_fewer_nodes_cost_what_more_do_and_none_beyond_its_end_are_free() -> None:
    costs = StepCosts(0.0, {0: 1.0, 8: 4.0, 64: 2.0})
    assert costs.verify(8) == costs.verify(64) == costs.verify(256) == 2.0


def test_a_table_survives_json() -> None:
    costs = StepCosts(0.01, {0: 0.05, 8: 0.07})
    assert StepCosts.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([], r"must be a dict such as"),
        ({"draft": 0.1}, r"must be a dict such as .* got \{'draft': 0.1\}"),
        ({"draft": 0.1, "verify": {"0": 1.0}, "build": 1.0}, r"must be a dict such as"),
        ({"draft": 0.1, "verify": {"many": 1.0}}, r"numbers of nodes in `verify`, got \['many'\]"),
        ({"draft": 0.1, "verify": {"0": 1.0, "00": 2.0}}, r"different numbers of nodes in `verify`, got \['0', '00'\]"),
        ({"draft": 0.1, "verify": {0: 1.0, 8.9: 2.0}}, r"numbers of nodes in `verify`, got \[0, 8.9\]"),
        ({"draft": 1e308, "verify": {"0": 1.0}}, r"seconds from 0 to 1e\+09 for draft, got 1e\+308"),
        ({"draft": 1.0, "verify": {"0": 5e-324}}, r"seconds from 1e-09 to 1e\+09 for verify\[0\], got 5e-324"),
        ({"draft": 0.1, "verify": {"4": 1.0}}, r"0 \(a plain step\) among them, got \[4\]"),
        ({"draft": 0.1, "verify": {"0": 1.0, "-1": 1.0}}, r"got \[-1, 0\]"),
        ({"draft": 0.1, "verify": {"0": 0}}, r"for verify\[0\], got 0\."),
        ({"draft": float("nan"), "verify": {"0": 1.0}}, r"for draft, got nan"),
        ({"draft": 10**400, "verify": {"0": 1.0}}, r"`step_costs` must hold seconds"),
        ({"draft": "0.1", "verify": {"0": 1.0}}, r"for draft, got '0.1'"),
        ({"draft": 0.1, "verify": {"0": True}}, r"for verify\[0\], got True"),
    ],
)
def test_a_malformed_table_is_refused_by_name(values: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        StepCosts.from_dict(values)


def test_before_anything_is_measured_costs_are_counted_in_plain_steps() -> None:
    costs = LearnedCosts()
    assert costs.verify(0) == 1.0
    assert [costs.verify(nodes) for nodes in LADDER] == sorted(costs.verify(nodes) for nodes in LADDER)
    assert 0 < costs.draft < 1


def test_the_first_observation_of_a_size_does_not_count_once_there_is_another() -> None:
    assert learned((0, 50.0)).verify(0) == 50.0
    assert learned((0, 50.0), (0, 1.0)).verify(0) == 1.0


def test_the_median_forgives_an_outlier() -> None:
    assert learned((0, 9.0), (0, 1.0), (0, 40.0), (0, 1.5)).verify(0) == 1.5


def test_a_smaller_tree_never_costs_more() -> None:
    costs = learned(*[(0, 1.0)] * 3, *[(4, 3.0)] * 2, *[(8, 2.0)] * 4)
    assert costs.verify(4) == costs.verify(8) == 2.0


def test_a_busy_minute_is_over_once_one_size_has_been_seen_again() -> None:
    costs = learned(*[(size, 50.0) for size in (0, 4, 8) for _ in range(9)], *[(8, 2.0)] * 5)
    assert [costs.verify(size) for size in (0, 4, 8)] == [2.0, 2.0, 2.0]


def test_of_two_observations_the_lower_counts() -> None:
    assert learned((0, 1.0), (0, 99.0), (0, 1.5)).verify(0) == 1.5


def test_beyond_the_only_measured_tree_nodes_are_hoped_to_be_cheap() -> None:
    costs = learned(*[(0, 1.0)] * 2, *[(8, 3.0)] * 2)
    assert costs.verify(4) == 2.0
    assert 3.0 < costs.verify(16) < 3.5
    assert costs.largest_measured == 8


def test_beyond_two_measured_trees_their_line_goes_on() -> None:
    costs = learned(*[(0, 1.0)] * 2, *[(4, 2.0)] * 2, *[(8, 2.2)] * 2)
    assert costs.verify(16) == pytest.approx(2.6)


def test_a_size_that_is_not_seen_for_long_is_forgotten_but_a_plain_step_never() -> None:
    costs = learned(*[(0, 1.0)] * 2, *[(4, 100.0)] * 2, *[(8, 2.0)] * (LearnedCosts.REMEMBERED + 2))
    assert costs.verify(4) == 1.5
    assert costs.verify(0) == 1.0
    assert costs.plain_is_sure(LearnedCosts.REMEMBERED) is False


def test_plain_steps_are_sure_as_long_as_two_are_recent() -> None:
    costs = learned((0, 1.0), (0, 1.0))
    assert not costs.plain_is_sure(10)
    costs.observe_verify(0, 1.0)
    assert costs.plain_is_sure(10)
    for _ in range(10):
        costs.observe_verify(8, 2.0)
    assert not costs.plain_is_sure(10)
    assert costs.plain_is_sure(11)


def test_the_first_draft_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the clock's times, not those made up for other tests
    costs = LearnedCosts()
    unknown = costs.draft
    costs.observe_draft(9.0)
    assert costs.draft == unknown
    costs.observe_draft(0.1)
    assert costs.draft == 0.1
