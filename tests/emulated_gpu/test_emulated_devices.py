"""Several emulated GPUs in a process, which may use each other's memory, or none."""

from __future__ import annotations

import pytest
import torch
from support.devices import IS_EMULATED
from support.emulated import run_program
from support.launcher import run_ranks

pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="tests the emulated GPU: make rehearsal")

PRELUDE = """
import contextlib
import ctypes
from support.emulated import Gate, error_of, runtime
cuda = runtime()
BYTES = ctypes.c_size_t(32)
def address(tensor):
    return ctypes.c_void_p(tensor.data_ptr())
def handle(stream):
    return ctypes.c_void_p(stream.cuda_stream)
one, other = (torch.zeros(8, device=f"cuda:{device}") for device in range(2))
torch.cuda.synchronize(0)
torch.cuda.synchronize(1)
torch.cuda.set_device(0)
"""


def _lines(code: str) -> list[str]:
    result = run_program(PRELUDE + code, EMULATED_GPU_DEVICES="2")
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


def test_devices_that_are_hidden_are_not_found() -> None:
    result = run_program("print(torch.cuda.is_available())", CUDA_VISIBLE_DEVICES="")
    assert (result.returncode, result.stdout, result.stderr) == (0, "False\n", "")
    assert run_ranks(torch.cuda.device_count, 1) == [0]
    assert run_ranks(torch.cuda.device_count, 1, device="cuda") == [1]


def test_a_device_has_a_context_once_it_is_current_for_a_call() -> None:
    code = """
import threading
from support.emulated import runtime
def contexts():
    return [torch._C._cuda_hasPrimaryContext(device) for device in range(2)]
torch.cuda.init()
print(contexts())
torch.cuda.set_device(1)
print(contexts())
thread = threading.Thread(target=runtime().cudaDeviceSynchronize)  # on device 0
thread.start()
thread.join()
print(contexts())
"""
    result = run_program(code, EMULATED_GPU_DEVICES="2")
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["[False, False]", "[False, True]", "[True, True]"]


def test_tensors_move_between_devices_whatever_their_layout() -> None:
    code = """
values = torch.arange(12.0, device="cuda:0").view(3, 4)
print(torch.equal(values.to("cuda:1").cpu(), values.cpu()))
print(torch.equal(values.t().to("cuda:1", torch.bfloat16).float().cpu(), values.t().cpu()))
column = torch.zeros(4, 6, device="cuda:1")
column[:, ::2].copy_(values.t()[:, 1:2])  # which is broadcast
print(column[:, ::2].tolist() == values.t()[:, 1:2].expand(4, 3).tolist())
print(column[:, 1::2].sum().item())
print(error_of(cuda.cudaDeviceEnablePeerAccess(1, 0)))  # torch has enabled it
"""
    assert _lines(code) == ["True", "True", "True", "0.0", "cudaErrorPeerAccessAlreadyEnabled"]


def test_access_to_another_device_is_enabled_once_and_disabled_once() -> None:
    code = """
can = ctypes.c_int()
for device, peer in ((0, 1), (1, 0), (0, 0), (0, 2)):
    print(error_of(cuda.cudaDeviceCanAccessPeer(ctypes.byref(can), device, peer)), can.value)
for _ in range(2):
    print(error_of(cuda.cudaDeviceEnablePeerAccess(1, 0)))
for _ in range(2):
    print(error_of(cuda.cudaDeviceDisablePeerAccess(1)))
print(error_of(cuda.cudaDeviceEnablePeerAccess(1, 3)))
print(error_of(cuda.cudaDeviceEnablePeerAccess(0, 0)))
"""
    assert _lines(code) == [
        "cudaSuccess 1",
        "cudaSuccess 1",
        "cudaSuccess 0",
        "cudaErrorInvalidDevice 0",
        "cudaSuccess",
        "cudaErrorPeerAccessAlreadyEnabled",
        "cudaSuccess",
        "cudaErrorPeerAccessNotEnabled",
        "cudaErrorInvalidValue",
        "cudaErrorInvalidDevice",
    ]


USE = """
print(error_of(cuda.cudaMemsetAsync(address(other), 0, BYTES, handle(torch.cuda.Stream(0)))))
for _ in range(2):
    print(error_of(cuda.cudaDeviceSynchronize()))
"""


def test_work_needs_access_to_memory_of_another_device() -> None:
    enable = "assert cuda.cudaDeviceEnablePeerAccess(1, 0) == 0\n"
    assert _lines(enable + USE) == ["cudaSuccess"] * 3
    disable = "assert cuda.cudaDeviceDisablePeerAccess(1) == 0\n"
    for code in (USE, enable + disable + USE):
        result = run_program(PRELUDE + code, EMULATED_GPU_DEVICES="2")
        assert result.stdout.splitlines()[1:] == ["cudaErrorIllegalAddress"] * 2
        assert "device 0 may not use memory of device 1" in result.stderr


def test_work_of_a_graph_needs_access_and_copies_in_it_do_not() -> None:
    code = """
stream = torch.cuda.Stream(0)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream):
    assert cuda.cudaMemcpyPeerAsync(address(other), 1, address(one), 0, BYTES, handle(stream)) == 0
one.fill_(3)
graph.replay()
torch.cuda.synchronize()
print(other.sum().item())
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream):
    assert cuda.cudaMemsetAsync(address(other), 0, BYTES, handle(stream)) == 0
with contextlib.suppress(RuntimeError):  # it may fail so early
    graph.replay()
print(error_of(cuda.cudaDeviceSynchronize()))
"""
    result = run_program(PRELUDE + code, EMULATED_GPU_DEVICES="2")
    assert result.stdout.splitlines() == ["24.0", "cudaErrorIllegalAddress"]
    assert "may not use memory" in result.stderr


def test_copies_between_devices_do_not_hold_the_host() -> None:
    code = """
stream = torch.cuda.Stream(0)
copy = cuda.cudaMemcpyPeerAsync
with Gate(stream.cuda_stream):
    one.fill_(5)
    torch.cuda.current_stream().synchronize()
    print(error_of(copy(address(other), 1, address(one), 0, BYTES, handle(stream))))
    print(error_of(cuda.cudaStreamQuery(handle(stream))))
print(other.sum().item())
print(error_of(copy(address(other), 0, address(one), 0, BYTES, handle(stream))))
print(error_of(copy(address(other), 1, address(one), 7, BYTES, handle(stream))))
"""
    assert _lines(code) == [
        "cudaSuccess",
        "cudaErrorNotReady",
        "40.0",
        "cudaErrorInvalidValue",
        "cudaErrorInvalidValue",
    ]


def test_a_copy_between_devices_without_a_stream_is_ordered_with_all_streams() -> None:
    code = """
before, after = torch.cuda.Stream(0), torch.cuda.Stream(1)
with torch.cuda.stream(before):
    torch.cuda._sleep(5_000_000)
    one.fill_(5)
with Gate(before.cuda_stream):
    print(error_of(cuda.cudaMemcpyPeer(address(other), 1, address(one), 0, BYTES)))
    print(error_of(cuda.cudaStreamQuery(handle(after))))
    with torch.cuda.stream(after):
        other.mul_(2)
    with torch.cuda.stream(before):
        one.fill_(0)
torch.cuda.synchronize(1)
print(other.sum().item(), one.sum().item())
"""
    assert _lines(code) == ["cudaSuccess", "cudaErrorNotReady", "80.0 0.0"]
