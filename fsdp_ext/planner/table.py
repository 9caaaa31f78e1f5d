"""The table that a plan is printed as."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from fsdp_ext._util.tables import columns, row_of_names, size

if TYPE_CHECKING:
    from fsdp_ext.planner.api import Plan
    from fsdp_ext.planner.sizes import PlannedMemory, PlannedUnitSizes


def lines_of(plan: Plan) -> list[str]:
    """Return the lines of the tables of units and of memory, and of the times."""
    parameters = sum(unit.parameters for unit in plan.units)
    return [
        f"{plan.model} on {plan.world_size} ranks of {plan.device_type} over {plan.transport}: "
        f"{parameters:,} parameters in {len(plan.units)} units, {len(plan.buckets)} buckets "
        f"(bucket_bytes={plan.bucket_bytes:,})",
        "",
        *_units(plan),
        "",
        *_memory(plan.memory),
        "",
        *_times(plan),
    ]


def _units(plan: Plan) -> list[str]:
    counted = any(unit.flops is not None for unit in plan.units)
    header = ["unit", "parameters", "shard", "padding", "bucket", "gathers", "reduces", "plan"]
    header += ["forward GFLOP", "backward"] if counted else []

    def cells(unit: PlannedUnitSizes) -> list[str]:
        bucket = plan.buckets[unit.bucket]
        row = [f"{unit.parameters:,}", size(unit.shard), size(unit.padding)]
        row += [size(bucket.gather), size(bucket.reduce), unit.gather_plan]
        return row + ([f"{count / 1e9:.3g}" for count in unit.flops] if unit.flops else [])

    rows = []
    for own, group in itertools.groupby(plan.units, cells):  # of alike ones, one row
        alike = list(group)
        first, last = alike[0], alike[-1]
        buckets = f"{first.bucket}" + (f" to {last.bucket}" if last.bucket > first.bucket else "")
        name = row_of_names(first.name, last.name, len(alike))
        rows.append([name, *own[:3], buckets, *own[3:]])
    return columns(header, rows)


def _memory(memory: PlannedMemory) -> list[str]:
    rows = [
        ("shards", memory.shards),
        ("gradients", memory.gradients),
        ("optimizer states", memory.optimizer_states),
        ("gather inputs, in the wire's dtype", memory.gather_inputs),
        (f"ring, {memory.ring_slots} slots of {size(memory.ring_slot)}", memory.ring),
        ("staging", memory.staging),
        ("reduce input", memory.reduce_input),
        ("reduce output", memory.reduce_output),
        ("units that stay unsharded", memory.kept_unsharded),
        ("gradients in flight, at most", memory.gradients_in_flight),
        ("peak without activations", memory.peak),
    ]
    return columns(
        ("memory of each rank", "size", "bytes"),
        [(name, size(nbytes), f"{nbytes:,}") for name, nbytes in rows],
    )


def _times(plan: Plan) -> list[str]:
    step = plan.prediction
    if step is None:
        return [
            "no time is predicted: that takes a batch and FLOPs a second, or the compute seconds "
            "of each unit"
        ]
    if step.wire == 0:
        return [f"simulated step {_ms(step.step)}: one rank sends nothing"]
    return [
        f"simulated step over {plan.link.name}: {_ms(step.step)}, of which {_ms(step.compute)} "
        f"compute; {_ms(step.exposed)} of {_ms(step.wire)} communication exposed "
        f"({step.hidden:.0%} hidden)"
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
