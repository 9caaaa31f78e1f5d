"""A process group of many simulated ranks in one process, for PyTorch's FSDP2, FSDP1 and DDP.

    with simulated_group(world_size=64, link=H100_CLUSTER) as group:
        fully_shard(model, mesh=init_device_mesh("cpu", (64,)))

What `Simulated` is to fsdp_ext, over the same `Link`: each collective takes alpha + S / beta
(simulated), the part that this rank brings itself arrives, and nothing comes from anyone else, so
losses, gradients and parameters mean nothing.

A group is one wire, as a NCCL communicator is: its collectives run one after another, on a thread
of the group's own. Ours has two, for gathers and for reductions (csrc/core/lanes.h), which is what
`FSDPModule.set_separate_reduce_scatter_group` gives to FSDP2. A collective ends at a time that is
known when it is issued, the later of now and the end of the one before it, plus what it takes: how
late the thread comes back delays whoever waits, never the next collective. Ours starts the next one
when its thread comes to it, so what this errs by is in favour of the peer.

What a CPU can show of the peers, and what not. FSDP1 and FSDP2 hide communication by CUDA streams,
where `work.wait()` holds up a stream and not the host. On the host there are none:
- FSDP1 waits for each collective where it issues it, and so hides nothing.
- FSDP2 does the same by default, but hides gathers if asked: `_set_unshard_async_op(True)`, and
  `set_modules_to_forward_prefetch`, which gathers in the same order as its default does on a GPU
  (its docstring); backward prefetches by itself. It still waits for each reduction where it issues
  it.
- DDP hides its all-reduces, as it does anywhere.
- `reductions_in_flight` says what streams would do instead: a reduction returns when the one that
  many before it has ended, which is FSDP2's rule on a GPU (`set_reduce_scatter_max_input_buffers`,
  1 by default), and `group.synchronize()` has to end each step. The host's part of FSDP2 is then
  its real one; only the waits are modelled. It reads gradients before they would have come, which
  nothing here depends on.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import random
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
    """What groups are made with."""

    link: Link
    # How many reductions may be under way when one returns to the caller; 0: they block.
    reductions_in_flight: int = 0
    groups: list[SimulatedGroup] = field(default_factory=list)  # that were made


@dataclass(frozen=True)
class Collective:
    """One that was issued: what it was, and when (simulated), by time.monotonic()."""

    operation: str
    nbytes: int  # of all ranks together
    issued: float
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """What it takes on the wire (simulated)."""
        return self.end - self.start


@dataclass(frozen=True)
class Message:
    """What the wire has to do for a collective."""

    end: float
    moves: list[tuple[Tensor, Tensor]]  # from, to
    results: list[Tensor]
    done: Future[list[Tensor]]


class Wire:
    """A thread on which collectives run in order, each until its time has come."""

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
        """Queue a collective that takes so long; return it, and what has the results at its end."""
        now = time.monotonic()
        start = max(now, self._free_at)
        self._free_at = start + seconds
        done: Future[list[Tensor]] = Future()
        self._queue.put(Message(self._free_at, moves, results, done))
        return Collective(operation, nbytes, now, start, self._free_at), done

    def close(self) -> None:
        """End the thread, after all that was issued."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # else this thread sleeps up to 50 us longer than it asks for
            ctypes.CDLL(None).prctl(SET_TIMER_SLACK, 1)
        late = 0.0
        while (message := self._queue.get()) is not None:
            with torch.no_grad():
                for source, destination in message.moves:
                    destination.copy_(source)
            late = _sleep_until(message.end, late)
            message.done.set_result(message.results)
            del message  # its tensors, before the next one comes


def _sleep_until(moment: float, late: float) -> float:
    """Sleep; ``late`` is by how much sleeps were longer than asked for. Return what it is now."""
    asked = moment - late
    left = asked - time.monotonic()
    if left > 0:
        time.sleep(left)
        now_late = min(100e-6, time.monotonic() - asked)
        late = now_late if now_late < late else late + (now_late - late) / 8
    while time.monotonic() < moment:
        time.sleep(0)  # lets others have the GIL
    return late


class SimulatedGroup(dist.ProcessGroup):
    """One of many ranks, none of the others of which is there.

    Attributes:
        link: as this number of ranks sees it; of the collectives to come, another may be set.
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
        self._late = random.Random(0)
        self._reductions: list[Future[list[Tensor]]] = []
        self._last: Future[list[Tensor]] | None = None
        self._wire = Wire(f"{BACKEND} wire")

    # - What a process group is asked for

    def rank(self) -> int:
        """Return this rank."""
        return self._rank

    def size(self) -> int:
        """Return how many ranks there would be."""
        return self._size

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return BACKEND

    @property
    def pg_name(self) -> str:
        """The name under which torch.distributed knows it."""
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        """The same."""
        return self.pg_name

    @property
    def groups(self) -> tuple[SimulatedGroup, ...]:
        """All that were made within the same ``simulated_group``, this one among them."""
        return tuple(self._groups)

    def synchronize(self) -> None:
        """Wait until all that was issued has ended, on this group and on all others."""
        for group in self._groups:
            if group._last is not None:
                group._last.wait()
            group._reductions.clear()

    def shutdown(self) -> None:
        """End the wire's thread."""
        self._wire.close()

    # - Collectives

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Gather into one tensor, in which this rank's part arrives."""
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
        """Gather into lists of tensors, a rank's each: what ranks tell each other when set up.

        All say what this one says, else nobody could read it.
        """
        moves = [(i, o) for i, row in zip(inputs, outputs, strict=True) for o in row]
        whole = [o for _, o in moves]
        return _work(self._issue(GATHER, whole, moves, whole))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduce into this rank's segment, which is its own part of the sum."""
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
        """Reduce lists of tensors, a rank's each."""
        moves = [(row[self._rank], o) for row, o in zip(inputs, outputs, strict=True)]
        whole = [tensor for row in inputs for tensor in row]
        return self._reduction(self._issue(REDUCE, whole, moves, outputs))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Sum in place: a reduction and a gather, alpha + 2 S / beta, as `Link` has it."""
        return self._reduction(self._issue(ALL_REDUCE, tensors, [], tensors))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """The same of several tensors, as one message."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Send to all; what this rank has stays as it is."""
        return _work(self._issue("broadcast", tensors, [], tensors))

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all, which are there at once."""
        return _work(self._issue("barrier", [], [], []))

    # What earlier versions of torch, such as 2.11, call them.
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
        seconds *= 1 + self.link.jitter * self._late.expovariate(1.0)
        for source, destination in moves:
            if source.numel() != destination.numel():
                raise ValueError(
                    f"{operation} of {self._size} ranks expects a part of {destination.numel()} "
                    f"elements but got {source.numel()}; the whole has that of each rank"
                )
        # FSDP2's gathers are in place.
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
        """Return this rank's part of what all have."""
        flat = whole.view(-1)
        numel = flat.numel() // self._size
        return flat.narrow(0, self._rank * numel, numel)


def _work(done: Future[list[Tensor]]) -> dist.Work:
    return _create_work_from_future(done)


_settings: list[Settings] = []  # of the simulated_group that is open


def _create(options: Any, _backend_options: Any) -> SimulatedGroup:
    if not _settings:
        raise RuntimeError(
            f"backend '{BACKEND}' expects a link but got none; "
            "use simulated_group(world_size, link)"
        )
    return SimulatedGroup(options.group_rank, options.group_size, _settings[-1])


@contextlib.contextmanager
def simulated_group(
    world_size: int, link: Link, rank: int = 0, reductions_in_flight: int = 0
) -> Iterator[SimulatedGroup]:
    """Make this process one of ``world_size`` ranks; yield the default group.

    Groups that are made within it have the same link, each by its size. So a mesh of one dimension
    is as it should be; one of two would have the link of a node across nodes.

    Args:
        world_size: how many ranks there would be.
        link: what would connect them.
        rank: that this process is.
        reductions_in_flight: how many reductions may be under way when one returns (this module's
            docstring); 0: they block.

    Raises:
        RuntimeError: if there is a process group already.
        ValueError: if the link's figures are not of so many ranks, or the rank is none of them.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "simulated_group expects no process group but there is one; destroy it before"
        )
    if not 0 <= rank < world_size:
        raise ValueError(
            f"simulated_group expects a rank from 0 to {world_size - 1} but got {rank}; give one "
            "of those, or a larger world_size"
        )
    link.over(world_size)  # raises if it has no figures of so many
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
