"""The process groups that a root's collectives run on."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

_DEFAULT_TIMEOUT = timedelta(minutes=30)
# How much longer the schedule waits than the backend, whose own error says more.
_GRACE = timedelta(seconds=10)


class PrivateGroups(NamedTuple):
    """Two groups over the same ranks, one for gathers and one for reductions."""

    gather: dist.ProcessGroup
    reduce: dist.ProcessGroup
    timeout: timedelta


def make_private_groups(group: dist.ProcessGroup) -> PrivateGroups:
    """Make two groups over the ranks of ``group``, all of which have to call this.

    Note [private groups]: collectives are issued by worker threads, so their order relative to
    collectives that the user issues is not the same on every rank, and neither is the order of
    gathers relative to reductions, or of one root's relative to another's. Backends match
    collectives by their order on a group. Hence each root has two groups of its own.
    """
    timeout = _timeout_of(group)
    gather, reduce = (
        dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timeout,
            backend=dist.get_backend(group),
            use_local_synchronization=True,
            group_desc=f"fsdp_ext_{purpose}",
        )
        for purpose in ("gather", "reduce")
    )
    return PrivateGroups(gather, reduce, timeout + _GRACE)


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    try:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT
    return timeout if isinstance(timeout, timedelta) else _DEFAULT_TIMEOUT
