"""The units that an optimizer steps in backward.

Note [updates in backward] in ``csrc/core/reduce/unit_update.h`` says when a unit is stepped.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ext.comm.roll_call import call_roll
from fsdp_ext.sharding.root.agreement import has_peers
from fsdp_ext.sharding.root.module_state import units_below
from fsdp_ext.sharding.root.unit import Unit, owners_of


def units_to_attach(
    model: nn.Module, groups: Iterable[Iterable[Any]]
) -> dict[Unit, frozenset[Any]]:
    """Return the units of a model that have parameters of an optimizer, with these."""
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


def agree_to_attach(units: dict[Unit, frozenset[Any]], options: str) -> None:
    """Wait until all ranks attach the same with the same arguments.

    The collectives of backward depend on both.
    """
    names = [[each.name for each in unit.params if each.sharded in units[unit]] for unit in units]
    number = zlib.crc32(repr(names).encode())
    caller = f"attach({options}) for {len(names)} units (checksum of their parameters: {number})"
    groups: dict[dist.ProcessGroup, torch.device] = {}
    for unit in filter(has_peers, units):
        for entry in unit.params:
            sharded: Any = entry.sharded
            groups.update(dict.fromkeys(sharded.device_mesh.get_all_groups(), unit.device))
    call_roll(groups, caller)


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
