"""Pack, unpack and cast at the shapes of Llama blocks, beside PyTorch's operators and a plain copy.

    python bench/pack.py [--quick] [--json FILE] [--device cuda]

A row's bandwidth counts bytes read and written. "of copy" is its part of what one copy of as many
bytes reaches in the same run, "of torch" the ratio of times to what FSDP2 uses for the same:
_chunk_cat (with a cast, where there is one), split_with_sizes_copy, _foreach_copy_. "#wrong" counts
elements that differ from PyTorch's. All calls in turns; medians with quartiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import (
    Timing,
    arguments,
    as_microseconds,
    print_table,
    time_in_turns,
    time_on_gpu,
    write_json,
)

from fsdp_ext import _C

# (rows, columns) of a block's weights, and its norms: Llama 2, 7B and 70B.
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "7B": [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)] + [(4096,)] * 2,
    "70B": [(8192, 8192)] * 2
    + [(1024, 8192)] * 2
    + [(28672, 8192)] * 2
    + [(8192, 28672)]
    + [(8192,)] * 2,
}
WORLD_SIZES = (8, 64)


@dataclass
class Operation:
    """One thing to time: ours, PyTorch's, and how many elements of ours are wrong."""

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
    """Gradients to the rank-major reduce input, times 1 / world size."""
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
        expected.mul_(scale)

    def ours() -> None:
        packer.pack(plan, gradients, dtype, got, scale, False)

    def count_wrong() -> int:
        return int((got != expected.view(-1)).sum())

    numel = sum(gradient.numel() for gradient in gradients)
    moved = numel * (dtype.itemsize + to.itemsize)
    name = f"pack {short(dtype)} to {short(to)}"
    return Operation(name, ours, with_torch, "_chunk_cat, mul_", moved, count_wrong)


def unpack_operation(
    packer: _C.Packer,
    shapes: list[tuple[int, ...]],
    world_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Operation:
    """Rank-major staging to parameters."""
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
    """Flat shard to gather input."""
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


def short(dtype: torch.dtype) -> str:
    """Return a dtype's name as tables have it."""
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def measure(
    model: str,
    shapes: list[tuple[int, ...]],
    world_size: int,
    device: torch.device,
    repeats: int,
) -> list[dict[str, Any]]:
    """Return a row for each operation."""
    packer = _C.Packer(gpu=0 if device.type == "cuda" else None)
    bf16, fp32 = torch.bfloat16, torch.float32
    make: list[Callable[[], Operation]] = [
        partial(pack_operation, packer, shapes, world_size, bf16, bf16, device),
        partial(pack_operation, packer, shapes, world_size, bf16, fp32, device),
        partial(unpack_operation, packer, shapes, world_size, bf16, device),
        # A rank's part of a block is small; so that the copy is no matter of caches, of one rank.
        partial(cast_operation, packer, shapes, 1, fp32, bf16, device),
    ]
    rows = []
    for each in make:
        operation = each()
        plain = torch.empty(operation.moved_bytes // 2, dtype=torch.uint8, device=device)
        copied = torch.empty_like(plain)
        time = time_on_gpu if device.type == "cuda" else time_in_turns
        seconds = time(
            {
                "ours": operation.ours,
                "torch": operation.peer,
                "copy": partial(copied.copy_, plain),
            },
            repeats,
        )
        timings = {name: Timing.of(values) for name, values in seconds.items()}
        rows.append(
            {
                "operation": operation.name,
                "model": model,
                "world_size": world_size,
                "bytes": operation.moved_bytes,
                "us": {name: as_microseconds(timing) for name, timing in timings.items()},
                "gb_per_s": operation.moved_bytes / timings["ours"].median / 1e9,
                "of_copy": timings["copy"].median / timings["ours"].median,
                "peer": operation.peer_name,
                "of_torch": timings["torch"].median / timings["ours"].median,
                "wrong": operation.count_wrong(),
            }
        )
        del operation, plain, copied
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    """Measure, print a table, and write JSON if asked to."""
    parser = arguments(__doc__, quick="smaller shapes, fewer repeats")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    rows = []
    for model, shapes in SHAPES.items():
        if args.quick:
            shapes = [tuple(size // 16 for size in shape) for shape in shapes]
        for world_size in WORLD_SIZES:
            rows += measure(model, shapes, world_size, device, 8 if args.quick else 30)
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
    header = ["operation", "block", "ranks", "us", "quartiles", "GB/s", "of copy", "of torch"]
    if args.quick:
        print("quick: a block's sizes divided by 16")
    print_table([*header, "torch's", "#wrong"], table)
    if args.json:
        write_json(args.json, "pack", rows)
        print(f"wrote {args.json}")
    if any(row["wrong"] for row in rows):
        raise SystemExit("some elements are wrong, see the last column")


if __name__ == "__main__":
    main()
