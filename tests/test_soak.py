"""Thousands of steps of everything at random, in which memory and other resources stay flat.

    make soak SOAK_STEPS=3000        # or any number; FSDP_EXT_SOAK_STEPS for pytest

A run trains one random program of test_random_programs.py after the other, in the same processes.
After each of them its model is dropped, and what the process holds is counted. The first third is
for warming up. The counts of descriptors, threads and mappings may not grow after it, and memory
only by what an allocator keeps.
"""

from __future__ import annotations

import gc
import os
import random
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from support.launcher import run_ranks
from test_random_programs import STEPS, Program

STEPS_ASKED = int(os.environ.get("FSDP_EXT_SOAK_STEPS", "0"))
SEED = int(os.environ.get("FSDP_EXT_SOAK_SEED", "0"))
SMALL = 150
SECONDS = 240 + 2 * max(STEPS_ASKED, SMALL)  # at most
SPARE_MAPS = 16  # of the allocator's arenas
SPARE_BYTES = 8_000_000
SPARE_SHARE = 0.02


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    descriptors: int
    threads: int
    maps: int
    resident: int  # bytes that are the process's own

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        CDLL(None).malloc_trim(0)
        process = Path("/proc/self")
        rollup = (process / "smaps_rollup").read_text(encoding="ascii")
        own = sum(
            int(line.split()[1]) * 1024
            for line in rollup.splitlines()
            if line.startswith(("Private_Clean", "Private_Dirty"))
        )
        return cls(
            descriptors=len(list((process / "fd").iterdir())),
            threads=len(list((process / "task").iterdir())),
            maps=len((process / "maps").read_text(encoding="ascii").splitlines()),
            resident=own,
        )

    @classmethod
    def most(cls, of: list[Held]) -> Held:
        names = vars(of[0])
        return cls(**{name: max(getattr(each, name) for each in of) for name in names})


def soak(steps: int, seed: int) -> list[Held]:
    """Train random programs for at least `steps` steps; return what was held after each."""
    rng = random.Random(seed)
    held = []
    for _ in range(-(-steps // STEPS)):
        program = Program(rng.randrange(10**9), "fsdp_ext", (dist.get_world_size(),))
        program.run()
        del program
        held.append(Held.now())
    return held


@pytest.mark.exhaustive
@pytest.mark.timeout(SECONDS + 60)
def test_memory_descriptors_threads_and_maps_stay_flat() -> None:
    steps = STEPS_ASKED or SMALL
    of_ranks = run_ranks(soak, 2, steps, SEED, timeout=SECONDS, fresh=True)
    for rank, held in enumerate(of_ranks):
        third = len(held) // 3
        before, after = Held.most(held[third : 2 * third]), Held.most(held[2 * third :])
        print(f"rank {rank}, {len(held) * STEPS} steps: {before} to {after}")
        assert after.descriptors <= before.descriptors, f"rank {rank}: {held}"
        assert after.threads <= before.threads, f"rank {rank}: {held}"
        assert after.maps <= before.maps + SPARE_MAPS, f"rank {rank}: {held}"
        allowed = before.resident * (1 + SPARE_SHARE) + SPARE_BYTES
        assert after.resident <= allowed, f"rank {rank}: {held}"


def leak(steps: int) -> list[Held]:
    kept = []
    held = []
    for _ in range(steps):
        kept.append((os.open("/dev/null", os.O_RDONLY), bytearray(os.urandom(1_000_000))))
        held.append(Held.now())
    for descriptor, _ in kept:
        os.close(descriptor)
    return held


def test_what_a_process_holds_shows_a_leak() -> None:
    (held,) = run_ranks(leak, 1, 12, fresh=True)
    assert held[-1].descriptors == held[0].descriptors + 11
    assert held[-1].resident > held[0].resident + 10_000_000
