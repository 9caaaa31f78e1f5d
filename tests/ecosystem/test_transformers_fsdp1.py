"""Models of transformers train under the wrapper as unsharded and as under FSDP1.

Each family meets both dtypes, both kinds of activation checkpointing, accumulation with clipping,
and text between steps. test_transformers.py has the other pairs of dtype and checkpointing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ecosystem.families import FAMILIES, subject
from ecosystem.training import (
    BF16,
    ROUGH,
    ROUGH_IN_BF16,
    STEPS,
    WRITERS,
    accumulate_and_clip,
    assert_loads,
    checkpointed,
    text_of,
)
from support.fsdp1_parity import FSDP, Values, state, torch_fsdp
from support.launcher import run_ranks
from support.models import Batch
from support.parity import (
    EXACT,
    Case,
    Run,
    Tolerance,
    Unsharded,
    assert_same,
)
from torch import Tensor
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

# FSDP1 adds up norms in another order, and gradients are scaled by them.
CLIPPED = Tolerance(1e-5, 1e-7)


class Wrapped(Run):
    """A model under a wrapper, ours or FSDP1's."""

    sharded = True

    def __init__(self, wrap: Callable[..., Any], case: Case) -> None:
        self.wrap = wrap
        super().__init__(case)

    def shard(self) -> None:
        policy = ModuleWrapPolicy({type(unit) for unit in self.units})
        precision = MixedPrecision(**self.case.precision) if self.case.precision else None
        self.wrapped = self.wrap(self.model, auto_wrap_policy=policy, mixed_precision=precision)

    def renew_optimizer(self) -> None:
        self.optimizer = self.case.optimizer(self.wrapped.parameters())

    def forward(self, batch: Batch) -> Any:
        args, kwargs = batch
        return self.wrapped(*args, **kwargs)

    def backward(self, loss: Tensor, *, sync: bool = True) -> None:
        with contextlib.nullcontext() if sync else self.wrapped.no_sync():
            loss.backward()

    def clip(self, max_norm: float) -> Tensor:
        norm: Tensor = self.wrapped.clip_grad_norm_(max_norm)
        return norm


def _text(run: Run) -> Tensor:
    if not isinstance(run, Wrapped):
        return text_of(run.model)
    cls: Any = type(run.wrapped)
    with cls.summon_full_params(run.wrapped, writeback=False):
        return text_of(run.model)


def _trained(run: Run, *, writes: bool) -> Values:
    """Train, and return losses, norms and texts, and the parameters and gradients at the end."""
    found: Values = {}
    for step in range(run.case.steps):
        values = run.case.step(run, step)
        found |= {f"value {step}.{i}": value.detach() for i, value in enumerate(values)}
        if writes:
            found[f"text {step}"] = _text(run)
    return found | state(run.wrapped if isinstance(run, Wrapped) else run.model)


def _compare(case: Case, tolerance: Tolerance, *, writes: bool) -> Wrapped:
    """Train in all three ways and compare; return the model under our wrapper."""
    ours = Wrapped(FSDP, case)
    got = _trained(ours, writes=writes)
    theirs = _trained(Wrapped(torch_fsdp, case), writes=writes)
    unsharded = _trained(Unsharded(case), writes=writes)
    assert_same("FSDP1", theirs, got, tolerance)
    assert case.unsharded is not None
    assert_same("unsharded", unsharded, got, case.unsharded)
    return ours


def _in_bf16(name: str) -> None:
    case = Case(
        name,
        partial(subject, name),
        precision=BF16,
        before_sharding=partial(checkpointed, reentrant=True),
        unsharded=ROUGH_IN_BF16,
        steps=STEPS,
    )
    _compare(case, EXACT, writes=False)


def _in_fp32(name: str, folder: str) -> None:
    case = Case(
        name,
        partial(subject, name),
        step=accumulate_and_clip,
        before_sharding=partial(checkpointed, reentrant=False),
        unsharded=ROUGH,
        steps=STEPS,
    )
    ours = _compare(case, CLIPPED, writes=name in WRITERS)
    assert_loads(name, ours.model, ours.wrapped, ours.wrapped.state_dict(), folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_trains_in_bf16_with_reentrant_checkpointing(name: str) -> None:
    run_ranks(_in_bf16, 2, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_accumulates_clips_generates_and_saves(name: str, tmp_path: Path) -> None:
    run_ranks(_in_fp32, 2, name, str(tmp_path))
