"""Times of a bucket's collectives with each ``cta_policy`` that NCCL can use here."""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fsdp_ext import _C
from fsdp_ext._util.tables import size
from fsdp_ext.comm.lanes import nccl_lanes
from fsdp_ext.comm.measure_link import DTYPE, OPERATIONS, buffers_of, mean_seconds
from fsdp_ext.comm.nccl_settings import OF_ALL, OF_LANES, POLICIES, describe_lane, nccl_settings
from fsdp_ext.sharding.root.agreement import exchange, has_peers, together
from fsdp_ext.sharding.root.root import Root

_logger = logging.getLogger("fsdp_ext")
_IN_USE = "default"  # the policy of lanes whose environment variable names none
_WARMUP = 2
# Policies that the gather lane and the reduce lane have together. Copy engines cannot add.
_TRIED = ((_IN_USE, _IN_USE), ("efficiency", "efficiency"), ("zero", _IN_USE))


@dataclass(frozen=True)
class LanePolicies:
    """The times of one collective on a lane, without compute beside it.

    Args:
        variable: the environment variable with the lane's settings.
        others: the lane's other settings.
        nbytes: the unsharded size of the collective.
        seconds: for each policy, the median on the slowest rank.
    """

    variable: str
    others: dict[str, int]
    nbytes: int
    seconds: dict[str, float]

    def __str__(self) -> str:
        """Return the times, and how to set the fastest policy."""
        ranked = sorted(self.seconds, key=self.seconds.__getitem__)
        times = ", ".join(f"{policy} {self.seconds[policy] * 1e3:.2f} ms" for policy in ranked)
        settings = describe_lane(self.others | {"cta_policy": POLICIES[ranked[0]]})
        current = "the policy in use is the fastest"
        advice = f"set {self.variable}={settings} in the environment of the next run to use it"
        return (
            f"{size(self.nbytes)} on the lane of {self.variable}, alone: {times}; "
            f"{current if ranked[0] == _IN_USE else advice}"
        )


def measure_policies(root: Root, buckets: int, repeats: int) -> tuple[LanePolicies, ...]:
    """Time a gather and a reduction of a bucket's mean size, on lanes made for each policy.

    All ranks call this together. The result leaves out policies that cannot be used or have no
    memory, and lanes whose environment variable has a policy. It is empty if NCCL_CTA_POLICY is
    set.
    """
    first = root.units[0]
    if root.lanes.transport != "nccl" or not has_peers(first) or os.environ.get(OF_ALL):
        return ()
    mean = sum(unit.layout_for(training=False).gather_bytes for unit in root.units) // buckets
    part = max(mean // DTYPE.itemsize, 1) * DTYPE.itemsize
    with together(first, "tune", "the times of NCCL's policies"):
        own = _time_policies(root, part, repeats)
    ranks, now = exchange(first, own), nccl_settings()
    found = []
    for lane, settings in (("gather", now.gather), ("reduce", now.reduce)):
        slowest = {
            policy: max(of_rank[timed, policy] for of_rank in ranks)
            for timed, policy in own
            if timed == lane
        }
        if slowest and "cta_policy" not in settings:
            nbytes = part * first.world_size
            found.append(LanePolicies(OF_LANES[lane], settings, nbytes, slowest))
    return tuple(found)


def _time_policies(root: Root, part: int, repeats: int) -> dict[tuple[str, str], float]:
    """Return seconds by lane and policy, for the policies that all ranks could try."""
    first = root.units[0]
    own: dict[tuple[str, str], float] = {}
    for gather, reduce in _TRIED:
        if gather == "zero" and not nccl_settings().registers_buffers:
            continue  # copy engines need registered buffers
        made = None
        try:
            made = _make_lanes(root, gather, reduce, part)
        except RuntimeError as error:
            _logger.info("tune: no lanes with %s and %s: %s", gather, reduce, error)
        if not all(exchange(first, made is not None)) or made is None:
            continue
        lanes, calls = made
        for key, call in zip((("gather", gather), ("reduce", reduce)), calls, strict=True):
            times = [
                mean_seconds([call], partial(lanes.exchange_messages, b"-"), first.device)
                for _ in range(_WARMUP + repeats)
            ]
            own.setdefault(key, statistics.median(times[_WARMUP:]))
    return own


def _make_lanes(
    root: Root, gather: str, reduce: str, part: int
) -> tuple[_C.Lanes, list[Callable[[], Any]]]:
    """Return new lanes with these policies, and calls of a gather and of a reduction on them."""
    first, now = root.units[0], nccl_settings()
    settings = replace(
        now,
        gather=now.gather | {"cta_policy": POLICIES[gather]},
        reduce=now.reduce | {"cta_policy": POLICIES[reduce]},
    )
    lanes = nccl_lanes(first.ranks.shard_group, first.device, settings)
    whole = part * first.world_size
    return lanes, [
        partial(getattr(lanes, name), *buffers_of(lanes, name, whole, first.world_size))
        for name in OPERATIONS
    ]
