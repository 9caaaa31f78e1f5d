"""Wrappers that forward attributes can be sharded around modules that are sharded already."""

from __future__ import annotations

from functools import partial

import torch
from support import models
from support.parity import Case, Run, check, each
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)


class Wrapped(models.Stack):
    """Blocks in wrappers of activation checkpointing, and both are sharded."""

    def __init__(self, implementation: CheckpointImpl) -> None:
        super().__init__()
        for place, block in enumerate(self.blocks):
            self.blocks[place] = checkpoint_wrapper(block, checkpoint_impl=implementation)

    def units(self) -> list[models.Unit]:
        units: list[models.Unit] = []
        for wrapper in self.blocks:
            units += [wrapper._checkpoint_wrapped_module, wrapper]
        return units


def unshard_by_hand(run: Run) -> None:
    """Call methods that a wrapper's class also has, on the wrapper."""
    if run.sharded:
        wrapper = run.model.blocks[0]
        wrapper.unshard()
        wrapper.reshard()


CASES = [
    Case("sharded twice", partial(Wrapped, CheckpointImpl.NO_REENTRANT),
         after_sharding=unshard_by_hand),
    Case("sharded twice, reentrant", partial(Wrapped, CheckpointImpl.REENTRANT)),
    Case("sharded twice in bf16", partial(Wrapped, CheckpointImpl.NO_REENTRANT), unsharded=None,
         precision={"param_dtype": torch.bfloat16}),
]  # fmt: skip


@each(CASES)
def test_a_wrapper_of_a_sharded_module_can_be_sharded(case: Case, world_size: int) -> None:
    check(case, world_size)
