"""The time of a planned step: buckets become the stages that ``schedule.py`` simulates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_ext import _C
from fsdp_ext.comm.link import Link
from fsdp_ext.planner.schedule import Prediction, Stage, predict
from fsdp_ext.planner.sizes import all_reduce_bytes
from fsdp_ext.planner.units import PlannedRoot, PlannedUnit


class UnitSeconds(NamedTuple):
    """The seconds that a unit computes. ``update`` is an attached optimizer's; None without one."""

    forward: float
    backward: float
    update: float | None = None


@dataclass(frozen=True)
class StepCosts:
    """The costs of the parts of a step, as :func:`fsdp_ext.planner.schedule.predict` takes them."""

    compute: Sequence[UnitSeconds]  # of each unit, by its number
    link: Link
    contention: float = 0.0
    copies: tuple[float, float] = (0.0, 0.0)  # seconds per byte around gathers and reductions
    replica_link: Link | None = None
    updates_on_lane: bool = False


def predict_plan(root: PlannedRoot, found: _C.MemoryPlan, costs: StepCosts) -> Prediction:
    """Return how long a step takes."""
    reached = {moment.unit for moment in root.backward_moments if moment.kind == "leave"}
    stages = [_stage(root, bucket, costs, reached) for bucket in found["buckets"]]
    return predict(
        stages[0],
        stages[1:],
        costs.link,
        depth=root.most_ahead(),
        slots=max(1, found["ring_slots"]),
        contention=costs.contention,
        packs_ahead=found["packs_ahead"],
        replica_link=costs.replica_link,
        updates_on_lane=costs.updates_on_lane,
    )


def _stage(
    root: PlannedRoot, bucket: _C.PlannedBucket, costs: StepCosts, reached: set[PlannedUnit]
) -> Stage:
    units = bucket["units"]
    has_wire = root.units[0].world_size > 1
    sums = all_reduce_bytes(root, bucket)
    # A single rank has its parameters whole already, so it copies only parameters that it casts.
    has_copies = has_wire or bucket["needs_cast"]
    gather_rate = costs.copies[0] if has_copies else 0.0
    reduce_rate = costs.copies[1] if has_copies or sums > 0 else 0.0
    return Stage(
        name=root.units[units[0]].name,
        forward=sum(costs.compute[number].forward for number in units),
        backward=sum(costs.compute[number].backward for number in units),
        gather_bytes=bucket["gather_bytes"] if has_wire else 0,
        reduce_bytes=bucket["reduce_bytes"] if has_wire else 0,
        reshards=bucket["reshards_after_forward"],
        has_backward=any(root.units[number] in reached for number in units),
        copy_seconds_gather=gather_rate * bucket["gather_bytes"],
        copy_seconds_reduce=reduce_rate * bucket["reduce_bytes"],
        gather_messages=bucket["gather_messages"],
        reduce_messages=bucket["reduce_messages"],
        all_reduce_bytes=sums,
        reduces_in_place=not bucket["needs_reduce_output"],
        update=sum(costs.compute[number].update or 0.0 for number in units),
    )
