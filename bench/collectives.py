"""All-gather and reduce-scatter of each transport, in the columns of nccl-tests.

    torchrun --nproc-per-node 2 bench/collectives.py [--quick] [--json FILE] [--device cuda]

S, the size of a row, is that of the whole: what is gathered, or what each rank brings to a
reduction. algbw = S / time, busbw = algbw * (N - 1) / N for N ranks (nccl-tests,
doc/PERFORMANCE.md). "#wrong" counts elements that are not what they should be. As there, several
calls in a row are timed as one, but each on memory of its own, since no cache has what a step
gathers. Systems take turns, and the slowest rank counts.

On the host the peer is torch.distributed's gloo. Our inputs are where the transport has a model's
("ours"), or ordinary tensors ("ours, other inputs"). "memcpy" copies, on all ranks at once, half as
many bytes as the operation has to read and write: S + S to gather, S + S / N to reduce. On a GPU
the peers are torch's NCCL and NCCL itself, called through CuPy; ranks that share a GPU are a
functional test and marked so.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import arguments, bind_to_core, leave_ranks, print_table, write_json
from torch import Tensor

from fsdp_ext import _C
from fsdp_ext.communicator import lanes_of

Collective = Callable[[Tensor, Tensor], None]
OPERATIONS = ("all_gather", "reduce_scatter")
BYTES_IN_ROW = 2**27  # of up to 20 calls that are timed as one, each on memory of its own


@dataclass(frozen=True)
class System:
    """Collectives as one library has them: each takes its input and its output."""

    all_gather: Collective
    reduce_scatter: Collective
    # Makes a copy of a tensor where this system's inputs are.
    place: Callable[[Tensor], Tensor] = torch.clone


def ours(lanes: _C.Lanes) -> System:
    """Return fsdp_ext's collectives, on the lanes that models use."""

    def place(tensor: Tensor) -> Tensor:
        return lanes.input_buffer(tensor.nbytes).view(tensor.dtype).view_as(tensor).copy_(tensor)

    return System(lanes.all_gather, lanes.reduce_scatter, place)


def torchs() -> System:
    """Return torch.distributed's collectives."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return System(lambda part, whole: gather(whole, part), lambda whole, part: scatter(part, whole))


def raw_nccl() -> System:
    """Return NCCL's own collectives through CuPy, on the current stream.

    Raises:
        ImportError: if there is no CuPy.
    """
    from cupy.cuda import nccl

    if not getattr(nccl, "available", True):
        raise ImportError("this CuPy has no NCCL")
    name = [nccl.get_unique_id() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    communicator = nccl.NcclCommunicator(dist.get_world_size(), name[0], dist.get_rank())

    def stream() -> int:
        return torch.cuda.current_stream().cuda_stream

    def gather(part: Tensor, whole: Tensor) -> None:
        communicator.allGather(
            part.data_ptr(), whole.data_ptr(), part.numel(), nccl.NCCL_FLOAT32, stream()
        )

    def scatter(whole: Tensor, part: Tensor) -> None:
        communicator.reduceScatter(
            whole.data_ptr(),
            part.data_ptr(),
            part.numel(),
            nccl.NCCL_FLOAT32,
            nccl.NCCL_SUM,
            stream(),
        )

    return System(gather, scatter)


def operands(operation: str, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, outputs of NaN, and what these are to be: a row for each of several calls."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    index = torch.arange(size // 4 // ranks, device=device, dtype=torch.float32) % 1024
    if operation == "all_gather":
        source = index + rank
        expected = torch.cat([index + r for r in range(ranks)])
    else:
        source = torch.cat([index + 2 * r for r in range(ranks)]) + rank
        expected = ranks * (index + 2 * rank) + sum(range(ranks))
    calls = calls_in_row(size)
    targets = torch.full((calls, expected.numel()), float("nan"), device=device)
    return source.repeat(calls, 1), targets, expected.repeat(calls, 1)


def calls_in_row(size: int) -> int:
    """Return how many calls are timed as one."""
    return max(2, min(20, BYTES_IN_ROW // size))


def time_in_row(
    call: Callable[[Tensor, Tensor], object], inputs: Tensor, outputs: Tensor, device: torch.device
) -> float:
    """Return the seconds of one of several calls in a row, which all ranks begin together."""
    pairs = list(zip(inputs, outputs, strict=True))
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for source, target in pairs:
        call(source, target)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / len(pairs)


def measure(
    found: dict[str, System], operation: str, size: int, device: torch.device, repeats: int
) -> list[dict[str, Any]]:
    """Return a row for each system, after a look at the numbers."""
    ranks = dist.get_world_size()
    calls: dict[str, tuple[Callable[[Tensor, Tensor], object], Tensor, Tensor]] = {}
    outputs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, system in found.items():
        source, target, expected = operands(operation, size, device)
        calls[name] = (getattr(system, operation), system.place(source), target)
        outputs[name] = target, expected
    if device.type == "cpu":
        touched = 2 * size if operation == "all_gather" else size + size // ranks
        source = torch.zeros(calls_in_row(size), touched // 2 // 4)
        calls["memcpy"] = (lambda a, b: b.copy_(a), source, torch.ones_like(source))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, call in calls.items():
            taken = time_in_row(*call, device)
            if repeat >= 2:
                seconds[name].append(taken)
    slowest = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    wrong = torch.tensor([int((have != want).sum()) for have, want in outputs.values()])
    dist.all_reduce(wrong)
    medians = slowest.median(dim=1).values.tolist()
    of = dict(zip(calls, medians, strict=True))
    rows = []
    for i, (name, times) in enumerate(zip(calls, slowest.tolist(), strict=True)):
        low, median, high = statistics.quantiles(times, n=4)
        algbw = size / median / 1e9
        rows.append(
            {
                "system": name,
                "operation": operation,
                "bytes": size,
                "ranks": ranks,
                "us": median * 1e6,
                "us_low": low * 1e6,
                "us_high": high * 1e6,
                "algbw": algbw,
                "busbw": algbw * (ranks - 1) / ranks,
                "wrong": int(wrong[i]) if name in outputs else None,
                "of_torch": of[next(iter(n for n in of if n.startswith("torch")))] / of[name],
                "of_memcpy": of["memcpy"] / of[name] if "memcpy" in of else None,
            }
        )
    return rows


def systems(device: torch.device) -> tuple[dict[str, System], dict[str, str]]:
    """Return the systems by name, and why others cannot run here."""
    group = dist.group.WORLD
    assert group is not None
    lanes = lanes_of(group, device)
    found = {f"ours ({lanes.transport})": ours(lanes)}
    missing = {}
    if device.type == "cuda":
        found["torch nccl"] = torchs()
        try:
            found["NCCL through CuPy"] = raw_nccl()
        except ImportError as error:
            missing["NCCL through CuPy"] = f"{error}; pip install fsdp-ext[gpu]"
    else:
        found["ours, other inputs"] = System(lanes.all_gather, lanes.reduce_scatter)
        found["torch gloo"] = torchs()
    return found, missing


def share_gpu() -> None:
    """Let ranks use one GPU, before NCCL's first call: see docs/gpu-status.md."""
    os.environ |= {
        "NCCL_HOSTID": f"rank{os.environ['RANK']}",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
    }


def main() -> None:
    """Measure, print a table, and write JSON if asked to."""
    parser = arguments(__doc__, quick="three sizes, few repeats")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("expects to be started by torchrun: torchrun --nproc-per-node 2 ...")
    device = torch.device(args.device)
    shared = False
    if device.type == "cuda":
        local_rank = int(os.environ["LOCAL_RANK"])
        shared = torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"])
        device = torch.device("cuda", 0 if shared else local_rank)
        torch.cuda.set_device(device)
        if shared:
            share_gpu()
    torch.set_num_threads(1)
    if device.type == "cpu":
        bind_to_core()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    sizes = [2**20, 2**24, 2**26] if args.quick else [2**k for k in range(12, 28, 2)]
    found, missing = systems(device)
    rows = [
        row
        for operation in OPERATIONS
        for size in sizes
        for row in measure(found, operation, size, device, 8 if args.quick else 20)
    ]
    if dist.get_rank() == 0:
        note = ", which share a GPU: FUNCTIONAL ONLY, times mean nothing" if shared else ""
        print(f"fp32 on {device.type}, {dist.get_world_size()} ranks{note}")
        table = [
            [
                row["operation"],
                row["system"],
                f"{row['bytes']:,}",
                f"{row['us']:,.1f}",
                f"{row['us_low']:,.1f} to {row['us_high']:,.1f}",
                f"{row['algbw']:.2f}",
                f"{row['busbw']:.2f}",
                f"{row['of_torch']:.2f}",
                "" if row["of_memcpy"] is None else f"{row['of_memcpy']:.0%}",
                "" if row["wrong"] is None else str(row["wrong"]),
            ]
            for row in rows
        ]
        header = ["operation", "system", "bytes", "us", "quartiles", "algbw", "busbw"]
        header += ["x torch", "of memcpy", "#wrong"]
        print_table(header, table)
        for name, why in missing.items():
            print(f"{name}: not run: {why}")
        if args.json:
            write_json(args.json, "collectives", [{**row, "shared_gpu": shared} for row in rows])
            print(f"wrote {args.json}")
    wrong = sum(row["wrong"] or 0 for row in rows)
    if wrong:
        raise SystemExit(f"{wrong} elements are wrong, see the last column")
    leave_ranks()


if __name__ == "__main__":
    main()
