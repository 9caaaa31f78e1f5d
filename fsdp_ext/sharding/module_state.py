"""What fsdp_ext keeps on a user's module: one object in its ``__dict__``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, _get_registry

from fsdp_ext.sharding.forward_hooks import ForwardHooks
from fsdp_ext.sharding.param_group import ParamGroup
from fsdp_ext.sharding.unit import Unit

_KEY = "_fsdp_ext"


@dataclass(frozen=True)
class ModuleState:
    """The state of one module.

    Args:
        sharded: the module that ``fully_shard`` was applied to: the module itself, or the one that
            FSDP1's wrapper wraps.
        group: the module's unit, which in a planned model is a planned one. None for FSDP1's
            wrapper.
        hooks: its forward hooks. None in a planned model and for FSDP1's wrapper.
    """

    sharded: nn.Module
    group: ParamGroup | None = None
    hooks: ForwardHooks | None = None


def set_state(module: nn.Module, state: ModuleState) -> None:
    """Attach ``state`` to ``module``, past ``nn.Module``'s registration of children."""
    module.__dict__[_KEY] = state


def state_of(module: nn.Module) -> ModuleState | None:
    """Return the state of ``module``; None if fsdp_ext has done nothing to it."""
    state: ModuleState | None = module.__dict__.get(_KEY)
    return state


def has_state(module: nn.Module) -> bool:
    """Return whether ``module`` itself has a state.

    ``hasattr`` would look through wrappers that forward attributes, such as the one of activation
    checkpointing. The wrapper of a sharded module is not sharded itself.
    """
    return _KEY in module.__dict__


def is_state(attribute: str) -> bool:
    """Return whether a module's attribute of this name says what was applied to the module.

    It is fsdp_ext's own, or one in which PyTorch's functions note that they were applied.
    """
    return attribute in (_KEY, STATE_KEY, REGISTRY_KEY)


def group_of(module: nn.Module) -> ParamGroup | None:
    """Return the unit, real or planned, that ``module`` belongs to; None if there is none."""
    state = state_of(module)
    return None if state is None else state.group


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that ``fully_shard`` made of ``module``; None if there is none."""
    group = group_of(module)
    return group if isinstance(group, Unit) else None


def hooks_of(unit: Unit) -> list[ForwardHooks]:
    """Return the forward hooks of a unit, one ``ForwardHooks`` for each of its modules."""
    states = [state_of(module) for module in unit.modules]
    return [state.hooks for state in states if state is not None and state.hooks is not None]


def sharded_module(model: nn.Module) -> nn.Module:
    """Return the module that ``fully_shard`` was applied to: ``model``, or what it wraps."""
    state = state_of(model)
    return model if state is None else state.sharded


def managed_modules(modules: list[nn.Module]) -> list[nn.Module]:
    """Return ``modules`` and what is in them, except for nested units and replicated modules."""
    found: dict[nn.Module, None] = {}

    def collect(module: nn.Module) -> None:
        found[module] = None
        for child in module.children():
            if child not in found and group_of(child) is None and not _is_replicated(child):
                collect(child)

    for module in modules:
        collect(module)
    return list(found)


def managed_params(modules: list[nn.Module], ignored: set[nn.Parameter]) -> dict[nn.Parameter, str]:
    """Return the parameters under ``modules`` outside of nested units, with their names."""
    params: dict[nn.Parameter, str] = {}
    seen: set[nn.Module] = set()

    def collect(module: nn.Module, prefix: str) -> None:
        seen.add(module)
        for name, param in module._parameters.items():
            if param is not None and param not in ignored:
                params.setdefault(param, prefix + name)
        for name, child in module._modules.items():
            if child is not None and child not in seen and group_of(child) is None:
                collect(child, f"{prefix}{name}.")

    for module in modules:
        collect(module, f"{type(module).__name__}." if len(modules) > 1 else "")
    return params


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
