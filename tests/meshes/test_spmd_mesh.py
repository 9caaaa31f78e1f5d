"""`dp_mesh_dims` names data parallelism in a mesh on which all parameters are DTensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.messages import check_messages
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_ext

pytestmark = pytest.mark.skipif(
    not hasattr(torch_fsdp, "DataParallelMeshDims"), reason="this torch has no DataParallelMeshDims"
)

WIDTH, HIDDEN = 8, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@dataclasses.dataclass(frozen=True)
class Setup:
    """A mesh, and the names of its dimensions that shard, that replicate, and that cut layers."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    shard: str | tuple[str, ...]
    replicate: str | None = None

    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", self.shape, mesh_dim_names=self.names)

    def placements(self, mesh: DeviceMesh, cut: Shard | Replicate) -> list[Shard | Replicate]:
        return [cut if name == "tp" else Replicate() for name in self.names]

    def model(self, fully_shard: Callable[..., Any], mesh: DeviceMesh) -> Any:
        cuts = {"up": Shard(0), "down": Shard(1)}

        def distribute(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            cut = cuts.get(name.rsplit(".", 1)[-1], Replicate())
            for attribute, parameter in list(module.named_parameters(recurse=False)):
                placements = self.placements(mesh, cut)
                tensor = distribute_tensor(parameter.detach(), mesh, placements)
                module.register_parameter(attribute, nn.Parameter(tensor))

        torch.manual_seed(0)
        model = distribute_module(nn.Sequential(Block(), Block()), mesh, distribute)
        dims = torch_fsdp.DataParallelMeshDims(shard=self.shard, replicate=self.replicate)
        for block in model:
            fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
        return fully_shard(model, mesh=mesh, dp_mesh_dims=dims)

    def batch(self, mesh: DeviceMesh, step: int) -> DTensor:
        """Return a batch that all data-parallel ranks share."""
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        placements = [Replicate() if name == "tp" else Shard(0) for name in self.names]
        return distribute_tensor(batch, mesh, placements)


def _train_beside_fsdp2(setup: Setup) -> None:
    mesh = setup.mesh()
    systems = (fsdp_ext.fully_shard, torch_fsdp.fully_shard)
    models = [setup.model(fully_shard, mesh) for fully_shard in systems]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step in range(3):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(setup.batch(mesh, step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.full_tensor())
        assert torch.equal(*losses)
        parameters = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
        for (name, ours), theirs in parameters:
            for mine, other in ((ours, theirs), (ours.grad, theirs.grad)):
                assert mine.placements == other.placements, name
                assert mine.device_mesh == other.device_mesh, name
                assert torch.equal(mine.to_local(), other.to_local()), name


@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(Setup((2, 2), ("dp", "tp"), "dp"), id="one dimension"),
        pytest.param(
            Setup((2, 2, 1), ("replicate", "shard", "tp"), "shard", "replicate"),
            id="hybrid sharding",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            Setup((2, 1, 2), ("dp", "cp", "tp"), ("dp", "cp")),
            id="several dimensions that shard",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_models_on_one_mesh_train_as_under_fsdp2(setup: Setup) -> None:
    run_ranks(_train_beside_fsdp2, 4, setup)


def _refusals() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    dims = torch_fsdp.DataParallelMeshDims

    def shard(module: nn.Module, **names: Any) -> None:
        fsdp_ext.fully_shard(module, mesh=mesh, dp_mesh_dims=dims(**names))

    plain, rows, sums = (nn.Linear(2, 2, bias=False) for _ in range(3))
    ones = torch.ones(2, 2)
    rows.weight = nn.Parameter(distribute_tensor(ones, mesh, [Shard(0), Replicate()]))
    sums.weight = nn.Parameter(DTensor.from_local(ones, mesh, [Replicate(), Partial()]))
    check_messages([
        (ValueError, r"dp_mesh_dims names \['cp'\], and the mesh .*'dp', 'tp'",
         lambda: shard(plain, shard="cp")),
        (ValueError, r"\['tp', 'dp'\], which are not neighbours",
         lambda: shard(plain, shard=("tp", "dp"))),
        (NotImplementedError, "without a dimension that shards",
         lambda: shard(plain, replicate="dp")),
        (ValueError, "'weight' is no DTensor, and with dp_mesh_dims",
         lambda: shard(plain, shard="dp")),
        (ValueError, "'weight' has S.* on dimension 0 .*fully_shard shards it",
         lambda: shard(rows, shard="dp")),
        (ValueError, "'weight' is a DTensor of partial sums", lambda: shard(sums, shard="dp")),
        (ValueError, "no mesh with names",
         lambda: fsdp_ext.fully_shard(sums, dp_mesh_dims=dims(shard="dp"))),
    ])  # fmt: skip
    assert dist.get_world_size() == 2


def test_meshes_and_parameters_that_do_not_fit_are_refused() -> None:
    run_ranks(_refusals, 2)


def _rows_that_are_cut_in_strides() -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    cut = (Replicate(), _StridedShard(0, split_factor=2), Shard(0))
    placements = []
    for fully_shard in (torch_fsdp.fully_shard, fsdp_ext.fully_shard):
        layer: Any = nn.Linear(8, 16, bias=False)
        rows = DTensor.from_local(
            torch.ones(4, 8), mesh, cut, run_check=False, shape=torch.Size([16, 8]), stride=(8, 1)
        )
        layer.weight = nn.Parameter(rows)
        fully_shard(layer, mesh=mesh, dp_mesh_dims=torch_fsdp.DataParallelMeshDims(shard="dp"))
        placements.append(layer.weight.placements)
    assert placements[0] == placements[1] == (_StridedShard(0, split_factor=4), *cut[1:])


def test_rows_that_are_cut_in_strides_count_as_cut() -> None:
    run_ranks(_rows_that_are_cut_in_strides, 1, fresh=True)
