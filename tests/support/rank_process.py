"""A rank's process: it joins a process group for each call, runs the call and answers.

Both ends of the pipe follow one protocol. For each call the rank receives a `Call`, sends its
answer, receives "leave" when all ranks have answered, and sends "left". It ends when the pipe is
closed.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from bench.harness import hosts
from support import gloo_gathers, nccl_library, shared_gpu
from support.isolation import ProcessState

# For the stacks of a rank whose time is up, and for a dead rank's exit code. Then it is killed.
GRACE_S = 15.0
# fsdp_ext's watchdog names a collective that hangs on a GPU after this time, before the call ends.
GPU_COLLECTIVE_S = 30.0
# Variables with which each rank has a GPU of its own.
OWN_GPU = {"FSDP_EXT_TEST_OWN_GPU": "1"}


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process among the ranks of its pool."""

    rank: int
    world_size: int
    store_port: int
    device: str
    directory: str
    shared: bool  # whether other calls may run in the process
    host: int | None = None  # the first process of its host; None for this host
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the environment

    @property
    def output(self) -> Path:
        """The file with the rank's output in the current call."""
        return Path(self.directory) / f"rank{self.rank}.txt"


@dataclasses.dataclass(frozen=True)
class Call:
    """The next call of all ranks."""

    run_id: str
    timeout_s: float
    function: bytes  # pickled (worker, args)


def main(place: Place, pipe: Connection) -> None:
    """Run calls until the other end closes the pipe."""
    _write_output_to(place.output)
    if place.host is not None:
        hosts.enter(place.host)
    _set_up(place)
    store = _store_of(place)
    state = ProcessState()
    while True:
        try:
            call: Call = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        os.ftruncate(1, 0)
        # For a rank whose parent is gone.
        faulthandler.dump_traceback_later(call.timeout_s + 2 * GRACE_S, exit=True, file=2)
        pipe.send_bytes(pickle.dumps(_answer(place, call, store)))
        # A failed rank stays, so that its peers do not fail for its absence before its error is
        # read. The parent kills it here.
        pipe.recv_bytes()
        dist.destroy_process_group()
        if place.shared:
            state.restore()
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(pickle.dumps(("left", b"")))


def _store_of(place: Place) -> dist.Store:
    if place.host is None:
        return dist.TCPStore("127.0.0.1", place.store_port, is_master=False)
    return dist.TCPStore(hosts.address_of(0), place.store_port, is_master=place.rank == 0)


def _answer(place: Place, call: Call, store: dist.Store) -> tuple[str, bytes]:
    """Return ("result", the pickled result) or ("error", the traceback)."""
    # On the CPU it is longer than the call's own timeout, whose error says more.
    timeout_s = 2 * call.timeout_s + 60 if place.device == "cpu" else GPU_COLLECTIVE_S
    try:
        dist.init_process_group(
            "gloo" if place.device == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore(f"run{call.run_id}", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        worker, args = pickle.loads(call.function)
        return "result", pickle.dumps(worker(*args))
    except BaseException:
        return "error", traceback.format_exc().encode()


def _write_output_to(path: Path) -> None:
    output = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable(2)
    # Writes the stacks of all threads, then does what the signal does by default: it ends the
    # process. It runs without the GIL, so it also works for a rank that is stuck in C++.
    faulthandler.register(signal.SIGUSR1, file=2, chain=True)


def _set_up(place: Place) -> None:
    if place.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA reads it when it is first used
    torch.set_num_threads(1)
    gloo_gathers.install()
    os.environ |= place.variables
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback if place.host is None else hosts.INTERFACE
    os.environ["FSDP_EXT_TEST_DEVICE"] = place.device
    if place.device == "cuda":
        has_own_gpu = OWN_GPU.items() <= place.variables.items()
        if place.world_size > 1 and not has_own_gpu:
            log = f"{place.output}.nccl"
            version = nccl_library.version()
            os.environ |= shared_gpu.variables(place.rank, version, loopback, log)
            os.environ |= place.variables
        torch.cuda.set_device(place.rank if has_own_gpu else 0)
