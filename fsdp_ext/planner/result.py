"""``Plan``: the result of ``plan``, as a table and as JSON."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp_ext._util.files import write_text
from fsdp_ext._util.tables import columns, row_of_names, sentence, size
from fsdp_ext.comm.link import Link
from fsdp_ext.planner.schedule import Prediction
from fsdp_ext.planner.sizes import PlannedBucketSizes, PlannedMemory, PlannedUnitSizes


@dataclass(frozen=True)
class Plan:
    """The result of :func:`fsdp_ext.plan`; ``str`` of it is a table.

    Args:
        model: name of the model's class.
        world_size: number of all ranks.
        device_type: "cuda" or "cpu".
        transport: name of the transport.
        link: the link that times are simulated for.
        bucket_bytes: the root's bucket size.
        units: sizes of the units, in order of registration.
        buckets: sizes of the buckets.
        memory: bytes that each rank holds.
        prediction: the simulated step; None unless the compute time of units is known.
        replicas: how many ranks have the same shard.
        replica_link: the link between replicas that times are simulated for; None if there are
            none.
    """

    model: str
    world_size: int
    device_type: str
    transport: str
    link: Link
    bucket_bytes: int
    units: tuple[PlannedUnitSizes, ...]
    buckets: tuple[PlannedBucketSizes, ...]
    memory: PlannedMemory
    prediction: Prediction | None
    replicas: int = 1
    replica_link: Link | None = None

    def __str__(self) -> str:
        """Return the tables of units and of memory, and the times."""
        parameters = sum(unit.parameters for unit in self.units)
        ranks = f"{self.world_size} {self.device_type} ranks"
        if self.replicas > 1:
            group_size = self.world_size // self.replicas
            ranks += f" ({self.replicas} shard groups of {group_size}, hybrid sharding)"
        title = (
            f"{self.model} on {ranks} over {self.transport}: "
            f"{parameters:,} parameters in {len(self.units)} units, {len(self.buckets)} buckets "
            f"(bucket_bytes={self.bucket_bytes:,})"
        )
        lines = [
            sentence(title),
            "",
            *_unit_lines(self.units, self.buckets),
            "",
            *_memory_lines(self.memory),
            "",
            sentence(_time_line(self.prediction, self.link, self.replica_link)),
        ]
        return "\n".join(lines)

    def to_json(self, path: str | Path | None = None) -> str | None:
        """Return the plan as JSON, or write it to ``path``.

        Values are bytes, seconds and floating-point operations. Keys of times begin with
        ``simulated``.

        Raises:
            OSError: if ``path`` cannot be written.
        """
        document = asdict(self)
        document["memory"] |= {"peak": self.memory.peak}
        del document["prediction"]
        if self.prediction is not None:
            document["simulated_seconds"] = {
                name: getattr(self.prediction, name)
                for name in ("step", "compute", "exposed", "wire")
            }
        text = json.dumps(document, indent=2) + "\n"
        if path is None:
            return text
        write_text(path, text)
        return None


# - The table


def _unit_lines(
    units: tuple[PlannedUnitSizes, ...], buckets: tuple[PlannedBucketSizes, ...]
) -> list[str]:
    has_flops = any(unit.flops is not None for unit in units)
    header = ["unit", "parameters", "shard", "padding", "bucket", "gathers", "reduces", "plan"]
    has_replicas = any(bucket.all_reduce > 0 for bucket in buckets)
    header[7:7] = ["all-reduces"] if has_replicas else []
    header += ["GFLOP", "backward"] if has_flops else []

    def cells(unit: PlannedUnitSizes) -> list[str]:
        bucket = buckets[unit.bucket]
        row = [f"{unit.parameters:,}", size(unit.shard), size(unit.padding)]
        row += [size(bucket.gather), size(bucket.reduce)]
        row += [size(bucket.all_reduce)] if has_replicas else []
        row.append(bucket.gather_plan)
        return row + ([f"{count / 1e9:.3g}" for count in unit.flops] if unit.flops else [])

    rows = []
    for own, group in itertools.groupby(units, cells):  # neighbours with equal cells share a row
        alike = list(group)
        first, last = alike[0], alike[-1]
        numbers = f"{first.bucket}" + (f" to {last.bucket}" if last.bucket > first.bucket else "")
        name = row_of_names(first.name, last.name, len(alike))
        rows.append([name, *own[:3], numbers, *own[3:]])
    return columns(header, rows)


def _memory_lines(memory: PlannedMemory) -> list[str]:
    rows = [
        ("shards", memory.shards),
        ("gradients", memory.gradients),
        ("optimizer states", memory.optimizer_states),
        ("gather inputs in the wire's dtype", memory.gather_inputs),
        *([("kept for backward by groups", memory.group_shards)] if memory.group_shards else []),
        (f"ring, {memory.ring_slots} slots of up to {size(memory.ring_slot)}", memory.ring),
        ("staging", memory.staging),
        ("reduce input", memory.reduce_input),
        ("reduce output", memory.reduce_output),
        ("units that stay unsharded", memory.kept_unsharded),
        ("gradients in flight, at most", memory.gradients_in_flight),
        ("messages in flight", memory.message_staging),
        ("temporaries of the optimizer's step", memory.optimizer_temporaries),
        ("peak without activations", memory.peak),
        ("FSDP2's peak without activations", memory.fsdp2_peak),
        *([("in the host's memory", memory.on_host)] if memory.on_host else []),
    ]
    return columns(
        ("memory of each rank", "size", "bytes"),
        [
            (name, "not computed", "") if nbytes is None else (name, size(nbytes), f"{nbytes:,}")
            for name, nbytes in rows
        ],
    )


def _time_line(step: Prediction | None, link: Link, replica_link: Link | None) -> str:
    if step is None:
        return "No time is predicted. Pass batch and flops_per_second, or compute."
    if step.wire == 0:
        return f"simulated step {_ms(step.step)}: nothing is sent"
    over = link.name
    if replica_link is not None:
        over += f", and {replica_link.name} between replicas"
    return (
        f"simulated step over {over}: {_ms(step.step)} = compute {_ms(step.compute)} + "
        f"exposed {_ms(step.exposed)}; communication {_ms(step.wire)}, {step.hidden:.0%} of it "
        "hidden"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
