"""Runs a function on several ranks of one process group, each rank a process of this machine.

    def worker(x: int) -> int:
        return x + torch.distributed.get_rank()

    assert run_ranks(worker, 2, 40) == [40, 41]

Ranks are forked from a server process that has imported torch once, so a rank starts in
milliseconds with nothing left over from an earlier run. A rank that raises, dies or hangs ends the
run with `RanksFailed`, which carries the ranks' tracebacks and output; every rank is gone when
`run_ranks` returns.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from typing_extensions import TypeVarTuple, Unpack

T = TypeVar("T")
Args = TypeVarTuple("Args")

# What each rank would otherwise import for itself, for seconds. numpy and dynamo are what
# torch.distributed's own FSDP brings in with its first use.
_PRELOAD = ["pytest", "numpy", "torch", "torch.distributed.fsdp", "torch._dynamo"]
# For the stacks of a rank whose time is up, and for a dead rank's exit code; then it is killed.
_GRACE_S = 15.0
_OUTPUT_LINES = 60

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)
_store: dist.TCPStore | None = None
_run_ids = itertools.count()


class RanksFailed(AssertionError):
    """One or more ranks raised, died or hung; the message has each rank's account of it."""


@dataclasses.dataclass(frozen=True)
class _Assignment:
    rank: int
    world_size: int
    store_port: int
    run_id: str
    timeout_s: float
    device: str
    output: Path
    call: bytes  # pickled (worker, args)


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


def run_ranks(
    worker: Callable[[Unpack[Args]], T],
    world_size: int,
    *args: Unpack[Args],
    timeout: float = 120.0,
    device: str = "cpu",
) -> list[T]:
    """Calls `worker(*args)` on every rank of a fresh gloo group and returns the results by rank.

    On "cuda" the group has NCCL for it, too, and all ranks share GPU 0, see `_share_gpu`.

    Args:
        worker: a function that pickle finds by name; it runs with the default process group set up
            and one intra-op thread.
        world_size: number of ranks, at least 1.
        args: what the worker is called with, the same on every rank; must pickle.
        timeout: seconds until ranks that have not finished are ended.
        device: "cpu" or "cuda".

    Raises:
        RanksFailed: a rank raised (its traceback is in the message), ended without a result (its
            exit code is), or had not finished in time (the stacks of its threads are).
    """
    __tracebackhide__ = True  # pytest shows the ranks' tracebacks, not this one
    if world_size < 1:
        raise ValueError(f"run_ranks expects at least one rank but got {world_size}")
    call = pickle.dumps((worker, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        ranks = [
            _start(rank, world_size, timeout, device, Path(directory), call, run_id)
            for run_id in [str(next(_run_ids))]
            for rank in range(world_size)
        ]
        try:
            _collect(ranks, time.monotonic() + timeout)
            _raise_failures(ranks, timeout)
            return [cast(T, pickle.loads(rank.answer[1])) for rank in ranks if rank.answer]
        finally:
            for rank in ranks:
                if rank.process.is_alive():
                    rank.process.kill()
                rank.process.join()
                rank.process.close()
                rank.pipe.close()


def _start(
    rank: int,
    world_size: int,
    timeout: float,
    device: str,
    directory: Path,
    call: bytes,
    run_id: str,
) -> _Rank:
    global _store
    if _store is None:
        _store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = _context.Pipe()
    output = directory / f"rank{rank}.txt"
    assignment = _Assignment(rank, world_size, _store.port, run_id, timeout, device, output, call)
    process = _context.Process(
        target=_rank_main, args=(assignment, theirs), name=f"rank {rank}", daemon=True
    )
    process.start()
    theirs.close()  # so that our end reads end-of-file when the rank dies
    return _Rank(rank, process, ours, output)


def _collect(ranks: Sequence[_Rank], deadline: float) -> None:
    """Waits until every rank has answered and ended well, or one of them has failed."""
    waiting = {rank.pipe: rank for rank in ranks}
    while waiting:
        ready = cast("list[Connection]", wait(list(waiting), max(0.0, deadline - time.monotonic())))
        for rank in [waiting.pop(pipe) for pipe in ready]:
            _receive(rank)
        if any(rank.failure for rank in ranks):
            # What the others have said by now is told too: when a rank dies, its peers' errors
            # are its echo.
            for pipe in wait(list(waiting), 0):
                _receive(waiting.pop(cast(Connection, pipe)))
            return
        if not ready:
            _end_hung(list(waiting.values()))
            return
    # No rank leaves before all have answered, or a collective of a slower one would lose a peer.
    for rank in ranks:
        rank.pipe.send_bytes(b"leave")
    for rank in ranks:
        rank.process.join(max(_GRACE_S, deadline - time.monotonic()))
        if rank.process.exitcode is None:
            _end_hung([rank])
        elif rank.process.exitcode != 0:
            rank.failure = _ending(rank, "after its result, while it left the process group")


def _end_hung(ranks: Sequence[_Rank]) -> None:
    """Has ranks write where they are and end, all at once, lest one is seen to miss another."""
    for rank in ranks:
        rank.hung = True
        rank.failure = "hung"
        os.kill(rank.process.pid, signal.SIGUSR1)
    for rank in ranks:
        rank.process.join(_GRACE_S)


def _receive(rank: _Rank) -> None:
    try:
        rank.answer = pickle.loads(rank.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        rank.process.join(_GRACE_S)
        rank.failure = _ending(rank, "before it had a result")
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


def _raise_failures(ranks: Sequence[_Rank], timeout: float) -> None:
    __tracebackhide__ = True
    failed = [rank for rank in ranks if rank.failure]
    if not failed:
        return
    # A rank that died comes before those that then missed it.
    failed.sort(key=lambda rank: (rank.answer is not None, rank.number))
    head = f"{len(failed)} of {len(ranks)} ranks failed, the others were ended"
    if hung := [str(rank.number) for rank in failed if rank.hung]:
        head = f"ranks {', '.join(hung)} of {len(ranks)} had not finished after {timeout:g} s"
    accounts = [f"rank {rank.number} {rank.failure}{rank.output_tail()}" for rank in failed]
    raise RanksFailed("\n\n".join([head, *accounts]))


def _rank_main(assignment: _Assignment, pipe: Connection) -> None:
    output = os.open(assignment.output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable(output)
    # Writes all threads' stacks, then does what the signal does by default: it ends the process.
    # Runs without the GIL, so also for a rank that is stuck in C++.
    faulthandler.register(signal.SIGUSR1, file=output, chain=True)
    # For a rank whose parent is gone.
    faulthandler.dump_traceback_later(assignment.timeout_s + 2 * _GRACE_S, exit=True, file=output)
    answer = ("error", b"")
    try:
        _join_group(assignment)
        worker, args = pickle.loads(assignment.call)
        answer = ("result", pickle.dumps(worker(*args)))
    except BaseException:
        answer = ("error", traceback.format_exc().encode())
    pipe.send_bytes(pickle.dumps(answer))
    # A rank that failed stays, so that its peers do not fail for want of it before it is heard; it
    # is killed here.
    pipe.recv_bytes()
    dist.destroy_process_group()


def _join_group(assignment: _Assignment) -> None:
    torch.set_num_threads(1)
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    os.environ["FSDP_EXT_TEST_DEVICE"] = assignment.device
    if assignment.device == "cuda":
        _share_gpu(assignment, loopback)
    store = dist.TCPStore("127.0.0.1", assignment.store_port, is_master=False)
    dist.init_process_group(
        "gloo" if assignment.device == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore(f"run{assignment.run_id}", store),
        rank=assignment.rank,
        world_size=assignment.world_size,
        # Longer than ours, which says more.
        timeout=timedelta(seconds=2 * assignment.timeout_s + 60),
    )


def _share_gpu(assignment: _Assignment, loopback: str) -> None:
    """Let several ranks use one GPU, before anything of NCCL runs.

    NCCL refuses two ranks on a GPU of one host, so each rank names a host of its own, and they talk
    over sockets; from 2.30.3 on it can be told to allow it. That is for functional tests alone: it
    says nothing about speed.
    """
    if assignment.world_size > 1 and torch.cuda.nccl.version() >= (2, 30, 3):
        os.environ |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
    elif assignment.world_size > 1:
        os.environ |= {
            "NCCL_HOSTID": f"rank{assignment.rank}",
            "NCCL_NET": "Socket",
            "NCCL_IB_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": loopback,
            "NCCL_MNNVL_ENABLE": "0",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_MAX_CTAS": "2",
            # The transport is asserted from this.
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,NET",
            "NCCL_DEBUG_FILE": f"{assignment.output}.nccl",
        }
    torch.cuda.set_device(0)
