"""How the ranks of a group exchange addresses before they connect."""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist


def host_backend(group: dist.ProcessGroup) -> str:
    """Return the name of the group's backend for tensors on the host; "" if there is none.

    A group may have several backends, and has by default. `dist.get_backend` then names none of
    them.
    """
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return ""
    # A backend that is written in Python may have no name.
    name: str = getattr(backend, "name", lambda: "")()
    return name


class Rendezvous:
    """One exchange of the ranks of a group, over the group's store, before they connect.

    Every offer contains a random number, and all later keys contain a hash of all offers. So
    entries that an earlier attempt, or another group of the same ranks, has left in the store are
    never mistaken for this attempt's. Ranks in different attempts time out with an error.

    Args:
        group: the ranks. All of them make a Rendezvous.
        offer: this rank's first message to the others.
        timeout: the longest wait for another rank in each exchange.

    Raises:
        RuntimeError: if the group has no store, or a rank does not come within the timeout; the
            message names the rank.
    """

    def __init__(self, group: dist.ProcessGroup, offer: bytes, timeout: timedelta) -> None:
        self._store = dist.distributed_c10d._get_process_group_store(group)
        backend = host_backend(group) or dist.get_backend(group)
        if self._store is None or backend == "fake":
            raise RuntimeError(
                f"ranks connect through their process group's store, but backend '{backend}' has "
                "none. Use gloo, or leave the transport out."
            )
        self._timeout = timeout
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group)
        self._own_key = f"fsdp_ext/offer/{self.rank}"
        self._store.set(self._own_key, (os.urandom(16) + offer).hex())
        found = [self._get(f"fsdp_ext/offer/{i}", rank) for i, rank in enumerate(self.ranks)]
        self.offers = [value[16:] for value in found]
        self._attempt = hashlib.sha256(b"".join(found)).hexdigest()

    def exchange(self, what: str, value: bytes) -> list[bytes]:
        """Return the values of all ranks, in order of rank.

        Args:
            what: a name for this exchange, the same on all ranks.
            value: this rank's value.

        Raises:
            RuntimeError: if a rank does not come within the timeout; the message names it.
        """
        prefix = f"fsdp_ext/{self._attempt}/{what}"
        self._store.set(f"{prefix}/{self.rank}", value.hex())
        values = [self._get(f"{prefix}/{i}", rank) for i, rank in enumerate(self.ranks)]
        self._store.delete_key(self._own_key)  # all ranks have read this rank's offer
        return values

    def _get(self, key: str, rank: int) -> bytes:
        try:
            self._store.wait([key], self._timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.ranks[self.rank]} waited {self._timeout.total_seconds():.0f} s for "
                f"rank {rank} to begin the first forward, in which all ranks connect ({error}). "
                "Run the same model on all ranks."
            ) from error
        return bytes.fromhex(self._store.get(key).decode())
