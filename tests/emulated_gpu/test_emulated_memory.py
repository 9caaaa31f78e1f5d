"""Managed memory and memory pools of the emulated GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from support.devices import IS_EMULATED
from support.emulated import LATE_CYCLES, Gate, error_of, run_program, runtime

pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="tests the emulated GPU: make rehearsal")

BYTES = 32
PAGE = 4096


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


DEVICE, HOST = _Location(1, 0), _Location(2, 0)


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 8),
    )


@pytest.fixture
def managed() -> Iterator[ctypes.c_void_p]:
    """Yield the address of managed memory."""
    address = ctypes.c_void_p()
    size = ctypes.c_size_t(BYTES)
    assert runtime().cudaMallocManaged(ctypes.byref(address), size, 1) == 0
    yield address
    assert runtime().cudaFree(address) == 0


# - Managed memory


def test_the_host_and_the_device_use_managed_memory(managed: ctypes.c_void_p) -> None:
    assert ctypes.string_at(managed, BYTES) == b"\xff" * BYTES  # NaN, until it is written
    ctypes.memset(managed, 3, BYTES)
    stream = torch.cuda.Stream()
    result = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    handle, size = ctypes.c_void_p(stream.cuda_stream), ctypes.c_size_t(BYTES)
    to = ctypes.c_void_p(result.data_ptr())
    with Gate(stream.cuda_stream):
        # These copies are asynchronous, as all are that are not within the host.
        assert runtime().cudaMemcpyAsync(to, managed, size, 3, handle) == 0
        assert runtime().cudaMemsetAsync(managed, 4, size, handle) == 0
        assert not stream.query()
    assert result.tolist() == [3] * BYTES
    assert ctypes.string_at(managed, BYTES) == b"\4" * BYTES


def test_the_host_waits_for_a_memset_of_managed_memory(managed: ctypes.c_void_p) -> None:
    torch.cuda._sleep(LATE_CYCLES)
    assert runtime().cudaMemset(managed, 5, ctypes.c_size_t(BYTES)) == 0
    assert torch.cuda.default_stream().query()
    assert ctypes.string_at(managed, BYTES) == b"\5" * BYTES


def test_a_pointer_to_managed_memory_says_so(managed: ctypes.c_void_p) -> None:
    found = _Attributes()
    assert runtime().cudaPointerGetAttributes(ctypes.byref(found), managed) == 0
    managed_type = 3
    assert (found.type, found.device) == (managed_type, 0)
    assert found.device_pointer == found.host_pointer == managed.value


def test_managed_memory_is_prefetched_and_advised_within_its_bounds(
    managed: ctypes.c_void_p,
) -> None:
    stream = ctypes.c_void_p(torch.cuda.Stream().cuda_stream)
    pinned = torch.zeros(BYTES).pin_memory()
    for address, count, place, error in (
        (managed, BYTES, DEVICE, "cudaSuccess"),
        (managed, BYTES, HOST, "cudaSuccess"),
        (managed, PAGE + 1, DEVICE, "cudaErrorInvalidValue"),
        (ctypes.c_void_p(pinned.data_ptr()), BYTES, DEVICE, "cudaErrorInvalidValue"),
        (managed, BYTES, _Location(1, 5), "cudaErrorInvalidDevice"),
        (managed, BYTES, _Location(0, 0), "cudaErrorInvalidValue"),
    ):
        size = ctypes.c_size_t(count)
        assert error_of(runtime().cudaMemPrefetchAsync(address, size, place, 0, stream)) == error
        assert error_of(runtime().cudaMemAdvise(address, size, 1, place)) == error
    size = ctypes.c_size_t(BYTES)
    assert error_of(runtime().cudaMemAdvise(managed, size, 9, HOST)) == "cudaErrorInvalidValue"


def test_managed_memory_needs_a_size_and_known_flags() -> None:
    for count, flags in ((0, 1), (BYTES, 0)):
        made = runtime().cudaMallocManaged(
            ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(count), flags
        )
        assert error_of(made) == "cudaErrorInvalidValue"


def test_each_device_uses_managed_memory() -> None:
    code = """
import ctypes
from support.emulated import error_of, runtime
address, size = ctypes.c_void_p(), ctypes.c_size_t(32)
assert runtime().cudaMallocManaged(ctypes.byref(address), size, 1) == 0
torch.cuda.set_device(1)
assert runtime().cudaMemset(address, 2, size) == 0
print(error_of(runtime().cudaDeviceSynchronize()), ctypes.string_at(address, 2))
"""
    result = run_program(code, EMULATED_GPU_DEVICES="2")
    assert (result.stdout, result.stderr) == ("cudaSuccess b'\\x02\\x02'\n", "")


# - Memory pools


def _pool() -> ctypes.c_void_p:
    pool = ctypes.c_void_p()
    assert runtime().cudaDeviceGetDefaultMemPool(ctypes.byref(pool), 0) == 0
    return pool


def _attribute(number: int) -> int:
    value = ctypes.c_uint64()
    assert runtime().cudaMemPoolGetAttribute(_pool(), number, ctypes.byref(value)) == 0
    return value.value


def test_a_pool_counts_its_memory() -> None:
    threshold, now, high = 4, 7, 8
    stream = ctypes.c_void_p(torch.cuda.Stream().cuda_stream)
    assert runtime().cudaMemPoolSetAttribute(_pool(), high, ctypes.byref(ctypes.c_uint64(0))) == 0
    addresses = [ctypes.c_void_p() for _ in range(2)]
    for address in addresses:
        size = ctypes.c_size_t(BYTES)
        assert runtime().cudaMallocAsync(ctypes.byref(address), size, stream) == 0
    assert (_attribute(now), _attribute(high)) == (2 * PAGE, 2 * PAGE)
    assert runtime().cudaFreeAsync(addresses[0], stream) == 0
    assert runtime().cudaStreamSynchronize(stream) == 0
    assert (_attribute(now), _attribute(high)) == (PAGE, 2 * PAGE)
    assert runtime().cudaFree(addresses[1]) == 0
    assert runtime().cudaMemPoolSetAttribute(_pool(), high, ctypes.byref(ctypes.c_uint64(0))) == 0
    assert (_attribute(now), _attribute(high)) == (0, 0)
    value = ctypes.c_uint64(1 << 20)
    assert runtime().cudaMemPoolSetAttribute(_pool(), threshold, ctypes.byref(value)) == 0
    assert _attribute(threshold) == 1 << 20
    set_now = runtime().cudaMemPoolSetAttribute(_pool(), now, ctypes.byref(value))
    assert error_of(set_now) == "cudaErrorInvalidValue"


def test_only_memory_of_a_pool_is_freed_on_a_stream() -> None:
    address, stream = ctypes.c_void_p(), ctypes.c_void_p(torch.cuda.Stream().cuda_stream)
    assert runtime().cudaMalloc(ctypes.byref(address), ctypes.c_size_t(BYTES)) == 0
    assert error_of(runtime().cudaFreeAsync(address, stream)) == "cudaErrorInvalidValue"
    assert runtime().cudaFree(address) == 0


def test_a_graph_does_not_allocate() -> None:
    address, library = ctypes.c_void_p(), runtime()
    stream = ctypes.c_void_p(torch.cuda.Stream().cuda_stream)
    assert library.cudaMallocAsync(ctypes.byref(address), ctypes.c_size_t(BYTES), stream) == 0
    assert library.cudaStreamBeginCapture(stream, 0) == 0
    for made in (
        library.cudaMallocAsync(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(BYTES), stream),
        library.cudaFreeAsync(address, stream),
    ):
        assert error_of(made) == "cudaErrorNotSupported"
    graph = ctypes.c_void_p()
    assert library.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0
    assert library.cudaGraphDestroy(graph) == 0
    assert library.cudaFreeAsync(address, stream) == 0


FREED_WHILE_USED = """
import ctypes
from support.emulated import runtime
address, size = ctypes.c_void_p(), ctypes.c_size_t(32)
one, other = torch.cuda.Stream(), torch.cuda.Stream()
handles = [ctypes.c_void_p(stream.cuda_stream) for stream in (one, other)]
assert runtime().cudaMallocAsync(ctypes.byref(address), size, handles[0]) == 0
other.wait_stream(one)
assert runtime().cudaMemsetAsync(address, 0, size, handles[1]) == 0
if waits:
    one.wait_stream(other)
while ctypes.string_at(address, 32) != bytes(32):  # it was used before, but by chance
    pass
assert runtime().cudaFreeAsync(address, handles[0]) == 0
torch.cuda.synchronize()
"""


def test_memory_of_a_pool_is_freed_in_order() -> None:
    result = run_program("waits = True" + FREED_WHILE_USED)
    assert (result.returncode, result.stderr) == (0, "")
    result = run_program("waits = False" + FREED_WHILE_USED)
    assert result.returncode != 0
    assert "cudaFreeAsync" in result.stderr


def test_torchs_allocator_of_pools_trains() -> None:
    code = """
print(torch.cuda.get_allocator_backend())
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).cuda()
side = torch.cuda.Stream()
for _ in range(3):
    inputs = torch.ones(8, 64, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = inputs * 2
    inputs.record_stream(side)
    doubled.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(side)
    model(doubled).sum().backward()
    del inputs, doubled
torch.cuda.synchronize()
print(torch.cuda.memory_allocated() > 0, model[0].weight.grad.isfinite().all().item())
"""
    result = run_program(code, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert (result.stdout.split(), result.stderr) == (["cudaMallocAsync", "True", "True"], "")


def test_devices_need_access_to_a_pool_of_another_one() -> None:
    code = """
import ctypes
from support.emulated import error_of, runtime
class Access(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int))
pool, address, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t(32)
assert runtime().cudaDeviceGetDefaultMemPool(ctypes.byref(pool), 0) == 0
assert runtime().cudaMallocAsync(ctypes.byref(address), size, None) == 0
torch.cuda.synchronize()
torch.cuda.set_device(1)
assert runtime().cudaDeviceEnablePeerAccess(0, 0) == 0
for device, flags in ((0, 0), (1, 3), (1, 0)):
    allowed = Access(1, device, flags)
    print(error_of(runtime().cudaMemPoolSetAccess(pool, ctypes.byref(allowed), 1)))
    if device == 1:
        runtime().cudaMemsetAsync(address, 0, size, None)
        print(error_of(runtime().cudaDeviceSynchronize()))
"""
    result = run_program(code, EMULATED_GPU_DEVICES="2")
    assert result.stdout.split() == [
        "cudaErrorInvalidValue",
        "cudaSuccess",
        "cudaSuccess",
        "cudaSuccess",
        "cudaErrorIllegalAddress",
    ]
    assert "device 1 may not use memory of device 0's pool" in result.stderr
