"""torch.utils.checkpoint inside units, around units and around the root."""

from __future__ import annotations

from functools import partial

from support import models
from support.models import Recomputed
from support.parity import Case, Run, check, each
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
