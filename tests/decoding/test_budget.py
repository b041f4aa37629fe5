"""Choosing how many nodes to verify: calibration, the choice itself, and whole generations with it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from jetspec_hf import TokenTree
from jetspec_hf.decoding.budget import BEST, MEASURING, PAUSED, PLAIN, AutoBudget, Experience
from jetspec_hf.decoding.calibration import Calibration
from jetspec_hf.decoding.step_costs import LearnedCosts, StepCosts
from support.oracle import OracleHead
from support.references import greedy_reference

pytestmark = pytest.mark.auto_budget

FREE = StepCosts(0.1, {0: 1.0, 256: 1.001})  # nodes cost nothing
DEAR = StepCosts(0.1, {0: 1.0, 1: 3.0, 2: 5.0})  # two plain steps each


def tree(probabilities: list[float], depths: list[int] | None = None) -> TokenTree:
    """One row's tree below its root; a chain unless depths are given."""
    depths = depths or list(range(1, len(probabilities) + 1))
    return TokenTree(
        token_ids=torch.arange(len(depths) + 1)[None],
        parents=torch.tensor([[-1, *(depth - 1 for depth in depths)]]),
        depths=torch.tensor([[0, *depths]]),
        log_probs=torch.tensor([[0.0, *map(math.log, probabilities)]]),
        depth_limit=max(depths),
    )


def step(budget: AutoBudget, drafted: TokenTree, accepted: list[int], seconds: dict[str, float] | None = None) -> Any:
    """A step of the loop: what was decided in it."""
    decision = budget.before_draft(None)
    if decision.tree_budget:
        decision = budget.after_build(drafted.prefix(decision.tree_budget), [0])
    path = [0, *(node for node in accepted if node <= decision.tree_budget)]
    budget.learn([path], [0], seconds or {})
    return decision


class TestCalibration:
    def test_a_head_is_believed_at_first(self) -> None:
        chances = Calibration().expected([math.log(0.5), math.log(0.25), math.log(0.25)], [1, 2, 1], [1, 2, 3])
        assert [[pytest.approx(c) for c in row] for row in ([0.5, 0.0], [0.5, 0.25], [0.75, 0.25])] == chances

    def test_chances_are_probabilities_and_fall_with_depth(self) -> None:
        calibration = Calibration()
        for _ in range(50):
            calibration.fade()
            calibration.learn([math.log(0.3)], [0])  # promised 0.3, always accepted
        [[first, second]] = calibration.expected([math.log(0.9), math.log(0.3)], [1, 2], [2])
        assert 1.0 >= first >= second > 0.3

    @pytest.mark.parametrize(("promised", "kept"), [(0.9, 0.3), (0.3, 0.6), (0.1, 0.1)])
    def test_promises_are_worth_what_was_kept_of_them(self, promised: float, kept: float) -> None:
        calibration, draws = Calibration(), torch.Generator().manual_seed(0)
        for _ in range(400):
            calibration.fade()
            calibration.learn([math.log(promised)], [0] if torch.rand((), generator=draws) < kept else [])
        [[chance]] = calibration.expected([math.log(promised)], [1], [1])
        assert chance == pytest.approx(kept, abs=0.2)

    def test_a_node_of_probability_zero_is_worth_nothing(self) -> None:
        calibration = Calibration()
        calibration.learn([-math.inf], [])
        assert calibration.expected([-math.inf], [1], [1]) == [[0.0]]


class TestChoice:
    def test_free_nodes_are_all_verified(self) -> None:
        decision = step(AutoBudget(Experience(FREE)), tree([0.9, 0.8, 0.7, 0.6, 0.5]), [1])
        assert (decision.tree_budget, decision.reason) == (5, BEST)
        assert decision.expected_tokens == pytest.approx(4.5)
        assert decision.expected_speedup == pytest.approx(4.5 / 1.1, rel=1e-3)

    def test_no_node_is_verified_that_costs_more_than_it_brings(self) -> None:
        decision = step(AutoBudget(Experience(DEAR)), tree([0.9, 0.8]), [1, 2])
        assert (decision.tree_budget, decision.reason) == (0, PLAIN)

    def test_the_choice_is_the_best_of_all_sizes(self) -> None:
        # each node costs 0.2 plain steps: worth it while its chance is above that, at the rate of plain decoding
        costs = StepCosts(0.0, {0: 1.0, 10: 3.0})
        decision = step(AutoBudget(Experience(costs)), tree([0.5, 0.3, 0.15, 0.1], [1, 1, 1, 1]), [1])
        assert decision.tree_budget == 2

    def test_while_drafting_does_not_pay_it_pauses_longer_and_longer(self) -> None:
        budget, hopeless = AutoBudget(Experience(DEAR)), tree([0.5])
        reasons = [step(budget, hopeless, []).reason for _ in range(300)]
        drafts = [index for index, reason in enumerate(reasons) if reason != PAUSED]
        pauses = [later - earlier - 1 for earlier, later in pairwise(drafts)]
        # a draft costs a tenth of a plain step, so that 7 steps are the fewest over which it costs 1.5 %
        assert pauses[:5] == [7, 8, 16, 32, 64]
        assert set(pauses[5:]) == {64}

    def test_a_dear_draft_that_failed_waits_for_long_also_in_the_next_generation(self) -> None:
        known, hopeless = Experience(StepCosts(3.0, {0: 1.0, 1: 3.0})), tree([0.5])
        assert step(AutoBudget(known), hopeless, []).reason == PLAIN
        assert known.paused == 200
        reasons = [step(AutoBudget(known), hopeless, []).reason for _ in range(200)]
        assert set(reasons) == {PAUSED}
        assert step(AutoBudget(known), hopeless, []).reason == PLAIN

    def test_a_text_that_gets_easy_ends_the_pauses(self) -> None:
        costs = StepCosts(0.1, {0: 1.0, 10: 2.0})
        budget, hard, easy = AutoBudget(Experience(costs)), tree([1e-4]), tree([0.9, 0.8, 0.7])
        for _ in range(20):
            step(budget, hard, [])
        reasons = [step(budget, easy, [1, 2, 3]).reason for _ in range(40)]
        first = reasons.index(BEST)
        assert set(reasons[first:]) == {BEST}

    def test_a_head_that_promises_too_much_is_found_out(self) -> None:
        costs = StepCosts(0.1, {0: 1.0, 1: 1.3})
        budget, boasting = AutoBudget(Experience(costs)), tree([0.99])
        decisions = [step(budget, boasting, []) for _ in range(200)]
        assert decisions[0].tree_budget == 1
        assert sum(decision.tree_budget for decision in decisions[100:]) <= 4  # it gets another chance now and then

    def test_a_bad_step_does_not_pause_what_pays(self) -> None:
        costs = StepCosts(0.1, {0: 1.0, 10: 1.5})
        budget, easy, hard = AutoBudget(Experience(costs)), tree([0.9, 0.8]), tree([1e-4])
        for _ in range(20):
            step(budget, easy, [1, 2])
        assert step(budget, hard, []).tree_budget == 0
        assert step(budget, easy, [1, 2]).reason == BEST

    def test_a_new_text_starts_from_what_drafting_was_worth_before(self) -> None:
        known, easy = Experience(StepCosts(0.1, {0: 1.0, 10: 1.5})), tree([0.9, 0.8])
        for _ in range(20):
            step(AutoBudget(known), easy, [1, 2])
        before = known.speedup
        assert step(AutoBudget(known), tree([1e-4]), []).tree_budget == 0
        assert before > known.speedup > 1.2  # half of it is the bad step
        assert known.paused == 0

    def test_no_tree_is_built_far_above_those_chosen_lately(self) -> None:
        costs = StepCosts(0.0, {0: 1.0, 10: 3.0})
        budget, drafted = AutoBudget(Experience(costs)), tree([0.5, 0.3, 0.15, 0.1], [1, 1, 1, 1])
        assert budget.before_draft(None).tree_budget == 256
        assert budget.after_build(drafted, [0]).tree_budget == 2
        assert budget.before_draft(None).tree_budget == 8

    @pytest.mark.parametrize("static", [False, True])
    def test_a_text_that_gets_easy_is_drafted_again_with_any_ladder(self, static: bool) -> None:
        costs = StepCosts(0.1, {0: 1.0, 10: 2.0})
        budget = AutoBudget(Experience(costs), static)
        assert step(budget, tree([1e-4]), []).reason == PLAIN
        reasons = [step(budget, tree([0.9, 0.8, 0.7]), [1, 2, 3]).reason for _ in range(40)]
        assert BEST in reasons

    def test_a_static_cache_limits_the_tree(self) -> None:
        budget = AutoBudget(Experience(FREE), static=True)
        assert budget.before_draft(None).tree_budget == 128
        assert budget.before_draft(20).tree_budget == 8


class TestLearning:
    @pytest.fixture(autouse=True)
    def _made_up_costs(self) -> None:
        """These tests say themselves what a step takes."""

    @staticmethod
    def run(
        steps: int,
        per_node: float,
        probabilities: list[float],
        accepted: list[int],
        first_node: float = 0.0,
        slow_plain: int | None = None,
        slow_draft: int | None = None,
    ) -> list[Any]:
        """Decisions on a machine whose plain step takes 1 s; the first step of each size takes three times as long.

        Of plain steps and of drafts one, by its number, may take a hundred times as long.
        """
        budget, drafted, seen = AutoBudget(Experience(LearnedCosts())), tree(probabilities), set()
        plain_steps = drafts = 0
        decisions = []
        for _ in range(steps):
            decision = budget.before_draft(None)
            seconds = {}
            if decision.tree_budget:
                decision = budget.after_build(drafted.prefix(decision.tree_budget), [0])
                drafts += 1
                seconds = {"draft": 100.0 if drafts == slow_draft else 0.1, "build": 0.01}
            nodes = decision.tree_budget
            seconds["verify"] = (1.0 + first_node * bool(nodes) + per_node * nodes) * (1.0 if nodes in seen else 3.0)
            seen.add(nodes)
            plain_steps += nodes == 0
            if nodes == 0 and plain_steps == slow_plain:
                seconds["verify"] = 100.0
            budget.learn([[0, *(node for node in accepted if node <= nodes)]], [0], seconds)
            decisions.append(decision)
        return decisions

    def test_it_starts_small_and_measures_a_plain_step_before_it_grows(self) -> None:
        decisions = self.run(30, 0.001, [0.95**depth for depth in range(1, 41)], list(range(1, 41)))
        sizes = [decision.tree_budget for decision in decisions]
        assert 0 < sizes[0] <= 4
        assert [decision.reason for decision in decisions[1:4]] == [MEASURING] * 3
        assert sizes[-1] == 40

    def test_a_first_node_that_is_dear_does_not_hide_that_the_others_are_cheap(self) -> None:
        decisions = self.run(60, 0.02, [0.95**depth for depth in range(1, 41)], list(range(1, 41)), first_node=1.0)
        assert decisions[-1].tree_budget >= 32

    def test_where_nodes_are_dear_it_settles_on_plain_steps(self) -> None:
        decisions = self.run(300, 1.0, [0.7, 0.5, 0.3, 0.2], [1])
        assert sum(decision.tree_budget > 0 for decision in decisions) <= 4
        assert {decision.reason for decision in decisions[-64:]} <= {PAUSED, PLAIN}

    def test_in_between_it_takes_the_nodes_that_pay(self) -> None:
        # a node costs 0.25 plain steps, and the rate is about 1.4 tokens a step: chances above 0.35 pay
        decisions = self.run(200, 0.25, [0.8, 0.6, 0.1, 0.05], [1, 2])
        assert {decision.tree_budget for decision in decisions[-20:] if decision.reason == BEST} == {2}

    @pytest.mark.parametrize("slow", [{"slow_plain": number} for number in (1, 2, 3)])
    def test_one_slow_plain_step_does_not_make_dear_trees_look_cheap(self, slow: dict[str, int]) -> None:
        decisions = self.run(300, 1.0, [0.7, 0.5, 0.3, 0.2], [1], **slow)
        assert sum(decision.tree_budget > 0 for decision in decisions) <= 4

    @pytest.mark.parametrize("slow", [{"slow_draft": number} for number in (1, 2, 3)])
    def test_one_slow_draft_does_not_end_drafting(self, slow: dict[str, int]) -> None:
        decisions = self.run(200, 0.001, [0.95**depth for depth in range(1, 41)], list(range(1, 41)), **slow)
        assert sum(decision.tree_budget == 40 for decision in decisions) > 100


class TestGenerations:
    def test_a_saved_table_makes_a_run_repeat_itself(self, target: PreTrainedModel, head: OracleHead) -> None:
        reference = greedy_reference(target, (7,), 40)
        head.generation_config.step_costs = {"draft": 0.1, "verify": {"0": 1.0, "16": 2.0, "64": 8.0}}
        sizes = []
        for _ in range(2):
            head.know(reference.texts, accuracy=0.7, seed=3)
            output = target.generate(**reference.inputs, assistant_model=head, max_new_tokens=40, do_sample=False)
            assert torch.equal(output, reference.sequences)
            sizes.append(head.last_acceptance.tree_sizes)
        assert sizes[0] == sizes[1]
        assert len(set(sizes[0])) > 1

    def test_the_table_travels_with_the_head(self, head: OracleHead, tmp_path: Any) -> None:
        table = {"draft": 0.1, "verify": {"0": 1.0, "16": 2.0}}
        head.generation_config.step_costs = table
        head.save_pretrained(tmp_path)
        assert OracleHead.from_pretrained(tmp_path).generation_config.step_costs == table

    def test_a_malformed_table_is_refused_before_anything_happens(
        self, target: PreTrainedModel, head: OracleHead
    ) -> None:
        head.generation_config.step_costs = {"draft": 0.1}
        with pytest.raises(ValueError, match="`step_costs` must be a dict"):
            target.generate(torch.tensor([[1, 2]]), assistant_model=head, max_new_tokens=4, do_sample=False)
        assert head.last_acceptance is None

    def test_what_was_learned_stays_with_the_head(self, target: PreTrainedModel, head: OracleHead) -> None:
        reference = greedy_reference(target, (7,), 24)
        head.know(reference.texts)
        for _ in range(2):
            target.generate(**reference.inputs, assistant_model=head, max_new_tokens=24, do_sample=False)
        assert MEASURING not in head.last_acceptance.reasons
        [experience] = head.experience.values()
        assert isinstance(experience, Experience)
        assert experience.costs.steps > head.last_acceptance.steps

    def test_each_way_of_decoding_has_its_own_experience(self, target: PreTrainedModel, head: OracleHead) -> None:
        inputs = greedy_reference(target, (7,), 24)
        head.know(inputs.texts, must_match=False)
        ways: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.2}, {"do_sample": True, "top_k": 0}]
        for way in [*ways, *ways]:
            target.generate(**inputs.inputs, assistant_model=head, max_new_tokens=8, **{"do_sample": False, **way})
        assert len(head.experience) == 3

    def test_ranks_that_share_a_target_choose_without_the_clock(
        self, target: PreTrainedModel, head: OracleHead, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(type(target), "tp_size", 2)
        reference = greedy_reference(target, (7,), 24)
        head.know(reference.texts)
        target.generate(**reference.inputs, assistant_model=head, max_new_tokens=24, do_sample=False)
        assert head.experience == {}
        assert BEST in head.last_acceptance.reasons
