"""Ranks of one host: started through torch.distributed.run, and ended without its help.

torch.distributed.run answers a signal, and a rank that ends with anything but 0, with a traceback
of its own. So ranks that were started here are signalled here (each leaves its process id in a
directory that it is told), end with 0 on purpose, and leave there what exit code they mean.

Note [interruption]: what answers SIGINT and SIGTERM is a thread, which Python's wake-up descriptor
tells of them. Python itself runs handlers in the main thread between two bytecodes, and that one
may be in a collective that waits for a rank which has ended already.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

DIRECTORY = "FSDP_BENCH_RANKS"  # where a rank leaves its process id and its exit code
# Ranks that are asked to end and do not are killed; they have a table to print and a file to write.
GRACE_S = 10.0
TIMEOUT = timedelta(minutes=5)  # of a collective, so that a rank that has failed is found out
INTERRUPTED = 130  # what a shell calls a process that SIGINT has ended

_running: set[Child] = set()
_stopping = threading.Event()


class Child:
    """A process of ours, with the ranks under it if it is torch.distributed.run."""

    def __init__(self, command: Sequence[str], ranks_in: Path | None = None) -> None:
        """Start `command`, in a session of its own: a terminal's Ctrl-C comes to us alone.

        Args:
            command: the program and its arguments.
            ranks_in: where ranks leave their process ids; None if the process has no ranks.
        """
        if _stopping.is_set():  # this thread is behind the one that ends the process
            threading.Event().wait()
        self._ranks_in = ranks_in
        self._ended = threading.Event()
        # Ranks of one host need no more than its loopback.
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
        if ranks_in is not None:
            environment[DIRECTORY] = str(ranks_in)
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        _running.add(self)

    def wait(self) -> int:
        """Wait for its end; return the exit code."""
        code = self._process.wait()
        self._ended.set()
        _running.discard(self)
        return code

    def stop(self) -> None:
        """Ask the process or its ranks to end, and kill what has not ended in time."""
        asked: set[int] = set()
        deadline = time.monotonic() + GRACE_S
        while not self._ended.wait(0.05):
            late = time.monotonic() > deadline
            there = self._ranks()
            for process in there if late else there - asked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL if late else signal.SIGTERM)
            asked |= there
            if late:
                self._process.kill()

    def _ranks(self) -> set[int]:
        if self._ranks_in is None:
            return {self._process.pid}
        texts = [file.read_text() for file in self._ranks_in.glob("rank*")]
        return {int(text) for text in texts if text}


def stop_children() -> None:
    """End what was started here, and start nothing more; by the thread of Note [interruption]."""
    _stopping.set()
    for child in list(_running):
        child.stop()


def stopping() -> bool:
    """Return whether the process was interrupted."""
    return _stopping.is_set()


def start_ranks(module: str, arguments: Sequence[str], ranks: int) -> int:
    """Run `python -m module arguments` on several ranks; return the exit code.

    Args:
        module: calls `register` first, and `leave` at its end.
        arguments: its own.
        ranks: how many, all on this host.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--local-addr", "127.0.0.1", f"--nproc-per-node={ranks}", "-m", module]
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        code = Child([*launcher, *arguments], Path(directory)).wait()
        meant = Path(directory) / "code"
        return int(meant.read_text()) if code == 0 and meant.exists() else code


def register(act: Callable[[], object]) -> None:
    """Call `act` on a thread when the process is interrupted (Note [interruption]).

    Where `start_ranks` has started this process, it can interrupt it from here on.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)

    def wait() -> None:
        while os.read(reading, 1)[0] not in (signal.SIGINT, signal.SIGTERM):
            pass
        act()

    threading.Thread(target=wait, name="interruption", daemon=True).start()
    if DIRECTORY in os.environ:
        own = Path(os.environ[DIRECTORY]) / f"rank{os.environ['RANK']}"
        own.write_text(str(os.getpid()))


def leave(code: int, failed: bool = False) -> NoReturn:
    """End this process at once, with `code` as the exit code of the run.

    Args:
        code: what the rank 0 leaves is that of the run.
        failed: other ranks may wait for this one, so torch.distributed.run is to end them.

    Not through Python's end: where a model still holds a process group, a thread of gloo's that
    asks for the GIL meanwhile aborts the process (seen with torch 2.13).
    """
    with contextlib.suppress(OSError):  # nobody reads any more, or nothing can be written
        sys.stdout.flush()
        sys.stderr.flush()
    if DIRECTORY in os.environ and not failed:
        if rank() == 0:
            (Path(os.environ[DIRECTORY]) / "code").write_text(str(code))
        code = 0
    os._exit(code)


def under_torchrun() -> bool:
    """Return whether this process is a rank of torch.distributed.run's."""
    return "RANK" in os.environ


def rank() -> int:
    """Return this process's rank; 0 if it is by itself."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return how many ranks there are; 1 if this process is by itself."""
    return int(os.environ.get("WORLD_SIZE", "1")) if under_torchrun() else 1


def join(device: str) -> torch.device:
    """Make the default process group: of all ranks, or of this process alone.

    Args:
        device: "cpu" or "cuda".

    Returns:
        where this rank computes. On the host each rank is bound to a core of its own.
    """
    on_gpu = device == "cuda"
    if not under_torchrun():
        store = dist.HashStore()
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    place = torch.device("cpu")
    if on_gpu:
        local = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
    else:
        bind_to_core()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    return place


def bind_to_core() -> None:
    """Keep this rank of torchrun's, all its threads, on a core of its own, as mpirun does.

    Else figures depend on which ranks' threads the kernel happens to put on one core. Where there
    are fewer cores than ranks, nothing is bound.
    """
    cores = sorted(os.sched_getaffinity(0))
    if int(os.environ["LOCAL_WORLD_SIZE"]) <= len(cores):
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"])]})
