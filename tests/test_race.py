"""Races: how often each setting is measured, and which settings drop out."""

from __future__ import annotations

import math
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_ext.tuner.race import STAGES, race

Taken = dict[int, list[float]]


def of_this_rank(taken: Taken) -> Taken:
    return taken


def test_most_rounds_go_to_the_settings_that_may_be_fastest() -> None:
    runs: Counter[int] = Counter()

    def run(setting: int) -> list[float]:
        runs[setting] += 1
        return [1.0 + setting / 10] * 3

    result = race(range(8), run, of_this_rank, always=7)
    assert set(result.finalists) == {0, 1, 7}
    assert result.medians == {setting: pytest.approx(1.0 + setting / 10) for setting in range(8)}
    (first, _), (second, kept), (third, finalists) = STAGES
    for setting in range(7):
        rounds = first + second * (setting < kept) + third * (setting < finalists)
        assert runs[setting] == rounds
    assert runs[7] == first + second + third


def test_a_setting_that_cannot_be_run_is_left_out() -> None:
    def run(setting: int) -> list[float] | None:
        return None if setting == 2 else [1.0]

    assert set(race([0, 1, 2, 3], run, of_this_rank, always=0).medians) == {0, 1, 3}


def test_the_slowest_rank_counts() -> None:
    def slowest(taken: Taken) -> Taken:
        return {
            setting: [s + (5 if setting == 0 else 0) for s in of] for setting, of in taken.items()
        }

    result = race([0, 1], lambda setting: [float(1 + setting)], slowest, always=1)
    assert result.medians == {0: 6.0, 1: 2.0}


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=10), st.data())
def test_the_fastest_wins_where_nothing_is_noisy(seconds: list[float], data: st.DataObject) -> None:
    always = data.draw(st.integers(0, len(seconds) - 1))
    most = STAGES[0][1]
    others = [setting for setting in range(len(seconds)) if setting != always]
    entered = [*others[:most], always]
    result = race(range(len(seconds)), lambda one: [seconds[one]], of_this_rank, always)
    assert set(result.medians) == set(entered)
    assert min(seconds[one] for one in result.finalists) == min(seconds[one] for one in entered)


def test_a_setting_left_behind_before_a_machine_slows_down_cannot_win() -> None:
    runs: Counter[int] = Counter()

    def run(setting: int) -> list[float]:
        runs[setting] += 1
        # From the third round on all take longer, also those that are still the fastest.
        return [(1.0 if runs[setting] <= 2 else 1.5) + setting / 100] * 3

    result = race(range(8), run, of_this_rank, always=0)
    assert min(result.medians, key=lambda one: result.medians[one]) not in result.finalists
    assert set(result.finalists) == {0, 1, 2}


def test_noise_is_the_difference_between_rounds_not_within_them() -> None:
    """Setting 0 has steps of 1 s and 3 s in each round; setting 1 changes from round to round."""
    runs: Counter[int] = Counter()

    def run(setting: int) -> list[float]:
        runs[setting] += 1
        return [1.0, 2.0, 3.0] if setting == 0 else [1.0 + runs[setting] % 2] * 3

    result = race([0, 1], run, of_this_rank, always=1)
    rounds = sum(rounds for rounds, _ in STAGES)
    medians = [1.0 + number % 2 for number in range(rounds)]
    assert result.noise == {
        0: 0.0,
        1: pytest.approx(statistics.stdev(medians) / math.sqrt(rounds)),
    }


def test_a_race_reports_its_progress() -> None:
    logged: list[str] = []
    race([0, 1], lambda one: [1.0], of_this_rank, always=0, log=logged.append)
    assert logged[0] == "measured round 1 of 8 with 2 settings"
    assert len(logged) == sum(rounds for rounds, _ in STAGES)
