"""What the collectives of all units over one set of ranks run on."""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_ext import _C

_DEFAULT_TIMEOUT = timedelta(minutes=30)
# How much longer the schedule waits than the backend, whose own error says more.
_GRACE = timedelta(seconds=10)

_lanes: weakref.WeakKeyDictionary[dist.ProcessGroup, _C.Lanes] = weakref.WeakKeyDictionary()


def lanes_of(group: dist.ProcessGroup) -> _C.Lanes:
    """Return the lanes for the ranks of ``group``, all of which have to call this the first time.

    Note [private groups]: collectives are issued by worker threads, so their order relative to
    collectives that the user issues is not the same on every rank, and neither is the order of
    gathers relative to reductions. Backends match collectives by their order on a group. Hence
    each lane (``csrc/core/lanes.h``) has a group of its own over the same ranks. They live as long
    as ``group`` and serve every root over it.
    """
    if group not in _lanes:
        timeout = _timeout_of(group)
        gather, reduce = (
            dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=timeout,
                backend=dist.get_backend(group),
                use_local_synchronization=True,
                group_desc=f"fsdp_ext_{lane}",
            )
            for lane in ("gather", "reduce")
        )
        _lanes[group] = _C.Lanes(gather, reduce, (timeout + _GRACE).total_seconds())
    return _lanes[group]


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    try:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT
    return timeout if isinstance(timeout, timedelta) else _DEFAULT_TIMEOUT
