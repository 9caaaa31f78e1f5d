"""What the collectives of all units over one set of ranks run on."""

from __future__ import annotations

import atexit
import importlib.util
import os
import weakref
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_ext import _C

_DEFAULT_TIMEOUT = timedelta(minutes=30)
# How much longer the schedule waits than the backend, whose own error says more.
_GRACE = timedelta(seconds=10)

# By group and device: a mesh of the host and one of GPUs may have the same group.
_lanes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, _C.Lanes]] = (
    weakref.WeakKeyDictionary()
)
# How often the ranks of a group have set out to make NCCL communicators.
_attempts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def lanes_of(group: dist.ProcessGroup, device: torch.device) -> _C.Lanes:
    """Return the lanes for the ranks of ``group``, all of which have to call this the first time.

    They (``csrc/core/lanes.h``) live as long as ``group`` and serve every root over it.

    Args:
        group: of the mesh.
        device: of this rank.

    Raises:
        RuntimeError: if the transport cannot be had, or not all ranks come within the group's
            timeout; the message says why.
    """
    of_group = _lanes.setdefault(group, {})
    if device not in of_group:
        make = _nccl_lanes if device.type == "cuda" else _process_group_lanes
        of_group[device] = make(group, device)
    return of_group[device]


def check_lanes() -> None:
    """Raise RuntimeError if a collective has failed since the last look, of whichever model."""
    for of_group in _lanes.values():
        for lanes in of_group.values():
            lanes.check()


def _process_group_lanes(group: dist.ProcessGroup, device: torch.device) -> _C.Lanes:
    """Make the lanes of the host.

    Note [private groups]: collectives are issued by worker threads, so their order relative to
    collectives that the user issues is not the same on every rank, and neither is the order of
    gathers relative to reductions. Backends match collectives by their order on a group. Hence
    each lane has a group of its own over the same ranks.
    """
    timeout = _timeout_of(group, device)
    gather, reduce = (
        dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timeout,
            backend=dist.get_backend(group),
            use_local_synchronization=True,
            group_desc=f"fsdp_ext_{lane}",
        )
        for lane in ("gather", "reduce")
    )
    return _C.Lanes.process_group(gather, reduce, (timeout + _GRACE).total_seconds())


def _nccl_lanes(group: dist.ProcessGroup, device: torch.device) -> _C.Lanes:
    """Make the lanes of a GPU, over NCCL communicators of their own.

    The unique id, which rank 0 makes, goes through the group's store.
    """
    timeout = _timeout_of(group, device)
    libraries = nccl_libraries()
    attempt = _attempts.get(group, 0)
    _attempts[group] = attempt + 1
    store = dist.distributed_c10d._get_process_group_store(group)
    key = f"fsdp_ext/nccl/{attempt}"
    rank = dist.get_rank(group)
    if rank == 0:
        unique_id = _C.nccl_unique_id(libraries)
        store.set(key, unique_id.hex())
    else:
        try:
            store.wait([key], timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {rank} waited {timeout.total_seconds():.0f} s for rank 0 to begin the first "
                f"forward, where all ranks join, but it did not come ({error})"
            ) from error
        unique_id = bytes.fromhex(store.get(key).decode())
    return _C.Lanes.nccl(
        libraries=libraries,
        unique_id=unique_id,
        rank=rank,
        size=dist.get_world_size(group),
        device=device.index,
        timeout=timeout.total_seconds(),
        host_timeout=(timeout + _GRACE).total_seconds(),
        register_buffers=registers_buffers(),
    )


def registers_buffers() -> bool:
    """Return whether long-lived buffers are registered with NCCL, where its version can."""
    return os.environ.get("FSDP_EXT_NCCL_REGISTER", "1") not in ("0", "")


def nccl_libraries() -> list[str]:
    """Return where the nvidia-nccl package has its library, if it is installed."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    places = spec.submodule_search_locations if spec is not None else None
    return [
        str(library) for place in places or [] for library in Path(place).glob("lib/libnccl.so.2")
    ]


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT
    return timeout if isinstance(timeout, timedelta) else _DEFAULT_TIMEOUT


# While the devices and torch are there.
atexit.register(_lanes.clear)
