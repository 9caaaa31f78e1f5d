"""``Simulated``: one process trains as one of many ranks, over a link of your choice.

    from fsdp_ext import Simulated, fully_shard
    from fsdp_ext.comm.link import H100_NODE

    fully_shard(model, transport=Simulated(world_size=8, link=H100_NODE))

With ``replicas``, they train by hybrid sharding, over a mesh of two dimensions:

    transport = Simulated(world_size=64, link=H100_CLUSTER, replicas=8)
    transport.init_process_group()
    fully_shard(model, mesh=init_device_mesh("cpu", (8, 8)), transport=transport)

Only time and memory are meaningful. A step has the sizes, buffers, copies and waits of a real one,
and each collective takes as long as the link says. But no data arrives: losses, gradients and
parameters are meaningless.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist

from fsdp_ext._util.numbers import as_bool, check_ranks, is_at_least
from fsdp_ext.comm.link import Link

_MOST_MULTIPROCESSORS = 1024  # more than any GPU has


@dataclass(frozen=True)
class Simulated:
    """A transport with no peers, for ``fully_shard(..., transport=...)``.

    If no process group is initialised, it initialises PyTorch's "fake" one.

    Args:
        world_size: how many ranks to simulate.
        link: the link that connects them; with replicas, those that shard the model together.
        rank: the rank of this process.
        multiprocessors: how many multiprocessors of a GPU a collective occupies while it runs, as
            NCCL's channels do. With 0, compute keeps all of them, as with copy engines.
        moves_memory: whether a collective also reads and writes this device's memory. Without it,
            a link that takes no time leaves the compute alone, as a baseline.
        replicas: how many ranks have the same shard. ``world_size / replicas`` ranks shard the
            model together.
        replica_link: the link between replicas, over which gradients are all-reduced. By default
            ``across`` of ``link``, or ``link`` itself if its figures hold for all ranks.

    Raises:
        ValueError: if a number is out of range, or the link has no figures for so many ranks.
        TypeError: if a link is not a Link, or ``moves_memory`` is not a bool.
    """

    world_size: int
    link: Link
    rank: int = 0
    multiprocessors: int = 0
    moves_memory: bool = True
    replicas: int = 1
    replica_link: Link | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        for name, link in (("link", self.link), ("replica_link", self.replica_link)):
            if not isinstance(link, Link) and (name == "link" or link is not None):
                raise TypeError(
                    f"Simulated got {name}={link!r}. Pass a Link: one of "
                    "fsdp_ext.comm.link.PRESETS, or Link.load(path)."
                )
        check_ranks("Simulated", self.world_size, self.replicas)
        if not is_at_least(self.rank, 0, self.world_size - 1):
            raise ValueError(
                f"Simulated got rank={self.rank!r}. Pass a rank from 0 to {self.world_size - 1}."
            )
        if not is_at_least(self.multiprocessors, 0, _MOST_MULTIPROCESSORS):
            raise ValueError(
                f"Simulated got multiprocessors={self.multiprocessors!r}. Pass a number from 0 to "
                f"{_MOST_MULTIPROCESSORS}; NCCL takes up to about 32."
            )
        as_bool("Simulated", "moves_memory", self.moves_memory)
        if self.replicas == 1 and self.replica_link is not None:
            raise ValueError(
                "Simulated got replica_link for a model without replicas. Pass replicas=, too, or "
                "leave it out."
            )
        if self.link.over(self.shards).one_wire:
            raise ValueError(
                f"Simulated got the link '{self.link.name}' with one_wire=True, but simulated "
                "gathers and reductions have a wire each. Pass a link with one_wire=False."
            )
        self.link_between(self.shards, self.replicas)

    @property
    def shards(self) -> int:
        """How many ranks shard the model together."""
        return self.world_size // self.replicas

    def within_shard_group(self) -> Simulated:
        """Return the transport of the ranks that shard the model with this one."""
        return replace(
            self,
            world_size=self.shards,
            rank=self.rank % self.shards,
            replicas=1,
            replica_link=None,
        )

    def between_replicas(self) -> Simulated:
        """Return the transport of the ranks that have the same shard as this one."""
        return replace(
            self,
            world_size=self.replicas,
            link=self.link_between(self.shards, self.replicas),
            rank=self.rank // self.shards,
            replicas=1,
            replica_link=None,
        )

    def link_between(self, shards: int, replicas: int) -> Link:
        """Return the link between ``replicas`` of a model that ``shards`` ranks shard."""
        if self.replica_link is not None:
            return self.replica_link.over(replicas)
        return self.link.between_replicas(shards, replicas)

    def init_process_group(self) -> None:
        """Initialise a "fake" process group of the simulated ranks, unless there is a group."""
        if dist.is_initialized():
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(
            "fake", rank=self.rank, world_size=self.world_size, store=FakeStore()
        )

    def check_mesh(self, size: int, rank: int, replicas: int) -> None:
        """Raise ValueError unless the mesh has the simulated ranks and replicas."""
        if (size, rank) != (self.world_size, self.rank):
            raise ValueError(
                f"transport=Simulated(world_size={self.world_size}, rank={self.rank}) got a mesh "
                f"in which this is rank {rank} of {size}. Initialise no process group before, or a "
                '"fake" one with the simulated ranks.'
            )
        if replicas != self.replicas:
            raise ValueError(
                f"transport=Simulated(world_size={size}, replicas={self.replicas}) got a mesh with "
                f"{replicas} replicas. Pass a mesh of the shape ({self.replicas}, {self.shards})."
            )
