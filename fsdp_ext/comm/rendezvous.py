"""How the ranks of a group exchange what they need to connect."""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist


def host_backend(group: dist.ProcessGroup) -> str:
    """Return the name of the backend that the group has for tensors of the host; "" for none.

    Where ranks have several, as by default, `dist.get_backend` has no name for them.
    """
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return ""
    # A backend written in Python need not say.
    name: str = getattr(backend, "name", lambda: "")()
    return name


class Rendezvous:
    """Where the ranks of a group tell each other what they need to know to connect. Used once.

    What a rank brings has a random number in it, and everything after that goes by a name made of
    what all have brought. So what is left in the store of an earlier attempt, or of a group that
    had the same ranks, is never taken for this one's: ranks that do not mean the same attempt do
    not find each other, and say so.

    Args:
        group: whose store it goes through; all its ranks take part.
        offer: what this rank brings.
        timeout: of each exchange.

    Raises:
        RuntimeError: if the group has no store, or a rank does not come within the timeout; the
            message names it.
    """

    def __init__(self, group: dist.ProcessGroup, offer: bytes, timeout: timedelta) -> None:
        self._store = dist.distributed_c10d._get_process_group_store(group)
        backend = host_backend(group) or dist.get_backend(group)
        if self._store is None or backend == "fake":
            raise RuntimeError(
                f"expects ranks that can find each other through their process group's store but "
                f"those of backend '{backend}' have none; use gloo, or leave the transport out"
            )
        self._timeout = timeout
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group)
        self._brought = f"fsdp_ext/offer/{self.rank}"
        self._store.set(self._brought, (os.urandom(16) + offer).hex())
        brought = [self._get(f"fsdp_ext/offer/{i}", rank) for i, rank in enumerate(self.ranks)]
        self.offers = [value[16:] for value in brought]
        self._attempt = hashlib.sha256(b"".join(brought)).hexdigest()

    def exchange(self, what: str, value: bytes) -> list[bytes]:
        """Return what each rank gives, in order of rank.

        Raises:
            RuntimeError: if a rank does not come within the timeout; the message names it.
        """
        prefix = f"fsdp_ext/{self._attempt}/{what}"
        self._store.set(f"{prefix}/{self.rank}", value.hex())
        values = [self._get(f"{prefix}/{i}", rank) for i, rank in enumerate(self.ranks)]
        self._store.delete_key(self._brought)  # all have read it
        return values

    def _get(self, key: str, rank: int) -> bytes:
        try:
            self._store.wait([key], self._timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.ranks[self.rank]} waited {self._timeout.total_seconds():.0f} s for "
                f"rank {rank} to begin the first forward, where all ranks connect, but it did not "
                f"come ({error})"
            ) from error
        return bytes.fromhex(self._store.get(key).decode())
