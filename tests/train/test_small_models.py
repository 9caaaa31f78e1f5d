"""Small models and ways to set them up that other tests leave out, beside FSDP2 in the same run.

What they show is what PyTorch's own tests of FSDP2 expect.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.matrix import every
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fsdp_ext

WIDTH = 4
BF16, FP32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def batch(number: int = 0, dtype: torch.dtype = FP32) -> Tensor:
    torch.manual_seed(10 * number + dist.get_rank())
    return torch.randn(3, WIDTH, dtype=dtype)


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else whole(p.grad) for p in model.parameters()]


def values(model: nn.Module) -> list[Tensor]:
    return [whole(p.detach()).clone() for p in model.parameters() if p.requires_grad]


def shard_each(api: Any, model: Any, **options: Any) -> Any:
    """Shard the children, and the model."""
    for child in model.children():
        api.fully_shard(child, **options)
    return api.fully_shard(model, **options)


def train(model: Any, steps: int = 2, dtype: torch.dtype = FP32) -> list[Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(steps):
        loss = model(batch(step, dtype)).square().mean()
        loss.backward()
        found += [loss.detach(), *gradients(model)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return found + values(model)


# - Models


def without_inputs(api: Any) -> list[Any]:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self) -> Tensor:
            return self.weight @ self.weight

    model: Any = api.fully_shard(Square())
    output = model()
    output.sum().backward()
    return [output.detach(), *gradients(model)]


def without_parameters(api: Any) -> list[Any]:
    class Sum(nn.Module):
        def forward(self, x: Tensor, others: tuple[Tensor, ...]) -> Tensor:
            return x + sum(others)

    handle = api.fully_shard(Sum()).unshard(async_op=True)
    handle.wait()
    return [api.fully_shard(Sum())(batch(), (batch(1), batch(2)))]


def made_block_by_block(api: Any) -> list[Any]:
    """Later blocks reuse the memory and the ids of parameters that sharding has replaced."""
    model = nn.Sequential()
    for _ in range(4):
        model.append(api.fully_shard(Block()))
        gc.collect()
    return train(api.fully_shard(model))


def a_part_after_the_whole(api: Any) -> list[Any]:
    model = shard_each(api, nn.Sequential(Block(), Block()))
    found = train(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model[0](batch()).sum().backward()
    found += gradients(model)
    optimizer.step()
    return [*found, model(batch()).detach()]


def two_losses(api: Any) -> list[Any]:
    """Each backward runs through one of two branches, and both run through the first layer."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.left, self.right = Block(), Block(), Block()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.stem(x)
            return self.left(x), self.right(x)

    model: Any = shard_each(api, Branches(), reshard_after_forward=True)
    left, right = model(batch())
    model.set_is_last_backward(False)
    right.sum().backward(retain_graph=True)
    model.set_is_last_backward(True)
    left.square().sum().backward()
    return gradients(model)


def a_module_of_a_unit_never_runs(api: Any) -> list[Any]:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spare, self.used = nn.Linear(1, 1), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = nn.Sequential(Spare(), Spare())
    for each in model:
        api.fully_shard(list(each.children()))
    return train(api.fully_shard(model), steps=3)


def a_parameter_that_nobody_uses(api: Any) -> list[Any]:
    """It gets zeros if that is asked for, and None otherwise."""

    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.extra = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x)

    found: list[Any] = []
    for asks in (False, True):
        for micro_batches in (1, 2):
            model: Any = api.fully_shard(Extra())
            model.set_reduce_scatter_unused_params(asks)
            for number in range(micro_batches):
                model.set_requires_gradient_sync(number + 1 == micro_batches)
                model(batch(number)).square().mean().backward()
            found += gradients(model)
            assert (model.extra.grad is not None) == asks
            found += train(model)
    return found


def a_prefetch_that_comes_too_late(api: Any) -> list[Any]:
    model: Any = shard_each(api, Block())
    model.up.set_modules_to_backward_prefetch([model.down])
    return train(model)


def tied_and_uneven(api: Any) -> list[Any]:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, WIDTH)
            self.head = nn.Linear(WIDTH, 9, bias=False)
            self.head.weight = self.words.weight

        def forward(self, words: Tensor) -> Tensor:
            return self.head(self.words(words))

    model: Any = Tied()
    api.fully_shard([model.words, model.head])
    api.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = whole(model.words.weight.detach())
    model(torch.arange(9)).square().mean().backward()
    optimizer.step()
    model.words.unshard()
    after = model.head.weight.detach().clone()
    model.words.reshard()
    assert (before != after).any(1).all()  # the last row, too, whose rank has padding
    return [before, after]


def contiguous_tensors(api: Any) -> list[Any]:
    seen = []
    model: Any = Block()
    for module in (model.up, model.down, model):
        api.fully_shard(module, shard_placement_fn=lambda p: Shard(-1) if p.ndim > 1 else Shard(0))
    model.up.register_forward_pre_hook(
        lambda module, _: seen.extend(p.is_contiguous() for p in module.parameters())
    )
    found = [p.placements for p in model.parameters()] + train(model)
    model(batch()).sum().backward()
    for param in model.parameters():
        for tensor in (param, param.grad):
            seen += [tensor.is_contiguous(), tensor.to_local().is_contiguous()]
    assert len(seen) > 8
    assert all(seen)
    return found


# - Dtypes


def converted_after_sharding(api: Any) -> list[Any]:
    found: list[Any] = []
    for swaps in (False, True):
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        try:
            model = shard_each(api, nn.Sequential(Block(), Block())).to(torch.float64)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        found += train(model, dtype=torch.float64)
        model(batch(dtype=torch.float64)).sum().backward()
        for param in model.parameters():
            for tensor in (param, param.grad):
                meta = tensor._spec.tensor_meta
                assert {tensor.dtype, tensor.to_local().dtype, meta.dtype} == {torch.float64}
    return found


def reduced_in_bf16_after_a_conversion(api: Any) -> list[Any]:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    model = nn.Sequential(Block(), Block()).to(BF16)
    return train(shard_each(api, model, mp_policy=policy).to(FP32))


def norms_in_low_precision(api: Any) -> list[Any]:
    """A norm has its own policy, or statistics in the dtype of its inputs."""
    found: list[Any] = []
    for dtype in (BF16, torch.float16):
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        for norm in (nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH))
            keeps = len(found) % 2 == 0
            api.fully_shard(
                norm, mp_policy=MixedPrecisionPolicy(output_dtype=dtype) if keeps else policy
            )
            for module in (model[0], model[2], model):
                api.fully_shard(module, mp_policy=policy)
            if isinstance(norm, nn.BatchNorm1d) and not keeps:
                norm.running_mean = norm.running_mean.to(dtype)
                norm.running_var = norm.running_var.to(dtype)
            output = model(batch())
            assert output.dtype == dtype
            output.square().mean().backward()
            found += [output.detach(), *gradients(model)]
    return found


def casts_when_recomputed(api: Any) -> list[Any]:
    """Activation checkpointing runs a part again, with the casts of its first run."""
    found: list[Any] = []
    for policy in (
        MixedPrecisionPolicy(BF16, BF16),
        MixedPrecisionPolicy(BF16, BF16, output_dtype=FP32, cast_forward_inputs=False),
    ):
        layer: Any = api.fully_shard(nn.Linear(WIDTH, WIDTH), mp_policy=policy)
        seen: list[Any] = []
        layer.register_forward_hook(
            lambda _, inputs, output, seen=seen: seen.append((inputs[0].dtype, output.dtype))
        )
        inputs = batch(dtype=FP32 if policy.cast_forward_inputs else BF16)
        checkpoint(layer, inputs, use_reentrant=False, early_stop=False).float().sum().backward()
        assert len(seen) == 2
        assert seen[0] == seen[1]
        found += [*seen, *gradients(layer)]
    return found


def frozen_bytes_beside_trained_numbers(api: Any) -> list[Any]:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            small = torch.ones(8, WIDTH).to(torch.float8_e4m3fn)
            self.small = nn.Parameter(small, requires_grad=False)
            self.weight = nn.Parameter(torch.randn(8, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.weight * self.small.float()).t()

    return train(api.fully_shard(Mixed()))


# - How models are set up


def from_meta_with_a_new_parameter(api: Any) -> list[Any]:
    """A parameter is computed from sharded ones, and replaces the one that sharding has made."""
    with torch.device("meta"):
        model: Any = nn.Sequential(Block(), nn.LayerNorm(WIDTH, bias=False))
        shard_each(api, model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
        norm = torch.linalg.vector_norm(model[0].down.weight, dim=1)
        model[1].weight = nn.Parameter(norm)
    return train(model)


def from_meta_one_parameter_at_a_time(api: Any) -> list[Any]:
    with torch.device("meta"):
        model = shard_each(api, nn.Sequential(Block(), Block()))
    torch.manual_seed(1)
    for name, param in list(model.named_parameters()):
        value = distribute_tensor(torch.randn(param.shape), param.device_mesh, param.placements)
        model.load_state_dict({name: value}, assign=True, strict=False)
    return train(model)


def on_meshes_of_groups(api: Any) -> list[Any]:
    world = dist.new_group(list(range(dist.get_world_size())))
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    ranks = torch.arange(dist.get_world_size()).view(-1, 1)
    names = ("replicate", "shard")
    meshes = [
        DeviceMesh.from_group(world, "cpu", mesh_dim_names=("dp",)),
        DeviceMesh.from_group([world, alone], "cpu", mesh=ranks, mesh_dim_names=names),
        DeviceMesh.from_group(alone, "cpu"),
    ]
    return [x for mesh in meshes for x in train(shard_each(api, Block(), mesh=mesh))]


def replicas_that_get_the_first_ones_state(api: Any) -> list[Any]:
    shape = (dist.get_world_size(), 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH))
    shard_each(api, model, mesh=mesh)
    tensors = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        if mesh.get_local_rank("replicate") > 0:
            tensor.detach().fill_(7)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        dist.broadcast(local, src=0, group=mesh.get_group("replicate"))
    return [*train(model), *model.buffers()]


def inside_of_ddp(api: Any) -> list[Any]:
    """DDP trains the parameters outside of units, and those that units ignore."""
    model: Any = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))
    ignored = set(model[0].up.parameters())
    api.fully_shard(model[0], ignored_params=ignored)
    sharded = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
    assert sharded == ["0.down.weight", "0.down.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
    with implicit_replication():
        return train(DistributedDataParallel(model, broadcast_buffers=False))


# - What optimizers need


def scaled_losses(api: Any) -> list[Any]:
    """A gradient that is infinite on one rank makes all ranks leave the step out."""
    found: list[Any] = []
    for is_infinite in (False, True):
        model: Any = shard_each(api, nn.Sequential(Block(), Block()))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(model(batch()).sum()).backward()
        if is_infinite and dist.get_rank() == 0:
            model[0].up.weight.grad._local_tensor[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        before = values(model)
        scaler.step(optimizer)
        scaler.update()
        is_left_out = all(map(torch.equal, before, values(model)))
        assert is_left_out == is_infinite
        found += [scaler.get_scale(), *gradients(model)]
    return found


def clipped_by_one_all_reduce(api: Any) -> list[Any]:
    found: list[Any] = []
    for norm_type in (1, 2, 3, torch.inf):
        model = shard_each(api, nn.Sequential(Block(), Block()))
        model(batch()).square().sum().backward()
        with CommDebugMode() as counts:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm_type)
        found += [norm.full_tensor(), *gradients(model)]
        calls = counts.get_comm_counts()
        assert calls[torch.ops.c10d_functional.all_reduce] == 1
    return found


CASES: list[Callable[[Any], list[Any]]] = [
    without_inputs,
    without_parameters,
    made_block_by_block,
    a_part_after_the_whole,
    two_losses,
    a_module_of_a_unit_never_runs,
    a_parameter_that_nobody_uses,
    a_prefetch_that_comes_too_late,
    tied_and_uneven,
    contiguous_tensors,
    converted_after_sharding,
    reduced_in_bf16_after_a_conversion,
    norms_in_low_precision,
    casts_when_recomputed,
    frozen_bytes_beside_trained_numbers,
    from_meta_with_a_new_parameter,
    from_meta_one_parameter_at_a_time,
    on_meshes_of_groups,
    replicas_that_get_the_first_ones_state,
    inside_of_ddp,
    scaled_losses,
    clipped_by_one_all_reduce,
]


def compare(case: Callable[[Any], list[Any]]) -> None:
    results = []
    for api in (fsdp_ext, torch_fsdp):
        torch.manual_seed(0)
        results.append(case(api))
    for mine, other in zip(*results, strict=True):
        if isinstance(mine, Tensor):
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert mine == other


@pytest.mark.parametrize("case", every(2, CASES), ids=lambda case: case.__name__)
def test_results_are_those_of_fsdp2(case: Callable[[Any], list[Any]]) -> None:
    run_ranks(compare, 2, case)


# - Where FSDP2 of this torch raises


def _unfrozen_after_a_first_forward() -> None:
    """The first forward sees no trained parameter, and one that is no floating-point number."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.count = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x)

    torch.manual_seed(0)
    model: Any = Counted()
    plain = Block()
    plain.load_state_dict(model.block.state_dict())
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    fsdp_ext.fully_shard(model, mp_policy=policy).requires_grad_(False)
    with torch.no_grad():
        model(batch())
    model.block.requires_grad_(True)
    model(batch()).sum().backward()
    plain.to(BF16)(batch().to(BF16)).sum().backward()
    for mine, other in zip(model.block.parameters(), plain.parameters(), strict=True):
        expected = other.grad.float() / dist.get_world_size()
        dist.all_reduce(expected)
        torch.testing.assert_close(mine.grad.full_tensor(), expected, rtol=0, atol=0)


def test_what_is_unfrozen_after_a_first_forward_is_reduced_in_reduce_dtype() -> None:
    run_ranks(_unfrozen_after_a_first_forward, 2)
