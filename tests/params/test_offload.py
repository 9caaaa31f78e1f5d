"""Shards and gradients on the host, while everything else is on the device, train as otherwise.

There is no GPU here, so both are the host's memory. What is done is what is done on a GPU: gathers
send a copy of the shards, reductions end with a copy into the gradients, and the host waits for
both. ``tests/cpp/cuda/cuda_offload_test.cpp`` has the same with streams that run beside the host.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from support.models import Stack, Transformer
from support.parity import ROUNDING, Case, Run, adamw, check, each, train_step
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard

from fsdp_ext.sharding.api import entry
from fsdp_ext.sharding.api.arguments import resolve_offload
from fsdp_ext.sharding.params.dtensors import Spread

FOUR = (2, 4)


def begin_offloading(run: Run) -> None:
    """Treat the ranks' CPUs as GPUs."""
    vars(entry)["resolve_offload"] = lambda policy, _: isinstance(policy, CPUOffloadPolicy)


def end_offloading(run: Run) -> None:
    vars(entry)["resolve_offload"] = resolve_offload
    if run.under_test:
        assert all(unit._fsdp_ext_unit.settings.offloads for unit in [*run.units, run.model])


def accumulate(run: Run, step: int) -> tuple[Tensor, ...]:
    run.optimizer.zero_grad()
    losses = []
    for micro_batch in range(3):
        losses.append(run.loss(step, micro_batch))
        run.backward(losses[-1], sync=micro_batch != 0)
    run.optimizer.step()
    return tuple(losses)


def evaluate_and_hold_gradients(run: Run, step: int) -> tuple[Tensor, ...]:
    run.model.eval()
    with torch.no_grad():
        evaluated = run.loss(step, micro_batch=1)
    run.model.train()
    trained = train_step(run, step)
    run.held = [parameter.grad for parameter in run.parameters.values()]
    return evaluated, *trained


def offloaded(fact: str, subject: Any = Stack, **fields: Any) -> Case:
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False), **fields.pop("options", {})}
    return Case(
        fact,
        subject,
        options=options,
        before_sharding=begin_offloading,
        after_sharding=end_offloading,
        **fields,
    )


def by_columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 and param.shape[1] % 4 == 0 else None


CASES = [
    offloaded("AdamW on a transformer", Transformer, optimizer=adamw),
    offloaded("gradients accumulated", step=accumulate),
    offloaded("evaluations, and gradients that users keep", step=evaluate_and_hold_gradients),
    offloaded("bf16 computation", precision={"param_dtype": torch.bfloat16,
                                             "reduce_dtype": torch.float32}),
    offloaded("messages of a few rows", options={"max_message_bytes": 4096},
              fsdp2_fails="it has no such argument"),
    offloaded("buckets of all units", options={"bucket_bytes": 1 << 20},
              fsdp2_fails="it has no such argument"),
    offloaded("columns shared", options={"shard_placement_fn": by_columns}),
    offloaded("kept gathered after forward", options={"reshard_after_forward": False}),
    offloaded("hybrid sharding", mesh=(2, 2), worlds=(4,), unsharded=ROUNDING[torch.float32]),
]  # fmt: skip


@each(CASES, every=2)
def test_offloaded_units_train_as_unsharded_and_as_fsdp2(case: Case, world_size: int) -> None:
    check(case, world_size)


def _on_a_mesh_of_gpus() -> None:
    mesh = DeviceMesh("cuda", [0], _init_backend=False)
    local = torch.ones(2, 3)
    dtensor = Spread(mesh, (Shard(0),), torch.Size([2, 3])).dtensor(local)
    assert dtensor._local_tensor.data_ptr() == local.data_ptr()
    assert dtensor.shape == (2, 3)
    assert dtensor.placements == (Shard(0),)


def test_dtensors_of_a_mesh_of_gpus_may_lie_on_the_host() -> None:
    run_ranks(_on_a_mesh_of_gpus, 1)


def test_pageable_memory_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"pin_memory=False.*Pass CPUOffloadPolicy\(\)"):
        resolve_offload(CPUOffloadPolicy(pin_memory=False), "cuda")
