"""``Simulated``: one process trains as one of many ranks, over a link of your choice.

    from fsdp_ext import Simulated, fully_shard
    from fsdp_ext.comm.link import H100_NODE

    fully_shard(model, transport=Simulated(world_size=8, link=H100_NODE))

Only time and memory mean something. A step has the sizes, buffers, copies and waits of a real one,
and each collective takes as long as the link says. But no data arrives: losses, gradients and
parameters mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from fsdp_ext.comm.link import Link


@dataclass(frozen=True)
class Simulated:
    """A transport with no peers, for ``fully_shard(..., transport=...)``.

    If no process group is initialised, it initialises PyTorch's "fake" one.

    Args:
        world_size: how many ranks to simulate.
        link: the link that connects them.
        rank: which of them this process is.
        multiprocessors: how many multiprocessors of a GPU a collective occupies while it runs, as
            NCCL's channels do. With 0, compute keeps all of them, as with copy engines.
        seed: seed of the link's jitter.
        moves_memory: whether a collective also reads and writes this device's memory. Without it,
            a link that takes no time leaves the compute alone, as a baseline.

    Raises:
        ValueError: if a number is out of range, or the link has no figures for so many ranks.
        TypeError: if ``link`` is not a Link.
    """

    world_size: int
    link: Link
    rank: int = 0
    multiprocessors: int = 0
    seed: int = 0
    moves_memory: bool = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not isinstance(self.link, Link):
            raise TypeError(
                f"Simulated got link={self.link!r}. Pass a Link: one of "
                "fsdp_ext.comm.link.PRESETS, or Link.load(path)."
            )
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise ValueError(
                f"Simulated got world_size={self.world_size!r}. Pass a positive whole number."
            )
        if not isinstance(self.rank, int) or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"Simulated got rank={self.rank!r}. Pass a rank from 0 to {self.world_size - 1}."
            )
        if not isinstance(self.multiprocessors, int) or self.multiprocessors < 0:
            raise ValueError(
                f"Simulated got multiprocessors={self.multiprocessors!r}. Pass 0 or more; NCCL "
                "takes up to about 32."
            )
        self.link.over(self.world_size)

    def init_process_group(self) -> None:
        """Initialise a "fake" process group of the simulated ranks, unless there is a group."""
        if dist.is_initialized():
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(
            "fake", rank=self.rank, world_size=self.world_size, store=FakeStore()
        )

    def check_group(self, size: int, rank: int) -> None:
        """Raise ValueError unless the mesh has the simulated ranks."""
        if (size, rank) != (self.world_size, self.rank):
            raise ValueError(
                f"transport=Simulated(world_size={self.world_size}, rank={self.rank}) got a mesh "
                f"in which this is rank {rank} of {size}. Initialise no process group before, or a "
                '"fake" one with the simulated ranks.'
            )
