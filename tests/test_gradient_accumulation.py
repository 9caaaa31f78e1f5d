"""Gradients accumulate over micro-batches, reduced after each or only after the last."""

from __future__ import annotations

from functools import partial

import torch
from support import models
from support.models import Stack
from support.parity import ROUNDING, Case, Run, check, each
from torch import Tensor


def accumulate(syncs: tuple[bool, ...], run: Run, step: int) -> tuple[Tensor, ...]:
    """Run one micro-batch for each entry of `syncs`, which says whether gradients are reduced."""
    run.optimizer.zero_grad()
    losses = []
    for micro_batch, sync in enumerate(syncs):
        losses.append(run.loss(step, micro_batch) / len(syncs))
        run.backward(losses[-1], sync=sync)
    run.optimizer.step()
    return tuple(losses)


def accumulate_in_place(run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad(set_to_none=False)
    return _without_zero(run, step)


def _without_zero(run: Run, step: int) -> tuple[Tensor, ...]:
    losses = []
    for micro_batch in range(2):
        losses.append(run.loss(step, micro_batch))
        run.backward(losses[-1])
    run.optimizer.step()
    return tuple(losses)


def accumulate_for_ever(run: Run, step: int) -> tuple[Tensor, ...]:
    """Gradients are zeroed only every third step."""
    if step % 3 == 0:
        run.optimizer.zero_grad()
    return _without_zero(run, step)


def accumulate_over_steps_without_sync(run: Run, step: int) -> tuple[Tensor, ...]:
    """Two steps in three see no gradient yet. The third sees the sum of all three."""
    if step % 3 == 0:
        run.optimizer.zero_grad()
    loss = run.loss(step)
    run.backward(loss, sync=step % 3 == 2)
    if step % 3 == 2:
        run.optimizer.step()
    return (loss,)


def accumulate_unsharded(last_backward: bool, run: Run, step: int) -> tuple[Tensor, ...]:
    """Parameters stay unsharded from one micro-batch to the next."""
    run.optimizer.zero_grad()
    losses = []
    for micro_batch in range(3):
        last = micro_batch == 2
        if run.sharded:
            run.model.set_reshard_after_backward(last)
            if last_backward:
                run.model.set_is_last_backward(last)
        losses.append(run.loss(step, micro_batch))
        run.backward(losses[-1], sync=last)
    run.optimizer.step()
    return tuple(losses)


def accumulate_below_the_root(run: Run, step: int) -> tuple[Tensor, ...]:
    """The root's own parameters are reduced each time, its units' only the last time."""
    run.optimizer.zero_grad()
    losses = []
    for micro_batch in range(2):
        if run.sharded:
            for block in run.model.blocks:
                block.set_requires_gradient_sync(micro_batch == 1, recurse=False)
        losses.append(run.loss(step, micro_batch))
        run.backward(losses[-1])
    run.optimizer.step()
    return tuple(losses)


def evaluate_while_accumulating(run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    first = run.loss(step)
    run.backward(first, sync=False)
    with torch.no_grad():
        evaluated = run.loss(step, micro_batch=2)
    second = run.loss(step, micro_batch=1)
    run.backward(second)
    run.optimizer.step()
    return first, evaluated, second


EACH_TIME = partial(accumulate, (True, True, True))
LAST_TIME = partial(accumulate, (False, False, True))
# The mean of a sum and the sum of means are rounded differently.
REORDERED = ROUNDING[torch.float32]

CASES = [
    Case("reduced each time", Stack, step=EACH_TIME),
    Case("reduced the last time", Stack, step=LAST_TIME),
    Case("reduced the first and the last time", Stack,
         step=partial(accumulate, (True, False, True))),
    Case("reduced each time, zeroed in place", Stack, step=accumulate_in_place),
    Case("reduced each time, zeroed every third step", Stack, step=accumulate_for_ever),
    Case("over steps without sync", Stack, step=accumulate_over_steps_without_sync),
    Case("unsharded until the last micro-batch", Stack,
         step=partial(accumulate_unsharded, False)),
    Case("unsharded until set_is_last_backward", Stack, step=partial(accumulate_unsharded, True)),
    Case("sync turned off for units alone", Stack, step=accumulate_below_the_root,
         unsharded=REORDERED),
    Case("evaluation between micro-batches", Stack, step=evaluate_while_accumulating),
    Case("micro-batches that run other units", models.BranchingUnits, step=LAST_TIME),
    Case("frozen layers, reduced the last time", models.FrozenBesideTrainable, step=LAST_TIME),
    Case("unused parameters, reduced the last time", models.UnusedParameters, step=LAST_TIME),
    # FSDP2 reduces what earlier micro-batches left before the unit's second backward.
    Case("a unit called twice, reduced the last time", models.UnitCalledTwice, step=LAST_TIME,
         fsdp2=REORDERED, unsharded=REORDERED),
    Case("nested units, reduced the last time", models.NestedUnits, step=LAST_TIME),
]  # fmt: skip


@each(CASES)
def test_accumulates_as_unsharded_and_as_fsdp2(case: Case, world_size: int) -> None:
    check(case, world_size)
