"""Checks of what ``tune`` is called with, before any step and across ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp_ext._util.numbers import MOST_STEPS, as_bool, is_at_least
from fsdp_ext.planner.arguments import check_memory_arguments
from fsdp_ext.profiler.api import is_profiled
from fsdp_ext.sharding.agreement import exchange
from fsdp_ext.sharding.module_state import sharded_module, unit_of, units_below
from fsdp_ext.sharding.root import Root
from fsdp_ext.sharding.unit import Unit


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a model, the root's first.

    Raises:
        TypeError: if ``fully_shard`` was not applied to the model itself.
    """
    if not isinstance(model, nn.Module) or unit_of(sharded_module(model)) is None:
        raise TypeError(
            f"tune got a {type(model).__name__} that fully_shard was not applied to. Shard the "
            "model first, the whole of it last."
        )
    return units_below(sharded_module(model))


def check_arguments(
    loss: object, memory_limit: object, optimizer_states: object, steps: object, verbose: object
) -> None:
    """Check the types and ranges of arguments.

    Raises:
        TypeError: if ``loss`` cannot be called, or ``verbose`` is not a bool.
        ValueError: if a number is out of range.
    """
    if not is_at_least(steps, 2, MOST_STEPS):
        raise ValueError(
            f"tune got steps={steps!r}. Pass from 2 to {MOST_STEPS} steps per measurement; 8 is "
            "usual."
        )
    as_bool("tune", "verbose", verbose)
    check_memory_arguments("tune", memory_limit, optimizer_states)
    if loss is not None and not callable(loss):
        raise TypeError(
            f"tune got loss={loss!r}. Pass a function of the model's output, or leave it out to "
            "use the mean."
        )


def check_state(model: nn.Module, units: Sequence[Unit]) -> None:
    """Check that ``tune`` can run steps on the model and leave nothing behind.

    Raises:
        NotImplementedError: if a unit is resharded to a smaller group, whose gathers it cannot
            predict.
        ValueError: if it is not the root, has gradients, would accumulate them or stay unsharded
            after backward, or is being profiled.
    """
    sharded = sharded_module(model)
    root: Root | None = units[0].root
    if root is not None and not root.is_provisional and root.module is not sharded:
        raise ValueError(
            f"tune got a {type(sharded).__name__} inside a {type(root.module).__name__}, which is "
            "the root. Pass the root module."
        )
    smaller = [unit for unit in units if unit.settings.reshard_group > 0]
    if smaller:
        raise NotImplementedError(
            f"tune cannot predict gathers of smaller groups yet, but unit '{smaller[0].name}' has "
            f"reshard_after_forward={smaller[0].settings.reshard_group}. Shard the model with "
            "True or False, or choose settings by hand."
        )
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise ValueError(
            "tune got a model whose parameters have gradients, but it runs backward itself. Call "
            "optimizer.zero_grad() before."
        )
    if root is not None and root.core.has_unreduced():
        raise ValueError(
            "tune got a model with gradients that are not reduced yet, and its own backwards would "
            "reduce them. Run a backward with set_requires_gradient_sync(True) before, or drop "
            "these gradients with reset_iter_state()."
        )
    if not all(unit.settings.requires_gradient_sync for unit in units):
        raise ValueError(
            "tune needs each backward to reduce gradients, but some units accumulate them. Call "
            "set_requires_gradient_sync(True) before."
        )
    if not all(unit.settings.requires_all_reduce or unit.replicas == 1 for unit in units):
        raise ValueError(
            "tune needs each backward to sum gradients over replicas, but some units accumulate "
            "them. Call set_requires_all_reduce(True) before."
        )
    if not all(unit.settings.reshard_after_backward for unit in units):
        raise ValueError(
            "tune needs units that are resharded after backward, so that each step gathers them, "
            "but some stay unsharded. Call set_reshard_after_backward(True) before, and change it "
            "back after."
        )
    if root is not None and is_profiled(root):
        raise ValueError(
            "tune profiles the model itself, but it was called in a with block of "
            "fsdp_ext.profile. Call it outside of the block."
        )
    if units[0].settings.finalizes_by_hand:
        raise ValueError(
            "tune needs backwards that end by themselves, but the model was told otherwise. Call "
            "set_manual_backward_finalization(False) before."
        )
    if not units[0].settings.is_last_backward:
        raise ValueError(
            "tune needs each backward to be the last one of its step, but the model was told "
            "otherwise. Call set_is_last_backward(True) before."
        )


def agreed_limit(
    unit: Unit, memory_limit: int | None, optimizer_states: int, steps: int
) -> int | None:
    """Return the smallest memory limit of all ranks; None if no rank has one.

    Raises:
        ValueError: if the other numbers differ between ranks.
    """
    answers = exchange(unit, (memory_limit, optimizer_states, steps))
    limits, states, counts = zip(*answers, strict=True)
    for name, values in {"optimizer_states": states, "steps": counts}.items():
        if len(set(values)) > 1:
            raise ValueError(
                f"tune got different {name} on the ranks: {', '.join(map(str, values))}. Pass the "
                "same number on all ranks."
            )
    return min((limit for limit in limits if limit is not None), default=None)
