"""The units of a model that is only planned: where ``fully_shard`` would put which parameter.

All of it is on a copy of the model without memory. The rules are those of ``unit.py`` and
``root.py``, which are used as they are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_ext.comm.link import Link
from fsdp_ext.planner.flops import meta_copy
from fsdp_ext.sharding.arguments import check_modules, check_parameter, mark_sharded
from fsdp_ext.sharding.root import Root, managed_params, unit_of
from fsdp_ext.sharding.unit import ParamSlot, Unit

# What becomes a unit: classes, modules, or a function that says so of a module.
Units = type[nn.Module] | Sequence[type[nn.Module] | nn.Module] | Callable[[nn.Module], bool]


@dataclass(frozen=True)
class Settings:
    """What is asked of every unit: see :func:`fsdp_ext.fully_shard`."""

    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool | None = None


class PlannedSlot(ParamSlot):
    """A parameter without memory."""

    @property
    def local(self) -> torch.Tensor:
        """The whole parameter, since only its dtype is asked for."""
        return self.sharded


@dataclass(frozen=True)
class _Ranks:
    """As much of a mesh as the layout needs."""

    count: int

    def size(self) -> int:
        return self.count


class PlannedUnit(Unit):
    """A unit whose parameters are as they were, with the layout that they would have.

    Args:
        modules: of the copy.
        slots: of its parameters, in any order.
        world_size: how many ranks there would be.
        settings: what is asked of it.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        slots: list[PlannedSlot],
        world_size: int,
        settings: Settings,
    ) -> None:
        self.modules = modules
        self.name = type(modules[0]).__name__
        self.mesh = cast(DeviceMesh, _Ranks(world_size))
        self.mp_policy = settings.mp_policy
        self.reshard_after_forward = settings.reshard_after_forward
        self.reshard_after_backward = True
        self.bucket_bytes = None
        self.max_message_bytes = None
        self.prefetch = None
        self.gradient_divide_factor = None
        self.forward_prefetch = []
        self.backward_prefetch = []
        by_parameter = {slot.sharded: slot for slot in slots}
        order = self._large_first({slot.sharded: slot.name for slot in slots})
        self.slots = [by_parameter[parameter] for parameter in order]

    @classmethod
    def like(cls, unit: Unit, world_size: int, copies: dict[nn.Module, nn.Module]) -> PlannedUnit:
        """Return what ``unit``, which is a real one, would be on so many ranks."""
        slots: list[PlannedSlot] = []
        for slot in unit.slots:
            attributes = [(copies[module], name) for module, name in slot.attributes]
            module, name = attributes[0]
            parameter = cast(nn.Parameter, module._parameters[name])
            parameter.requires_grad_(slot.sharded.requires_grad)
            slots.append(PlannedSlot(slot.name, slot.shape, parameter, attributes))
        settings = Settings(unit.mp_policy, unit.reshard_after_forward)
        self = cls([copies[module] for module in unit.modules], slots, world_size, settings)
        self.reshard_after_backward = unit.reshard_after_backward
        self.bucket_bytes = unit.bucket_bytes
        self.max_message_bytes = unit.max_message_bytes
        self.prefetch = unit.prefetch
        self.gradient_divide_factor = unit.gradient_divide_factor
        self.forward_prefetch = unit.forward_prefetch
        self.backward_prefetch = unit.backward_prefetch
        return self


class PlannedRoot(Root):
    """The units of a copy, in order of registration, and what they have in common.

    Args:
        module: the copy; its modules know their units.
        link: that the default size of buckets comes from.
    """

    def __init__(self, module: nn.Module, link: Link) -> None:
        self._module = weakref.ref(module)
        self.link = link
        units = (unit_of(submodule) for submodule in module.modules())
        self.units = list(dict.fromkeys(unit for unit in units if unit is not None))
        names = {parameter: name for name, parameter in module.named_parameters()}
        for unit, modules in zip(self.units, self.module_names(), strict=True):
            unit.name = modules[0] or "the root"
            for slot in unit.slots:
                slot.name = names.get(slot.sharded, slot.name)

    def module_names(self) -> list[list[str]]:
        """Return the names of each unit's modules, from the root, whose own is empty."""
        names: dict[int, list[str]] = {}
        for name, module in self.module.named_modules():
            unit = unit_of(module)
            if unit is not None:
                names.setdefault(id(unit), []).append(name)
        return [names[id(unit)] for unit in self.units]

    @functools.cached_property
    def parents(self) -> list[int]:
        """Which unit encloses each one, by number; -1 for the root."""
        return self._parents()

    @functools.cached_property
    def nesting(self) -> int:
        """How many units below the root enclose each other, at most."""
        return self._nesting()

    def most_ahead(self, asked: int | None = None) -> int:
        """Return how many gathers are ahead at most, as ``Pipeline::plan_memory`` counts them.

        Args:
            asked: instead of what the root's unit says.
        """
        lists = [
            targets for u in self.units for targets in (u.forward_prefetch, u.backward_prefetch)
        ]
        return max([self.depth() if asked is None else asked, *map(len, lists)])


def units_of_sharded(model: nn.Module, world_size: int) -> nn.Module:
    """Return a copy of a model that fully_shard was applied to, with its units for so many ranks.

    Raises:
        ValueError: if it was applied to a part of the model only.
    """
    copied, copies = meta_copy(model)
    if unit_of(model) is None:
        raise ValueError(
            f"plan expects a root module that fully_shard was applied to but of "
            f"{type(model).__name__} only modules inside are sharded; shard the whole model last"
        )
    planned: dict[int, PlannedUnit] = {}
    for module in model.modules():
        unit = unit_of(module)
        if unit is not None:
            if id(unit) not in planned:
                planned[id(unit)] = PlannedUnit.like(unit, world_size, copies)
            copies[module].__dict__["_fsdp_ext_unit"] = planned[id(unit)]
    return copied


def units_of_plain(
    model: nn.Module, units: Units | None, world_size: int, settings: Settings
) -> nn.Module:
    """Return a copy of a model, with the units that fully_shard would make of it.

    Raises:
        TypeError: if ``units`` is nothing that says what becomes a unit.
        ValueError: if a module or a parameter cannot be sharded.
    """
    chosen = set(_chosen(model, units))
    copied, copies = meta_copy(model)
    # Bottom-up, as users do it.
    for module in reversed(list(model.modules())):
        if module is model or module in chosen:
            _shard(copies[module], world_size, settings)
    return copied


def _chosen(model: nn.Module, units: Units | None) -> list[nn.Module]:
    below = [module for module in model.modules() if module is not model]
    if units is None:
        return []
    if isinstance(units, (type, nn.Module)):
        units = [units]
    if isinstance(units, Sequence) and not isinstance(units, str):
        classes = tuple(entry for entry in units if isinstance(entry, type))
        modules = [entry for entry in units if isinstance(entry, nn.Module)]
        for entry in units:
            _check_choice(model, below, entry)
        return [*modules, *(module for module in below if isinstance(module, classes))]
    if not callable(units):
        raise TypeError(
            f"units expects module classes, modules of the model or a function of a module but got "
            f"{units!r}; pass units=Block, say"
        )
    return [module for module in below if units(module)]


def _check_choice(model: nn.Module, below: list[nn.Module], entry: Any) -> None:
    is_class = isinstance(entry, type) and issubclass(entry, nn.Module)
    if not is_class and not isinstance(entry, nn.Module):
        raise TypeError(
            f"units expects module classes or modules of the model but got {entry!r}; pass "
            "units=[Block], say"
        )
    if is_class and not any(isinstance(module, entry) for module in [model, *below]):
        raise ValueError(
            f"units expects classes of modules of {type(model).__name__} but it has no "
            f"{entry.__name__}; it has {', '.join(sorted({type(m).__name__ for m in below}))}"
        )
    if not is_class and not any(module is entry for module in [model, *below]):
        raise ValueError(
            f"units expects modules of {type(model).__name__} but got a {type(entry).__name__} "
            "that is not in it; take them from model.modules()"
        )


def _shard(module: nn.Module, world_size: int, settings: Settings) -> None:
    check_modules([module])
    params = managed_params([module], set())
    name = type(module).__name__
    for param, param_name in params.items():
        check_parameter(param_name, param, torch.device("meta"))
    slots = [PlannedSlot(param_name, param.shape, param) for param, param_name in params.items()]
    for slot in slots:
        mark_sharded(slot.sharded, slot.sharded, slot.name, name)
    module.__dict__["_fsdp_ext_unit"] = PlannedUnit([module], slots, world_size, settings)
