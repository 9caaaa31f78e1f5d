"""Changes of units' settings after ``fully_shard``, by the methods of ``FSDPModule``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn

from fsdp_ext._util.errors import MisuseError
from fsdp_ext.sharding.root.module_state import units_of
from fsdp_ext.sharding.root.unit import Unit


def change(units: Sequence[Unit], **settings: Any) -> None:
    """Change settings of units, and apply them in the roots that run the units.

    Without settings it only applies them, after the caller has changed prefetch targets. After an
    error the units have their former settings.
    """
    before = [unit.settings for unit in units]
    for unit in units:
        unit.change(**settings)
    try:
        _apply(units, settings)
    except Exception:
        for unit, former in zip(units, before, strict=True):
            unit.settings = former
        _apply(units, settings)
        raise


def _apply(units: Sequence[Unit], changed: Collection[str]) -> None:
    for root in {unit.root for unit in units if unit.root is not None}:
        if "reshard_after_forward" in changed:  # the other settings need no resolving
            root.resolve_again()
        root.apply([unit for unit in units if unit.root is root])


def targets_of(units: Sequence[Unit], modules: Iterable[object], caller: str) -> list[list[Unit]]:
    """Return each unit's prefetch targets if their module prefetches ``modules``.

    Each unit prefetches the next one, and the last one the units of ``modules``.
    """
    targets = sharded_units(modules, caller)
    root = units[0].root
    if root is not None and not root.is_provisional:
        for target in targets:
            root.number(target)  # raises if it is not there
    return [[inner] if targets else [] for inner in units[1:]] + [targets]


def sharded_units(modules: Iterable[object], caller: str) -> list[Unit]:
    """Return the units of modules that a user has passed to ``caller``."""
    if isinstance(modules, nn.Module) or not isinstance(modules, Iterable):
        raise TypeError(f"{caller} got {modules!r}. Pass a list of sharded modules.")
    units: list[Unit] = []
    for module in modules:
        found = units_of(module) if isinstance(module, nn.Module) else []
        if not found:
            raise ValueError(
                f"{caller} got a {type(module).__name__} that is not sharded. Pass modules that "
                "fully_shard was applied to."
            )
        units += found
    return units


def refuse_custom_collectives(unit: Unit, caller: str) -> None:
    """Raise MisuseError if the user's own objects communicate for ``unit``.

    The method ``caller`` says how tensors of collectives are allocated.
    """
    for kind in ("all gather", "reduce scatter"):
        comm = getattr(unit.settings, f"custom_{kind.replace(' ', '_')}")
        if comm is not None:
            raise MisuseError(
                f"cannot call {caller}() when {kind} comm is custom: it is a "
                f"{type(comm).__name__}, which allocates its own tensors. Leave out one of the two "
                "calls."
            )
