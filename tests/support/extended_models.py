"""Models with parameters of tensor extensions, and their training beside FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_ext
from fsdp_ext import MixedPrecisionPolicy
from support import parity
from support.extensions import Model, checkpointed, contents
from support.parity import device

SYSTEMS = (fsdp_ext.fully_shard, torch.distributed.fsdp.fully_shard)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a model is sharded and trained.

    Attributes:
        options: arguments of each `fully_shard` call of both systems.
        ours: more arguments of fsdp_ext's.
        mesh: shape of a 2-D mesh; None for all ranks.
        units: whether blocks are units of their own.
        checkpoints: whether blocks run again in backward.
        micro_batches: how many backwards there are for each step.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    ours: dict[str, Any] = dataclasses.field(default_factory=dict)
    mesh: tuple[int, int] | None = None
    units: bool = True
    checkpoints: bool = False
    micro_batches: int = 1

    def model(self, fully_shard: Callable[..., Any]) -> Any:
        options = dict(self.options)
        if fully_shard is fsdp_ext.fully_shard:
            options |= self.ours
        if self.mesh is not None:
            options["mesh"] = init_device_mesh(
                device().type, self.mesh, mesh_dim_names=("replicate", "shard")
            )
        torch.manual_seed(0)
        model = Model()
        for block in model.blocks if self.units else ():
            if self.checkpoints:
                block.forward = checkpointed(block.forward)
            fully_shard(block, **options)
        return fully_shard(model, **options)


def batch(step: int, micro_batch: int = 0) -> Tensor:
    seed = 100 * step + 10 * micro_batch + dist.get_rank()
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(seed))


def poison(model: Any) -> None:
    """Fill slots with NaN when they are released, if fsdp_ext has sharded the model."""
    if isinstance(model, fsdp_ext.FSDPModule) and model._fsdp_ext_unit.root is not None:
        model._fsdp_ext_unit.root.impl.set_poison_released_slots(True)


def reshard(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.reshard()


def train_step(model: Any, optimizer: Any, step: int, micro_batches: int) -> list[Tensor]:
    optimizer.zero_grad()
    seen = []
    for micro_batch in range(micro_batches):
        model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
        loss = model(batch(step, micro_batch)).float().square().sum()
        loss.backward()
        seen.append(loss.detach())
    optimizer.step()
    poison(model)
    with torch.inference_mode() if step == 1 else torch.no_grad():
        seen.append(model(batch(step, 9)).clone())
    reshard(model)  # FSDP2 keeps parameters that do not reshard after forward
    return seen


def assert_same(ours: Tensor, theirs: Tensor, what: str) -> None:
    """Compare two DTensors bit for bit, with all tensors in their local tensors."""
    assert isinstance(ours, DTensor), what
    assert isinstance(theirs, DTensor), what
    assert ours.placements == theirs.placements, what
    assert ours.shape == theirs.shape, what
    assert ours.stride() == theirs.stride(), what
    assert type(ours._local_tensor) is type(theirs._local_tensor), what
    parity.assert_same(what, contents(theirs._local_tensor), contents(ours._local_tensor))


def compare(models: list[Any], when: str) -> None:
    parameters = zip(models[0].named_parameters(), models[1].named_parameters(), strict=True)
    for (name, ours), (other_name, theirs) in parameters:
        assert name == other_name
        assert ours.requires_grad == theirs.requires_grad
        assert_same(ours, theirs, f"{name}, {when}")
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            assert_same(ours.grad, theirs.grad, f"gradient of {name}, {when}")
