"""Outputs that hide tensors, and gradients of gradients, train as the unsharded model does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import models
from support.launcher import run_ranks
from support.models import DIM, Mlp, Stack
from support.parity import ROUNDING, SYSTEM, Case, Run, Sharded, check, each, load_system
from torch import Tensor, nn

from fsdp_ext import fully_shard
from fsdp_ext._util.containers import opaque_type_in


class Box:
    def __init__(self, content: Tensor) -> None:
        self.content = content


class BoxedMlp(Mlp):
    def forward(self, x: Tensor) -> Any:
        return Box(super().forward(x))


class LazyMlp(Mlp):
    """Its forward runs when its output is iterated over, after the module has returned."""

    def forward(self, x: Tensor) -> Any:
        yield super().forward(x)


class Hidden(Stack):
    """Blocks that return boxes or generators."""

    def __init__(self, block: type[Mlp]) -> None:
        super().__init__()
        for place in range(len(self.blocks)):
            self.blocks[place] = block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            out = block(x)
            x = next(out) if isinstance(out, Iterator) else out.content
        return self.head(x)


def quietly(run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = run.loss(step)
    run.backward(loss)
    run.optimizer.step()
    return (loss,)


def penalised(run: Run, step: int) -> tuple[Tensor, ...]:
    """Add the gradient with respect to the inputs to the loss."""
    run.optimizer.zero_grad()
    (x,), _ = run.batch(step)
    x.requires_grad_()
    output = run.forward(((x,), {}))
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    loss = run.model.loss(output) + gradient.square().mean()
    run.backward(loss)
    run.optimizer.step()
    return loss, gradient


FREED = "it has freed the parameters that the second backward reads"
# Autograd runs the nodes with the highest numbers first, and each thread numbers its nodes from 0.
# On a GPU the first backward runs on a thread of autograd, so the nodes that it makes have low
# numbers. The second backward runs them last, after it has resharded the units.
PENALTY = "a gradient penalty"
UNSEEN = "its hooks do not look for tensors in such outputs"
CASES = [
    Case("boxes", partial(Hidden, BoxedMlp), step=quietly, fsdp2_fails=UNSEEN),
    Case("generators", partial(Hidden, LazyMlp), step=quietly, fsdp2_fails=UNSEEN),
    Case(PENALTY, Stack, step=penalised, unsharded=ROUNDING[torch.float32], fsdp2_fails=FREED),
    Case("a gradient penalty of units that stay unsharded", Stack, step=penalised,
         options={"reshard_after_forward": False}, unsharded=ROUNDING[torch.float32],
         fsdp2_fails=FREED),
]  # fmt: skip


@each(CASES)
def test_what_hooks_cannot_see_trains_as_the_unsharded_model(case: Case, world_size: int) -> None:
    check(case, world_size)


def _warning() -> None:
    run = Sharded(load_system(SYSTEM), Case("", partial(Hidden, BoxedMlp)))
    with pytest.warns(
        UserWarning, match=r"unit 'blocks.0' returned a Box, .*dataclasses"
    ) as caught:
        run.backward(run.loss(0))
    assert len(caught) == 3  # once for each unit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.backward(run.loss(1))
    root = run.model._fsdp_ext_unit.root
    assert [root.impl.state(number) for number in range(4)] == ["sharded"] * 4
    with torch.no_grad():
        run.loss(2)  # keeps nothing
    assert root.impl.state(1) == "sharded"


def test_a_warning_names_the_unit_once_and_backward_reshards_it() -> None:
    run_ranks(_warning, 1)


def test_only_objects_that_may_hide_tensors_are_opaque() -> None:
    box = Box(torch.ones(1))
    pair = models.Pair(torch.ones(1), torch.ones(1))
    seen = {"a": [1, None, "text", torch.float32], "b": (pair, {2.0}), "c": torch.ones(DIM)}
    assert opaque_type_in(seen) == ""
    assert opaque_type_in({**seen, "d": [box]}) == "Box"
    assert opaque_type_in(_ for _ in ()) == "generator"


class PutsGradient(torch.autograd.Function):
    """A product whose backward puts the weight's gradient where autograd would add it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return x @ layer.weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        ctx.layer.weight.grad = gradients[0].t() @ x
        return gradients[0] @ ctx.layer.weight, None


class Fused(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return PutsGradient.apply(x, self)


def _gradients_put_there() -> None:
    def gradients(shards: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Fused(4, 4, bias=False), nn.Linear(4, 4))
        for module in [*model, model] if shards else []:
            fully_shard(module)
        model(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
        return [param.grad for param in model.parameters()]

    for ours, plain in zip(gradients(True), gradients(False), strict=True):
        dist.all_reduce(plain)
        torch.testing.assert_close(ours.full_tensor(), plain / dist.get_world_size())


def test_gradients_that_a_function_puts_there_are_reduced() -> None:
    run_ranks(_gradients_put_there, 2)
