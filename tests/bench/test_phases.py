"""The tables of the phase benchmark, from hand-made timings."""

import pytest

from jetspec_hf.bench.phases import (
    Measurement,
    agreement,
    early_and_late,
    format_table,
    growth_table,
    median_per_step,
    own_work_share,
    phase_table,
)


def measurement(seconds: float, verify: float) -> Measurement:
    """Two steps and ten tokens; 1 s of prefill and, per step, 1 s draft, 0.25 s each for build, accept and commit."""
    step = {"draft": 1.0, "build": 0.25, "verify": verify, "accept": 0.25, "commit": 0.25}
    sums = {"prefill": 1.0, **{phase: 2 * value for phase, value in step.items()}}
    return Measurement(tuple(range(10)), seconds, sums, (step, step), 5.0)


def test_what_no_phase_claims_is_the_rest() -> None:
    per_step = measurement(seconds=11.0, verify=3.0).per_step()
    assert per_step == {
        "draft": 1.0, "build": 0.25, "verify": 3.0, "accept": 0.25, "commit": 0.25, "rest": 0.25, "step": 5.0,
    }  # fmt: skip


def test_medians_are_taken_entry_by_entry() -> None:
    runs = [measurement(11.0, 3.0), measurement(21.0, 1.0), measurement(13.0, 2.0)]
    per_step = median_per_step(runs)
    assert per_step["verify"] == 2.0
    assert per_step["step"] == 6.0


def test_own_work_is_everything_besides_the_two_forwards() -> None:
    assert own_work_share({"draft": 1.0, "verify": 3.0, "step": 5.0}) == pytest.approx(0.2)


def test_quarters_compare_the_first_steps_with_the_last() -> None:
    steps = [{"draft": 1.0, "build": 0.5, "verify": float(i), "accept": 0.25, "commit": 0.25 * i} for i in range(8)]
    quarters = early_and_late(steps)
    assert quarters["verify"] == (0.5, 6.5)
    assert quarters["own work"] == (0.875, 2.375)


def test_fewer_than_four_steps_cannot_be_quartered() -> None:
    with pytest.raises(ValueError, match=r"`step_seconds` must have at least 4 steps to be quartered, got 3\."):
        early_and_late([dict.fromkeys(("draft", "build", "verify", "accept", "commit"), 1.0)] * 3)


def test_tokens_per_second_count_the_prefill() -> None:
    assert measurement(seconds=5.0, verify=0.5).tokens_per_second == 2.0


def test_tables_are_aligned_markdown() -> None:
    assert format_table(("phase", "ms"), [("draft", "1.00"), ("verify", "12.50")]) == (
        "| phase  |    ms |\n"
        "| :----- | ----: |\n"
        "| draft  |  1.00 |\n"
        "| verify | 12.50 |"
    )  # fmt: skip


def test_the_phase_table_ends_with_the_whole_step() -> None:
    last = phase_table(measurement(11.0, 3.0).per_step()).splitlines()[-1]
    assert last.split() == ["|", "step", "|", "5000.00", "|", "100.0", "%", "|"]


def test_a_phase_that_took_no_time_has_no_growth() -> None:
    assert growth_table({"commit": (0.0, 0.0), "build": (0.002, 0.003)}).splitlines()[2:] == [
        "| commit |              0.00 |             0.00 |            - |",
        "| build  |              2.00 |             3.00 |         1.50 |",
    ]


def test_the_agreement_counts_the_common_beginning() -> None:
    assert agreement((5, 6, 7), (5, 6, 7)) == "same tokens as plain generation: yes"
    assert agreement((5, 6, 7), (5, 9, 7)).startswith("same tokens as plain generation: the first 1 of 3 ")


def test_a_step_without_a_draft_took_no_time_for_it() -> None:
    steps = [{"verify": 1.0, "accept": 0.5, "commit": 0.5}] * 4
    assert early_and_late(steps)["draft"] == (0.0, 0.0)
