"""Results do not depend on how late a stream is, because events order all work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.models import Stack
from torch import Tensor, nn

from fsdp_ext import MixedPrecisionPolicy, fully_shard
from fsdp_ext.comm.lanes import lanes_of

STEPS = 4


# Cycles in a millisecond, of a clock at 2 GHz. A slower one makes streams later.
CYCLES = 2_000_000


def _spin(handle: int, milliseconds: float) -> None:
    """Keep a stream busy with a kernel of torch's, which is independent of the code under test."""
    with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
        torch.cuda._sleep(int(milliseconds * CYCLES))


def _train(delay: Callable[[nn.Module], None] | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = Stack().cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in model.units():
        fully_shard(unit, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        args, kwargs = model.batch(generator)
        if delay is not None and step == 1:
            root: Any = model
            root._fsdp_ext_unit.root.impl.set_poison_released_slots(True)
            for block in [*model.blocks, model]:
                block.register_forward_pre_hook(lambda module, args: delay(module))
                block.register_full_backward_pre_hook(lambda module, grads: delay(module))
        optimizer.zero_grad()
        # The host does not wait for the step before.
        moved = (a.pin_memory().cuda(non_blocking=True) for a in args)
        loss = model.loss(model(*moved, **kwargs))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    shards = [p._local_tensor.clone() for p in model.parameters()]  # type: ignore[attr-defined]
    return [*losses, *shards]


# One process delays all streams in turn, because it takes seconds to start.
def _same_when_late() -> None:
    expected = _train(None)
    for stream in ("gather", "reduce", "compute"):
        got = _train(partial(_delay, stream))
        for want, have in zip(expected, got, strict=True):
            assert have.equal(want), f"{stream} stream late: {(have - want).abs().max().item():g}"


def _delay(stream: str, module: nn.Module) -> None:
    handle = torch.cuda.current_stream().cuda_stream
    if stream != "compute":
        handle = lanes_of(_mesh_group(module), torch.device("cuda", 0)).stream_handle(stream)
    _spin(handle, 3.0)


def _mesh_group(module: Any) -> dist.ProcessGroup:
    group: dist.ProcessGroup = module._fsdp_ext_unit.ranks.shard_group
    return group


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_late_stream_changes_nothing(world_size: int) -> None:
    run_ranks(_same_when_late, world_size, timeout=100.0, device="cuda")
