"""The units that an optimizer steps in backward.

Note [updates in backward] in ``csrc/core/reduce/unit_update.h`` says when a unit is stepped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import nn

from fsdp_ext.sharding.root.module_state import units_below
from fsdp_ext.sharding.root.unit import Unit, owners_of


def units_to_attach(
    model: nn.Module, groups: Iterable[Iterable[Any]]
) -> dict[Unit, frozenset[Any]]:
    """Return the units of a model that have parameters of an optimizer, with these.

    Args:
        model: the model.
        groups: the optimizer's groups of parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach got {model!r}. Pass the model, a torch.nn.Module.")
    owners = owners_of(units_below(model))
    found: defaultdict[Unit, list[Any]] = defaultdict(list)
    for group in groups:
        for param in group:
            if param in owners:
                found[owners[param]].append(param)
    if not found:
        raise ValueError(
            "attach got a model without sharded parameters of this optimizer. Pass the model whose "
            "parameters the optimizer has, after fully_shard."
        )
    for unit in found:
        if unit.settings.update is not None:
            raise RuntimeError(
                f"attach got a model whose unit '{unit.name}' already has an attached optimizer. "
                "Attach one optimizer to each unit, once."
            )
        if reason := _reason_against(unit):
            raise ValueError(
                f"attach got a model with unit '{unit.name}', which {reason}. Such a unit cannot "
                "be stepped in backward. Call step() after backward instead."
            )
    return {unit: frozenset(params) for unit, params in found.items()}


def frees_gradients(unit: Unit) -> bool:
    """Return whether an attached optimizer steps all parameters that the unit trains."""
    update = unit.settings.update
    return update is not None and all(
        entry.sharded in update.params for entry in unit.params if entry.requires_grad
    )


def _reason_against(unit: Unit) -> str | None:
    if unit.settings.offloads:
        return "has its shards on the host"
    if unit.flat_param is not None:
        return "has a flat parameter"
    if any(not entry.is_gathered for entry in unit.params):
        return "has tensor extensions"
    if any(getattr(entry.sharded, "_post_accumulate_grad_hooks", None) for entry in unit.params):
        return "has hooks behind gradient accumulation, which would find no gradient"
    return None
