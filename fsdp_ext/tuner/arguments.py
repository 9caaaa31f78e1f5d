"""Checks of the arguments of ``tune``, before any step and across ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp_ext._util.numbers import MOST_STEPS, as_bool, is_at_least
from fsdp_ext.planner.arguments import check_memory_arguments
from fsdp_ext.profiler.api import is_profiled
from fsdp_ext.sharding.params.optimizer_in_backward import has_optimizer_in_backward
from fsdp_ext.sharding.root.agreement import exchange
from fsdp_ext.sharding.root.module_state import sharded_module, unit_of, units_below
from fsdp_ext.sharding.root.root import Root
from fsdp_ext.sharding.root.unit import Unit


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a model, the root's first; TypeError if it is not sharded itself."""
    if not isinstance(model, nn.Module) or unit_of(sharded_module(model)) is None:
        raise TypeError(
            f"tune got a {type(model).__name__} that fully_shard was not applied to. Shard the "
            "model first, the whole of it last."
        )
    return units_below(sharded_module(model))


def check_arguments(
    memory_limit: object, optimizer_states: object, steps: object, verbose: object
) -> None:
    """Raise TypeError or ValueError if an argument has a wrong type or is out of range."""
    if not is_at_least(steps, 2, MOST_STEPS):
        raise ValueError(
            f"tune got steps={steps!r}. Pass from 2 to {MOST_STEPS} steps per measurement; 8 is "
            "usual."
        )
    as_bool("tune", "verbose", verbose)
    check_memory_arguments("tune", memory_limit, optimizer_states)


def check_state(model: nn.Module, units: Sequence[Unit]) -> None:
    """Raise if ``tune`` cannot run whole steps on the model, or cannot predict them."""
    root: Root | None = units[0].root
    smaller = next((unit for unit in units if unit.settings.reshard_group > 0), None)
    if smaller is not None:
        raise NotImplementedError(
            f"tune cannot predict gathers of smaller groups yet, but unit '{smaller.name}' has "
            f"reshard_after_forward={smaller.settings.reshard_group}. Shard the model with True or "
            "False, or choose settings by hand."
        )
    if root is not None and not root.is_provisional and root.module is not sharded_module(model):
        raise ValueError(
            f"tune got a {type(sharded_module(model)).__name__} inside a "
            f"{type(root.module).__name__}, which is the root. Pass the root module."
        )
    parameters = {*model.parameters(), *(entry.sharded for unit in units for entry in unit.params)}
    refused = {
        "an attached optimizer. Call its detach() before tune, and attach() after tune": any(
            unit.settings.update is not None for unit in units
        ),
        "hooks behind gradient accumulation. Call tune before you register them": any(
            getattr(parameter, "_post_accumulate_grad_hooks", None)
            or has_optimizer_in_backward(parameter)
            for parameter in parameters
        ),
        "gradients. Call optimizer.zero_grad() before": any(
            parameter.grad is not None for parameter in parameters
        ),
        "gradients that are not reduced yet. Run a backward with set_requires_gradient_sync(True) "
        "before, or drop them with reset_iter_state()": root is not None and root.has_unreduced(),
    }
    for what, is_so in refused.items():
        if is_so:
            raise ValueError(f"tune runs steps without an optimizer, but the model has {what}.")
    if root is not None and is_profiled(root):
        raise ValueError(
            "tune profiles the model itself. Call it outside of the block of fsdp_ext.profile."
        )
    _check_settings(units)


def _check_settings(units: Sequence[Unit]) -> None:
    """Raise ValueError unless a step gathers and reduces all units, and ends by itself."""
    of_root = units[0].settings
    for unit in units:
        own = unit.settings
        for call, is_so in {
            "set_manual_backward_finalization(False)": not of_root.finalizes_by_hand,
            "set_is_last_backward(True)": of_root.is_last_backward,
            "set_requires_gradient_sync(True)": own.requires_gradient_sync,
            "set_requires_all_reduce(True)": own.requires_all_reduce or unit.replicas == 1,
            "set_reshard_after_backward(True)": own.reshard_after_backward,
        }.items():
            if not is_so:
                raise ValueError(
                    "tune needs steps that gather all units, reduce all gradients and end by "
                    f"themselves, but unit '{unit.name}' was told otherwise. Call {call} before, "
                    "and change it back after."
                )


def agreed_limit(unit: Unit, memory_limit: int | None, *numbers: int) -> int | None:
    """Return the smallest memory limit of all ranks; ValueError if other ``numbers`` differ."""
    limits, of_ranks = zip(*exchange(unit, (memory_limit, numbers)), strict=True)
    if len(set(of_ranks)) > 1:
        raise ValueError(
            "tune got different (optimizer_states, steps) on the ranks: "
            f"{', '.join(map(str, of_ranks))}. Pass the same numbers on all ranks."
        )
    return min((limit for limit in limits if limit is not None), default=None)
