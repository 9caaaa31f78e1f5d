"""The default streams of the emulated GPU, and which copies the host waits for."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from support.devices import IS_EMULATED
from support.emulated import LATE_CYCLES, Gate, error_of, run_program, runtime

pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="tests the emulated GPU: make rehearsal")

LEGACY, PER_THREAD = 1, 2  # handles
BLOCKING, NON_BLOCKING = 0, 1  # flags
BYTES = 100
NOT_READY = "cudaErrorNotReady"


def _new_stream(flags: int) -> int:
    handle = ctypes.c_void_p()
    assert runtime().cudaStreamCreateWithFlags(ctypes.byref(handle), flags) == 0
    return handle.value or 0


def _query(stream: int) -> str:
    return error_of(runtime().cudaStreamQuery(ctypes.c_void_p(stream)))


# - The legacy default stream

TWO_STREAMS = """
import ctypes
from support.emulated import runtime
def stream(flags):
    handle = ctypes.c_void_p()
    assert runtime().cudaStreamCreateWithFlags(ctypes.byref(handle), flags) == 0
    return torch.cuda.ExternalStream(handle.value)
values = torch.zeros(1000, device="cuda")
torch.cuda.synchronize()
for each in {streams}:
    with torch.cuda.stream(each):
        torch.cuda._sleep(1_000_000)
        values.add_(1)
torch.cuda.synchronize()
print(values.sum().item())
"""


@pytest.mark.parametrize(
    "streams",
    [
        "stream(0), torch.cuda.default_stream(), stream(0)",
        "torch.cuda.default_stream(), stream(0), torch.cuda.default_stream()",
    ],
)
def test_the_legacy_default_stream_and_blocking_streams_wait_for_each_other(streams: str) -> None:
    result = run_program(TWO_STREAMS.format(streams=streams))
    assert (result.stdout, result.stderr) == ("3000.0\n", "")


@pytest.mark.parametrize(
    "streams", ["stream(1), torch.cuda.default_stream()", "stream(0), stream(0)"]
)
def test_other_streams_do_not_wait_for_each_other(streams: str) -> None:
    result = run_program(TWO_STREAMS.format(streams=streams))
    assert "nothing orders" in result.stderr
    assert result.returncode != 0


def test_an_event_of_the_legacy_default_stream_comes_after_blocking_streams() -> None:
    blocking = torch.cuda.ExternalStream(_new_stream(BLOCKING))
    values = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(blocking):
        torch.cuda._sleep(LATE_CYCLES)
        values.add_(1)
    event = torch.cuda.Event()
    event.record(torch.cuda.default_stream())
    with torch.cuda.stream(torch.cuda.Stream()):
        event.wait()
        assert values.sum().item() == 8


def test_the_host_waits_for_blocking_streams_by_the_legacy_default_stream() -> None:
    blocking, other = _new_stream(BLOCKING), _new_stream(NON_BLOCKING)
    with Gate(blocking) as gate, Gate(other):
        assert [_query(stream) for stream in (0, LEGACY, blocking, other)] == [NOT_READY] * 4
        gate.open()
        assert runtime().cudaStreamSynchronize(None) == 0
        assert [_query(stream) for stream in (0, LEGACY, blocking, other)] == [
            *["cudaSuccess"] * 3,
            NOT_READY,
        ]


def test_work_of_a_destroyed_blocking_stream_comes_first() -> None:
    stream = _new_stream(BLOCKING)
    with Gate(stream):
        assert runtime().cudaStreamDestroy(ctypes.c_void_p(stream)) == 0
        assert _query(0) == NOT_READY


@pytest.mark.parametrize("flags", [BLOCKING, NON_BLOCKING])
def test_the_host_waits_for_a_destroyed_stream_with_its_device(flags: int) -> None:
    handle = _new_stream(flags)
    values = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
        torch.cuda._sleep(LATE_CYCLES)
        values.add_(1)
    assert runtime().cudaStreamDestroy(ctypes.c_void_p(handle)) == 0
    torch.cuda.synchronize()
    values.add_(1)  # an error, if nothing orders it after the other stream
    assert values.tolist() == [2] * 8


def test_events_refuse_a_destroyed_stream() -> None:
    event, stream = ctypes.c_void_p(), ctypes.c_void_p(_new_stream(NON_BLOCKING))
    assert runtime().cudaEventCreateWithFlags(ctypes.byref(event), 0) == 0
    assert runtime().cudaEventRecord(event, None) == 0
    assert runtime().cudaStreamDestroy(stream) == 0
    for result in (
        runtime().cudaEventRecord(event, stream),
        runtime().cudaStreamWaitEvent(stream, event, 0),
        runtime().cudaStreamWaitEvent(stream, event, 1),  # as an external event
    ):
        assert error_of(result) == "cudaErrorInvalidResourceHandle"
    assert runtime().cudaEventDestroy(event) == 0


def test_default_streams_are_not_destroyed() -> None:
    for handle in (0, LEGACY, PER_THREAD):
        destroyed = runtime().cudaStreamDestroy(ctypes.c_void_p(handle))
        assert error_of(destroyed) == "cudaErrorInvalidResourceHandle"


def test_streams_know_their_flags() -> None:
    for stream, flags in (
        (_new_stream(BLOCKING), BLOCKING),
        (_new_stream(NON_BLOCKING), NON_BLOCKING),
        (0, BLOCKING),
        (torch.cuda.Stream().cuda_stream, NON_BLOCKING),
    ):
        found = ctypes.c_uint()
        assert runtime().cudaStreamGetFlags(ctypes.c_void_p(stream), ctypes.byref(found)) == 0
        assert found.value == flags
    made = runtime().cudaStreamCreateWithFlags(ctypes.byref(ctypes.c_void_p()), 2)
    assert error_of(made) == "cudaErrorInvalidValue"


def test_each_thread_has_a_default_stream_of_its_own() -> None:
    found = {}
    with Gate(PER_THREAD):
        thread = threading.Thread(target=lambda: found.update(other=_query(PER_THREAD)))
        thread.start()
        thread.join()
        found.update(own=_query(PER_THREAD), legacy=_query(0))
    assert found == {"other": "cudaSuccess", "own": NOT_READY, "legacy": NOT_READY}
    assert runtime().cudaStreamSynchronize(ctypes.c_void_p(PER_THREAD)) == 0


def test_the_legacy_default_stream_does_not_wait_for_a_capture() -> None:
    library, stream = runtime(), ctypes.c_void_p(_new_stream(BLOCKING))
    values = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    assert error_of(library.cudaStreamBeginCapture(None, 0)) == "cudaErrorStreamCaptureUnsupported"
    for call in (
        lambda: library.cudaMemsetAsync(ctypes.c_void_p(values.data_ptr()), 0, 4, None),
        lambda: library.cudaStreamSynchronize(None),
        lambda: library.cudaStreamQuery(None),
    ):
        assert library.cudaStreamBeginCapture(stream, 0) == 0
        assert error_of(call()) == "cudaErrorStreamCaptureImplicit"
        ended = library.cudaStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p()))
        assert error_of(ended) == "cudaErrorStreamCaptureInvalidated"
    assert library.cudaStreamDestroy(stream) == 0


# - Copies that the host waits for

Allocate = Callable[[], torch.Tensor]
MEMORY: dict[str, Allocate] = {
    "pageable": lambda: torch.zeros(BYTES, dtype=torch.uint8),
    "pinned": lambda: torch.zeros(BYTES, dtype=torch.uint8).pin_memory(),
    "device": lambda: torch.zeros(BYTES, dtype=torch.uint8, device="cuda"),
}
TO_DEVICE, TO_HOST, WITHIN_DEVICE, WITHIN_HOST = 1, 2, 3, 0
# For each source, target and kind of copy: what the host waits for in cudaMemcpyAsync, and in
# cudaMemcpy. It waits for nothing ("-"), until the source is read ("read"), until the copy is done
# ("all"), or for the stream's earlier work and then until the source is read ("read after all").
ROWS = {
    ("pageable", "device", TO_DEVICE): ("read", "read after all"),
    ("pinned", "device", TO_DEVICE): ("-", "all"),
    ("device", "pageable", TO_HOST): ("all", "all"),
    ("device", "pinned", TO_HOST): ("-", "all"),
    ("device", "device", WITHIN_DEVICE): ("-", "-"),
    ("pageable", "pageable", WITHIN_HOST): ("all", "all"),
    ("pageable", "pinned", WITHIN_HOST): ("all", "all"),
    ("pinned", "pageable", WITHIN_HOST): ("all", "all"),
    ("pinned", "pinned", WITHIN_HOST): ("all", "all"),
}
CASES = [
    (source, target, kind, call, waits)
    for (source, target, kind), both in ROWS.items()
    for call, waits in zip(("cudaMemcpyAsync", "cudaMemcpy"), both, strict=True)
]


@pytest.fixture
def _idle() -> Iterator[None]:
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.usefixtures("_idle")
@pytest.mark.parametrize(("source", "target", "kind", "call", "waits"), CASES)
def test_the_host_waits_for_a_copy_as_cuda_says(
    source: str, target: str, kind: int, call: str, waits: str
) -> None:
    library = runtime()
    stream = 0 if call == "cudaMemcpy" else torch.cuda.Stream().cuda_stream
    given = [] if call == "cudaMemcpy" else [ctypes.c_void_p(stream)]
    before, after = MEMORY[source](), MEMORY[target]()
    before.fill_(5)
    torch.cuda.synchronize()

    def copy() -> None:
        size = ctypes.c_size_t(BYTES)
        assert getattr(library, call)(_address(after), _address(before), size, kind, *given) == 0

    if waits in ("-", "read"):
        with Gate(stream):
            copy()  # returns although the stream waits
            assert _query(stream) == NOT_READY
            if waits == "read":
                before.fill_(6)
    else:
        event = torch.cuda.Event()
        used = torch.cuda.ExternalStream(stream) if stream != 0 else torch.cuda.default_stream()
        with torch.cuda.stream(used):
            torch.cuda._sleep(LATE_CYCLES)
            event.record()
        copy()
        assert event.query()
        if waits == "all":
            assert _query(stream) == "cudaSuccess"
        else:
            before.fill_(6)
    assert after.tolist() == [5] * BYTES


@pytest.mark.usefixtures("_idle")
@pytest.mark.parametrize("memory", ["device", "pinned"])
def test_the_host_waits_for_memsets_of_pinned_memory_alone(memory: str) -> None:
    values = MEMORY[memory]()
    torch.cuda.synchronize()
    size = ctypes.c_size_t(BYTES)
    if memory == "device":
        with Gate(0):
            assert runtime().cudaMemset(_address(values), 5, size) == 0
            assert _query(0) == NOT_READY
    else:
        torch.cuda._sleep(LATE_CYCLES)
        assert runtime().cudaMemset(_address(values), 5, size) == 0
        assert _query(0) == "cudaSuccess"
    assert values.tolist() == [5] * BYTES


def test_a_memset_needs_memory_of_cuda() -> None:
    values = MEMORY["pageable"]()
    got = runtime().cudaMemset(_address(values), 5, ctypes.c_size_t(BYTES))
    assert error_of(got) == "cudaErrorInvalidValue"
