"""How the ranks of a group exchange addresses before they connect, and which of them have ended."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fsdp_ext import _C
from fsdp_ext._build_info import VERSION

# The beginning of an offer: a random number, then the version of fsdp_ext.
_RANDOM_BYTES = 16
_VERSION_BYTES = 32

_PROCESS_KEY = "fsdp_ext/process"

# Seconds between two looks at the store. The intervals grow while nothing arrives.
SHORTEST_PAUSE = 0.001
LONGEST_PAUSE = 0.05
# Seconds between two looks at whether a rank's process still exists.
_PROCESS_CHECK_INTERVAL = 0.2
# Seconds between two looks at whether the store still answers.
_STORE_CHECK_INTERVAL = 0.5
# Seconds within which a process that has closed its sockets leaves /proc.
_EXIT_DELAY = 1.0

# The process that announced itself, by group.
_announced: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def backend_name(group: dist.ProcessGroup, kind: str = "cpu") -> str | None:
    """Return the name of the group's backend for devices of a kind; None if there is none.

    A group may have several backends, and has by default. `dist.get_backend` then returns no
    backend's name. The name is "" if a backend that is written in Python has none.
    """
    try:
        backend = group._get_backend(torch.device(kind))
    except RuntimeError:
        return None
    # A wrapper returns the name of the backend in it.
    name: str = getattr(backend, "name", lambda: "")()
    return name


def machine() -> str:
    """Return an identifier of this machine that stays the same until it boots; "" if unknown.

    Containers of one machine have the same identifier. A host name would not do: network namespaces
    share it, and two machines may have one name.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Return the group's store; None if it has none."""
    backend = backend_name(group) or dist.get_backend(group)
    if backend == "fake":
        return None
    store: Store | None = dist.distributed_c10d._get_process_group_store(group)
    return store


def announce_process(group: dist.ProcessGroup) -> None:
    """Tell the other ranks which process this rank is, so that they notice when it ends.

    Nothing connects the ranks before the first forward. Until then, a rank that has ended is known
    by its process alone. So every rank writes its process into the store when it shards a module.
    It does not wait for other ranks.
    """
    if group in _announced:
        return
    _announced[group] = os.getpid()
    store = store_of(group) if group.size() > 1 else None
    if store is None:
        return
    # After an error the others only wait longer.
    with contextlib.suppress(RuntimeError):
        store.set(f"{_PROCESS_KEY}/{dist.get_rank(group)}", _C.process_identity().hex())


def processes_of(group: dist.ProcessGroup) -> dict[int, bytes]:
    """Return the processes of the group's ranks that have announced theirs, by global rank."""
    store = store_of(group) if group.size() > 1 else None
    found: dict[int, bytes] = {}
    if store is None:
        return found
    for index, rank in enumerate(dist.get_process_group_ranks(group)):
        identity = read_process(store, index)
        if identity is not None:
            found[rank] = identity
    return found


def read_process(store: Store, index: int) -> bytes | None:
    """Return the process that the rank at `index` has announced; None if it is unknown."""
    key = f"{_PROCESS_KEY}/{index}"
    if not store.check([key]):
        return None
    try:
        identity = bytes.fromhex(store.get(key).decode("ascii"))
        _C.ended_process(identity)  # raises if it is not a process
    except (ValueError, RuntimeError):
        return None
    return identity


class Rendezvous:
    """One exchange of the ranks of a group, over the group's store, before they connect.

    Every offer contains a random number, and all later keys contain a hash of all offers. So
    entries that an earlier attempt, or another group of the same ranks, has left in the store are
    never mistaken for this attempt's. Ranks in different attempts time out with an error.

    Args:
        group: the ranks. All of them make a Rendezvous.
        offer: this rank's first message to the others.
        timeout: the longest wait for another rank in each exchange.
    """

    def __init__(self, group: dist.ProcessGroup, offer: bytes, timeout: timedelta) -> None:
        store = store_of(group)
        if store is None:
            backend = backend_name(group) or dist.get_backend(group)
            raise RuntimeError(
                f"ranks connect through their process group's store, but backend '{backend}' has "
                "none. Use gloo, or leave the transport out."
            )
        announce_process(group)
        if _announced[group] != os.getpid():
            raise RuntimeError(
                f"this process was forked off that of rank {dist.get_rank()}, and a fork cannot "
                "connect to the other ranks. Use the model only in the process that sharded it, or "
                "start the other process with 'spawn' (in a DataLoader, "
                "multiprocessing_context='spawn')."
            )
        self._store = store
        self._timeout = timeout
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group)
        self._global_rank = self.ranks[self.rank]
        self._processes: dict[int, bytes] = {}
        self._answered = time.monotonic()  # when the store did so last
        self._own_key = f"fsdp_ext/offer/{self.rank}"
        self._set(self._own_key, os.urandom(_RANDOM_BYTES) + _version() + offer)
        found = self._get_all("fsdp_ext/offer")
        self._check_versions(found)
        self.offers = [value[_RANDOM_BYTES + _VERSION_BYTES :] for value in found]
        self._attempt = hashlib.sha256(b"".join(found)).hexdigest()

    def exchange(self, what: str, value: bytes) -> list[bytes]:
        """Return the values of all ranks, in order of rank.

        Args:
            what: a name for this exchange, the same on all ranks.
            value: this rank's value.

        Raises:
            RuntimeError: if a rank has ended or does not come within the timeout; the message names
                it.
        """
        prefix = f"fsdp_ext/{self._attempt}/{what}"
        self._set(f"{prefix}/{self.rank}", value)
        values = self._get_all(prefix)
        self._store.delete_key(self._own_key)  # all ranks have read this rank's offer
        # A rank that is early for the next rendezvous must not find the offers of this one.
        self._set(f"{prefix}/left/{self.rank}", b"left")
        self._get_all(f"{prefix}/left")
        self._delete_keys(prefix)
        return values

    def check_equal(self, texts: Sequence[str], what: str, advice: str) -> None:
        """Check that all ranks ask for the same setting.

        Args:
            texts: the setting that each rank asks for, in order of rank.
            what: the name of the setting.
            advice: a sentence for the message.
        """
        mine = texts[self.rank]
        for rank, text in zip(self.ranks, texts, strict=True):
            if text != mine:
                raise RuntimeError(
                    f"rank {self._global_rank} asks for {what} {mine}, and rank {rank} for {text}. "
                    f"{advice}"
                )

    def private_store(self) -> Store:
        """Return a part of the group's store that only the ranks of this rendezvous use."""
        return PrefixStore(f"fsdp_ext/{self._attempt}", self._store)

    def _check_versions(self, offers: list[bytes]) -> None:
        mine = VERSION[:_VERSION_BYTES]
        for rank, offer in zip(self.ranks, offers, strict=True):
            theirs = offer[_RANDOM_BYTES:][:_VERSION_BYTES].decode("ascii", "replace").strip()
            if not (theirs and theirs.isascii() and theirs.isprintable()):
                theirs = "of another version"
            if theirs != mine:
                raise RuntimeError(
                    f"rank {self._global_rank} runs fsdp_ext {mine} and rank {rank} runs fsdp_ext "
                    f"{theirs}. Install one version on all ranks."
                )

    # - The store

    def _set(self, key: str, value: bytes) -> None:
        try:
            self._store.set(key, value.hex())
        except RuntimeError as error:
            self._raise_lost_store(error)

    def _delete_keys(self, prefix: str) -> None:
        """Delete the keys of an exchange if all others have left, so that nobody waits for them."""
        with contextlib.suppress(RuntimeError):  # after an error they only stay
            if self._store.add(f"{prefix}/done", 1) == len(self.ranks):
                for index in range(len(self.ranks)):
                    self._store.delete_key(f"{prefix}/{index}")
                    self._store.delete_key(f"{prefix}/left/{index}")
                self._store.delete_key(f"{prefix}/done")

    def _get_all(self, prefix: str) -> list[bytes]:
        """Return the values of all ranks, in order of rank.

        Another thread asks the store. If the network to it is down, a call of the store does not
        return, whatever its timeout is.
        """

        def get_all() -> list[bytes]:
            return [self._get(f"{prefix}/{index}", index) for index in range(len(self.ranks))]

        self._answered = time.monotonic()
        values: Future[list[bytes]] = Future()
        threading.Thread(target=_run, args=(get_all, values), daemon=True).start()
        while True:
            try:
                return values.result(_STORE_CHECK_INTERVAL)
            except NotDone:
                silent = time.monotonic() - self._answered
                if silent >= self._timeout.total_seconds() + 2 * _STORE_CHECK_INTERVAL:
                    raise RuntimeError(
                        f"rank {self._global_rank}: the process group's store has not answered for "
                        f"{silent:.0f} s. In most jobs rank 0 serves it. That process, or the "
                        "network to it, may be down."
                    ) from None

    def _get(self, key: str, index: int) -> bytes:
        """Return a value of the rank at `index` of the group, when it is there."""
        try:
            self._wait(key, index)
            text = self._store.get(key)
        except dist.DistError as error:
            self._raise_lost_store(error)
        try:
            return bytes.fromhex(text.decode("ascii"))
        except ValueError as error:
            raise RuntimeError(
                f"rank {self._global_rank} found something else than a message of rank "
                f"{self.ranks[index]} in the process group's store, at '{key}'. Use a store of its "
                "own for each job."
            ) from error

    def _wait(self, key: str, index: int) -> None:
        """Wait for a key of the rank at `index`. Store.wait would not notice that the rank ends."""
        looked = 0.0
        for waited in waiting():
            if self._store.check([key]):
                return
            self._answered = time.monotonic()
            if waited - looked >= _PROCESS_CHECK_INTERVAL:
                looked = waited
                if index not in self._processes:
                    identity = read_process(self._store, index)
                    if identity is not None:
                        self._processes[index] = identity
                process = self._ended_process(index)
                if process is not None and not self._store.check([key]):
                    self._raise_ended(index, process)
            if waited >= self._timeout.total_seconds():
                raise RuntimeError(
                    f"rank {self._global_rank} waited {self._timeout.total_seconds():.0f} s for "
                    f"rank {self.ranks[index]} to begin the first forward, in which all ranks "
                    "connect. Run the same model on all ranks."
                )

    def _raise_lost_store(self, error: RuntimeError) -> NoReturn:
        """Raise an error that names a rank that has ended, or else says that the store is gone."""
        deadline = time.monotonic() + _EXIT_DELAY
        while time.monotonic() < deadline and self._processes:
            for index in self._processes:
                if (process := self._ended_process(index)) is not None:
                    self._raise_ended(index, process)
            time.sleep(LONGEST_PAUSE)
        raise RuntimeError(
            f"rank {self._global_rank} cannot reach the process group's store any more: "
            f"{plain_text(error)}. The process that served it, often rank 0, has ended. Its last "
            "output may say why."
        ) from error

    # - Ranks that have ended

    def _ended_process(self, index: int) -> int | None:
        """Return the process id of a rank that is known to have ended."""
        identity = self._processes.get(index)
        return None if identity is None else _C.ended_process(identity)

    def _raise_ended(self, index: int, process: int) -> NoReturn:
        raise RuntimeError(
            f"rank {self._global_rank}: rank {self.ranks[index]} (process {process}) has ended "
            "before or during its first forward, in which all ranks connect. Its last output may "
            "say why."
        )


def waiting() -> Iterator[float]:
    """Yield the seconds since the first look, with growing pauses between looks.

    Each pause is about a fifth of the time so far, so the caller is at most that much late.
    """
    start = time.monotonic()
    pause = SHORTEST_PAUSE
    while True:
        yield time.monotonic() - start
        time.sleep(pause)
        pause = min(1.25 * pause, LONGEST_PAUSE)


def _run(work: Callable[[], list[bytes]], result: Future[list[bytes]]) -> None:
    try:
        result.set_result(work())
    except BaseException as error:
        result.set_exception(error)


def _version() -> bytes:
    return VERSION.encode("ascii", "replace")[:_VERSION_BYTES].ljust(_VERSION_BYTES)


def plain_text(error: BaseException) -> str:
    """Return the message of an error of torch, without source positions and stacks."""
    return _C.plain_text(str(error)) or type(error).__name__
