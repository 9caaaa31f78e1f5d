"""The typical cost of a collective over each transport, and the bucket size that follows."""

from __future__ import annotations

from fsdp_ext.comm.link import H100_CLUSTER, H100_NODE, INFINIBAND_400G_NODES, Link
from fsdp_ext.comm.simulated import Simulated
from fsdp_ext.comm.transports import OF_GPUS, Transport

# The wire time of a bucket's bytes is this many times a launch. So launches are at most a fifth of
# the time of collectives, if there are enough units to fill the buckets. The first gather and the
# last reduction, which no compute of their pass can hide, stay short.
LAUNCHES = 4

# Measured with `python -m fsdp_ext measure-link`, two ranks on two cores. The latency of shared
# memory is measured in a step, without the call from Python. The order in which a backend adds up
# ranks may depend on an element's place in a message. So the default bucket size must be the same
# in each run, and comes from these constants instead of a measurement at the start.
SHARED_MEMORY = Link("shared memory", alpha=15e-6, beta=17.1e9)
PROCESS_GROUP = Link("gloo", alpha=300e-6, beta=2.3e9)
_ON_HOST = {"shared_memory": SHARED_MEMORY, "process_group": PROCESS_GROUP}


def typical_link(name: str, transport: Transport, ranks: int) -> Link:
    """Return the typical costs of collectives.

    Args:
        name: name of the transport in use.
        transport: the transport that the user asked for. A simulated one has a link of its own.
        ranks: number of ranks in the group.
    """
    if isinstance(transport, Simulated):
        return transport.link.over(transport.shards)
    if name in OF_GPUS:
        return H100_NODE if ranks <= H100_NODE.ranks else INFINIBAND_400G_NODES
    return _ON_HOST[name]


def typical_replica_link(name: str, transport: Transport, shards: int, replicas: int) -> Link:
    """Return the typical costs of all-reduces over replicas.

    Args:
        name: name of the transport in use.
        transport: the transport that the user asked for. A simulated one has a link of its own.
        shards: how many ranks shard the model together.
        replicas: how many ranks have the same shard.
    """
    if isinstance(transport, Simulated):
        return transport.link_between(shards, replicas)
    if name in OF_GPUS:
        return H100_CLUSTER.between_replicas(shards, replicas)
    return typical_link(name, transport, replicas)


def link_of_buckets(
    names: tuple[str, str], transport: Transport, shards: int, replicas: int
) -> Link:
    """Return the typical costs that the default bucket size comes from.

    If each shard group is a single rank, only replicas send buckets to each other.

    Args:
        names: names of the transports in use, within a shard group and between replicas.
        transport: the transport that the user asked for.
        shards: how many ranks shard the model together.
        replicas: how many ranks have the same shard.
    """
    if shards == 1 and replicas > 1:
        return typical_replica_link(names[1], transport, shards, replicas)
    return typical_link(names[0], transport, shards)


def default_bucket_bytes(link: Link) -> int:
    """Return the bytes, summed over all ranks, that the wire carries in `LAUNCHES` launches."""
    return round(LAUNCHES * link.alpha * link.beta)


def default_reduction_bytes(link: Link, ranks: int, replicas: int, median: int) -> int:
    """Return the size of the largest message of a reduction, summed over all ranks.

    By the figures of the link, cuts add at most a sixteenth to the reduction's time, as latency.
    Those figures are of 8 and of 32 ranks, and a ring's latency grows with its ranks. The lower
    bound makes cuts rare in small models, where they would save little memory. With replicas,
    rings are short, and 512 MiB are enough. Otherwise 1 GiB is the bound, or the median of the
    units if that is more: beyond it, whole messages of a few large units, such as an embedding,
    would take more memory than their latency is worth.

    Args:
        link: a typical link of the transport.
        ranks: the number of ranks in a shard group.
        replicas: how many such shard groups there are. Each message is summed over them, too.
        median: the median size of the units' reductions, summed over all ranks.
    """
    wanted = max(16 * link.alpha * link.beta * max(1, ranks * replicas / 64), 256 * 2**20)
    return round(min(wanted, 512 * 2**20 if replicas > 1 else max(2**30, median)))
