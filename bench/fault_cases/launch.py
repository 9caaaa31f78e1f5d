"""Runs a fault on two ranks, each a process of its own, and says what happened on each.

The processes are forked from a server that has imported torch, so each starts in milliseconds. A
rank that does not finish is ended by an alarm of its own, so none outlives an interrupted run.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import signal
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from bench.fault_cases.case import RANKS, Case, Fault, WrongNumbers

TIMEOUT = timedelta(seconds=5)  # of the process group
LIMIT_S = 20  # after which a rank counts as hanging
# From worst to best. The outcome of a fault is the worst outcome of a rank.
OUTCOMES = ("wrong numbers", "hangs", "crashes", "raises", "right")
BAD = ("wrong numbers", "hangs", "crashes")  # nothing is said
_PRELOAD = ["bench.faults", "fsdp_ext", "torch._dynamo", "torch.distributed.fsdp"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)
_names = itertools.count()


@dataclass(frozen=True)
class Outcome:
    """The result of a rank: one of `OUTCOMES`, the time until then, and the message."""

    what: str
    seconds: float
    message: str = ""


HANGS = Outcome("hangs", LIMIT_S, f"ended after {LIMIT_S} s")


class Launcher:
    """Starts ranks. It serves the store through which they find each other, as torchrun does."""

    def __init__(self) -> None:
        """Wait until the server that forks ranks has imported everything."""
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        first = _context.Process(target=int)
        first.start()
        first.join()

    def run(self, fault: Fault, system: str, transport: str) -> dict[str, Any]:
        """Provoke a fault on two new ranks and return its row."""
        place = Place(system, transport, str(next(_names)), self._store.port)
        ranks = [RankProcess(fault, place, rank) for rank in range(RANKS)]
        deadline = time.monotonic() + LIMIT_S + 10
        waiting = list(ranks)
        while waiting and time.monotonic() < deadline:
            ready = wait([each.pipe for each in waiting], deadline - time.monotonic())
            for each in waiting:
                if each.pipe in ready:
                    each.listen()
            waiting = [each for each in waiting if each.outcome is None]
        outcomes = {
            rank: each.outcome or HANGS for rank, each in enumerate(ranks) if rank not in fault.lost
        }
        for each in ranks:
            each.end()
        row = {"fault": fault.name, "kind": fault.kind, "system": system, "transport": transport}
        found = summary(outcomes)
        return {**row, **found, "open": fault.open if found["what"] in BAD else ""}


@dataclass(frozen=True)
class Place:
    """What ranks train with, and the name and port by which they find each other in the store."""

    system: str
    transport: str
    name: str
    port: int


class RankProcess:
    """A rank, seen from outside."""

    def __init__(self, fault: Fault, place: Place, rank: int) -> None:
        self.pipe, theirs = _context.Pipe()
        self._process = _context.Process(
            target=_run_rank, args=(fault, place, rank, theirs), daemon=True
        )
        self._process.start()
        theirs.close()  # so that our end reads end-of-file when the rank ends
        self._since = time.monotonic()
        self.outcome: Outcome | None = None

    def listen(self) -> None:
        """Read the rank's report: when the fault begins, or its outcome. It may have ended."""
        try:
            said = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            seconds = time.monotonic() - self._since
            self._process.join(5)
            self.outcome = _outcome_of(self._process.exitcode or 0, seconds)
            return
        if isinstance(said, float):
            self._since = said
        else:
            self.outcome = Outcome(**said)

    def end(self) -> None:
        """Let the rank leave, or end the rank."""
        self.pipe.close()
        self._process.join(2)
        self._process.kill()


def summary(outcomes: dict[int, Outcome]) -> dict[str, Any]:
    """Return the outcome of a fault, from the outcomes of its ranks.

    The message is that of the first rank that stopped with the worst outcome, and the time is that
    of the last rank.
    """
    worst = min((each.what for each in outcomes.values()), key=OUTCOMES.index)
    first = min(
        (each for each in outcomes.values() if each.what == worst), key=lambda each: each.seconds
    )
    return {
        "what": worst,
        "seconds": max(each.seconds for each in outcomes.values()),
        "message": first.message,
        "ranks": {str(rank): asdict(each) for rank, each in outcomes.items()},
    }


def _outcome_of(exit_code: int, seconds: float) -> Outcome:
    """Return the outcome of a rank that ended without reporting one."""
    if exit_code == -signal.SIGALRM:
        return HANGS
    ending = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
    return Outcome("crashes", seconds, f"the process ended with {ending}")


# - On a rank


def _run_rank(fault: Fault, place: Place, rank: int, pipe: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.PrefixStore(place.name, dist.TCPStore("127.0.0.1", place.port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    dist.barrier()
    signal.alarm(LIMIT_S)
    outcome = provoke(fault, Case(place.system, place.transport, pipe.send))
    pipe.send(asdict(outcome))
    if outcome.what in ("right", "wrong numbers"):
        pipe.poll(LIMIT_S)  # the other rank may still need this one
    # An exception ends the process of a script, too. The other rank may notice this way.
    os._exit(0)


def silence() -> None:
    """Drop a rank's output: warnings, and C++ messages before it aborts."""
    if "FSDP_BENCH_SHOW" not in os.environ:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)


def provoke(fault: Fault, case: Case) -> Outcome:
    """Provoke a fault on this rank, and return the outcome."""
    torch.manual_seed(0)  # all ranks make the same parameters
    case.begin()
    try:
        fault.provoke(case)
    except WrongNumbers as wrong:
        return Outcome("wrong numbers", time.monotonic() - case.since, str(wrong))
    except Exception as error:
        seconds = time.monotonic() - case.since
        first_line = (str(error).strip() or "no message").splitlines()[0]
        return Outcome("raises", seconds, f"{type(error).__name__}: {first_line}")
    return Outcome("right", time.monotonic() - case.since)
