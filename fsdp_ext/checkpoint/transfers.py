"""What gathers of weights share: the roll call, and a rank's part as it is sent; new memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_ext.checkpoint.weights import Weight
from fsdp_ext.comm.roll_call import called_by_all
from fsdp_ext.comm.transports import gathering_device
from fsdp_ext.optim.state_entries import over
from fsdp_ext.sharding.params.dtensors import sharded_dims

_LARGE = 1 << 20  # bytes
_HUGE_PAGE = 2 << 20  # bytes
_HOST = torch.device("cpu")


def call_roll(weights: Iterable[Weight], caller: str) -> None:
    """Wait until all ranks that take part in gathers have made the call."""
    groups: dict[dist.ProcessGroup, torch.device] = {}
    for weight in weights:
        for dim in sharded_dims(weight.tensor):
            groups.setdefault(mesh_of(weight.tensor).get_group(dim), weight.local.device)
    real = {group: groups[group] for group in groups if dist.get_backend(group) != "fake"}
    with called_by_all(real, caller):
        pass  # the caller's code runs between the gathers


@torch.inference_mode(False)
@torch.no_grad()
def to_send(weight: Weight, dtype: torch.dtype | None) -> torch.Tensor:
    """Return what this rank sends of a weight: cast if that makes it smaller."""
    local, dtype = weight.local, weight.dtype_as(dtype)
    if dtype.itemsize < local.dtype.itemsize:
        local = local.to(dtype)
    # An offloaded shard is on the host, where its process groups may have no backend.
    mesh = mesh_of(weight.tensor)
    groups = [mesh.get_group(dim) for dim in sharded_dims(weight.tensor)]
    return local.to(gathering_device(groups, mesh.device_type, local))


@torch.inference_mode(False)
@torch.no_grad()
def full_tensor(weight: Weight, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a whole weight. If ranks share it, all of them gather it by DTensor's own methods."""
    if not sharded_dims(weight.tensor):
        return weight.local
    own = to_send(weight, dtype)
    if weight.tensor.numel() == 0:  # FSDP2's shards may have another shape than DTensor expects
        return own.new_empty(weight.tensor.shape)
    whole = over(own, weight.tensor).full_tensor()  # type: ignore[attr-defined]
    assert isinstance(whole, torch.Tensor)
    return whole


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as bytes, because backends lack some dtypes."""
    return tensor.view(-1).view(torch.uint8)


def new_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device = _HOST
) -> torch.Tensor:
    """Return a new tensor.

    A large tensor on the host has memory that the system maps, and gets back when it is freed.
    glibc's heap would keep the holes that tensors leave, and grow by about a unit for each one. The
    memory begins at a huge page, because faults of small pages would take as long as a gather.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < _LARGE:
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % _HUGE_PAGE
    with contextlib.suppress(OSError):  # the system may have no huge pages
        # Only the whole ones, so that a tensor takes no more memory than it needs.
        pages.madvise(mmap.MADV_HUGEPAGE, begin, nbytes // _HUGE_PAGE * _HUGE_PAGE)
    count = math.prod(shape)
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=begin).view(shape)


def new_for_reading(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor on the host, for values that will be copied to ``like``.

    If it is large and ``like`` is on a GPU, it is pinned: the GPU reads pinned memory itself. Call
    :func:`free_pinned_memory` when it is no longer used.
    """
    pins = like.is_cuda and like.numel() * dtype.itemsize >= _LARGE
    return torch.empty(like.shape, dtype=dtype, device="cpu", pin_memory=pins)


def free_pinned_memory() -> None:
    """Give pinned memory that nobody uses back to the system: torch would keep it."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
    else:  # torch 2.11
        torch._C._host_emptyCache()


def mesh_of(tensor: torch.Tensor) -> DeviceMesh:
    assert isinstance(tensor, DTensor)
    return tensor.device_mesh


def shared(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, int] | None:
    """Return the group that shares a parameter, and the dimension in which it does.

    None: the parameter is whole, or has to be gathered by DTensor's own methods.
    """
    dims = sharded_dims(tensor)
    if len(dims) != 1 or not isinstance(tensor, DTensor):
        return None
    placement, local = tensor.placements[dims[0]], tensor._local_tensor
    if type(placement) is not Shard or type(local) is not torch.Tensor or tensor.numel() == 0:
        return None
    return tensor.device_mesh.get_group(dims[0]), placement.dim
