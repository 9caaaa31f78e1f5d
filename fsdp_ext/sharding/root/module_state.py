"""The state that fsdp_ext keeps on a user's module: one object in its ``__dict__``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, _get_registry

from fsdp_ext._util.errors import UnsupportedError
from fsdp_ext.sharding.params.param_group import ParamGroup
from fsdp_ext.sharding.root.unit import Unit

_KEY = "_fsdp_ext"


@dataclass(frozen=True)
class ModuleState:
    """The state of one module."""

    # The module that ``fully_shard`` was applied to: the module itself, or the one that FSDP1's
    # wrapper wraps.
    sharded: nn.Module
    # The module's units, which in a planned model are planned ones. There are several if its
    # parameters lie on several meshes: Note [units of one module] in ``csrc/torch/unit_forward.h``.
    # None for FSDP1's wrapper.
    groups: tuple[ParamGroup, ...] = ()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse to be copied with a module whose class does not refuse it."""
        refuse_copy()


def refuse_copy() -> NoReturn:
    """Raise UnsupportedError for a deep copy of a sharded module."""
    raise UnsupportedError(
        "FSDP does not support deepcopy. Copy the module before fully_shard, or copy its "
        "state_dict."
    )


def set_state(module: nn.Module, state: ModuleState) -> None:
    """Attach ``state`` to ``module``, past ``nn.Module``'s registration of children."""
    module.__dict__[_KEY] = state


def state_of(module: nn.Module) -> ModuleState | None:
    """Return the state of ``module`` itself; None if fsdp_ext has done nothing to it.

    ``getattr`` would look through wrappers that forward attributes, such as the one of activation
    checkpointing. The wrapper of a sharded module is not sharded itself.
    """
    state: ModuleState | None = module.__dict__.get(_KEY)
    return state


def is_state(attribute: str) -> bool:
    """Return whether a module's attribute of this name records what was applied to the module.

    It is fsdp_ext's own, a method that FSDP1's wrapper has replaced, or one in which PyTorch's
    functions note that they were applied.
    """
    return attribute in (_KEY, "_apply", STATE_KEY, REGISTRY_KEY)


def groups_of(module: nn.Module) -> tuple[ParamGroup, ...]:
    """Return the units, real or planned, that ``module`` belongs to, the first one first."""
    state = state_of(module)
    return () if state is None else state.groups


def units_of(module: nn.Module) -> list[Unit]:
    """Return the units that ``fully_shard`` made of ``module``, the first one first."""
    return [group for group in groups_of(module) if isinstance(group, Unit)]


def units_below(module: nn.Module) -> list[Unit]:
    """Return the units of ``module`` and of the modules in it, in order of registration."""
    return list(dict.fromkeys(unit for below in module.modules() for unit in units_of(below)))


def unit_of(module: nn.Module) -> Unit | None:
    """Return the first unit that ``fully_shard`` made of ``module``; None if there is none."""
    return next(iter(units_of(module)), None)


def sharded_module(model: nn.Module) -> nn.Module:
    """Return the module that ``fully_shard`` was applied to: ``model``, or what it wraps."""
    state = state_of(model)
    return model if state is None else state.sharded


def managed_modules(modules: list[nn.Module]) -> list[nn.Module]:
    """Return ``modules`` and all modules in them but nested units and replicated modules."""
    found: dict[nn.Module, None] = {}

    def collect(module: nn.Module) -> None:
        found[module] = None
        for child in module.children():
            if child not in found and not groups_of(child) and not _is_replicated(child):
                collect(child)

    for module in modules:
        collect(module)
    return list(found)


def managed_params(modules: list[nn.Module], ignored: set[nn.Parameter]) -> dict[nn.Parameter, str]:
    """Return the parameters under ``modules`` outside of nested units, with their names."""
    params: dict[nn.Parameter, str] = {}
    seen: set[nn.Module] = set()
    for module in modules:
        prefix = f"{type(module).__name__}." if len(modules) > 1 else ""
        for name, param in _parameters_outside_of_units(module, prefix, seen):
            if param not in ignored:
                params.setdefault(param, name)
    return params


# A recursive closure would be a reference cycle, which would keep replaced parameters in memory.
def _parameters_outside_of_units(
    module: nn.Module, prefix: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Parameter]]:
    seen.add(module)
    for name, param in module._parameters.items():
        if param is not None:
            yield prefix + name, param
    for name, child in module._modules.items():
        if child is not None and child not in seen and not groups_of(child):
            yield from _parameters_outside_of_units(child, f"{prefix}{name}.", seen)


def replicated_params(modules: list[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of modules to which PyTorch's ``replicate`` was applied."""
    return {
        param
        for module in modules
        for submodule in module.modules()
        if _is_replicated(submodule)
        for param in submodule.parameters()
    }


def _is_replicated(module: nn.Module) -> bool:
    return "replicate" in (_get_registry(module) or ())


def attributes_of(
    modules: list[nn.Module], params: set[nn.Parameter]
) -> set[tuple[nn.Module, str]]:
    """Return the attributes of ``modules`` and modules below that refer to one of ``params``."""
    if not params:
        return set()
    return {
        (submodule, name)
        for module in modules
        for submodule in module.modules()
        for name, param in submodule._parameters.items()
        if param in params
    }
