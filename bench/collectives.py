"""How fast are all-gather and reduce-scatter of each transport, in the columns of nccl-tests?

The size S of a row counts the unsharded bytes: the output of an all-gather, or the input of a
reduce-scatter on one rank. For N ranks, algbw = S / time and busbw = algbw * (N - 1) / N
(nccl-tests, doc/PERFORMANCE.md). "#wrong" counts wrong elements of the results. As in nccl-tests,
several calls in a row are timed as one. Unlike there, each call has memory of its own, because the
data of a training step is in no cache, either. Systems take turns, and the slowest rank counts.

On the CPU the peer is torch.distributed's gloo. The inputs of "ours" lie where the transport keeps
those of a model; "ours, other inputs" has ordinary tensors. "ours (process_group)" is what ranks of
several hosts use, over gloo, too. "memcpy" copies half as many bytes as
the operation has to read and write (S + S for a gather, S + S / N for a reduction), on all ranks at
the same time. On a GPU the peers are torch's NCCL, and NCCL itself through CuPy. Rows with settings
of lanes (docs/design/cuda.md) have fewer thread blocks, which leave the other multiprocessors to
the compute. There "ours" has inputs and outputs in registered memory, as a model does. Ranks that
share a GPU are only a functional test, and the table says so.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness import ranks
from bench.harness.output import picture, print_table
from bench.harness.runner import Keep
from bench.harness.timing import operands_in_rotation
from fsdp_ext import _C
from fsdp_ext.comm.lanes import lanes_of, nccl_lanes
from fsdp_ext.comm.measure_link import LANES, OPERATIONS, mean_seconds
from fsdp_ext.comm.nccl_settings import POLICIES, describe_lane, nccl_settings

Collective = Callable[[Tensor, Tensor], None]
RANKS = 2
LEAST_IN_ROW = 2  # the fewest calls that are timed as one
# Settings of lanes of their own.
SETTINGS = (
    {"max_ctas": 8},
    {"cta_policy": POLICIES["efficiency"]},
    {"cta_policy": POLICIES["auto"]},
)


@dataclass(frozen=True)
class System:
    """The collectives of one library; each takes its input and its output."""

    all_gather: Collective
    reduce_scatter: Collective
    # Copies the input or the output of an operation to where this system has it.
    place_input: Callable[[Tensor, str], Tensor] = lambda tensor, operation: tensor.clone()
    place_output: Callable[[Tensor, str], Tensor] = lambda tensor, operation: tensor


def ours(lanes: _C.Lanes) -> System:
    """Return fsdp_ext's collectives, on the lanes that models use."""

    def fill(buffer: Tensor, tensor: Tensor) -> Tensor:
        return buffer.view(tensor.dtype).view_as(tensor).copy_(tensor)

    def place_input(tensor: Tensor, operation: str) -> Tensor:
        return fill(lanes.input_buffer(tensor.nbytes, LANES[operation]), tensor)

    def place_output(tensor: Tensor, operation: str) -> Tensor:
        return fill(lanes.output_buffer(tensor.nbytes, LANES[operation]), tensor)

    if lanes.transport == "nccl":
        return System(lanes.all_gather, lanes.reduce_scatter, place_input, place_output)
    return System(lanes.all_gather, lanes.reduce_scatter, place_input)


def torchs() -> System:
    """Return torch.distributed's collectives."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return System(lambda part, whole: gather(whole, part), lambda whole, part: scatter(part, whole))


def raw_nccl() -> System:
    """Return NCCL's collectives through CuPy, on the current stream.

    Raises:
        ImportError: if CuPy is missing, or has no NCCL.
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
    """Return inputs, outputs filled with NaN, and expected outputs, with a row for each call."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    index = torch.arange(size // 4 // world_size, device=device, dtype=torch.float32) % 1024
    if operation == "all_gather":
        source = index + rank
        expected = torch.cat([index + r for r in range(world_size)])
    else:
        source = torch.cat([index + 2 * r for r in range(world_size)]) + rank
        expected = world_size * (index + 2 * rank) + sum(range(world_size))
    calls = operands_in_rotation(size, LEAST_IN_ROW)
    targets = torch.full((calls, expected.numel()), float("nan"), device=device)
    return source.repeat(calls, 1), targets, expected.repeat(calls, 1)


def in_row(
    call: Callable[[Tensor, Tensor], object], inputs: Tensor, outputs: Tensor
) -> list[Callable[[], object]]:
    """Return a call for each row of inputs and outputs."""
    return [partial(call, *pair) for pair in zip(inputs, outputs, strict=True)]


def measure_size(
    found: dict[str, System], operation: str, size: int, device: torch.device, repeats: int
) -> list[dict[str, Any]]:
    """Measure one operation at one size, and check the results; return a row for each system."""
    world_size = dist.get_world_size()
    calls: dict[str, list[Callable[[], object]]] = {}
    outputs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, system in found.items():
        source, target, expected = operands(operation, size, device)
        target = system.place_output(target, operation)
        source = system.place_input(source, operation)
        calls[name] = in_row(getattr(system, operation), source, target)
        outputs[name] = target, expected
    if device.type == "cpu":
        touched = 2 * size if operation == "all_gather" else size + size // world_size
        source = torch.zeros(operands_in_rotation(size, LEAST_IN_ROW), touched // 2 // 4)
        calls["memcpy"] = in_row(lambda a, b: b.copy_(a), source, torch.ones_like(source))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, row in calls.items():
            taken = mean_seconds(row, dist.barrier, device)
            if repeat >= 2:
                seconds[name].append(taken)
    slowest = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    wrong = torch.tensor([int((have != want).sum()) for have, want in outputs.values()])
    dist.all_reduce(wrong)
    quartiles = [statistics.quantiles(times, n=4, method="inclusive") for times in slowest.tolist()]
    of = {name: median for name, (_, median, _) in zip(calls, quartiles, strict=True)}
    rows = []
    for i, (name, (low, median, high)) in enumerate(zip(calls, quartiles, strict=True)):
        algbw = size / median / 1e9
        rows.append(
            {
                "system": name,
                "operation": operation,
                "bytes": size,
                "ranks": world_size,
                "us": median * 1e6,
                "us_low": low * 1e6,
                "us_high": high * 1e6,
                "algbw": algbw,
                "busbw": algbw * (world_size - 1) / world_size,
                "wrong": int(wrong[i]) if name in outputs else None,
                "of_torch": of[next(iter(n for n in of if n.startswith("torch")))] / of[name],
                "of_memcpy": of["memcpy"] / of[name] if "memcpy" in of else None,
            }
        )
    return rows


def systems(device: torch.device) -> tuple[dict[str, System], dict[str, str]]:
    """Return the systems that can run here, and the reasons why others cannot, by name."""
    group = dist.group.WORLD
    assert group is not None
    lanes = lanes_of(group, device)
    found = {f"ours ({lanes.transport})": ours(lanes)}
    missing = {}
    if device.type == "cuda":
        has_policies = torch.cuda.nccl.version() >= (2, 28)
        for settings in SETTINGS if has_policies else SETTINGS[:1]:
            both = replace(nccl_settings(), gather=settings, reduce=settings)
            found[f"ours (nccl, {describe_lane(settings)})"] = ours(nccl_lanes(group, device, both))
        found["torch nccl"] = torchs()
        try:
            found["NCCL through CuPy"] = raw_nccl()
        except ImportError as error:
            missing["NCCL through CuPy"] = f"{error}; pip install fsdp-ext[gpu]"
    else:
        found["ours, other inputs"] = System(lanes.all_gather, lanes.reduce_scatter)
        found["ours (process_group)"] = ours(lanes_of(group, device, "process_group"))
        found["torch gloo"] = torchs()
    return found, missing


def share_gpu() -> None:
    """Let ranks share a GPU (docs/gpu-status.md); call it before NCCL is first used."""
    os.environ |= {
        "NCCL_HOSTID": f"rank{os.environ['RANK']}",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
    }


def join(device: str) -> tuple[torch.device, bool]:
    """Create the process group; return this rank's device, and whether ranks share a GPU."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shared = device == "cuda" and torch.cuda.device_count() < local
    if shared:
        share_gpu()
    return ranks.join(device), shared


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Measure both operations at all sizes."""
    device, shared = join(args.device)
    common = {"device": device.type, "shared_gpu": shared}
    sizes = [2**16, 2**20, 2**24] if args.quick else [2**k for k in range(10, 28, 2)]
    found, missing = systems(device)
    for operation in OPERATIONS:
        for size in sizes:
            for row in measure_size(found, operation, size, device, 8 if args.quick else 20):
                keep({**row, **common})
    for name, why in missing.items():
        keep({"system": name, "error": why, **common})


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    measured = [row for row in rows if "error" not in row]
    note = ", which share a GPU: A FUNCTIONAL TEST ONLY, its times mean nothing"
    first = measured[0]
    shared = note if first["shared_gpu"] else ""
    print(f"fp32 on {first['device']}, {first['ranks']} ranks{shared}")
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
        for row in measured
    ]
    header = ["operation", "system", "bytes", "us", "quartiles", "algbw", "busbw"]
    print_table([*header, "x torch", "of memcpy", "#wrong"], table)
    for row in rows:
        if "error" in row:
            print(f"{row['system']}: not run: {row['error']}")


def fault(rows: list[dict[str, Any]]) -> str | None:
    """Return why the run failed: elements are wrong."""
    wrong = sum(row.get("wrong") or 0 for row in rows)
    return f"{wrong} elements are wrong, see the last column" if wrong else None


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw the bus bandwidth over the size, for each operation."""
    measured = [row for row in rows if "error" not in row]
    title = f"fp32, {measured[0]['ranks']} ranks, {measured[0]['device']}"
    with picture(path, title, columns=len(OPERATIONS)) as all_axes:
        for axes, operation in zip(all_axes, OPERATIONS, strict=True):
            points: dict[str, list[tuple[int, float]]] = {}
            for row in measured:
                if row["operation"] == operation:
                    points.setdefault(row["system"], []).append((row["bytes"], row["busbw"]))
            for name, line in points.items():
                axes.plot(*zip(*line, strict=True), marker="o", label=name)
            axes.set(title=operation, xlabel="bytes", ylabel="busbw, GB/s", xscale="log")
            axes.set_ylim(bottom=0)
            axes.legend()
