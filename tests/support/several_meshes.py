"""Models whose experts are on a mesh of their own, and how they train."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_ext import MixedPrecisionPolicy
from fsdp_ext.verifier.steps import rows_of
from support import parity
from support.parity import ROUNDING, Tolerance, device

WIDTH, EXPERTS, STEPS = 6, 4, 5
System = Callable[..., Any]


class Experts(nn.Module):
    """This rank's experts. They see all its tokens, and their outputs are added up."""

    def __init__(self, count: int, uses_scale: bool = True) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, 5) / 4)
        self.down = nn.Parameter(torch.randn(count, 5, WIDTH) / 4)
        self.scale = nn.Parameter(torch.ones(3, WIDTH))
        self.uses_scale = uses_scale

    def forward(self, x: Tensor) -> Tensor:
        up, down, scale = (rows_of(parameter) for parameter in (self.up, self.down, self.scale))
        y = torch.einsum("beh,ehw->bw", torch.tanh(torch.einsum("bw,ewh->beh", x, up)), down)
        return y * scale.sum(0) if self.uses_scale else y


class Block(nn.Module):
    def __init__(self, count: int, uses_scale: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(count, uses_scale)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.dense(x))
        return x + self.experts(x)


class Model(nn.Module):
    def __init__(self, count: int, uses_scale: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(count, uses_scale) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train_step(model: Any, loss: Callable[[int], Tensor]) -> list[Tensor]:
    value = loss(0)
    value.backward()
    return [value]


def accumulate(model: Any, loss: Callable[[int], Tensor]) -> list[Tensor]:
    values = []
    for micro_batch in range(3):
        model.set_requires_gradient_sync(micro_batch == 2)
        values += train_step(model, lambda _, place=micro_batch: loss(place))  # type: ignore[misc]
    return values


def evaluate_between(model: Any, loss: Callable[[int], Tensor]) -> list[Tensor]:
    with torch.no_grad():
        before = loss(1)
    return [before, *train_step(model, loss)]


def clip_by_mesh(model: Any, loss: Callable[[int], Tensor]) -> list[Tensor]:
    values = train_step(model, loss)
    by_mesh: dict[DeviceMesh, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    assert len(by_mesh) > 1
    norms = [nn.utils.clip_grad_norm_(same, 0.1) for same in by_mesh.values()]
    return [*values, *(norm.full_tensor() for norm in norms)]


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a model is sharded and trained.

    Attributes:
        shape: the ranks of expert parallelism, and those that have the same experts.
        kind: the experts' kind before they are sharded: "plain" parameters or "dtensor"s.
        options: more arguments of each `fully_shard`.
        ours: arguments of ours alone.
        step: trains one step and returns values to compare.
        frozen: whether everything but the experts is frozen. Then no sum has more than two terms.
        unused_on: places in expert parallelism that leave one of the parameters unused.
        counts: the experts at each place in expert parallelism; None for equal numbers.
        head: the dimension of the mesh that the last layer is sharded over; None for all ranks.
        divides_by: gradients of experts are divided by this instead of the number of ranks.
        allowed: how much our results may differ from FSDP2's.
    """

    shape: tuple[int, int] = (2, 2)
    kind: str = "plain"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    ours: dict[str, Any] = dataclasses.field(default_factory=dict)
    step: Callable[[Any, Callable[[int], Tensor]], list[Tensor]] = train_step
    frozen: bool = False
    unused_on: tuple[int, ...] = ()
    counts: tuple[int, ...] | None = None
    head: str | None = None
    divides_by: float | None = None
    allowed: Tolerance = ROUNDING[torch.float32]

    def mesh(self) -> DeviceMesh:
        sizes = dict(zip(("ep", "dp_ep"), self.shape, strict=True))
        # PyTorch takes norms of DTensors only if the dimension of fully_shard comes first.
        names = ("dp_ep", "ep") if self.kind == "dtensor" else ("ep", "dp_ep")
        return init_device_mesh(device().type, [sizes[n] for n in names], mesh_dim_names=names)

    def plain(self, mesh: DeviceMesh) -> Model:
        place = mesh.get_local_rank("ep")
        torch.manual_seed(0)
        whole = Model(EXPERTS)
        counts = self.counts or (EXPERTS // self.shape[0],) * self.shape[0]
        model = Model(counts[place], place not in self.unused_on)
        own = slice(sum(counts[:place]), sum(counts[: place + 1]))
        with torch.no_grad():
            for (name, parameter), value in zip(
                model.named_parameters(), whole.parameters(), strict=True
            ):
                parameter.copy_(value[own] if name.endswith(("up", "down")) else value)
                parameter.requires_grad_(not self.frozen or "experts" in name)
        if self.kind == "dtensor":
            for block in model.blocks:
                for name in ("up", "down"):
                    local = getattr(block.experts, name).detach()
                    spread = DTensor.from_local(local, mesh["ep"], [Shard(0)], run_check=False)
                    setattr(block.experts, name, nn.Parameter(spread))
        return model

    def model(
        self, fully_shard: System, mesh: DeviceMesh, plain: Model | None = None, **options: Any
    ) -> Any:
        model: Any = self.plain(mesh) if plain is None else plain
        options = {**self.options, **options}
        flat = mesh._flatten("dp")
        for block in model.blocks:
            fully_shard(block.experts, mesh=mesh["dp_ep"], **options)
            if self.divides_by is not None:
                block.experts.set_gradient_divide_factor(self.divides_by)
                if fully_shard is fsdp.fully_shard:  # gloo cannot scale
                    block.experts.set_force_sum_reduction_for_comms(True)
            fully_shard(block, mesh=flat, **options)
        if self.head is not None:
            fully_shard(model.head, mesh=mesh[self.head], **options)
        return fully_shard(model, mesh=flat, **options)


def batch(step: int, micro_batch: int) -> Tensor:
    seed = (step * 10 + micro_batch) * 10 + dist.get_rank()
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(setup: Setup, model: Any, begin_step: Callable[[], None] = lambda: None) -> list[Any]:
    """Return what this rank has after each step: values, gradients and parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    seen: list[Any] = []
    for step in range(STEPS):
        begin_step()
        values = setup.step(
            model, lambda place, step=step: (model(batch(step, place)) - 1).square().mean()
        )
        seen += [value.detach().clone() for value in values]
        seen += [local_of(parameter.grad) for parameter in trained]
        optimizer.step()
        optimizer.zero_grad()
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return [*seen, *map(local_of, model.parameters())]


def local_of(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else rows_of(tensor.detach()).clone()


def assert_same(ours: list[Any], theirs: list[Any], allowed: Tolerance) -> None:
    assert any(value is not None and bool(value.any()) for value in ours)
    parity.assert_same("FSDP2", theirs, ours, allowed)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
GLOO = {"transport": "process_group"}
