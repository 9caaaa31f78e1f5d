"""A process group of many simulated ranks in one process, for PyTorch's FSDP2, FSDP1 and DDP.

    with simulated_group(world_size=64, link=H100_CLUSTER) as group:
        fully_shard(model, mesh=init_device_mesh("cpu", (64,)))

It is for PyTorch's FSDP what `Simulated` is for fsdp_ext, over the same `Link`. Each collective
takes alpha + S / beta (simulated). Only this rank's own part of the data arrives, so losses,
gradients and parameters have no meaning.

A group is one wire, like an NCCL communicator: its collectives run one after another, on a thread
of the group. Ours has two wires, for gathers and for reductions (csrc/core/lanes.h), and so has
FSDP2 with `FSDPModule.set_separate_reduce_scatter_group`. The end of a collective is known when it
is issued: it starts now or at the end of the collective before it, whichever is later. So a thread
that wakes up late delays the caller, but not the next collective. Ours starts the next collective
when its thread gets to it. The difference favours the peer.

FSDP1 and FSDP2 hide communication with CUDA streams, where `work.wait()` blocks a stream and not
the host. A CPU has no streams, so it can show only a part of that:
- FSDP1 waits for each collective right after it issues it, and hides nothing.
- FSDP2 does the same by default. It hides gathers with `_set_unshard_async_op(True)` and with
  `set_modules_to_forward_prefetch`, which gathers in the same order as its default on a GPU.
  Backward prefetches by itself. It still waits for each reduction right after it issues it.
- DDP hides its all-reduces, as everywhere.
- `reductions_in_flight` models what streams would do: a reduction returns when the reduction that
  many before it has ended. This is FSDP2's rule on a GPU (`set_reduce_scatter_max_input_buffers`,
  1 by default). Each step then has to end with `group.synchronize()`. FSDP2's host code is the real
  one; only the waits are modelled. It reads gradients before they would have arrived, but nothing
  here depends on their values.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from fsdp_ext.comm.link import Link

NO_TIME = Link("no time", alpha=0.0, beta=1e30)
BACKEND = "simulated"
GATHER, REDUCE, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"
SET_TIMER_SLACK = 29  # PR_SET_TIMERSLACK of <linux/prctl.h>


@dataclass(frozen=True)
class Settings:
    """The settings of the groups within one `simulated_group`."""

    link: Link
    # How many reductions may be in flight when one returns to the caller; 0: they block.
    reductions_in_flight: int = 0
    groups: list[SimulatedGroup] = field(default_factory=list)  # all groups so far


@dataclass(frozen=True)
class Collective:
    """A collective that was issued, with its times (simulated), by time.monotonic()."""

    operation: str
    nbytes: int  # of all ranks together
    issued: float
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Seconds on the wire (simulated)."""
        return self.end - self.start


@dataclass(frozen=True)
class Message:
    """A collective as the wire's thread sees it."""

    end: float
    moves: list[tuple[Tensor, Tensor]]  # from, to
    results: list[Tensor]
    done: Future[list[Tensor]]


class Wire:
    """A thread that runs collectives in order, each until its end time."""

    def __init__(self, name: str) -> None:
        self._free_at = 0.0
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def issue(
        self,
        operation: str,
        nbytes: int,
        seconds: float,
        moves: list[tuple[Tensor, Tensor]],
        results: list[Tensor],
    ) -> tuple[Collective, Future[list[Tensor]]]:
        """Queue a collective that takes so long; return it, and a future with its results."""
        now = time.monotonic()
        start = max(now, self._free_at)
        self._free_at = start + seconds
        done: Future[list[Tensor]] = Future()
        self._queue.put(Message(self._free_at, moves, results, done))
        return Collective(operation, nbytes, now, start, self._free_at), done

    def close(self) -> None:
        """End the thread after all collectives that were issued."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # otherwise sleeps last up to 50 us too long
            ctypes.CDLL(None).prctl(SET_TIMER_SLACK, 1)
        late = 0.0
        while (message := self._queue.get()) is not None:
            with torch.no_grad():
                for source, destination in message.moves:
                    destination.copy_(source)
            late = _sleep_until(message.end, late)
            message.done.set_result(message.results)
            del message  # frees its tensors while the thread waits for the next one


def _sleep_until(moment: float, late: float) -> float:
    """Sleep until a moment; ``late`` is how much too long sleeps last. Return the new estimate."""
    asked = moment - late
    left = asked - time.monotonic()
    if left > 0:
        time.sleep(left)
        now_late = min(100e-6, time.monotonic() - asked)
        late = now_late if now_late < late else late + (now_late - late) / 8
    while time.monotonic() < moment:
        time.sleep(0)  # releases the GIL
    return late


class SimulatedGroup(dist.ProcessGroup):
    """A process group in which only this rank exists.

    Attributes:
        link: for this number of ranks. A new value applies to later collectives.
        log: the collectives that were issued, in order.
    """

    def __init__(self, rank: int, world_size: int, settings: Settings) -> None:
        super().__init__(rank, world_size)
        self.link = settings.link.over(world_size)
        self.log: list[Collective] = []
        self._rank = rank
        self._size = world_size
        self._in_flight = settings.reductions_in_flight
        self._groups = settings.groups
        self._groups.append(self)
        self._reductions: list[Future[list[Tensor]]] = []
        self._last: Future[list[Tensor]] | None = None
        self._wire = Wire(f"{BACKEND} wire")

    # - The interface of a process group

    def rank(self) -> int:
        """Return this rank."""
        return self._rank

    def size(self) -> int:
        """Return the number of simulated ranks."""
        return self._size

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return BACKEND

    @property
    def pg_name(self) -> str:
        """The name of the group in torch.distributed."""
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        """The same as `pg_name`."""
        return self.pg_name

    @property
    def groups(self) -> tuple[SimulatedGroup, ...]:
        """All groups of the same ``simulated_group``, this one included."""
        return tuple(self._groups)

    def synchronize(self) -> None:
        """Wait until all collectives of all groups have ended."""
        for group in self._groups:
            if group._last is not None:
                group._last.wait()
            group._reductions.clear()

    def shutdown(self) -> None:
        """End the wire's thread."""
        self._wire.close()

    # - Collectives

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Gather into one tensor; only this rank's part arrives."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather several tensors as one message."""
        moves = [(i.view(-1), self._part(o)) for i, o in zip(inputs, outputs, strict=True)]
        return _work(self._issue(GATHER, outputs, moves, outputs))

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather into lists with a tensor for each rank, as ranks do to exchange objects.

        Every rank appears to send what this rank sends, so that the result can be decoded.
        """
        moves = [(i, o) for i, row in zip(inputs, outputs, strict=True) for o in row]
        whole = [o for _, o in moves]
        return _work(self._issue(GATHER, whole, moves, whole))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduce into this rank's segment; the result is its own contribution."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce several tensors as one message."""
        moves = [(self._part(i), o.view(-1)) for i, o in zip(inputs, outputs, strict=True)]
        return self._reduction(self._issue(REDUCE, inputs, moves, outputs))

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Reduce lists with a tensor for each rank."""
        moves = [(row[self._rank], o) for row, o in zip(inputs, outputs, strict=True)]
        whole = [tensor for row in inputs for tensor in row]
        return self._reduction(self._issue(REDUCE, whole, moves, outputs))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Sum in place; it takes as long as one reduction of twice the bytes."""
        return self._reduction(self._issue(ALL_REDUCE, tensors, [], tensors))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Sum several tensors in place, as one message."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Broadcast; this rank's tensors stay as they are."""
        return _work(self._issue("broadcast", tensors, [], tensors))

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks, which takes a gather of no bytes."""
        return _work(self._issue("barrier", [], [], []))

    # The names in earlier versions of torch, such as 2.11.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _issue(
        self,
        operation: str,
        whole: list[Tensor],
        moves: list[tuple[Tensor, Tensor]],
        results: list[Tensor],
    ) -> Future[list[Tensor]]:
        nbytes = sum(tensor.nbytes for tensor in whole)
        if operation == ALL_REDUCE:
            seconds = self.link.seconds(REDUCE, 2 * nbytes)
        else:
            seconds = self.link.seconds(REDUCE if operation == REDUCE else GATHER, nbytes)
        for source, destination in moves:
            if source.numel() != destination.numel():
                raise ValueError(
                    f"{operation} of {self._size} ranks got a part of {source.numel()} elements "
                    f"and needs {destination.numel()}; the whole has one part for each rank"
                )
        # FSDP2's gathers are in place and need no copy.
        moves = [(i, o) for i, o in moves if i.data_ptr() != o.data_ptr()]
        collective, done = self._wire.issue(operation, nbytes, seconds, moves, results)
        self.log.append(collective)
        self._last = done
        return done

    def _reduction(self, done: Future[list[Tensor]]) -> dist.Work:
        if self._in_flight == 0:
            return _work(done)
        self._reductions.append(done)
        if len(self._reductions) > self._in_flight:
            return _work(self._reductions.pop(0))
        nothing: Future[list[Tensor]] = Future()
        nothing.set_result([])
        return _work(nothing)

    def _part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the whole tensor."""
        flat = whole.view(-1)
        numel = flat.numel() // self._size
        return flat.narrow(0, self._rank * numel, numel)


def _work(done: Future[list[Tensor]]) -> dist.Work:
    return _create_work_from_future(done)


_settings: list[Settings] = []  # those of the current simulated_group, if any


def _create(options: Any, _backend_options: Any) -> SimulatedGroup:
    if not _settings:
        raise RuntimeError(
            f"backend '{BACKEND}' needs a link and has none; use simulated_group(world_size, link)"
        )
    return SimulatedGroup(options.group_rank, options.group_size, _settings[-1])


@contextlib.contextmanager
def simulated_group(
    world_size: int, link: Link, rank: int = 0, reductions_in_flight: int = 0
) -> Iterator[SimulatedGroup]:
    """Make this process one of ``world_size`` ranks; yield the default group.

    All groups within it have the same link, adapted to their size. This is right for a mesh of one
    dimension. A mesh of two dimensions would use the link of a node also across nodes.

    Args:
        world_size: the number of simulated ranks.
        link: between the ranks.
        rank: the rank of this process.
        reductions_in_flight: how many reductions may be in flight when one returns (see the
            docstring of this module); 0: they block.

    Raises:
        RuntimeError: if there is a process group already.
        ValueError: if the link has no figures for so many ranks, or the rank is not below
            ``world_size``.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "simulated_group found a process group; call destroy_process_group() first"
        )
    if not 0 <= rank < world_size:
        raise ValueError(
            f"simulated_group got rank {rank}, and world_size {world_size} has ranks 0 to "
            f"{world_size - 1}; give one of those, or a larger world_size"
        )
    link.over(world_size)  # raises if it has no figures for so many ranks
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    _settings.append(Settings(link, reductions_in_flight))
    try:
        dist.init_process_group(BACKEND, rank=rank, world_size=world_size, store=dist.HashStore())
        try:
            yield dist.group.WORLD  # type: ignore[misc]
        finally:
            dist.destroy_process_group()
            for group in _settings[-1].groups:
                group.shutdown()
    finally:
        _settings.pop()
