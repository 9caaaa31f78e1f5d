"""Ranks as threads of one process that take turns, for ``verify`` without other processes.

Note [turns]
A model's forward may draw random numbers, and a process has one generator for all of its threads.
So only one thread runs at any moment. It runs until its next collective, then the next rank has its
turn, with random generators of its own. The order is the same in every run.

The ranks are in a process group whose collectives run on the calling thread: Note [inline groups].
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore

from fsdp_ext.verifier.random_state import random_state

T = TypeVar("T")

BACKEND = "fsdp_ext_turns"

_c10d: Any = _distributed_c10d  # its stubs lack what is used here

_TIMEOUT = timedelta(minutes=30)
_here = threading.local()  # the Turns of each thread


class Turns:
    """Lets one rank run at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._running = 0
        self._offers: dict[int, tuple[str, Any]] = {}
        self._met: list[Any] = []  # the ranks' offers in their last meeting
        self._meetings = 0
        self._ended: set[int] = set()

    def enter(self, rank: int) -> None:
        """Wait for the first turn of ``rank``."""
        with self._changed:
            self._wait_for_turn(rank, "its first turn")

    def meet(self, rank: int, what: str, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of ranks. Meanwhile the others run.

        Args:
            rank: the calling rank.
            what: the ranks' action, for the message if their actions differ.
            value: this rank's value. Others read it until the next meeting.
        """
        with self._changed:
            self._offers[rank] = (what, value)
            meeting = self._meetings
            if len(self._offers) == self.size:
                self._met = [self._offers[each] for each in range(self.size)]
                self._offers = {}
                self._meetings += 1
            else:
                restore = random_state()
                self._pass_on(rank)
                self._wait_for_turn(rank, what)
                restore()
            if self._meetings == meeting:
                ended = min(self._ended)
                raise RuntimeError(f"rank {rank} is in {what}, but rank {ended} has ended.")
            for other, (theirs, _) in enumerate(self._met):
                if theirs != what:
                    raise RuntimeError(
                        f"ranks issued different collectives: rank {rank} is in {what}, and rank "
                        f"{other} in {theirs}. Run the same collectives in the same order."
                    )
            return [offer for _, offer in self._met]

    def leave(self, rank: int) -> None:
        """End the turn of ``rank``, which has no further ones."""
        with self._changed:
            self._ended.add(rank)
            self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        following = [(rank + step) % self.size for step in range(1, self.size + 1)]
        alive = [each for each in following if each not in self._ended]
        # If no rank can run, ranks that wait for an ended rank are told so.
        can_run = [each for each in alive if each not in self._offers] or alive
        if can_run:
            self._running = can_run[0]
            self._changed.notify_all()

    def _wait_for_turn(self, rank: int, what: str) -> None:
        seconds = _TIMEOUT.total_seconds()
        if not self._changed.wait_for(lambda: self._running == rank, seconds):
            raise RuntimeError(
                f"rank {rank} waited {seconds:.0f} s for rank {self._running} to join {what}."
            )


_ProcessGroup: Any = dist.ProcessGroup  # the stubs describe the class of C++ groups


class TurnsGroup(_ProcessGroup):  # type: ignore[misc]
    """The process group of ranks that take turns: Note [turns]."""

    def __init__(self, turns: Turns, rank: int) -> None:
        super().__init__(rank, turns.size)
        self._turns = turns
        self._rank = rank

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """The name under which torch knows the group."""
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    def _meet(self, what: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        # A copy, since the rank may go on and change its tensor before the others have read it.
        return self._turns.meet(self._rank, f"{what} of {tensor.numel()}", tensor.clone())

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """Fill the lists ``outputs`` with the tensors of all ranks."""
        for parts, own in zip(outputs, inputs, strict=True):
            for part, theirs in zip(parts, self._meet("an all-gather", own), strict=True):
                part.copy_(theirs)
        return _done(outputs)

    def _allgather_base(self, output: Any, own: Any, options: Any = None) -> Any:
        self.allgather([output.view(self.size(), own.numel())], [own.view(-1)])
        return _done(output)

    def _reduce_scatter_base(self, output: Any, own: Any, options: Any = None) -> Any:
        """Add up in rank order, in fp32 or fp64: ``csrc/comm/shared_memory/rank_order_sum.h``."""
        offset = self._rank * output.numel()
        parts = [
            whole.view(-1).narrow(0, offset, output.numel())
            for whole in self._meet("a reduce-scatter", own)
        ]
        output.copy_(rank_order_sum(parts).view(output.shape))
        return _done(output)

    # dist calls these since torch 2.15.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        """Replace each tensor with its sum over all ranks."""
        for tensor in tensors:
            tensor.copy_(rank_order_sum(self._meet("an all-reduce", tensor)))
        return _done(tensors)

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        """Replace each tensor with that of the root."""
        for tensor in tensors:
            tensor.copy_(self._meet("a broadcast", tensor)[options.rootRank])
        return _done(tensors)


def _done(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return _c10d._create_work_from_future(future)


def rank_order_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in rank order, in fp32 or wider, rounded once to the dtype of the parts."""
    first = parts[0]
    narrow = first.dtype in (torch.float16, torch.bfloat16)
    total = first.float() if narrow else first.clone()
    for part in parts[1:]:
        total += part
    return total.to(first.dtype)


def run_in_turns(worker: Callable[[], T], size: int) -> list[T]:
    """Call ``worker`` on threads that are ranks, and return the results by rank.

    Each thread has a default process group of its own meanwhile. If ranks raise, the error of the
    one that raised first is raised. The caller restores the random generators.
    """
    from torch.testing._internal.distributed import multi_threaded_pg

    threaded: Any = multi_threaded_pg

    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND,
            lambda store, rank, size, timeout: TurnsGroup(_here.turns, rank),
            devices=["cpu"],
        )
    turns = Turns(size)
    restore = random_state()
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    narrow = torch.get_autocast_dtype("cpu")
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        _here.turns = turns
        turns.enter(rank)
        restore()  # all ranks begin with the generators of the caller
        try:
            with torch.set_grad_enabled(grad), torch.autocast("cpu", narrow, enabled=autocast):
                dist.init_process_group(
                    BACKEND, rank=rank, world_size=size, store=HashStore(), timeout=_TIMEOUT
                )
                results[rank] = worker()
        except BaseException as error:
            errors.append(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            turns.leave(rank)

    with torch.autograd.set_multithreading_enabled(False):
        threaded._install_threaded_pg()  # each thread has its own default group
        _c10d._set_thread_isolation_mode(True)
        try:
            threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            _c10d._set_thread_isolation_mode(False)
            threaded._uninstall_threaded_pg()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
