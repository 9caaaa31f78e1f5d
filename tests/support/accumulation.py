"""Steps of several micro-batches."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from support.parity import Run


def accumulate(syncs: tuple[bool, ...], run: Run, step: int) -> tuple[Tensor, ...]:
    """Run one micro-batch for each entry of `syncs`, which says whether gradients are reduced."""
    run.optimizer.zero_grad()
    losses = []
    for micro_batch, sync in enumerate(syncs):
        losses.append(run.loss(step, micro_batch) / len(syncs))
        run.backward(losses[-1], sync=sync)
    run.optimizer.step()
    return tuple(losses)


EACH_TIME = partial(accumulate, (True, True, True))
LAST_TIME = partial(accumulate, (False, False, True))
