"""``torch.compile`` of sharded models and blocks trains as without it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.models import Stack
from support.parity import (
    ROUNDING,
    SYSTEM,
    Case,
    Sharded,
    assert_same,
    load_system,
    train_step,
    whole,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from fsdp_ext import clip_grad_norm_, fully_shard

STEPS = 3
FROZEN_BEFORE = 1  # freezing rebuilds the schedule inside the compiled forward


def train(compiled: str, backend: str, precision: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Return losses and the last parameters, and how many graphs were compiled."""
    torch._dynamo.reset()
    counters.clear()
    run = Sharded(load_system(SYSTEM), Case("", Stack, precision=precision))
    if compiled == "model":
        run.model.compile(backend=backend)
    if compiled == "blocks":
        for block in run.model.blocks:
            block.compile(backend=backend)
    seen = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            if step == FROZEN_BEFORE:
                run.parameters["blocks.1.up.weight"].requires_grad_(False)
            seen += train_step(run, step)
    assert not [str(one.message) for one in caught if "Dynamo" in str(one.message)]
    seen += [whole(parameter) for parameter in run.parameters.values()]
    return seen, counters["stats"]["unique_graphs"]


def _compiled(compiled: str, backend: str, precision: dict[str, Any]) -> None:
    expected, _ = train("nothing", backend, precision)
    ours, graphs = train(compiled, backend, precision)
    for mine, eager in zip(ours, expected, strict=True):
        assert torch.equal(mine, eager)
    # All blocks share a graph, and the frozen weight makes another one. Nothing of fsdp_ext itself
    # was compiled.
    assert 0 < graphs <= 2


CASES = {
    "a model in bf16": ("model", "eager", {"param_dtype": torch.bfloat16}),
    "blocks": ("blocks", "eager", {}),
    "a model with autograd": ("model", "aot_eager", {}),
    "blocks in bf16 with autograd": ("blocks", "aot_eager", {"param_dtype": torch.bfloat16}),
}
FIRST = next(iter(CASES))


# Dynamo takes seconds on each rank, so make test has one case on one rank.
@pytest.mark.parametrize("case", [(1, FIRST), *exhaustive(*((2, case) for case in CASES))], ids=str)
def test_compiled_models_train_the_same(case: tuple[int, str]) -> None:
    world_size, name = case
    run_ranks(_compiled, world_size, *CASES[name], fresh=True)  # Dynamo keeps a thread


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Fields:
    first: Tensor


class Structured(nn.Linear):
    def forward(self, fields: Fields) -> Pair:
        result = super().forward(fields.first)
        return Pair(result.tanh(), result)


def _containers_of_full_graphs() -> None:
    gradients = []
    for system in ("fsdp2", SYSTEM):
        torch.manual_seed(0)
        block = Structured(4, 4)
        block.compile(backend="eager", fullgraph=True)
        load_system(system).fully_shard(block)
        result = block(Fields(torch.ones(2, 4)))
        (result.first.sum() + result.second.square().sum()).backward()
        clip = torch.nn.utils.clip_grad_norm_ if system == "fsdp2" else clip_grad_norm_
        torch.compile(clip, backend="aot_eager")(block.parameters(), 0.1)
        gradients.append({name: whole(each.grad) for name, each in block.named_parameters()})
    assert_same("fsdp_ext against FSDP2", *gradients, ROUNDING[torch.float32])


def test_full_graphs_take_and_return_containers_and_clipping_compiles() -> None:
    run_ranks(_containers_of_full_graphs, 1, fresh=True)


def _full_graphs() -> None:
    losses: list[list[Tensor]] = []
    for system in ("fsdp2", SYSTEM):
        for way in ("model", "blocks", "forwards"):
            torch._dynamo.reset()
            run = Sharded(load_system(system), Case("", Stack))
            if way == "model":
                run.model.compile(backend="eager", fullgraph=True)
                with pytest.raises(torch._dynamo.exc.Unsupported):
                    run.loss(0)
                continue
            for block in run.model.blocks:
                if way == "blocks":
                    block.compile(backend="eager", fullgraph=True)
                else:
                    block.forward = torch.compile(block.forward, backend="eager", fullgraph=True)
            losses.append([train_step(run, step)[0] for step in range(STEPS)])
    assert len(losses) == 4
    for step in zip(*losses, strict=True):
        assert all(torch.equal(loss, step[0]) for loss in step)


# Dynamo takes seconds for each way.
@pytest.mark.exhaustive
def test_full_graphs_are_those_of_blocks_as_under_fsdp2() -> None:
    run_ranks(_full_graphs, 1, fresh=True)


class Scaled(nn.Linear):
    def forward(self, inputs: list[Tensor], *, scale: Tensor) -> Tensor:
        return torch.tanh(super().forward(inputs[0])) * scale


class TensorParallel(nn.Module):
    """Passes two results of collectives in flight to a block: one is a view, one is none."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.first = nn.Embedding(6, 4)
        self.block = Scaled(4, 4)
        layouts = {"input_layouts": Replicate(), "output_layouts": Shard(1)}
        parallelize_module(self, mesh, {"first": RowwiseParallel(**layouts)})

    def forward(self, x: Tensor) -> Tensor:
        view = self.first(x)
        result = all_to_all_single_autograd(view, None, None, dist.group.WORLD)
        return self.block([view], scale=result)


def _async_inputs() -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    gradients = []
    for system in ("unsharded", "fsdp2", SYSTEM):
        torch.manual_seed(0)
        model = TensorParallel(mesh["tp"])
        if system == SYSTEM:  # compiled without fsdp_ext, the embedding loses its gradient
            model.block.compile(backend="aot_eager", fullgraph=True)
        if system != "unsharded":
            shard = load_system(system).fully_shard
            shard(model.block, mesh=mesh["dp"])
            shard(model, mesh=mesh["dp"])
        model(torch.arange(4).expand(2, 4)).square().sum().backward()
        gradients.append({name: whole(each.grad) for name, each in model.named_parameters()})
    unsharded, fsdp2, ours = gradients
    assert all(gradient.count_nonzero() > 0 for gradient in unsharded.values())
    assert_same("fsdp_ext against FSDP2", fsdp2, ours, ROUNDING[torch.float32])
    assert_same("fsdp_ext against unsharded", unsharded, ours, ROUNDING[torch.float32])
    for system in ("fsdp2", SYSTEM):
        writes = load_system(system).fully_shard(nn.Sequential(nn.ReLU(True), nn.Linear(4, 4)))
        leaf = torch.ones(2, 4, requires_grad=True)
        result = all_to_all_single_autograd(leaf, None, None, dist.group.WORLD)
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            writes(result)


def test_compiled_blocks_keep_gradients_of_inputs_whose_collectives_are_in_flight() -> None:
    run_ranks(_async_inputs, 2, fresh=True)


def _marks() -> None:
    models = []
    for system in ("fsdp2", SYSTEM):
        shard = load_system(system).fully_shard
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        outer = nn.ModuleDict({"inner": model, "beside": nn.ReLU()})
        shard(model[1])
        models.append(outer)
        shard(model)
    theirs, ours = (
        [vars(module).get("_is_fsdp_managed_module") for module in model.modules()]
        for model in models
    )
    assert ours == theirs
    assert theirs.count(True) == 5


def test_modules_are_marked_for_dynamo_as_by_fsdp2() -> None:
    run_ranks(_marks, 1)


def _compiled_autograd() -> None:
    fully_shard(nn.Linear(2, 2))  # puts hooks into all modules of the process
    layer = nn.Linear(2, 2)

    def step() -> None:
        layer(torch.ones(2, 2)).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="eager")()
    assert torch.equal(layer.weight.grad, torch.full((2, 2), 2.0))


def test_compiled_autograd_of_unsharded_models_works_beside_sharded_ones() -> None:
    run_ranks(_compiled_autograd, 1, fresh=True)


def _compiled_autograd_of_units() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model)

    def step() -> None:
        model(torch.ones(2, 2)).sum().backward()

    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(NotImplementedError, match="Compiled autograd got a model that fsdp_ext"),
    ):
        torch.compile(step, backend="eager")()
    step()
    assert model[0].weight.grad is not None


def test_compiled_autograd_of_sharded_models_is_refused() -> None:
    run_ranks(_compiled_autograd_of_units, 1, fresh=True)


def _precompiled_blocks() -> None:
    run = Sharded(load_system(SYSTEM), Case("", Stack))
    with torch._dynamo.config.patch(caching_precompile=True, strict_precompile=True):
        run.model.blocks[0].compile(backend="eager")
        with pytest.raises(Exception, match=r"caching_precompile pickles .*, so leave it off\."):
            run.loss(0)
    if torch.__version__ >= "2.15":  # unless it is strict, Dynamo goes on without the cache
        with torch._dynamo.config.patch(caching_precompile=True):
            run.model.blocks[0].compile(backend="eager")
            train_step(run, 0)
    run.model.blocks[0].compile(backend="eager")
    train_step(run, 0)


def test_precompiled_caches_of_sharded_modules_are_refused() -> None:
    run_ranks(_precompiled_blocks, 1, fresh=True)
