"""``describe_buckets``: the buckets of a model as a table (csrc/core/units/bucket.h)."""

from __future__ import annotations

from torch import nn

from fsdp_ext import _C
from fsdp_ext._util.tables import columns, row_of_names, sentence, size
from fsdp_ext.comm.lanes import lanes_of_mesh
from fsdp_ext.comm.transports import describe_lanes
from fsdp_ext.sharding.root.root import Root, running_root


def describe_buckets(model: nn.Module) -> str:
    """Return a table of the buckets, their messages and their memory.

    Sizes of messages are summed over all ranks. Memory is this rank's.

    Args:
        model: the root module, which has run forward. From the second iteration on the buckets
            follow the order in which the first one ran the units.

    Raises:
        TypeError: if ``fully_shard`` was not applied to ``model``.
        RuntimeError: before the first forward.
    """
    root = running_root(model, "describe_buckets")
    root.impl.form_buckets()  # there may be none yet after parameters were replaced
    buckets = root.impl.buckets()
    return "\n".join([*_table(root, buckets), *_sentences(root, buckets)])


def _table(root: Root, buckets: list[_C.BucketInfo]) -> list[str]:
    header = ("units", "gather", "messages", "reduce", "messages", "unsharded", "plan")
    rows = [
        (
            _names(root, bucket["units"]),
            size(bucket["gather_bytes"]),
            str(bucket["gather_messages"]),
            size(bucket["reduce_bytes"]),
            str(bucket["reduce_messages"]),
            size(bucket["unsharded_bytes"]),
            bucket["gather_plan"],
        )
        for bucket in buckets
    ]
    return columns(header, rows)


def _sentences(root: Root, buckets: list[_C.BucketInfo]) -> list[str]:
    memory = root.impl.memory()
    messages = memory["message_staging_bytes"]
    lines = [
        f"{root.units[0].world_size} ranks communicate over {describe_lanes(root.lanes)}"
        + _replicas(root)
        + _meshes(root)
        + (f"; messages in flight take {size(messages)}" if messages else ""),
        f"{len(root.units)} units in {len(buckets)} buckets (bucket_bytes="
        f"{root.settings.bucket_bytes[0]:,}); each bucket is one gather, one reduction and one "
        "slot",
    ]
    groups = sorted({bucket["reshard_group"] for bucket in buckets} - {0})
    if groups:
        lines.append(
            f"backward gathers over groups of {' and '.join(map(str, groups))} ranks; what a rank "
            f"keeps for that is {size(sum(bucket['group_shard_bytes'] for bucket in buckets))}"
        )
    attached = sum(unit.settings.update is not None for unit in root.units)
    if attached:
        lines.append(f"attached optimizers step {attached} units in backward")
    slots = memory["ring_slots"]
    alone = [
        root.impl.layout_of(number).unsharded_bytes
        for number, is_resharded in enumerate(root.settings.reshard_after_forward)
        if is_resharded
    ]
    largest = max([0, *alone])
    lines.append(
        f"{slots} slot{'s' * (slots != 1)} of up to {size(memory['ring_slot_bytes'])}: "
        f"{size(memory['ring_bytes'])}; without buckets they would be {size(slots * largest)}"
    )
    return [sentence(line) for line in lines]


def _replicas(root: Root) -> str:
    """Return how gradients travel between ranks with the same shard, if there are any."""
    if root.replicas is None:
        return ""
    return (
        f"; gradients are summed over {root.units[0].replicas} replicas over "
        f"{describe_lanes(root.replicas)}"
    )


def _meshes(root: Root) -> str:
    """Return the groups of units on other meshes than the root's, if there are any."""
    texts = []
    for mesh in sorted(set(root.meshes) - {0}):
        on_mesh = zip(root.units, root.meshes, strict=True)
        units = [unit for unit, number in on_mesh if number == mesh]
        root_unit, unit = root.units[0], units[0]
        transport = unit.settings.transport
        lanes = lanes_of_mesh(
            root_unit.ranks.shard_group, unit.device, transport, unit.ranks.shard_group
        )
        count = f"{len(units)} units" if len(units) > 1 else "1 unit"
        texts.append(f"; {unit.world_size} ranks share {count} over {describe_lanes(lanes)}")
    return "".join(texts)


def _names(root: Root, numbers: list[int]) -> str:
    first, last = (root.units[number].name for number in (numbers[0], numbers[-1]))
    return row_of_names(first, last, len(numbers))
