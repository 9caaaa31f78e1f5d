"""Are pack, unpack and cast of Llama blocks as fast as a plain copy and as PyTorch's operators?

The bandwidth of a row counts bytes read and written. "of copy" compares it with one plain copy of
as many bytes in the same run; 1.00 is as fast. "of torch" is PyTorch's time divided by ours, with
the operators that FSDP2 uses: _chunk_cat, split_with_sizes_copy and _foreach_copy_. Ours also
divides packed gradients by the number of ranks, which FSDP2 does in its collective for these
dtypes. "#wrong" counts elements that differ from PyTorch's result. All calls take turns, on several
operands if a single one would stay in a cache. The table has medians and quartiles. --quick divides
the sizes of a block by 16. On a GPU some rows pack on a part of the multiprocessors, a limit that
training gets from FSDP_EXT_PACK_MULTIPROCESSORS. They show how many saturate the memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.harness.output import picture, print_table
from bench.harness.runner import Keep
from bench.harness.timing import (
    Rotation,
    Timing,
    as_microseconds,
    operands_in_rotation,
    time_in_turns,
    time_on_gpu,
)
from fsdp_ext import _C

# The shapes of a block's weights and norms: Llama 2, 7B and 70B.
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "7B": [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)] + [(4096,)] * 2,
    "70B": [(8192, 8192)] * 2
    + [(1024, 8192)] * 2
    + [(28672, 8192)] * 2
    + [(8192, 28672)]
    + [(8192,)] * 2,
}
WORLD_SIZES = (8, 64)
SHARES = (8, 4, 3, 2)  # a row packs on one of so many parts of a GPU's multiprocessors


@dataclass
class Operation:
    """An operation to time: our call, PyTorch's call, and the check of our result."""

    name: str
    ours: Callable[[], Any]
    peer: Callable[[], Any]
    peer_name: str
    moved_bytes: int
    count_wrong: Callable[[], int]


def chunk_of(shape: tuple[int, ...], world_size: int) -> int:
    """Return the elements of one rank's chunk."""
    columns = shape[1] if len(shape) > 1 else 1
    return -(-shape[0] // world_size) * columns


def pack_operation(
    packer: _C.Packer,
    shapes: list[tuple[int, ...]],
    world_size: int,
    dtype: torch.dtype,
    to: torch.dtype,
    device: torch.device,
) -> Operation:
    """Pack gradients into the rank-major reduce input, scaled by 1 / world size."""
    gradients = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    entries, offset = [], 0
    for shape, gradient in zip(shapes, gradients, strict=True):
        chunk = chunk_of(shape, world_size)
        entries.append((gradient.numel(), chunk, offset, 1))
        offset += chunk
    got = torch.empty(world_size * offset, dtype=to, device=device)
    expected = torch.empty(world_size, offset, dtype=to, device=device)
    plan = packer.pack_plan(entries, offset, world_size)
    scale = 1.0 / world_size

    def with_torch() -> None:
        torch._chunk_cat(gradients, dim=0, num_chunks=world_size, out=expected)

    def ours() -> None:
        packer.pack(plan, gradients, dtype, got, scale, False)

    def count_wrong() -> int:
        return int((got != expected.mul(scale).view(-1)).sum())

    numel = sum(gradient.numel() for gradient in gradients)
    moved = numel * (dtype.itemsize + to.itemsize)
    name = f"pack {short(dtype)} to {short(to)}"
    return Operation(name, ours, with_torch, "_chunk_cat", moved, count_wrong)


def unpack_operation(
    packer: _C.Packer,
    shapes: list[tuple[int, ...]],
    world_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Operation:
    """Unpack the rank-major staging buffer into parameters."""
    chunks = [chunk_of(shape, world_size) for shape in shapes]
    staging = torch.randn(world_size, sum(chunks), device=device).to(dtype)
    size = dtype.itemsize
    entries, source, target = [], 0, 0
    for chunk in chunks:
        entries.append((chunk * size, source, target, 1))
        source += chunk * size
        target += world_size * chunk * size
    got = torch.empty(target // size, dtype=dtype, device=device)
    expected = [torch.empty(world_size, chunk, dtype=dtype, device=device) for chunk in chunks]
    plan = packer.unpack_plan(entries, source, world_size)

    def with_torch() -> None:
        torch.split_with_sizes_copy(staging, chunks, dim=1, out=expected)

    def count_wrong() -> int:
        flat = torch.cat([part.view(-1) for part in expected])
        return int((got != flat).sum())

    moved = 2 * staging.numel() * size
    return Operation(
        f"unpack {short(dtype)}",
        partial(packer.unpack, plan, staging, got),
        with_torch,
        "split_with_sizes_copy",
        moved,
        count_wrong,
    )


def cast_operation(
    packer: _C.Packer,
    shapes: list[tuple[int, ...]],
    world_size: int,
    dtype: torch.dtype,
    to: torch.dtype,
    device: torch.device,
) -> Operation:
    """Cast the flat shard into the gather input."""
    chunks = [chunk_of(shape, world_size) for shape in shapes]
    source = torch.randn(sum(chunks), device=device).to(dtype)
    got = torch.empty(sum(chunks), dtype=to, device=device)
    expected = torch.empty_like(got)
    plan = packer.cast_plan([(0, 0, sum(chunks), dtype, to)])
    pieces = list(source.split(chunks))
    targets = list(expected.split(chunks))

    def with_torch() -> None:
        torch._foreach_copy_(targets, pieces)

    def ours() -> None:
        packer.cast(plan, source, got, 1.0, False)

    def count_wrong() -> int:
        return int((got != expected).sum())

    moved = source.numel() * (dtype.itemsize + to.itemsize)
    name = f"cast {short(dtype)} to {short(to)}"
    return Operation(name, ours, with_torch, "_foreach_copy_", moved, count_wrong)


def pack_on_few(
    shapes: list[tuple[int, ...]], world_size: int, device: torch.device, share: int
) -> Operation:
    """Pack on one of ``share`` equal parts of a GPU's multiprocessors."""
    few = max(1, torch.cuda.get_device_properties(device).multi_processor_count // share)
    packer = _C.Packer(gpu=0, multiprocessors=few)
    operation = pack_operation(packer, shapes, world_size, torch.bfloat16, torch.float32, device)
    operation.name += f", on {few} multiprocessors"
    return operation


def short(dtype: torch.dtype) -> str:
    """Return a dtype's name in tables."""
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def operations(
    shapes: list[tuple[int, ...]], world_size: int, device: torch.device
) -> list[Callable[[], Operation]]:
    """Return a function for each operation, which makes it on memory of its own."""
    packer = _C.Packer(gpu=0 if device.type == "cuda" else None)
    bf16, fp32 = torch.bfloat16, torch.float32
    makers = [
        partial(pack_operation, packer, shapes, world_size, bf16, bf16, device),
        partial(pack_operation, packer, shapes, world_size, bf16, fp32, device),
        partial(unpack_operation, packer, shapes, world_size, bf16, device),
        # A shard of many ranks would fit into a cache, so this casts the shard of a single rank.
        partial(cast_operation, packer, shapes, 1, fp32, bf16, device),
    ]
    if device.type == "cuda":
        makers += [partial(pack_on_few, shapes, world_size, device, share) for share in SHARES]
    return makers


def measure_one(
    make: Callable[[], Operation], device: torch.device, repeats: int
) -> dict[str, Any]:
    """Measure one operation; return its row."""
    found = [make()]
    found += [make() for _ in range(operands_in_rotation(found[0].moved_bytes) - 1)]
    moved = found[0].moved_bytes

    def copy() -> Callable[[], Any]:
        plain = torch.empty(moved // 2, dtype=torch.uint8, device=device)
        return partial(torch.empty_like(plain).copy_, plain)

    time = time_on_gpu if device.type == "cuda" else time_in_turns
    seconds = time(
        {
            "ours": Rotation([operation.ours for operation in found]),
            "torch": Rotation([operation.peer for operation in found]),
            "copy": Rotation([copy() for _ in found]),
        },
        repeats,
        warmup=max(5, len(found)),  # runs each operand once at least, so that all can be checked
    )
    timings = {name: Timing.of(values) for name, values in seconds.items()}
    return {
        "operation": found[0].name,
        "bytes": moved,
        "us": {name: as_microseconds(timing) for name, timing in timings.items()},
        "gb_per_s": moved / timings["ours"].median / 1e9,
        "of_copy": timings["copy"].median / timings["ours"].median,
        "peer": found[0].peer_name,
        "of_torch": timings["torch"].median / timings["ours"].median,
        "wrong": sum(operation.count_wrong() for operation in found),
    }


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Measure each operation on both blocks, for both world sizes."""
    device = torch.device(args.device)
    divisor = 16 if args.quick else 1
    for model, full in SHAPES.items():
        shapes = [tuple(size // divisor for size in shape) for shape in full]
        for world_size in WORLD_SIZES:
            for make in operations(shapes, world_size, device):
                row = measure_one(make, device, 8 if args.quick else 30)
                keep({"model": model, "world_size": world_size, "divisor": divisor, **row})
                if device.type == "cuda":
                    torch.cuda.empty_cache()


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    if rows[0]["divisor"] > 1:
        print(f"the sizes of a block are divided by {rows[0]['divisor']}")
    header = ["operation", "block", "ranks", "us", "quartiles", "GB/s", "of copy", "of torch"]
    table = [
        [
            row["operation"],
            row["model"],
            str(row["world_size"]),
            f"{row['us']['ours']['median']:,.0f}",
            f"{row['us']['ours']['low']:,.0f} to {row['us']['ours']['high']:,.0f}",
            f"{row['gb_per_s']:,.0f}",
            f"{row['of_copy']:.2f}",
            f"{row['of_torch']:.2f}",
            row["peer"],
            str(row["wrong"]),
        ]
        for row in rows
    ]
    print_table([*header, "torch's", "#wrong"], table)


def fault(rows: list[dict[str, Any]]) -> str | None:
    """Return why the run failed: elements are wrong."""
    wrong = sum(row["wrong"] for row in rows)
    return f"{wrong} elements are wrong, see the last column" if wrong else None


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw the bandwidth of each operation relative to a copy, ours beside torch's."""
    labels = [f"{row['operation']}\n{row['model']}, {row['world_size']} ranks" for row in rows]
    ours = [row["of_copy"] for row in rows]
    torchs = [row["us"]["copy"]["median"] / row["us"]["torch"]["median"] for row in rows]
    places = range(len(rows))
    with picture(path, "bandwidth relative to a plain copy") as axes:
        axes.figure.set_size_inches(7, 0.5 * len(rows) + 1.5)
        axes.barh([place - 0.2 for place in places], ours, height=0.4, label="ours")
        axes.barh([place + 0.2 for place in places], torchs, height=0.4, label="torch's operators")
        axes.set_yticks(list(places), labels, fontsize="small")
        axes.axvline(1.0, color="grey", linestyle="--", label="copy")
        axes.invert_yaxis()
        axes.legend(loc="lower right")
