"""Torch's optimizers and gradient clipping work on sharded parameters as they are."""

from __future__ import annotations

from functools import partial

import torch
from support.models import Stack
from support.parity import ROUNDING, Case, Run, check, each, train_step, whole
from torch import Tensor

# A norm is summed up shard by shard. A fused kernel rounds whole vectors and the rest after them
# differently, and this rest is elsewhere in a shard.
ROUNDED = ROUNDING[torch.float32]


def clipped(norm_type: float, foreach: bool | None, run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    loss = run.loss(step)
    run.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(
        run.model.parameters(), 0.05, norm_type=norm_type, foreach=foreach
    )
    assert whole(norm) > 0.05, "there is nothing to clip"
    run.optimizer.step()
    return loss, norm


def zeroed_in_place(run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad(set_to_none=False)
    loss = run.loss(step)
    run.backward(loss)
    run.optimizer.step()
    return (loss,)


def zeroed_by_the_model(run: Run, step: int) -> tuple[Tensor, ...]:
    run.model.zero_grad(set_to_none=step % 2 == 0)
    loss = run.loss(step)
    run.backward(loss)
    run.optimizer.step()
    return (loss,)


def zeroed_before_backward(run: Run, step: int) -> tuple[Tensor, ...]:
    """Keep the gradients of the previous step during forward."""
    loss = run.loss(step)
    run.optimizer.zero_grad()
    run.backward(loss)
    run.optimizer.step()
    return (loss,)


def scale_gradients(run: Run, step: int) -> None:
    for parameter in run.model.parameters():
        parameter.grad.mul_(0.5)


CASES = [
    Case("SGD with momentum and weight decay", Stack,
         optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)),
    Case("Adam with foreach", Stack,
         optimizer=partial(torch.optim.Adam, lr=0.01, foreach=True)),
    Case("fused AdamW", Stack, optimizer=partial(torch.optim.AdamW, lr=0.01, fused=True),
         unsharded=ROUNDED),
    Case("Adagrad", Stack, optimizer=partial(torch.optim.Adagrad, lr=0.01)),
    Case("clipping by the 2-norm", Stack, step=partial(clipped, 2.0, None),
         unsharded=ROUNDED),
    Case("clipping by the 2-norm with foreach", Stack, step=partial(clipped, 2.0, True),
         unsharded=ROUNDED),
    Case("clipping by the largest", Stack, step=partial(clipped, float("inf"), None),
         unsharded=ROUNDED),
    Case("zero_grad(set_to_none=False)", Stack, step=zeroed_in_place),
    Case("zero_grad of the model, by turns in place", Stack, step=zeroed_by_the_model),
    Case("zero_grad between forward and backward", Stack, step=zeroed_before_backward),
    Case("gradients changed in place before the step", Stack,
         step=partial(train_step, before_step=scale_gradients)),
]  # fmt: skip


@each(CASES, every=3)
def test_optimizers_step_as_unsharded_and_as_under_fsdp2(case: Case, world_size: int) -> None:
    check(case, world_size)
