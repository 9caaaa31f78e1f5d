"""Parameters that tensor parallelism has made DTensors are sharded as by FSDP2."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.launcher import run_ranks
from support.parity import EXACT, ROUNDING, Tolerance
from support.planned import expect_as_planned
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fsdp_ext
from fsdp_ext import MixedPrecisionPolicy

WIDTH, HIDDEN, BATCH, LENGTH = 6, 12, 2, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 7)  # rows that no mesh here divides

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TENSOR_PARALLEL = {
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
# Layer norms work on parts of the sequence, so the gradients of their weights are partial sums.
SEQUENCE_PARALLEL = {
    "blocks.*.norm": SequenceParallel(use_local_output=False),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def mesh_of(*shape: int) -> DeviceMesh:
    names = ("replicate", "shard", "tp")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def columns(parameter: Tensor) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 else None


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a model is parallel.

    Attributes:
        shape: of the mesh: replicas, if there are three dimensions, shards, and tensor parallelism.
        plan: what `parallelize_module` gets.
        units: the modules of each block that are units of their own.
        options: more arguments of `fully_shard`.
    """

    shape: tuple[int, ...]
    plan: dict[str, ParallelStyle]
    units: tuple[str, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_sequence_parallel(self) -> bool:
        return "blocks.*.norm" in self.plan

    def mesh(self) -> DeviceMesh:
        names = ("replicate", "shard", "tp")[-len(self.shape) :]
        return init_device_mesh("cpu", self.shape, mesh_dim_names=names)

    def model(self, fully_shard: Callable[..., Any], mesh: DeviceMesh) -> Any:
        torch.manual_seed(0)
        model = parallelize_module(Model(), mesh["tp"], self.plan)
        dp = mesh[mesh.mesh_dim_names[:-1]]
        for block in model.blocks:
            for unit in self.units:
                fully_shard(block.get_submodule(unit), mesh=dp, **self.options)
            fully_shard(block, mesh=dp, **self.options)
        return fully_shard(model, mesh=dp, **self.options)

    def batch(self, mesh: DeviceMesh, step: int, micro_batch: int = 0) -> Tensor:
        """Return what this rank's first block gets: one batch for all ranks of "tp"."""
        tp = mesh["tp"]
        replica = dist.get_rank() // tp.size()
        generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + replica)
        batch = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
        if self.is_sequence_parallel:
            return batch.chunk(tp.size(), dim=1)[tp.get_local_rank()]
        return batch


def _assert_close(ours: Tensor, theirs: Tensor, of: Tolerance, what: str) -> None:
    torch.testing.assert_close(
        ours, theirs, rtol=of.relative, atol=of.absolute, msg=lambda text: f"{what}: {text}"
    )


def _train_beside_fsdp2(setup: Setup, micro_batches: int) -> None:
    mesh = setup.mesh()
    systems = (fsdp_ext.fully_shard, torch.distributed.fsdp.fully_shard)
    models = [setup.model(fully_shard, mesh) for fully_shard in systems]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    # FSDP2 adds up what several backwards bring before it adds up the ranks of "tp".
    order_differs = setup.is_sequence_parallel and micro_batches > 1
    close = ROUNDING[torch.float32] if order_differs else EXACT
    # Since torch 2.15 FSDP2 widens bf16 gradients before it adds up the ranks of "tp".
    if setup.is_sequence_parallel and "mp_policy" in setup.options and torch.__version__ >= "2.15":
        close = ROUNDING[torch.bfloat16]
    for step in range(3):
        seen: list[list[Tensor]] = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for micro_batch in range(micro_batches):
                model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
                loss = model(setup.batch(mesh, step, micro_batch)).square().sum()
                loss.backward()
            seen.append([loss.detach()])
            if setup.is_sequence_parallel:  # PyTorch has no norm over parameters on two meshes
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                seen[-1].append(norm.full_tensor())
            optimizer.step()
        for ours, theirs in zip(*seen, strict=True):
            _assert_close(ours, theirs, close, f"step {step}")
        parameters = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
        for (name, ours), theirs in parameters:
            for mine, other in ((ours, theirs), (ours.grad, theirs.grad)):
                assert mine.placements == other.placements, name
                assert mine.device_mesh == other.device_mesh, name
                _assert_close(mine.to_local(), other.to_local(), close, f"{name}, step {step}")


@pytest.mark.parametrize(
    ("setup", "micro_batches"),
    [
        pytest.param(
            Setup((2, 2), TENSOR_PARALLEL), 3, id="tensor parallel", marks=pytest.mark.exhaustive
        ),
        pytest.param(Setup((2, 2), SEQUENCE_PARALLEL), 3, id="partial sums accumulate"),
        pytest.param(
            Setup((2, 2), SEQUENCE_PARALLEL, ("up",), {"mp_policy": BF16}),
            1,
            id="a unit gets a DTensor, bf16",
        ),
        pytest.param(
            Setup((2, 2, 1), SEQUENCE_PARALLEL),
            1,
            id="two sets of ranks",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            Setup((1, 2, 2), SEQUENCE_PARALLEL),
            1,
            id="one set of ranks",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            Setup((2, 2), TENSOR_PARALLEL, (), {"shard_placement_fn": columns}),
            1,
            id="columns",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            Setup((1, 4), TENSOR_PARALLEL),
            1,
            id="shards of one rank",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_tensor_parallel_models_train_as_under_fsdp2(setup: Setup, micro_batches: int) -> None:
    run_ranks(_train_beside_fsdp2, 4, setup, micro_batches)


def _gradients_beside_unsharded() -> None:
    setup = Setup((2, 2), TENSOR_PARALLEL)
    mesh = setup.mesh()
    model = setup.model(fsdp_ext.fully_shard, mesh)
    torch.manual_seed(0)
    unsharded = Model()
    batch = setup.batch(mesh, step=0)
    model(batch).square().sum().backward()
    unsharded(batch).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), unsharded.parameters(), strict=True):
        dist.all_reduce(theirs.grad)
        whole = ours.grad.full_tensor()
        _assert_close(whole, theirs.grad / dist.get_world_size(), ROUNDING[torch.float32], name)


def test_gradients_of_whole_parameters_are_those_of_the_unsharded_model() -> None:
    run_ranks(_gradients_beside_unsharded, 4)


def _save_and_load(directory: str) -> None:
    setup = Setup((2, 2), SEQUENCE_PARALLEL)
    mesh = setup.mesh()
    model, other = (setup.model(fsdp_ext.fully_shard, mesh) for _ in range(2))
    torch.manual_seed(0)
    whole = Model().state_dict()
    full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        assert gathered.keys() == whole.keys()
        for name, tensor in gathered.items():
            assert torch.equal(tensor, whole[name]), name
    changed = {name: tensor + 1 for name, tensor in whole.items()}
    # It replaces the values of the dict that it gets.
    set_model_state_dict(model, dict(changed) if dist.get_rank() == 0 else {}, options=full)
    dcp.save(get_model_state_dict(model), checkpoint_id=directory)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=directory)
    set_model_state_dict(other, state)
    for (name, tensor), same in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(tensor.to_local(), same.to_local()), name
        assert torch.equal(tensor.full_tensor(), changed[name]), name
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    batch = setup.batch(mesh, step=0)
    assert torch.equal(model(batch), other(batch))


def test_a_tensor_parallel_model_is_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(_save_and_load, 4, str(tmp_path / "checkpoint"))


def _as_planned() -> None:
    setup = Setup((2, 2), SEQUENCE_PARALLEL, options={"mp_policy": BF16})
    mesh = setup.mesh()
    model = setup.model(fsdp_ext.fully_shard, mesh)
    planned = fsdp_ext.plan(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(setup.batch(mesh, step=0)).float().square().mean().backward()
    optimizer.step()
    expect_as_planned(model, optimizer, planned)
    assert planned.memory.fsdp2_peak is None
    with pytest.raises(NotImplementedError, match=r"has split 'head\.weight'"):
        fsdp_ext.plan(model, batch=setup.batch(mesh, step=0))


def test_a_tensor_parallel_model_has_what_was_planned() -> None:
    run_ranks(_as_planned, 4)


ONE_MESH = r"'weight' is a DTensor on .*different dimensions of one mesh"


def _refusals() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tp"))
    unrelated = init_device_mesh("cpu", (1, 2), mesh_dim_names=("other", "tp"))
    linear = parallelize_module(nn.Linear(4, 4), unrelated["tp"], ColwiseParallel())
    with pytest.raises(ValueError, match=ONE_MESH):
        fsdp_ext.fully_shard(linear, mesh=mesh["shard"])
    linear = parallelize_module(nn.Linear(4, 4), mesh["shard"], ColwiseParallel())
    with pytest.raises(ValueError, match=ONE_MESH):
        fsdp_ext.fully_shard(linear, mesh=mesh["shard"])
    linear = nn.Linear(4, 4)
    sums = DTensor.from_local(torch.ones(4, 4), mesh["tp"], [Partial()])
    linear.weight = nn.Parameter(sums)
    with pytest.raises(ValueError, match="'weight' is a DTensor of partial sums"):
        fsdp_ext.fully_shard(linear, mesh=mesh["shard"])


def test_dtensors_that_cannot_be_sharded_are_refused() -> None:
    run_ranks(_refusals, 2)
