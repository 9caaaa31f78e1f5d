"""What a run of train_gpt.py ends with: memory, a loss curve in the terminal and as PNG."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Curve = Sequence[tuple[int, float]]  # (steps done, loss)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    `peak` is the peak of the process on a CPU, and of PyTorch's allocator on a GPU.
    """

    parameters: int
    gradients: int
    optimizer: int
    peak: int


def memory_of_ranks(optimizer: Optimizer, device: torch.device) -> list[Memory]:
    """The memory of every rank, between steps; every rank takes part.

    The optimizer is asked for the parameters because it has the shards. The model may still have
    its root unit unsharded after the last forward pass.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def size(tensors: Iterable[object]) -> int:
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return sum(t.numel() * t.element_size() for t in local if isinstance(t, torch.Tensor))

    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        # ru_maxrss is in kibibytes on Linux and in bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    mine = Memory(
        parameters=size(parameters),
        gradients=size(parameter.grad for parameter in parameters),
        optimizer=size(t for state in optimizer.state.values() for t in state.values()),
        peak=peak,
    )
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def chart(curve: Curve, width: int = 64, height: int = 12) -> str:
    """The loss over the steps as lines of text.

    Args:
        curve: at least one point, in order of the steps.
        width, height: of the plotted area, in characters.
    """
    width = min(width, len(curve))
    bounds = [column * len(curve) // width for column in range(width + 1)]
    # A column shows the mean of its steps, since single steps are noisy.
    means = []
    for begin, end in pairwise(bounds):
        means.append(sum(loss for _, loss in curve[begin:end]) / (end - begin))
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return "no loss was a finite number"
    low, high = min(finite), max(finite)
    height = height if high > low else 1
    step = (high - low) / max(1, height - 1)
    # A column without a finite loss has no point.
    places = [(mean - low) / step if step else mean - low for mean in means]
    levels = [round(place) if math.isfinite(place) else None for place in places]
    lines = []
    for level in range(height - 1, -1, -1):
        labelled = level in (height - 1, height // 2, 0)
        label = f"{low + level * step:7.2f}" if labelled else " " * 7
        points = "".join("*" if at == level else " " for at in levels)
        lines.append(f"{label} |{points}".rstrip())
    first, last = str(curve[0][0]), str(curve[-1][0])
    lines.append(" " * 8 + "+" + "-" * width)
    steps = first if len(curve) == 1 else first + last.rjust(max(width - len(first), len(last) + 1))
    lines.append(" " * 9 + steps)
    return "\n".join(lines)


def as_json(figures: dict[str, Any]) -> str:
    """The figures as JSON, which has no number for NaN and infinity: they become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(figures), indent=2, allow_nan=False)


def plot(path: Path, title: str, training: Curve, validation: Curve, baseline: float) -> None:
    """Write the loss curves as PNG.

    Args:
        path: the file to write.
        title: of the picture.
        training, validation: losses in nats a byte.
        baseline: the loss of a model that knows only how often each byte occurs.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(*zip(*training, strict=True), color="C0", linewidth=1, label="training")
    axes.plot(*zip(*validation, strict=True), color="C3", marker="o", label="validation")
    axes.axhline(baseline, color="0.4", linestyle="--", label="byte frequencies")
    axes.set(xlabel="step", ylabel="loss (nats/byte)", title=title)
    axes.legend()
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)
