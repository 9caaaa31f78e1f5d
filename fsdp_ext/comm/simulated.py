"""Training without peers: a transport whose collectives take as long as over a link of your choice.

    from fsdp_ext import Simulated, fully_shard
    from fsdp_ext.comm.link import H100_NODE

    fully_shard(model, transport=Simulated(world_size=8, link=H100_NODE))

For time and memory alone: a step has the sizes, buffers, copies and waits of the real one, but no
data comes from anywhere. Losses, gradients and parameters mean nothing, and every time is a
simulated one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from fsdp_ext.comm.link import Link


@dataclass(frozen=True)
class Simulated:
    """A transport with no peers, for ``fully_shard(..., transport=...)``.

    It needs no process group of so many ranks: where none was initialised, it initialises
    PyTorch's "fake" one.

    Args:
        world_size: of the ranks that there would be.
        link: what would connect them.
        rank: that this process is.
        multiprocessors: that a collective takes from a GPU while it runs, as NCCL's channels do; 0
            leaves them to the computation, as copy engines would.
        seed: of the link's jitter.

    Raises:
        ValueError: if a number is out of range.
        TypeError: if ``link`` is none.
    """

    world_size: int
    link: Link
    rank: int = 0
    multiprocessors: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not isinstance(self.link, Link):
            raise TypeError(
                f"Simulated expects a Link but got {self.link!r}; take one of "
                "fsdp_ext.comm.link.PRESETS, or Link.load a file"
            )
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise ValueError(
                f"Simulated expects a world_size of at least 1 but got {self.world_size!r}"
            )
        if not isinstance(self.rank, int) or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"Simulated expects a rank from 0 to {self.world_size - 1} but got {self.rank!r}"
            )
        if not isinstance(self.multiprocessors, int) or self.multiprocessors < 0:
            raise ValueError(
                "Simulated expects 0 or more multiprocessors but got "
                f"{self.multiprocessors!r}; NCCL takes up to about 32"
            )
        self.link.over(self.world_size)

    def init_process_group(self) -> None:
        """Initialise a process group of so many ranks, none of which is there, if there is none."""
        if dist.is_initialized():
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(
            "fake", rank=self.rank, world_size=self.world_size, store=FakeStore()
        )

    def check_group(self, size: int, rank: int) -> None:
        """Raise ValueError unless the ranks of the mesh are those that are simulated."""
        if (size, rank) != (self.world_size, self.rank):
            raise ValueError(
                f"transport=Simulated(world_size={self.world_size}, rank={self.rank}) expects a "
                f"mesh of as many ranks but got rank {rank} of {size}; initialise no process group "
                'before, or one of backend "fake"'
            )
