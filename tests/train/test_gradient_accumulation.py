"""Gradients accumulate over micro-batches, reduced after each or only after the last."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support import models
from support.accumulation import EACH_TIME, LAST_TIME, accumulate
from support.launcher import run_ranks
from support.models import Stack
from support.parity import LONG_STEPS, ROUNDING, Case, Run, check, each
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_ext import fully_shard


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


# - Changes while gradients accumulate without sync


def accumulate_with_changes(
    change: Callable[[Run, bool], None], run: Run, step: int
) -> tuple[Tensor, ...]:
    """Change something after the first of three micro-batches, and change it back later.

    In odd steps that is after the last one, which is reduced. In even steps it is before that.
    """
    run.optimizer.zero_grad()
    losses = []
    for micro_batch in range(3):
        last = micro_batch == 2
        if micro_batch == 1:
            change(run, True)
        if last and step % 2 == 0:
            change(run, False)
        losses.append(run.loss(step, micro_batch))
        run.backward(losses[-1], sync=last)
    if step % 2 == 1:
        change(run, False)
    run.optimizer.step()
    return tuple(losses)


def freeze(run: Run, on: bool) -> None:
    """Freeze a parameter and a whole unit."""
    run.model.blocks[0].up.weight.requires_grad_(not on)
    run.model.blocks[1].requires_grad_(not on)


def freeze_after_evaluation(run: Run, on: bool) -> None:
    """Units that stay unsharded have their sharded parameters shown then."""
    with torch.no_grad():
        run.loss(step=0, micro_batch=2)
    freeze(run, on)


def freeze_the_start(run: Run, on: bool) -> None:
    """Backward does not reach the first unit then."""
    run.model.stem.requires_grad_(not on)
    run.model.blocks[0].requires_grad_(not on)


def train_others(run: Run, on: bool) -> None:
    """Unfreeze what is frozen in one unit, and freeze the rest of it and another unit."""
    run.model.blocks[1].requires_grad_(not on)
    run.model.blocks[1].up.requires_grad_(on)
    run.model.blocks[2].down.requires_grad_(not on)


def change_settings(run: Run, on: bool) -> None:
    if not run.sharded:
        return
    run.model.set_reshard_after_forward(not on)
    first, second, third = run.model.blocks
    run.model.set_modules_to_forward_prefetch([first, second, third] if on else [])
    third.set_modules_to_backward_prefetch([second, first] if on else [])
    first.note = nn.Identity()


def divide_by(factors: tuple[float, float], run: Run, on: bool) -> None:
    # On one rank, FSDP2 divides twice with sums in fp16.
    is_wrong = dist.get_world_size() == 1 and "reduce_dtype" in run.case.precision
    for unit in [run.model, *run.units]:
        unit.set_gradient_divide_factor(1.0 if is_wrong else factors[on])


def add_up(run: Run) -> None:
    """Without it, FSDP2 needs an operation for a factor of the user that gloo does not have."""
    if dist.get_world_size() > 1:  # on one rank, FSDP2 would divide twice
        for unit in [run.model, *run.units]:
            unit.set_force_sum_reduction_for_comms(True)


def changing(change: Callable[[Run, bool], None]) -> Any:
    return partial(accumulate_with_changes, change)


# The mean of a sum and the sum of means are rounded differently.
REORDERED = ROUNDING[torch.float32]


def cut_into_messages(run: Run) -> None:
    """Let each unit of ours be a bucket of several messages."""
    if run.under_test:
        for unit in run.model._fsdp_ext_units(recurse=True):
            unit.change(bucket_bytes=0, max_message_bytes=1024)


def keep_unsharded(run: Run) -> None:
    """Let each unit of ours keep its unsharded parameters, which the user freezes then."""
    if run.under_test:
        run.model.set_reshard_after_backward(False)


CASES = [
    Case("reduced each time", Stack, step=EACH_TIME),
    Case("reduced the last time", Stack, step=LAST_TIME),
    Case("reduced the first and the last time", Stack,
         step=partial(accumulate, (True, False, True))),
    Case("reduced each time, zeroed in place", Stack, step=accumulate_in_place),
    Case("reduced each time, zeroed every third step", Stack, step=accumulate_for_ever,
         steps=LONG_STEPS),
    Case("over steps without sync", Stack, step=accumulate_over_steps_without_sync,
         steps=LONG_STEPS),
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
    Case("freezing", Stack, step=changing(freeze)),
    Case("freezing after an evaluation without resharding", Stack,
         step=changing(freeze_after_evaluation), options={"reshard_after_forward": False},
         fsdp2_fails="adds gradients of parameters that were frozen while unsharded"),
    Case("freezing with mixed precision", Stack, step=changing(freeze), unsharded=None,
         precision={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
    Case("freezing the first layers", Stack, step=changing(freeze_the_start)),
    Case("freezing in nested units", models.NestedUnits, step=changing(train_others)),
    Case("freezing and unfreezing", models.FrozenBesideTrainable, step=changing(train_others)),
    Case("freezing and unfreezing, a bucket for each unit", models.FrozenBesideTrainable,
         step=changing(train_others), after_sharding=cut_into_messages),
    Case("freezing parameters that stay unsharded", Stack, step=changing(freeze),
         after_sharding=keep_unsharded),
    Case("changes of settings", Stack, step=changing(change_settings)),
    Case("changes of the divisor", Stack, step=changing(partial(divide_by, (2.0, 8.0))),
         after_sharding=add_up, unsharded=None),
    Case("changes of the divisor, no powers of two", Stack, after_sharding=add_up, unsharded=None,
         step=changing(partial(divide_by, (3.0, 5.0))), fsdp2=REORDERED),
    Case("changes of the divisor with sums in fp16", Stack, after_sharding=add_up, unsharded=None,
         step=changing(partial(divide_by, (2.0, 8.0))), fsdp2=ROUNDING[torch.float16],
         precision={"param_dtype": torch.float16, "reduce_dtype": torch.float16}),
]  # fmt: skip


@each(CASES, every=3)
def test_accumulates_as_unsharded_and_as_fsdp2(case: Case, world_size: int) -> None:
    check(case, world_size)


class Uneven(nn.Module):
    """Each rank leaves out another one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != dist.get_rank():
                x = torch.tanh(layer(x))
        return x


def _unused_on_some_ranks() -> None:
    def train(model: Any, *, sharded: bool) -> list[Tensor | None]:
        model.layers[2].requires_grad_(False)
        for micro_batch, (frozen, trained) in enumerate([(2, 3), (0, 2), (1, 0)]):
            model.layers[frozen].requires_grad_(False)
            model.layers[trained].requires_grad_(True)
            if sharded:
                model.set_requires_gradient_sync(micro_batch == 2)
            batch = torch.full((2, 4), micro_batch + dist.get_rank() + 1.0) / 4
            model(batch).square().sum().backward()
        return [param.grad for param in model.parameters()]

    got = train(fully_shard(Uneven()), sharded=True)
    for gradient, ours in zip(train(Uneven(), sharded=False), got, strict=True):
        reduced = ours.full_tensor()
        expected = torch.zeros_like(reduced) if gradient is None else gradient
        dist.all_reduce(expected)
        assert torch.equal(reduced, expected / dist.get_world_size())


def test_parameters_that_some_ranks_leave_out_may_be_frozen_while_gradients_accumulate() -> None:
    run_ranks(_unused_on_some_ranks, 2)


def changes_of_gradients() -> dict[str, Callable[[nn.Module], None]]:
    """Return what a user may do to `.grad` between two backwards."""

    def over_gradients(change: Callable[[nn.Parameter, Tensor], None]) -> Callable[..., None]:
        def over(model: nn.Module) -> None:
            for param in model.parameters():
                if param.grad is not None:
                    change(param, param.grad)

        return over

    def halve(param: nn.Parameter, grad: Tensor) -> None:
        grad.mul_(0.5)

    return {
        "dropped": nn.Module.zero_grad,
        "halved": over_gradients(halve),
        "replaced": over_gradients(lambda param, grad: setattr(param, "grad", grad * 2)),
    }


def changed_between_backwards() -> None:
    def gradients_of(
        shard: Callable[..., Any], switch: str, on: tuple[bool, ...], change: Callable[..., None]
    ) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        model: Any = Stack()
        has_replicas = switch == "set_requires_all_reduce"
        shape, names = ((2, 1), ("replicas", "shards")) if has_replicas else ((2,), ("shards",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for unit in (*model.units(), model):
            shard(unit, mesh=mesh)
        for step, value in enumerate(on):
            getattr(model, switch)(value)
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            args, kwargs = model.batch(generator)
            model.loss(model(*args, **kwargs)).backward()
            if step < len(on) - 1:
                change(model)
        return {
            name: param.grad if param.grad is None else param.grad.full_tensor().clone()
            for name, param in model.named_parameters()
        }

    syncs = ((True, True, True), (False, False, True), (True, False, True))
    programs = [("set_requires_gradient_sync", each) for each in syncs]
    programs.append(("set_requires_all_reduce", (False, False, True)))
    for switch, on in programs:
        for name, change in changes_of_gradients().items():
            got = gradients_of(fully_shard, switch, on, change)
            want = gradients_of(torch_fully_shard, switch, on, change)
            assert got.keys() == want.keys()
            for param, expected in want.items():
                value = got[param]
                where = f"{name}, {switch}, {on}, {param}"
                assert (value is None) == (expected is None), where
                if value is not None and expected is not None:
                    assert torch.equal(value, expected), where


def test_what_is_done_to_gradients_between_backwards_counts_as_under_fsdp2() -> None:
    run_ranks(changed_between_backwards, 2)
