"""Units of one model over several meshes: Note [several meshes] in ``csrc/core/lanes.h``."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from fsdp_ext import _C
from fsdp_ext.comm.lanes import add_mesh_lanes
from fsdp_ext.comm.simulated import Simulated
from fsdp_ext.sharding.root.agreement import exchange, has_peers
from fsdp_ext.sharding.root.unit import Unit


def refuse_several_meshes(units: Sequence[Unit], caller: str) -> None:
    """Raise NotImplementedError, which names ``caller``, if units have several meshes."""
    count = len(_meshes_of(units))
    if count > 1:
        raise NotImplementedError(
            f"{caller} got a model whose units have {count} meshes, and it supports one. Pass the "
            f"same mesh to each fully_shard, or leave {caller} out."
        )


def check_meshes(units: Sequence[Unit], names: Sequence[str]) -> None:
    """Check that a model may have the meshes of its units, the root's first. Nothing is sent."""
    root = units[0]
    if len(_meshes_of(units)) == 1:
        return
    if isinstance(root.settings.transport, Simulated):
        raise NotImplementedError(
            "the units under one root have several meshes, and a Simulated transport supports one. "
            "Pass the same mesh to each fully_shard."
        )
    roots_ranks = _ranks_of(root)
    for unit, name in zip(units, names, strict=True):
        mesh = unit.ranks.mesh
        if _replicas_of(unit) != _replicas_of(root):
            raise NotImplementedError(
                f"the units under one root have several meshes, and that of '{name}' is "
                f"{mesh.ndim}-D, {tuple(mesh.shape)}. Pass 1-D meshes to each fully_shard, or 2-D "
                f"meshes with the root's replicas. Ranks {_replicas_of(root)} have the same shard "
                f"of the root, but ranks {_replicas_of(unit)} have the same shard of '{name}'."
            )
        if unit.device != root.device:
            raise NotImplementedError(
                f"unit '{name}' is on {unit.device}, and the root on {root.device}. Pass meshes of "
                "one kind of devices to each fully_shard."
            )
        outside = sorted(set(_ranks_of(unit)) - set(roots_ranks))
        if outside:
            raise NotImplementedError(
                f"unit '{name}' is sharded over ranks {_ranks_of(unit)}, and the root over ranks "
                f"{roots_ranks}, without {outside}. Pass a mesh to the root's fully_shard that has "
                "the ranks of all units."
            )
        if unit.settings.reshard_group > 0 and _ranks_of(unit) != roots_ranks:
            raise NotImplementedError(
                f"unit '{name}' has reshard_after_forward={unit.settings.reshard_group} and "
                "another mesh than the root. Pass True or False."
            )


def add_meshes(lanes: _C.Lanes, units: Sequence[Unit]) -> list[int]:
    """Give ``lanes``, the root's, communicators for the meshes of all units, the root's first.

    All ranks of the root call this, after :func:`check_meshes`.

    Returns:
        The number of each unit's mesh among those of ``lanes``; 0 for the root's.
    """
    root = units[0]
    if len(_meshes_of(units)) == 1:
        return [0] * len(units)
    of_units = [_ranks_of(unit) for unit in units]
    _compare(root, of_units)
    transport = root.settings.transport
    return [
        0
        if ranks == of_units[0]
        else add_mesh_lanes(
            lanes, root.ranks.shard_group, root.device, transport, unit.ranks.shard_group
        )
        for unit, ranks in zip(units, of_units, strict=True)
    ]


def _meshes_of(units: Sequence[Unit]) -> set[object]:
    """Return the different meshes of units. Meshes of the same ranks may have different names."""
    return {(unit.device, tuple(_ranks_of(unit)), tuple(_replicas_of(unit))) for unit in units}


def _ranks_of(unit: Unit) -> list[int]:
    ranks: list[int] = dist.get_process_group_ranks(unit.ranks.shard_group)
    return ranks


def _replicas_of(unit: Unit) -> list[int]:
    """Return the ranks that have the same shard of a unit as this one."""
    group = unit.ranks.replicate_group
    ranks: list[int] = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    return ranks


def _compare(root: Unit, of_units: list[list[int]]) -> None:
    """Check that all ranks of a unit's mesh have that mesh, and that the other meshes are as large.

    All ranks compare the same data, so all of them raise.
    """
    if not has_peers(root):
        return
    by_rank = dict(zip(root.ranks.global_ranks, exchange(root, of_units), strict=True))
    for number, like in enumerate(of_units):
        for rank, theirs in by_rank.items():
            mesh = theirs[number] if number < len(theirs) else []
            for other in mesh or [of_units[0][0]]:
                others = by_rank[other][number] if number < len(by_rank[other]) else []
                if others != mesh or len(mesh) != len(like):
                    raise ValueError(
                        f"ranks disagree on the mesh of unit {number} of the model: rank {rank} "
                        f"has ranks {mesh}, and rank {other} has {others}. Pass one dimension of "
                        "the same mesh to fully_shard on all ranks."
                    )
