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
from fsdp_ext.comm.rendezvous import Rendezvous, host_backend
from fsdp_ext.comm.simulated import Simulated

# By name; None is the default.
Transport = str | Simulated | None

VARIABLE = "FSDP_EXT_TRANSPORT"
OF_THE_HOST = ("shared_memory", "process_group")
OF_GPUS = ("nccl",)

_DEFAULT_TIMEOUT = timedelta(minutes=30)
# How much longer the schedule waits than the backend, whose own error says more.
GRACE = timedelta(seconds=10)

_NAME = max(map(len, OF_THE_HOST))

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
    return group.size() > 1 and host_backend(group) == "gloo"


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


def choose_of_host(
    group: dist.ProcessGroup, asked: str | None, timeout: timedelta
) -> _C.Lanes | None:
    """Make the lanes of ranks that share memory, if they are to; all of the group call this.

    Args:
        group: of ranks on the host.
        asked: the transport by name; None where whichever is there will do.
        timeout: of each wait for a peer.

    Returns:
        None where another transport is to be used. If that was not asked for, a warning says why.

    Raises:
        RuntimeError: if ranks ask for different ones, memory cannot be shared but was asked for by
            name, or a rank does not come.
    """
    shares = may_share_memory(group, asked)
    if not shares and (group.size() == 1 or host_backend(group) != "gloo"):
        return None
    endpoint: _C.SharedMemoryEndpoint | None = None
    reason = ""
    name = dist.get_global_rank(group, dist.get_rank(group))
    if shares:
        try:
            endpoint = _C.SharedMemoryEndpoint(name)
        except (RuntimeError, MemoryError) as error:
            reason = f"rank {name}: {error}"
    address = endpoint.address() if endpoint is not None else b""
    meeting = Rendezvous(group, (asked or "").encode().ljust(_NAME) + address, timeout)
    names = [offer[:_NAME] for offer in meeting.offers]
    addresses = [offer[_NAME:] for offer in meeting.offers]
    lanes: _C.Lanes | None = None
    if endpoint is not None and all(addresses) and len(set(names)) == 1:
        seconds = timeout.total_seconds()
        try:
            lanes = _C.Lanes.shared_memory(
                endpoint, addresses, meeting.rank, seconds, seconds + GRACE.total_seconds()
            )
        except (RuntimeError, MemoryError) as error:
            reason = f"rank {name}: {error}"
    reasons = [reason.decode() for reason in meeting.exchange("reason", reason.encode())]
    _check_agreement(meeting, [name.decode().strip() for name in names])
    failures = [reason for reason in reasons if reason]
    if failures and asked is not None:
        raise RuntimeError(
            f"transport 'shared_memory' was asked for but cannot be had: {failures[0]}; leave it "
            "out, or use 'process_group'"
        )
    if failures:  # on every rank, so that where warnings are errors all have one
        warnings.warn(
            f"fsdp_ext falls back to the process group's own collectives, which are slower: "
            f"{failures[0]} (transport='process_group' says that this is meant)",
            stacklevel=2,
        )
    return lanes if not failures else None


def _check_agreement(meeting: Rendezvous, names: list[str]) -> None:
    mine = names[meeting.rank]
    for rank, name in zip(meeting.ranks, names, strict=True):
        if name != mine:
            raise RuntimeError(
                f"expects all ranks to ask for one transport but rank "
                f"{meeting.ranks[meeting.rank]} asks for {mine or 'the default'} and rank {rank} "
                f"for {name or 'the default'}; set {VARIABLE} the same on all of them"
            )


def log_choice(lanes: _C.Lanes, group: dist.ProcessGroup) -> None:
    """Say once, on the group's first rank, what was chosen."""
    if dist.get_rank(group) == 0:
        _logger.info("%d ranks communicate over %s", group.size(), lanes.transport)
