"""The statistics of hand-worked steps."""

from __future__ import annotations

import torch

from jetspec_hf import AcceptanceStats, TokenTree
from jetspec_hf.decoding.budget import BudgetDecision


def tree(depths: list[list[int]]) -> TokenTree:
    shape = torch.tensor(depths)
    return TokenTree(
        token_ids=torch.zeros_like(shape),
        parents=torch.full_like(shape, -1),
        depths=shape,
        log_probs=torch.zeros(shape.shape),
        depth_limit=3,
    )


def record(stats: AcceptanceStats, depths: list[list[int]], paths: list[list[int]], rows: list[int]) -> None:
    stats.record(tree(depths), depths, paths, rows, BudgetDecision(len(depths[0]) - 1, "fixed"))


def test_one_row_over_three_steps() -> None:
    stats = AcceptanceStats.of_batch(1)
    record(stats, [[0, 1, 1, 2]], [[0, 1, 3]], rows=[0])
    record(stats, [[0, 1, 2, 3]], [[0]], rows=[0])
    record(stats, [[0]], [[0]], rows=[0])
    assert stats.steps == 3
    assert stats.accepted_lengths == [[3, 1, 1]]
    assert stats.tree_sizes == [3, 3, 0]
    assert stats.mean_acceptance_length == 5 / 3
    assert stats.acceptance_by_depth == [1 / 2, 1 / 2, 0.0]
    assert stats.last_path == [[0]]


def test_rows_that_have_finished_do_not_count() -> None:
    stats = AcceptanceStats.of_batch(2)
    record(stats, [[0, 1], [0, 1]], [[0, 1], [0]], rows=[0, 1])
    record(stats, [[0, 1], [0, 1]], [[0, 1], []], rows=[0])
    assert stats.accepted_lengths == [[2, 2], [1]]
    assert stats.mean_acceptance_length == 5 / 3
    assert stats.acceptance_by_depth == [2 / 3]


def test_nothing_recorded_is_zero() -> None:
    stats = AcceptanceStats.of_batch(1)
    assert stats.mean_acceptance_length == 0.0
    assert stats.acceptance_by_depth == []
    assert set(stats.seconds) == {"prefill", "draft", "build", "verify", "accept", "commit"}


def test_seconds_are_summed_by_phase() -> None:
    stats = AcceptanceStats.of_batch(1)
    stats.step_seconds = [{"draft": 1.0, "verify": 2.0}, {"verify": 3.0}]
    assert stats.seconds["draft"] == 1.0
    assert stats.seconds["verify"] == 5.0
    assert stats.seconds["build"] == 0.0
