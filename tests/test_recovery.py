"""After an exception in forward or backward on all ranks, the next step is right.

The runs it is compared with do not fail: after `zero_grad` a failed step leaves no trace.
"""

from __future__ import annotations

from functools import partial

import torch
from support import models
from support.models import DeliberateFailure, Fragile, FragileUnit
from support.parity import Case, Run, check, each, train_step
from torch import Tensor


def fail(run: Run, step: int, where: str) -> None:
    """Run a step that ends in an exception, in the run under test alone."""
    if not run.under_test:
        return
    run.optimizer.zero_grad()
    run.model.failure = where
    try:
        run.backward(run.loss(step, micro_batch=9))
    except DeliberateFailure:
        pass
    else:
        raise AssertionError("the step was to fail but did not")
    finally:
        run.model.failure = None
    run.recover()


def fail_before_some(where: str, run: Run, step: int) -> tuple[Tensor, ...]:
    """Fail before the very first step and before two later ones."""
    if step in (0, 4, 5):
        fail(run, step, where)
    return train_step(run, step)


def fail_again_and_again(run: Run, step: int) -> tuple[Tensor, ...]:
    if step == 3:
        for where in ("forward", "backward", "hook", "backward", "forward"):
            fail(run, step, where)
    return train_step(run, step)


def fail_in_evaluation(run: Run, step: int) -> tuple[Tensor, ...]:
    if step % 3 == 0:
        with torch.no_grad():
            fail(run, step, "forward")
    return train_step(run, step)


def fail_then_evaluate(run: Run, step: int) -> tuple[Tensor, ...]:
    if step % 3 == 1:
        fail(run, step, "backward")
    with torch.no_grad():
        evaluated = run.loss(step, micro_batch=1)
    return evaluated, *train_step(run, step)


def fail_then_accumulate(run: Run, step: int) -> tuple[Tensor, ...]:
    """The second of two forwards fails, so the first one's backward never comes."""
    if run.under_test and step % 4 == 0:
        run.loss(step, micro_batch=8)
    if step % 4 == 0:
        fail(run, step, "forward")
    run.optimizer.zero_grad()
    losses = [run.loss(step, 0), run.loss(step, 1)]
    run.backward(losses[0] + losses[1])
    run.optimizer.step()
    return tuple(losses)


class FragileNested(Fragile):
    """Nested units that fail together."""

    def units(self) -> list[models.Unit]:
        return models.NestedUnits.units(self)  # type: ignore[arg-type]


CASES = [
    Case("between units in forward", Fragile, step=partial(fail_before_some, "forward")),
    Case("in a unit's forward", FragileUnit, step=partial(fail_before_some, "forward")),
    Case("in an autograd function", Fragile, step=partial(fail_before_some, "backward")),
    Case("in a tensor's hook", Fragile, step=partial(fail_before_some, "hook")),
    Case("in forward of nested units", FragileNested, step=partial(fail_before_some, "forward")),
    Case("in backward of nested units", FragileNested, step=partial(fail_before_some, "backward")),
    Case("in forward, never resharded after forward", Fragile,
         step=partial(fail_before_some, "forward"), options={"reshard_after_forward": False}),
    Case("in backward, never resharded after forward", Fragile,
         step=partial(fail_before_some, "backward"), options={"reshard_after_forward": False}),
    Case("in backward with mixed precision", Fragile, step=partial(fail_before_some, "backward"),
         precision={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
    Case("again and again", Fragile, step=fail_again_and_again),
    Case("in evaluation", FragileUnit, step=fail_in_evaluation),
    Case("in backward and then evaluated", Fragile, step=fail_then_evaluate),
    Case("in the second of two forwards", Fragile, step=fail_then_accumulate),
]  # fmt: skip


@each(CASES)
def test_steps_after_an_exception_are_those_of_a_run_without_it(
    case: Case, world_size: int
) -> None:
    check(case, world_size)
