"""Comparisons of ranks when a root is made, so that a difference is an error instead of a hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fsdp_ext import _C
from fsdp_ext.comm.lanes import texts_if_different
from fsdp_ext.sharding.params.settings import RootSettings
from fsdp_ext.sharding.root.unit import Unit


def compare_groups(
    lanes: _C.Lanes, units: Sequence[Unit], module_names: Sequence[Sequence[str]]
) -> None:
    """Check that ranks agree on meshes and smaller groups, which they are about to join."""
    mine = " ".join(f"{unit.settings.reshard_group}/{unit.ranks.size}" for unit in units)
    said = texts_if_different(lanes, mine)
    if said is None:
        return
    by_unit = zip(*(text.split() for text in said), strict=False)
    for names, of_ranks in zip(module_names, by_unit, strict=False):
        groups, meshes = zip(*(text.split("/") for text in of_ranks), strict=True)
        if len(set(groups)) > 1:
            values = " and ".join(
                _ranks_that_pass(size, groups) for size in sorted(set(groups), key=int)
            )
            raise ValueError(
                f"reshard_after_forward of unit '{names[0] or 'the root'}' is {values}. Pass the "
                "same to fully_shard on all ranks."
            )
        if len(set(meshes)) > 1:
            raise ValueError(
                f"the mesh of unit '{names[0] or 'the root'}' has {', '.join(meshes)} ranks, "
                "seen from one rank after the other. Pass one dimension of the same mesh to "
                "fully_shard on all ranks."
            )


def _ranks_that_pass(size: str, sizes: tuple[str, ...]) -> str:
    ranks = [str(rank) for rank, other in enumerate(sizes) if other == size]
    value = "True, False or None" if size == "0" else size
    return f"{value} on {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)}"


def compare_shard_groups(
    replicas: dist.ProcessGroup, transport: str, settings: RootSettings
) -> None:
    """Check that all shard groups cut the model into the same messages.

    Args:
        replicas: the ranks that have the same rows, one of each shard group.
        transport: the name of what this shard group's gathers travel by.
        settings: the root's.
    """
    mine = (transport, settings)
    of_groups: list[Any] = [None] * replicas.size()
    dist.all_gather_object(of_groups, mine, group=replicas)
    for number, theirs in enumerate(of_groups):
        for what, here, there in zip(("transports", "settings"), mine, theirs, strict=True):
            if here != there:
                own = dist.get_rank(replicas)
                raise ValueError(
                    f"the shard groups have different {what}: shard group {own} has {here} and "
                    f"shard group {number} has {there}. Pass the same transport, bucket_bytes, "
                    "prefetch and reshard_after_forward to fully_shard on all ranks, and no 'auto'."
                )
