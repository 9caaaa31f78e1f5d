"""Units cut into messages, parameters that extensions make, and packing on one multiprocessor train
on a GPU as others.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from meshes import test_reshard_groups
from meshes.test_hybrid_sharding import cut_into_messages
from schedule import test_prefetch_api
from support.extensions import HalfWeight
from support.gpu_cases import PACKED, losses_of, train_cases
from support.launcher import run_ranks
from support.models import Stack
from support.parity import Case, Run, train_step
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_ext
from fsdp_ext.comm.nccl_settings import PACK_MULTIPROCESSORS

STEPS = 4


def _prefetch_wrongly(run: Run) -> None:
    cut_into_messages(run)
    test_prefetch_api.prefetch_wrongly_forward(run)


def _hook(run: Run) -> None:
    cut_into_messages(run)
    for module in [*run.model.units(), run.model]:
        module.set_all_reduce_hook(functools.partial(Tensor.mul_, other=-0.5))


def _step(run: Run, step: int) -> tuple[Tensor, ...]:
    """Train as usual, and check that there are several messages."""
    values = train_step(run, step)
    if isinstance(run.model, fsdp_ext.FSDPModule):
        impl = run.model._fsdp_ext_unit.root.impl
        impl.set_poison_released_slots(True)
        assert any(bucket["gather_messages"] > 1 for bucket in impl.buckets())
    return values


def _changed_between_passes(run: Run, step: int) -> tuple[Tensor, ...]:
    """Change parameters after the forward. The backward uses the new ones.

    FSDP2's gathers do not wait for the change. Autograd without shards refuses it, so `.data` hides
    it.
    """
    run.optimizer.zero_grad()
    loss = run.loss(step)
    with torch.no_grad():
        for name, parameter in run.parameters.items():
            if name.startswith("blocks."):  # the root's are not gathered again
                (parameter if run.sharded else parameter.data).mul_(0.5)
    run.backward(loss)
    run.optimizer.step()
    return (loss,)


class SixBlocks(Stack):
    """More units than the ring of parameters has slots."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*self.blocks, *copy.deepcopy(self.blocks)])


def _unshard_in_forward(run: Run) -> None:
    """Unshard all blocks when the second one runs: more than there are slots."""
    cut_into_messages(run)
    if run.sharded:
        blocks = run.model.blocks
        blocks[1].register_forward_pre_hook(
            lambda *_: [block.unshard() for block in blocks] and None
        )


# Two ranks, unless the case has groups of ranks.
CASES = [
    Case("as it is", Stack, after_sharding=cut_into_messages, step=_step),
    Case("prefetch of the wrong units", Stack, after_sharding=_prefetch_wrongly, step=_step),
    Case("hooks", Stack, after_sharding=_hook, step=_step, unsharded=None),
    Case("units that are unsharded by hand", SixBlocks, after_sharding=_unshard_in_forward),
    Case("parameters that change between the passes", Stack, step=_changed_between_passes,
         fsdp2_fails="its gathers do not wait for the change"),
]  # fmt: skip
IN_GROUPS = [
    dataclasses.replace(test_reshard_groups.GROUPED, after_sharding=cut_into_messages, step=_step)
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("cases", "world_size"), [(CASES, 2), (IN_GROUPS, 4)], ids=["2", "4"])
def test_units_cut_into_messages_train_as_others(
    cases: list[Case], world_size: int, tmp_path: Path
) -> None:
    cases = [dataclasses.replace(case, steps=STEPS) for case in cases]
    train_cases(cases, world_size, PACKED, tmp_path, timeout=100.0)


def _with_extensions(shard: Callable[[nn.Module], object]) -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(4)]
    for layer in layers:
        layer.weight = nn.Parameter(HalfWeight(layer.weight.detach().cuda()))
    model: Any = nn.Sequential(*layers).cuda()
    for layer in model:
        shard(layer)
    shard(model)
    return model


def _train_extensions(shard: Callable[[nn.Module], object]) -> list[Tensor]:
    return losses_of(_with_extensions(shard), 16, STEPS)


def _compare_extensions() -> None:
    expected = _train_extensions(torch.distributed.fsdp.fully_shard)
    assert all(map(torch.equal, _train_extensions(fsdp_ext.fully_shard), expected))


@pytest.mark.timeout(90)
def test_parameters_that_extensions_make_train_as_under_fsdp2() -> None:
    run_ranks(_compare_extensions, 2, timeout=80.0, device="cuda")


def _train_on_lanes_of_their_own() -> list[Tensor]:
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(dist.new_group(), "cuda")
    model: Any = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
    for layer in [*model, model]:
        fsdp_ext.fully_shard(layer, mesh=mesh)
    return losses_of(model, 256, STEPS)


def _compare_packing() -> None:
    expected = _train_on_lanes_of_their_own()
    os.environ[PACK_MULTIPROCESSORS] = "1"
    assert all(map(torch.equal, _train_on_lanes_of_their_own(), expected))


@pytest.mark.timeout(90)
def test_packing_on_one_multiprocessor_trains_as_on_all() -> None:
    run_ranks(_compare_packing, 2, timeout=80.0, device="cuda")


def _losses_after_changed_inputs(is_abandoned: bool) -> list[Tensor]:
    """Change the last layer while the first one runs.

    Args:
        is_abandoned: whether a gather of the last layer may still read its old inputs then. It was
            prefetched into the slot that the second layer takes.
    """
    model = _with_extensions(functools.partial(fsdp_ext.fully_shard, bucket_bytes=0))
    first, second, *_, last = model
    if is_abandoned:
        first.set_modules_to_forward_prefetch([last])

    def change(*_: object) -> None:
        if is_abandoned:
            second.unshard(async_op=True)
        with torch.no_grad():
            last.weight.mul_(0.5)
        if is_abandoned:
            last.unshard(async_op=True)

    first.register_forward_pre_hook(change)
    return losses_of(model, 16, STEPS)


def _compare_changed_inputs() -> None:
    expected = _losses_after_changed_inputs(False)
    assert all(map(torch.equal, _losses_after_changed_inputs(True), expected))


@pytest.mark.timeout(90)
def test_inputs_of_extensions_are_not_overwritten_while_an_abandoned_gather_reads_them() -> None:
    run_ranks(_compare_changed_inputs, 2, timeout=80.0, device="cuda")
