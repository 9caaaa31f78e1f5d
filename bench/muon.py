"""How long does a step of Muon take on sharded matrices?

The matrices are those of transformer blocks. "PyTorch" is `torch.optim.Muon` over the DTensors of
FSDP2: every iteration for a matrix gathers what its products need, or adds up partial products.
"fsdp_ext" is `fsdp_ext.optim.Muon`: one rank gets each matrix and orthogonalises it. "unsharded" is
`torch.optim.Muon` over whole matrices, as each rank of DDP steps them. All systems step in turns,
in random order, on given gradients; the slowest rank counts. "of PyTorch" is the time divided by
the time of "PyTorch". Results are compared with the unsharded ones; "differs by" is the largest
difference, relative to the largest element.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp_ext.optim
from bench.harness import ranks
from bench.harness.output import print_table
from bench.harness.runner import Keep
from bench.harness.timing import Timing, as_microseconds, time_in_turns

RANKS = 2
WARMUP = 2


def matrices_of(width: int, layers: int, device: torch.device) -> list[torch.Tensor]:
    """Return equal matrices on all ranks."""
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


class System:
    """Matrices with gradients, and their optimizer.

    Args:
        kind: the class of the optimizer.
        values: the matrices, which are also the gradients.
        mesh: the ranks that shard them; None to leave them whole.
    """

    def __init__(self, kind: Any, values: list[torch.Tensor], mesh: Any) -> None:
        def placed(value: torch.Tensor) -> torch.Tensor:
            own = value.clone()
            return own if mesh is None else distribute_tensor(own, mesh, [Shard(0)])

        self.params = [nn.Parameter(placed(value)) for value in values]
        for param, value in zip(self.params, values, strict=True):
            param.grad = placed(value)
        self.optimizer = kind(self.params, lr=1e-3)

    def step(self) -> None:
        """Step together with the other ranks, until the device has finished."""
        dist.barrier()
        self.optimizer.step()
        if self.params[0].is_cuda:
            torch.cuda.synchronize()

    def whole(self) -> list[torch.Tensor]:
        """Return the whole matrices."""
        values = [param.detach() for param in self.params]
        return [value.full_tensor() if isinstance(value, DTensor) else value for value in values]


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Step all systems in turns."""
    device = ranks.join(args.device)
    world_size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))
    on_gpu = device.type == "cuda"
    width, layers, repeats = (2048, 8, 20) if on_gpu else (384, 4, 20)
    if args.quick:
        width, layers, repeats = 64, 2, 4
    values = matrices_of(width, layers, device)
    systems = {
        "PyTorch": System(torch.optim.Muon, values, mesh),
        "fsdp_ext": System(fsdp_ext.optim.Muon, values, mesh),
        "unsharded": System(torch.optim.Muon, values, None),
    }
    taken = time_in_turns({name: system.step for name, system in systems.items()}, repeats, WARMUP)
    timings = {}
    for name, own in taken.items():
        slowest = torch.tensor(own, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        timings[name] = Timing.of(slowest.tolist())
    expected = systems["unsharded"].whole()
    for name, system in systems.items():
        pairs = zip(system.whole(), expected, strict=True)
        keep(
            {
                "system": name,
                "ranks": world_size,
                "device": device.type,
                "transport": "none" if name == "unsharded" else dist.get_backend(),
                "matrices": len(values),
                "elements": sum(value.numel() for value in values),
                "us": as_microseconds(timings[name]),
                "of_pytorch": timings[name].median / timings["PyTorch"].median,
                "differs_by": max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs),
            }
        )


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    first = rows[0]
    print(
        f"Muon on {first['ranks']} ranks ({first['device']}): {first['matrices']} matrices of "
        f"{first['elements'] / 1e6:,.1f} M elements"
    )
    table = [
        [
            row["system"],
            row["transport"],
            f"{row['us']['median'] / 1e3:,.1f}",
            f"{row['us']['low'] / 1e3:,.1f} to {row['us']['high'] / 1e3:,.1f}",
            f"{row['of_pytorch']:.2f}",
            f"{row['differs_by']:.1e}",
        ]
        for row in rows
    ]
    print_table(["system", "transport", "ms", "quartiles", "of PyTorch", "differs by"], table)
