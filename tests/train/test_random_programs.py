"""Random models, sharded and trained in random ways, compared bit for bit with FSDP2.

A program is a random tree of modules, a random choice of units, and a few steps. Each step does one
random thing: it leaves modules out, runs them twice, accumulates, evaluates, clips, loads a state
dict and so on. Streams are delayed and released slots are filled with NaN. Everything random
follows from the seed, which names the test.
"""

from __future__ import annotations

import math

import pytest
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.random_programs import PROGRAMS, Program, assert_same_record


def _same_under_both(seed: int, shape: tuple[int, ...]) -> None:
    got = Program(seed, "fsdp_ext", shape).run()
    expected = Program(seed, "fsdp2", shape).run()
    assert_same_record(expected, got)


@pytest.mark.parametrize("shape", [(2,), *exhaustive((1,))])
@pytest.mark.parametrize("seed", [*range(4), *exhaustive(*range(4, PROGRAMS))])
def test_a_random_program_trains_as_under_fsdp2(seed: int, shape: tuple[int, ...]) -> None:
    run_ranks(_same_under_both, math.prod(shape), seed, shape)


@pytest.mark.parametrize("shape", [(2, 1), *exhaustive((2, 2))])
@pytest.mark.parametrize("seed", [*range(2), *exhaustive(*range(2, 6))])
def test_a_random_program_trains_hybridly_as_under_fsdp2(seed: int, shape: tuple[int, ...]) -> None:
    run_ranks(_same_under_both, math.prod(shape), seed, shape)


def _train(seed: int) -> None:
    Program(seed, "fsdp_ext").run()


# Programs that left out all parts of a branch, and then changed what that branch had returned.
@pytest.mark.parametrize("seed", [25377432, 939269660])
def test_no_program_changes_what_autograd_has_saved(seed: int) -> None:
    run_ranks(_train, 1, seed)
