"""Comparisons of ranks when a root is made, so that a difference is an error instead of a hang."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from fsdp_ext import _C
from fsdp_ext._util.names import without_wrappers
from fsdp_ext.comm.lanes import exchange_messages, texts_if_different
from fsdp_ext.sharding.params.settings import RootSettings
from fsdp_ext.sharding.root.step_checks import AllGather, MeshRanks
from fsdp_ext.sharding.root.unit import Unit

_GROUPS = "the comparison of the ranks' groups"
_PARAMETERS = "the comparison of the ranks' parameters"


def compare_groups(
    lanes: _C.Lanes, units: Sequence[Unit], module_names: Sequence[Sequence[str]]
) -> None:
    """Check that ranks agree on meshes and smaller groups, which they are about to join."""
    mine = " ".join(f"{unit.settings.reshard_group}/{unit.ranks.size}" for unit in units)
    said = texts_if_different(lambda _, text: exchange_messages(lanes, text), _GROUPS, mine)
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


def compare_parameters(units: Sequence[Unit], ranks: MeshRanks, all_gather: AllGather) -> None:
    """Check that all ranks shard the same parameters, and reduce their gradients alike.

    Equal sizes are not enough: in a message, parameters of equal size could be swapped. A name that
    the other rank has nowhere says nothing, since a rank may wrap modules that it looks at.
    """
    mine = "\n".join(f"{name}\t{facts}" for unit in units for name, facts in _parameters_of(unit))
    said = texts_if_different(all_gather, _PARAMETERS, mine)
    if said is None:
        return
    for rank, text in enumerate(said):
        different = _first_difference(_lines_of(said[0]), _lines_of(text))
        if different is not None:
            here, there = map(" ".join, different)
            raise ValueError(
                f"ranks have different parameters: {ranks.named([0])} has {here} where "
                f"{ranks.named([rank])} has {there}. Make the model the same on every rank, for "
                "example from a sorted list instead of a set, and also its fully_shard calls, "
                "frozen parameters, mp_policy and divide factors."
            )


_Line = tuple[str, ...]  # a name, and facts


def _lines_of(text: str) -> list[_Line]:
    return [tuple(line.split("\t")) for line in text.split("\n")]


def _first_difference(here: list[_Line], there: list[_Line]) -> tuple[_Line, _Line] | None:
    """Return the first lines that differ in facts, or in a name that both ranks have."""
    common = {name for name, _ in here} & {name for name, _ in there}
    for one, other in zip_longest(here, there, fillvalue=("nothing", "more")):
        names = {one[0], other[0]}
        if one[1] != other[1] or (len(names) == 2 and names & common):
            return one, other
    return None


def _parameters_of(unit: Unit) -> Iterator[tuple[str, str]]:
    """Yield names with facts that have to be the same on all ranks: the unit, its parameters."""
    reduce_dtype = unit.grad_dtypes()[1]
    before, after = unit.gradient_scales(reduce_dtype)
    is_trained = any(param.is_trained for param in unit.params)
    scales = f"scaled by {before} before that and {after} after it"
    gradients = f"its gradients reduced in {reduce_dtype}, {scales}"
    name = without_wrappers(unit.name)
    yield f"unit '{name}'", f"({gradients if is_trained else 'frozen'})"
    for param in unit.entries:
        use = f"trained in {unit.grad_dtype(param)}" if param.is_trained else "frozen"
        yield (
            f"parameter '{without_wrappers(param.name)}'",
            f"({param.dtype}, shape {list(param.shape)}, Shard({param.shard_dim}), gathered in "
            f"{unit.compute_dtype(param)}, {use})",
        )


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
                    "prefetch and reshard_after_forward to fully_shard on all ranks."
                )
