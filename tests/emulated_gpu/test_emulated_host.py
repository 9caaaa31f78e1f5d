"""What the host does with pinned memory before it has waited for the copies that use it."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch
from support.devices import IS_EMULATED
from support.emulated import (
    HOST_FUNCTION,
    LATE_CYCLES,
    Gate,
    error_of,
    launch_on_host,
    run_program,
    runtime,
)

pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="tests the emulated GPU: make rehearsal")

EXCHANGE = """
def exchange(values):
    host = torch.zeros(4).pin_memory()
    host.copy_(values, non_blocking=True)
    if globals().get("waits", True):
        torch.cuda.current_stream().synchronize()
    return bool((host == 1).all())
"""
WRITES_EARLY = "the host has written the 4096 bytes .* had not waited for a copy on stream"


def _pinned(numel: int = 1024) -> torch.Tensor:
    return torch.zeros(numel).pin_memory()


def test_a_copy_to_the_host_shows_after_the_wait_alone() -> None:
    values = torch.arange(1024.0, device="cuda")
    host = _pinned()
    for _ in range(3):
        host.copy_(values, non_blocking=True)
        bits = host.view(torch.int16)
        assert bool(host.isnan().all())
        assert len(bits.unique()) > 8  # no constant, on which flags and hashes would agree
        torch.cuda.synchronize()
        assert torch.equal(host, torch.arange(1024.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_what_is_read_early_is_nan_in_every_format(dtype: torch.dtype) -> None:
    host = torch.zeros(512, dtype=dtype).pin_memory()
    host.copy_(torch.ones(512, dtype=dtype, device="cuda"), non_blocking=True)
    assert bool(host.isnan().all())
    torch.cuda.synchronize()
    assert bool((host == 1).all())


def test_the_device_sees_its_own_copies() -> None:
    host = _pinned()
    host.copy_(torch.ones(1024, device="cuda"), non_blocking=True)
    back = host.to("cuda", non_blocking=True)
    host.copy_(back + 1, non_blocking=True)
    torch.cuda.synchronize()
    assert bool((back == 1).all())
    assert bool((host == 2).all())


def test_queued_work_reads_what_is_there_before_a_later_copy() -> None:
    host, on_device = _pinned().fill_(1), torch.zeros(1024, device="cuda")
    later = torch.full((1024,), 2.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        on_device.copy_(host, non_blocking=True)  # what a replay reads is not known before it runs
    torch.cuda._sleep(LATE_CYCLES)
    graph.replay()
    host.copy_(later, non_blocking=True)
    torch.cuda.synchronize()
    assert bool((on_device == 1).all())
    assert bool((host == 2).all())


def test_functions_of_the_host_use_the_memory_in_order() -> None:
    host, later = _pinned(), torch.full((1024,), 2.0, device="cuda")
    stream = torch.cuda.current_stream()
    found = []
    torch.cuda.synchronize()
    fill = HOST_FUNCTION(lambda _: host.fill_(1))
    read = HOST_FUNCTION(lambda _: found.append(host.tolist()))
    with Gate(stream.cuda_stream):
        launch_on_host(stream.cuda_stream, fill)
        on_device = host.to("cuda", non_blocking=True)
        launch_on_host(stream.cuda_stream, read)
        host.copy_(later, non_blocking=True)
        launch_on_host(stream.cuda_stream, read)
    assert found == [[1.0] * 1024, [2.0] * 1024]
    assert bool((on_device == 1).all())


def test_a_copy_that_is_refused_changes_nothing() -> None:
    host, values = _pinned().fill_(3), torch.ones(1024, device="cuda")
    stream, size = ctypes.c_void_p(), ctypes.c_size_t(4096)
    to, source = ctypes.c_void_p(host.data_ptr()), ctypes.c_void_p(values.data_ptr())
    assert runtime().cudaStreamCreate(ctypes.byref(stream)) == 0
    torch.cuda.synchronize()
    assert runtime().cudaStreamBeginCapture(stream, 0) == 0
    refused = runtime().cudaMemcpyAsync(to, source, size, 2, None)
    assert error_of(refused) == "cudaErrorStreamCaptureImplicit"
    assert bool((host == 3).all())
    ended = runtime().cudaStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p()))
    assert error_of(ended) == "cudaErrorStreamCaptureInvalidated"
    assert runtime().cudaStreamDestroy(stream) == 0
    host.copy_(values, non_blocking=True)
    assert bool(host.isnan().all())  # no use was left
    torch.cuda.synchronize()
    assert bool((host == 1).all())


def test_memory_is_registered_once() -> None:
    memory, page = torch.zeros(3 * 1024), 4096
    address, library = memory.data_ptr(), runtime()

    def register(offset: int, count: int) -> str:
        begin, size = ctypes.c_void_p(address + offset), ctypes.c_size_t(count)
        return error_of(library.cudaHostRegister(begin, size, 0))

    def unregister(offset: int) -> str:
        return error_of(library.cudaHostUnregister(ctypes.c_void_p(address + offset)))

    assert register(page, page) == "cudaSuccess"
    for offset, count in ((page, page), (0, page + 1), (2 * page - 1, 2), (0, 3 * page)):
        assert register(offset, count) == "cudaErrorHostMemoryAlreadyRegistered"
    assert [register(0, page), register(2 * page, page)] == ["cudaSuccess"] * 2
    assert unregister(page + 1) == "cudaErrorHostMemoryNotRegistered"
    torch.cuda._sleep(LATE_CYCLES)
    assert [unregister(offset) for offset in (0, page, 2 * page)] == ["cudaSuccess"] * 3
    assert torch.cuda.current_stream().query()
    assert unregister(page) == "cudaErrorHostMemoryNotRegistered"
    pinned = ctypes.c_void_p(_pinned().data_ptr())
    assert error_of(library.cudaHostUnregister(pinned)) == "cudaErrorHostMemoryNotRegistered"


def test_memory_may_be_used_again_after_the_wait() -> None:
    host = _pinned()
    for value in range(3):
        host.fill_(value)
        on_device = host.to("cuda", non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        copied.synchronize()
        host.fill_(7)
        assert bool((on_device == value).all())


@pytest.mark.parametrize(
    "copy", ["on_device = host.to('cuda', non_blocking=True)", "host.copy_(on_device, True)"]
)
def test_memory_that_is_written_before_the_wait_is_an_error(copy: str) -> None:
    result = run_program(f"""
host = torch.zeros(1024).pin_memory()
on_device = torch.zeros(1024, device="cuda")
torch.cuda.synchronize()
{copy}
host[3] = 7
torch.cuda.synchronize()
""")
    assert result.returncode != 0
    assert re.search(WRITES_EARLY, result.stderr), result.stderr
    assert "it was submitted by\n    <string>:6" in result.stderr


def test_the_host_reads_nan_if_it_does_not_wait() -> None:
    code = f"{EXCHANGE}print(exchange(torch.ones(4, device='cuda')))"
    assert run_program(code).stdout == "True\n"
    assert run_program(f"waits = False\n{code}").stdout == "False\n"
