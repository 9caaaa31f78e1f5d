"""Which ranks a wrapper shards over: FSDP1's ``process_group``, ``device_mesh``, or neither."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from fsdp_ext._util.warn import warn_caller
from fsdp_ext.comm.rendezvous import machine
from fsdp_ext.sharding.api.arguments import (
    MAKE_MESH,
    check_class,
    default_device_type,
    resolve_mesh,
)

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

Groups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None


def resolve_group(
    module: nn.Module,
    group: Groups,
    mesh: DeviceMesh | None,
    device: torch.device | None,
    strategy: ShardingStrategy,
) -> DeviceMesh:
    """Return the mesh of the groups or of the mesh argument.

    All ranks call this if there are two groups, and with a hybrid strategy if there are none.
    """
    is_whole = strategy is ShardingStrategy.NO_SHARD
    if is_whole and isinstance(mesh, DeviceMesh) and mesh.ndim == 2 and mesh.size(1) == 1:
        return resolve_mesh(mesh)  # of the wrapper around this one
    if group is not None and mesh is not None:
        raise ValueError("both process_group and device_mesh were passed. Pass one of them.")
    check_class("device_mesh", mesh, DeviceMesh, MAKE_MESH)
    groups = group if isinstance(group, (list, tuple)) else [group]
    if group is not None and not all(isinstance(one, dist.ProcessGroup) for one in groups):
        raise TypeError(
            f"process_group is {group!r}. Pass a process group or, for HYBRID_SHARD, a pair: the "
            "ranks that shard the model, and those that have the same shard."
        )
    devices = [device] if device is not None else [param.device for param in module.parameters()]
    if group is None and mesh is None:
        is_on_host = device is not None and device.type == "cpu"
        default = "cpu" if is_on_host else default_device_type(devices)
        if strategy in HYBRID:
            return resolve_mesh(_mesh_by_host(_kind_of(module, device, default)))
        if dist.is_initialized():
            mesh = init_device_mesh(default, (dist.get_world_size(),))
    dimensions = mesh.ndim if mesh is not None else len(groups)
    if dimensions != (2 if strategy in HYBRID else 1):
        raise ValueError(_wrong_dimensions(strategy, groups, mesh))
    if group is not None:
        default = "cuda" if "nccl" in dist.get_backend(groups[0]) else "cpu"
        kind = _kind_of(module, device, default)
        mesh = _mesh_of(cast(list[dist.ProcessGroup], groups), kind)
    mesh = resolve_mesh(mesh)
    return _replicas_alone(mesh) if is_whole and mesh.size() > 1 else mesh


def _wrong_dimensions(
    strategy: ShardingStrategy, groups: Sequence[object], mesh: DeviceMesh | None
) -> str:
    """Return the error for groups or a mesh with too few or too many dimensions."""
    if mesh is not None:
        given = f"a {mesh.ndim}-D mesh {tuple(mesh.shape)}"
    else:
        given = "one process group" if len(groups) == 1 else "a pair of process groups"
    if strategy not in HYBRID:
        return (
            f"{strategy} got {given}. Pass a 1-D mesh or one group, or use "
            "ShardingStrategy.HYBRID_SHARD."
        )
    if mesh is None:
        given += ". Expected process_group to be passed in as a pair"
    return (
        f"{strategy} got {given}. Pass a 2-D device_mesh, or a pair of process groups: the ranks "
        "that shard the model, and those that have the same shard. Or pass neither, to shard over "
        "the ranks of each host."
    )


def strategy_on(mesh: DeviceMesh, strategy: ShardingStrategy) -> ShardingStrategy:
    """Return the effective strategy on ``mesh``. A single rank has nothing to shard."""
    if mesh.size() > 1 or strategy is ShardingStrategy.NO_SHARD:
        return strategy
    warn_caller(
        f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1. "
        "Results are the same."
    )
    return ShardingStrategy.NO_SHARD


def _kind_of(module: nn.Module, device: torch.device | None, default: str) -> str:
    """Return the kind of devices to shard over."""
    kinds = {param.device.type for param in module.parameters()} - {"cpu", "meta"}
    return device.type if device is not None else next(iter(kinds), default)


def _replicas_alone(mesh: DeviceMesh) -> DeviceMesh:
    """Return a 2-D mesh of the ranks of ``mesh`` whose shard groups have one rank each."""
    return DeviceMesh.from_group(
        [mesh.get_group(), _group_of_this_rank()],
        mesh.device_type,
        mesh=[[rank] for rank in mesh.mesh.tolist()],
        mesh_dim_names=("replicate", "shard"),
    )


# For each default group, a group that has this rank alone.
_alone: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _group_of_this_rank() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    if world not in _alone:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        _alone[world] = cast(dist.ProcessGroup, alone)
    return _alone[world]


def _mesh_of(groups: Sequence[dist.ProcessGroup], kind: str) -> DeviceMesh:
    """Return the 1-D mesh of a shard group, or the 2-D mesh of a shard and a replicate group."""
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], kind)
    shards, replicas = groups
    of_groups: list[list[int]] = [[] for _ in range(replicas.size())]
    dist.all_gather_object(of_groups, dist.get_process_group_ranks(shards), group=replicas)
    number = dist.get_rank(shards)
    given = dist.get_process_group_ranks(replicas)
    is_uneven = len({len(ranks) for ranks in of_groups}) > 1
    if is_uneven or [ranks[number] for ranks in of_groups] != given:
        raise ValueError(
            f"process_group has the shard groups {of_groups} and a replicate group {given}, whose "
            "ranks do not have the same number in their shard groups. Pass the groups of one 2-D "
            "mesh."
        )
    return DeviceMesh.from_group(
        [replicas, shards], kind, mesh=of_groups, mesh_dim_names=("replicate", "shard")
    )


# For each default group and kind of device, the mesh of hybrid sharding by host. It is kept because
# all wrappers of a model need the same mesh.
_by_host: WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = WeakKeyDictionary()


def _mesh_by_host(kind: str) -> DeviceMesh:
    """Return a mesh that shards over the ranks of each host, and replicates between hosts.

    The first call for a kind of devices is collective: all ranks make the groups in it.
    """
    world = dist.group.WORLD
    if world is None:
        return resolve_mesh(None)  # raises
    meshes = _by_host.setdefault(world, {})
    if kind not in meshes:
        said: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
        DeviceMesh(kind, list(range(len(said))))  # selects the rank's device, before it sends
        dist.all_gather_object(said, (os.environ.get("LOCAL_WORLD_SIZE", ""), machine()))
        meshes[kind] = DeviceMesh(kind, _ranks_by_host(said), mesh_dim_names=("replicate", "shard"))
    return meshes[kind]


def _ranks_by_host(said: Sequence[tuple[str, str]]) -> list[list[int]]:
    """Return the ranks of each host.

    Launchers such as torchrun say how many consecutive ranks a host has. Without one, ranks of one
    machine share a host.

    Args:
        said: each rank's LOCAL_WORLD_SIZE and its machine, "" if unknown.
    """
    sizes = [size for size, _ in said]
    ranks = range(len(said))
    hosts: dict[object, list[int]] = {}
    if all(size.isdecimal() and int(size) > 0 for size in sizes):
        while (first := sum(map(len, hosts.values()))) < len(said):
            hosts[first] = list(ranks[first : first + int(sizes[first])])
    elif all(known for _, known in said):
        for rank in ranks:
            hosts.setdefault(said[rank][1], []).append(rank)
    else:
        raise ValueError(
            "hybrid sharding by host needs to know which ranks share a host, but LOCAL_WORLD_SIZE "
            "is not set on all ranks, and the system does not say which machine it is. Start with "
            "torchrun, or pass a 2-D device_mesh or a pair of process groups."
        )
    found = list(hosts.values())
    agree = all(len({sizes[rank] for rank in host}) == 1 for host in found)
    if len({len(host) for host in found}) > 1 or not agree:
        raise ValueError(
            f"hybrid sharding by host needs as many ranks on each host, but the hosts have the "
            f"ranks {found}, and LOCAL_WORLD_SIZE is {sizes} by rank. Start as many ranks on each "
            "host, or pass a 2-D device_mesh or a pair of process groups."
        )
    return found
