"""Lanes: the streams and communicators that all units over one group of ranks share."""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from fsdp_ext import _C
from fsdp_ext._util.warn import warn_caller
from fsdp_ext.comm.at_exit import let_threads_finish
from fsdp_ext.comm.flights import record_flights
from fsdp_ext.comm.inline_group import InlineCollectives, is_inline
from fsdp_ext.comm.meeting import processes_of, store_of_attempt
from fsdp_ext.comm.nccl_settings import (
    NcclSettings,
    nccl_host,
    nccl_settings,
    pack_multiprocessors,
)
from fsdp_ext.comm.rendezvous import Rendezvous
from fsdp_ext.comm.simulated import Simulated
from fsdp_ext.comm.store_calls import plain_text
from fsdp_ext.comm.transports import (
    GRACE,
    Transport,
    connect_through_memory,
    log_choice,
    timeout_of,
)

# One group may serve a mesh of the host, one of GPUs, and replicas. Each has lanes of its own.
_Key = tuple[torch.device, Transport, bool]
_lanes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, _C.Lanes]] = (
    weakref.WeakKeyDictionary()
)


def lanes_of(
    group: dist.ProcessGroup,
    device: torch.device,
    transport: Transport = None,
    *,
    at_once: int = 2,
    between_replicas: bool = False,
) -> _C.Lanes:
    """Return the lanes of ``group``. The first call is collective: all ranks connect in it.

    The lanes (``csrc/core/lanes.h``) live as long as ``group`` and serve every root over it.

    Args:
        group: the mesh's group.
        device: this rank's device.
        transport: a name, a simulated transport, or None for the default.
        at_once: how many lanes may be in collectives at once; more than two with replicas.
        between_replicas: whether the lanes sum gradients of replicas, and gather no parameters.

    Raises:
        RuntimeError: if the transport is not possible, or a rank does not come within the group's
            timeout. The message says why.
    """
    _clear_at_exit()
    of_group = _lanes.setdefault(group, {})
    key = (device, transport, between_replicas)
    if key not in of_group:
        ranks = dist.get_process_group_ranks(group)
        if isinstance(transport, Simulated):
            lanes = _simulated_lanes(group, device, transport)
            ranks = list(range(transport.world_size))
        elif device.type == "cuda":
            settings = nccl_settings()
            if between_replicas:
                settings = settings.between_replicas()
            lanes = nccl_lanes(group, device, settings, at_once)
        else:
            lanes = _host_lanes(group, device, transport)
        record_flights(lanes, group, ranks)
        log_choice(lanes, group)
        of_group[key] = lanes
    return of_group[key]


def texts_if_different(
    all_gather: Callable[[str, bytes], list[bytes]], what: str, mine: str
) -> list[str] | None:
    """Return the texts of all ranks, or None if all are equal. All ranks call this together.

    Args:
        all_gather: takes ``what`` and a message, and returns the messages of all ranks, which have
            one length.
        what: what is compared, for messages.
        mine: this rank's text.

    Raises:
        RuntimeError: if ranks compare different things.
    """
    said = f"{what}\n{mine}".encode()
    heads = all_gather(what, hashlib.sha256(said).digest() + len(said).to_bytes(8, "little"))
    if all(head == heads[0] for head in heads):
        return None
    longest = max(int.from_bytes(head[-8:], "little") for head in heads)
    messages = all_gather(what, said.ljust(longest, b"\0"))
    texts = [message.rstrip(b"\0").decode().partition("\n") for message in messages]
    if len(names := sorted({name for name, _, _ in texts})) > 1:
        raise RuntimeError(
            f"ranks are in different comparisons: {' and '.join(names)}. An earlier forward or "
            "unshard() has raised on some ranks alone. Call it on all ranks again."
        )
    return [text for _, _, text in texts]


def exchange_messages(lanes: _C.Lanes, mine: bytes) -> list[bytes]:
    """Return the messages of all ranks of ``lanes``, which are as long as this rank's."""
    together, size = lanes.exchange_messages(mine), len(mine)
    return [together[start : start + size] for start in range(0, len(together), size)]


# For each process group, this rank's further groups: subgroups by their ranks, and groups of the
# same ranks by their only user.
_groups: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[int, ...] | str, dist.ProcessGroup]
] = weakref.WeakKeyDictionary()


def add_group_lanes(
    lanes: _C.Lanes,
    group: dist.ProcessGroup,
    device: torch.device,
    transport: Transport,
    ranks: int,
) -> None:
    """Give ``lanes`` the lanes of smaller groups, if they have none. All ranks call this.

    See Note [group shards] in ``csrc/core/gather/bucket_gather.h``.

    Args:
        lanes: the lanes of ``group``.
        group: the mesh's group.
        device: this rank's device.
        transport: as for ``lanes_of``.
        ranks: how many consecutive ranks of ``group`` are in each of the smaller groups.
    """
    if lanes.has_group_of(ranks):
        return
    if isinstance(transport, Simulated):
        smaller = replace(transport, world_size=ranks, rank=transport.rank % ranks)
        lanes.add_group(lanes_of(group, device, smaller))
        return
    first = dist.get_rank(group) // ranks * ranks
    of_group = dist.get_process_group_ranks(group)[first : first + ranks]
    why = f"reshard_after_forward={ranks}"
    lanes.add_group(lanes_of(_group_of(group, device, of_group, why), device, transport))


def add_mesh_lanes(
    lanes: _C.Lanes,
    group: dist.ProcessGroup,
    device: torch.device,
    transport: Transport,
    of_mesh: dist.ProcessGroup,
) -> int:
    """Give ``lanes`` the lanes of another mesh, if they have none. All ranks of ``group`` call
    this.

    See Note [several meshes] in ``csrc/core/lanes.h``.

    Args:
        lanes: the lanes of ``group``.
        group: the root mesh's group.
        device: this rank's device.
        transport: as for ``lanes_of``.
        of_mesh: the group of the other mesh. All its ranks are in ``group``.

    Returns:
        The number of the mesh among those of ``lanes``, from 1.
    """
    ranks = dist.get_process_group_ranks(of_mesh)
    members = [dist.get_group_rank(group, rank) for rank in ranks]
    number = lanes.mesh_of(members)
    if number is None:
        number = lanes.add_mesh(lanes_of_mesh(group, device, transport, of_mesh), members)
    return number


def lanes_of_mesh(
    group: dist.ProcessGroup,
    device: torch.device,
    transport: Transport,
    of_mesh: dist.ProcessGroup,
) -> _C.Lanes:
    """Return the lanes of another mesh below a root over ``group``. The first call is collective.

    Models with a root over ``of_mesh`` itself use other lanes, on other streams.
    """
    if is_inline(of_mesh):
        return lanes_of(of_mesh, device, transport)
    ranks = dist.get_process_group_ranks(of_mesh)
    return lanes_of(_group_of(group, device, ranks, "another mesh"), device, transport)


def _group_of(
    group: dist.ProcessGroup, device: torch.device, ranks: Sequence[int], why: str
) -> dist.ProcessGroup:
    """Return a group of ``ranks``, a subset of ``group``, for the streams of its lanes alone.

    On GPUs it is a gloo group, because NCCL's lanes need no more than a store. Some versions of
    PyTorch split a group of NCCL off the default group, and all ranks would have to take part.
    """
    made = _groups.setdefault(group, {})
    key = tuple(ranks)
    if key not in made:
        backend = dist.get_backend(group) if device.type == "cpu" else "gloo"
        timeout = timeout_of(group, device)
        made[key] = _new_group(ranks, timeout, backend, f"part_{len(ranks)}", why)
    return made[key]


def _new_group(
    ranks: Sequence[int], timeout: timedelta, backend: str, name: str, why: str
) -> dist.ProcessGroup:
    """Make a process group. Its ranks call this, and no others."""
    try:
        made: dist.ProcessGroup = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend,
            use_local_synchronization=True,
            group_desc=f"fsdp_ext_{name}",
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} could not make a process group for {why}: "
            f"{plain_text(error)}. Another rank may hang or may have failed. Look at the output of "
            "all ranks."
        ) from error
    return made


def group_beside(group: dist.ProcessGroup, device: torch.device, user: str) -> dist.ProcessGroup:
    """Return a group of the same ranks for ``user`` alone: Note [private groups].

    The first call is collective. A group that serves one thread gets no other group, because
    everything runs in the order of that thread.

    Args:
        group: the mesh's group.
        device: this rank's device.
        user: the only user of the group.

    Raises:
        RuntimeError: if a rank does not come within the group's timeout.
    """
    if is_inline(group):
        return group
    made = _groups.setdefault(group, {})
    if user not in made:
        ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
        made[user] = _new_group(ranks, timeout_of(group, device), backend, user, user)
    return made[user]


@functools.cache
def _clear_at_exit() -> None:
    """Free the lanes at exit, while torch and the devices still exist."""
    atexit.register(let_threads_finish)
    atexit.register(_lanes.clear)  # handlers run in the opposite order


def check_lanes(
    groups: Iterable[dist.ProcessGroup] | None = None, device_type: str | None = None
) -> None:
    """Raise RuntimeError if a collective of a model has failed.

    Args:
        groups: the groups of roots to check, with the groups that were made for these roots; None
            for those of all models.
        device_type: check those on devices of this type; None for all types.
    """
    if groups is None:
        groups = list(_lanes)  # ranks that are threads may add theirs meanwhile
    for group in groups:
        for each in [group, *_groups.get(group, {}).values()]:
            for (device, *_), lanes in list(_lanes.get(each, {}).items()):
                if device_type in (None, device.type):
                    lanes.check()


def _host_lanes(group: dist.ProcessGroup, device: torch.device, transport: str | None) -> _C.Lanes:
    """Make the lanes of the host, over shared memory where that is possible."""
    shared = connect_through_memory(group, transport, timeout_of(group, device))
    if isinstance(shared, _C.Lanes):
        return shared
    if is_inline(group):
        return _inline_lanes(group, device)
    return _process_group_lanes(group, device, shared)


def _inline_lanes(group: dist.ProcessGroup, device: torch.device) -> _C.Lanes:
    """Make lanes whose collectives run on the calling thread, over ``group`` itself."""
    collectives = InlineCollectives(group)
    if collectives.ranks_are_threads():
        _C.count_optimizer_steps_by_thread()
    return _C.Lanes.inline(
        collectives,
        rank=dist.get_rank(group),
        ranks=dist.get_process_group_ranks(group),
        timeout=(timeout_of(group, device) + GRACE).total_seconds(),
    )


def _process_group_lanes(
    group: dist.ProcessGroup, device: torch.device, on_host: _C.HostLanes | None
) -> _C.Lanes:
    """Make the lanes of the host over private process groups.

    Note [private groups]: worker threads issue the collectives. So their order relative to the
    user's own collectives differs from rank to rank, and so does the order of gathers relative to
    reductions. Backends match collectives by their order on a group. Hence each lane has a group of
    its own over the same ranks.
    """
    timeout, backend = timeout_of(group, device), dist.get_backend(group)
    ranks = dist.get_process_group_ranks(group)
    gather, reduce = (
        _new_group(ranks, timeout, backend, lane, "the lanes") for lane in ("gather", "reduce")
    )
    store = store_of_attempt(group)
    return _C.Lanes.process_group(
        gather,
        reduce,
        (timeout + GRACE).total_seconds(),
        store=None if store is None else PrefixStore(f"lanes/{gather.group_name}", store),
        ranks=ranks,
        processes=processes_of(group),
        on_host=on_host,
    )


def _simulated_lanes(
    group: dist.ProcessGroup, device: torch.device, transport: Simulated
) -> _C.Lanes:
    """Make lanes without peers, and warn that the numbers mean nothing."""
    link = transport.link.over(transport.world_size)
    gather, reduce = link.costs()
    warn_caller(
        f"fsdp_ext: {transport.world_size} simulated ranks over {link.name} (simulated): no data "
        "arrives, so losses, gradients and parameters mean nothing, and all times are simulated"
    )
    on_gpu = device.type == "cuda"
    return _C.Lanes.simulated(
        device=device.index if on_gpu else -1,
        rank=transport.rank,
        size=transport.world_size,
        gather=gather,
        reduce=reduce,
        multiprocessors=transport.multiprocessors,
        pack_multiprocessors=pack_multiprocessors() if on_gpu else 0,
        moves_memory=transport.moves_memory,
        timeout=(timeout_of(group, device) + GRACE).total_seconds(),
    )


def nccl_lanes(
    group: dist.ProcessGroup, device: torch.device, settings: NcclSettings, at_once: int = 2
) -> _C.Lanes:
    """Make the lanes of a GPU, over NCCL communicators of their own. All ranks call this together.

    Rank 0 makes the unique id and sends it through the group's store.
    """
    timeout = timeout_of(group, device)
    libraries = nccl_libraries()
    least_blocks = max(lane.get("min_ctas", 0) for lane in (settings.gather, settings.reduce))
    order_launches(device, at_once, least_blocks)
    unique_id = _C.nccl_unique_id(libraries) if dist.get_rank(group) == 0 else b""
    rendezvous = Rendezvous(group, unique_id, timeout)
    # After the exchange, all ranks have rank 0's id.
    mine = f"{settings}\n{nccl_host()}"
    received = rendezvous.exchange("has the id", mine.encode())
    all_settings, _, hosts = zip(*(text.decode().partition("\n") for text in received), strict=True)
    # NCCL hangs or fails if they differ.
    rendezvous.check_equal(all_settings, "NCCL settings", "Set the variables alike on all ranks.")
    return _C.Lanes.nccl(
        libraries=libraries,
        unique_id=rendezvous.offers[0],
        rank=rendezvous.rank,
        size=len(rendezvous.ranks),
        device=device.index,
        timeout=timeout.total_seconds(),
        host_timeout=(timeout + GRACE).total_seconds(),
        register_buffers=settings.registers_buffers,
        nodes=len(set(hosts)),
        gather_settings=settings.gather,
        reduce_settings=settings.reduce,
        pack_multiprocessors=pack_multiprocessors(),
        store=rendezvous.private_store(),
        ranks=rendezvous.ranks,
        processes=processes_of(group),
    )


# The most thread blocks of a communicator, unless a setting asks for more.
MOST_BLOCKS = 32
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def order_launches(device: torch.device, at_once: int, blocks: int) -> None:
    """Have NCCL order the launches of lanes where they may not run at the same time.

    The communicators of lanes have no order on the device. If there are too few multiprocessors for
    all of them, as with MIG, the gathers of one rank and the reductions of another can wait for
    each other for ever. NCCL 2.26 and newer orders them as the host issues them, if told to before
    its first launch. Settings of the user stay. A warning says if NCCL may have launched before.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if processors >= at_once * max(blocks, MOST_BLOCKS) or LAUNCH_ORDER in os.environ:
        return
    os.environ[LAUNCH_ORDER] = "1"
    if has_used_nccl(device):
        warn_caller(
            f"fsdp_ext: {device} has {processors} multiprocessors, too few for {at_once} NCCL "
            f"communicators at once, so {LAUNCH_ORDER}=1 was set. But NCCL reads it at its first "
            "launch, and this process has used NCCL before, so collectives may wait for each "
            f"other for ever. Set {LAUNCH_ORDER}=1 in the environment of the program."
        )


def has_used_nccl(device: torch.device) -> bool:
    """Return whether fsdp_ext or a process group may have NCCL communicators already."""
    if any(used.type == "cuda" for of_group in _lanes.values() for used, *_ in of_group):
        return True
    return any(_may_use_nccl(group, device) for group in dist.distributed_c10d._world.pg_map)


def _may_use_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # it has none for GPUs
        return False
    if isinstance(backend, dist.ProcessGroupGloo):
        return False
    connected = getattr(backend, "_is_initialized", None)
    return connected is None or bool(connected())  # a wrapper does not say


def nccl_libraries() -> list[str]:
    """Return the path of the nvidia-nccl package's library, if it is installed."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    folders = spec.submodule_search_locations if spec is not None else None
    return [
        str(library)
        for folder in folders or []
        for library in Path(folder).glob("lib/libnccl.so.2")
    ]
