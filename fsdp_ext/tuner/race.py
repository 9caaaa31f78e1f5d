"""Which of a few ways to run is fastest: measured in rounds, the slower half left behind."""

# Note [races]
# What a machine does besides changes from second to second, by more than settings differ, so they
# take turns, in another order each round. Most of the time is for those that may be the fastest: a
# few rounds of all, and then of those that were among the best so far. Who is left behind has been
# measured in other seconds than the finalists, and cannot win. What comes first in a round finds
# other caches than what comes second, so the order is random, and the same on all ranks.

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

# How many rounds there are of how many settings, besides those that are always in the race.
STAGES = ((2, 8), (2, 4), (4, 2))


@dataclass(frozen=True)
class Result(Generic[T]):
    """What a race has shown.

    Args:
        medians: seconds of each setting that could be run, over all of its rounds.
        finalists: those that were in it to the end, whose medians alone are of the same rounds.
    """

    medians: dict[T, float]
    finalists: tuple[T, ...]


def race(
    settings: Sequence[T],
    run: Callable[[T], list[float] | None],
    slowest: Callable[[dict[T, list[float]]], dict[T, list[float]]],
    always: T,
    say: Callable[[str], None] = lambda what: None,
) -> Result[T]:
    """Race the settings against each other; all ranks call this alike.

    Args:
        settings: the most promising first, with those that are to be in the race.
        run: runs a few steps with one and returns their seconds; None: it cannot be run, on no
            rank, and is left out.
        slowest: given the seconds of each step on this rank, returns those of the slowest one.
        always: stays to the end, and has to be one of ``settings``.
        say: told how far the race is.
    """
    taken: dict[T, list[float]] = {setting: [] for setting in settings}
    order = random.Random(0)
    racing = list(taken)
    medians: dict[T, float] = {}
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
            say(f"measured round {number} of {total}, of {len(racing)} settings")
        over_ranks = slowest({setting: taken[setting] for setting in racing})
        medians |= {setting: statistics.median(of) for setting, of in over_ranks.items()}
        racing.sort(key=lambda setting: medians[setting])
    return Result(medians, tuple(racing))
