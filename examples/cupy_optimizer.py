"""An optimizer step as one CuPy kernel for each unit, which updates the flat shard in place.

    torchrun --nproc-per-node 1 examples/cupy_optimizer.py

The flat shard and the flat gradient of a unit are two tensors, however many parameters it has.
CuPy reads them through ``__dlpack__``, without a copy. The example needs a GPU and CuPy
(`pip install fsdp-ext[gpu]`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ext import fully_shard

SIGN_SGD = """
extern "C" __global__ void sign_sgd(float* shard, const float* gradient, float rate, long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) {
    float g = gradient[i];
    shard[i] -= rate * ((g > 0.0f) - (g < 0.0f));
  }
}
"""


def step(modules: list[Any], rate: float) -> None:
    """Update all parameters of sharded modules in place, with one launch for each module.

    Args:
        modules: to which ``fully_shard`` was applied.
        rate: the distance by which each element moves.
    """
    import cupy

    kernel = cupy.RawKernel(SIGN_SGD, "sign_sgd")
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        for module in modules:
            shard, gradient = (cupy.from_dlpack(flat) for flat in module.flat_shard())
            blocks = (shard.size + 255) // 256
            kernel((blocks,), (256,), (shard, gradient, cupy.float32(rate), cupy.int64(shard.size)))


def train(steps: int, width: int) -> tuple[float, float]:
    """Fit a small model to random targets; return the first and the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)).cuda()
    layers = [model[0], model[2]]
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    x = torch.randn(256, width, device="cuda")
    y = x[:, :1].sin()
    losses = []
    for _ in range(steps):
        loss = (model(x) - y).square().mean()
        loss.backward()
        step(layers, rate=3e-3)
        model.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1]


def main() -> None:
    """Train on this rank's GPU and print the losses."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    first, last = train(steps=100, width=64)
    if dist.get_rank() == 0:
        print(f"loss {first:.4f} -> {last:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
