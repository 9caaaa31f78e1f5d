"""Random models with random settings train as they do unsharded, on one to four ranks.

    make fuzz FUZZ_SECONDS=3600 FUZZ_SEED=7   # or FSDP_EXT_FUZZ_SECONDS and _SEED for pytest

In half of the time, Hypothesis chooses a tree of modules and its units (those of
support/random_programs.py), a transport, dtypes, bucket sizes, prefetch and so on. On every rank a
sharded copy trains beside an unsharded one, with released slots filled with NaN and streams that
pause, as in `verify`. What Hypothesis finds it makes small and prints.

In the other half, each rank chooses for itself what it runs, detaches and catches: the programs of
support/random_routing.py. Each follows from its seed, and their seeds follow each other from
FUZZ_SEED on.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import secrets
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.launcher import run_ranks
from support.random_programs import WIDTH, Branch, Leaf, Model
from support.random_routing import train_as_replicas
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_ext
from fsdp_ext.verifier.checks import Disturbance
from fsdp_ext.verifier.steps import Way, train_beside
from fsdp_ext.verifier.subject import Subject

SECONDS = float(os.environ.get("FSDP_EXT_FUZZ_SECONDS", "0"))
SEED = os.environ.get("FSDP_EXT_FUZZ_SEED", "")
# Without a time there is one round of each kind, which is always the same.
EXAMPLES = 20
PROGRAMS = 10  # that ranks train in one set of groups
SHAPES = [(2,), (2, 1), (1, 2), (2, 2)]

MIXED = [None, torch.float32, torch.bfloat16, torch.float16]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    ranks = draw(st.integers(1, 4))
    groups = [k for k in (2,) if ranks == 4]
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    return {
        "ranks": ranks,
        "seed": draw(st.integers(0, 2**20)),
        "dtype": dtype,
        "param_dtype": draw(st.sampled_from(MIXED)) if dtype == torch.float32 else None,
        "reduce_dtype": draw(st.sampled_from([None, torch.float32])),
        "reshard_after_forward": draw(st.sampled_from([None, True, False, *groups])),
        "transport": draw(st.sampled_from(["shared_memory", "process_group"])),
        "bucket_bytes": draw(st.sampled_from([None, 0, 500, 10_000])),
        "max_message_bytes": draw(st.sampled_from([None, 300, 3000])),
        "prefetch": draw(st.sampled_from([None, 0, 1, 3])),
        "keep_gather_inputs": draw(st.booleans()),
        "forwards": draw(st.integers(1, 2)),
        "plants": False,
    }


class Scaled(nn.Module):
    """Feeds a model in its own dtype, whatever the policy is, and changes its weights if asked."""

    def __init__(self, model: Model, plants: bool) -> None:
        super().__init__()
        self.model = model
        self.plants = plants

    def forward(self, x: Tensor) -> Tensor:
        if self.plants:
            with torch.no_grad():
                next(self.model.stem.parameters()).mul_(0.5)
        return self.model(x)


def train(case: dict[str, Any]) -> str:
    """Return what differs first; empty if nothing does."""
    rng = random.Random(case["seed"])
    torch.manual_seed(case["seed"])
    model = Scaled(Model(rng), case["plants"]).to(case["dtype"])
    for parameter in model.parameters():
        parameter.requires_grad_(rng.random() < 0.9)
    model.model.head.requires_grad_(True)
    inner = [name for name, m in model.named_modules() if isinstance(m, (Leaf, Branch))]
    names = ["reshard_after_forward", "transport", "bucket_bytes", "max_message_bytes", "prefetch"]
    names.append("keep_gather_inputs")
    policy = fsdp_ext.MixedPrecisionPolicy(case["param_dtype"], case["reduce_dtype"])
    generator = torch.Generator().manual_seed(dist.get_rank())
    subject = Subject(
        model=model,
        batch=torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(case["dtype"]),
        loss=lambda output: output.float().square().mean(),
        unit_names=tuple(name for name in reversed(inner) if rng.random() < 0.5),
        settings={"mp_policy": policy, **{name: case[name] for name in names}},
        device=torch.device("cpu"),
    )
    disturbance = Disturbance()
    way = Way(disturbance.watch, disturbance, case["forwards"], steps=3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    compared = train_beside(subject, mesh, way)
    return "" if compared.difference is None else compared.difference.what


def train_all(case: dict[str, Any]) -> None:
    for rank, difference in enumerate(run_ranks(train, case["ranks"], case)):
        assert not difference, f"rank {rank}: {difference}"


def one_round(*, is_random: bool) -> None:
    check = settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=not is_random,
        database=None,
        print_blob=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )(given(cases())(train_all))
    check()


@pytest.mark.exhaustive
@pytest.mark.timeout(SECONDS + 1200)
def test_random_models_train_as_they_do_unsharded() -> None:
    end = time.monotonic() + SECONDS / 2
    one_round(is_random=SECONDS > 0)
    while time.monotonic() < end:
        one_round(is_random=True)


@pytest.mark.exhaustive
@pytest.mark.timeout(SECONDS + 1200)
def test_random_ranks_that_choose_for_themselves_train_as_replicas() -> None:
    end = time.monotonic() + SECONDS / 2
    first = int(SEED) if SEED else secrets.randbelow(2**30) if SECONDS > 0 else 1000
    for begin, shape in zip(itertools.count(first, PROGRAMS), itertools.cycle(SHAPES)):
        seeds = list(range(begin, begin + PROGRAMS))
        print(f"seeds {seeds[0]} to {seeds[-1]} on {shape}, from FUZZ_SEED={first}", flush=True)
        run_ranks(train_as_replicas, math.prod(shape), seeds, shape, timeout=60 + 10 * PROGRAMS)
        if time.monotonic() >= end:
            return


def test_a_planted_fault_is_found_and_named() -> None:
    settings_left_out = ["reduce_dtype", "reshard_after_forward", "bucket_bytes", "prefetch"]
    case: dict[str, Any] = dict.fromkeys(
        [*settings_left_out, "param_dtype", "max_message_bytes", "keep_gather_inputs"]
    )
    case |= {"ranks": 2, "seed": 1, "dtype": torch.float32, "forwards": 1}
    case["transport"] = "shared_memory"
    train_all({**case, "plants": False})
    with pytest.raises(AssertionError, match=r"model\.stem"):
        train_all({**case, "plants": True})
