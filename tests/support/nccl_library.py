"""The C functions of the NCCL library that this process has loaded."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch
import torch.distributed as dist

SUCCESS, UNHANDLED_CUDA, SYSTEM, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, REMOTE, IN_PROGRESS = (
    range(8)
)
FLOAT32 = 7
SUM = 0
WIN_COLL_SYMMETRIC = 1
UNDEFINED = -(2**31)
WAIT_S = 20.0


class UniqueId(ctypes.Structure):
    """What ranks join by."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class Config(ctypes.Structure):
    """ncclConfig_t as of 2.28."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
        ("trafficClass", ctypes.c_int),
        ("commName", ctypes.c_char_p),
        ("collnetEnable", ctypes.c_int),
        ("CTAPolicy", ctypes.c_int),
        ("shrinkShare", ctypes.c_int),
        ("nvlsCTAs", ctypes.c_int),
        ("nChannelsPerNetPeer", ctypes.c_int),
        ("nvlinkCentricSched", ctypes.c_int),
    )


def config(**fields: int) -> Config:
    """Return a configuration of 2.28.9 with these fields, and the others undefined."""
    made = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 22809)
    for name, kind in Config._fields_[3:]:
        if kind is ctypes.c_int:
            setattr(made, name, fields.pop(name, UNDEFINED))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def library() -> ctypes.CDLL:
    """Return the library that torch has loaded."""
    return ctypes.CDLL("libnccl.so.2")


def call(name: str, *arguments: Any) -> int:
    """Call a function and return its result. Pass whole numbers as pointers."""
    whole = [ctypes.c_void_p(one) if isinstance(one, int) else one for one in arguments]
    return int(getattr(library(), name)(*whole))


def last_error() -> str:
    """Return NCCL's text for the last error of the process."""
    function = library().ncclGetLastError
    function.restype = ctypes.c_char_p
    return bytes(function(None)).decode()


def version() -> tuple[int, int, int]:
    """Return its version; torch.cuda.nccl.version() is that which torch was built with."""
    number = ctypes.c_int()
    assert call("ncclGetVersion", ctypes.byref(number)) == SUCCESS
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def unique_id() -> UniqueId:
    """Return an id that rank 0 makes, on all ranks."""
    made = UniqueId()
    if dist.get_rank() == 0:
        assert call("ncclGetUniqueId", ctypes.byref(made)) == SUCCESS
    shared = torch.tensor(list(made.internal), dtype=torch.int8)
    dist.broadcast(shared, 0)
    made.internal[:] = shared.tolist()
    return made


def meet() -> None:
    """Wait for all ranks on the host, without NCCL."""
    dist.all_reduce(torch.zeros(1))


def join(settings: Config | None = None) -> int:
    """Return a communicator of all ranks of the default process group, once it can be used."""
    comm = ctypes.c_void_p()
    result = call(
        "ncclCommInitRankConfig",
        ctypes.byref(comm),
        dist.get_world_size(),
        unique_id(),
        dist.get_rank(),
        ctypes.byref(settings) if settings is not None else None,
    )
    assert comm.value is not None
    assert settle(comm.value, result) == SUCCESS, last_error()
    return comm.value


def poll(comm: int) -> int:
    """Return the asynchronous result."""
    state = ctypes.c_int()
    assert call("ncclCommGetAsyncError", comm, ctypes.byref(state)) == SUCCESS
    return state.value


def settle(comm: int, result: int = IN_PROGRESS) -> int:
    """Return the final result of a call that may go on in the background."""
    until = time.monotonic() + WAIT_S
    while result == IN_PROGRESS and time.monotonic() < until:
        result = poll(comm)
    return result


def next_error(comm: int) -> int:
    """Return the asynchronous error, once there is one."""
    until = time.monotonic() + WAIT_S
    while poll(comm) == SUCCESS and time.monotonic() < until:
        time.sleep(0.01)
    return poll(comm)


def allocate(numel: int) -> int:
    """Return the address of fp32 memory from ncclMemAlloc."""
    memory = ctypes.c_void_p()
    assert call("ncclMemAlloc", ctypes.byref(memory), 4 * numel) == SUCCESS
    assert memory.value is not None
    return memory.value


def all_reduce(comm: int, data: torch.Tensor, stream: torch.cuda.Stream | None = None) -> int:
    """Sum fp32 data of all ranks in place, on a stream or the current one."""
    on = (stream or torch.cuda.current_stream()).cuda_stream
    at = data.data_ptr()
    return call("ncclAllReduce", at, at, data.numel(), FLOAT32, SUM, comm, on)


def all_gather(comm: int, source: int, target: int, numel: int) -> int:
    """Gather fp32 memory of all ranks on the current stream."""
    on = torch.cuda.current_stream().cuda_stream
    return call("ncclAllGather", source, target, numel, FLOAT32, comm, on)
