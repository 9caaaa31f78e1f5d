"""What a collective typically costs over each transport, and the bucket size that follows."""

from __future__ import annotations

import functools
import logging

from fsdp_ext._util.tables import size
from fsdp_ext.comm.link import H100_NODE, INFINIBAND_400G_NODES, Link
from fsdp_ext.comm.simulated import Simulated
from fsdp_ext.comm.transports import Transport

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
