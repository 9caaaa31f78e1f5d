"""Faults that only wrong numbers would show."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.fault_cases.case import (
    DIM,
    TRANSPORTS,
    Case,
    Fault,
    Stack,
    WrongNumbers,
    backward,
    batch,
    check,
    train,
    whole,
)

KIND = "wrong numbers"


# - Ranks that differ


class Experts(nn.Module):
    """A layer that uses one of two experts in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.experts[expert](x)


class Routed(nn.Module):
    """Two layers of experts and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x, expert))
        return self.head(x)


def use_other_experts(case: Case, sends_zeros: bool = False) -> None:
    """Let each rank use another expert."""

    def run(model: nn.Module, step: int, rank: int) -> Tensor:
        return model(batch(step, rank), (step + rank) % 2).square().sum()

    reference = Routed()
    model = case.shard(copy.deepcopy(reference))
    if sends_zeros:
        model.set_reduce_scatter_unused_params(True)
    train(case, model, reference, run)


def use_other_experts_and_send_zeros(case: Case) -> None:
    """Do as `use_other_experts`, with FSDP2's setting for it."""
    use_other_experts(case, sends_zeros=True)


def run_in_order(
    case: Case,
    other: tuple[int, ...],
    since: int,
    model_class: type[nn.Module] = Stack,
    **settings: Any,
) -> None:
    """Let rank 1 run the layers in another order, from a step on."""

    def run(model: nn.Module, step: int, rank: int) -> Tensor:
        if model is not reference and step == since:
            case.begin()
        order = other if rank == 1 and step >= since else (0, 1, 2)
        return model(batch(step, rank), order).square().sum()

    reference = model_class()
    train(case, case.shard(copy.deepcopy(reference), **settings), reference, run, since + 2)


def leave_out_a_unit(case: Case) -> None:
    """Leave out a unit on rank 1, always."""
    run_in_order(case, (0, 2), 0)


def leave_out_a_unit_later(case: Case) -> None:
    """Leave out a unit on rank 1, when the schedule is known."""
    run_in_order(case, (0, 2), 3, bucket_bytes=0)


class Uneven(Stack):
    """A stack whose second unit is larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM))


def leave_out_a_small_unit_later(case: Case) -> None:
    """Leave out a unit where a larger one follows."""
    run_in_order(case, (1, 2), 3, Uneven, bucket_bytes=0)


def leave_out_a_unit_of_a_bucket_later(case: Case) -> None:
    """Leave out a unit that travels with others."""
    run_in_order(case, (0, 2), 3)


def swap_units_of_a_bucket_later(case: Case) -> None:
    """Swap two units that travel together."""
    run_in_order(case, (1, 0, 2), 3)


def swap_units_later(case: Case) -> None:
    """Swap two equal units on rank 1, when the schedule is known."""
    run_in_order(case, (1, 0, 2), 3, bucket_bytes=0)


class Joined(Stack):
    """A stack that joins collectives for the layers that it leaves out."""

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index in order:
                x = F.gelu(layer(x))
            elif hasattr(layer, "join_empty"):  # not in the unsharded replica
                x = layer.join_empty(x)
        return self.head(x)


def join_for_a_unit(case: Case) -> None:
    """Leave out a unit on rank 1, which calls `join_empty` in its place."""

    def run(model: nn.Module, step: int, rank: int) -> Tensor:
        return model(batch(step, rank), (0, 2) if rank == 1 else (0, 1, 2)).square().sum()

    reference = Joined()
    train(case, case.shard(copy.deepcopy(reference)), reference, run)


# - Parameters that change, or that sharding changes


class Scaled(nn.Parameter):
    """A parameter with more than numbers, such as a quantised one."""

    scale = 1.0


class ScaledLayer(nn.Module):
    """A layer that reads the scale from its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Scaled(torch.randn(DIM, DIM))
        self.weight.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) * getattr(self.weight, "scale", 1.0)


def shard_a_subclass(case: Case) -> None:
    """Shard a parameter of a class of its own."""
    torch.manual_seed(0)
    reference = Stack()
    model = copy.deepcopy(reference)
    for each in (model, reference):
        torch.manual_seed(1)
        each.layers[0] = ScaledLayer()
    train(case, case.shard(model), reference)


def evaluated(case: Case) -> tuple[Any, nn.Module]:
    """Return a sharded model that has just been evaluated, and its replica."""
    reference = Stack()
    model = case.shard(copy.deepcopy(reference))
    with torch.no_grad():
        model(batch(0, case.rank))
    return model, reference


def make_an_optimizer_late(case: Case) -> None:
    """Make the optimizer after an evaluation."""
    train(case, *evaluated(case))


def write_after_an_evaluation(case: Case) -> None:
    """Write into all parameters after an evaluation."""
    model, reference = evaluated(case)
    with torch.no_grad():
        for parameter in (*model.parameters(), *reference.parameters()):
            parameter.mul_(0.5)
    train(case, model, reference)


class Tied(nn.Module):
    """Two layers in one unit, which may share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.first, self.last = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.first(x)))


def tie_late(case: Case) -> None:
    """Tie two weights of a unit after it was sharded."""
    reference = Tied()
    model = case.shard(copy.deepcopy(reference))
    for each in (model, reference):
        each.last.weight = each.first.weight
    train(case, model, reference)


def keep_a_gradient(case: Case) -> None:
    """Keep gradients while the model trains on."""
    reference = Stack()
    model = case.shard(copy.deepcopy(reference))
    model(batch(0, case.rank)).square().sum().backward()
    kept = [parameter.grad for parameter in model.parameters()]
    expected = [whole(gradient) for gradient in kept]
    model.zero_grad()
    model(batch(1, case.rank)).square().sum().backward()
    found = [whole(gradient) for gradient in kept]
    for mine, wanted in zip(found, expected, strict=True):
        check("a gradient of the step before", mine, wanted)


def set_grad_dtype(case: Case) -> None:
    """Ask for a gradient in bf16 before sharding."""
    if not hasattr(Tensor, "grad_dtype"):
        raise NotImplementedError("this torch has no grad_dtype")
    reference = Stack()
    model = copy.deepcopy(reference)
    for each in (model, reference):
        each.head.weight.grad_dtype = torch.bfloat16
    model = case.shard(model)
    for _ in range(2):
        reference.zero_grad()
        model.zero_grad()
        backward(case, model, reference, lambda each, step, rank: each(batch(0, 0)).sum(), 0)
        found = whole(model.head.weight.grad)
        if found.dtype != torch.bfloat16:
            raise WrongNumbers(f"'head.weight.grad' is {found.dtype}, not the torch.bfloat16 asked")


class Adapted(nn.Module):
    """A layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(1)
        self.down = nn.Parameter(torch.randn(2, DIM, generator=generator))
        self.up = nn.Parameter(torch.randn(3, 2, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def add_an_adapter_late(case: Case) -> None:
    """Add trainable parameters under a sharded module."""
    reference = Stack()
    model = case.shard(copy.deepcopy(reference))
    for each in (model, reference):
        each.head = Adapted(each.head)
    train(case, model, reference)


FAULTS = [
    Fault("one rank leaves a parameter unused", KIND, use_other_experts, TRANSPORTS, quick=True),
    Fault("unused, and set_reduce_scatter_unused_params(True)", KIND,
          use_other_experts_and_send_zeros),
    Fault("one rank's forward leaves out a unit", KIND, leave_out_a_unit, TRANSPORTS),
    Fault("left out, with join_empty in its place", KIND, join_for_a_unit, TRANSPORTS,
          not_fsdp2="has no join_empty"),
    Fault("one rank swaps two equal units in step 4", KIND, swap_units_later, TRANSPORTS,
          quick=True),
    Fault("swapped in step 4, units of one bucket", KIND, swap_units_of_a_bucket_later,
          TRANSPORTS),
    Fault("one rank leaves out a unit in step 4", KIND, leave_out_a_unit_later, TRANSPORTS),
    Fault("left out in step 4, a unit before a larger one", KIND, leave_out_a_small_unit_later,
          TRANSPORTS),
    Fault("left out in step 4, a unit of a larger bucket", KIND,
          leave_out_a_unit_of_a_bucket_later, TRANSPORTS),
    Fault("a parameter of a class with more than numbers", KIND, shard_a_subclass),
    Fault("an optimizer made after an evaluation", KIND, make_an_optimizer_late, quick=True),
    Fault("parameters written after an evaluation", KIND, write_after_an_evaluation),
    Fault("weights of a unit tied after sharding", KIND, tie_late),
    Fault("gradients kept across zero_grad", KIND, keep_a_gradient, quick=True),
    Fault("a parameter with a grad_dtype", KIND, set_grad_dtype),
    Fault("an adapter (LoRA) added after sharding", KIND, add_an_adapter_late, quick=True),
]  # fmt: skip
