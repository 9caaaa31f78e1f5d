"""Ranks with a GPU each get exact gradients, whichever algorithm NCCL takes.

NCCL's algorithms add in different orders, and some of them in another precision, so their sums of
real numbers may differ rightly. The gradients here are small integers, whose sums and averages are
exact in every order and in every precision that training has.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.rank_process import OWN_GPU
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_ext.sharding.params.param_group
from fsdp_ext import MixedPrecisionPolicy, fully_shard
from fsdp_ext.comm.nccl_settings import OF_LANES, REGISTER

WIDTH = 512
STEPS = 3
ROWS = 4
# The scale is a power of two, so averages are exact.
RANKS = max(n for n in (1, 2, 4, 8) if n <= max(1, torch.cuda.device_count()))
SETTINGS: dict[str, dict[str, str]] = {
    "nothing_registered": {REGISTER: "0"},
    "registered": {},
    "few_blocks": dict.fromkeys(OF_LANES.values(), "max_ctas=2"),
    "efficiency": dict.fromkeys(OF_LANES.values(), "cta_policy=efficiency"),
    "auto": dict.fromkeys(OF_LANES.values(), "cta_policy=auto"),
}
BF16 = {"param_dtype": torch.bfloat16}
PRECISIONS: dict[str, dict[str, torch.dtype]] = {
    "fp32": {},
    "bf16": BF16,
    "bf16_reduced_in_fp32": {**BF16, "reduce_dtype": torch.float32},
}

pytestmark = pytest.mark.skipif(RANKS < 2, reason="needs two GPUs")


class Scaled(nn.Module):
    """A matrix with one 1 or -1 in each row, and a scale for each output."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (2, WIDTH), generator=random) * 2.0 - 1
        order = torch.randperm(WIDTH, generator=random)
        self.matrix = nn.Parameter(torch.diag(signs[0])[order])
        self.scale = nn.Parameter(signs[1].clone())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.matrix) * self.scale


def _batch(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-3, 4, (ROWS, WIDTH), generator=random).to("cuda", dtype)


def _exact_gradients(model: nn.Module, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the averages of all ranks' gradients, which each rank computes by itself."""
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        model(_batch(step, rank, dtype)).sum().backward()
        for total, parameter in zip(sums, model.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad
    return [total / dist.get_world_size() for total in sums]


def _train(precision: dict[str, torch.dtype], replicas: int) -> None:
    # A grouped gather has a matrix and the packed scale.
    fsdp_ext.sharding.params.param_group.DIRECT_BYTES = WIDTH * WIDTH
    dtype = precision.get("param_dtype", torch.float32)
    ranks = dist.get_world_size()
    model: Any = nn.Sequential(*[Scaled(seed) for seed in range(4)]).cuda()
    expected = copy.deepcopy(model).to(dtype)
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(**precision)}
    if replicas > 1:
        shape, names = (replicas, ranks // replicas), ("replicate", "shard")
        options["mesh"] = init_device_mesh("cuda", shape, mesh_dim_names=names)
    for layer in [*model, model]:
        fully_shard(layer, **options)
    for step in range(STEPS):
        model.zero_grad()
        model(_batch(step, dist.get_rank(), dtype)).sum().backward()
        wanted = _exact_gradients(expected, step, dtype)
        for (name, parameter), exact in zip(model.named_parameters(), wanted, strict=True):
            assert exact.any()
            assert isinstance(parameter.grad, DTensor)
            got = parameter.grad.full_tensor().double()
            assert got.equal(exact), f"step {step}: {name}: {(got - exact).abs().max()}"
        # Later gathers have to see other parameters.
        with torch.no_grad():
            for one in (*model.parameters(), *expected.parameters()):
                one.neg_()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_gradients_are_exact_on_every_path(
    settings: dict[str, str], precision: dict[str, torch.dtype]
) -> None:
    variables = OWN_GPU | settings
    run_ranks(_train, RANKS, precision, 1, timeout=120.0, device="cuda", variables=variables)


@pytest.mark.skipif(RANKS < 4, reason="needs four GPUs")
@pytest.mark.timeout(150)
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_gradients_are_exact_with_replicas(precision: dict[str, torch.dtype]) -> None:
    run_ranks(_train, RANKS, precision, 2, timeout=120.0, device="cuda", variables=OWN_GPU)
