"""Races of settings: measured in rounds, of which the slower ones drop out."""

# Note [races]
# The speed of a machine changes from second to second by more than settings differ, so settings
# take turns. Most of the time goes to those that may be the fastest: a few rounds of all settings,
# then more rounds of the best so far. A setting that drops out was not measured in the same seconds
# as the finalists, so it cannot win. The first setting of a round finds other caches than the
# second, so the order is random in each round, and the same on all ranks.

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

# Rounds, and the number of settings in them besides the one that always stays.
STAGES = ((2, 8), (2, 4), (4, 2))


@dataclass(frozen=True)
class Result(Generic[T]):
    """The result of a race.

    Args:
        medians: median seconds of each setting that could be run, over all of its rounds.
        finalists: the settings that stayed to the end. Only their medians are of the same rounds.
        noise: standard error of each median in seconds, estimated from its rounds.
    """

    medians: dict[T, float]
    finalists: tuple[T, ...]
    noise: dict[T, float]


def race(
    settings: Sequence[T],
    run: Callable[[T], list[float] | None],
    slowest: Callable[[dict[T, list[float]]], dict[T, list[float]]],
    always: T,
    log: Callable[[str], None] = lambda what: None,
) -> Result[T]:
    """Race settings against each other. All ranks call this with the same settings.

    Args:
        settings: the settings, the most promising first.
        run: runs a few steps with a setting and returns their seconds. It returns None, on all
            ranks alike, if the setting cannot be run; the setting is then left out.
        slowest: turns the seconds of each step on this rank into those of the slowest rank.
        always: the one of ``settings`` that stays to the end.
        log: reports progress.
    """
    taken: dict[T, list[float]] = {setting: [] for setting in settings}
    order = random.Random(0)
    racing = list(taken)
    medians: dict[T, float] = {}
    noise: dict[T, float] = {}
    total = sum(rounds for rounds, _ in STAGES)
    number = 0
    for rounds, most in STAGES:
        others = [setting for setting in racing if setting != always][:most]
        racing = [*others, always]
        for _ in range(rounds):
            for setting in order.sample(racing, len(racing)):
                seconds = run(setting)
                if seconds is None:
                    racing.remove(setting)
                    taken.pop(setting)
                    medians.pop(setting, None)
                else:
                    taken[setting] += seconds
            number += 1
            log(f"measured round {number} of {total} with {len(racing)} settings")
        over_ranks = slowest({setting: taken[setting] for setting in racing})
        medians |= {setting: statistics.median(of) for setting, of in over_ranks.items()}
        noise |= {setting: _noise(of, number) for setting, of in over_ranks.items()}
        racing.sort(key=lambda setting: medians[setting])
    return Result(medians, tuple(racing), noise)


def _noise(seconds: Sequence[float], rounds: int) -> float:
    """Return the standard error of the rounds' medians.

    Steps of one round follow each other, so they share what disturbs them. Rounds do not.
    """
    each = len(seconds) // rounds
    medians = [statistics.median(seconds[i * each : (i + 1) * each]) for i in range(rounds)]
    return statistics.stdev(medians) / math.sqrt(rounds)
