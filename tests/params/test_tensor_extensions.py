"""Parameters of tensor subclasses with FSDP2's extensions are sharded as by FSDP2."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.extended_models import (
    BF16,
    SYSTEMS,
    Setup,
    assert_same,
    batch,
    compare,
    poison,
    reshard,
    train_step,
)
from support.extensions import HalfWeight, contents, linear_of
from support.launcher import run_ranks
from support.parity import device
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp_ext


def _train_beside_fsdp2(setup: Setup) -> None:
    models = [setup.model(fully_shard) for fully_shard in SYSTEMS]
    compare(models, "sharded")
    optimizers = [
        torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
        for model in models
    ]
    first = models[0].head.weight._local_tensor._data.clone()
    for step in range(3):
        seen = [
            train_step(model, optimizer, step, setup.micro_batches)
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
        for ours, theirs in zip(*seen, strict=True):
            assert torch.equal(ours, theirs), f"step {step}: {ours} is not {theirs}"
        compare(models, f"step {step}")
    if first.numel() > 0:
        assert not torch.equal(models[0].head.weight._local_tensor._data, first)


SETUPS = {
    "defaults": Setup(),
    "accumulation": Setup(micro_batches=3),
    "bf16, checkpoints": Setup(options={"mp_policy": BF16}, checkpoints=True),
    "kept after forward": Setup(options={"reshard_after_forward": False}, ours={"bucket_bytes": 0}),
    "one bucket": Setup(ours={"bucket_bytes": 10**6, "prefetch": 2}),
    "pieces": Setup(ours={"max_message_bytes": 256}),
    "one unit, over a process group": Setup(ours={"transport": "process_group"}, units=False),
}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_models_with_extensions_train_as_under_fsdp2(setup: Setup) -> None:
    run_ranks(_train_beside_fsdp2, 2, setup)


def _train_releasing(setup: Setup) -> None:
    with pytest.MonkeyPatch.context() as patch:
        name = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
        patch.setattr(HalfWeight, name, lambda self: True, raising=False)
        _train_beside_fsdp2(setup)


def test_extensions_that_let_gathered_memory_go_train_as_under_fsdp2() -> None:
    run_ranks(_train_releasing, 2, SETUPS["accumulation"])


@pytest.mark.exhaustive
def test_replicas_with_extensions_train_as_under_fsdp2() -> None:
    run_ranks(_train_beside_fsdp2, 4, Setup(mesh=(2, 2)))


# FSDP2 cannot do this: on a single rank it uses the first input only.
def _shards_of_one_rank(options: dict[str, Any]) -> None:
    whole, shared = Setup(options, mesh=(2, 1)), Setup(options)
    models = [setup.model(fsdp_ext.fully_shard) for setup in (whole, shared)]
    for model in models:
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
            model(x).float().square().sum().backward()  # the same on both ranks
            optimizer.step()
            poison(model)
    for (name, ours), theirs in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        rows = [tensor.chunk(2) for tensor in contents(ours._local_tensor)]
        mine = [chunks[dist.get_rank()] for chunks in rows if len(chunks) > dist.get_rank()]
        if not mine:
            assert theirs._local_tensor.numel() == 0
        for have, want in zip(mine, contents(theirs._local_tensor), strict=False):
            assert torch.equal(have, want), name


@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}], ids=["fp32", "bf16"])
def test_extensions_on_one_rank_train_as_shared_by_two(options: dict[str, Any]) -> None:
    run_ranks(_shards_of_one_rank, 2, options)


# Tensor parallelism over `tp`: the model's linear layer has a DTensor of extensions.
def _tensor_parallel() -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    models = []
    for fully_shard in SYSTEMS:
        torch.manual_seed(0)
        columns = ColwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(-1))
        layers = [parallelize_module(nn.Linear(6, 6), mesh["tp"], columns) for _ in range(2)]
        for layer in layers:
            spec = layer.weight._spec
            local = HalfWeight(layer.weight.to_local().detach())
            layer.weight = nn.Parameter(DTensor(local, spec, requires_grad=False))
            fully_shard(layer, mesh=mesh["dp"])
        models.append(fully_shard(nn.Sequential(*layers), mesh=mesh["dp"]))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for step in range(3):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank() // 2)
            x = torch.randn(4, 6, generator=generator).chunk(2, dim=-1)[dist.get_rank() % 2]
            losses.append(model(x).square().sum())
            losses[-1].backward()
            optimizer.step()
            poison(model)
        assert torch.equal(*losses)
        compare(models, f"step {step}")


@pytest.mark.exhaustive
def test_tensor_parallel_extensions_train_as_under_fsdp2() -> None:
    run_ranks(_tensor_parallel, 4)


class Routed(nn.Module):
    """The second layer runs on the first rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (linear_of(HalfWeight(torch.randn(4, 4))) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if dist.get_rank() == 0:
            return self.second(x)
        return self.second.join_empty(x) if hasattr(self.second, "join_empty") else x


def _join_empty() -> None:
    torch.manual_seed(0)
    model, plain = Routed(), Routed()
    for layer, copy in ((model.first, plain.first), (model.second, plain.second)):
        rounded = layer.weight._data.bfloat16().float()
        copy.weight = nn.Parameter(HalfWeight(rounded.clone()))
        fsdp_ext.fully_shard(layer)
    fsdp_ext.fully_shard(model)
    x = torch.full((1, 4), 1.0 + dist.get_rank())
    for each in (model, plain):
        each(x).square().sum().backward()
    for layer, copy in ((model.first, plain.first), (model.second, plain.second)):
        expected = torch.zeros(4, 4) if copy.weight.grad is None else copy.weight.grad
        dist.all_reduce(expected)
        assert torch.equal(layer.weight.grad.full_tensor(), expected / 2)


def test_a_rank_may_leave_out_a_unit_with_extensions() -> None:
    run_ranks(_join_empty, 2)


# - Checkpoints and initialisation


def _save_and_load() -> None:
    models = [Setup().model(fully_shard) for fully_shard in SYSTEMS]
    others = [Setup().model(fully_shard) for fully_shard in SYSTEMS]
    for model in models:
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
        train_step(model, optimizer, 0, 1)
    states = [model.state_dict() for model in models]
    for name, ours in states[0].items():
        assert_same(ours, states[1][name], name)
    for assign in (False, True):
        for model, other, state in zip(models, others, states, strict=True):
            with torch.no_grad():
                other.head.weight.zero_()
                model.eval()
            other.load_state_dict(state, assign=assign)
        compare(others, f"loaded with assign={assign}")
        results = [model(batch(1)) for model in (*models, *others)]
        for result in results[1:]:
            assert torch.equal(result, results[0])
        for model in (*models, *others):
            reshard(model)
    file = io.BytesIO()
    torch.save(states[0], file)


def test_state_dicts_with_extensions_are_those_of_fsdp2() -> None:
    run_ranks(_save_and_load, 2)


def _from_meta() -> None:
    models = []
    for fully_shard in SYSTEMS:
        torch.manual_seed(0)
        whole = HalfWeight(torch.randn(7, 5))  # uneven rows
        with torch.device("meta"):
            model = nn.Linear(5, 7)
        model.weight = nn.Parameter(HalfWeight(torch.empty(7, 5, device="meta")))
        fully_shard(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.bias.zero_()
            model.load_state_dict({"weight": rows_as(model.weight, whole), "bias": model.bias})
        models.append(model)
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    for model in models:
        model(x).square().sum().backward()
        model.reshard()
    compare(models, "from meta")


def rows_as(sharded: Tensor, whole: HalfWeight) -> Any:
    """Return a copy of `sharded` with the rows of `whole`."""
    result = sharded.detach().clone()
    chunk = whole._data.chunk(dist.get_world_size())[dist.get_rank()]
    result._local_tensor._data.copy_(chunk)
    return result


def test_extensions_from_meta_train_as_under_fsdp2() -> None:
    run_ranks(_from_meta, 2)


def _other_memory() -> None:
    model = Setup().model(fsdp_ext.fully_shard)
    expected = model(batch(0)).detach()
    model.to(torch.device("cpu"))
    with torch.no_grad():
        model.head.weight.add_(0.0)
    assert torch.equal(model(batch(0)), expected)
    model.requires_grad_(False)
    assert torch.equal(model(batch(0)), expected)
    model.head.weight.requires_grad_(True)
    model(batch(0)).sum().backward()
    assert type(model.head.weight.grad._local_tensor) is Tensor
    state = model.state_dict()
    low = model.blocks[0].low.weight
    low.requires_grad_(True)
    low._local_tensor = HalfWeight(low._local_tensor)
    model.load_state_dict(state)
    now = model(batch(0))
    assert not torch.equal(now, expected)  # it is gathered in bf16
    torch.testing.assert_close(now, expected, rtol=0.05, atol=0.05)
    now.sum().backward()
    model.blocks[0].reshard()
    assert type(low.grad._local_tensor) is Tensor


def test_extensions_follow_what_users_do_between_steps() -> None:
    run_ranks(_other_memory, 2)
