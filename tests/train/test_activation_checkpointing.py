"""torch.utils.checkpoint inside units, around units and around the root."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from support import models
from support.launcher import run_ranks
from support.models import Recomputed
from support.parity import Case, Run, check, each, whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_ext import fully_shard

KINDS = {"reentrant": True, "not reentrant": False}


def accumulate(run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    losses = [run.loss(step, 0)]
    run.backward(losses[0], sync=False)
    losses.append(run.loss(step, 1))
    run.backward(losses[1])
    run.optimizer.step()
    return tuple(losses)


def around_the_root(use_reentrant: bool, run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    (x,), _ = run.batch(step)
    loss = run.model.loss(checkpoint(run.model, x, use_reentrant=use_reentrant))
    run.backward(loss)
    run.optimizer.step()
    return loss, x.grad


class RecomputedFrozen(Recomputed):
    """Recomputed blocks whose first layers are frozen."""

    def __init__(self, **where: bool) -> None:
        super().__init__(**where)
        for block in self.blocks:
            block.norm.requires_grad_(False)
            block.up.requires_grad_(False)


class RecomputedTwice(Recomputed):
    """A recomputed block that runs twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


CASES = [
    case
    for name, reentrant in KINDS.items()
    for case in [
        Case(f"inside units, {name}",
             partial(Recomputed, inside=True, around=False, use_reentrant=reentrant)),
        Case(f"around units, {name}",
             partial(Recomputed, inside=False, around=True, use_reentrant=reentrant)),
        Case(f"around units and inside them, {name}",
             partial(Recomputed, inside=True, around=True, use_reentrant=reentrant)),
        Case(f"around units that are not resharded after forward, {name}",
             partial(Recomputed, inside=False, around=True, use_reentrant=reentrant),
             options={"reshard_after_forward": False}),
        Case(f"around units, gradients accumulated, {name}",
             partial(Recomputed, inside=False, around=True, use_reentrant=reentrant),
             step=accumulate),
        Case(f"around units with frozen layers, {name}",
             partial(RecomputedFrozen, inside=False, around=True, use_reentrant=reentrant)),
        Case(f"inside units with frozen layers, {name}",
             partial(RecomputedFrozen, inside=True, around=False, use_reentrant=reentrant)),
        Case(f"around a unit that runs twice, {name}",
             partial(RecomputedTwice, inside=False, around=True, use_reentrant=reentrant),
             fsdp2_fails="it loses one of the two gradients" if reentrant else None),
        Case(f"around the root, {name}", models.TrainableInput,
             step=partial(around_the_root, reentrant)),
    ]
]  # fmt: skip


@each(CASES, every=3)
def test_recomputes_as_unsharded_and_as_fsdp2(case: Case, world_size: int) -> None:
    check(case, world_size)


class Observed(nn.Module):
    """Notes which blocks have unsharded parameters or gradients when one is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.seen: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(self.run, block, x, use_reentrant=True)
        return x

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        x = block(x)
        self.seen.append([i for i, each in enumerate(self.blocks) if self.is_whole(each)])
        return x

    @staticmethod
    def is_whole(block: Any) -> bool:
        has_gradient = block.unsharded is not None and block.unsharded.grad is not None
        return block.weight is block.unsharded or has_gradient


def _recomputed_regions() -> None:
    model: Any = Observed()
    for block in model.blocks:
        block.unsharded = None
        fully_shard(block, bucket_bytes=0)
        block.register_forward_pre_hook(_note_unsharded)
    fully_shard(model)
    for _ in range(2):
        model.seen.clear()
        model(torch.ones(2, 16)).sum().backward()
    assert model.seen == [[], [], [], [], [], [4], [3], [2], [1], [0]]


def _note_unsharded(block: Any, _: object) -> None:
    block.__dict__["unsharded"] = block.weight


def test_reentrant_regions_end_one_by_one() -> None:
    run_ranks(_recomputed_regions, 2)


class Nested(nn.Module):
    """A region that keeps its inputs, of one unit, in a reentrant region of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        x = torch.tanh(checkpoint(self.inner, x, use_reentrant=False))
        return torch.tanh(self.after(x))


class NestedRegions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(16, 16), nn.ModuleList(Nested() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def _nested_regions() -> None:
    models: list[Any] = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        models.append(NestedRegions())
        if is_sharded:
            for block in models[1].blocks:
                fully_shard(block.inner, bucket_bytes=0)
                fully_shard(block, bucket_bytes=0)
            fully_shard(models[1])
        for _ in range(2):
            models[-1](torch.ones(2, 16)).sum().backward()
    for want, mine in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(whole(mine.grad), want.grad)


def test_a_region_inside_a_reentrant_one_may_have_units_of_its_own() -> None:
    run_ranks(_nested_regions, 2)
