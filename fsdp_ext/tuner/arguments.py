"""What ``tune`` is called with: checked before any step, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp_ext._util.numbers import is_at_least
from fsdp_ext.profiler.api import is_profiled
from fsdp_ext.sharding.agreement import exchange
from fsdp_ext.sharding.module_state import sharded_module, unit_of
from fsdp_ext.sharding.root import Root
from fsdp_ext.sharding.unit import Unit


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a model, from the root's on.

    Raises:
        TypeError: if ``fully_shard`` was not applied to it, but to modules inside at most.
    """
    if not isinstance(model, nn.Module) or unit_of(sharded_module(model)) is None:
        raise TypeError(
            "tune expects a module that fully_shard was applied to but got "
            f"{type(model).__name__}; shard the model first, its root last"
        )
    units = (unit_of(module) for module in sharded_module(model).modules())
    return list(dict.fromkeys(unit for unit in units if unit is not None))


def check_arguments(
    loss: object, memory_limit: object, optimizer_states: object, steps: object
) -> None:
    """Check what can be checked of them by themselves.

    Raises:
        TypeError: if ``loss`` cannot be called.
        ValueError: if a number is out of range.
    """
    if not is_at_least(steps, 2):
        raise ValueError(
            f"tune expects at least 2 steps for each measurement but got {steps!r}; 8 is usual"
        )
    if not is_at_least(optimizer_states, 0):
        raise ValueError(
            "tune expects optimizer_states to be a number of tensors for each parameter, 0 or "
            f"more, but got {optimizer_states!r}; AdamW has 2"
        )
    if memory_limit is not None and not is_at_least(memory_limit, 1):
        raise ValueError(
            "tune expects memory_limit to be a positive whole number of bytes, or None, but got "
            f"{memory_limit!r}; 60 * 2**30, say"
        )
    if loss is not None and not callable(loss):
        raise TypeError(
            f"tune expects loss to be a function of the model's output but got {loss!r}; leave it "
            "out for the mean"
        )


def check_state(model: nn.Module, units: Sequence[Unit]) -> None:
    """Check that steps can be run on the model that leave nothing behind.

    Raises:
        ValueError: if it is not the root, has gradients, would accumulate them or stay unsharded,
            or is being profiled.
    """
    sharded = sharded_module(model)
    root: Root | None = units[0].root
    if root is not None and not root.provisional and root.module is not sharded:
        raise ValueError(
            f"tune expects the root module but got a {type(sharded).__name__} inside a "
            f"{type(root.module).__name__} that is the root; pass that"
        )
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise ValueError(
            "tune expects a model without gradients, since it runs backward, but some parameters "
            "have them; call optimizer.zero_grad() before"
        )
    if not all(unit.settings.requires_gradient_sync for unit in units):
        raise ValueError(
            "tune expects each backward to reduce gradients but some units accumulate them; call "
            "set_requires_gradient_sync(True) before"
        )
    if not all(unit.settings.reshard_after_backward for unit in units):
        raise ValueError(
            "tune expects units to be resharded after backward, since else nothing is gathered "
            "that could be measured, but some are not; call set_reshard_after_backward(True) "
            "before, and change it back after"
        )
    if root is not None and is_profiled(root):
        raise ValueError(
            "tune expects a model that is not being profiled, since it profiles itself, but its "
            "call is in a with block of fsdp_ext.profile; call it before"
        )
    if not units[0].settings.is_last_backward:
        raise ValueError(
            "tune expects each backward to be the last one but the model was told otherwise; call "
            "set_is_last_backward(True) before"
        )


def agreed_limit(
    unit: Unit, memory_limit: int | None, optimizer_states: int, steps: int
) -> int | None:
    """Return the least memory limit of all ranks, if any has one.

    Raises:
        ValueError: if the other numbers are not the same on all ranks.
    """
    said = exchange(unit, (memory_limit, optimizer_states, steps))
    limits, states, counts = zip(*said, strict=True)
    for name, values in {"optimizer_states": states, "steps": counts}.items():
        if len(set(values)) > 1:
            raise ValueError(
                f"tune expects {name} to be the same on all ranks but got "
                f"{', '.join(map(str, values))}; pass one number"
            )
    return min((limit for limit in limits if limit is not None), default=None)
