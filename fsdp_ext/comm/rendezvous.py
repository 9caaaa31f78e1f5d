"""How the ranks of a group exchange addresses before they connect."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fsdp_ext._build_info import VERSION
from fsdp_ext.comm.meeting import (
    LONGEST_PAUSE,
    announce_process,
    backend_name,
    ended_process,
    first_look,
    is_fork,
    looks,
    meet,
    processes_seen,
    store_of,
)
from fsdp_ext.comm.store_calls import StoreCalls

# The beginning of an offer: a random number, then the version of fsdp_ext.
_RANDOM_BYTES = 16
_VERSION_BYTES = 32

# Seconds within which a process that has closed its sockets leaves /proc.
_EXIT_DELAY = 1.0


def machine() -> str:
    """Return an identifier of this machine that stays the same until it boots; "" if unknown.

    Containers of one machine have the same identifier. A host name would not do: network namespaces
    share it, and two machines may have one name.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


class Rendezvous:
    """One exchange of the ranks of a group, over the group's store, before they connect.

    Every offer contains a random number, and all later keys contain a hash of all offers. So
    entries of an earlier rendezvous of the same ranks are never mistaken for those of this one, and
    ranks in different ones time out with an error. Note [keys of an attempt] says why no entry is
    of an earlier attempt.

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
        if is_fork(group):
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
        self._processes = processes_seen(group, store)
        self._calls = StoreCalls(f"rank {self._global_rank}", timeout, self._look_for_ended)
        self._store = self._calls.ask(lambda: self._meet(group))
        found = self._exchange("offer", os.urandom(_RANDOM_BYTES) + _version() + offer)
        self._check_versions(found)
        self.offers = [value[_RANDOM_BYTES + _VERSION_BYTES :] for value in found]
        self._name = hashlib.sha256(b"".join(found)).hexdigest()

    def exchange(self, what: str, value: bytes) -> list[bytes]:
        """Return the values of all ranks, in order of rank.

        Args:
            what: a name for this exchange, the same on all ranks.
            value: this rank's value.

        Raises:
            RuntimeError: if a rank has ended or does not come within the timeout; the message names
                it.
        """
        prefix = f"{self._name}/{what}"
        values = self._exchange(prefix, value)
        # All ranks have read all offers. One that is early for the next rendezvous must not find
        # those of this one.
        self._calls.ask(self._delete_offer)
        self._exchange(f"{prefix}/left", b"left")
        self._calls.ask_if_possible(lambda: self._delete_keys(prefix))  # else they only stay
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
        return PrefixStore(self._name, self._store)

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

    def _exchange(self, prefix: str, value: bytes) -> list[bytes]:
        """Write this rank's value, and return those of all ranks, in order of rank.

        A counter shows when all have written, so no rank looks at every key.
        """
        keys = [f"{prefix}/{index}" for index in range(len(self.ranks))]

        def write_and_read() -> list[bytes]:
            # A rendezvous that failed may have left this rank's offer, and counted it.
            is_counted = self._store.check([keys[self.rank]])
            self._store.set(keys[self.rank], value.hex())
            if not is_counted and self._store.add(f"{prefix}/count", 1) == len(keys):
                self._store.set(f"{prefix}/all", "")
            return self._wait_for_all(prefix, keys)

        texts = self._calls.ask(write_and_read)
        return [self._parse(text, index, keys) for index, text in enumerate(texts)]

    def _delete_keys(self, prefix: str) -> None:
        """Delete the keys of an exchange if all others have left, so that nobody waits for them."""
        if self._store.add(f"{prefix}/done", 1) == len(self.ranks):
            for name in [*range(len(self.ranks)), "count", "all"]:
                self._store.delete_key(f"{prefix}/{name}")
                self._store.delete_key(f"{prefix}/left/{name}")
            self._store.delete_key(f"{prefix}/done")

    def _delete_offer(self) -> None:
        self._store.delete_key(f"offer/{self.rank}")
        if self.rank == 0:
            self._store.delete_key("offer/count")
            self._store.delete_key("offer/all")

    def _meet(self, group: dist.ProcessGroup) -> Store:
        return meet(
            group,
            self._store,
            self._timeout,
            lambda late: self._raise_late(late[0]),
            self._raise_ended,
            self._calls.note_answer,
        )

    def _wait_for_all(self, prefix: str, keys: list[str]) -> list[bytes]:
        """Return the values of the keys, one of each rank, when all are there.

        Store.wait would not notice that a rank ends.
        """
        missing = list(range(len(keys)))

        def are_there() -> bool:
            is_there: bool = self._store.check([f"{prefix}/all"])
            self._calls.note_answer()
            return is_there

        for is_late in looks(are_there, self._timeout.total_seconds(), first_look(len(keys))):
            missing = [index for index in missing if not self._store.check([keys[index]])]
            self._look_at_processes(missing, keys)
            if is_late:
                # If none is missing any more, one that has come has not gone on.
                self._raise_late(missing[0] if missing else 0 if self.rank else 1)
        texts: list[bytes] = self._store.multi_get(keys)
        return texts

    def _parse(self, text: bytes, index: int, keys: list[str]) -> bytes:
        """Return the message in an entry of the rank at `index`."""
        try:
            return bytes.fromhex(text.decode("ascii"))
        except ValueError as error:
            raise RuntimeError(
                f"rank {self._global_rank} found something else than a message of rank "
                f"{self.ranks[index]} in the process group's store, at '{keys[index]}'. Use a "
                "store of its own for each job."
            ) from error

    def _look_at_processes(self, missing: Sequence[int], keys: Sequence[str]) -> None:
        """Raise an error if a rank has ended that has not written its key."""
        for index in missing:
            process = ended_process(self._store, index, self._processes)
            if process is not None and not self._store.check([keys[index]]):
                self._raise_ended(index, process)

    def _raise_late(self, index: int) -> NoReturn:
        raise RuntimeError(
            f"rank {self._global_rank} waited {self._timeout.total_seconds():.0f} s for rank "
            f"{self.ranks[index]} to begin the first forward, in which all ranks connect. Run the "
            "same model on all ranks."
        )

    def _look_for_ended(self) -> None:
        """Raise an error that names a rank if one has ended."""
        deadline = time.monotonic() + _EXIT_DELAY
        while time.monotonic() < deadline and self._processes:
            for index in self._processes:
                process = ended_process(self._store, index, self._processes)
                if process is not None:
                    self._raise_ended(index, process)
            time.sleep(LONGEST_PAUSE)

    def _raise_ended(self, index: int, process: int) -> NoReturn:
        raise RuntimeError(
            f"rank {self._global_rank}: rank {self.ranks[index]} (process {process}) has ended "
            "before or during its first forward, in which all ranks connect. Its last output may "
            "say why."
        )


def _version() -> bytes:
    return VERSION.encode("ascii", "replace")[:_VERSION_BYTES].ljust(_VERSION_BYTES)
