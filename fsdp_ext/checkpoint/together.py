"""One fails, all raise: for work that ranks do without messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp_ext.comm.roll_call import called_by_all
from fsdp_ext.comm.transports import timeout_of


def rank_and_ranks() -> tuple[int, int]:
    """Return this rank's number and how many there are; without a process group, 0 and 1."""
    has_group = dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"
    return (dist.get_rank(), dist.get_world_size()) if has_group else (0, 1)


@contextlib.contextmanager
def called_together(caller: str) -> Iterator[None]:
    """Run the block once all ranks have made the call.

    Raises:
        RuntimeError: if a rank does not make it within the timeout; the message names the rank.
    """
    _, ranks = rank_and_ranks()
    groups = [dist.group.WORLD] if ranks > 1 and dist.group.WORLD is not None else []
    device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    longest = timeout_of(groups[0], device) if groups else timedelta()
    with called_by_all(groups, caller, longest):
        yield


@contextlib.contextmanager
def raised_together(caller: str) -> Iterator[None]:
    """Raise on all ranks if the block raised on any. All ranks enter it, and it sends nothing.

    A rank whose block raised raises that error.

    Args:
        caller: the public function, for the message on the other ranks.

    Raises:
        RuntimeError: if the block raised on another rank.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    _, ranks = rank_and_ranks()
    errors: list[Any] = [own and f"{type(own).__name__}: {own}"] * ranks
    if ranks > 1:
        dist.all_gather_object(errors, errors[0])
    if own is not None:
        raise own
    for rank, message in enumerate(errors):
        if message is not None:
            raise RuntimeError(f"{caller} failed on rank {rank}: {message}")
