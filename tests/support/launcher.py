"""Runs a function on several ranks of one process group. Each rank is a process of this machine.

    def worker(x: int) -> int:
        return x + torch.distributed.get_rank()

    assert run_ranks(worker, 2, 40) == [40, 41]

Calls that need the same number of ranks share one set of processes, a pool. Each call still has a
process group of its own, and starts from the same process state: support/isolation.py. A rank that
raises, dies or hangs ends the call with `RanksFailed`, which carries the ranks' tracebacks and
output. The pool of a failed call is killed, and the next call starts a new one. Calls that change
what isolation.py cannot restore ask for processes of their own with `fresh=True`.

Ranks are forked from a server process that has imported torch and fsdp_ext once
(support/preloaded.py), so a rank starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
import torch.distributed as dist
from typing_extensions import TypeVarTuple, Unpack

from bench.harness.hosts import Hosts
from support import rank_process
from support.rank_process import GRACE_S, Call, Place
from support.server_path import OF_RANKS

T = TypeVar("T")
Args = TypeVarTuple("Args")

_OUTPUT_LINES = 60
_ENDING_S = 0.3
# Gives every call new processes, to find out whether an earlier call made this one fail.
_ALWAYS_FRESH = os.environ.get("FSDP_EXT_TEST_FRESH", "") not in ("", "0")

_context = multiprocessing.get_context("forkserver")
# Every rank would otherwise spend seconds on these imports. Ranks import a build for GPUs
# themselves, because what it finds when it is imported may be another thing in the server.
_IMPORTS_FOR_RANKS = torch.version.cuda is None
_PRELOAD = (
    ["support.server_path", "support.preloaded"]
    if _IMPORTS_FOR_RANKS
    else ["pytest", "numpy", "torch", "torch.distributed.fsdp", "torch._dynamo"]
)
_context.set_forkserver_preload(_PRELOAD)
_store: dist.TCPStore | None = None
_run_ids = itertools.count()
_pools: dict[int, _Pool] = {}


class RanksFailed(AssertionError):
    """One or more ranks raised, died or hung. The message has each rank's error."""


def run_ranks(
    worker: Callable[[Unpack[Args]], T],
    world_size: int,
    *args: Unpack[Args],
    timeout: float = 120.0,
    device: str = "cpu",
    fresh: bool = False,
    lost: Sequence[int] = (),
    hosts: Hosts | None = None,
    variables: Mapping[str, str] | None = None,
) -> list[T]:
    """Call `worker(*args)` on every rank of a new gloo group and return the results by rank.

    On "cuda" the group has NCCL, too, and processes are always fresh. All ranks share GPU 0, unless
    the variables have rank_process.OWN_GPU.

    Args:
        worker: a function that pickle finds by name. It runs with the default process group set up
            and one intra-op thread.
        world_size: number of ranks, at least 1.
        args: the worker's arguments, the same on every rank. They must pickle.
        timeout: seconds until ranks that have not finished are ended.
        device: "cpu" or "cuda".
        fresh: whether the call has processes of its own. It needs them if it kills a rank, or
            changes what isolation.py cannot restore: resource limits, signal handlers, attributes
            of fsdp_ext, or a cache that holds an answer about this process.
        lost: ranks that are to end without a result. Their results are left out, and processes are
            always fresh.
        hosts: two hosts, each of which gets half of the ranks; None for this one. Processes are
            always fresh.
        variables: variables to set in the environment before CUDA and NCCL are used. Processes are
            always fresh.

    Raises:
        RanksFailed: a rank raised (the message has its traceback), ended without a result (its exit
            code), or had not finished in time (the stacks of its threads).
    """
    __tracebackhide__ = True  # pytest shows the ranks' tracebacks instead of this one
    if world_size < 1:
        raise ValueError(f"run_ranks got {world_size} ranks. Pass at least 1.")
    call = Call(str(next(_run_ids)), timeout, pickle.dumps((worker, args)))
    if fresh or lost or hosts or variables or _ALWAYS_FRESH or device != "cpu":
        pool = _Pool(
            world_size, device, shared=False, lost=lost, hosts=hosts, variables=variables or {}
        )
        with contextlib.closing(pool):
            answers = pool.run(call)
            pool.leave()
    else:
        pool = _pools.pop(world_size, None) or _Pool(world_size, device, shared=True)
        try:
            answers = pool.run(call)
        except BaseException:
            pool.close()
            raise
        _pools[world_size] = pool
    return [cast(T, pickle.loads(answer)) for answer in answers]


def _start_server() -> None:
    """Start the server, if it does not run yet, with this process's `sys.path` for its imports."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(OF_RANKS, os.environ.get("PYTHONPATH", ""))
        environment.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def end_pools() -> None:
    """End the processes of all pools.

    Raises:
        RanksFailed: a rank's process did not end well.
    """
    while _pools:
        _, pool = _pools.popitem()
        with contextlib.closing(pool):
            pool.leave()


@dataclasses.dataclass
class _Rank:
    number: int
    process: Any  # a multiprocessing process of the forkserver context
    pipe: Connection
    output: Path
    answer: tuple[str, bytes] | None = None  # ("result", pickled) or ("error", traceback)
    failure: str | None = None
    hung: bool = False

    def output_tail(self) -> str:
        if not self.output.exists():
            return ""
        lines = self.output.read_text(errors="replace").splitlines()[-_OUTPUT_LINES:]
        return "\n".join(["", "its output:", *lines]) if lines else ""


class _Pool:
    """Processes that run one call after another, each on all of them, until one call fails."""

    def __init__(
        self,
        world_size: int,
        device: str,
        *,
        shared: bool,
        lost: Sequence[int] = (),
        hosts: Hosts | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        global _store
        if _store is None:
            _store = _new_store()
            if _IMPORTS_FOR_RANKS:
                _start_server()
        # Process groups of NCCL tell each other of failures over the store, whatever their prefix.
        self._store = _store if device == "cpu" else _new_store()
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        directory = self._directory.name
        self._calls = 0
        self._lost = lost
        port, given = self._store.port, variables or {}
        on_hosts = [None] * world_size if hosts is None else _places_on(hosts, world_size)
        self._ranks = [
            self._start(Place(rank, world_size, port, device, directory, shared, host, given))
            for rank, host in enumerate(on_hosts)
        ]

    def _start(self, place: Place) -> _Rank:
        ours, theirs = _context.Pipe()
        process = _context.Process(
            target=rank_process.main, args=(place, theirs), name=f"rank {place.rank}", daemon=True
        )
        process.start()
        theirs.close()  # so that our end reads end-of-file when the rank dies
        return _Rank(place.rank, process, ours, place.output)

    def run(self, call: Call) -> list[bytes]:
        """Return what the call pickled on each rank, when all ranks have left its process group."""
        __tracebackhide__ = True
        deadline = time.monotonic() + call.timeout_s
        for rank in self._ranks:
            rank.answer = None
            with contextlib.suppress(BrokenPipeError):  # _receive tells how the rank ended
                rank.pipe.send_bytes(pickle.dumps(call))
        self._collect(deadline, "before it had a result")
        self._raise_failures(call.timeout_s)
        answers = [rank.answer[1] for rank in self._ranks if rank.answer]
        self._forget_lost_ranks()
        # No rank leaves before all have answered: a collective of a slower one needs its peers.
        for rank in self._ranks:
            rank.pipe.send_bytes(b"leave")
        self._collect(
            max(time.monotonic() + GRACE_S, deadline),
            "after its result, while it left the process group",
        )
        self._raise_failures(call.timeout_s)
        self._calls += 1
        return answers

    def _forget_lost_ranks(self) -> None:
        for rank in [rank for rank in self._ranks if rank.number in self._lost]:
            if rank.answer is not None:
                raise RanksFailed(f"rank {rank.number} was to end without a result, but has one")
            rank.process.join(GRACE_S)
            rank.process.close()
            rank.pipe.close()
            self._ranks.remove(rank)

    def leave(self) -> None:
        """Have the processes return and end.

        Raises:
            RanksFailed: a process did not end well.
        """
        __tracebackhide__ = True
        for rank in self._ranks:
            rank.pipe.close()
        for rank in self._ranks:
            rank.process.join(GRACE_S)
            if rank.process.exitcode is None:
                _end_hung([rank])
            elif rank.process.exitcode != 0:
                rank.failure = _ending(rank, "while it ended")
        self._raise_failures(GRACE_S)

    def close(self) -> None:
        """End processes that have not ended by themselves, and remove their output."""
        for rank in self._ranks:
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join()
            rank.process.close()
            rank.pipe.close()
        self._directory.cleanup()

    def _collect(self, deadline: float, when: str) -> None:
        """Wait until every rank has answered, or one of them has failed."""
        waiting = {rank.pipe: rank for rank in self._ranks}
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            ready = cast("list[Connection]", wait(list(waiting), left))
            for rank in [waiting.pop(pipe) for pipe in ready]:
                _receive(rank, when)
                if rank.number in self._lost and rank.answer is None:
                    rank.failure = None
            if any(rank.failure for rank in self._ranks):
                # The message also has the other ranks' answers so far: when a rank dies, its peers'
                # errors are the echo.
                for pipe in wait(list(waiting), 0):
                    _receive(waiting.pop(cast(Connection, pipe)), when)
                # Peers of a rank that exits may notice that before its process has ended.
                for rank in waiting.values():
                    rank.process.join(_ENDING_S)
                    if rank.process.exitcode is not None and rank.number not in self._lost:
                        _receive(rank, when)
                return
            if not ready:
                _end_hung(list(waiting.values()))
                return

    def _raise_failures(self, timeout: float) -> None:
        __tracebackhide__ = True
        failed = [rank for rank in self._ranks if rank.failure]
        if not failed:
            return
        # A rank that died comes before ranks that then missed it.
        failed.sort(key=lambda rank: (rank.answer is not None, rank.number))
        head = f"{len(failed)} of {len(self._ranks)} ranks failed, the others were ended"
        if hung := [str(rank.number) for rank in failed if rank.hung]:
            ranks = ", ".join(hung)
            head = f"ranks {ranks} of {len(self._ranks)} had not finished after {timeout:g} s"
        accounts = [f"rank {rank.number} {rank.failure}{rank.output_tail()}" for rank in failed]
        if self._calls:
            accounts.append(
                f"These processes had run {self._calls} other calls before. With "
                "FSDP_EXT_TEST_FRESH=1 every call has processes of its own."
            )
        raise RanksFailed("\n\n".join([head, *accounts]))


def _new_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _places_on(hosts: Hosts, world_size: int) -> list[int | None]:
    return [hosts.pids[rank * len(hosts.pids) // world_size] for rank in range(world_size)]


def _end_hung(ranks: Sequence[_Rank]) -> None:
    """Have ranks write their stacks and end, all at once, so that none reports another's end."""
    for rank in ranks:
        rank.hung = True
        rank.failure = "hung"
        os.kill(rank.process.pid, signal.SIGUSR1)
    for rank in ranks:
        rank.process.join(GRACE_S)


def _receive(rank: _Rank, when: str) -> None:
    try:
        rank.answer = pickle.loads(rank.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        rank.process.join(GRACE_S)
        rank.failure = _ending(rank, when)
    else:
        kind, content = cast("tuple[str, bytes]", rank.answer)
        if kind == "error":
            rank.failure = f"raised:\n{content.decode()}"


def _ending(rank: _Rank, when: str) -> str:
    code = rank.process.exitcode
    if code is None:
        return f"did not end {when}"
    if code < 0:
        return f"ended by {signal.Signals(-code).name} {when}"
    return f"ended with exit code {code} {when}"
