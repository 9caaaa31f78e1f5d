"""What `python -m bench overlap` trains: ours and PyTorch's FSDP, over a wire and without one.

Each system runs the same step twice over: over a simulated link, and over one that takes no time.
Ours has a model for each, since a transport keeps its link. PyTorch's has one model, whose groups'
link changes between steps (bench/models/simulated_group.py, which says what a CPU can show of it).
"""

from __future__ import annotations

import contextlib
import itertools
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
ALPHA = 20e-6  # seconds; of the simulated links
NO_BUCKETS = 0  # as bucket_bytes: each unit by itself
MULTIPROCESSORS = 16  # of a GPU, which a collective takes


@dataclass(frozen=True)
class Shape:
    """A stack of square layers without biases, each a unit, and the rows of its input."""

    layers: int
    dim: int
    batch: int


@dataclass(frozen=True)
class Case:
    """What one row measures.

    Args:
        system: `OURS`, or one of `PEERS`.
        shape: of the model.
        world_size: simulated ranks.
        ratio: of compute to simulated wire that the link is made for.
        prefetch: of ours; `fully_shard`'s argument.
        bucket_bytes: the same; None for the default.
    """

    system: str
    shape: Shape
    world_size: int
    ratio: float
    prefetch: int = 1
    bucket_bytes: int | None = None


@dataclass(frozen=True)
class Opened:
    """A system that has warmed up.

    Args:
        free: one step over a link that takes no time, to its end.
        wired: the same over the simulated link.
        sent: operations and bytes, of all ranks together, of one wired step.
        wires: links of the full bandwidth each, on which collectives can be side by side.
        buckets: bytes of each one's gather in order of forward, of all ranks together.
        bucket_bytes: that buckets have at most, of ours.
        models: that have ledgers: of free and of wired, or none.
    """

    free: Callable[[], None]
    wired: Callable[[], None]
    sent: list[tuple[str, int]]
    wires: int
    buckets: list[int]
    bucket_bytes: int | None = None
    models: tuple[nn.Module, ...] = ()


class Stack:
    """The model and its step, before anything is sharded."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
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

    def step(self) -> None:
        """Run forward and backward, to their end."""
        for parameter in self.model.parameters():
            parameter.grad = None
        self.model(self.input).sum().backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def open_system(
    case: Case, link: Link, device: torch.device
) -> contextlib.AbstractContextManager[Opened]:
    """Build a system and warm it up; no process group is left when it is closed."""
    return (open_ours if case.system == OURS else open_peer)(case, link, device)


def warm_up(*steps: Callable[[], None]) -> None:
    """Run each step a few times: the first ones make buckets and buffers."""
    for step in steps:
        for _ in range(WARMUP):
            step()


# - Ours


def shard(case: Case, link: Link, device: torch.device, bucket_bytes: int | None) -> Stack:
    """Return our model over a link, warmed up."""
    stack = Stack(case.shape, device)
    processors = MULTIPROCESSORS if device.type == "cuda" else 0
    transport = Simulated(case.world_size, link, multiprocessors=processors)
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
    root = wired.model._unit.root
    # A link that takes no time has another default.
    bucket_bytes = root.settings.bucket_bytes[0]
    free = shard(case, NO_TIME, device, bucket_bytes)
    sizes = [bucket["gather_bytes"] for bucket in root.core.buckets()]
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
    """Return what a step of ours sends, by the schedule's own log."""
    core = stack.model._unit.root.core
    core.enable_log(True)
    stack.step()
    log = core.take_log()
    core.enable_log(False)
    return [(operation, nbytes) for operation, _, _, nbytes in log]


def end_process_group() -> None:
    """Make room for another: ranks of one world size leave those of the next nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()


# - PyTorch's


@contextlib.contextmanager
def open_peer(case: Case, link: Link, device: torch.device) -> Iterator[Opened]:
    """Build FSDP2 or FSDP1.

    Raises:
        RuntimeError: on a GPU, for which the simulated group has no wire.
    """
    if device.type != "cpu":
        raise RuntimeError(f"expects --device cpu, where its links are, but got {device.type}")
    end_process_group()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecations between torch's versions
        in_flight = reduce_inputs() if case.system == FSDP2_MODELLED else 0
        with simulated_group(case.world_size, link, reductions_in_flight=in_flight) as group:
            stack = Stack(case.shape, device)
            wires = 1
            if case.system == FSDP1:
                stack.model = shard_fsdp1(stack.model)
            else:
                wires = shard_fsdp2(stack.model, case)

            def step_over(over: Link) -> None:
                for each in group.groups:
                    each.link = over
                stack.step()
                group.synchronize()  # modelled waits leave some reductions under way

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
    """Apply FSDP2 to the layers and the whole; return how many wires it has then."""
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
    if not hasattr(model, "set_separate_reduce_scatter_group"):  # torch 2.11 has none
        return 1
    model.set_separate_reduce_scatter_group()
    return 2


def reduce_inputs() -> int:
    """Return how many inputs of reductions FSDP2 may have in flight: 2 where torch has that."""
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
    """Return what a step sends through all groups."""
    for each in group.groups:
        each.log.clear()
    step()
    return [(c.operation, c.nbytes) for each in group.groups for c in each.log]
