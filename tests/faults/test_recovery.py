"""After an exception in forward or backward on all ranks, the next step is right.

The runs it is compared with do not fail: after `zero_grad` a failed step leaves no trace. Gradients
that were accumulated before a forward fails stay.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import models
from support.launcher import run_ranks
from support.models import DeliberateFailure, Fragile, FragileUnit
from support.parity import LONG_STEPS, Case, Run, check, each, train_step
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp

from fsdp_ext import fully_shard, optim
from fsdp_ext.sharding.api.handles import HAS_FINALIZATION


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


def fail_while_accumulating(evaluates: bool, run: Run, step: int) -> tuple[Tensor, ...]:
    """Forwards fail between the three micro-batches of a step."""
    run.optimizer.zero_grad()
    losses = []
    for micro_batch in range(3):
        losses.append(run.loss(step, micro_batch))
        run.backward(losses[-1], sync=micro_batch == 2)
        with torch.set_grad_enabled(not evaluates):
            if micro_batch < 2:
                fail(run, step, "forward")
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
    Case("in evaluation while gradients accumulate", FragileUnit,
         step=partial(fail_while_accumulating, True)),
    Case("in forward while gradients accumulate", Fragile,
         step=partial(fail_while_accumulating, False)),
]  # fmt: skip


@each([dataclasses.replace(case, steps=LONG_STEPS) for case in CASES], every=2)
def test_steps_after_an_exception_are_those_of_a_run_without_it(
    case: Case, world_size: int
) -> None:
    check(case, world_size)


def sharded(shard: Any = fully_shard) -> Any:
    torch.manual_seed(0)
    model: Any = Fragile()
    for block in model.blocks:
        shard(block)
    return shard(model)


def run_backward(model: Any, micro_batch: int, failure: str | None = None) -> None:
    args, _ = model.batch(torch.Generator().manual_seed(micro_batch))
    model.failure = failure
    try:
        model.loss(model(*args)).backward()
    except DeliberateFailure:
        assert failure is not None
    finally:
        model.failure = None


def gradients_of(model: Any) -> dict[str, Tensor]:
    found = dict(model.named_parameters())
    return {name: p.grad.to_local().clone() for name, p in found.items() if p.grad is not None}


def unshard(model: Any) -> None:
    model.unshard()
    model.reshard()


def freeze(model: Any) -> None:
    model.stem.bias.requires_grad_(False)


def go_on(model: Any, then: Callable[[Any], object]) -> None:
    then(model)
    model.set_requires_gradient_sync(True)
    run_backward(model, 1)


def _failed_backwards() -> None:
    lost = r"had accumulated were dropped\. Run all micro-batches of this step again\."
    for then in (torch.nn.Module.train, unshard, freeze):
        model = sharded()
        run_backward(model, 1)
        expected = gradients_of(model)
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing was accumulated before
            run_backward(model, 0, "backward")
            run_backward(model, 0, "hook")
            run_backward(model, 0)
            run_backward(model, 0, "backward")
        with pytest.warns(UserWarning, match=lost):
            go_on(model, then)
        got = gradients_of(model)
        assert len(got) == len(expected) - (then is freeze)
        assert all(torch.equal(gradient, expected[name]) for name, gradient in got.items())


def test_a_warning_says_that_a_failed_backward_has_dropped_accumulated_gradients() -> None:
    run_ranks(_failed_backwards, 2)


def _finalized() -> None:
    model = sharded()
    run_backward(model, 0)
    expected = gradients_of(model)
    model.zero_grad()
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    run_backward(model, 0)
    run_backward(model, 1, "forward")
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    got = gradients_of(model)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in got.items())
    assert len(got) == len(expected)
    run_backward(model, 0, "backward")
    with pytest.raises(RuntimeError, match="last backward failed, so there is nothing to reduce"):
        model.finalize_backward()


def test_finalize_backward_reduces_what_was_there_before_a_forward_failed() -> None:
    run_ranks(_finalized, 2)


def _frozen_before_the_failure() -> None:
    model = sharded()
    model.set_requires_gradient_sync(False)
    run_backward(model, 0)
    freeze(model)  # takes effect when what was accumulated is reduced, or else dropped
    run_backward(model, 0, "backward")
    model.set_requires_gradient_sync(True)
    args, _ = model.batch(torch.Generator().manual_seed(1))
    with pytest.warns(UserWarning, match="had accumulated were dropped"):
        outputs = model(*args), model(*args)
    sum(model.loss(output) for output in outputs).backward()
    got = gradients_of(model)
    assert "stem.bias" not in got
    run_backward(model, 1)
    twice = gradients_of(model)
    assert all(torch.allclose(1.5 * gradient, twice[name]) for name, gradient in got.items())


def test_a_parameter_that_was_frozen_before_a_failure_stays_frozen() -> None:
    run_ranks(_frozen_before_the_failure, 2)


def _reset(clears: bool) -> None:
    got = {}
    for shard in (fully_shard, torch_fsdp.fully_shard) if clears else (fully_shard,):
        model = sharded(shard)
        run_backward(model, 0)
        reduced = gradients_of(model)
        model.set_requires_gradient_sync(False)
        run_backward(model, 1)
        model.unshard()
        leaf = model.stem.weight
        leaf.grad = torch.ones_like(leaf)
        model.reset_iter_state()
        assert leaf.grad is None or not clears
        assert gradients_of(model).keys() == ({} if clears else reduced).keys()
        model.set_requires_gradient_sync(True)
        run_backward(model, 2)
        got[shard] = gradients_of(model)
    model = sharded()
    if not clears:
        run_backward(model, 0)
    run_backward(model, 2)
    expected = gradients_of(model)
    for gradients in got.values():
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_resetting_an_iteration_drops_what_fsdp2_drops_since_torch_2_15() -> None:
    run_ranks(_reset, 2, HAS_FINALIZATION)


# - Interrupts of an optimizer's step

STEP = (optim.flat_step.__file__, optim.stand_in.__file__)


class Tracer:
    """Notes the lines that an optimizer's step runs, and raises a KeyboardInterrupt at one of them.

    Args:
        at: how many lines run before.
    """

    def __init__(self, at: int | None = None) -> None:
        self.lines: list[tuple[str, int]] = []
        self._at = at

    def run(self, call: Callable[[], object]) -> None:
        sys.settrace(self._trace)
        try:
            call()
        except KeyboardInterrupt:
            assert len(self.lines) == self._at
        finally:
            sys.settrace(None)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in STEP:
            return None
        if event == "line":
            if len(self.lines) == self._at:
                sys.settrace(None)
                raise KeyboardInterrupt
            self.lines.append((name, frame.f_lineno))
        return self._trace


def _steps_are_interrupted(attaches: bool, before: int) -> None:
    """Each unit steps as the unsharded model does, or not, whichever line is interrupted."""
    interrupt = partial(_is_interrupted, attaches, before)
    lines = interrupt(Tracer())
    last = {line: number for number, line in enumerate(lines)}
    assert len(last) > 30
    for at in last.values():
        interrupt(Tracer(at))


def _is_interrupted(attaches: bool, before: int, tracer: Tracer) -> list[tuple[str, int]]:
    models, optimizers = [], []
    for library in (optim, torch.optim):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        if library is optim:
            fully_shard(model[0])
            fully_shard(model)
        models.append(model)
        optimizers.append(library.AdamW(model.parameters(), lr=0.1, foreach=True))
    optimizer = optimizers[0]
    if attaches:
        optimizer.attach(models[0])

    def backward(number: int) -> None:
        models[number](torch.arange(6.0).view(2, 3)).square().sum().backward()

    def train(number: int) -> None:
        backward(number)
        optimizers[number].step()
        models[number].zero_grad()

    for _ in range(before):
        train(0)
        train(1)
    groups = [dict(group) for group in optimizer.param_groups]
    old = [param.full_tensor().clone() for param in models[0].parameters()]
    if not attaches:
        backward(0)
    tracer.run(partial(backward, 0) if attaches else optimizer.step)
    assert list(map(dict, optimizer.param_groups)) == groups
    assert optimizer.state.keys() <= set(models[0].parameters())
    models[0].zero_grad()
    with torch.no_grad():
        models[0](torch.ones(1, 3))  # the forward after a failed backward ends it
    has_stepped = [
        not torch.equal(param.full_tensor(), value)
        for param, value in zip(models[0].parameters(), old, strict=True)
    ]
    assert has_stepped[::2] == has_stepped[1::2]  # the parameters of each unit
    assert attaches or len({*has_stepped}) == 1
    backward(1)
    for param, has in zip(models[1].parameters(), has_stepped, strict=True):
        if not has:
            param.grad = None
    optimizers[1].step()
    models[1].zero_grad()
    for _ in range(2):
        train(0)
        train(1)
    for ours, expected in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours.full_tensor(), expected)
    return tracer.lines


@pytest.mark.parametrize(
    ("attaches", "before"),
    [
        (True, 0),
        (False, 2),
        pytest.param(False, 0, marks=pytest.mark.exhaustive),
        pytest.param(True, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_an_interrupted_step_of_an_optimizer_is_done_or_not(attaches: bool, before: int) -> None:
    run_ranks(_steps_are_interrupted, 1, attaches, before)
