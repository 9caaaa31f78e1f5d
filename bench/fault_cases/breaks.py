"""Ordinary uses of a model that could break, or crash, when it is sharded."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from bench.fault_cases.case import (
    DIM,
    Case,
    Fault,
    Stack,
    batch,
    check,
    compare,
    run_all,
    train,
    whole,
)

KIND = "breaks"


def save_and_copy(case: Case) -> None:
    """Save and copy a state dict, and train on from the copy."""
    reference = Stack()
    model = case.shard(copy.deepcopy(reference))
    train(case, model, reference)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    copied = copy.deepcopy(torch.load(file, weights_only=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(copied)
    compare(model, reference)
    train(case, model, reference)


def shard_a_wrapper(case: Case) -> None:
    """Shard layers, and then the checkpoint wrappers around them."""
    reference = Stack()
    model = copy.deepcopy(reference)
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(case.fully_shard(layer))
    train(case, case.shard(model), reference)


def compile_at_once(case: Case) -> None:
    """Compile a model that has not run yet."""
    reference = Stack()
    model = case.shard(copy.deepcopy(reference))
    model.compile(backend="eager")
    train(case, model, reference)


def convert_with_gradients(case: Case) -> None:
    """Convert a model that has gradients to another dtype."""
    reference = Stack()
    model = case.shard(copy.deepcopy(reference))
    for rank in range(2):
        (reference(batch(0, rank)).sum() / 2).backward()
    model(batch(0, case.rank)).sum().backward()
    model.double()
    reference.double()
    gradients = [whole(parameter.grad) for parameter in model.parameters()]
    for mine, parameter in zip(gradients, reference.parameters(), strict=True):
        assert parameter.grad is not None
        check("a converted gradient", mine, parameter.grad)
    train(case, model, reference, lambda each, step, rank: each(batch(step, rank).double()).sum())


class Convolution(nn.Module):
    """A convolution with two channels over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(2, 2, kernel_size=(1, 3), padding=(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.view(-1, 2, 1, DIM // 2)).reshape(-1, DIM)


def use_channels_last(case: Case) -> None:
    """Shard a convolution whose weight is in channels_last format."""
    reference: Any = Stack()
    reference.layers[1] = Convolution()
    model = copy.deepcopy(reference).to(memory_format=torch.channels_last)
    train(case, case.shard(model), reference)


def print_freed(case: Case, width: int) -> None:
    """Print an unsharded weight of `width` columns that was kept after its layer's forward."""
    model = nn.Sequential(nn.Linear(DIM, width))
    case.fully_shard(model[0])
    case.fully_shard(model)
    kept: list[Tensor] = []
    model[0].register_forward_pre_hook(lambda module, args: kept.append(module.weight))
    model(batch(0, case.rank))
    case.begin()
    repr(kept[0])


def print_a_freed_parameter(case: Case) -> None:
    """Print a parameter that is large enough for torch to print its edges alone."""
    print_freed(case, 512)


def print_a_small_freed_parameter(case: Case) -> None:
    """Print a parameter that torch prints whole."""
    print_freed(case, 8)


def return_from_a_hook(case: Case) -> None:
    """Register a post-accumulate hook that returns a value."""
    reference = Stack()
    model = case.shard(copy.deepcopy(reference))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: 3)
    train(case, model, reference)


class Box:
    """An output that no library can look into."""

    def __init__(self, content: Tensor) -> None:
        self.content = content


class BoxedLayer(nn.Linear):
    """A layer that hides its output."""

    def forward(self, x: Tensor) -> Any:
        return Box(super().forward(x))


class BoxedStack(nn.Module):
    """Two layers whose outputs are hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BoxedLayer(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x).content)
        return x


def hide_outputs(case: Case) -> None:
    """Return outputs in objects of a class of the user's."""
    reference = BoxedStack()
    train(case, case.shard(copy.deepcopy(reference)), reference)


def penalise_gradients(case: Case) -> None:
    """Add the gradient of the inputs to the loss."""

    def run(model: nn.Module, step: int, rank: int) -> Tensor:
        x = batch(step, rank).requires_grad_()
        output = model(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.square().sum() + gradient.square().sum()

    reference = Stack()
    train(case, case.shard(copy.deepcopy(reference)), reference, run)


class OnPurpose(Exception):
    """Raised by a model on purpose."""


class Fragile(Stack):
    """A stack that can fail in forward or in backward, before its last layer."""

    fails = ""

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        for index in order:
            if self.fails == "forward" and index == 2:
                raise OnPurpose
            x = F.gelu(self.layers[index](x))
            if self.fails == "backward" and index == 1:
                x.register_hook(self._raise)
        return self.head(x)

    @staticmethod
    def _raise(_: Tensor) -> None:
        raise OnPurpose


def fail(case: Case, model: Any, where: str) -> None:
    """Fail a step on all ranks, as in a script that catches the exception and continues."""
    parameters = list(model.parameters())
    model.fails = where
    with contextlib.suppress(OnPurpose):
        model(batch(0, case.rank)).sum().backward()
    model.fails = ""
    for parameter in (*parameters, *model.parameters()):  # as optimizer and model would
        parameter.grad = None


def fail_and_go_on(case: Case, where: str) -> None:
    """Let steps fail, and train on with the optimizer that is there."""

    def run(each: nn.Module, step: int, rank: int) -> Tensor:
        if each is model:
            fail(case, model, where)
        return run_all(each, step, rank)

    reference = Fragile()
    model = case.shard(copy.deepcopy(reference))
    train(case, model, reference, run)


def fail_in_forward(case: Case) -> None:
    """Raise in forward on all ranks."""
    fail_and_go_on(case, "forward")


def fail_in_backward(case: Case) -> None:
    """Raise in backward on all ranks."""
    fail_and_go_on(case, "backward")


def make_an_optimizer_after_a_failure(case: Case) -> None:
    """Make a new optimizer after an exception in backward."""
    reference = Fragile()
    model = case.shard(copy.deepcopy(reference))
    fail(case, model, "backward")
    train(case, model, reference)


FAULTS = [
    Fault("torch.save and deepcopy of a state_dict", KIND, save_and_copy, quick=True),
    Fault("fully_shard of a CheckpointWrapper of a unit", KIND, shard_a_wrapper),
    Fault("torch.compile before the first forward", KIND, compile_at_once),
    Fault("model.double() with gradients", KIND, convert_with_gradients),
    Fault("a channels_last convolution", KIND, use_channels_last, quick=True),
    Fault("a freed parameter (4,096 elements) is printed", KIND, print_a_freed_parameter),
    Fault("a freed parameter (64 elements) is printed", KIND, print_a_small_freed_parameter),
    Fault("a post-accumulate hook returns a value", KIND, return_from_a_hook),
    Fault("outputs in objects of a class of one's own", KIND, hide_outputs, quick=True),
    Fault("a gradient penalty (create_graph)", KIND, penalise_gradients),
    Fault("an exception in forward, then training", KIND, fail_in_forward),
    Fault("an exception in backward, then training", KIND, fail_in_backward),
    Fault("an optimizer made after an exception", KIND, make_an_optimizer_after_a_failure),
]  # fmt: skip
