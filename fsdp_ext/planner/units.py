"""The units of a planned model: those that ``fully_shard`` would make, on a copy without memory.

The rules are those of training: ``sharding/params/param_group.py`` and
``sharding/root/unit_tree.py``.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_ext import _C
from fsdp_ext._util.names import without_fsdp1
from fsdp_ext.comm.link import Link
from fsdp_ext.optim.attached import frees_gradients
from fsdp_ext.sharding.api.arguments import check_containers, check_modules
from fsdp_ext.sharding.api.fsdp_module import original_class
from fsdp_ext.sharding.params.dtensors import part_of_this_rank
from fsdp_ext.sharding.params.entries import ShardedParam
from fsdp_ext.sharding.params.flat_parameter import own_parameters_shown
from fsdp_ext.sharding.params.ownership import (
    check_parameter,
    keeps_own_rows,
    mark_sharded,
    own_grad_dtype,
)
from fsdp_ext.sharding.params.param_group import ParamGroup, keeps_dtype
from fsdp_ext.sharding.params.settings import Decision, UnitSettings
from fsdp_ext.sharding.root.module_state import (
    ModuleState,
    groups_of,
    is_state,
    managed_params,
    set_state,
    unit_of,
    units_below,
)
from fsdp_ext.sharding.root.unit import Unit
from fsdp_ext.sharding.root.unit_tree import UnitTree
from fsdp_ext.sharding.torch_compat.state_dict_hooks import settle

# The modules that become units: classes, modules, or a function that decides for each module.
Units = type[nn.Module] | Sequence[type[nn.Module] | nn.Module] | Callable[[nn.Module], bool]

# Attributes with hooks. Hooks, those of fully_shard above all, belong to the original model.
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)


@dataclass(frozen=True)
class PlannedRanks:
    """The ranks of a planned training."""

    shards: int  # how many ranks share the rows of each parameter
    replicas: int = 1  # how many ranks have the same rows


@dataclass
class PlannedParam:
    """A parameter without memory."""

    name: str  # from the root of the copy
    parameter: nn.Parameter  # the whole one of the copy
    shape: torch.Size  # or that of the part that tensor parallelism has given to this rank
    keeps_dtype: bool  # whether it would be computed with in its own dtype
    shard_dim: int = 0  # the dimension that ranks share
    is_gathered: bool = True  # whether its rows are gathered unchanged

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the sharded parameter would have."""
        return self.parameter.dtype

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype that the user wants for its gradients; None if that is its own."""
        return own_grad_dtype(self.parameter)

    @property
    def is_split(self) -> bool:
        """Whether tensor parallelism has split it."""
        return self.shape != self.parameter.shape

    @property
    def is_trained(self) -> bool:
        """Whether it is trained."""
        return self.parameter.requires_grad


class PlannedUnit(ParamGroup):
    """A unit whose parameters are whole, with the layout that they would have."""

    def __init__(
        self, name: str, params: Sequence[PlannedParam], ranks: PlannedRanks, settings: UnitSettings
    ) -> None:
        super().__init__(name, ranks.shards, settings, ranks.replicas)
        # Whether an attached optimizer steps it in backward, and leaves none of its gradients.
        self.is_attached = self.frees_gradients = settings.update is not None
        self.params: list[PlannedParam] = [params[index] for index in self._layout_order(params)]

    @classmethod
    def like(
        cls, unit: Unit, ranks: PlannedRanks, copies: dict[nn.Module, nn.Module]
    ) -> PlannedUnit:
        """Return the planned counterpart of a real ``unit`` on ``ranks``."""
        params: list[PlannedParam] = []
        for param in unit.params:
            module, name = param.attributes[0]
            parameter = cast(nn.Parameter, copies[module]._parameters[name])
            _check_even(param, ranks)
            parameter.requires_grad_(param.requires_grad)
            params.append(
                PlannedParam(param.name, parameter, param.shape, param.keeps_dtype, param.shard_dim)
            )
        self = cls(unit.name, params, ranks, unit.settings)
        self.frees_gradients = frees_gradients(unit)
        self.forward_prefetch = unit.forward_prefetch
        self.backward_prefetch = unit.backward_prefetch
        return self

    def shard_numel(self, param: PlannedParam) -> int:
        """Return the elements of the first rank's shard of ``param``, the largest one."""
        shape = list(param.shape)
        shape[param.shard_dim] = math.ceil(shape[param.shard_dim] / self.world_size)
        return math.prod(shape)


class Moment(NamedTuple):
    """A moment of forward.

    A unit is entered when its first module starts, and left when its last module ends. A parameter
    is used when its module starts, once for each module that has it.
    """

    kind: Literal["enter", "use", "leave"]
    unit: PlannedUnit
    param: PlannedParam | None = None


class PlannedRoot(UnitTree):
    """The units of a copied model.

    Args:
        module: the copy; its modules know their units.
        link: the default bucket size comes from it.
        decision: decides settings that were left open.
        overrides: settings of the root's unit that replace its own.
    """

    units: list[PlannedUnit]

    def __init__(
        self,
        module: nn.Module,
        link: Link,
        decision: Decision | None = None,
        **overrides: Any,
    ) -> None:
        super().__init__(module)
        self._link = link
        self.units[0].settings = replace(self.units[0].settings, **overrides)
        names = {param: without_fsdp1(name) for name, param in module.named_parameters()}
        for unit, modules in zip(self.units, self.module_names(), strict=True):
            unit.name = modules[0] or "the root"
            for param in unit.params:
                param.name = names.get(param.parameter, param.name)
        self.settings = self.resolve(link, decision)

    @cached_property
    def layouts(self) -> list[_C.UnitLayout]:
        """The layout of each unit, for training."""
        return [unit.layout_for(training=True) for unit in self.units]

    def decide(self, decision: Decision | None) -> None:
        """Resolve the settings anew."""
        self.settings = self.resolve(self._link, decision)

    def has_prefetch_lists(self) -> bool:
        """Return whether the user has said which units are gathered ahead of some unit."""
        return any(unit.forward_prefetch or unit.backward_prefetch for unit in self.units)

    def most_ahead(self) -> int:
        """Return the largest number of prefetched gathers, as ``UnitSet::plan_memory`` does."""
        lists = [
            targets for u in self.units for targets in (u.forward_prefetch, u.backward_prefetch)
        ]
        return max([self.settings.prefetch, *map(len, lists)])

    def moments(self) -> Iterator[Moment]:
        """Return the moments of forward, in order.

        Like the rest of the plan, this assumes that modules run in the order of registration.
        """
        of_param = {param.parameter: (unit, param) for unit in self.units for param in unit.params}
        modules_left = {
            unit: len(names) for unit, names in zip(self.units, self.module_names(), strict=True)
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

        return visit(self.module)

    @cached_property
    def backward_moments(self) -> list[Moment]:
        """The moments that backward passes, in its order, if the model's inputs need no gradient.

        It begins with the last moment of forward and ends with the first use of a trained
        parameter. A unit that was left before has no backward.
        """
        moments = list(self.moments())
        trained = [i for i, (_, _, param) in enumerate(moments) if param and param.is_trained]
        first = min(trained, default=len(moments))
        return moments[first:][::-1]


def units_of_sharded(model: nn.Module, ranks: PlannedRanks) -> nn.Module:
    """Return a copy of a sharded model, with its units on ``ranks``."""
    _refuse_extensions(model)
    units = units_below(model)
    with contextlib.ExitStack() as shown:
        for unit in units:
            settle(unit)
            shown.enter_context(own_parameters_shown(unit))
        copied, copies = _meta_copy(model)
    if unit_of(model) is None:
        raise ValueError(
            f"plan got a {type(model).__name__} in which only modules inside are sharded. Call "
            "fully_shard on the whole model, too, as the last one."
        )
    planned = {unit: PlannedUnit.like(unit, ranks, copies) for unit in units}
    for module in model.modules():
        its_unit = unit_of(module)
        if its_unit is not None:
            set_state(copies[module], ModuleState(copies[module], (planned[its_unit],)))
    return copied


def units_of_plain(
    model: nn.Module, units: Units | None, ranks: PlannedRanks, settings: UnitSettings
) -> nn.Module:
    """Return a copy of a plain model, with the units that ``fully_shard`` would make."""
    chosen = set(chosen_modules(model, units, "plan"))
    for name, param in model.named_parameters():
        check_parameter(name, param, param.device)  # a lazy one has no shape to copy
    _refuse_extensions(model)
    copied, copies = _meta_copy(model)
    # Users shard inner modules first, too.
    for module in reversed(list(model.modules())):
        if module is model or module in chosen:
            _shard(copies[module], ranks, settings)
    return copied


def _check_even(param: ShardedParam, ranks: PlannedRanks) -> None:
    size = param.shape[param.shard_dim]
    if param.shard_dim > 0 and size % ranks.shards != 0:
        raise NotImplementedError(
            f"plan got {ranks.shards} ranks that share the model, but parameter '{param.name}' is "
            f"sharded in dimension {param.shard_dim}, which has size {size}. Pass a number that "
            "divides it."
        )


def _refuse_extensions(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        part = part_of_this_rank(param)
        if keeps_own_rows(name, part):
            raise NotImplementedError(
                f"parameter '{without_fsdp1(name)}' is a {type(part).__name__}. Its "
                "fsdp_pre_all_gather decides only when it runs what is gathered, so plan cannot "
                "know. Plan the model with plain parameters."
            )


def chosen_modules(model: nn.Module, units: Units | None, caller: str) -> list[nn.Module]:
    """Return the modules below ``model`` that ``units`` names."""
    below = [module for module in model.modules() if module is not model]
    if units is None:
        return []
    if isinstance(units, (type, nn.Module)):
        units = [units]
    if isinstance(units, Sequence) and not isinstance(units, str):
        classes = tuple(entry for entry in units if isinstance(entry, type))
        modules = [entry for entry in units if isinstance(entry, nn.Module)]
        for entry in units:
            _check_choice(model, below, entry, caller)
        return [*modules, *(module for module in below if isinstance(module, classes))]
    if not callable(units):
        raise TypeError(
            f"{caller} got units={units!r}. Pass module classes, modules of the model, or a "
            "function of a module, such as units=Block."
        )
    return [module for module in below if units(module)]


def _check_choice(model: nn.Module, below: list[nn.Module], entry: Any, caller: str) -> None:
    is_class = isinstance(entry, type) and issubclass(entry, nn.Module)
    found = any(isinstance(m, entry) if is_class else m is entry for m in [model, *below])
    if not is_class and not isinstance(entry, nn.Module):
        raise TypeError(
            f"{caller} got {entry!r} in units. Pass module classes or modules of the model, such "
            "as units=[Block]."
        )
    if is_class and not found:
        raise ValueError(
            f"{caller} got the class {entry.__name__} in units, but {type(model).__name__} has no "
            f"such module. It has {', '.join(sorted({type(m).__name__ for m in below}))}."
        )
    if not found:
        raise ValueError(
            f"{caller} got a {type(entry).__name__} in units that is not a module of "
            f"{type(model).__name__}. Take it from model.modules()."
        )


def _shard(module: nn.Module, ranks: PlannedRanks, settings: UnitSettings) -> None:
    check_modules([module])
    check_containers([module])
    params = managed_params([module], set())
    name = type(module).__name__
    planned = []
    for param, param_name in params.items():
        check_parameter(param_name, param, torch.device("meta"))
        if isinstance(param, DTensor):
            raise NotImplementedError(
                f"plan cannot shard a model with tensor parallelism, and parameter '{param_name}' "
                "is a DTensor. Plan the model before parallelize_module, or after fully_shard."
            )
        keeps = keeps_dtype(settings.mp_policy, param_name, param)
        planned.append(PlannedParam(param_name, param, param.shape, keeps))
        mark_sharded(param, param, param_name, name)
    set_state(module, ModuleState(module, (PlannedUnit(name, planned, ranks, settings),)))


# - Copies on the meta device


def _meta_copy(model: nn.Module) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    """Return a copy of ``model`` without memory, and the copy of each of its modules.

    Shared parameters are shared in the copy, too. The copy has no hooks and no traces of
    ``fully_shard``. It shares attributes that cannot be copied with the original.
    """
    memo: dict[int, Any] = {}
    shells: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        cls: Any = original_class(type(module))
        shells[module] = memo[id(module)] = cls.__new__(cls)
        attributes = {**module.__dict__, **module._parameters, **module._buffers}
        for value in attributes.values():
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = _without_memory(value)
    for module, shell in shells.items():
        shell.__dict__.update(
            (name, type(value)() if name in _HOOKS else _copied(value, memo))
            for name, value in module.__dict__.items()
            if not is_state(name)
        )
    return shells[model], shells


def _without_memory(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        grad_dtype = own_grad_dtype(tensor)
        if grad_dtype is not None:
            copied.grad_dtype = grad_dtype
        return copied
    return empty


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a handle, a process group
        return value
