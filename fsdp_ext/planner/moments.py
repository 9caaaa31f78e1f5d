"""The order in which forward uses the units and parameters of a planned model.

Modules are taken to run in order of registration, as in the rest of the plan. Backward passes the
moments in reverse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from torch import nn

from fsdp_ext.planner.units import PlannedParam, PlannedRoot, PlannedUnit
from fsdp_ext.sharding.root.module_state import groups_of


class Moment(NamedTuple):
    """A moment of forward.

    A unit is entered when its first module starts, and left when its last module ends. A parameter
    is used when its module starts, once for each module that has it.
    """

    kind: Literal["enter", "use", "leave"]
    unit: PlannedUnit
    param: PlannedParam | None = None


def moments_of(root: PlannedRoot) -> Iterator[Moment]:
    """Return the moments of forward, in order."""
    of_param = {param.parameter: (unit, param) for unit in root.units for param in unit.params}
    modules_left = {
        unit: len(names) for unit, names in zip(root.units, root.module_names(), strict=True)
    }
    entered: set[PlannedUnit] = set()
    visited: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[Moment]:
        if module in visited:
            return
        visited.add(module)
        units = [unit for unit in groups_of(module) if isinstance(unit, PlannedUnit)]
        for unit in units:
            if unit not in entered:
                yield Moment("enter", unit)
            entered.add(unit)
        for parameter in module.parameters(recurse=False):
            if parameter in of_param:
                yield Moment("use", *of_param[parameter])
        for child in module.children():
            yield from visit(child)
        for unit in units:
            modules_left[unit] -= 1
            if modules_left[unit] == 0:
                yield Moment("leave", unit)

    return visit(root.module)
