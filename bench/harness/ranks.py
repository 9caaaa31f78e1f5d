"""Starts the ranks of a benchmark on one host or on two (bench/harness/hosts.py), and ends them.

torch.distributed.run starts those of one host.

torch.distributed.run prints a traceback of its own when it gets a signal, and when a rank exits
with anything but 0. So this module signals the ranks itself: each rank writes its process id into a
directory. A rank always exits with 0, and rank 0 writes the real exit code into that directory.

Note [interruption]: a thread answers SIGINT and SIGTERM; Python's wake-up descriptor tells it of
them. A Python signal handler would not do. It runs in the main thread between two bytecodes, and
the main thread may be in a collective that waits for a rank that has already ended.
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from bench.harness import hosts

DIRECTORY = "FSDP_BENCH_RANKS"  # variable: where ranks write their process ids and exit code
ON_HOSTS = "FSDP_BENCH_HOSTS"  # variable: set if the ranks are on several hosts
STORE_PORT = 29500  # on a host of its own, where no other program has it
# Seconds that a rank has to print its table and write its file before it is killed.
GRACE_S = 10.0
# Of a collective, so that the failure of a rank is noticed. Ranks wait for others that save a large
# model to a slow disk.
TIMEOUT = timedelta(minutes=30)
INTERRUPTED = 130  # the exit code of a process that SIGINT has ended, in a shell

_running: set[Child] = set()
_stopping = threading.Event()


class Child:
    """A process started here, with its ranks if it is torch.distributed.run."""

    def __init__(
        self,
        command: Sequence[str],
        ranks_in: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start `command` in a session of its own, so that Ctrl-C signals only this process.

        Args:
            command: the program and its arguments.
            ranks_in: the folder of the ranks' process ids; None if the process has no ranks.
            variables: to add to the environment.
        """
        if _stopping.is_set():  # another thread is ending this process: start nothing more
            threading.Event().wait()
        self._ranks_in = ranks_in
        self._ended = threading.Event()
        # Ranks of one host communicate over its loopback interface.
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
        environment |= variables or {}
        if ranks_in is not None:
            environment[DIRECTORY] = str(ranks_in)
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        _running.add(self)

    def wait(self) -> int:
        """Wait until the process ends; return the exit code."""
        code = self._process.wait()
        self._ended.set()
        _running.discard(self)
        return code

    def stop(self) -> None:
        """Ask the process, or its ranks, to end, and kill it after `GRACE_S`."""
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


class ChildOnHost(Child):
    """A rank on another host, where its process id is another one. This host runs `nsenter`."""

    def _ranks(self) -> set[int]:
        return set(hosts.children_of(self._process.pid))


def stop_children() -> None:
    """End all children and start no more; runs on the thread of Note [interruption]."""
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
        arguments: the module's arguments.
        ranks: their number, all on this host.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--local-addr", "127.0.0.1", f"--nproc-per-node={ranks}", "-m", module]
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        code = Child([*launcher, *arguments], Path(directory)).wait()
        meant = Path(directory) / "code"
        return int(meant.read_text()) if code == 0 and meant.exists() else code


def start_ranks_on_hosts(module: str, arguments: Sequence[str], ranks: int) -> int:
    """Do as `start_ranks`, but on two hosts, with half of the ranks on each.

    Raises:
        HostsError: if there can be no hosts here.
    """
    with hosts.Hosts() as pair, tempfile.TemporaryDirectory(prefix="bench-") as directory:
        command = [sys.executable, "-m", module, *arguments]
        on_each = ranks // hosts.COUNT
        children = [
            ChildOnHost(
                [*pair.command(rank // on_each), *command],
                Path(directory),
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_RANK": str(rank % on_each),
                    "LOCAL_WORLD_SIZE": str(on_each),
                    "MASTER_ADDR": hosts.address_of(0),
                    "MASTER_PORT": str(STORE_PORT),
                    "GLOO_SOCKET_IFNAME": hosts.INTERFACE,
                    "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns that the hosts have no DNS
                    ON_HOSTS: str(hosts.COUNT),
                },
            )
            for rank in range(ranks)
        ]
        code = _wait_for_all(children)
        meant = Path(directory) / "code"
        return int(meant.read_text()) if code == 0 and meant.exists() else code


def _wait_for_all(children: Sequence[Child]) -> int:
    """Wait until all have ended; return the first exit code that is not 0. Then end the others."""
    first = 0
    with ThreadPoolExecutor(len(children)) as threads:
        for ended in as_completed([threads.submit(child.wait) for child in children]):
            if ended.result() and not first:
                first = ended.result()
                for child in children:
                    child.stop()
    return first


def register(act: Callable[[], object]) -> None:
    """Call `act` on a thread when the process is interrupted (Note [interruption]).

    If `start_ranks` started this process, it can interrupt the process from now on.
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

    It does not go through Python's finalisation: with torch 2.13, while a model still has a process
    group, a thread of gloo may ask for the GIL during finalisation and abort the process.

    Args:
        code: rank 0's is the exit code of the run.
        failed: whether torch.distributed.run has to end the other ranks, which may wait for this
            one.
    """
    with contextlib.suppress(OSError):  # the reader has gone, or the disk is full
        sys.stdout.flush()
        sys.stderr.flush()
    if DIRECTORY in os.environ and not failed:
        if rank() == 0:
            (Path(os.environ[DIRECTORY]) / "code").write_text(str(code))
        code = 0
    os._exit(code)


def under_torchrun() -> bool:
    """Return whether torch.distributed.run has started this process."""
    return "RANK" in os.environ


def rank() -> int:
    """Return this process's rank; 0 without torch.distributed.run."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks; 1 without torch.distributed.run."""
    return int(os.environ.get("WORLD_SIZE", "1")) if under_torchrun() else 1


def on_hosts() -> bool:
    """Return whether `start_ranks_on_hosts` has started this process."""
    return ON_HOSTS in os.environ


def set_rate(rate: str) -> None:
    """Limit the sending rates of both hosts. All ranks call this.

    Raises:
        HostsError: if the kernel has no token bucket.
        ValueError: if it is no rate.
    """
    if os.environ["LOCAL_RANK"] == "0":  # the ranks of a host share its end of the cable
        hosts.set_rate(rate)
    dist.barrier()


def join(device: str) -> torch.device:
    """Create the default process group of all ranks, or of this process alone.

    On the CPU it binds each rank to a core of its own.

    Args:
        device: "cpu" or "cuda".

    Returns:
        the device of this rank.
    """
    on_gpu = device == "cuda"
    if not under_torchrun():
        store = dist.HashStore()
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
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
    """Bind all threads of this rank to one core, as mpirun does.

    Without this, figures depend on whose threads the kernel puts on the same core. With fewer cores
    than ranks it does nothing.
    """
    cores = sorted(os.sched_getaffinity(0))
    place, count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if on_hosts():  # both hosts have the cores of this machine
        place, count = rank(), world_size()
    if count <= len(cores):
        os.sched_setaffinity(0, {cores[place]})


def memory(name: str) -> int:
    """Return a field of /proc/self/status, such as VmRSS, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10  # "kB" means KiB there (proc(5))
    raise LookupError(name)
