"""Checks of the arguments of ``plan``, and the defaults that follow from the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from fsdp_ext._util.numbers import as_bool, check_ranks, is_at_least, is_real
from fsdp_ext.comm.costs import typical_replica_link
from fsdp_ext.comm.link import PRESETS, Link
from fsdp_ext.comm.simulated import Simulated
from fsdp_ext.comm.transports import (
    Transport,
    may_share_memory,
    resolve_transport,
    why_no_shared_memory,
)
from fsdp_ext.planner.schedule import check_contention
from fsdp_ext.planner.times import UnitSeconds
from fsdp_ext.planner.units import PlannedRanks, PlannedUnit
from fsdp_ext.sharding.params.param_group import ParamGroup
from fsdp_ext.sharding.root.meshes import refuse_several_meshes
from fsdp_ext.sharding.root.module_state import units_below
from fsdp_ext.sharding.root.unit import Unit

_MOST_STATES = 1000  # more tensors for each parameter than any optimizer keeps


@dataclass(frozen=True)
class Target:
    """The ranks that a training would run on."""

    ranks: PlannedRanks  # how many shard the model, and how many replicas each has
    device_type: str  # "cuda" or "cpu"
    # Names of the transport that the run would use, and of the one between replicas.
    transports: tuple[str, str]
    asked: Transport  # the transport that was asked for; None for the default


def check_memory_arguments(caller: str, memory_limit: object, optimizer_states: object) -> None:
    """Check the arguments that ``plan`` and ``tune`` share."""
    if memory_limit is not None and not is_at_least(memory_limit, 1):
        raise ValueError(
            f"{caller} got memory_limit={memory_limit!r}. Pass a positive whole number of bytes, "
            "such as 60 * 2**30, or None."
        )
    if not is_at_least(optimizer_states, 0, _MOST_STATES):
        raise ValueError(
            f"{caller} got optimizer_states={optimizer_states!r}. Pass the number of tensors that "
            "the optimizer keeps per parameter, such as 2 for AdamW."
        )


def check_time_arguments(
    flops_per_second: float | None, batch: Any, compute: object, contention: object, copies: object
) -> None:
    """Check the arguments that predict times."""
    check_contention("plan", contention)
    if not _are_seconds(copies, 2):
        raise ValueError(
            f"plan got copies={copies!r}. Pass two numbers of seconds per byte, 0 or more: those "
            "around gathers and around reductions."
        )
    if compute is not None:
        _check_compute(compute)
    if flops_per_second is None:
        return
    if compute is not None:
        raise ValueError(
            "plan got both flops_per_second and compute. Pass only compute if you have measured "
            "the seconds of each unit."
        )
    if batch is None:
        raise ValueError(
            "plan got flops_per_second without a batch. Pass batch=, the arguments that one rank "
            "calls the model with, to count floating-point operations."
        )
    if not is_real(flops_per_second) or flops_per_second <= 0:
        raise ValueError(
            f"plan got flops_per_second={flops_per_second!r}. Pass a positive rate; about half of "
            "a GPU's peak is usual."
        )


def _check_compute(compute: object) -> None:
    if not isinstance(compute, Mapping):
        raise TypeError(
            f"plan got compute={compute!r}. Pass a mapping from names of units to their seconds of "
            "forward, of backward and, with an attached optimizer, of its update."
        )
    for name, seconds in compute.items():
        if not isinstance(name, str):
            raise TypeError(
                f"plan got compute with seconds of {name!r}. Pass names of units, as the plan's "
                "table shows them."
            )
        if not _are_seconds(seconds, 2) and not _are_seconds(seconds, 3):
            raise ValueError(
                f"plan got compute with {seconds!r} for {name!r}. Pass the seconds of forward, of "
                "backward and, with an attached optimizer, of its update: numbers of 0 or more."
            )


def _are_seconds(value: object, count: int) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) == count
        and all(is_real(seconds) and seconds >= 0 for seconds in value)
    )


def check_model_and_settings(model: object, **settings: object) -> Unit | None:
    """Return the first unit of a sharded model; None for a plain model.

    ``settings`` are arguments of ``plan`` that are for plain models only.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"plan got {model!r}. Pass the model, a torch.nn.Module.")
    found = units_below(model)
    if not found:
        return None
    unit = found[0]
    refuse_several_meshes(found, "plan")
    given = [name for name, value in settings.items() if value is not None]
    if given:
        raise ValueError(
            f"plan got {' and '.join(given)} for a model that fully_shard was applied to. Leave "
            "them out; the model's units have their own."
        )
    return unit


def resolve_target(
    asked_ranks: tuple[int | None, int | None],
    transport: Transport,
    device_type: str | None,
    unit: Unit | None,
) -> Target:
    """Return the ranks, devices and transport that were asked for or that the model has.

    ``asked_ranks`` are the number of ranks and the number of replicas. ``unit`` is the first one of
    a sharded model.
    """
    if device_type is None:
        device_type = "cuda" if unit is None else unit.ranks.mesh.device_type
    if transport is None and unit is not None:
        transport = unit.settings.transport
    ranks = _resolve_ranks(*asked_ranks, unit, transport)
    if device_type not in ("cuda", "cpu"):
        raise ValueError(f'plan got device_type={device_type!r}. Pass "cuda" or "cpu".')
    asked = resolve_transport(transport, device_type)
    within = between = _name_of_transport(asked, device_type, None)
    if unit is not None:
        within = _name_of_transport(asked, device_type, unit.ranks.shard_group)
        between = _name_of_transport(asked, device_type, unit.ranks.replicate_group)
    return Target(ranks, device_type, (within, between), asked)


def _resolve_ranks(
    world_size: int | None, replicas: int | None, unit: Unit | None, transport: Transport
) -> PlannedRanks:
    """Return the ranks that were asked for, or else those of the model or of the transport."""
    simulated = transport if unit is None and isinstance(transport, Simulated) else None
    if unit is not None:
        usual: tuple[int | None, int] = unit.world_size * unit.replicas, unit.replicas
    else:
        usual = (None, 1) if simulated is None else (simulated.world_size, simulated.replicas)
    ranks = usual[0] if world_size is None else world_size
    replicas = usual[1] if replicas is None else replicas
    if ranks is None:
        raise ValueError(
            "plan needs world_size, since this model has no mesh. Pass the number of ranks."
        )
    check_ranks("plan", ranks, replicas)
    if simulated is not None and (ranks, replicas) != usual:
        raise ValueError(
            f"plan was asked for {ranks} ranks and {replicas} replicas, but its simulated "
            f"transport has {usual[0]} and {usual[1]}. Leave out world_size and replicas."
        )
    return PlannedRanks(ranks // replicas, replicas)


def _name_of_transport(asked: Transport, device_type: str, group: dist.ProcessGroup | None) -> str:
    """Return the name of the transport that the run would choose for the group, if it is known."""
    if isinstance(asked, Simulated):
        return "simulated"
    if asked is not None:
        return asked
    if device_type == "cuda":
        return "nccl"
    shares = group is None or may_share_memory(group, None)
    return "shared_memory" if shares and not why_no_shared_memory() else "process_group"


def check_groups(units: Sequence[ParamGroup]) -> None:
    """Check that the planned number of ranks consists of the groups that units are resharded to."""
    for unit in units:
        group = unit.settings.reshard_group
        if group > 0 and (unit.world_size % group != 0 or unit.world_size == group):
            raise ValueError(
                f"plan got {unit.world_size} ranks that share the model, but unit '{unit.name}' "
                f"has reshard_after_forward={group}. Pass a larger multiple of {group}."
            )


def set_attached(units: Sequence[PlannedUnit], asked: bool | None) -> None:
    """Set whether an attached optimizer steps the units. None leaves each unit as it is."""
    if asked is None:
        return
    asked = as_bool("plan", "optimizer_attached", asked)
    for unit in units:
        if asked and (unit.settings.offloads or unit.settings.is_flat):
            is_flat = not unit.settings.offloads
            what = "has a flat parameter" if is_flat else "has its shards on the host"
            raise ValueError(
                f"plan got optimizer_attached=True, but unit '{unit.name}' {what} and cannot be "
                "stepped in backward. Leave it out."
            )
        unit.is_attached = unit.frees_gradients = asked


def check_batch(units: Sequence[PlannedUnit], batch: Any) -> None:
    """Raise NotImplementedError if a batch is to be counted with a part of each parameter."""
    split = [param.name for unit in units for param in unit.params if param.is_split]
    if batch is not None and split:
        raise NotImplementedError(
            f"plan cannot count flops under tensor parallelism yet, which has split '{split[0]}'. "
            "Leave out batch, or pass compute instead."
        )


def check_times(units: Sequence[PlannedUnit], seconds: Sequence[UnitSeconds]) -> None:
    """Check that times can be predicted."""
    for unit, of_unit in zip(units, seconds, strict=True):
        group = unit.settings.reshard_group
        if group > 0:
            raise NotImplementedError(
                f"plan cannot predict times with reshard_after_forward={group} yet, which unit "
                f"'{unit.name}' has. Leave out flops_per_second and compute to plan its memory."
            )
        is_updated = unit.is_attached and any(param.is_trained for param in unit.params)
        if is_updated and of_unit.update is None:
            raise ValueError(
                f"plan cannot predict times without the seconds that the attached optimizer takes "
                f"for unit '{unit.name}'. Pass `compute` with three numbers a unit; the third is "
                "the optimizer's seconds. The command has no option for it: leave out "
                "--flops-per-second to plan only the memory."
            )
        if not is_updated and of_unit.update is not None:
            raise ValueError(
                f"plan got three numbers for '{unit.name}' in compute, but no attached optimizer "
                "updates this unit. Pass the seconds of forward and backward."
            )


def resolve_links(
    link: Link | str | None, replica_link: Link | str | None, typical: Link, target: Target
) -> tuple[Link, Link | None]:
    """Return the link between ranks that shard the model, and the link between replicas.

    The second one is None without replicas. Arguments come before typical links.
    """
    within, between = _link(link, "link"), _link(replica_link, "replica_link")
    shards, replicas = target.ranks.shards, target.ranks.replicas
    if replicas == 1:
        if between is not None:
            raise ValueError(
                "plan got replica_link for a model without replicas. Pass replicas=, too, or leave "
                "it out."
            )
        return (within or typical).over(shards), None
    if between is not None:
        between = between.over(replicas)
    elif within is not None:
        between = within.between_replicas(shards, replicas)
    else:
        between = typical_replica_link(target.transports[1], target.asked, shards, replicas)
    return (within or typical).over(shards), between


def _link(asked: Link | str | None, name: str) -> Link | None:
    if isinstance(asked, str) and asked in PRESETS:
        return PRESETS[asked]
    if asked is not None and not isinstance(asked, Link):
        raise ValueError(
            f"plan got {name}={asked!r}. Pass a Link or one of {', '.join(PRESETS)}; Link.load "
            "reads a measured one."
        )
    return asked


def seconds_of_units(
    compute: Mapping[str, Sequence[float]], names: Sequence[str]
) -> list[UnitSeconds]:
    """Return the seconds of each unit; the default of the root's forward and backward is 0."""
    unknown = sorted(set(compute) - set(names))
    missing = [name for name in names[1:] if name not in compute]
    if unknown:
        raise ValueError(
            f"compute has seconds of {', '.join(unknown)}, but the units are {', '.join(names)}."
        )
    if missing:
        raise ValueError(
            f"compute has no seconds of {', '.join(missing)}. Pass those of each unit below the "
            f"root; the units are {', '.join(names)}."
        )
    return [UnitSeconds(*compute.get(name, (0.0, 0.0))) for name in names]
