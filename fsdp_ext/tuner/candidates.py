"""The settings that ``tune`` may choose, with their memory and their predicted times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

from fsdp_ext.comm.costs import default_bucket_bytes
from fsdp_ext.planner.sizes import find_buckets, memory_of, optimizer_tensors
from fsdp_ext.planner.times import StepCosts, predict_plan
from fsdp_ext.planner.units import PlannedRoot
from fsdp_ext.sharding.params.settings import Choice, Decision
from fsdp_ext.sharding.root.root import Root
from fsdp_ext.tuner.result import Candidate

# A setting that needs more memory has to be faster by at least this share.
WORTH = 0.01

_DEPTHS = (0, 1, 2, 3, 4)
# How often all units' bytes are halved for a bucket size.
_HALVINGS = 14
# How many settings are raced besides the previous one.
_RACED = 3
# Settings predicted slower than the best by more than this share get only places that are left.
_UNSURE = 0.25


def choices(root: Root, before: Choice, keeps_more: bool) -> list[Choice]:
    """Return all values of the settings that the user has left open.

    If ``keeps_more``, more units may stay unsharded than ``before``, the last of forward first.
    """
    asked, stays = root.units[0].settings, before.stays_unsharded
    sizes, depths, unsharded = {before.bucket_bytes}, {before.prefetch}, {stays}
    if asked.bucket_bytes is None:
        total = sum(bucket["gather_bytes"] for bucket in root.impl.buckets())
        sizes |= {0, default_bucket_bytes(root.link)}
        sizes |= {total >> halvings for halvings in range(_HALVINGS)}
    if asked.prefetch is None:
        depths |= set(_DEPTHS)
    if keeps_more:
        is_free = [unit.settings.reshard_after_forward is None for unit in root.units]
        free = [n for n in range(1, len(is_free)) if is_free[n] and n not in stays]
        counts = {len(free), *(2**power for power in range(len(free).bit_length()))}
        unsharded |= {tuple(sorted([*stays, *free[len(free) - count :]])) for count in counts}
    every = itertools.product(sorted(sizes), sorted(depths), sorted(unsharded))
    return list(itertools.starmap(Choice, every))


def predict_all(
    root: Root,
    copied: nn.Module,
    found: Sequence[Choice],
    costs: StepCosts,
    optimizer_states: int,
) -> list[Candidate]:
    """Return the settings with their buckets, their memory and their predicted time.

    ``copied`` is the model's copy of :func:`units_of_sharded`.
    """
    planned, on = PlannedRoot(copied, root.link), root.units[0].device.type
    transports = (root.lanes.transport, (root.replicas or root.lanes).transport)
    tensors = optimizer_tensors(optimizer_states, on, is_fused=False)
    candidates = []
    for choice in found:
        planned.decide(Decision(choice))
        buckets = find_buckets(planned, transports, on)
        memory = memory_of(planned, buckets, tensors, on).peak
        seconds = predict_plan(planned, buckets, costs).step
        candidates.append(Candidate(choice, len(buckets["buckets"]), memory, seconds))
    return candidates


def shortlist(candidates: Sequence[Candidate], before: Choice) -> list[Candidate]:
    """Return the settings to race besides the one ``before``, which is raced anyway.

    They are the best predictions, of several numbers of buckets if possible: predictions are off by
    a few percent and hardly tell prefetch depths apart. Of settings that have the same buckets or
    are predicted to be as fast, ``before`` comes first.
    """
    best = min(one.predicted for one in candidates)

    def rank(one: Candidate) -> tuple[int, bool, int]:
        return round(one.predicted / best / WORTH), one.choice != before, one.memory

    alike: dict[tuple[int, int, int], Candidate] = {}
    for one in sorted(candidates, key=rank):
        key = (one.buckets, one.choice.prefetch, len(one.choice.stays_unsharded))
        alike.setdefault(key, one)
    of_size: dict[int, Candidate] = {}
    for one in alike.values():
        if one.predicted <= best * (1 + _UNSURE):
            of_size.setdefault(one.buckets, one)
    ranked = dict.fromkeys([*of_size.values(), *alike.values()])
    return [one for one in ranked if one.choice != before][:_RACED]
