"""Try torch and NCCL on GPU 0 without fsdp_ext, so that a machine's fault is not taken for ours.

It multiplies matrices and compares with the host, copies to and from pinned memory, records a CUDA
graph, and runs each collective that fsdp_ext uses over NCCL with one rank.
"""

from __future__ import annotations

import sys
import tempfile
import time

import torch
import torch.distributed as dist


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
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group(
            "nccl", init_method=f"file://{file.name}.store", rank=0, world_size=1
        )
        value = torch.arange(1000.0, device=device)
        out = torch.empty_like(value)
        dist.all_reduce(value)
        dist.all_gather_into_tensor(out, value)
        dist.reduce_scatter_tensor(value, out)
        torch.cuda.synchronize()
        assert value.cpu().equal(torch.arange(1000.0))
        dist.destroy_process_group()


def main() -> int:
    """Try everything; return the exit code."""
    if not torch.cuda.is_available():
        print("FAILED: torch finds no GPU. Check the driver with nvidia-smi.")
        return 1
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    print(f"torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    print(torch.cuda.get_device_properties(device))
    failed = 0
    for attempt in (multiply, copy, capture, communicate):
        start = time.monotonic()
        try:
            attempt(device)
            outcome = "ok"
        except Exception as error:
            outcome = f"FAILED: {type(error).__name__}: {error}"
            failed = 1
        print(f"{attempt.__name__:<12} {time.monotonic() - start:5.1f} s  {outcome}", flush=True)
    print("torch and NCCL do not work here by themselves" if failed else "torch and NCCL work here")
    return failed


if __name__ == "__main__":
    sys.exit(main())
