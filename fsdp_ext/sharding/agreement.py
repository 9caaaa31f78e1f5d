"""Messages between ranks outside of a step, so that all ranks continue or all raise.

Note [one fails, all raise]. If one rank raises, the others wait in their next collective until a
timeout. So code that may fail on one rank alone runs in a phase of its own (:func:`together`), at
whose end all ranks report how it went. That does not help if the failure is inside a collective, or
between two collectives of which other ranks have begun the second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fsdp_ext.comm.simulated import Simulated
from fsdp_ext.sharding.unit import Unit

_TYPES = {error.__name__: error for error in (TypeError, ValueError)}


class OutOfMemory(RuntimeError):
    """Memory ran out on at least one rank; all ranks raise it."""


def has_peers(unit: Unit) -> bool:
    """Return whether the unit's mesh has other ranks; simulated ones do not count."""
    group = unit.mesh.get_group()
    is_real = (
        not isinstance(unit.settings.transport, Simulated) and dist.get_backend(group) != "fake"
    )
    return is_real and group.size() > 1


def exchange(unit: Unit, value: Any) -> list[Any]:
    """Return the values of all ranks of the unit's mesh, in order of rank.

    Args:
        unit: any of the model's.
        value: this rank's; it must pickle.
    """
    if not has_peers(unit):
        return [value]
    group = unit.mesh.get_group()
    brought: list[Any] = [None] * group.size()
    dist.all_gather_object(brought, value, group=group)
    return brought


@contextlib.contextmanager
def together(unit: Unit, caller: str, phase: str) -> Iterator[None]:
    """Raise on all ranks if the block raised on any: Note [one fails, all raise].

    If it raised the same error on all ranks, each rank raises that error.

    Args:
        unit: any of the model's.
        caller: the function that the message names.
        phase: what the block does, for the message.

    Raises:
        TypeError: if the first rank that failed raised one; likewise ValueError.
        OutOfMemory: if memory ran out on any rank.
        RuntimeError: if the first rank that failed raised anything else.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    try:
        told = None
        if error is not None:
            told = (_is_out_of_memory(error), type(error).__name__, str(error))
        said = exchange(unit, told)
        failed = [(*one, rank) for rank, one in enumerate(said) if one is not None]
        if not failed:
            return
        short = any(one[0] for one in failed)
        if error is not None and not short and all(one == told for one in said):
            raise error
        _, name, message, rank = next(one for one in failed if one[0] == short)
        raise (OutOfMemory if short else _TYPES.get(name, RuntimeError))(
            f"{caller} failed on rank {rank}, in {phase}: {name}: {message} Correct that, and call "
            f"{caller} on all ranks again."
        ) from error
    finally:
        # The traceback refers to this frame, a cycle that would keep the group until the end.
        error = None


def _is_out_of_memory(error: Exception) -> bool:
    # The host's allocator raises a plain RuntimeError (c10/core/impl/alloc_cpu.cpp).
    on_host = isinstance(error, RuntimeError) and "not enough memory" in str(error)
    return on_host or isinstance(error, (MemoryError, torch.OutOfMemoryError))
