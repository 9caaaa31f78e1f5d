"""The systems of `python -m bench overlap`: ours and PyTorch's FSDP, with and without a wire.

Each system runs the same step over a simulated link, and over a link that takes no time. Ours has
two models for that, since a transport keeps its link. PyTorch's FSDP has one model, and its process
groups change their link between steps (bench/models/simulated_group.py).
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.models.simulated_group import NO_TIME, SimulatedGroup, simulated_group
from fsdp_ext import Link, Simulated, fully_shard

OURS, FSDP2, FSDP1 = "ours", "FSDP2", "FSDP1"
FSDP2_PREFETCH = "FSDP2, prefetch"
FSDP2_MODELLED = "FSDP2, prefetch, modelled waits"
PEERS = (FSDP2, FSDP2_PREFETCH, FSDP2_MODELLED, FSDP1)
WARMUP = 3
ALPHA = 20e-6  # latency of the simulated links, seconds
NO_BUCKETS = 0  # as bucket_bytes: each unit is a bucket by itself
MULTIPROCESSORS = 16  # of a GPU, which a simulated collective occupies


@dataclass(frozen=True)
class Shape:
    """A stack of square layers without biases, each a unit, and the batch size of its input."""

    layers: int
    dim: int
    batch: int


@dataclass(frozen=True)
class Case:
    """What one row measures.

    Args:
        system: `OURS`, or one of `PEERS`.
        shape: the model's shape.
        world_size: simulated ranks.
        ratio: compute / simulated wire, from which the link is made.
        prefetch: `fully_shard`'s argument, for ours.
        bucket_bytes: the same; None for the default.
        gap: seconds from the end of backward to the next forward, as of a loader.
        ahead: whether ours calls `prefetch_next_forward` before the gap.
    """

    system: str
    shape: Shape
    world_size: int
    ratio: float
    prefetch: int = 1
    bucket_bytes: int | None = None
    gap: float = 0.0
    ahead: bool = False


@dataclass(frozen=True)
class Opened:
    """A system that has warmed up.

    Args:
        free: runs one step over a link that takes no time, and waits for its end.
        wired: does the same over the simulated link.
        sent: operation and bytes (of all ranks together) of each collective of a wired step.
        wires: number of links, each of the full bandwidth, that can be busy at the same time.
        buckets: bytes of each bucket's gather (of all ranks together), in order of forward.
        bucket_bytes: the limit of a bucket, for ours.
        models: the models of `free` and `wired`, if profile can record them.
    """

    free: Callable[[], None]
    wired: Callable[[], None]
    sent: list[tuple[str, int]]
    wires: int
    buckets: list[int]
    bucket_bytes: int | None = None
    models: tuple[nn.Module, ...] = ()


class Stack:
    """The model, and its step."""

    def __init__(self, case: Case, device: torch.device) -> None:
        shape = case.shape
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with torch.device(device):
            layers = (
                nn.Linear(shape.dim, shape.dim, bias=False, dtype=dtype)
                for _ in range(shape.layers)
            )
            self.model: Any = nn.Sequential(*layers)
            self.input = torch.randn(shape.batch, shape.dim, dtype=dtype)
        self.device = device
        self.case = case

    def step(self) -> None:
        """Run forward, backward and the gap, to their end."""
        for parameter in self.model.parameters():
            parameter.grad = None
        self.model(self.input).sum().backward()
        if self.case.ahead:
            self.model.prefetch_next_forward()
        time.sleep(self.case.gap)
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def open_system(
    case: Case, link: Link, device: torch.device
) -> contextlib.AbstractContextManager[Opened]:
    """Build a system and warm it up; closing it destroys its process group."""
    return (open_ours if case.system == OURS else open_peer)(case, link, device)


def warm_up(*steps: Callable[[], None]) -> None:
    """Run each step a few times, since the first ones create buckets and buffers."""
    for step in steps:
        for _ in range(WARMUP):
            step()


# - Ours


def shard(case: Case, link: Link, device: torch.device, bucket_bytes: int | None) -> Stack:
    """Return our model over a link, warmed up."""
    stack = Stack(case, device)
    processors = MULTIPROCESSORS if device.type == "cuda" else 0
    # On a GPU the baseline would otherwise move a whole collective's bytes in no time.
    moves_memory = link is not NO_TIME or device.type != "cuda"
    transport = Simulated(
        case.world_size, link, multiprocessors=processors, moves_memory=moves_memory
    )
    for layer in stack.model:
        fully_shard(layer, transport=transport)
    fully_shard(stack.model, transport=transport, bucket_bytes=bucket_bytes, prefetch=case.prefetch)
    warm_up(stack.step)
    return stack


@contextlib.contextmanager
def open_ours(case: Case, link: Link, device: torch.device) -> Iterator[Opened]:
    """Build ours, with two wires: one for gathers and one for reductions."""
    end_process_group()
    wired = shard(case, link, device, case.bucket_bytes)
    root = wired.model._fsdp_ext_unit.root
    # The default depends on the link, so the other model gets this model's size.
    bucket_bytes = root.settings.bucket_bytes[0]
    free = shard(case, NO_TIME, device, bucket_bytes)
    sizes = [bucket["gather_bytes"] for bucket in root.impl.buckets()]
    try:
        yield Opened(
            free=free.step,
            wired=wired.step,
            sent=sent_by(wired),
            wires=2,
            buckets=[size for size in sizes if size > 0],  # the root has no parameters of its own
            bucket_bytes=bucket_bytes,
            models=(free.model, wired.model),
        )
    finally:
        end_process_group()


def sent_by(stack: Stack) -> list[tuple[str, int]]:
    """Return the collectives of a step of ours, from the schedule's log."""
    impl = stack.model._fsdp_ext_unit.root.impl
    impl.enable_log(True)
    stack.step()
    log = impl.take_log()
    impl.enable_log(False)
    return [(operation, nbytes) for operation, _, _, nbytes in log]


def end_process_group() -> None:
    """Destroy the process group, so that the next one can have another world size."""
    if dist.is_initialized():
        dist.destroy_process_group()


# - PyTorch's


@contextlib.contextmanager
def open_peer(case: Case, link: Link, device: torch.device) -> Iterator[Opened]:
    """Build FSDP2 or FSDP1.

    Raises:
        RuntimeError: on a GPU, where the simulated group has no wire.
    """
    if device.type != "cpu":
        raise RuntimeError(
            f"PyTorch's FSDP has simulated links on --device cpu only, not {device.type}"
        )
    end_process_group()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # versions of torch deprecate some of these calls
        in_flight = reduce_inputs() if case.system == FSDP2_MODELLED else 0
        with simulated_group(case.world_size, link, reductions_in_flight=in_flight) as group:
            stack = Stack(case, device)
            wires = 1
            if case.system == FSDP1:
                stack.model = shard_fsdp1(stack.model)
            else:
                wires = shard_fsdp2(stack.model, case)

            def step_over(over: Link) -> None:
                for each in group.groups:
                    each.link = over
                stack.step()
                group.synchronize()  # with modelled waits, reductions may still be in flight

            def free() -> None:
                step_over(NO_TIME)

            def wired() -> None:
                step_over(link)

            warm_up(free, wired)
            unit_bytes = case.shape.dim**2 * 4
            yield Opened(
                free, wired, sent_through(group, wired), wires, [unit_bytes] * case.shape.layers
            )


def shard_fsdp2(model: Any, case: Case) -> int:
    """Apply FSDP2 to the layers and the whole; return the number of its wires."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as fully_shard_torch

    mesh = init_device_mesh("cpu", (case.world_size,))
    for layer in model:
        fully_shard_torch(layer, mesh=mesh)
    fully_shard_torch(model, mesh=mesh)
    if case.system == FSDP2:
        return 1
    model._set_unshard_async_op(True)
    for unit, following in itertools.pairwise([model, *model]):
        unit.set_modules_to_forward_prefetch([following])
    if reduce_inputs() > 1:
        model.set_reduce_scatter_max_input_buffers(reduce_inputs())
    if not hasattr(model, "set_separate_reduce_scatter_group"):  # torch 2.11 lacks it
        return 1
    model.set_separate_reduce_scatter_group()
    return 2


def reduce_inputs() -> int:
    """Return how many reductions FSDP2 may have in flight: 2 if this torch can, else 1."""
    from torch.distributed.fsdp import FSDPModule

    return 2 if hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers") else 1


def shard_fsdp1(model: nn.Module) -> nn.Module:
    """Apply FSDP1 to the layers and the whole."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def sent_through(group: SimulatedGroup, step: Callable[[], None]) -> list[tuple[str, int]]:
    """Return the collectives that a step sends through all groups."""
    for each in group.groups:
        each.log.clear()
    step()
    return [(c.operation, c.nbytes) for each in group.groups for c in each.log]
