"""Units may change their inputs in place, and callers a unit's outputs, as without sharding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.fsdp1_parity import FSDP, assert_equal, make, torch_fsdp, train
from support.launcher import run_ranks
from support.models import DIM, Subject, Unit
from support.parity import Case, Run, check, each
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard

from fsdp_ext import FSDPModule, fully_shard

FSDP2_RAISES = "its inputs are views that may not be changed in place"
Forward = Callable[..., Any]


class Block(nn.Module):
    """A unit whose forward is a function of it and of its inputs."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.run = forward
        self.linear = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.rand(DIM))
        self.seen: Tensor | None = None  # an input

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class Changing(Subject):
    """Two blocks that `forward` describes, called by `call`."""

    def __init__(self, forward: Forward, call: Forward) -> None:
        super().__init__()
        self.call = call
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(forward) for _ in range(2))
        self.head = nn.Linear(DIM, DIM)

    def units(self) -> list[Unit]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.call(block, x) * 0.5  # saves nothing that may not change
        return self.head(x)


class Grouped(Changing):
    """Both blocks are one unit."""

    def units(self) -> list[Unit]:
        return [list(self.blocks)]


class ScaledPair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.mark_dirty(a.mul_(2), b.mul_(3))
        return a, b

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * 2, b * 3


# - What units do to their inputs


def relu(block: Block, x: Tensor) -> Tensor:
    return block.linear(F.relu(x, inplace=True)) * block.scale


def shift(block: Block, x: Tensor) -> Tensor:
    x += block.scale
    return block.linear(x)


def scale(block: Block, x: Tensor) -> Tensor:
    x *= block.scale
    return block.linear(x)


def change_parts(block: Block, x: Tensor) -> Tensor:
    x[:, :2] *= block.scale[:2]
    x.view(-1).mul_(2)
    return block.linear(x)


def change_without_grad(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return block.linear(x)


def reshape(block: Block, x: Tensor) -> Tensor:
    return block.linear(x.t_().exp().t())


def change_dtensor(block: Block, x: DTensor) -> Tensor:
    x.relu_()
    return block.linear(x.to_local()) * block.scale


def change_twice(block: Block, x: Tensor, y: Tensor) -> Tensor:
    x += y
    y *= 2
    return block.linear(x) + y


def change_pair(block: Block, x: Tensor, y: Tensor) -> Tensor:
    x, y = ScaledPair.apply(x, y)
    torch._foreach_mul_([x, y], 0.5)
    return block.linear(x) + y


def change_last_of_many(block: Block, *inputs: Tensor) -> Tensor:
    inputs[-1].mul_(2)
    return block.linear(sum(inputs, torch.zeros(())))


def change_item(block: Block, items: list[dict[str, Tensor]]) -> Tensor:
    items[0]["x"] *= block.scale
    return block.linear(items[0]["x"])


def change_keyword(block: Block, *, x: Tensor) -> Tensor:
    return relu(block, x)


def hook(block: Block, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 2)
    return relu(block, x)


def plain(block: Block, x: Tensor) -> Tensor:
    return block.linear(x) * block.scale


def write(block: Block, x: Tensor, results: Tensor) -> None:
    results[:] = plain(block, x)


def view(block: Block, x: Tensor) -> Tensor:
    return plain(block, x).view(-1, 2, DIM // 2)


def same(block: Block, x: Tensor) -> Tensor:
    return x


def same_and_other(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, plain(block, x * 2)


# - What callers do


def residual(block: Block, x: Tensor) -> Tensor:
    return block(x) + x


def transposed_residual(block: Block, x: Tensor) -> Tensor:
    return block(x) + x.t()


def part_of_other(block: Block, x: Tensor) -> Tensor:
    wide = torch.cat([x, x.exp()], dim=1)
    return block(wide[:, :DIM]) + wide[:, :DIM] + wide[:, DIM:]


def by_columns(block: Block, x: Tensor) -> Tensor:
    return residual(block, (x * 2).t().contiguous().t())


def used_before(block: Block, x: Tensor) -> Tensor:
    before = x * 1.5
    x.register_hook(lambda gradient: gradient * 2)
    y = block(x)
    x.register_hook(lambda gradient: gradient * 3)
    return y + x + before


def only_changed(block: Block, x: Tensor) -> Tensor:
    block(x)
    return x


def only_changed_copy(block: Block, x: Tensor) -> Tensor:
    copy = x * 2
    block(copy)
    return copy + x


def into_buffer(block: Block, x: Tensor) -> Tensor:
    results = torch.zeros_like(x)
    block(x, results)
    return results + x


def into_part_of_buffer(block: Block, x: Tensor) -> Tensor:
    results = x.new_zeros(2, *x.shape)
    block(x, results[1])
    return results.sum(0) + x


def in_containers(block: Block, x: Tensor) -> Tensor:
    return block([{"x": x}]) + x


def by_keyword(block: Block, x: Tensor) -> Tensor:
    return block(x=x) + x


def as_dtensor(block: Block, x: Tensor) -> Tensor:
    mesh = init_device_mesh(x.device.type, (dist.get_world_size(),))
    sharded = DTensor.from_local(x, mesh, [Shard(0)])
    return block(sharded) + sharded.to_local()


def same_twice(block: Block, x: Tensor) -> Tensor:
    return block(x, x) + x


def with_view(block: Block, x: Tensor) -> Tensor:
    return block(x, x.view(x.shape)) + x


def with_base(block: Block, x: Tensor) -> Tensor:
    return block(x.view(x.shape), x) + x


def with_other(block: Block, x: Tensor) -> Tensor:
    other = x * 0.5
    return block(x, other) + x + other


def with_others(block: Block, x: Tensor) -> Tensor:
    first, second = x * 0.5, x + 1
    return block(first, second, x.view(-1, DIM), x) + first + second + x


def seen(block: Block, x: Tensor) -> Tensor:
    x.retain_grad()
    block.seen = x
    return x * 1.5 + block(x) + x


def seen_second(block: Block, x: Tensor) -> Tensor:
    block.seen = other = x * 0.5
    other.retain_grad()
    return block(x, other) + x + other


def joined(block: Block, x: Tensor) -> Tensor:
    y = block.join_empty(x) if isinstance(block, FSDPModule) else x
    y *= block.linear.in_features
    return y + x


def change_output(block: Block, x: Tensor) -> Tensor:
    y = block(x)
    y += 1
    y.relu_()
    return y.view(x.shape) + x


def change_both_outputs(block: Block, x: Tensor) -> Tensor:
    same, y = block(x * 2)
    same.mul_(2)
    y.view(-1).relu_()
    return same + y


def change_and_raise(block: Block, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 2)
    raise KeyError


def caught(block: Block, x: Tensor) -> Tensor:
    before = x.grad_fn
    with pytest.raises(KeyError):
        block(x)
    assert x.grad_fn is before
    return x


def step_with_input_gradients(run: Run, step: int) -> tuple[Tensor, ...]:
    """Also return the gradients of the blocks' inputs, as autograd tells them in two ways."""
    run.optimizer.zero_grad()
    loss = run.loss(step)
    inputs = [block.seen for block in run.model.blocks]
    gradients = torch.autograd.grad(loss, inputs, retain_graph=True)
    run.backward(loss)
    run.optimizer.step()
    return (loss, *gradients, *(x.grad for x in inputs))


def changing(
    fact: str, forward: Forward, call: Forward, kind: type[Changing] = Changing, **settings: Any
) -> Case:
    subject = partial(kind, forward, call)
    return Case(fact, subject, (2,), fsdp2_fails=FSDP2_RAISES, steps=3, **settings)


CASES = [
    changing("nn.ReLU(inplace=True)", relu, residual),
    changing("a parameter is added", shift, residual),
    changing("parts of it change", change_parts, residual),
    changing("changed without gradients", change_without_grad, residual),
    changing("transposed in place", reshape, transposed_residual),
    changing("a part of another tensor", shift, part_of_other),
    changing("stored by columns", scale, by_columns),
    changing("used and hooked before and afterwards", relu, used_before),
    changing("hooked inside", hook, used_before),
    changing("the changed input alone is used", scale, only_changed),
    changing("a view of it alone is used", change_parts, only_changed),
    changing("a module of a group changes what the caller uses", scale, only_changed_copy, Grouped),
    changing("results are written into a buffer", write, into_buffer),
    changing("results are written into a part of a buffer", write, into_part_of_buffer),
    changing("in a list of dicts", change_item, in_containers),
    changing("a keyword argument", change_keyword, by_keyword),
    changing("a DTensor", change_dtensor, as_dtensor),
    changing("the same tensor twice", change_twice, same_twice),
    changing("a tensor and a view of it", change_twice, with_view),
    changing("a view and its base", change_twice, with_base),
    changing("two changed at once", change_pair, with_other),
    changing("the last of four", change_last_of_many, with_others),
    changing("an output that changes", plain, change_output),
    changing("an output that is a view and changes", view, change_output),
    changing("an input that is returned and changes", same, change_output),
    changing("one of the outputs is the input", same_and_other, change_both_outputs),
    changing("a unit that raises leaves its input as it was", change_and_raise, caught),
    changing("what join_empty returns changes", plain, joined),
    changing("its gradient is retained", relu, seen, step=step_with_input_gradients),
    changing("the second one's is", change_twice, seen_second, step=step_with_input_gradients),
    changing("it does not change, and its gradient is retained", plain, seen,
             step=step_with_input_gradients),
]  # fmt: skip


@each(CASES, every=3)
def test_gradients_are_those_of_the_unsharded_model(case: Case, world_size: int) -> None:
    check(case, world_size)


def _under_fsdp1() -> None:
    wrapping = {"auto_wrap_policy": ModuleWrapPolicy({Block})}
    for forward, call in ((relu, residual), (shift, part_of_other), (plain, change_output)):
        subject = partial(Changing, forward, call)
        ours, theirs = make(subject), make(subject)
        got = train(FSDP(ours, **wrapping), ours)
        assert_equal(got, train(torch_fsdp(theirs, **wrapping), theirs))


def test_gradients_are_those_of_fsdp1() -> None:
    run_ranks(_under_fsdp1, 2)


def change_leaf(block: Block, x: Tensor) -> Tensor:
    return block(x.detach().requires_grad_()) + x


def saved_then_changed(block: Block, x: Tensor) -> Tensor:
    y = block.linear(x)
    x.mul_(2)
    return y


def part_of_several(block: Block, x: Tensor) -> Tensor:
    return residual(block, torch.cat([x, x], dim=1).chunk(2, dim=1)[1])


def _errors() -> None:
    for forward, call, message in (
        (relu, change_leaf, "a leaf Variable that requires grad is being used"),
        (saved_then_changed, residual, "has been modified by an inplace operation"),
        (relu, part_of_several, "is a view and is being modified inplace"),
    ):
        torch.manual_seed(0)
        model: Any = Changing(forward, call)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        with pytest.raises(RuntimeError, match=message):
            model(torch.ones(3, DIM)).sum().backward()


def test_what_autograd_forbids_raises() -> None:
    run_ranks(_errors, 2)


class Probe(nn.Module):
    """A unit that asks for gradients of its input inside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.found: list[Tensor | None] = []

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        inside = x * 3
        for y in (inside, before):
            (found,) = torch.autograd.grad(y.sum(), x, retain_graph=True, allow_unused=True)
            self.found.append(found)
        return self.linear(inside)


def _probe(shard: Callable[..., Any]) -> list[Tensor | None]:
    torch.manual_seed(0)
    probe = shard(Probe())
    x = torch.ones(3, DIM, requires_grad=True) * 2
    probe(x, x * 5).sum().backward()
    found: list[Tensor | None] = probe.found
    return found


def _probes() -> None:
    for shard in (fully_shard, torch.distributed.fsdp.fully_shard):
        inside, before = _probe(shard)
        assert inside is not None
        assert torch.equal(inside, torch.full((3, DIM), 3.0))
        assert before is None


def test_grad_inside_a_unit_sees_the_unit_alone_as_under_fsdp2() -> None:
    run_ranks(_probes, 2)
