"""Thousands of steps of everything at random, in which memory and other resources stay flat.

    make soak SOAK_STEPS=3000        # or any number; FSDP_EXT_SOAK_STEPS for pytest
    make soak SOAK_SEED=1            # other programs; FSDP_EXT_SOAK_SEED for pytest
    make soak SOAK_SYSTEM=fsdp2      # for comparison; FSDP_EXT_SOAK_SYSTEM for pytest

A run trains one random program of support/random_programs.py after the other, in the same
processes. After each of them its model is dropped, and what the process holds is counted. The first
third is for warming up. The counts of descriptors, threads, mappings and bytes of shared memory may
not grow after it, that of Python objects only by what the interpreter caches, and memory only by
what an allocator keeps. FSDP2 trains only those programs that it is compared in, because it reads
freed parameters in some of the others, which ends a process by SIGSEGV.

Note [caches of torch]
torch remembers for each new list of shapes that an operator gets how it shards DTensors
(DTensor's sharding propagation, the shapes it derives with fake tensors, and the steps of
redistributions). It never forgets, so a process that trains a new model every second would grow, by
about 75 kB for each of these models. A process that trains one model does not. So the soak clears
these caches after each model, and what grows then is no cache of torch.
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
from support.isolation import clear_sharding_caches
from support.launcher import run_ranks
from support.random_programs import PROGRAMS, STEPS, Program
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_ext import _C

STEPS_ASKED = int(os.environ.get("FSDP_EXT_SOAK_STEPS", "0"))
SEED = int(os.environ.get("FSDP_EXT_SOAK_SEED", "0"))
SYSTEM = os.environ.get("FSDP_EXT_SOAK_SYSTEM", "fsdp_ext")
SMALL = 150
SECONDS = 240 + 2 * max(STEPS_ASKED, SMALL)  # at most
SPARE_MAPS = 16  # of the allocator's arenas
SPARE_OBJECTS = 200  # one model has more
SPARE_BYTES = 8_000_000
SPARE_SHARE = 0.02


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    descriptors: int
    threads: int
    maps: int
    objects: int  # of Python that its collector tracks
    shared_memory: int  # bytes that fsdp_ext has allocated
    resident: int  # bytes that are the process's own

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        CDLL(None).malloc_trim(0)
        shared_memory = _C.shared_memory_bytes()  # the first call opens a descriptor
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
            objects=sum(type(each) is not cls for each in gc.get_objects()),
            shared_memory=shared_memory,
            resident=own,
        )

    @classmethod
    def most(cls, of: list[Held]) -> Held:
        names = vars(of[0])
        return cls(**{name: max(getattr(each, name) for each in of) for name in names})


def clear_caches_of_torch() -> None:
    """See Note [caches of torch]."""
    clear_sharding_caches()
    FakeTensorMode.cache_clear()


def soak(steps: int, seed: int, system: str) -> list[Held]:
    """Train random programs for at least `steps` steps; return what was held after each."""
    rng = random.Random(seed)
    programs = 10**9 if system == "fsdp_ext" else PROGRAMS
    held = []
    for _ in range(-(-steps // STEPS)):
        program = Program(rng.randrange(programs), system, (dist.get_world_size(),))
        program.run()
        del program
        clear_caches_of_torch()
        held.append(Held.now())
    return held


@pytest.mark.exhaustive
@pytest.mark.timeout(SECONDS + 60)
def test_memory_descriptors_threads_and_maps_stay_flat() -> None:
    steps = STEPS_ASKED or SMALL
    of_ranks = run_ranks(soak, 2, steps, SEED, SYSTEM, timeout=SECONDS, fresh=True)
    for rank, held in enumerate(of_ranks):
        third = len(held) // 3
        before, after = Held.most(held[third : 2 * third]), Held.most(held[2 * third :])
        print(f"rank {rank}, {len(held) * STEPS} steps: {before} to {after}")
        assert after.descriptors <= before.descriptors, f"rank {rank}: {held}"
        assert after.threads <= before.threads, f"rank {rank}: {held}"
        assert after.maps <= before.maps + SPARE_MAPS, f"rank {rank}: {held}"
        assert after.objects <= before.objects + SPARE_OBJECTS, f"rank {rank}: {held}"
        assert after.shared_memory <= before.shared_memory, f"rank {rank}: {held}"
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
