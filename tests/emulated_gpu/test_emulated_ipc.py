"""Memory and events of the emulated GPU that processes share."""

from __future__ import annotations

import ctypes
import queue
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from support.devices import IS_EMULATED
from support.emulated import LATE_CYCLES, error_of, runtime

pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="tests the emulated GPU: make rehearsal")

SECONDS = 60


class _MemoryHandle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 64),)


def _handle_of(address: int) -> bytes:
    handle = _MemoryHandle()
    assert runtime().cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(address)) == 0
    return bytes(handle)


def _open(handle: bytes, flags: int = 1) -> tuple[str, ctypes.c_void_p]:
    address = ctypes.c_void_p()
    passed = _MemoryHandle.from_buffer_copy(handle)
    return error_of(runtime().cudaIpcOpenMemHandle(ctypes.byref(address), passed, flags)), address


def _change(inbox: mp.Queue[Any], outbox: mp.Queue[Any]) -> None:
    values, handle = inbox.get(timeout=SECONDS)
    one, same = (torch.cuda.Event.from_ipc_handle(values.device, handle) for _ in range(2))
    one.wait()
    torch.cuda._sleep(LATE_CYCLES)
    values.add_(1)
    one.record()
    answered = torch.cuda.Event(interprocess=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        same.wait()
        torch.cuda._sleep(LATE_CYCLES)
        values.mul_(10)
        answered.record()
        outbox.put((answered.ipc_handle(), values.tolist()))
    inbox.get(timeout=SECONDS)


def _use_handles(inbox: mp.Queue[Any], outbox: mp.Queue[Any]) -> None:
    found = []
    torch.cuda.init()
    handle = inbox.get(timeout=SECONDS)
    found.append(_open(handle, flags=0)[0])
    found.append(_open(b"\1" * 64)[0])
    error, first = _open(handle)
    again, second = _open(handle)
    found += [error, again, first.value == second.value]
    found.append(ctypes.string_at(first.value or 0, 3))
    found.append(error_of(runtime().cudaFree(first)))
    found += [error_of(runtime().cudaIpcCloseMemHandle(first)) for _ in range(3)]
    outbox.put(found)
    inbox.get(timeout=SECONDS)  # until the memory is freed
    outbox.put(_open(handle)[0])


class _Process:
    """Another process that runs a function with an inbox and an outbox."""

    def __init__(self, function: Any) -> None:
        context = mp.get_context("spawn")
        self.inbox, self._outbox = context.Queue(), context.Queue()
        queues = (self.inbox, self._outbox)
        self._process = context.Process(target=function, args=queues, daemon=True)
        self._process.start()

    def receive(self) -> Any:
        try:
            return self._outbox.get(timeout=SECONDS)
        except queue.Empty:
            self._process.kill()
            raise

    def end(self) -> None:
        self._process.join(SECONDS)
        assert self._process.exitcode == 0


def test_another_process_changes_a_tensor_in_order_of_shared_events() -> None:
    other = _Process(_change)
    sent = torch.cuda.Event(interprocess=True)
    torch.cuda._sleep(LATE_CYCLES)
    values = torch.arange(4.0, device="cuda")
    sent.record()
    other.inbox.put((values, sent.ipc_handle()))
    handle, read_there = other.receive()
    # On another stream, which the work above comes before only by the two events.
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.Event.from_ipc_handle(values.device, handle).wait()
        assert values.tolist() == [10, 20, 30, 40]
    assert read_there == [10, 20, 30, 40]
    other.inbox.put("end")
    other.end()


def test_handles_of_memory_follow_cudas_rules() -> None:
    other = _Process(_use_handles)
    address = ctypes.c_void_p()
    assert runtime().cudaMalloc(ctypes.byref(address), ctypes.c_size_t(100)) == 0
    assert runtime().cudaMemset(address, 7, ctypes.c_size_t(100)) == 0
    torch.cuda.synchronize()
    handle = _handle_of(address.value or 0)
    assert _open(handle)[0] == "cudaErrorDeviceUninitialized"  # in the process that made it
    other.inbox.put(handle)
    assert other.receive() == [
        "cudaErrorInvalidValue",
        "cudaErrorInvalidValue",
        "cudaSuccess",
        "cudaSuccess",
        True,
        b"\7\7\7",
        "cudaErrorInvalidValue",  # cudaFree
        "cudaSuccess",
        "cudaSuccess",
        "cudaErrorInvalidValue",  # closed more often than opened
    ]
    assert runtime().cudaFree(address) == 0
    other.inbox.put("freed")
    assert other.receive() == "cudaErrorInvalidResourceHandle"
    other.end()


def test_only_memory_of_cuda_malloc_is_shared() -> None:
    of_pool = ctypes.c_void_p()
    assert runtime().cudaMallocAsync(ctypes.byref(of_pool), ctypes.c_size_t(100), None) == 0
    pinned = ctypes.c_void_p(torch.zeros(8).pin_memory().data_ptr())
    for address in (of_pool, pinned):
        got = runtime().cudaIpcGetMemHandle(ctypes.byref(_MemoryHandle()), address)
        assert error_of(got) == "cudaErrorInvalidValue"
    assert runtime().cudaFreeAsync(of_pool, None) == 0


def test_only_events_made_for_it_are_shared() -> None:
    event, handle = ctypes.c_void_p(), _MemoryHandle()
    interprocess, no_timing = 4, 2
    made = runtime().cudaEventCreateWithFlags(ctypes.byref(event), interprocess)
    assert error_of(made) == "cudaErrorInvalidValue"
    assert runtime().cudaEventCreateWithFlags(ctypes.byref(event), no_timing) == 0
    got = runtime().cudaIpcGetEventHandle(ctypes.byref(handle), event)
    assert error_of(got) == "cudaErrorInvalidResourceHandle"
    assert runtime().cudaEventDestroy(event) == 0
    assert runtime().cudaEventCreateWithFlags(ctypes.byref(event), interprocess | no_timing) == 0
    assert runtime().cudaIpcGetEventHandle(ctypes.byref(handle), event) == 0
    opened = runtime().cudaIpcOpenEventHandle(ctypes.byref(ctypes.c_void_p()), handle)
    assert error_of(opened) == "cudaErrorDeviceUninitialized"
    assert runtime().cudaEventDestroy(event) == 0
