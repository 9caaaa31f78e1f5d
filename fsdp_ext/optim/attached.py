"""The units that an optimizer steps in backward.

Note [updates in backward] in ``csrc/core/reduce/user_collective.h`` says when a unit is stepped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from fsdp_ext.sharding.root.module_state import units_below
from fsdp_ext.sharding.root.unit import Unit, owners_of


def params_of(unit: Unit) -> frozenset[Any]:
    """Return the parameters of a unit that an optimizer may have."""
    return frozenset(owners_of([unit]))


def units_to_attach(model: nn.Module, groups: Iterable[Iterable[Any]]) -> list[Unit]:
    """Return the units of a model that have parameters of an optimizer.

    Args:
        model: the model.
        groups: the optimizer's groups of parameters.

    Raises:
        RuntimeError: if an optimizer is attached to a unit already.
        ValueError: if there is no such unit, or if one cannot be stepped in backward.
    """
    params = {param for group in groups for param in group}
    found = [unit for unit in units_below(model) if not params.isdisjoint(params_of(unit))]
    if not found:
        raise ValueError(
            "attach got a model without sharded parameters of this optimizer. Pass the model whose "
            "parameters the optimizer has, after fully_shard."
        )
    for unit in found:
        if unit.settings.update is not None:
            raise RuntimeError(
                f"attach got a model whose unit '{unit.name}' an optimizer steps in backward "
                "already. Attach one optimizer, once."
            )
        if reason := _reason_against(unit):
            raise ValueError(
                f"attach got a model whose unit '{unit.name}' {reason}, which cannot be stepped in "
                "backward. Call step() after backward instead."
            )
    return found


def _reason_against(unit: Unit) -> str | None:
    if unit.settings.offloads:
        return "has its shards on the host"
    if unit.flat_param is not None:
        return "has a flat parameter"
    if any(not entry.is_gathered for entry in unit.params):
        return "has tensor extensions"
    return None
