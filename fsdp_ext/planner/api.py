"""``fsdp_ext.plan``: the memory of each rank and the time of a step, before training starts.

    import fsdp_ext

    with torch.device("meta"):
        model = GPT(config)
    print(fsdp_ext.plan(model, world_size=64, units=Block, batch=tokens, flops_per_second=400e12))

Sizes are exact, since the run computes layout, buckets and buffers with the same code
(csrc/core/memory/layout.h, merging.h, memory_plan.h). Times are simulated (schedule.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdp_ext._util.numbers import as_bool
from fsdp_ext.comm.costs import link_of_buckets
from fsdp_ext.comm.link import Link
from fsdp_ext.comm.transports import Transport
from fsdp_ext.planner import arguments
from fsdp_ext.planner.arguments import Target
from fsdp_ext.planner.flops import count_flops
from fsdp_ext.planner.fsdp2 import fsdp2_peak
from fsdp_ext.planner.result import Plan
from fsdp_ext.planner.sizes import (
    bucket_sizes,
    find_buckets,
    memory_of,
    optimizer_tensors,
    unit_sizes,
)
from fsdp_ext.planner.times import StepCosts, UnitSeconds, predict_plan
from fsdp_ext.planner.units import PlannedRoot, Units, units_of_plain, units_of_sharded
from fsdp_ext.sharding.api import arguments as of_sharding
from fsdp_ext.sharding.params.settings import UnitSettings
from fsdp_ext.sharding.root.module_state import sharded_module


@torch.inference_mode(False)  # counting flops needs a graph
@torch.enable_grad()
def plan(
    model: nn.Module,
    world_size: int | None = None,
    *,
    replicas: int | None = None,
    units: Units | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    bucket_bytes: int | None = None,
    max_message_bytes: int | tuple[int | None, int | None] | None = None,
    prefetch: int | None = None,
    keep_gather_inputs: bool | None = None,
    reshard_after_forward: bool | int | None = None,
    offload_policy: OffloadPolicy | None = None,
    transport: Transport = None,
    link: Link | str | None = None,
    replica_link: Link | str | None = None,
    device_type: str | None = None,
    optimizer_states: int = 2,
    optimizer_attached: bool | None = None,
    optimizer_fused: bool = False,
    batch: Any = None,
    flops_per_second: float | None = None,
    compute: Mapping[str, Sequence[float]] | None = None,
    contention: float = 0.0,
    copies: tuple[float, float] = (0.0, 0.0),
    memory_limit: int | None = None,
) -> Plan:
    """Return how much memory each rank of a training needs, and how long a step takes.

    Nothing is allocated and ``model`` stays as it is: ``plan`` works on a copy without memory. No
    process group is needed. Buckets follow the order in which modules are registered. The run uses
    the same buckets and buffers in its first iteration, and later if forward runs modules in that
    order.

    The memory includes all allocations of fsdp_ext and the optimizer, without activations, the CUDA
    context, and what NCCL allocates for its communicators. Of the temporaries of the optimizer's
    step, only AdamW's are known (``optimizer_fused``).

    Times are simulated by :func:`fsdp_ext.planner.schedule.predict`. They include compute,
    collectives, the updates of an attached optimizer and, with ``copies``, casts and copies. They
    do not include a step after backward. A unit that encloses other units is taken to compute
    before them, except for the root.

    Args:
        model: a model that ``fully_shard`` was applied to or that ``FullyShardedDataParallel``
            wraps, which has its units and settings; or a plain model, with ``units``. It may be on
            the meta device.
        world_size: number of all ranks; by default the model's mesh or a simulated transport has
            it.
        replicas: how many ranks have the same shard, for hybrid sharding. ``world_size / replicas``
            ranks then shard the model together. By default as many as the model's mesh has, or 1.
        units: for a plain model, the modules that become units besides the model itself: classes,
            modules, or a function that takes a module and returns whether it becomes a unit.
        mp_policy: for a plain model, as for :func:`fsdp_ext.fully_shard`.
        bucket_bytes: as for ``fully_shard``; it replaces the setting of a sharded model's root.
        max_message_bytes: as for ``fully_shard``; it replaces the root's setting.
        prefetch: as for ``fully_shard``; it replaces the root's setting. Calls of
            ``set_modules_to_forward_prefetch`` and ``set_modules_to_backward_prefetch`` may ask for
            more.
        keep_gather_inputs: as for ``fully_shard``; it replaces the root's setting.
        reshard_after_forward: for a plain model, the setting of each unit, as for ``fully_shard``.
        offload_policy: for a plain model, as for ``fully_shard``.
        transport: as for ``fully_shard``. It decides how gathers are laid out, and the default of
            ``bucket_bytes``.
        link: the link that times are simulated for: a Link, or the name of one of
            ``comm.link.PRESETS``; by default a typical link of the transport. With replicas, it
            connects the ranks that shard the model.
        replica_link: the link between replicas, over which gradients are all-reduced. By default
            ``across`` of ``link``, or ``link`` itself if its figures hold for all ranks.
        device_type: "cuda" or "cpu"; by default the mesh's, or "cuda".
        optimizer_states: how many tensors of its size and dtype the optimizer keeps for each
            trainable parameter: 2 for AdamW, 1 for SGD with momentum.
        optimizer_attached: True or False: whether an attached optimizer of ``fsdp_ext.optim`` steps
            all parameters in backward. None: as the units of a sharded model are set; a plain model
            has none. NCCL's registered gradients, which stay allocated, are not counted.
        optimizer_fused: whether the optimizer's step is fused: with ``fused=True``, or with one of
            ``fsdp_ext.optim``. Otherwise 2 or more states on GPUs stand for PyTorch's default AdamW
            (``foreach``), whose step allocates one more tensor of each trainable parameter's size.
        batch: what one rank calls the model with: a tensor, a tuple of arguments, or a mapping of
            keywords. It is used to count floating-point operations
            (:func:`fsdp_ext.planner.flops.count_flops`); only shapes and dtypes matter, so tensors
            may be on the meta device.
        flops_per_second: how fast a rank computes; needs ``batch``.
        compute: measured seconds by name of the unit, instead of ``flops_per_second``: forward,
            backward and, if an attached optimizer updates the unit, its update. The root's name is
            "the root".
        contention: see :func:`fsdp_ext.planner.schedule.predict`.
        copies: seconds per byte of casts and unpacking around gathers, and of packing around
            reductions. With an ``offload_policy`` copies from and to the host are among them.
        memory_limit: bytes that a rank has.

    Raises:
        TypeError: if an argument has the wrong type.
        NotImplementedError: if times are asked for and a unit is resharded to a smaller group, if
            units have several meshes, if a parameter has ``fsdp_pre_all_gather``, if a plain
            model has a DTensor, if a batch is passed and tensor parallelism has split a parameter,
            or if the ranks cannot share a parameter's dimension equally.
        ValueError: if an argument or a parameter does not fit, or if the plan exceeds
            ``memory_limit``; that message has the table.
    """
    if isinstance(model, nn.Module):
        model = sharded_module(model)
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    of_sharding.check_policy(policy)
    arguments.check_memory_arguments("plan", memory_limit, optimizer_states)
    arguments.check_time_arguments(flops_per_second, batch, compute, contention, copies)
    unit = arguments.check_model_and_settings(
        model,
        units=units,
        mp_policy=mp_policy,
        reshard_after_forward=reshard_after_forward,
        offload_policy=offload_policy,
    )
    target = arguments.resolve_target((world_size, replicas), transport, device_type, unit)
    ranks = target.ranks
    if unit is None:
        reshard = of_sharding.reshard_over(reshard_after_forward, ranks.shards)
        offloads = of_sharding.resolve_offload(offload_policy, target.device_type)
        settings = UnitSettings(policy, reshard, offloads=offloads)
        copied = units_of_plain(model, units, ranks, settings)
    else:
        copied = units_of_sharded(model, ranks)
    of_sharding.check_numbers(bucket_bytes, max_message_bytes, prefetch)
    overrides = {
        "bucket_bytes": bucket_bytes,
        "prefetch": prefetch,
        "max_message_bytes": max_message_bytes,
        "keep_gather_inputs": of_sharding.resolve_keep_gather_inputs("plan", keep_gather_inputs),
    }
    typical = link_of_buckets(target.transports, target.asked, ranks.shards, ranks.replicas)
    given = {name: value for name, value in overrides.items() if value is not None}
    decision = unit.root.decision if unit is not None and unit.root is not None else None
    root = PlannedRoot(copied, typical, decision, **given)
    arguments.check_groups(root.units)
    arguments.set_attached(root.units, optimizer_attached)
    arguments.check_batch(root.units, batch)
    flops = None if batch is None else count_flops(copied, batch, root.module_names())
    seconds = _seconds_of_units(root, flops, flops_per_second, compute)
    links = arguments.resolve_links(link, replica_link, typical, target)
    costs = None
    if seconds is not None:
        on_lane = target.device_type == "cuda"
        costs = StepCosts(seconds, links[0], contention, copies, links[1], on_lane)
    is_fused = as_bool("plan", "optimizer_fused", optimizer_fused)
    tensors = optimizer_tensors(optimizer_states, target.device_type, is_fused=is_fused)
    result = _result(root, target, links, flops, costs, tensors)
    _check_limit(result, memory_limit)
    return result


def _seconds_of_units(
    root: PlannedRoot,
    flops: list[tuple[int, int]] | None,
    flops_per_second: float | None,
    compute: Mapping[str, Sequence[float]] | None,
) -> list[UnitSeconds] | None:
    """Return the seconds of each unit; None if no times are asked for."""
    if flops is not None and flops_per_second is not None:
        seconds = [UnitSeconds(f / flops_per_second, b / flops_per_second) for f, b in flops]
    elif compute is not None:
        seconds = arguments.seconds_of_units(compute, [unit.name for unit in root.units])
    else:
        return None
    arguments.check_times(root.units, seconds)
    return seconds


def _result(
    root: PlannedRoot,
    target: Target,
    links: tuple[Link, Link | None],
    flops: list[tuple[int, int]] | None,
    costs: StepCosts | None,
    tensors: tuple[int, int],
) -> Plan:
    found = find_buckets(root, target.transports, target.device_type)
    within, between = links
    memory = memory_of(root, found, tensors, target.device_type)
    return Plan(
        model=type(root.module).__name__,
        world_size=target.ranks.shards * target.ranks.replicas,
        device_type=target.device_type,
        transport=target.transports[0],
        link=within,
        bucket_bytes=root.settings.bucket_bytes[0],
        units=unit_sizes(root, found, flops),
        buckets=bucket_sizes(root, found),
        memory=replace(memory, fsdp2_peak=fsdp2_peak(root, tensors)),
        prediction=None if costs is None else predict_plan(root, found, costs),
        replicas=target.ranks.replicas,
        replica_link=between,
    )


def _check_limit(result: Plan, memory_limit: int | None) -> None:
    if memory_limit is not None and result.memory.peak > memory_limit:
        raise ValueError(
            f"{result.model} needs {result.memory.peak:,} bytes on each rank, without activations, "
            f"but memory_limit is {memory_limit:,}. Use more ranks, smaller units or smaller "
            f"dtypes.\n{result}"
        )
