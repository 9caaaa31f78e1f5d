"""All-gather and reduce-scatter of each transport, in the columns of nccl-tests.

    torchrun --nproc-per-node 2 bench/collectives.py [--quick] [--json FILE] [--device cuda]

S, the size of a row, is that of the whole: what is gathered, or what each rank brings to a
reduction. algbw = S / time, busbw = algbw * (N - 1) / N for N ranks (nccl-tests,
doc/PERFORMANCE.md). "#wrong" counts elements that are not what they should be. On the host the peer
is torch.distributed's gloo; on a GPU torch's NCCL and NCCL itself, called through CuPy. The slowest
rank counts. Ranks that share a GPU are a functional test and marked so.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import arguments, print_table, write_json
from torch import Tensor

from fsdp_ext.communicator import lanes_of

System = dict[str, Callable[[Tensor, Tensor], None]]


def ours(group: dist.ProcessGroup, device: torch.device) -> System:
    """Return fsdp_ext's collectives, on the lanes that models use."""
    lanes = lanes_of(group, device)
    return {"all_gather": lanes.all_gather, "reduce_scatter": lanes.reduce_scatter}


def torchs() -> System:
    """Return torch.distributed's collectives."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return {
        "all_gather": lambda part, whole: gather(whole, part),
        "reduce_scatter": lambda whole, part: scatter(part, whole),
    }


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

    return {"all_gather": gather, "reduce_scatter": scatter}


def time_collective(
    call: Callable[[Tensor, Tensor], None],
    source: Tensor,
    target: Tensor,
    repeats: int,
) -> list[float]:
    """Return the seconds of each repeat on the slowest rank."""
    on_gpu = source.device.type == "cuda"
    seconds = []
    for _ in range(repeats + 2):
        dist.barrier()
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call(source, target)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(seconds[2:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def measure(
    system: str, collectives: System, op: str, size: int, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Return one row, after a look at the numbers."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    part_numel = size // 4 // ranks
    index = torch.arange(part_numel, device=device, dtype=torch.float32) % 1024
    part = index + rank
    whole = torch.cat([index + 2 * r for r in range(ranks)]) + rank
    if op == "all_gather":
        source, target = part, torch.full_like(whole, float("nan"))
        expected = torch.cat([index + r for r in range(ranks)])
    else:
        source, target = whole, torch.full_like(part, float("nan"))
        expected = ranks * (index + 2 * rank) + sum(range(ranks))
    seconds = time_collective(collectives[op], source, target, repeats)
    wrong = torch.tensor([int((target != expected).sum())])
    dist.all_reduce(wrong)
    median = statistics.median(seconds)
    algbw = size / median / 1e9
    return {
        "system": system,
        "operation": op,
        "bytes": size,
        "ranks": ranks,
        "us": median * 1e6,
        "us_low": statistics.quantiles(seconds, n=4)[0] * 1e6,
        "us_high": statistics.quantiles(seconds, n=4)[2] * 1e6,
        "algbw": algbw,
        "busbw": algbw * (ranks - 1) / ranks,
        "wrong": int(wrong),
    }


def systems(device: torch.device) -> tuple[dict[str, System], dict[str, str]]:
    """Return the systems by name, and why others cannot run here."""
    group = dist.group.WORLD
    assert group is not None
    lanes = lanes_of(group, device)
    found = {f"ours ({lanes.transport})": ours(group, device)}
    missing = {}
    if device.type == "cuda":
        found["torch nccl"] = torchs()
        try:
            found["NCCL through CuPy"] = raw_nccl()
        except ImportError as error:
            missing["NCCL through CuPy"] = f"{error}; pip install fsdp-ext[gpu]"
    else:
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
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    sizes = [2**20, 2**24, 2**26] if args.quick else [2**k for k in range(12, 28, 2)]
    found, missing = systems(device)
    rows = [
        measure(name, collectives, op, size, device, 8 if args.quick else 20)
        for op in ("all_gather", "reduce_scatter")
        for size in sizes
        for name, collectives in found.items()
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
                str(row["wrong"]),
            ]
            for row in rows
        ]
        header = ["operation", "system", "bytes", "us", "quartiles", "algbw", "busbw", "#wrong"]
        print_table(header, table)
        for name, why in missing.items():
            print(f"{name}: not run: {why}")
        if args.json:
            write_json(args.json, "collectives", [{**row, "shared_gpu": shared} for row in rows])
            print(f"wrote {args.json}")
    wrong = sum(row["wrong"] for row in rows)
    dist.barrier()
    dist.destroy_process_group()
    if wrong:
        raise SystemExit(f"{wrong} elements are wrong, see the last column")


if __name__ == "__main__":
    main()
