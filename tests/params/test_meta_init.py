"""Models made on the meta device are sharded there, then get memory and values."""

from __future__ import annotations

import torch
from support import models
from support.models import Stack
from support.parity import Case, Run, check, each
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


class OnMeta(Stack):
    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()
            self.register_buffer("shift", torch.zeros(models.DIM))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift.to(x.dtype))


class MixedOnMeta(Stack):
    """The blocks are on meta, but the root's own parameters are not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.to("meta")


class PartsOnMeta(Stack):
    """Each unit has a layer on meta and another one that is not."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.stem, *(block.up for block in self.blocks)):
            module.to("meta")


def full_state(run: Run) -> dict[str, Tensor]:
    """Return values for all parameters and buffers, the same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(tensor.shape, generator=generator) * 0.3
        for name, tensor in run.model.state_dict().items()
    }


def like(old: Tensor, new: Tensor) -> Tensor:
    return (
        distribute_tensor(new, old.device_mesh, old.placements) if isinstance(old, DTensor) else new
    )


def load_after_to_empty(run: Run) -> None:
    state = full_state(run)
    run.model.to_empty(device="cpu")
    old = run.model.state_dict()
    assert all(not tensor.is_meta for tensor in old.values())
    run.model.load_state_dict({name: like(old[name], state[name]) for name in old})


def assign_without_to_empty(run: Run) -> None:
    state, old = full_state(run), run.model.state_dict()
    run.model.load_state_dict({name: like(old[name], state[name]) for name in old}, assign=True)


def assign_those_on_meta(run: Run) -> None:
    """Assign values to parameters on meta only."""
    state, old = full_state(run), run.model.state_dict()
    on_meta = {name: like(old[name], state[name]) for name in old if old[name].is_meta}
    assert on_meta
    run.model.load_state_dict(on_meta, assign=True, strict=False)


def load_after_to_empty_of_parts(run: Run) -> None:
    state = full_state(run)
    for module in (run.model.stem, *(block.up for block in run.model.blocks)):
        module.to_empty(device="cpu")
    old = run.model.state_dict()
    run.model.load_state_dict({name: like(old[name], state[name]) for name in old})


def copy_in_after_to_empty(run: Run) -> None:
    state = full_state(run)
    run.model.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in run.model.named_buffers():
            tensor.copy_(state[name])
        for name, parameter in run.model.named_parameters():
            parameter.fill_(0.5).add_(like(parameter, state[name])).sub_(0.5)


def reset_each_module(run: Run) -> None:
    """Draw each rank's shards on that rank."""
    run.model.to_empty(device="cpu")
    torch.manual_seed(11)
    run.model.shift.zero_()
    for module in run.model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


CASES = [
    Case("to_empty, then a full state loaded", OnMeta,
         after_sharding=load_after_to_empty),
    Case("to_empty, then values written in place", OnMeta, (2,),
         after_sharding=copy_in_after_to_empty),
    # No unsharded model draws the same numbers on 2 ranks.
    Case("to_empty, then each module reset", OnMeta, after_sharding=reset_each_module,
         unsharded=None),
    Case("to_empty, then each module reset on one rank", OnMeta, (1,),
         after_sharding=reset_each_module),
    Case("a full state assigned", OnMeta, after_sharding=assign_without_to_empty),
    Case("some units on meta, assigned", MixedOnMeta, after_sharding=assign_those_on_meta),
    Case("parts of units on meta, assigned", PartsOnMeta, after_sharding=assign_those_on_meta),
    Case("parts of units on meta, to_empty", PartsOnMeta,
         after_sharding=load_after_to_empty_of_parts),
    Case("to_empty in mixed precision", OnMeta, after_sharding=load_after_to_empty,
         precision={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
]  # fmt: skip


@each(CASES)
def test_models_from_meta_train_as_unsharded_and_as_under_fsdp2(
    case: Case, world_size: int
) -> None:
    check(case, world_size)
