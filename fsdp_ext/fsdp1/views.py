"""Attributes of FSDP1's wrapper and of its flat parameter that libraries read.

Everything here is a view, which reads the unit each time. With ``use_orig_params=True`` there is no
flat parameter, and a view stands for this rank's shards of a unit's parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy, StateDictSettings
from torch.distributed.fsdp._common_utils import FSDP_FLATTENED, TrainingState
from torch.distributed.tensor import DTensor

from fsdp_ext._util.names import without_fsdp1
from fsdp_ext.fsdp1.groups import HYBRID
from fsdp_ext.fsdp1.setup import without_checkpointing
from fsdp_ext.sharding.api.fsdp_module import FSDPModule
from fsdp_ext.sharding.params.flat_parameter import make_flat, parts_of_flat
from fsdp_ext.sharding.root.module_state import (
    managed_modules,
    sharded_module,
    units_below,
    units_of,
)
from fsdp_ext.sharding.root.unit import Unit
from fsdp_ext.sharding.torch_compat.state_dict_hooks import applied, converting, reshard
from fsdp_ext.sharding.torch_compat.torch_state import View


class FlatParamView(View):
    """The parameters of a unit, as FSDP1's ``FlatParameter``."""

    @property
    def _fqns(self) -> tuple[str, ...]:
        """The name of each parameter in the unit's module. A tied parameter has one name."""
        (wrapped,) = self._unit.modules
        prefixes = {module: f"{name}." if name else "" for name, module in wrapped.named_modules()}
        attributes = [param.attributes[0] for param in self._unit.params]
        names = (prefixes[module] + name for module, name in attributes)
        return tuple(without_checkpointing(without_fsdp1(name)) for name in names)

    _params = property(lambda self: [param.sharded for param in self._unit.params])
    # Of the whole parameters.
    _shapes = property(lambda self: tuple(param.shape for param in self._unit.params))
    _numels = property(lambda self: tuple(shape.numel() for shape in self._shapes))
    device = property(lambda self: self._unit.flat_shard.device)
    requires_grad = property(lambda self: any(param.requires_grad for param in self._unit.params))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters. They need to have one dtype, as under FSDP1."""
        dtypes = {param.dtype for param in self._unit.params}
        if len(dtypes) != 1:
            raise ValueError(
                f"unit '{self._unit.name}' has parameters of the dtypes "
                f"{sorted(map(str, dtypes))}, so it has no flat parameter. Use its parameters one "
                "by one."
            )
        return dtypes.pop()

    @property
    def data(self) -> torch.Tensor:
        """This rank's shards in one 1-D tensor, with padding between parameters.

        It may be set to a tensor of the same length, of any dtype.
        """
        if self._unit.impl is None:
            self._unit.flatten(loading=True)  # loaded parameters may still lie elsewhere
        return self._unit.flat_shard.view(self.dtype)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        now = self.data
        if value.shape != now.shape:
            raise ValueError(
                f"the flat parameter of unit '{self._unit.name}' has shape {tuple(now.shape)} and "
                f"was set to a tensor of shape {tuple(value.shape)}. Pass one of the same shape."
            )
        changed: dict[torch.Tensor, DTensor] = {
            param.sharded: param.spread.dtensor(part)
            for param, part in parts_of_flat(self._unit, value)
        }
        with converting(self._unit):
            _apply(self._unit, lambda tensor: changed.get(tensor, tensor))

    @property
    def _local_shard(self) -> torch.Tensor:
        """The same memory as ``data``.

        One view returns one tensor, because verl compares the ids of both: ids of tensors that are
        made for each call may coincide.
        """
        now = self.data
        kept: torch.Tensor | None = vars(self).get("_kept")
        if kept is None or kept.dtype != now.dtype or kept.data_ptr() != now.data_ptr():
            vars(self)["_kept"] = kept = now
        return kept

    @_local_shard.setter
    def _local_shard(self, value: torch.Tensor) -> None:
        # Code that has moved the flat parameter sets it to `data`.
        if value.data_ptr() != self.data.data_ptr():
            raise ValueError(
                f"_local_shard of unit '{self._unit.name}' was set to a tensor in other memory. "
                "Call flat_param_to() of the handle, or set flat_param.data, before."
            )
        vars(self)["_kept"] = value


def _apply(unit: Unit, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Convert the parameters of a unit and their gradients, but no buffers and no units inside."""
    flat = unit.flat_param
    params = [param.sharded for param in unit.params] if flat is None else [flat.param]
    modules = {module for module, _ in unit.attributes()} if flat is None else {*unit.modules}
    converted = {id(each) for param in params for each in (param, param.grad) if each is not None}
    for module in modules:
        # Not module._apply: the units' own method would convert the units inside, too.
        cast(Any, nn.Module)._apply(
            module, lambda t: convert(t) if id(t) in converted else t, recurse=False
        )


class HandleView(View):
    """A unit, as FSDP1's ``FlatParamHandle``."""

    @property
    def flat_param(self) -> Any:
        """The unit's flat parameter, or a view of its parameters."""
        flat = self._unit.flat_param
        return FlatParamView(self._unit) if flat is None else flat.param

    uses_sharded_strategy = property(lambda self: self._unit.ranks.size > 1)
    _use_orig_params = property(lambda self: self._unit.flat_param is None)
    _offload_params = property(lambda self: self._unit.settings.offloads)

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.flat_param.dtype
        return dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, value: torch.dtype) -> None:
        # Code that has set `flat_param.data` to another dtype also says so here.
        if value != self._orig_param_dtype:
            raise ValueError(
                f"_orig_param_dtype was set to {value}, but the parameters of unit "
                f"'{self._unit.name}' are {self._orig_param_dtype}. Set flat_param.data before."
            )

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move or convert this rank's shards, and their gradients, as ``Tensor.to`` does."""
        with applied([self._unit]):
            _apply(self._unit, lambda tensor: tensor.to(*args, **kwargs))

    def reshard(self, free_unsharded_flat_param: bool = True) -> None:
        """Give the modules the sharded parameters."""
        reshard(self._unit)


class WrapperViews:
    """Attributes of FSDP1's wrapper that other code reads."""

    def __setattr__(self, name: str, value: Any) -> None:
        found = getattr(WrapperViews, name, None)
        if isinstance(found, property) and found.fset is None:
            # nn.Module would register a parameter or a module that nothing reads.
            raise AttributeError(
                f"'{name}' of FullyShardedDataParallel is a view of its unit and cannot be set. "
                "Leave it as it is."
            )
        super().__setattr__(name, value)

    sharding_strategy: ShardingStrategy
    process_group: dist.ProcessGroup
    fsdp_modules: Callable[[Any], list[Any]]
    _state_dict_settings: StateDictSettings

    _fsdp_extension = None
    _wraps_wrapper: bool

    @property
    def _fsdp_ext_unit(self) -> Unit:
        """The wrapped module's unit."""
        (unit,) = self._fsdp_ext_units(recurse=False)
        return unit

    def _fsdp_ext_units(self, recurse: bool, caller: str = "") -> list[Unit]:
        """Return the units that a method borrowed from ``FSDPModule`` acts on."""
        module = sharded_module(cast(nn.Module, self))
        return units_below(module) if recurse else units_of(module)

    _unshard: Any = FSDPModule.unshard
    _set_requires_gradient_sync: Any = FSDPModule.set_requires_gradient_sync

    @property
    def rank(self) -> int:
        """This rank's number in ``process_group``."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """The number of ranks in ``process_group``."""
        return self.process_group.size()

    @property
    def _inter_node_pg(self) -> dist.ProcessGroup | None:
        if self.sharding_strategy not in HYBRID:
            return None
        return self._fsdp_ext_unit.ranks.mesh.get_group(0)

    @property
    def compute_device(self) -> torch.device:
        """The device that this rank computes on."""
        return self._fsdp_ext_unit.device

    @property
    def training_state(self) -> TrainingState:
        """Whether the model runs, is idle, or has whole parameters in ``summon_full_params``."""
        unit = self._fsdp_ext_unit
        if unit.is_summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.IDLE if unit.phase() == "idle" else TrainingState.FORWARD_BACKWARD

    def _assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        states = [state] if isinstance(state, TrainingState) else state
        if self.training_state not in states:
            raise ValueError(
                f"the wrapper is expected to be in states {states} but current state is "
                f"{self.training_state}. Call it when the wrapper is in such a state."
            )

    @property
    def _has_params(self) -> bool:
        return not self._wraps_wrapper and bool(self._fsdp_ext_unit.params)

    @property
    def _handle(self) -> HandleView | None:
        return HandleView(self._fsdp_ext_unit) if self._has_params else None

    @property
    def _flat_param(self) -> Any:
        handle = self._handle
        return None if handle is None else handle.flat_param

    @property
    def params(self) -> list[Any]:
        """The flat parameter, or the view that stands for it; empty without parameters."""
        return [self._flat_param] if self._has_params else []

    @property
    def _all_handles(self) -> list[HandleView]:
        handles = [wrapper._handle for wrapper in self.fsdp_modules(self)]
        return [handle for handle in handles if handle is not None]

    @property
    def _sync_gradients(self) -> bool:
        return self._fsdp_ext_unit.settings.requires_gradient_sync

    @_sync_gradients.setter
    def _sync_gradients(self, value: bool) -> None:
        self._set_requires_gradient_sync(value, recurse=False)

    _state_dict_type = property(lambda self: self._state_dict_settings.state_dict_type)


def mark_flattened(unit: Unit) -> None:
    """Set FSDP1's marks of flat parameters on the parameters, since trainers look for them."""
    for param in unit.params:
        setattr(param.sharded, FSDP_FLATTENED, True)


def flatten_unit(unit: Unit) -> None:
    """Give a unit a flat parameter, with the attributes of FSDP1's that libraries read."""
    make_flat(unit)
    if unit.flat_param is None:
        return
    flat: Any = unit.flat_param.param
    setattr(flat, FSDP_FLATTENED, True)
    flat._params = None
    view = FlatParamView(unit)
    flat._fqns, flat._shapes, flat._numels = view._fqns, view._shapes, view._numels
    for module in managed_modules(unit.modules):
        cast(Any, module)._fsdp_use_orig_params = False
