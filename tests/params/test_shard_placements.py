"""`shard_placement_fn` shards any dimension, and models train as under FSDP2."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from support.messages import check_message, check_messages
from support.models import Subject
from support.parity import ROUNDING, Case, Run, adamw, check, each
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_ext import fully_shard

WIDTH = 12  # which 1 to 4 ranks divide


class Mixture(Subject):
    """Parameters of one to four dimensions, in units of several and of a single one."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(Experts() for _ in range(2))
        self.odd = nn.Linear(WIDTH, 5)  # whose rows 2 ranks do not divide
        self.tail = nn.Linear(5, 1, bias=False)

    def units(self) -> list[Any]:
        return [self.convolution, *self.experts]

    def batch(self, generator: torch.Generator) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        return (torch.randn(2, WIDTH, 3, 3, generator=generator),), {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.convolution(x).mean((2, 3)))
        for experts in self.experts:
            x = x + experts(x)
        return self.tail(self.odd(x))

    def loss(self, output: Tensor) -> Tensor:
        return output.square().mean()


class Experts(nn.Module):
    """Two experts in one parameter, that each see all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH)
        self.scale = nn.Parameter(torch.ones(2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("eij,bj->ebi", self.weight * self.scale, x)).sum(0)


def last_dimension(parameter: Tensor) -> Shard | None:
    """Shard the last dimension that is long enough, and otherwise rows."""
    for dim in reversed(range(1, parameter.ndim)):
        if parameter.shape[dim] == WIDTH:
            return Shard(dim)
    return None


def second_dimension(parameter: Tensor) -> Shard | None:
    return Shard(1) if parameter.ndim > 2 and parameter.shape[1] == WIDTH else None


def cut_into_messages(run: Run) -> None:
    """Let each unit of ours be a bucket of several messages."""
    if run.under_test:
        for unit in run.model._fsdp_ext_units(recurse=True):  # type: ignore[operator]
            unit.change(bucket_bytes=0, max_message_bytes=4 * WIDTH * WIDTH * 9)


def accumulate(run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    losses = []
    for micro_batch in range(2):
        loss = run.loss(step, micro_batch)
        run.backward(loss, sync=micro_batch == 1)
        losses.append(loss)
    run.optimizer.step()
    return tuple(losses)


LAST = Case("the last dimension", Mixture, options={"shard_placement_fn": last_dimension})


@each(
    [
        LAST,
        dataclasses.replace(
            LAST,
            fact="a dimension in the middle, with AdamW",
            options={"shard_placement_fn": second_dimension},
            optimizer=adamw,
        ),
        dataclasses.replace(
            LAST,
            fact="buckets of one unit, in several messages",
            after_sharding=cut_into_messages,
            step=accumulate,
        ),
        dataclasses.replace(
            LAST,
            fact="bf16 with sums in fp32",
            precision={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
            unsharded=None,
        ),
        dataclasses.replace(
            LAST,
            fact="hybrid sharding",
            worlds=(4,),
            mesh=(2, 2),
            unsharded=ROUNDING[torch.float32],
        ),
    ]
)
def test_parameters_sharded_by_any_dimension_train_as_under_fsdp2(
    case: Case, world_size: int
) -> None:
    check(case, world_size)


def _come_back_whole() -> None:
    torch.manual_seed(0)
    module = Mixture()
    originals = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    sharded: Any = fully_shard(module, shard_placement_fn=last_dimension)
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), originals[name]), name
    state = sharded.state_dict()
    sharded.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    sharded.unshard()
    for name, parameter in sharded.named_parameters():
        assert torch.equal(parameter, originals[name]), name


def test_parameters_come_back_whole() -> None:
    run_ranks(_come_back_whole, 2)


def _refusals() -> None:
    def shard(placement: Any) -> None:
        fully_shard(nn.Linear(5, 4, bias=False), shard_placement_fn=lambda parameter: placement)

    shard(Shard(-2))
    uneven = r"Shard\(dim=1\) for .* 'weight', whose dimension 1 has size 5.* 2 ranks.*Shard\(0\)"
    convolution = nn.Conv1d(4, WIDTH, WIDTH)
    check_messages([
        (NotImplementedError, uneven, lambda: shard(Shard(1))),
        (ValueError, "Shard dim 2 is invalid for 2D", lambda: shard(Shard(2))),
        (ValueError, r"returned Replicate\(\) for parameter 'weight'", lambda: shard(Replicate())),
        # A message has no room for a parameter that it cannot cut.
        (ValueError, "'weight' with its 2304 bytes, .* dimension 2", lambda: fully_shard(
            convolution, shard_placement_fn=last_dimension, max_message_bytes=400)),
    ])  # fmt: skip


def _placements_on_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

    def shard(placement: Shard | None) -> None:
        info = _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
        result = _fsdp_common.ShardPlacementResult(placement, info)
        fully_shard(nn.Linear(2, 2), mesh=mesh, shard_placement_fn=lambda _: result)

    shard(Shard(0))
    shard(None)
    words = r"Shard\(dim=1\) for .* 'bias'. Shard dim 1 is invalid for 1D"
    check_message(ValueError, words, lambda: shard(Shard(1)))


@pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason="torch 2.11 has no such result"
)
def test_a_placement_may_come_with_a_mesh() -> None:
    run_ranks(_placements_on_a_mesh, 2)


def test_placements_that_cannot_be_are_refused() -> None:
    run_ranks(_refusals, 2)
