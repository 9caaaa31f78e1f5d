"""Which transport a group of ranks uses, and how its ranks agree on it."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_ext import _C
from fsdp_ext.simulated import Simulated

# By name; None is the default.
Transport = str | Simulated | None

VARIABLE = "FSDP_EXT_TRANSPORT"
OF_THE_HOST = ("shared_memory", "process_group")
OF_GPUS = ("nccl",)

_DEFAULT_TIMEOUT = timedelta(minutes=30)
# How much longer the schedule waits than the backend, whose own error says more.
GRACE = timedelta(seconds=10)

_logger = logging.getLogger("fsdp_ext")


def resolve_transport(asked: Transport, device_type: str) -> Transport:
    """Return the transport that was asked for, by argument or else by the environment.

    Args:
        asked: the argument.
        device_type: of the mesh: "cpu" or "cuda".

    Returns:
        Its name, a simulated one as it is, or None for the default.

    Raises:
        TypeError: if the argument is none of them.
        ValueError: if there is none of that name for such devices.
    """
    if isinstance(asked, Simulated):
        return asked
    if asked is not None and not isinstance(asked, str):
        raise TypeError(
            f"transport expects a name, such as 'process_group', a Simulated or None but got "
            f"{asked!r}"
        )
    name = asked if asked is not None else os.environ.get(VARIABLE) or None
    known = OF_GPUS if device_type == "cuda" else OF_THE_HOST
    if name is not None and name not in known:
        what = "transport" if asked is not None else VARIABLE
        raise ValueError(
            f"{what} expects {' or '.join(map(repr, known))} for ranks on '{device_type}' but got "
            f"{name!r}; correct it or leave it out"
        )
    return name


@functools.cache
def why_no_shared_memory() -> str:
    """Return why this process cannot share memory with others; empty if it can."""
    try:
        _C.shared_memory_bytes()
    except RuntimeError as error:
        return str(error)
    return ""


def may_share_memory(group: dist.ProcessGroup, transport: Transport) -> bool:
    """Return whether ranks on the host would use shared memory, as far as this one knows."""
    if transport is not None:
        return transport == "shared_memory"
    return group.size() > 1 and dist.get_backend(group) == "gloo"


def zeros_for_shard(
    nbytes: int, device: torch.device, group: dist.ProcessGroup, transport: Transport
) -> torch.Tensor:
    """Return zeros, uint8, for a flat shard: where peers can read it, if the transport does."""
    on_host = device.type == "cpu"
    if on_host and may_share_memory(group, transport) and not why_no_shared_memory():
        return _C.shared_zeros(nbytes)
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of the group's backend, or PyTorch's default."""
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT
    return timeout if isinstance(timeout, timedelta) else _DEFAULT_TIMEOUT


class Rendezvous:
    """Where the ranks of a group tell each other what they need to know to connect.

    Args:
        group: whose store it goes through; all its ranks take part.
        attempt: how often they have met before.
        timeout: of each exchange.

    Raises:
        RuntimeError: if the group has no store.
    """

    def __init__(self, group: dist.ProcessGroup, attempt: int, timeout: timedelta) -> None:
        self._store = dist.distributed_c10d._get_process_group_store(group)
        backend = dist.get_backend(group)
        if self._store is None or backend == "fake":
            raise RuntimeError(
                f"expects ranks that can find each other through their process group's store but "
                f"those of backend '{backend}' have none; use gloo, or leave the transport out"
            )
        self._prefix = f"fsdp_ext/{attempt}"
        self._timeout = timeout
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group)

    def exchange(self, what: str, value: bytes) -> list[bytes]:
        """Return what each rank gives, in order of rank.

        Raises:
            RuntimeError: if a rank does not come within the timeout; the message names it.
        """
        keys = [f"{self._prefix}/{what}/{rank}" for rank in range(len(self.ranks))]
        self._store.set(keys[self.rank], value.hex())
        return [
            bytes.fromhex(self._get(key, rank).decode())
            for key, rank in zip(keys, self.ranks, strict=True)
        ]

    def publish(self, what: str, value: bytes) -> None:
        """Give all ranks what only this one has."""
        self._store.set(f"{self._prefix}/{what}", value.hex())

    def read(self, what: str, rank: int) -> bytes:
        """Return what the group's ``rank`` publishes.

        Raises:
            RuntimeError: if it does not within the timeout.
        """
        return bytes.fromhex(self._get(f"{self._prefix}/{what}", self.ranks[rank]).decode())

    def _get(self, key: str, rank: int) -> bytes:
        try:
            self._store.wait([key], self._timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.ranks[self.rank]} waited {self._timeout.total_seconds():.0f} s for "
                f"rank {rank} to begin the first forward, where all ranks connect, but it did not "
                f"come ({error})"
            ) from error
        value: bytes = self._store.get(key)
        return value


def connect_shared_memory(
    meeting: Rendezvous, asked: str | None, timeout: timedelta
) -> _C.Lanes | None:
    """Make the lanes of ranks that share memory; all of the group call this together.

    Args:
        meeting: of the group.
        asked: None where other transports would do, too.
        timeout: of each wait for a peer.

    Returns:
        None where memory cannot be shared and another transport is to be used; a warning says why.

    Raises:
        RuntimeError: if it cannot be shared but was asked for by name, or a rank does not come.
    """
    endpoint: _C.SharedMemoryEndpoint | None = None
    lanes: _C.Lanes | None = None
    reason = ""
    name = meeting.ranks[meeting.rank]
    try:
        endpoint = _C.SharedMemoryEndpoint(name)
    except RuntimeError as error:
        reason = f"rank {name}: {error}"
    offers = meeting.exchange("address", endpoint.address() if endpoint is not None else b"")
    if endpoint is not None and all(offers):
        seconds = timeout.total_seconds()
        try:
            lanes = _C.Lanes.shared_memory(
                endpoint, offers, meeting.rank, seconds, seconds + GRACE.total_seconds()
            )
        except RuntimeError as error:
            reason = f"rank {name}: {error}"
    reasons = [reason.decode() for reason in meeting.exchange("reason", reason.encode())]
    failures = [reason for reason in reasons if reason]
    if not failures:
        return lanes
    if asked is not None:
        raise RuntimeError(
            f"transport 'shared_memory' was asked for but cannot be had: {failures[0]}; leave it "
            "out, or use 'process_group'"
        )
    if meeting.rank == 0:
        warnings.warn(
            f"fsdp_ext falls back to the process group's own collectives, which are slower: "
            f"{failures[0]} (transport='process_group' says that this is meant)",
            stacklevel=2,
        )
    return None


def agree(meeting: Rendezvous, asked: str | None) -> None:
    """Raise RuntimeError unless all ranks have asked for the same transport."""
    names = [name.decode() for name in meeting.exchange("transport", (asked or "").encode())]
    for rank, name in zip(meeting.ranks, names, strict=True):
        if name != (asked or ""):
            raise RuntimeError(
                f"expects all ranks to ask for one transport but rank "
                f"{meeting.ranks[meeting.rank]} asks for {asked or 'the default'} and rank {rank} "
                f"for {name or 'the default'}; set {VARIABLE} the same on all of them"
            )


def log_choice(lanes: _C.Lanes, group: dist.ProcessGroup) -> None:
    """Say once, on the group's first rank, what was chosen."""
    if dist.get_rank(group) == 0:
        _logger.info("%d ranks communicate over %s", group.size(), lanes.transport)
