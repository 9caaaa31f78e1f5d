"""Random models whose ranks use different parameters, compared with one replica a rank.

A program is a random tree of modules, a random choice of units, random settings and a few steps. In
each step, each rank chooses for itself which experts it uses, and what else its kind of program
lets ranks choose (`Kind`). Some steps begin with an exception that all ranks raise and catch. The
expected gradients are those of one unsharded replica a rank, averaged, and None where no replica
has one. Everything random follows from the seed, which names the test.
"""

from __future__ import annotations

import math

import pytest
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.random_routing import train_as_replicas

QUICK = {0, 4, 5}  # programs that have every field of Kind among them
MANY_PROGRAMS = 20


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[] if seed in QUICK else [pytest.mark.exhaustive])
        for seed in range(MANY_PROGRAMS)
    ],
)
def test_ranks_that_choose_for_themselves_train_as_replicas(seed: int) -> None:
    run_ranks(train_as_replicas, 2, [seed], (2,), timeout=60)


@pytest.mark.parametrize("shape", [(2, 1), *exhaustive((1, 2), (2, 2))], ids=str)
def test_ranks_that_choose_for_themselves_train_as_replicas_on_two_dimensions(
    shape: tuple[int, ...],
) -> None:
    run_ranks(train_as_replicas, math.prod(shape), [0, 1], shape, timeout=60)
