"""How large buckets are by default, and what they are: csrc/core/bucket.h."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from torch import nn

from fsdp_ext.simulated import H100_NODE, INFINIBAND_400G_NODES, Link, Simulated
from fsdp_ext.tables import columns, row_of_names, size
from fsdp_ext.transports import Transport

if TYPE_CHECKING:
    from fsdp_ext.root import Root

# A bucket takes so many times as long as a launch: launches are at most a fifth of the wire's time
# where there are enough units, and what nothing hides (the first gather, the last reduction) is
# short.
LAUNCHES = 4

# By `python -m fsdp_ext measure-link`, two ranks on two cores; of shared memory the latency is a
# step's, without the call from Python. Defaults have to be the same in every run, since where an
# element lies in a message may change the order that backends add it up in; so they come from
# figures and not from a measurement at the start.
SHARED_MEMORY = Link("shared memory", alpha=15e-6, beta=17.1e9)
PROCESS_GROUP = Link("gloo", alpha=300e-6, beta=2.3e9)

_logger = logging.getLogger("fsdp_ext")


def typical_link(name: str, transport: Transport, ranks: int) -> Link:
    """Return what a collective costs, about.

    Args:
        name: of the transport that was chosen.
        transport: that was asked for, whose link is taken if it is a simulated one.
        ranks: of the group.
    """
    if isinstance(transport, Simulated):
        return transport.link.over(transport.world_size)
    if name == "nccl":
        return H100_NODE if ranks <= H100_NODE.ranks else INFINIBAND_400G_NODES
    return SHARED_MEMORY if name == "shared_memory" else PROCESS_GROUP


def default_bucket_bytes(link: Link) -> int:
    """Return how many bytes, of all ranks together, a gather takes `LAUNCHES` launches to carry."""
    return round(LAUNCHES * link.alpha * link.beta)


@functools.cache
def log_default(nbytes: int, link: Link) -> None:
    """Say once what was chosen."""
    _logger.info(
        "bucket_bytes is %s, %d times what travels over %s in the time of a launch",
        size(nbytes),
        LAUNCHES,
        link.name,
    )


def describe_buckets(model: nn.Module) -> str:
    """Return a table of what travels together, and what that costs in memory.

    Sizes are of all ranks together, but for memory, which is this rank's.

    Args:
        model: its root module, which has run forward. Buckets follow the order of the first
            iteration from the second one on.

    Raises:
        TypeError: if ``fully_shard`` was not applied to it.
        RuntimeError: before the first forward.
    """
    from fsdp_ext.root import running_root

    return "\n".join(_describe(running_root(model, "describe_buckets")))


def _describe(root: Root) -> list[str]:
    buckets = root.core.buckets()
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
    lines = columns(header, rows)
    memory = root.core.memory()
    slots = memory["ring_slots"]
    alone = zip(root.units, root.core.unsharded_bytes(), strict=True)
    largest = max([0, *(nbytes for unit, nbytes in alone if root.reshards(unit))])
    lines.append(
        f"{len(root.units)} units in {len(buckets)} buckets (bucket_bytes="
        f"{root.bucket_bytes(root.units[0]):,}): each is one gather, one reduction and one slot"
    )
    lines.append(
        f"{slots} slots of {size(memory['ring_slot_bytes'])} are {size(memory['ring_bytes'])}; "
        f"of units by themselves {size(slots * largest)}"
    )
    return lines


def _names(root: Root, numbers: list[int]) -> str:
    first, last = (root.units[number].name for number in (numbers[0], numbers[-1]))
    return row_of_names(first, last, len(numbers))
