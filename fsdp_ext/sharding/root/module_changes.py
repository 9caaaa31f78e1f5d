"""Notices modules and parameters that users add under a sharded module, and checks them.

torch's global registration hooks note that a watched module has changed, and the next outermost
forward looks at the modules again. So does the check of an optimizer before its first step, if it
has parameters of no unit.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fsdp_ext import _C
from fsdp_ext._util.names import without_fsdp1
from fsdp_ext._util.tracing import untraced
from fsdp_ext.sharding.params.flat_parameter import is_flat
from fsdp_ext.sharding.params.ownership import is_sharded
from fsdp_ext.sharding.root.unit import Unit

_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@functools.cache
def install() -> None:
    """Register the hooks for all modules of the process. Later calls do nothing."""
    register_module_module_registration_hook(_note_change)
    register_module_parameter_registration_hook(_note_change)


def watch(modules: Iterable[nn.Module]) -> None:
    """Let the next forward of every root look at its modules again if one of these changes."""
    _watched.update(modules)


# Compiled autograd creates modules while Dynamo evaluates frames, and the hook gets them before
# they are initialised. Dynamo fails if it traces a function that has such a module.
@untraced
def _note_change(module: nn.Module, name: str, value: Any) -> None:
    if module in _watched:
        _C.note_module_change()


def check_parameters(root: nn.Module, units: Sequence[Unit]) -> bool:
    """Check that the modules under ``root`` have the parameters that the units have.

    Returns:
        Whether forwards with gradients may run: False if a trained parameter is in no unit.
    """
    may_train = True
    owners = {param.sharded: unit for unit in units for param in unit.params}
    units_of = {attribute: unit for unit in units for attribute in unit.attributes()}
    ignored = {attribute for unit in units for attribute in unit.ignored}
    for prefix, module in root.named_modules():
        for own_name, param in module._parameters.items():
            attribute = (module, own_name)
            name = without_fsdp1(f"{prefix}.{own_name}" if prefix else own_name)
            if param is None or attribute in ignored or is_flat(param):
                continue
            owner, unit = owners.get(param), units_of.get(attribute)
            if owner is not None and unit is not None and owner is not unit:
                raise ValueError(
                    f"parameter '{name}' of unit '{unit.name}' was tied to one of unit "
                    f"'{owner.name}', named '{_name_of(root, param, attribute)}', after "
                    "fully_shard. Tie them before, and put their modules into one unit: "
                    "fully_shard([a, b])."
                )
            if owner is None and unit is None and is_sharded(param):
                raise RuntimeError(
                    f"parameter '{name}' is of a sharded module that was added after the "
                    "model's first forward. Add it before, or make the whole model anew."
                )
            if owner is None and unit is None and param.requires_grad:
                may_train = False
                if not torch.is_grad_enabled():
                    continue
                raise RuntimeError(
                    f"parameter '{name}' was added after fully_shard, so nothing would "
                    "synchronise its gradient. Add it before fully_shard, or freeze it."
                )
    return may_train


def _name_of(root: nn.Module, param: nn.Parameter, besides: tuple[nn.Module, str]) -> str:
    """Return the name of an attribute below ``root`` that is ``param``, other than ``besides``."""
    for prefix, module in root.named_modules():
        for attribute, other in module._parameters.items():
            if other is param and (module, attribute) != besides:
                return without_fsdp1(f"{prefix}.{attribute}" if prefix else attribute)
    return "another"
