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


_groups: dict[dist.ProcessGroup, PrivateGroups] = {}


def private_groups(group: dist.ProcessGroup) -> PrivateGroups:
    """Return the two groups that belong to ``group``, made on first use by all of its ranks.

    Note [private groups]: collectives are issued by worker threads, so their order relative to
    collectives that the user issues is not the same on every rank, and neither is the order of
    gathers relative to reductions. Backends match collectives by their order on a group. Hence
    neither may share a group with the other, nor with the user.
    """
    alive = dist.distributed_c10d._world.pg_map
    for other in [known for known in _groups if known not in alive]:
        del _groups[other]  # destroyed since
    if group not in _groups:
        ranks = dist.get_process_group_ranks(group)
        timeout = _timeout_of(group)
        backend = dist.get_backend(group)
        gather, reduce = (
            dist.new_group(
                ranks,
                timeout=timeout,
                backend=backend,
                use_local_synchronization=True,
                group_desc=f"fsdp_ext_{purpose}",
            )
            for purpose in ("gather", "reduce")
        )
        _groups[group] = PrivateGroups(gather, reduce, timeout + _GRACE)
    return _groups[group]


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    try:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT
    return timeout if isinstance(timeout, timedelta) else _DEFAULT_TIMEOUT
