"""Messages between ranks outside of a step, so that all ranks continue or all raise.

Note [one fails, all raise]
If one rank raises, the others wait in their next collective until a timeout. So code that may fail
on one rank alone runs in a block of :func:`together`. At the end of the block all ranks exchange
their errors. That does not help if a rank fails before or inside a collective of the block, because
the other ranks wait in that collective.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp_ext.comm.lanes import texts_if_different
from fsdp_ext.comm.roll_call import called_by_all
from fsdp_ext.comm.simulated import Simulated
from fsdp_ext.sharding.root.step_checks import AllGather
from fsdp_ext.sharding.root.unit import Unit

_TYPES = {error.__name__: error for error in (TypeError, ValueError)}


class OutOfMemory(torch.OutOfMemoryError):
    """Memory ran out on at least one rank; all ranks raise it."""


def has_peers(unit: Unit) -> bool:
    """Return whether the unit's mesh has other ranks; simulated ones do not count."""
    ranks = unit.ranks
    is_real = (
        not isinstance(unit.settings.transport, Simulated)
        and dist.get_backend(ranks.shard_group) != "fake"
    )
    return is_real and ranks.world_size > 1


def called_by_ranks_of(
    units: Iterable[Unit], caller: str, *, with_replicas: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Return a context that begins once all ranks of the units have made the same call.

    Args:
        units: the units; none if this rank sends nothing.
        caller: the public function, for messages.
        with_replicas: whether all ranks of the mesh take part.

    Raises:
        RuntimeError: if a rank does not call it; the message names the rank.
    """
    groups: dict[dist.ProcessGroup, torch.device] = {}
    for unit in units:
        if has_peers(unit):
            taking_part = unit.ranks.groups if with_replicas else [unit.ranks.shard_group]
            groups.update(dict.fromkeys(taking_part, unit.device))
    return called_by_all(groups, caller)


def exchange(
    unit: Unit, value: Any, groups: Sequence[dist.ProcessGroup] | None = None
) -> list[Any]:
    """Return the values of all ranks of the mesh of a unit, in the order of the mesh.

    They must be picklable. With ``groups`` of the mesh, only their ranks take part.
    """
    if not has_peers(unit):
        return [value]
    values = [value]
    for group in unit.ranks.groups if groups is None else groups:
        of_group: list[Any] = [None] * group.size()
        dist.all_gather_object(of_group, values, group=group)
        values = [one for of_rank in of_group for one in of_rank]
    return values


@contextlib.contextmanager
def together(
    unit: Unit, caller: str, task: str, all_gather: AllGather | None = None
) -> Iterator[None]:
    """Raise on all ranks if the block raised on any rank: Note [one fails, all raise].

    If the block raised the same error on all ranks, each rank raises that error. The process groups
    of the unit's mesh exchange the errors, unless ``all_gather`` does.

    Raises:
        OutOfMemory: if memory ran out on any rank.
        TypeError: if the failed rank of the lowest number raised one.
        ValueError: if the failed rank of the lowest number raised one.
        RuntimeError: if the failed rank of the lowest number raised anything else.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    try:
        own = None
        if error is not None:
            own = [_is_out_of_memory(error), type(error).__name__, str(error)]
        if all_gather is None:
            reports = exchange(unit, own)
        else:
            what = f"the comparison of errors in {task}"
            said = texts_if_different(all_gather, what, json.dumps(own))
            reports = [own] if said is None else [json.loads(text) for text in said]
        failed = [(*one, number) for number, one in enumerate(reports) if one is not None]
        if not failed:
            return
        out_of_memory = any(one[0] for one in failed)
        if error is not None and not out_of_memory and all(one == own for one in reports):
            raise error
        _, name, message, number = next(one for one in failed if one[0] == out_of_memory)
        rank = unit.ranks.global_ranks[number]
        raise (OutOfMemory if out_of_memory else _TYPES.get(name, RuntimeError))(
            f"{caller} failed on rank {rank}, in {task}: {name}: {message.removesuffix('.')}. "
            f"Correct that, and call {caller} on all ranks again."
        ) from error
    finally:
        # The error's traceback refers to this frame. Without this line the two would be a cycle,
        # which would keep the process group alive.
        error = None


def _is_out_of_memory(error: Exception) -> bool:
    # torch's allocator on the host raises a plain RuntimeError (c10/core/impl/alloc_cpu.cpp).
    on_host = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return on_host or isinstance(error, (MemoryError, torch.OutOfMemoryError))
