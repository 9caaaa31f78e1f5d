"""Which transport a group of ranks uses, and how its ranks agree on it."""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_ext import _C
from fsdp_ext._util.warn import warn_caller
from fsdp_ext.comm.meeting import backend_name
from fsdp_ext.comm.rendezvous import Rendezvous, machine
from fsdp_ext.comm.simulated import Simulated

# A name, a simulated transport, or None for the default.
Transport = str | Simulated | None

VARIABLE = "FSDP_EXT_TRANSPORT"
OF_THE_HOST = ("shared_memory", "process_group")
OF_GPUS = ("nccl",)
# Other names that users may try.
_OTHER_NAMES = {"gloo": "process_group", "mpi": "process_group", "shm": "shared_memory"}

_DEFAULT_TIMEOUT = timedelta(minutes=30)
# The schedule waits longer than the backend by this much, because the backend's error says more.
GRACE = timedelta(seconds=10)
# Timeouts within a host are longer by this much than those of the network. So if the network fails,
# the rank that waits for it is the first to raise.
_GRACE_ON_HOST = GRACE / 2

# Names of transports are padded to this length in messages between ranks.
_NAME_LENGTH = max(map(len, OF_THE_HOST))
_MACHINE_LENGTH = 40
_MOST_HOSTS = 8  # that a description lists

_logger = logging.getLogger("fsdp_ext")


def resolve_transport(asked: Transport, device_type: str) -> Transport:
    """Return the transport that the argument, or else the environment, asks for.

    Args:
        asked: the argument.
        device_type: the mesh's device type, "cpu" or "cuda".

    Returns:
        A name, a simulated transport, or None for the default.
    """
    if isinstance(asked, Simulated):
        return asked
    if asked is not None and not isinstance(asked, str):
        raise TypeError(
            f"transport is {asked!r}. Pass a name such as 'process_group', a Simulated, or None."
        )
    name = asked if asked is not None else os.environ.get(VARIABLE) or None
    known = OF_GPUS if device_type == "cuda" else OF_THE_HOST
    if name is not None and name not in known:
        what = "transport" if asked is not None else VARIABLE
        lowered = name.lower()
        close = [_OTHER_NAMES.get(lowered), *difflib.get_close_matches(lowered, known, n=1)]
        guess = next((found for found in close if found in known), None)
        advice = f"Did you mean {guess!r}?" if guess else "Choose one of these, or leave it out."
        raise ValueError(
            f"{what} is {name!r}, but ranks on '{device_type}' can use "
            f"{' or '.join(map(repr, known))}. {advice}"
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
    """Return whether this rank would use shared memory. Other ranks may not be able to."""
    if transport is not None:
        return transport == "shared_memory"
    return group.size() > 1 and backend_name(group) == "gloo"


def zeros_for_shard(
    nbytes: int,
    device: torch.device,
    group: dist.ProcessGroup,
    transport: Transport,
    *,
    pin_memory: bool,
) -> torch.Tensor:
    """Return zeros (uint8) for a flat shard, in shared memory if the transport can use it.

    ``pin_memory`` is for units of GPUs that are offloaded to the host.
    """
    if pin_memory:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    on_host = device.type == "cpu"
    if on_host and may_share_memory(group, transport) and not why_no_shared_memory():
        return _C.shared_zeros(nbytes)
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def gathering_device(
    groups: Iterable[dist.ProcessGroup], kind: str, near: torch.Tensor
) -> torch.device:
    """Return the device from which process groups can gather a tensor.

    It is of ``kind``, unless that is a GPU and one of the groups serves the host alone. gloo takes
    tensors on GPUs, too, but its coalesced all-gather, which PyTorch's functional collectives use,
    reads their memory as the host's.
    """
    names = [backend_name(group, kind) for group in groups]
    return device_of("cpu" if None in names or "gloo" in names else kind, near)


def device_of(kind: str, near: torch.Tensor | None = None) -> torch.device:
    """Return the device of ``near`` if it is of this kind, else the current device of this kind."""
    if near is not None and near.device.type == kind:
        return near.device
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of the group's backend, or PyTorch's default."""
    for kind in (device, torch.device("cpu")):
        with contextlib.suppress(AttributeError, RuntimeError):
            timeout = group._get_backend(kind).options._timeout
            if isinstance(timeout, timedelta):
                return timeout
    return _DEFAULT_TIMEOUT


def connect_through_memory(
    group: dist.ProcessGroup, asked: str | None, timeout: timedelta
) -> _C.Lanes | _C.HostLanes | None:
    """Connect the ranks that can share memory. All ranks of the group call this.

    Note [which ranks share memory]: ranks of one machine, by its boot id, try. If there are several
    machines, those of each machine do, and the machines send each other messages over the process
    group (Note [groups that span hosts] in csrc/comm/shared_memory/host_ranks.h). A rank's memory
    is a file without a name, and its peers open it through /proc and compare a random number in it.
    So host names, network, IPC and mount namespaces and /dev/shm do not matter. Ranks need only one
    PID namespace, with its own /proc. Containers on one machine usually have one each. Then the
    whole group uses the process group alone, and a warning says how its ranks could share memory.

    Args:
        group: ranks on the host.
        asked: name of the transport; None for the fastest possible one.
        timeout: the longest wait for another rank.

    Returns:
        The lanes if all ranks are on one host. If there are several hosts, this host's ranks, for
        the lanes of a process group. None if no ranks share memory. A warning says why, unless the
        process group was asked for, or every rank is on a machine of its own.
    """
    shares = may_share_memory(group, asked)
    if not shares and (group.size() == 1 or backend_name(group) != "gloo"):
        return None
    endpoint: _C.SharedMemoryEndpoint | None = None
    reason = ""
    rank = dist.get_global_rank(group, dist.get_rank(group))
    if shares:
        try:
            endpoint = _C.SharedMemoryEndpoint(rank)
        except (RuntimeError, MemoryError) as error:
            reason = f"rank {rank}: {error}"
    address = endpoint.address() if endpoint is not None else b""
    # Fixed lengths, since an offer has no separators.
    head = (asked or "").encode().ljust(_NAME_LENGTH)
    host = machine().encode()[:_MACHINE_LENGTH].ljust(_MACHINE_LENGTH)
    rendezvous = Rendezvous(group, head + host + address, timeout)
    names = [offer[:_NAME_LENGTH].decode("ascii", "replace").strip() for offer in rendezvous.offers]
    machines = [offer[_NAME_LENGTH:][:_MACHINE_LENGTH] for offer in rendezvous.offers]
    addresses = [offer[_NAME_LENGTH + _MACHINE_LENGTH :] for offer in rendezvous.offers]
    number_of = {one: number for number, one in enumerate(dict.fromkeys(machines))}
    hosts = [number_of[one] for one in machines]
    host_count, rank_count = len(set(hosts)), len(hosts)
    shared: _C.Lanes | _C.HostLanes | None = None
    if host_count > 1 and asked == "shared_memory":
        reason = f"its {rank_count} ranks are on {host_count} machines"
    elif endpoint is not None and all(addresses) and len(set(names)) == 1:
        try:
            shared = _connect(endpoint, addresses, hosts, rendezvous.rank, timeout)
        except (RuntimeError, MemoryError) as error:
            reason = f"rank {rank}: {error}"
    exchanged = rendezvous.exchange("reason", reason.encode())
    reasons = [reason.decode(errors="replace") for reason in exchanged]
    rendezvous.check_equal(
        [name or "the default" for name in names],
        "transport",
        f"Set {VARIABLE} to the same value on all ranks.",
    )
    failures = [reason for reason in reasons if reason]
    if failures and asked is not None:
        raise RuntimeError(
            f"transport 'shared_memory' is not possible here: {failures[0]}. Leave it out, or use "
            "'process_group'."
        )
    if failures and host_count < rank_count:  # on every rank: if it is an error, all ranks raise
        warn_caller(
            f"fsdp_ext uses the process group's own collectives, which are slower than shared "
            f"memory: {failures[0]} (pass transport='process_group' to silence this)"
        )
    return shared if not failures else None


def _connect(
    endpoint: _C.SharedMemoryEndpoint,
    addresses: Sequence[bytes],
    hosts: Sequence[int],
    rank: int,
    timeout: timedelta,
) -> _C.Lanes | _C.HostLanes | None:
    seconds = timeout.total_seconds()
    host_count = len(set(hosts))
    if host_count == 1:
        host_timeout = seconds + GRACE.total_seconds()
        return _C.Lanes.shared_memory(endpoint, addresses, rank, seconds, host_timeout)
    if host_count == len(hosts):
        return None
    longest = seconds + _GRACE_ON_HOST.total_seconds()
    return endpoint.connect_on_host(addresses, hosts, rank, longest)


def describe_lanes(lanes: _C.Lanes) -> str:
    """Return the transport, which ranks share memory, and how collectives run."""
    how = ", which composes collectives of messages" if lanes.is_composed else ""
    if lanes.is_inline:
        how = ", on the thread that trains"
    return f"{lanes.transport}{_describe_hosts(lanes.hosts)}{how}"


def _describe_hosts(hosts: Sequence[int]) -> str:
    """Return which ranks of a group share memory, if it has ranks on several hosts that do."""
    if not hosts:
        return ""
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    groups = [_ranges(of_host) for of_host in ranks.values()]
    more = "; ..." if len(groups) > _MOST_HOSTS else ""
    listed = "; ".join(groups[:_MOST_HOSTS])
    return f" between {len(groups)} hosts, with shared memory on each (ranks {listed}{more})"


def _ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers briefly, as in '0-3, 6'."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, found)) for found in ranges)


def log_choice(lanes: _C.Lanes, group: dist.ProcessGroup) -> None:
    """Log the transport of a group, on its first rank."""
    if dist.get_rank(group) == 0:
        _logger.info("%d ranks communicate over %s", group.size(), describe_lanes(lanes))
