"""The emulated GPU shows mistakes that a real one would not survive, or might hide."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.devices import IS_EMULATED
from support.emulated import LATE_CYCLES, run_program

pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="tests the emulated GPU: make rehearsal")

FRESH_BYTES = 32 << 20  # more than torch's allocator has in its cache
# How the names of each library's functions begin.
LIBRARIES = {
    "libcuda.so.1": "cu(?!File)[A-Z]",
    "libcudart.so.13": "(__)?cuda[A-Z]",
    "libnccl.so.2": "nccl[A-Z]",
}


def test_fresh_memory_is_nan() -> None:
    torch.cuda.empty_cache()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        fresh = torch.empty(FRESH_BYTES // dtype.itemsize, dtype=dtype, device="cuda")
        assert bool(fresh.isnan().all())
        del fresh
        torch.cuda.empty_cache()


def test_memory_that_torchs_allocator_gives_again_is_nan() -> None:
    values = torch.ones(1000, device="cuda")
    address = values.data_ptr()
    del values
    reused = torch.empty(1000, device="cuda")
    assert reused.data_ptr() == address
    assert bool(reused.isnan().all())


def test_results_that_the_host_computes_come_after_the_poison() -> None:
    values = torch.arange(1000.0, device="cuda")
    for _ in range(50):
        chosen = values[values > 500]  # its shape depends on the values
        assert int(chosen.numel()) == 499
        assert chosen.sum().item() == sum(range(501, 1000))


def test_ranges_have_the_length_of_their_numbers() -> None:
    for end in (1000.0, 4.0, 4.5, 1e6, 1e6 + 1):
        assert torch.arange(end, device="cuda").tolist() == torch.arange(end).tolist()


def test_dropout_draws_from_the_gpus_generator_alone() -> None:
    code = """
values = torch.ones(1000, device="cuda")
drawn = []
for seed in (1, 2):
    torch.manual_seed(seed)  # of the host, too
    torch.cuda.manual_seed(1)
    dropped = torch.nn.functional.dropout(values, 0.25)
    torch.randn(100)
    drawn.append((dropped, torch.randn(3)))
(one, _), (other, _) = drawn
print(torch.equal(one, other), sorted(set(one.tolist()))[0], 600 < int((one > 1).sum()) < 900)
torch.manual_seed(2)
torch.randn(100)
print(torch.equal(drawn[1][1], torch.randn(3)))
"""
    assert run_program(code, EMULATED_GPU_DELAY_US="3000").stdout == "True 0.0 True\nTrue\n"


def test_freed_memory_cannot_be_read() -> None:
    code = f"""
import ctypes
address = torch.empty({FRESH_BYTES}, dtype=torch.uint8, device="cuda").data_ptr()
ctypes.string_at(address, 1)
torch.cuda.empty_cache()
print("freed", flush=True)
ctypes.string_at(address, 1)
"""
    result = run_program(code)
    assert result.stdout == "freed\n", result.stderr
    assert result.returncode == -signal.SIGSEGV


def test_memory_ends_at_the_limit() -> None:
    code = """
print(torch.cuda.mem_get_info())
kept = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
try:
    torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("out of memory")
"""
    result = run_program(code, EMULATED_GPU_MEMORY_MIB="64")
    assert result.stdout == f"({64 << 20}, {64 << 20})\nout of memory\n", result.stderr


MISSING_WAIT = f"""
late = torch.cuda.Stream()
values = torch.zeros(1000, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(late):
    torch.cuda._sleep({LATE_CYCLES})
    values.fill_(1)
too_early = values.clone()
torch.cuda.current_stream().wait_stream(late)
print(too_early.sum().item(), values.sum().item())
"""
GRAPH = """
values = torch.zeros(1, device="cuda")
side = torch.cuda.Stream()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    values.fill_(1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values.mul_(3)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    values.add_(1)
    torch.cuda.current_stream().wait_stream(side)
results = set()
for _ in range(20):
    graph.replay()
    results.add(values.item())
print(sorted(results))
"""


def test_a_missing_wait_changes_numbers() -> None:
    assert run_program(MISSING_WAIT, EMULATED_GPU_RACES="0").stdout == "0.0 1000.0\n"


def test_a_missing_wait_in_a_graph_changes_numbers() -> None:
    assert run_program("waits = True" + GRAPH, EMULATED_GPU_RACES="0").stdout == "[4.0]\n"
    assert run_program("waits = False" + GRAPH, EMULATED_GPU_RACES="0").stdout == "[4.0, 6.0]\n"


# - Work that uses the same memory without an order

ON_ANOTHER_STREAM = """
import torch
side = torch.cuda.Stream()
values = torch.zeros(8, 8, device="cuda")
side.wait_stream(torch.cuda.current_stream())
"""
REUSED = """
with torch.cuda.stream(side):
    sums = values.sum()
if records:
    values.record_stream(side)
del values
torch.empty(8, 8, device="cuda")
"""
# What is right, and what is not: the words that the message has to contain.
ORDERED = {
    "a wait": "with torch.cuda.stream(side):\n    values.add_(1)\n"
    "torch.cuda.current_stream().wait_stream(side)\nvalues.mul_(2)",
    "a wait of the host": "with torch.cuda.stream(side):\n    values.add_(1)\n"
    "side.synchronize()\nvalues.mul_(2)",
    "two reads": "with torch.cuda.stream(side):\n    values.sum()\nvalues.mean()",
    "rows apart": "with torch.cuda.stream(side):\n    values[:4].add_(1)\nvalues[4:].mul_(2)",
    "columns apart": "with torch.cuda.stream(side):\n    values[:, :4].add_(1)\n"
    "values[:, 4:].mul_(2)",
    "memory that is recorded": "records = True" + REUSED,
    "a pinned copy and a query": "host = torch.zeros(8, 8).pin_memory()\n"
    "values.copy_(host, non_blocking=True)\nevent = torch.cuda.Event()\nevent.record()\n"
    "while not event.query():\n    pass\nwith torch.cuda.stream(side):\n    host.to('cuda')",
}
UNORDERED = {
    "a read after a write": (
        "with torch.cuda.stream(side):\n    values.add_(1)\nvalues.sum()",
        ["aten::add_.Tensor", "which writes", "aten::sum", "which reads"],
    ),
    "a write after a read": (
        "with torch.cuda.stream(side):\n    values.sum()\nvalues.add_(1)",
        ["aten::sum", "aten::add_.Tensor", "which writes", "the same 256 bytes"],
    ),
    "a column": (
        "with torch.cuda.stream(side):\n    values[:, 3].add_(1)\nvalues[2:, 2:4].sum()",
        ["the same 4 bytes"],
    ),
    "memory that is not recorded": (
        "records = False" + REUSED,
        ["aten::sum", "what torch's allocator gives"],
    ),
    "a copy to the host": (
        "host = torch.zeros(8, 8).pin_memory()\nwith torch.cuda.stream(side):\n"
        "    host.copy_(values, non_blocking=True)\nvalues.zero_()",
        ["a copy on stream", "which reads"],
    ),
    "nodes of a graph": (
        "waits = False" + GRAPH,
        ["aten::mul_.Tensor", "aten::add_.Tensor"],
    ),
}


@pytest.mark.parametrize("name", ORDERED)
def test_work_that_is_ordered_is_right(name: str) -> None:
    result = run_program(f"{ON_ANOTHER_STREAM}{ORDERED[name]}\ntorch.cuda.synchronize()")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name", UNORDERED)
def test_work_that_is_not_ordered_is_an_error(name: str) -> None:
    code, words = UNORDERED[name]
    result = run_program(f"{ON_ANOTHER_STREAM}{code}\ntorch.cuda.synchronize()")
    assert result.returncode != 0
    assert "nothing orders" in result.stderr
    for each in words:
        assert each in result.stderr
    assert "submitted by\n    " in result.stderr
    assert "the other one by\n    " in result.stderr
    assert "    <string>:" in result.stderr


# - Waits that are left out

TRAINING = """
import torch.distributed as dist
from fsdp_ext import MixedPrecisionPolicy, fully_shard
dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).cuda()
for module in (*model, model):
    fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
for _ in range(2):
    model(torch.ones(2, 64, device="cuda")).sum().backward()
torch.cuda.synchronize()
"""


def _places_of_waits(code: str, listing: Path) -> list[str]:
    result = run_program(code, EMULATED_GPU_LIST_WAITS=str(listing))
    assert (result.returncode, result.stderr) == (0, "")
    lines = listing.read_text().splitlines() if listing.exists() else []
    return [place for call, place in map(str.split, lines) if call == "cudaStreamWaitEvent"]


def test_waits_of_the_extension_are_listed_and_left_out(tmp_path: Path) -> None:
    places = _places_of_waits(TRAINING, tmp_path / "waits")
    assert len(set(places)) == len(places) > 3
    assert all(re.fullmatch(r"[0-9a-f]+([+][0-9a-f]+)*", place) for place in places)
    result = run_program(TRAINING, EMULATED_GPU_DROP_WAITS=",".join(places))
    assert result.returncode != 0
    assert "nothing orders" in result.stderr


def test_only_waits_of_the_extension_are_listed(tmp_path: Path) -> None:
    code = ORDERED["a wait"]
    assert _places_of_waits(f"{ON_ANOTHER_STREAM}{code}", tmp_path / "waits") == []


def test_a_kernel_that_fails_ends_the_device() -> None:
    code = """
table = torch.zeros(3, 2, device="cuda")
torch.nn.functional.embedding(torch.tensor([7], device="cuda"), table)
for _ in range(2):
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("index out of range" in str(error))
"""
    assert run_program(code).stdout == "True\nTrue\n"


def test_what_is_not_emulated_fails_with_its_name() -> None:
    runtime = ctypes.CDLL("libcudart.so.13")
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    error = runtime.cudaGetSymbolAddress(None, None)
    assert error == 801  # cudaErrorNotSupported
    assert runtime.cudaGetErrorString(error) == (
        b"cudaErrorNotSupported: cudaGetSymbolAddress is not emulated"
    )
    runtime.cudaGetLastError()


def _functions(library: Path, pattern: str, imported: bool) -> set[str]:
    """Return the functions with such names that a library imports, or that it has."""
    table = subprocess.run(["objdump", "-T", library], check=True, capture_output=True, text=True)
    rows = [line.split() for line in table.stdout.splitlines() if line[:1].isalnum()]
    names = {row[-1] for row in rows if len(row) > 4 and ("*UND*" in row) == imported}
    return {name for name in names if re.match(pattern, name)}


@pytest.mark.parametrize("library", LIBRARIES)
def test_everything_that_torch_imports_exists(library: str) -> None:
    imported = set[str]()
    for path in (Path(torch.__file__).parent / "lib").glob("*.so"):
        imported |= _functions(path, LIBRARIES[library], imported=True)
    assert len(imported) > 20
    emulated = ctypes.CDLL(library)
    assert [name for name in sorted(imported) if not hasattr(emulated, name)] == []


def test_every_function_of_nccl_exists() -> None:
    real = Path(torch.__file__).parents[1] / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    functions = _functions(real, "nccl", imported=False)
    assert len(functions) > 40
    emulated = ctypes.CDLL("libnccl.so.2")
    added_in_2_30 = {"ncclCommGrow", "ncclPutSignal", "ncclWaitSignal"}
    assert [name for name in sorted(functions | added_in_2_30) if not hasattr(emulated, name)] == []


def test_ordering_tests_fail_without_waits() -> None:
    tests = Path(__file__).resolve().parents[1] / "gpu" / "test_gpu_ordering.py"
    result = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", tests],
        env={**os.environ, "EMULATED_GPU_DROP_WAITS": "all"},
        check=False,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert "2 failed" in result.stdout, result.stdout[-3000:]
