"""Try torch and NCCL on GPU 0 without fsdp_ext, to tell failures of the machine from ours.

python tools/gpu_environment.py            multiplies matrices and compares with the host, copies
                                           to and from pinned memory, records a CUDA graph, and
                                           runs collectives over NCCL with one rank
python tools/gpu_environment.py --ranks 2  runs the collectives on two ranks that share the GPU,
                                           as those of the tests do
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_check import MEASURED

# Seconds in which ranks that share a GPU have to end. The start takes most of them.
LIMIT_S = 30.0
TIMED = 10  # collectives whose time is measured


def multiply(device: torch.device) -> None:
    """Multiply integers that every dtype represents."""
    one, other = (torch.randint(-4, 5, (256, 256)).float() for _ in range(2))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = one.to(device, dtype) @ other.to(device, dtype)
        difference = (got.float().cpu() - one @ other).abs().max().item()
        assert difference <= 4, f"{dtype}: {difference}"  # a half precision rounds large sums


def copy(device: torch.device) -> None:
    """Copy to the GPU and back, over pinned memory."""
    source = torch.arange(1 << 20).pin_memory()
    assert source.to(device, non_blocking=True).cpu().equal(source)


def capture(device: torch.device) -> None:
    """Record a CUDA graph and replay it."""
    value = torch.zeros(1000, device=device)
    value += 1
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value += 1
    graph.replay()
    assert value.eq(2).all()


def communicate(device: torch.device) -> None:
    """Run collectives of one rank over NCCL."""
    with tempfile.TemporaryDirectory() as directory:
        run_collectives(device, 0, 1, Path(directory) / "store")


def run_collectives(device: torch.device, rank: int, ranks: int, store: Path) -> None:
    """Run each collective that fsdp_ext uses, and check its result.

    Args:
        device: of this rank.
        rank: of this process.
        ranks: their number.
        store: a file through which ranks find each other.
    """
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LIMIT_S),
    )

    def attempt(name: str, collective: Callable[[], object], got: list[torch.Tensor]) -> None:
        print(f"{name} ...", flush=True)  # the last line if the rank hangs
        collective()
        expected = sum(range(1, ranks + 1))
        assert all(value.cpu().eq(expected).all() for value in got), f"{name} is wrong"

    value = torch.full((1000,), float(rank + 1), device=device)
    attempt("all_reduce", lambda: dist.all_reduce(value), [value])
    whole = torch.zeros(1000 * ranks, device=device)
    attempt("all_gather", lambda: dist.all_gather_into_tensor(whole, value), [whole])
    whole.fill_(rank + 1.0)
    attempt("reduce_scatter", lambda: dist.reduce_scatter_tensor(value, whole), [value])
    start = time.monotonic()
    for _ in range(TIMED):
        dist.all_gather_into_tensor(whole, value)
        whole[:1].item()  # waits for the collective, as a step does in the end
    print(f"a collective takes {(time.monotonic() - start) / TIMED:.6f} s", flush=True)
    dist.destroy_process_group()


def try_one_rank() -> bool:
    """Try everything on this process alone; return whether all of it works."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    print(f"torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    print(torch.cuda.get_device_properties(device))
    works = True
    for attempt in (multiply, copy, capture, communicate):
        start = time.monotonic()
        try:
            attempt(device)
            outcome = "ok"
        except Exception as error:
            outcome = f"FAILED: {type(error).__name__}: {error}"
            works = False
        print(f"{attempt.__name__:<12} {time.monotonic() - start:5.1f} s  {outcome}", flush=True)
    print("torch and NCCL work here" if works else "torch and NCCL do not work here by themselves")
    return works


def try_ranks(ranks: int, device: str, limit_s: float = LIMIT_S) -> bool:
    """Run the collectives on ranks that share the GPU; return whether they work in time."""
    with tempfile.TemporaryDirectory() as directory:
        # torch deprecates names that torch 2.11 needs.
        command = [sys.executable, "-W", "ignore::FutureWarning", __file__]
        command += ["--ranks", str(ranks), "--device", device]
        outputs = [Path(directory) / f"rank{rank}" for rank in range(ranks)]
        processes = []
        for rank, output in enumerate(outputs):
            with output.open("w") as file:
                processes.append(
                    subprocess.Popen(
                        [*command, "--rank", str(rank), "--directory", directory],
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        ends = ends_of(processes, limit_s)
        said = "".join(output.read_text(errors="replace") for output in outputs)
        works = all(end == "ended with exit code 0" for end in ends)
        for rank, (end, output) in enumerate(zip(ends, outputs, strict=True)):
            print(f"rank {rank} {end}. Its last lines:")
            print("\n".join(output.read_text(errors="replace").splitlines()[-20:]))
            log = output.with_suffix(".nccl")
            if not works and log.exists():
                print(f"The last lines of its NCCL:\n{log.read_text(errors='replace')[-2000:]}")
    if works:
        slowest = max(map(float, MEASURED.findall(said)))
        print(f"a collective takes {slowest:.6f} s")
        print(f"{ranks} ranks can share this GPU")
    else:
        print(
            f"{ranks} ranks cannot share this GPU, so what needs that cannot work: tests with 2 or "
            "4 ranks, and `collectives`"
        )
    return works


def ends_of(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> list[str]:
    """Wait for processes and kill those that are late; return how each ended."""
    deadline = time.monotonic() + limit_s
    ends = []
    for process in processes:
        try:
            code = process.wait(timeout=max(0.0, deadline - time.monotonic()))
            ends.append(f"ended with exit code {code}")
        except subprocess.TimeoutExpired:
            ends.append(f"had not ended after {limit_s:.0f} s")
    for process in processes:
        process.kill()
        process.wait()
    return ends


def be_rank(rank: int, ranks: int, device: str, directory: Path) -> None:
    """Run the collectives as one of several ranks of `device`, "cpu" or "cuda"."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from support import shared_gpu

    if device == "cuda":
        log = str(directory / f"rank{rank}.nccl")
        os.environ |= shared_gpu.variables(rank, torch.cuda.nccl.version(), "lo", log)
        torch.cuda.set_device(0)
    run_collectives(torch.device(device), rank, ranks, directory / "store")
    print("ok")


def main() -> int:
    """Try what is asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1, help="how many share the GPU")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="what the ranks use"
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # as in tests; the host's name may have no address
    if args.rank is not None:
        be_rank(args.rank, args.ranks, args.device, args.directory)
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no GPU. Check the driver with nvidia-smi.")
        return 1
    works = try_ranks(args.ranks, args.device) if args.ranks > 1 else try_one_rank()
    return 0 if works else 1


if __name__ == "__main__":
    sys.exit(main())
