"""Optimizers of `_apply_optimizer_in_backward` step in backward, as under FSDP1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fsdp1_parity import BY_BLOCK, CPU, assert_equal, average_gradients, make, run
from support.launcher import run_ranks
from support.models import Stack
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers
from torch.distributed.tensor import DTensor

from fsdp_ext import FullyShardedDataParallel as FSDP
from fsdp_ext import fully_shard


def apply_to(params: Any, *, registers: bool) -> None:
    """Give each parameter two optimizers."""
    params = list(params)
    for cls, options in (
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    ):
        _apply_optimizer_in_backward(cls, params, dict(options), register_hook=registers)


def trained(cls: Any, *, before: bool, registers: bool, **options: Any) -> dict[str, Any]:
    """Return losses, whole parameters, and which gradients were left, of a few steps.

    The head has a usual optimizer. A micro-batch without gradient sync is in each step.
    """
    model = make(Stack)
    head = set(model.head.parameters())
    if before:
        apply_to([p for p in model.parameters() if p not in head], registers=registers)
    wrapped = cls(model, device_id=CPU, use_orig_params=True, auto_wrap_policy=BY_BLOCK, **options)
    head = set(model.head.parameters())
    rest = [p for p in wrapped.parameters() if p not in head]
    if not before:
        apply_to(rest, registers=registers)
    assert len(_get_in_backward_optimizers(wrapped)) == 2 * len(rest)
    optimizer = torch.optim.SGD(head, lr=0.05)
    found: dict[str, Any] = {}
    for step in range(3):
        with wrapped.no_sync():
            run(wrapped, model, 10 + step).backward()
        loss = run(wrapped, model, step)
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        assert all(param.grad is None for param in rest), step
        optimizer.step()
        optimizer.zero_grad()
    with cls.summon_full_params(wrapped):
        for name, param in model.named_parameters():
            found[name.replace("_fsdp_wrapped_module.", "")] = param.detach().clone()
    return found


def unsharded() -> dict[str, Any]:
    model = make(Stack)
    rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
    optimizers = [
        torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1),
        torch.optim.SGD(rest, lr=0.05, momentum=0.9),
        torch.optim.SGD(model.head.parameters(), lr=0.05),
    ]
    found: dict[str, Any] = {}
    for step in range(3):
        run(model, model, 10 + step).backward()
        loss = run(model, model, step)
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        average_gradients(model)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return found | {name: param.detach() for name, param in model.named_parameters()}


def as_fsdp1() -> None:
    whole = unsharded()
    for before in (False, True):
        ours = trained(FSDP, before=before, registers=before)
        assert_equal(ours, trained(TorchFSDP, before=before, registers=before))
        torch.testing.assert_close(ours, whole)
    options = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    torch.testing.assert_close(trained(FSDP, before=False, registers=False, **options), whole)


def test_optimizers_in_backward_train_as_under_fsdp1_and_unsharded() -> None:
    run_ranks(as_fsdp1, 2)


def of_flat_parameters() -> None:
    for cls in (FSDP, TorchFSDP):
        wrapped = cls(nn.Linear(4, 4), device_id=CPU)
        apply_to(wrapped.parameters(), registers=False)
        with pytest.raises(RuntimeError, match="only supported with use_orig_params=True"):
            wrapped(torch.ones(2, 4))
    module = nn.Linear(4, 4)
    apply_to(module.parameters(), registers=False)
    with pytest.raises(RuntimeError, match=r"'weight' .* only supported with use_orig_params=True"):
        FSDP(module)  # FSDP1 would drop these optimizers without a word
    FSDP(module, use_orig_params=True)


def test_optimizers_in_backward_of_flat_parameters_are_refused() -> None:
    run_ranks(of_flat_parameters, 2)


def after_changes() -> None:
    """The optimizers step after the C++ side is made anew, once, and until they are removed."""
    model = FSDP(nn.Linear(4, 4), use_orig_params=True)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})

    def moved() -> Tensor:
        before = model.weight.full_tensor()
        model(torch.ones(2, 4)).sum().backward()
        return (before - model.weight.full_tensor()).round()

    assert bool((moved() == 2).all())
    model.bias.requires_grad_(False)
    assert bool((moved() == 2).all())
    del model.weight._in_backward_optimizers
    assert not bool(moved().any())
    assert isinstance(model.weight.grad, DTensor)
    assert dist.get_world_size() == 2


def after_the_first_forward() -> None:
    """Optimizers that parameters get later step, too, or the next forward says why they cannot."""

    def wrapped(module: nn.Module) -> Any:
        return FSDP(module, use_orig_params=True)

    torch.manual_seed(0)  # rounding depends on the weights
    x = torch.ones(2, 4)
    for wrap in (wrapped, fully_shard):
        model: Any = wrap(nn.Sequential(wrap(nn.Linear(4, 4)), nn.Linear(4, 4)))
        model(x).sum().backward()
        for count in (1, 2):
            weights = [model[0].weight, model[1].weight]  # not the biases
            _apply_optimizer_in_backward(torch.optim.SGD, weights, {"lr": 1.0}, register_hook=False)
            model.zero_grad()
            before = [weight.full_tensor() for weight in weights]
            for _ in range(2):
                model(x).sum().backward()
            last = [b - w.full_tensor() for b, w in zip(before, weights, strict=True)][1]
            # The gradient of each row is the sum of the rows of the layer's input.
            torch.testing.assert_close(last, last[:1].expand(4, 4))
            assert bool(last.any()), count
            assert all(weight.grad is None for weight in weights)
            assert model[0].bias.grad is not None
        output = model(x)  # leaves the root unsharded
        bias = model[1].bias
        assert not isinstance(bias, DTensor)
        _apply_optimizer_in_backward(torch.optim.SGD, [bias], {"lr": 1.0}, register_hook=False)
        output.sum().backward()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"the unsharded '.*bias'.* after reshard"):
                model(x)
    flat = FSDP(nn.Linear(4, 4))
    flat(x).sum().backward()
    apply_to(flat.parameters(), registers=False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="only supported with use_orig_params=True"):
            flat(x)


def changes() -> None:
    after_changes()
    after_the_first_forward()


def test_optimizers_in_backward_step_however_late_they_are_made() -> None:
    run_ranks(changes, 2)
