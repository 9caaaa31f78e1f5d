"""``fsdp_ext.plan`` finds the sizes that training then has, and allocates nothing."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import models
from support.launcher import run_ranks
from support.matrix import exhaustive, exhaustive_cases
from support.planned import FAST, expect_as_planned, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fsdp_ext
from fsdp_ext import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    Plan,
    Simulated,
    fully_shard,
    plan,
)
from fsdp_ext._util.tables import WIDTH
from fsdp_ext.comm.costs import SHARED_MEMORY
from fsdp_ext.comm.link import ETHERNET_100G, H100_CLUSTER, H100_NODE
from fsdp_ext.optim import SGD
from fsdp_ext.planner.cli import EXAMPLE, _parser, run
from fsdp_ext.planner.schedule import Stage, predict

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PACKAGE = Path(fsdp_ext.__file__).parents[1]

SUBJECTS: list[type[models.Subject]] = [
    models.BareRoot,
    models.NestedUnits,
    models.BranchingUnits,
    models.Transformer,
    models.FrozenBesideTrainable,
    models.FrozenUnit,
    models.FrozenStart,
    models.TiedInUnit,
    models.UnitCalledTwice,
    models.FewRows,
    models.EmptyParameter,
    models.ManyShapes,
    models.GroupedModules,
]
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Arguments of fully_shard, for all units and for the root alone.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "each unit by itself": ({}, {"bucket_bytes": 0}),
    "small buckets": ({}, {"bucket_bytes": 4000}),
    "bf16 on the wire": ({"mp_policy": HALF}, {}),
    "gather inputs are shared": ({"mp_policy": HALF}, {"keep_gather_inputs": False}),
    "fp16, scaled on both sides": (
        {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)},
        {},
    ),
    "messages of few rows": ({}, {"max_message_bytes": 1000, "bucket_bytes": 10**5}),
    "stored in bf16": (
        {"mp_policy": MixedPrecisionPolicy(torch.float32, torch.float32)},
        {},
    ),
    "nothing reshards": ({"reshard_after_forward": False}, {}),
    "the root reshards, too": ({"reshard_after_forward": True}, {}),
}


def each_setting(*quick: str) -> pytest.MarkDecorator:
    others = [name for name in SETTINGS if name not in quick]
    return pytest.mark.parametrize("settings", [*quick, *exhaustive(*others)])


def make(subject: type[models.Subject], settings: str) -> Any:
    model = subject()
    return model.bfloat16() if settings == "stored in bf16" else model


def sharded(
    subject: type[models.Subject], settings: str, transport: Any, mesh: DeviceMesh | None = None
) -> Any:
    torch.manual_seed(0)
    if isinstance(transport, Simulated) and transport.replicas > 1:
        transport.init_process_group()
        mesh = init_device_mesh("cpu", (transport.replicas, transport.shards))
    of_all, of_root = SETTINGS[settings]
    model = make(subject, settings)
    for unit in model.units():
        fully_shard(unit, mesh=mesh, transport=transport, **of_all)
    return fully_shard(model, mesh=mesh, transport=transport, **of_all, **of_root)


def plan_before(subject: type[models.Subject], settings: str, **options: Any) -> Plan | None:
    """Plan the model before fully_shard. Return None if a unit has several modules."""
    of_all, of_root = SETTINGS[settings]
    with torch.device("meta"):
        model = make(subject, settings)
    units = model.units()
    if any(isinstance(unit, list) for unit in units):
        return None
    return plan(model, units=units, device_type="cpu", **of_all, **of_root, **options)


def _trains_as_planned(settings: str, transports: list[Any]) -> int:
    warnings.simplefilter("ignore")
    compared = 0
    for transport, subject in itertools.product(transports, SUBJECTS):
        simulated = isinstance(transport, Simulated)
        if simulated:
            dist.destroy_process_group()
        model = sharded(subject, settings, transport)
        world_size = dist.get_world_size()
        planned = plan(model)
        before = plan_before(subject, settings, transport=transport, world_size=world_size)
        expect_as_planned(model, train(model), planned)
        assert model._fsdp_ext_unit.root.lanes.transport == planned.transport
        assert str(plan(model)) == str(planned)  # also of a model that has run
        if before is not None:
            assert before.memory == planned.memory
            assert before.units == planned.units
            assert before.buckets == planned.buckets
        compared += 1
    return compared


@each_setting()
def test_many_simulated_ranks_have_what_was_planned(settings: str) -> None:
    transports = [Simulated(size, FAST) for size in (1, 3, 12)]
    transports.append(Simulated(12, FAST, replicas=4))
    assert run_ranks(_trains_as_planned, 1, settings, transports) == [4 * len(SUBJECTS)]


@each_setting("bf16 on the wire")
def test_two_ranks_have_what_was_planned(settings: str) -> None:
    transports = ["process_group", None]
    assert run_ranks(_trains_as_planned, 2, settings, transports) == [2 * len(SUBJECTS)] * 2


def _a_hook_reads_a_whole_unit() -> None:
    planned = []
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)  # nothing is reduced in place
    for has_hook in (False, True):
        model: Any = models.Transformer()
        fully_shard(model, mp_policy=policy, max_message_bytes=1000, bucket_bytes=0)
        if has_hook:
            model.set_all_reduce_hook(lambda gradients: gradients.mul_(2))
        planned.append(plan(model))
        expect_as_planned(model, train(model), planned[-1])
    without, with_hook = (each.memory.reduce_output for each in planned)
    root = planned[1].buckets[0]
    assert root.reduce_messages > 2
    assert without < root.reduce // 2 <= with_hook < root.reduce // 2 + 512


def test_a_hook_on_a_unit_in_pieces_needs_its_whole_output() -> None:
    run_ranks(_a_hook_reads_a_whole_unit, 2)


HYBRID = [models.NestedUnits, models.Transformer, models.FrozenUnit, models.FewRows]


def _sets_of_one_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 1))
    for subject, settings in itertools.product(HYBRID, ("bf16 on the wire", "nothing reshards")):
        model = sharded(subject, settings, None, mesh)
        planned = plan(model)
        assert (planned.world_size, planned.replicas) == (2, 2)
        expect_as_planned(model, train(model), planned)
        assert all(bucket.all_reduce == bucket.reduce for bucket in planned.buckets)
        # The default bucket size is that of the transport that gradients take.
        assert model._fsdp_ext_unit.root.link == planned.link == SHARED_MEMORY


def test_sets_of_one_rank_have_what_was_planned() -> None:
    run_ranks(_sets_of_one_rank, 2)


def _trains_as_planned_with_replicas(settings: str, transport: str | None) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for subject in HYBRID:
        model = sharded(subject, settings, transport, mesh)
        planned = plan(model)
        assert (planned.world_size, planned.replicas) == (4, 2)
        before = plan_before(subject, settings, transport=transport, world_size=4, replicas=2)
        assert before is not None
        expect_as_planned(model, train(model), planned)
        assert (before.memory, before.units) == (planned.memory, planned.units)
        assert before.buckets == planned.buckets
        for bucket in planned.buckets:
            assert 2 * bucket.all_reduce == bucket.reduce
    assert "on 4 cpu ranks (2 shard groups of 2, hybrid sharding) over" in str(planned)
    assert "all-reduces" in str(planned)
    elsewhere = plan(model, 12)
    assert (elsewhere.replicas, elsewhere.units) == (2, plan(model, 6, replicas=1).units)


@pytest.mark.parametrize(
    ("settings", "transport"),
    [
        ("defaults", None),
        *exhaustive_cases(
            ("bf16 on the wire", "process_group"),
            ("nothing reshards", None),
            ("messages of few rows", "process_group"),
        ),
    ],
)
def test_two_sets_of_two_ranks_have_what_was_planned(settings: str, transport: str | None) -> None:
    run_ranks(_trains_as_planned_with_replicas, 4, settings, transport)


class FewRows(models.Subject):
    """Weights with more columns than rows."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(models.DIM, 3)
        self.wide = nn.Linear(3, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x))


def _sharded_by_columns() -> None:
    dist.destroy_process_group()
    ranks = models.DIM // 2

    def columns(parameter: Tensor) -> Shard | None:
        return Shard(1) if parameter.shape[1:] == (models.DIM,) else None

    model: Any = FewRows()
    fully_shard(model, transport=Simulated(ranks, FAST), shard_placement_fn=columns)
    planned = plan(model)
    assert planned.memory.shards < plan(FewRows(), ranks, device_type="cpu").memory.shards
    expect_as_planned(model, train(model), planned)
    with pytest.raises(NotImplementedError, match="weight' is sharded in dimension 1,"):
        plan(model, 3)


def test_parameters_that_are_sharded_by_columns_have_what_was_planned() -> None:
    run_ranks(_sharded_by_columns, 1)


class FrozenHalf(nn.Module):
    """A root without parameters. Its first unit is frozen, and computes in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.trained = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.trained(self.frozen(x).float())
        return result

    def batch(self, _: torch.Generator) -> tuple[tuple[Tensor], dict[str, Any]]:
        return (torch.ones(2, 64),), {}

    def loss(self, output: Tensor) -> Tensor:
        return output.sum()


def _a_frozen_unit_of_scaled_sums() -> None:
    dist.destroy_process_group()
    model: Any = FrozenHalf()
    scaled = MixedPrecisionPolicy(torch.float16, torch.float16)
    options = {"transport": Simulated(8, FAST), "reshard_after_forward": True}
    fully_shard(model.frozen, mp_policy=scaled, **options)
    for module in (model.trained[0], model.trained[2], model):
        fully_shard(module, bucket_bytes=0, **options)
    planned = plan(model)
    assert planned.memory.ring_slots == 2
    assert planned.memory.reduce_output == 0
    expect_as_planned(model, train(model), planned)


def test_what_is_not_reduced_or_gathered_has_no_buffers() -> None:
    run_ranks(_a_frozen_unit_of_scaled_sums, 1)


def _another_world_size() -> None:
    warnings.simplefilter("ignore")
    dist.destroy_process_group()
    model = sharded(models.Transformer, "bf16 on the wire", Simulated(4, FAST))
    elsewhere = plan(model, 64, device_type="cuda", transport="nccl", link="ethernet_100g")
    with torch.device("meta"):
        plain = models.Transformer()
    expected = plan(
        plain,
        64,
        units=plain.units(),
        mp_policy=HALF,
        link="ethernet_100g",
    )
    assert (elsewhere.memory, elsewhere.units) == (expected.memory, expected.units)


def test_a_sharded_model_can_be_planned_for_other_ranks() -> None:
    run_ranks(_another_world_size, 1)


def _wrapped_as_fsdp1() -> None:
    for use_orig_params in (False, True):
        model = FullyShardedDataParallel(
            models.Stack(),
            auto_wrap_policy=ModuleWrapPolicy({models.Mlp}),
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
        )
        planned = plan(model)
        assert len(planned.units) == 4
    expect_as_planned(model, train(model), planned)


def test_a_model_wrapped_as_by_fsdp1_has_what_was_planned() -> None:
    run_ranks(_wrapped_as_fsdp1, 2)


# - Without ranks


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, dim: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 1000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def on_meta(dim: int = 64, layers: int = 4) -> Net:
    with torch.device("meta"):
        return Net(dim, layers)


TOKENS = torch.zeros(2, 16, dtype=torch.int64, device="meta")


def test_a_model_too_large_for_this_machine_is_planned_on_meta() -> None:
    model = on_meta(dim=32768, layers=64)
    planned = plan(model, 1024, units=Block, batch=TOKENS, flops_per_second=1e15)
    assert sum(unit.parameters for unit in planned.units) == 64 * 8 * 32768**2 + 2 * 1000 * 32768
    assert planned.memory.shards * 1024 > 2 * 10**12
    assert all(p.is_meta and p.grad is None for p in model.parameters())
    assert not any("_fsdp_ext" in module.__dict__ for module in model.modules())
    assert not dist.is_initialized()


def test_a_model_with_memory_stays_as_it_is() -> None:
    model = Net()
    before = {name: (value, value.clone()) for name, value in model.named_parameters()}
    plan(model, 8, units=Block, batch=TOKENS, flops_per_second=1e12)
    for name, value in model.named_parameters():
        assert value is before[name][0]
        assert torch.equal(value, before[name][1])
        assert value.grad is None
        assert not vars(value)
    assert type(model) is Net


@pytest.mark.parametrize(
    "units",
    [
        Block,
        [Block],
        lambda module: isinstance(module, Block),
    ],
)
def test_units_are_classes_modules_or_what_a_function_says(units: Any) -> None:
    model = on_meta()
    planned = plan(model, 8, units=units)
    assert [unit.name for unit in planned.units] == ["the root", *(f"blocks.{i}" for i in range(4))]
    assert planned == plan(model, 8, units=list(model.blocks))


def test_a_gpu_packs_ahead_and_has_two_reduce_inputs() -> None:
    on_host, on_gpu = (
        plan(on_meta(), 8, units=Block, bucket_bytes=0, device_type=device).memory.reduce_input
        for device in ("cpu", "cuda")
    )
    assert on_host == 64 * 1000 * 2 * 4  # the root's
    assert on_gpu == 2 * on_host
    assert plan(on_meta(), 1, units=Block, bucket_bytes=0).memory.reduce_input == on_host


def test_over_nccl_the_reduce_output_is_always_there() -> None:
    on_host, on_gpu, alone = (
        plan(on_meta(), ranks, units=Block, bucket_bytes=0, device_type=device).memory.reduce_output
        for ranks, device in ((8, "cpu"), (8, "cuda"), (1, "cuda"))
    )
    assert (on_host, on_gpu, alone) == (0, 64 * 1000 * 2 * 4 // 8, 0)


def test_offloaded_units_have_shards_gradients_and_states_on_the_host() -> None:
    model = on_meta()
    arguments: dict[str, Any] = {"units": Block, "mp_policy": HALF}
    on_gpu = plan(model, 8, **arguments).memory
    offloaded = plan(model, 8, **arguments, offload_policy=CPUOffloadPolicy())
    memory = offloaded.memory
    assert memory.on_host == on_gpu.shards + on_gpu.gradients + on_gpu.optimizer_states > 0
    assert (memory.shards, memory.gradients, memory.optimizer_states) == (0, 0, 0)
    assert memory.gather_inputs == on_gpu.gather_inputs
    assert memory.peak == on_gpu.peak - memory.on_host
    assert "in the host's memory" in str(offloaded)
    assert plan(model, 8, **arguments, device_type="cpu", offload_policy=CPUOffloadPolicy()) == (
        plan(model, 8, **arguments, device_type="cpu")
    )


def test_attached_optimizers_leave_gradients_of_two_buckets_on_gpus() -> None:
    arguments: dict[str, Any] = {"units": Block, "bucket_bytes": 0}
    model = on_meta()
    usual, attached = (
        plan(model, 8, **arguments, optimizer_attached=given) for given in (None, True)
    )
    shards = [unit.shard for unit in usual.units]  # as large as the gradients
    assert usual.memory.gradients == sum(shards)
    assert attached.memory.gradients == max(map(sum, itertools.pairwise(shards))) < sum(shards)
    assert attached.memory == replace(
        usual.memory, gradients=attached.memory.gradients, optimizer_temporaries=0
    )
    on_host = plan(model, 8, **arguments, device_type="cpu", optimizer_attached=True)
    assert on_host == plan(model, 8, **arguments, device_type="cpu")


def test_the_peak_may_be_in_the_step_of_an_optimizer_that_is_not_fused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(9)))
    model[0].requires_grad_(False)
    arguments: dict[str, Any] = {"world_size": 2, "units": nn.Linear, "bucket_bytes": 0}
    foreach = plan(model, **arguments).memory
    shard = 64 * 32 * 4
    assert foreach.optimizer_temporaries == 8 * shard > foreach.gradients_in_flight
    fused = plan(model, **arguments, optimizer_fused=True).memory
    assert (fused.optimizer_temporaries, fused.gradients) == (0, foreach.gradients)
    assert foreach.peak - fused.peak == 8 * shard - fused.gradients_in_flight
    with pytest.raises(ValueError, match="memory_limit"):
        plan(model, **arguments, memory_limit=fused.peak)
    plan(model, **arguments, optimizer_fused=True, memory_limit=fused.peak)
    # On the host, PyTorch steps one parameter at a time. SGD takes no square root.
    for others in ({"device_type": "cpu"}, {"optimizer_states": 1}):
        assert plan(model, **arguments, **others).memory.optimizer_temporaries == 0


def _attached_to_a_part() -> None:
    dist.destroy_process_group()
    warnings.simplefilter("ignore")
    model: Any = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(5)))
    for layer in model:
        fully_shard(layer, transport=Simulated(2, FAST))
    fully_shard(model, transport=Simulated(2, FAST), bucket_bytes=0)
    optimizer = SGD(model.parameters(), lr=0.1)
    shard = plan(model, device_type="cuda").memory.gradients // 5
    optimizer.attach(model[1:4])
    for asked, shards in ((None, 2 + 2), (True, 2), (False, 5)):
        planned = plan(model, device_type="cuda", optimizer_attached=asked)
        assert planned.memory.gradients == shards * shard
    compute: dict[str, tuple[float, ...]] = {str(number): (1.0, 1.0) for number in range(5)}
    usual = plan(model, compute=compute, optimizer_attached=False).prediction
    with pytest.raises(ValueError, match="seconds that the attached optimizer takes for unit '1'"):
        plan(model, compute=compute)
    compute |= dict.fromkeys("123", (1.0, 1.0, 10.0))
    with pytest.raises(ValueError, match="numbers for '1' in compute, but no attached"):
        plan(model, compute=compute, optimizer_attached=False)
    on_host, on_gpu = (
        plan(model, compute=compute, device_type=device).prediction for device in ("cpu", "cuda")
    )
    assert usual is not None
    assert on_host is not None
    assert on_gpu is not None
    assert on_host.compute == usual.compute + 30
    assert on_gpu.wire == pytest.approx(usual.wire + 30)
    assert on_gpu.compute == usual.compute


def _attached_without_the_biases() -> None:
    dist.destroy_process_group()
    model: Any = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
    for layer in model:
        fully_shard(layer, transport=Simulated(2, FAST))
    fully_shard(model, transport=Simulated(2, FAST), bucket_bytes=0)
    usual = plan(model, device_type="cuda").memory.gradients
    SGD([layer.weight for layer in model], lr=0.1).attach(model)
    assert plan(model, device_type="cuda").memory.gradients == usual  # the biases' stay
    for layer in model:
        layer.bias.requires_grad_(False)
    assert plan(model, device_type="cuda").memory.gradients < usual


@pytest.mark.parametrize("work", [_attached_to_a_part, _attached_without_the_biases])
def test_units_with_an_attached_optimizer_are_planned_so(work: Any) -> None:
    run_ranks(work, 1)


def test_flops_are_those_of_each_unit() -> None:
    planned = plan(on_meta(), 8, units=Block, batch=TOKENS)
    tokens, block = 2 * 16, 2 * 4 * 64 * 64
    head = 2 * tokens * 64 * 1000
    for unit in planned.units[1:]:
        assert unit.flops == (2 * tokens * block, 4 * tokens * block)
    assert planned.units[0].flops == (head, 2 * head)
    assert planned.prediction is None


def test_flops_of_a_unit_are_without_those_of_units_inside() -> None:
    planned = plan(on_meta(), 8, units=[Block, nn.Linear], batch=TOKENS)
    flops = {unit.name: unit.flops for unit in planned.units}
    assert flops["blocks.0"] == (0, 0)
    assert flops["blocks.0.up"] == flops["blocks.3.down"] == (4 * 32 * 4096 * 2, 8 * 32 * 4096 * 2)


def test_flops_of_layers_that_share_an_input() -> None:
    # Every layer of the decoder reads the encoder's output, whose gradient arrives last.
    with torch.device("meta"):
        model = nn.Transformer(64, 4, 2, 3, 128, batch_first=True)
        batch = (torch.empty(2, 16, 64), torch.empty(2, 16, 64))
    layers = [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer]
    planned = plan(model, 8, units=layers, batch=batch, flops_per_second=1e12)
    flops = {unit.name: unit.flops for unit in planned.units}
    assert flops["the root"] == (0, 0)
    projection = 2 * (2 * 16) * 64 * 64
    for part, others in (("encoder", [1]), ("decoder", [1, 2])):
        first_forward, first_backward = flops[f"{part}.layers.0"] or (0, 0)
        for other in others:
            assert flops[f"{part}.layers.{other}"] == (first_forward, 2 * first_forward)
        # The batch needs no gradient, so queries, keys and values have one product less.
        assert first_backward == 2 * first_forward - 3 * projection > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_flops_are_counted_where_gradients_are_off(mode: Any) -> None:
    options = {"units": Block, "batch": TOKENS, "flops_per_second": 1e9}
    with mode():
        planned = plan(on_meta(), 8, **options)
    assert planned.units == plan(on_meta(), 8, **options).units


def test_a_list_in_a_batch_is_one_argument() -> None:
    class Sums(nn.Linear):
        def forward(self, tensors: list[Tensor]) -> Tensor:
            return super().forward(tensors[0] + tensors[1])

    (unit,) = plan(Sums(8, 4), 2, batch=[torch.ones(3, 8), torch.ones(3, 8)]).units
    assert unit.flops == (2 * 3 * 8 * 4, 2 * 3 * 8 * 4)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("of_whole_units", [True, False])
def test_flops_of_a_checkpoint_are_its_units(reentrant: bool, of_whole_units: bool) -> None:
    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            if of_whole_units:
                return super().forward(x)
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.blocks = nn.ModuleList(Checkpointed(64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant) if of_whole_units else block(x)
            return x

    with torch.device("meta"):
        model, batch = Model(), torch.empty(32, 64)
    planned = plan(model, 8, units=Block, batch=batch)
    up = down = 2 * 32 * 64 * 64 * 4
    # Non-reentrant checkpointing stops the second forward once it has what backward needs.
    again = up + down if reentrant else up
    expected = (up + down, 2 * (up + down) + again)
    assert [unit.flops for unit in planned.units[1:]] == [expected] * 3
    assert planned.units[0].flops == (2 * 32 * 64 * 64, 2 * 32 * 64 * 64)


def test_the_prediction_is_the_schedules() -> None:
    measured = {f"blocks.{i}": (1e-3, 2e-3) for i in range(4)} | {"the root": (0.5e-3, 1e-3)}
    planned = plan(on_meta(), 8, units=Block, compute=measured, bucket_bytes=0, link="h100_node")
    block = 2 * 4 * 64 * 64 * 4
    root = Stage("the root", 0.5e-3, 1e-3, 512_000, 512_000, reshards=False)
    stages = [Stage(f"blocks.{i}", 1e-3, 2e-3, block, block) for i in range(4)]
    assert planned.prediction == predict(root, stages, H100_NODE)
    assert planned.prediction.compute == pytest.approx(13.5e-3)


def test_replicas_add_a_second_output_and_nothing_else() -> None:
    one_set = plan(on_meta(), 8, units=Block)
    sets = plan(on_meta(), 32, units=Block, replicas=4)
    assert sets.memory == replace(one_set.memory, reduce_output=2 * one_set.memory.reduce_output)
    assert sets.units == one_set.units
    assert sets.buckets == tuple(
        replace(bucket, all_reduce=bucket.reduce // 8) for bucket in one_set.buckets
    )
    in_place = plan(on_meta(), 32, units=Block, replicas=4, device_type="cpu").memory
    assert in_place.reduce_output == 0


def test_gradients_are_all_reduced_over_a_link_of_their_own() -> None:
    measured = {f"blocks.{i}": (1e-3, 2e-3) for i in range(4)}
    options = {"units": Block, "compute": measured, "bucket_bytes": 0, "replicas": 4}
    planned = plan(on_meta(), 32, link="h100_node", replica_link=ETHERNET_100G, **options)
    block = 2 * 4 * 64 * 64 * 4
    root = Stage("the root", 0, 0, 512_000, 512_000, reshards=False, all_reduce_bytes=64_000)
    stages = [
        Stage(f"blocks.{i}", 1e-3, 2e-3, block, block, all_reduce_bytes=block // 8)
        for i in range(4)
    ]
    assert planned.prediction == predict(root, stages, H100_NODE, replica_link=ETHERNET_100G)
    assert "over 8xH100 NVLink, and 100G Ethernet between replicas" in str(planned)
    cluster = plan(on_meta(), 32, link="h100_cluster", **options)
    assert (cluster.link.name, cluster.replica_link) == ("8xH100 NVLink", H100_CLUSTER.across)
    assert plan(on_meta(), 32, **options).replica_link == H100_CLUSTER.across
    assert plan(on_meta(), 8, **options).replica_link == replace(H100_CLUSTER, across=None)
    document = json.loads(cluster.to_json() or "")
    assert (document["replicas"], document["replica_link"]["name"]) == (4, "400G InfiniBand")
    with pytest.raises(ValueError, match="at most 8 ranks, and 4 replicas of 8 ranks are 32"):
        plan(on_meta(), 32, link="h100_node", **options)


def test_the_root_is_reduced_after_its_units() -> None:
    for starts in (True, False):
        model = on_meta()
        model.embedding.weight.requires_grad_(starts)
        planned = plan(
            model, 8, units=Block, batch=TOKENS, flops_per_second=1e9, bucket_bytes=0
        ).prediction
        assert planned is not None
        reductions = [span.name for span in planned.spans if span.lane == "reduce"]
        assert reductions == ["blocks.3", "blocks.2", "blocks.1", "blocks.0", "the root"]


def test_units_of_one_bucket_are_one_stage() -> None:
    planned = plan(
        on_meta(), 8, units=Block, batch=TOKENS, flops_per_second=1e9, bucket_bytes=300_000
    )
    assert [len(bucket.units) for bucket in planned.buckets] == [1, 2, 2]
    assert planned.prediction is not None
    gathers = [span.name for span in planned.prediction.spans if span.lane == "gather"]
    assert gathers == ["the root", "blocks.0", "blocks.2"]  # both are still gathered in backward
    flops = sum(sum(unit.flops or ()) for unit in planned.units)
    assert planned.prediction.compute == pytest.approx(flops / 1e9)


def test_padding_is_what_shards_hold_beyond_the_parameters() -> None:
    with torch.device("meta"):
        model = nn.Linear(5, 3, bias=False)
    (unit,) = plan(model, 2).units
    assert unit.shard == 48  # two rows of 20 bytes, and 8 to the next multiple of 16
    assert unit.padding == 2 * 48 - 60


def test_tables_and_json_have_the_same_figures(tmp_path: Path) -> None:
    planned = plan(on_meta(), 8, units=Block, batch=TOKENS, flops_per_second=1e9)
    printed = str(planned)
    assert "blocks.0 to blocks.3 (4)" in printed
    assert f"{planned.memory.peak:,}" in printed
    assert "simulated step over 8xH100 NVLink" in printed
    document = json.loads(planned.to_json() or "")
    assert document["memory"]["peak"] == planned.memory.peak
    assert planned.prediction is not None
    assert document["simulated_seconds"]["step"] == planned.prediction.step
    assert planned.to_json(tmp_path / "plan.json") is None
    assert json.loads((tmp_path / "plan.json").read_text()) == document
    without = plan(on_meta(), 8, units=Block)
    assert "No time is predicted. Pass batch and flops_per_second" in str(without)
    assert "simulated" not in (without.to_json() or "")


def test_a_step_without_communication_says_so() -> None:
    for model, ranks in ((nn.ReLU(), 8), (nn.Linear(2, 2), 1)):
        assert str(plan(model, ranks, compute={})).endswith("step 0 ms: nothing is sent")


def test_what_does_not_fit_is_refused_with_the_table() -> None:
    model = on_meta()
    needed = plan(model, 8, units=Block).memory.peak
    assert plan(model, 8, units=Block, memory_limit=needed).memory.peak == needed
    with pytest.raises(ValueError, match="memory_limit is") as error:
        plan(model, 8, units=Block, memory_limit=needed - 1)
    assert f"Net needs {needed:,} bytes on each rank" in str(error.value)
    assert "blocks.0 to blocks.3 (4)" in str(error.value)


# - Mistakes


def _scalar() -> nn.Module:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
        model.scale = nn.Parameter(torch.zeros(()))
    return model


def _tied() -> nn.Module:
    model = on_meta()
    model.blocks[0].up.weight = model.blocks[1].up.weight
    return model


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (
            on_meta,
            {"world_size": None},
            ValueError,
            "plan needs world_size, since this model has no mesh",
        ),
        (
            on_meta,
            {"world_size": 0},
            ValueError,
            "got world_size=0. Pass a whole number of ranks from 1",
        ),
        (on_meta, {"units": "Block"}, TypeError, "got units='Block'. Pass module classes"),
        (on_meta, {"units": [int]}, TypeError, "in units. Pass module classes"),
        (on_meta, {"units": nn.Conv1d}, ValueError, "no such module. It has Block"),
        (on_meta, {"units": [nn.Linear(2, 2)]}, ValueError, "is not a module of Net"),
        (on_meta, {"units": nn.ModuleList}, ValueError, "do not implement forward"),
        (on_meta, {"link": "avian"}, ValueError, "link='avian'. Pass a Link or one of h100_n"),
        (on_meta, {"replicas": 3}, ValueError, "got 3 replicas of a model on 8 ranks"),
        (on_meta, {"replicas": 0}, ValueError, "got 0 replicas of"),
        (on_meta, {"replica_link": "h100_node"}, ValueError, "a model without replicas"),
        (
            on_meta,
            {"replicas": 2, "replica_link": "avian"},
            ValueError,
            "got replica_link='avian'. Pass a Link or one of",
        ),
        (on_meta, {"device_type": "tpu"}, ValueError, "got device_type='tpu'. Pass"),
        (on_meta, {"transport": "shared_memory"}, ValueError, "transport is 'shared_memory', but"),
        (on_meta, {"transport": Simulated(4, FAST)}, ValueError, "transport has 4 and 1"),
        (on_meta, {"max_message_bytes": 8}, ValueError, "less than one row of parameter"),
        (on_meta, {"mp_policy": "bf16"}, TypeError, "must be a MixedPrecisionPolicy"),
        (on_meta, {"flops_per_second": 1e12}, ValueError, "flops_per_second without a batch"),
        (on_meta, {"flops_per_second": 0.0, "batch": TOKENS}, ValueError, "Pass a positive rate"),
        (on_meta, {"flops_per_second": 1.0, "compute": {}}, ValueError, "got both flops_per"),
        (on_meta, {"compute": {}, "units": Block}, ValueError, "no seconds of blocks.0"),
        (on_meta, {"compute": {"head": (1, 1)}}, ValueError, "seconds of head, but the units"),
        (on_meta, {"batch": (torch.zeros(2, 16),) * 2}, ValueError, "plan could not count flops"),
        (
            on_meta,
            {"optimizer_attached": True, "flops_per_second": 1e12, "batch": TOKENS},
            ValueError,
            "Pass `compute` with three numbers a unit; the third is the optimizer's seconds",
        ),
        (on_meta, {"optimizer_attached": "yes"}, TypeError, "optimizer_attached"),
        (on_meta, {"optimizer_fused": "yes"}, TypeError, "optimizer_fused"),
        (
            on_meta,
            {"optimizer_attached": True, "offload_policy": CPUOffloadPolicy()},
            ValueError,
            "but unit 'the root' has its shards on the host and cannot be stepped in backward",
        ),
        (_scalar, {}, ValueError, "'scale' is a scalar"),
        (lambda: nn.LazyLinear(4), {}, ValueError, "'weight' belongs to a lazy module"),
        (_tied, {"units": Block}, ValueError, "'up.weight' is also 'up.weight' of Block"),
    ],
)
def test_mistakes_raise_and_say_what_to_do(
    make: Callable[[], nn.Module], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(make(), **{"world_size": 8, **options})


def _mistakes_of_sharded_models() -> None:
    dist.destroy_process_group()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], transport=Simulated(2, FAST))
    with pytest.raises(ValueError, match="only modules inside are sharded"):
        plan(model)
    fully_shard(model, transport=Simulated(2, FAST))
    with pytest.raises(ValueError, match="got units and mp_policy for a model that"):
        plan(model, units=nn.Linear, mp_policy=HALF)


def test_units_of_a_sharded_model_are_its_own() -> None:
    run_ranks(_mistakes_of_sharded_models, 1)


# - The command

FACTORY = """
import gpt_model

def make():
    return gpt_model.GPT(gpt_model.GPTConfig(512, 64, 128, 3, 4))

def needs(config):
    pass

def sharded():
    from fsdp_ext import Link, Simulated, fully_shard

    model = make()
    transport = Simulated(16, Link("a link", 1e-5, 1e10))
    for block in model.blocks:
        fully_shard(block, transport=transport)
    return fully_shard(model, transport=transport, prefetch=2)

def twins():
    from torch import nn

    def layer():
        class Layer(nn.Linear):
            pass
        return Layer(4, 4)

    return nn.Sequential(layer(), layer())

def lazy_buffers():
    from torch import nn

    return nn.LazyBatchNorm1d(affine=False)

number = 3
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a module that makes a model."""
    (tmp_path / "plan_factory.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_command_plans_a_model_that_it_makes_on_meta(factory: Path) -> None:
    arguments = ["plan_factory:make", "--world-size", "16", "--units", "Block"]
    arguments += ["--link", "h100_cluster", "--param-dtype", "bfloat16", "--bucket-bytes", "1MiB"]
    arguments += ["--batch", "4x64:int64", "--flops-per-second", "1e12", "--json", "plan.json"]
    path = os.pathsep.join(map(str, (PACKAGE, EXAMPLES, factory)))
    result = subprocess.run(
        [sys.executable, "-m", "fsdp_ext", "plan", *arguments],
        cwd=factory,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "blocks.0 to blocks.1 (2)" in result.stdout  # one bucket of 1 MiB
    assert "simulated step over 8xH100 NVLink, 400G InfiniBand across" in result.stdout
    document = json.loads((factory / "plan.json").read_text())
    assert document["world_size"] == 16
    assert document["bucket_bytes"] == 2**20
    assert len(document["units"]) == 4


def test_the_command_plans_a_sharded_model_with_its_own_settings(
    factory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def json_of(*more: str) -> Any:
        target = factory / "plan.json"
        arguments = ["plan_factory:sharded", "--world-size", "16", "--json", str(target)]
        assert run([*arguments, *more]) == 0, capsys.readouterr().err
        return json.loads(target.read_text())

    try:
        own = json_of()
        assert len(own["units"]) == 4
        assert own["memory"] == json_of("--prefetch", "2")["memory"]
        assert own["memory"]["ring"] > json_of("--prefetch", "1")["memory"]["ring"]
        code = run(["plan_factory:sharded", "--world-size", "16", "--param-dtype", "bfloat16"])
        assert code == 2
    finally:
        dist.destroy_process_group()  # which Simulated has made
    assert "got mp_policy for a model that fully_shard was" in capsys.readouterr().err


def test_a_name_of_several_classes_stands_for_all_of_them(
    factory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan_factory:twins", "--world-size", "2", "--units", "Layer"]) == 0
    assert "40 parameters in 3 units" in capsys.readouterr().out


def test_the_command_plans_replicas(factory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan_factory:make", "--world-size", "32", "--units", "Block", "--replicas", "4"]
    arguments += ["--batch", "4x64:int64", "--flops-per-second", "1e12"]
    assert run([*arguments, "--link", "h100_node", "--replica-link", "ethernet_100g"]) == 0
    printed = capsys.readouterr().out
    assert "on 32 cuda ranks (4 shard groups of 8, hybrid sharding)" in printed
    assert "over 8xH100 NVLink, and 100G Ethernet between replicas" in printed
    assert run([*arguments, "--replica-link", "avian"]) == 2
    assert "--replica-link 'avian' is neither" in capsys.readouterr().err


def test_the_command_plans_attached_optimizers(
    factory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan_factory:make", "--world-size", "16", "--units", "Block"]
    arguments += ["--bucket-bytes", "1"]
    gradients = []
    for more in ([], ["--optimizer-attached"]):
        assert run([*arguments, *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        row = next(line for line in lines if line.startswith("gradients  "))
        gradients.append(int(row.split()[-1].replace(",", "")))
    assert gradients[1] < gradients[0]
    assert run([*arguments, *more, "--batch", "2x4:int64", "--flops-per-second", "1e12"]) == 2
    assert "leave out --flops-per-second to plan only the memory" in capsys.readouterr().err


def test_the_command_plans_kept_gather_inputs_and_offloaded_shards(
    factory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan_factory:make", "--world-size", "16", "--units", "Block"]
    arguments += ["--param-dtype", "bfloat16"]
    kept = []
    for more in ([], ["--keep-gather-inputs"], ["--no-keep-gather-inputs"]):
        assert run([*arguments, *more, "--json", str(factory / "plan.json")]) == 0
        kept.append(json.loads((factory / "plan.json").read_text())["memory"]["gather_inputs"] > 0)
    assert kept == [False, True, False]
    capsys.readouterr()
    assert run([*arguments, "--offload"]) == 0
    assert "in the host's memory" in capsys.readouterr().out


def test_the_command_ends_with_1_where_memory_does_not_do(
    factory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan_factory:make", "--world-size", "16", "--units", "Block"]
    assert run([*arguments, "--memory-limit", "80GB"]) == 0
    enough = capsys.readouterr()
    assert run([*arguments, "--memory-limit", "1MB"]) == 1
    refused = capsys.readouterr()
    assert refused.out == enough.out
    assert "without activations, but --memory-limit is 1.0 MB" in refused.err


def test_the_command_ends_with_2_after_an_error_that_it_does_not_know(
    factory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan_factory:lazy_buffers", "--world-size", "2"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("plan_factory", [], "'plan_factory' is not of the form MODULE:FACTORY"),
        ("nowhere:make", [], "cannot import nowhere:make: ModuleNotFoundError"),
        ("./train.py:make", [], r"cannot import \./train\.py:make: TypeError"),
        ("plan_factory:made", [], "cannot import plan_factory:made: AttributeError"),
        ("plan_factory:number", [], "plan_factory:number is not a function"),
        ("plan_factory:needs", [], "plan_factory:needs raised TypeError .* on the meta device"),
        ("plan_factory:make", ["--units", "Blok"], "--units names 'Blok', but the classes"),
        (
            "plan_factory:make",
            ["--link", "avian", "--units", "Blok"],
            "--units names 'Blok', but the classes",
        ),
        (
            "plan_factory:make",
            ["--link", "avian"],
            "--link 'avian' is neither a file nor one of",
        ),
        (
            "plan_factory:make",
            ["--memory-limit", "much"],
            "'much' is not a size such as 80GB",
        ),
        ("plan_factory:make", ["--batch", "8,2"], "is not a shape and a dtype"),
        ("plan_factory:make", ["--param-dtype", "fp15"], "is not a dtype such as bfloat16"),
    ],
)
def test_mistakes_of_the_command_are_a_sentence_and_exit_code_2(
    factory: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    more: list[str],
    message: str,
) -> None:
    try:
        code = run([model, "--world-size", "8", *more])
    except SystemExit as error:  # the exit code of argparse
        code = int(str(error.code))
    assert code == 2
    assert re.search(message, capsys.readouterr().err)


def test_help_names_device_types_and_has_an_example_that_is_accepted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(["--help"])
    text = capsys.readouterr().out
    assert "cuda for GPUs, the default, or cpu" in " ".join(text.split())
    example = text.partition("python -m fsdp_ext plan my_model:make")[2].partition("\n\n")[0]
    words = shlex.split(example.replace("\\\n", " "))
    arguments = _parser().parse_args(["my_model:make", *words])
    assert arguments.world_size == 64
    assert arguments.memory_limit == 80 * 10**9


def test_the_commands_example_runs_and_hides_communication(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([]) == 2
    assert EXAMPLE in capsys.readouterr().err
    command = shlex.split(EXAMPLE.replace("\\\n", ""))
    assert command[:4] == ["python", "-m", "fsdp_ext", "plan"]
    assert run(command[4:]) == 0
    printed = capsys.readouterr().out
    hidden = re.search(r"(\d+)% of it\s+hidden", printed)
    assert hidden is not None
    assert int(hidden[1]) > 90
    assert all(len(line) <= WIDTH for line in printed.splitlines())
