"""Functions of whole matrices, computed on shards.

Note [owned matrices]
Each matrix has an *owner*, which is one of the ranks that shard it. To apply a function, every rank
sends its shard to the owner. The owner computes the whole result, and sends each rank its shard of
it. So N ranks compute each result once, and not N times as after an all-gather on all ranks.

The next matrix, which is the most expensive one without an owner, goes to the rank with the least
work. Matrices travel in rounds. While the owners compute a round, the shards of the next round and
the results of the previous round are in flight.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp_ext.optim.norms import explaining_errors

# A round ends once its owners have received at least this many elements each, on average. In
# smaller rounds, latency would dominate.
_LEAST_OF_ROUND = 16 * 2**20


@dataclass(frozen=True)
class ShardedMatrix:
    """A matrix that the ranks of a group shard as ``torch.distributed.tensor.Shard`` does."""

    shape: torch.Size
    dim: int

    @property
    def cost(self) -> int:
        """The cost of the product with the transpose, on the shorter side."""
        return self.shape.numel() * min(self.shape)

    def shapes(self, world_size: int) -> list[tuple[int, int]]:
        """Return the shape of each rank's shard."""
        size = self.shape[self.dim]
        chunk = math.ceil(size / world_size)
        lengths = [max(0, min(chunk, size - rank * chunk)) for rank in range(world_size)]
        rows, columns = self.shape
        return [(each, columns) if self.dim == 0 else (rows, each) for each in lengths]


@dataclass
class _Message:
    """An all-to-all in flight."""

    work: Any
    sent: torch.Tensor  # kept alive until the wait
    received: torch.Tensor
    sizes: list[int]  # the number of elements of each tensor in ``received``
    group: dist.ProcessGroup

    def wait(self) -> tuple[torch.Tensor, ...]:
        with explaining_errors("exchange matrices", self.group):
            self.work.wait()
        return torch.split(self.received, self.sizes)


class OwnedMatrices:
    """Matrices that one group shards, with an owner for each: Note [owned matrices].

    Their order is the same on all ranks. The group communicates and owners compute on ``device``.
    Shards and results travel in ``dtype``.
    """

    def __init__(
        self,
        matrices: Sequence[ShardedMatrix],
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._matrices = matrices
        self._group = group
        self._rank = group.rank()
        self._device = device
        self._dtype = dtype
        self._shapes = [each.shapes(group.size()) for each in matrices]
        self._rounds = _rounds_of(matrices, group.size())

    def apply(
        self, function: Callable[[torch.Tensor], torch.Tensor], shards: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return this rank's shards of the results. All ranks call this together.

        Args:
            function: takes a whole matrix, which it may overwrite, and returns one of its shape.
            shards: this rank's shard of each matrix.
        """
        results = list(shards)
        arriving = self._send_shards(self._rounds[0], shards)
        returning: _Message | None = None
        for number, owned in enumerate(self._rounds):
            shards_of_owned = arriving.wait()
            if number + 1 < len(self._rounds):
                arriving = self._send_shards(self._rounds[number + 1], shards)
            computed = [function(each) for each in self._joined(owned, shards_of_owned)]
            if returning is not None:
                self._put(results, self._rounds[number - 1], returning)
            returning = self._send_results(owned, computed)
        assert returning is not None
        self._put(results, self._rounds[-1], returning)
        return results

    def _send_shards(self, owned: list[list[int]], shards: Sequence[torch.Tensor]) -> _Message:
        return self._send(
            [[shards[i] for i in of_rank] for of_rank in owned],
            [
                [math.prod(self._shapes[i][rank]) for i in owned[self._rank]]
                for rank in range(len(owned))
            ],
        )

    def _joined(
        self, owned: list[list[int]], received: tuple[torch.Tensor, ...]
    ) -> list[torch.Tensor]:
        """Return the whole matrices that this rank owns in a round."""
        own = owned[self._rank]
        return [
            torch.cat(
                [
                    part.view(shape)
                    for part, shape in zip(received[at :: len(own)], self._shapes[i], strict=True)
                ],
                self._matrices[i].dim,
            )
            for at, i in enumerate(own)
        ]

    def _send_results(self, owned: list[list[int]], computed: list[torch.Tensor]) -> _Message:
        own = owned[self._rank]
        parts: list[list[torch.Tensor]] = [[] for _ in owned]
        for i, result in zip(own, computed, strict=True):
            dim = self._matrices[i].dim
            lengths = [shape[dim] for shape in self._shapes[i]]
            for of_rank, part in zip(parts, torch.split(result, lengths, dim), strict=True):
                of_rank.append(part)
        sizes = [[math.prod(self._shapes[i][self._rank]) for i in each] for each in owned]
        return self._send(parts, sizes)

    def _put(
        self, results: list[torch.Tensor], owned: list[list[int]], returning: _Message
    ) -> None:
        """Put this rank's shards of a round's results in their places."""
        numbers = [i for of_rank in owned for i in of_rank]
        for i, part in zip(numbers, returning.wait(), strict=True):
            results[i] = part.view(self._shapes[i][self._rank]).to(results[i].device)

    def _send(self, parts: list[list[torch.Tensor]], sizes: list[list[int]]) -> _Message:
        """Start an all-to-all of the ``parts`` for each rank; ``sizes`` are of what arrives."""
        flat = [part.reshape(-1) for of_rank in parts for part in of_rank]
        sent = self._empty(sum(map(torch.Tensor.numel, flat)))
        if flat:
            torch._foreach_copy_(list(torch.split(sent, list(map(torch.Tensor.numel, flat)))), flat)
        received = self._empty(sum(map(sum, sizes)))
        with explaining_errors("exchange matrices", self._group):
            work = dist.all_to_all_single(
                received,
                sent,
                list(map(sum, sizes)),
                [sum(part.numel() for part in of_rank) for of_rank in parts],
                group=self._group,
                async_op=True,
            )
        return _Message(work, sent, received, [n for each in sizes for n in each], self._group)

    def _empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, device=self._device, dtype=self._dtype)


def _rounds_of(matrices: Sequence[ShardedMatrix], world_size: int) -> list[list[list[int]]]:
    """Return the numbers of the matrices that each rank owns, in each round."""
    loads = [(0, rank) for rank in range(world_size)]
    of_ranks: list[list[int]] = [[] for _ in range(world_size)]
    for i in sorted(range(len(matrices)), key=lambda i: -matrices[i].cost):
        load, rank = heapq.heappop(loads)
        of_ranks[rank].append(i)
        heapq.heappush(loads, (load + matrices[i].cost, rank))
    rounds: list[list[list[int]]] = []
    numel = 0
    for turn in range(max(map(len, of_ranks))):
        new = [of_rank[turn : turn + 1] for of_rank in of_ranks]
        if numel == 0:
            rounds.append(new)
        else:
            rounds[-1] = [[*before, *more] for before, more in zip(rounds[-1], new, strict=True)]
        numel += sum(matrices[i].shape.numel() for of_rank in new for i in of_rank)
        if numel >= _LEAST_OF_ROUND * world_size:
            numel = 0
    return rounds
