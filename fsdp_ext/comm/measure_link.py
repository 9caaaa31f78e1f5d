"""``python -m fsdp_ext measure-link``: measures the transport in use as a link to simulate.

The command times all-gathers and reduce-scatters over a sweep of sizes and fits alpha + S / beta to
every other size. It then compares the fit's predictions with the measurements at the other sizes.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_ext import _C, _build_info
from fsdp_ext.comm.lanes import lanes_of
from fsdp_ext.comm.link import Fit, Link, Sample, fit
from fsdp_ext.comm.transports import (
    OF_GPUS,
    OF_THE_HOST,
    VARIABLE,
    Transport,
    resolve_transport,
)

# By operation, the lane that a model uses for it.
LANES = {"all_gather": "gather", "reduce_scatter": "reduce"}
OPERATIONS = tuple(LANES)
DTYPE = torch.float32
# Bytes summed over all ranks: from a small layer to a large one.
SIZES = [2**k for k in range(14, 27)]
# Each call moves on by this many parts of the buffers, so that its data is not in a cache.
_STRIDE = 7


def measure(lanes: _C.Lanes, device: torch.device, repeats: int) -> list[Sample]:
    """Time both operations at all sizes. All ranks of the default group call this together.

    Sizes take turns, so that a moment in which the machine is busy does not affect one size alone.
    Each call uses another part of large buffers, since in a training step no parameter is still in
    a cache when its collective runs.
    """
    ranks = dist.get_world_size()
    granule = DTYPE.itemsize * ranks
    sizes = [-(-nbytes // granule) * granule for nbytes in SIZES]
    buffers = {operation: buffers_of(lanes, operation, max(sizes), ranks) for operation in LANES}
    seconds: dict[tuple[str, int], list[float]] = {}
    turn = 0
    for repeat in range(repeats + 2):
        for nbytes in sizes:
            turn += 1
            for operation, pair in buffers.items():
                # One of the two is the whole, and the other this rank's part.
                shares = [buffer.numel() * nbytes // max(sizes) for buffer in pair]
                places = map(partial(_part_of, turn=turn), pair, shares)
                call = partial(getattr(lanes, operation), *places)
                taken = mean_seconds([call], partial(lanes.exchange_messages, b"-"), device)
                if repeat >= 2:
                    seconds.setdefault((operation, nbytes), []).append(taken)
    slowest = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [
        Sample(*key, statistics.median(times))
        for key, times in zip(seconds, slowest.tolist(), strict=True)
    ]


def buffers_of(
    lanes: _C.Lanes, operation: str, whole: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return zeros for the input and the output of a collective, in memory as a model has it.

    Transports may be slower with other memory: NCCL where it is not registered.

    Args:
        lanes: the lanes.
        operation: one of ``OPERATIONS``.
        whole: the bytes of all ranks.
        ranks: how many ranks there are.
    """
    lane = LANES[operation]
    part = whole // ranks
    sizes = (part, whole) if operation == "all_gather" else (whole, part)
    source, output = lanes.input_buffer(sizes[0], lane), lanes.output_buffer(sizes[1], lane)
    return source.view(DTYPE).zero_(), output.view(DTYPE).zero_()


def _part_of(buffer: torch.Tensor, count: int, turn: int) -> torch.Tensor:
    """Return a part of ``count`` elements, another one in each turn."""
    parts = buffer.numel() // count
    return buffer[turn * _STRIDE % parts * count :][:count]


def mean_seconds(
    calls: Sequence[Callable[[], object]], barrier: Callable[[], object], device: torch.device
) -> float:
    """Return the mean seconds of collectives in a row, which all ranks begin together.

    Args:
        calls: the collectives.
        barrier: waits for all ranks. ``exchange_messages`` of lanes also wakes the thread of the
            gather lane, which is awake during a step.
        device: this rank's device.
    """
    barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for call in calls:
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / len(calls)


def report(samples: Sequence[Sample], fits: dict[str, Fit]) -> list[str]:
    """Return a table of measured and predicted times and the errors of the fits, as lines."""
    lines = [f"{'operation':<15} {'bytes':>12} {'measured us':>12} {'predicted us':>13} {'off':>7}"]
    for operation in OPERATIONS:
        for i, sample in enumerate(s for s in samples if s.operation == operation):
            predicted = fits[operation].predict(sample.nbytes)
            lines.append(
                f"{operation:<15} {sample.nbytes:>12,} {sample.seconds * 1e6:>12,.1f} "
                f"{predicted * 1e6:>13,.1f} {predicted / sample.seconds - 1:>+7.0%}"
                f"{'' if i % 2 == 0 else '  left out of the fit'}"
            )
    for operation, fitted in fits.items():
        errors = [
            abs(fitted.predict(sample.nbytes) / sample.seconds - 1)
            for sample in _of(samples, operation, held_out=True)
        ]
        lines.append(
            f"{operation}: alpha {fitted.alpha * 1e6:.1f} us, beta {fitted.beta / 1e9:.2f} GB/s, "
            f"residual {fitted.residual:.0%}; at sizes left out of the fit it is off by "
            f"{statistics.median(errors):.0%} (median), {max(errors):.0%} at most"
        )
    return lines


def _of(samples: Sequence[Sample], operation: str, held_out: bool) -> list[Sample]:
    return [s for s in samples if s.operation == operation][1 if held_out else 0 :: 2]


def run(arguments: Sequence[str]) -> int:
    """Measure on the ranks of torchrun, or start ranks; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_ext measure-link", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--transport", choices=[*OF_THE_HOST, *OF_GPUS], help="by default the usual one"
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start, unless torchrun did")
    parser.add_argument("--repeats", type=int, default=20, help="repeats of each size")
    parser.add_argument("--out", metavar="FILE", help="write the link here, for Link.load")
    args = parser.parse_args(arguments)
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}; pass at least 1")
    if args.out and not Path(args.out).absolute().parent.is_dir():
        parser.error(f"--out is in a directory that does not exist: {args.out}; make it first")
    if args.out and Path(args.out).is_dir():
        parser.error(f"--out needs a file and got the directory {args.out}; name a file in it")
    asked = args.transport or os.environ.get(VARIABLE)
    has_gpu = _build_info.BUILD_KIND == "CUDA" and torch.cuda.is_available()
    on_gpu = asked in OF_GPUS or (not asked and has_gpu)
    if on_gpu and not has_gpu:
        parser.error(f"{asked} needs GPUs and fsdp_ext's CUDA build; choose another transport")
    try:
        transport = resolve_transport(args.transport, "cuda" if on_gpu else "cpu")
    except ValueError as error:
        parser.error(str(error))
    if "RANK" not in os.environ:
        if args.ranks < 2:
            parser.error(f"--ranks is {args.ranks}; pass at least 2")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={args.ranks}", "-m", "fsdp_ext", "measure-link", *arguments]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        return subprocess.run(command, check=False, env=environment).returncode
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        _measure_and_print(transport, device, args.repeats, args.out)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


def _measure_and_print(
    transport: Transport, device: torch.device, repeats: int, path: str | None
) -> None:
    assert dist.group.WORLD is not None
    lanes = lanes_of(dist.group.WORLD, device, transport)
    if dist.get_world_size() < 2:
        raise SystemExit("measure-link needs at least 2 ranks, but there is 1. Start more.")
    samples = measure(lanes, device, repeats)
    if dist.get_rank() != 0:
        return
    fits = {operation: fit(_of(samples, operation, held_out=False)) for operation in OPERATIONS}
    gather, reduce = (fits[operation] for operation in OPERATIONS)
    ranks = dist.get_world_size()
    link = Link(
        f"{lanes.transport}, {ranks} ranks",
        alpha=gather.alpha,
        beta=gather.beta,
        reduce_alpha=reduce.alpha,
        reduce_beta=reduce.beta,
        ranks=ranks,
        source="measured by python -m fsdp_ext measure-link",
    )
    print(f"{link.name}, fp32 on {device.type}")
    print("\n".join(report(samples, fits)))
    if path is not None:
        measured = {
            "samples": [asdict(sample) for sample in samples],
            "residual": {operation: fitted.residual for operation, fitted in fits.items()},
            "torch": torch.__version__,
            "machine": platform.machine(),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        }
        link.save(path, measured)
        print(f"wrote {path}: Simulated(world_size={ranks}, link=Link.load({path!r}))")
