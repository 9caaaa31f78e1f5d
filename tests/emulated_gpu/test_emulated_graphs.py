"""External events in graphs of the emulated GPU, updates of graphs, and what their nodes are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.devices import IS_EMULATED
from support.emulated import LATE_CYCLES, Gate, error_of, run_program, runtime

pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="tests the emulated GPU: make rehearsal")

# - External events

RECORDS = f"""
event = torch.cuda.Event(external=True)
early, late = (torch.zeros(8, device="cuda") for _ in range(2))
side = torch.cuda.Stream()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    early.add_(1)
    event.record()
    torch.cuda._sleep({LATE_CYCLES})
    late.add_(1)
for _ in range(3):
    graph.replay()
    with torch.cuda.stream(side):
        event.wait()
        print(used.sum().item())
    torch.cuda.current_stream().wait_stream(side)
torch.cuda.synchronize()
print(late.sum().item())
"""
WAITS = f"""
event = torch.cuda.Event(external=True)
values, result = (torch.zeros(8, device="cuda") for _ in range(2))
side = torch.cuda.Stream()
graph = torch.cuda.CUDAGraph()
event.record()  # torch's event exists from now on
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    if waits:
        event.wait()
    result.copy_(values)
for number in range(3):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep({LATE_CYCLES})
        values.fill_(number)
        event.record()
    graph.replay()
    print(result.sum().item())
torch.cuda.synchronize()
"""


def test_a_stream_waits_for_the_middle_of_a_graph() -> None:
    result = run_program(RECORDS.replace("used", "early"))
    assert (result.stdout.split(), result.stderr) == (["8.0", "16.0", "24.0", "24.0"], "")


def test_nothing_orders_what_a_graph_does_after_an_external_event() -> None:
    result = run_program(RECORDS.replace("used", "late"))
    assert result.returncode != 0
    assert "nothing orders" in result.stderr
    assert "aten::add_" in result.stderr


def test_nodes_of_a_graph_wait_for_a_stream() -> None:
    result = run_program("waits = True" + WAITS)
    assert (result.stdout.split(), result.stderr) == (["0.0", "8.0", "16.0"], "")


def test_nodes_of_a_graph_that_do_not_wait_are_not_ordered() -> None:
    result = run_program("waits = False" + WAITS)
    assert result.returncode != 0
    assert "nothing orders" in result.stderr


def test_a_graph_waits_for_an_external_event_of_its_own() -> None:
    event = torch.cuda.Event(external=True)
    values, side = torch.zeros(8, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        values.add_(1)
        event.record()
        with torch.cuda.stream(side):
            event.wait()
            values.mul_(2)
        torch.cuda.current_stream().wait_stream(side)
    for result in (2, 6, 14, 30):
        graph.replay()
        assert values.tolist() == [result] * 8


def test_replays_of_a_graph_on_two_streams_come_after_each_other() -> None:
    values, streams = torch.zeros(8, device="cuda"), [torch.cuda.Stream() for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        values.add_(1)
    with Gate(streams[0].cuda_stream):
        for stream in streams:
            with torch.cuda.stream(stream):
                graph.replay()
        assert not streams[1].query()
    assert values.tolist() == [2] * 8


# - Updates


class _UpdateResult(ctypes.Structure):
    _fields_ = (
        ("result", ctypes.c_int),
        ("node", ctypes.c_void_p),
        ("from_node", ctypes.c_void_p),
    )


def _capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work()
    return graph


def _nodes(graph: torch.cuda.CUDAGraph) -> list[int]:
    count = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    assert runtime().cudaGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert runtime().cudaGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    return [node or 0 for node in nodes]


def _update(
    graph: torch.cuda.CUDAGraph, other: torch.cuda.CUDAGraph
) -> tuple[str, int, int | None, int | None]:
    """Return the error, CUDA's number of what differs, and the two nodes where it differs."""
    found = _UpdateResult()
    error = runtime().cudaGraphExecUpdate(
        ctypes.c_void_p(graph.raw_cuda_graph_exec()),
        ctypes.c_void_p(other.raw_cuda_graph()),
        ctypes.byref(found),
    )
    nodes = _nodes(other)
    at, start = (nodes.index(n) if n is not None else None for n in (found.node, found.from_node))
    return error_of(error), found.result, at, start


def _memset(values: torch.Tensor, value: int) -> None:
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    size = ctypes.c_size_t(values.nbytes)
    address = ctypes.c_void_p(values.data_ptr())
    assert runtime().cudaMemsetAsync(address, value, size, stream) == 0


def test_an_update_replaces_the_work_of_a_graph() -> None:
    one, other = (torch.zeros(8, device="cuda") for _ in range(2))
    graph = _capture(lambda: one.add_(1))
    graph.instantiate()
    graph.replay()
    replacement = _capture(lambda: other.add_(5))
    assert _update(graph, replacement) == ("cudaSuccess", 0, None, None)
    graph.replay()
    assert (one.sum().item(), other.sum().item()) == (8, 40)


def test_an_update_needs_the_same_nodes_and_edges() -> None:
    values = torch.zeros(8, device="cuda")
    side = torch.cuda.Stream()

    def chain() -> None:
        for _ in range(3):
            values.add_(1)

    graph = _capture(chain)
    graph.instantiate()
    changed, type_changed, failure = 2, 3, "cudaErrorGraphExecUpdateFailure"
    assert _update(graph, _capture(lambda: values.add_(1))) == (
        failure,
        changed,
        None,
        None,
    )

    def two_roots() -> None:
        side.wait_stream(torch.cuda.current_stream())
        values[:4].add_(1)
        with torch.cuda.stream(side):
            values[4:].add_(1)
        torch.cuda.current_stream().wait_stream(side)
        values.add_(1)

    def same_count_of_edges() -> None:
        values[:4].add_(1)
        side.wait_stream(torch.cuda.current_stream())
        values[:4].add_(1)
        with torch.cuda.stream(side):
            values[4:].add_(1)
        torch.cuda.current_stream().wait_stream(side)

    def with_a_memset() -> None:
        values.add_(1)
        _memset(values, 0)
        values.add_(1)

    assert _update(graph, _capture(two_roots)) == (failure, changed, 1, None)
    assert _update(graph, _capture(same_count_of_edges)) == (failure, changed, 2, 0)
    assert _update(graph, _capture(with_a_memset)) == (failure, type_changed, 1, None)
    graph.replay()
    assert values.tolist() == [3] * 8


def test_a_graph_says_what_its_nodes_are(tmp_path: Path) -> None:
    values = torch.zeros(8, device="cuda")
    host = torch.zeros(8).pin_memory()
    event = torch.cuda.Event(external=True)

    def work() -> None:
        values.add_(1)
        _memset(values, 0)
        host.copy_(values, non_blocking=True)
        event.record()
        event.wait()

    graph = _capture(work)
    nodes = _nodes(graph)
    types = []
    for number, node in enumerate(nodes):
        kind, before, count = ctypes.c_int(), (ctypes.c_void_p * 2)(), ctypes.c_size_t(2)
        assert runtime().cudaGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        types.append(kind.value)
        found = runtime().cudaGraphNodeGetDependencies(
            ctypes.c_void_p(node), before, None, ctypes.byref(count)
        )
        assert (found, count.value, before[0]) == (
            0,
            min(number, 1),
            nodes[number - 1] if number > 0 else None,
        )
    kernel, copy, memset, wait, record = 0, 1, 2, 6, 7
    assert types == [kernel, memset, copy, record, wait]
    drawing = tmp_path / "graph.dot"
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    assert runtime().cudaGraphDebugDotPrint(handle, str(drawing).encode(), 0) == 0
    text = drawing.read_text()
    assert '1 [label="a memset"];' in text
    assert "3 -> 4;" in text
