"""Training under `FullyShardedDataParallel` and under FSDP1, compared.

On two ranks both compute the same bits, because a sum of two commutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp_ext
from support.models import Mlp, Subject, TransformerBlock
from support.parity import assert_same, device, whole

BF16 = torch.bfloat16
STEPS = 4
CPU = torch.device("cpu")
BY_BLOCK = ModuleWrapPolicy({Mlp, TransformerBlock})
Values = dict[str, "Tensor | None"]


class _AllOfOurs(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, fsdp_ext.FullyShardedDataParallel)


class FSDP(fsdp_ext.FullyShardedDataParallel, metaclass=_AllOfOurs):
    """Ours, with the original parameters unless `use_orig_params` says otherwise."""

    def __init__(self, module: nn.Module, *, use_orig_params: bool = True, **kwargs: Any) -> None:
        super().__init__(module, use_orig_params=use_orig_params, **kwargs)
        # As its children, which have that class.
        self.__class__ = fsdp_ext.FullyShardedDataParallel  # type: ignore[assignment]


def make(subject: Callable[[], Subject], seed: int = 0) -> Subject:
    torch.manual_seed(seed)
    return subject()


def torch_fsdp(module: nn.Module, **kwargs: Any) -> TorchFSDP:
    return TorchFSDP(module, use_orig_params=True, device_id=device(), **kwargs)


def batch(model: Subject, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return model.batch(torch.Generator().manual_seed(100 * step + dist.get_rank()))


def run(wrapped: nn.Module, model: Subject, step: int) -> Tensor:
    """Return the loss of one step on this rank's own batch."""
    args, kwargs = batch(model, step)
    return model.loss(wrapped(*args, **kwargs))


def state(wrapped: nn.Module) -> Values:
    """Return whole parameters by name, and their gradients as 'name.grad'."""
    found: Values = {}
    summoned = isinstance(wrapped, TorchFSDP)
    with TorchFSDP.summon_full_params(wrapped, with_grads=True) if summoned else nullcontext():
        for name, param in wrapped.named_parameters():
            clean = name.replace("_fsdp_wrapped_module.", "")
            found[clean] = whole(param)
            # FSDP1 gives a frozen parameter zeros if it is beside trainable ones.
            grad = None if summoned and not param.requires_grad else param.grad
            found[f"{clean}.grad"] = whole(grad)
    return found


def assert_equal(got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None]) -> None:
    assert_same("FSDP1", want, got)


def train(
    wrapped: nn.Module, model: Subject, steps: int = STEPS, *, average: bool = False
) -> Values:
    """Train, and return the losses and the final state with the last step's gradients."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    losses: Values = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = run(wrapped, model, step)
        loss.backward()
        if average:
            average_gradients(wrapped)
        optimizer.step()
        losses[f"loss {step}"] = loss.detach()
    return losses | state(wrapped)


def average_gradients(module: nn.Module) -> None:
    for param in module.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
