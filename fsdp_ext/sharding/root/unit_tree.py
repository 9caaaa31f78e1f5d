"""The units under one module: their order, how they are nested, and their resolved settings."""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Sequence

import torch
from torch import nn

from fsdp_ext import _C
from fsdp_ext._util.names import without_fsdp1
from fsdp_ext.comm.costs import default_bucket_bytes, default_reduction_bytes
from fsdp_ext.comm.link import Link
from fsdp_ext.sharding.params.param_group import ParamGroup
from fsdp_ext.sharding.params.settings import DEFAULT_PREFETCH, Decision, RootSettings
from fsdp_ext.sharding.root.module_state import groups_of


class UnitTree:
    """The units under one root module, in order of registration. The first one is the root unit.

    The tree refers to the module weakly, because the module's units refer to the tree.
    """

    units: Sequence[ParamGroup]
    settings: RootSettings

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.units = list(
            dict.fromkeys(group for each in module.modules() for group in groups_of(each))
        )
        # The root unit, and the units of other meshes with the same module.
        self.root_units = len(groups_of(module))
        self._numbers = {unit: number for number, unit in enumerate(self.units)}

    def number(self, unit: ParamGroup) -> int:
        """Return the unit's place in order of registration."""
        if unit not in self._numbers:
            raise ValueError(
                f"unit '{unit.name}' is not in {type(self.module).__name__}, the root module. Pass "
                "modules of one model."
            )
        return self._numbers[unit]

    @property
    def module(self) -> nn.Module:
        """The root module."""
        module = self._module()
        if module is None:
            raise RuntimeError("the root module was deleted. Keep a reference to the model.")
        return module

    def module_names(self) -> list[list[str]]:
        """Return the names of each unit's modules in the root module, whose own name is empty.

        A unit whose modules the user has removed keeps its name.
        """
        names: dict[ParamGroup, list[str]] = {unit: [] for unit in self.units}
        for name, module in self.module.named_modules():
            for unit in groups_of(module):
                names[unit].append(without_fsdp1(name))
        return [names[unit] or [unit.name] for unit in self.units]

    def parents(self) -> list[int]:
        """Return, for each unit, the number of the unit that encloses it; -1 for the root unit.

        A unit whose modules the user has removed counts as the root's.
        """
        parents: dict[int, int] = {}

        def visit(module: nn.Module, parent: int) -> None:
            for unit in groups_of(module):
                parents.setdefault(self.number(unit), parent)
                parent = self.number(unit)
            for child in module.children():
                visit(child, parent)

        visit(self.module, -1)
        return [parents.get(number, 0) for number in range(len(self.units))]

    def nesting(self) -> int:
        """Return how many units below the root enclose each other at most, or 1 if none are."""

        def depth(module: nn.Module, enclosing: frozenset[ParamGroup]) -> int:
            enclosing = enclosing | (set(groups_of(module)) - {self.units[0]})
            return max([len(enclosing)] + [depth(child, enclosing) for child in module.children()])

        return max(1, depth(self.module, frozenset()))

    def configs(
        self, layouts: Sequence[_C.UnitLayout], meshes: Sequence[int] = ()
    ) -> list[_C.UnitConfig]:
        """Return the C++ description of each unit, with its layout for training.

        ``meshes`` has the number of each unit's mesh among those of the lanes, by default the
        root's.
        """
        parents = self.parents()
        return [
            _C.UnitConfig(
                name=unit.name,
                layout=layout,
                settings=self.core_settings(number, unit.grad_dtypes()[1]),
                parent=parents[number],
                message_limits=self.settings.message_limits[number],
                mesh=meshes[number] if meshes else 0,
            )
            for number, (unit, layout) in enumerate(zip(self.units, layouts, strict=True))
        ]

    def keeps_gather_inputs(self, device_type: str) -> bool:
        """Return whether buckets keep their gather inputs, by default on the CPU alone."""
        keeps = self.units[0].settings.keep_gather_inputs
        return device_type == "cpu" if keeps is None else keeps

    def core_settings(self, number: int, reduce_dtype: torch.dtype) -> _C.UnitSettings:
        """Return the C++ settings of one unit: those that buckets and their memory depend on."""
        unit = self.units[number]
        settings = _C.UnitSettings()
        settings.reshard_after_forward = self.settings.reshard_after_forward[number]
        settings.reshard_group = unit.settings.reshard_group
        settings.reshard_after_backward = unit.settings.reshard_after_backward
        settings.pre_scale, settings.post_scale = unit.gradient_scales(reduce_dtype)
        settings.bucket_bytes = self.settings.bucket_bytes[number]
        settings.is_unmergeable = unit.settings.has_hook
        settings.reads_whole_output = unit.settings.all_reduce_hook is not None
        return settings

    def resolve(self, link: Link, decision: Decision | None) -> RootSettings:
        """Return the settings that the schedule runs with. ``link`` tells the default bucket size.

        ``decision`` has values for settings that users left open. None stands for the defaults.
        """
        root = self.units[0].settings
        stays = decision.choice.stays_unsharded if decision is not None else ()
        median = statistics.median_low(unit.reduction_bytes() for unit in self.units)
        prefetch = DEFAULT_PREFETCH if root.prefetch is None else root.prefetch
        if decision is not None and decision.covers(root.prefetch):
            prefetch = decision.choice.prefetch
        return RootSettings(
            prefetch=prefetch,
            bucket_bytes=tuple(self._bucket_bytes(unit, link, decision) for unit in self.units),
            message_limits=tuple(self._message_limits(unit, link, median) for unit in self.units),
            reshard_after_forward=tuple(
                number >= self.root_units and number not in stays
                if unit.settings.reshard_after_forward is None
                else bool(unit.settings.reshard_after_forward)
                for number, unit in enumerate(self.units)
            ),
        )

    def _bucket_bytes(self, unit: ParamGroup, link: Link, decision: Decision | None) -> int:
        """Return the unit's own setting, or else the root's."""
        own, roots = unit.settings.bucket_bytes, self.units[0].settings.bucket_bytes
        asked = roots if own is None else own
        if decision is not None and decision.covers(asked):
            return decision.choice.bucket_bytes
        return default_bucket_bytes(link) if asked is None else asked

    def _message_limits(self, unit: ParamGroup, link: Link, median: int) -> tuple[int, int]:
        """Return the size of the largest message of gathers and of reductions; 0 for any size.

        That is the unit's own setting, or else the root's. Reductions have a limit in any case,
        because a reduction's message needs one or two buffers of its size. ``median`` is that of
        the units' ``reduction_bytes()``.
        """
        if unit.world_size == 1:
            return 0, 0
        own, roots = unit.settings.message_bytes, self.units[0].settings.message_bytes
        gather, reduction = (mine or root for mine, root in zip(own, roots, strict=True))
        unit.check_message_bytes(unit.entries, gather, reduction)
        if reduction is None and unit.settings.communication_hook is None:
            reduction = default_reduction_bytes(link, unit.world_size, unit.replicas, median)
        return gather or 0, reduction or 0
