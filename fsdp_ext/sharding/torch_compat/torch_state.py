"""``FSDPState`` views for code that inspects FSDP2.

``torch.distributed.pipelining``, trainers and the like call ``fully_shard.state(module)``,
``module._get_fsdp_state()`` or ``_get_module_fsdp_state(module)``, and look into the registry of
composable functions. They get views, which read the unit at each access. The setters of PyTorch's
``FSDPModule`` also reach sharded modules inside it, so these settings can be assigned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from fsdp_ext.sharding.params.entries import ShardedParam
from fsdp_ext.sharding.root.module_state import units_of
from fsdp_ext.sharding.root.root import ensure_root, prepare_forward
from fsdp_ext.sharding.root.setting_changes import change
from fsdp_ext.sharding.root.unit import Unit

# PyTorch's registries have the function inside the decorator as their key.
_FUNCTION: Any = torch_fully_shard.__wrapped__  # type: ignore[attr-defined]


def first_of_root(unit: Unit) -> Unit:
    """Return the root's unit, which keeps the communication context; ``unit`` if it has no root."""
    root = unit.root
    first: Unit = unit if root is None else root.units[0]
    return first


def _refuse_name(view: object, name: str) -> NoReturn:
    """Raise the error for an attribute that ``view`` does not have. It lists those that it has."""
    known = sorted(name for name in dir(type(view)) if not name.startswith("__"))
    raise AttributeError(
        f"fsdp_ext has no state of PyTorch's FSDP, only a view with {', '.join(known)}, so there "
        f"is no '{name}'. Use the module's methods and parameters."
    )


@dataclasses.dataclass(frozen=True)
class _CommContext:
    """The groups and the transport of a root, as ``FSDPCommContext``.

    Roots with equal ones share streams.
    """

    groups: tuple[object, object]
    transport: object
    device: torch.device = dataclasses.field(compare=False)

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_name(self, name)

    @functools.cached_property
    def all_gather_stream(self) -> Any:
        """A stream for copies of the caller's own. Gathers run on streams of the lanes."""
        kind = torch.get_device_module(self.device).Stream
        of_device = {} if self.device.type == "cpu" else {"device": self.device}
        return kind(priority=-1, **of_device)  # as in FSDP2


class View:
    """A view of a unit. The error for any other attribute lists those that it has."""

    def __init__(self, unit: Unit) -> None:
        object.__setattr__(self, "_unit", unit)

    _unit: Unit

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_name(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        found = getattr(type(self), name, None)
        if not isinstance(found, property) or found.fset is None:
            raise AttributeError(
                f"'{name}' was set on a view of fsdp_ext's. Views keep no attributes. "
                "Use the module's methods, or set it on an object of your own."
            )
        super().__setattr__(name, value)


class _StateView(View):
    """A view with FSDP2's communication context, which share_comm_ctx may set."""

    @property
    def _comm_ctx(self) -> object:
        """The root's communication context.

        Pipelining compares identities, to find stages that share_comm_ctx was called for.
        """
        unit = first_of_root(self._unit)
        if unit.comm_context is None:
            groups = (unit.ranks.shard_group, unit.ranks.replicate_group)
            unit.comm_context = _CommContext(groups, unit.settings.transport, unit.device)
        return unit.comm_context

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("_comm_ctx", "comm_ctx") and value == self._comm_ctx:
            first_of_root(self._unit).comm_context = value
        else:
            super().__setattr__(name, value)


class ParamView(_StateView):
    """A parameter, as ``FSDPParam``."""

    def __init__(self, unit: Unit, param: ShardedParam) -> None:
        super().__init__(unit)
        object.__setattr__(self, "_param", param)

    _param: ShardedParam

    sharded_param = property(lambda self: self._param.sharded)
    _param_fqn = property(lambda self: self._param.name)


# Maps the names of FSDPParamGroup's settings to ours. The setters of PyTorch's `replicate` also
# change these settings of sharded modules inside the replicated one.
_SETTINGS = {
    "reduce_grads": "requires_gradient_sync",
    "all_reduce_grads": "requires_all_reduce",
    "reshard_after_backward": "reshard_after_backward",
    "reduce_scatter_unused_params": "reduce_scatter_unused_params",
}
# Settings that are accepted and have no effect here.
_WITHOUT_EFFECT = ("unshard_async_op", "reduce_scatter_max_input_buffers")


class ParamGroupView(_StateView):
    """A unit's parameters, as ``FSDPParamGroup``."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _SETTINGS:
            change([self._unit], **{_SETTINGS[name]: value})
        elif name == "post_forward_mesh_info" and value in (None, self.mesh_info):
            change([self._unit], reshard_after_forward=value is not None)
        elif name == "_training_state" and value is TrainingState.IDLE:
            self._check_idle()
        elif name not in _WITHOUT_EFFECT:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> NoReturn:
        if name == "_training_state":
            raise AttributeError(
                "fsdp_ext gathers the same tensors in forward and in backward, so there is no "
                "'_training_state' for fsdp_pre_all_gather to choose them by. If a weight's class "
                "asks for it, as TransformerEngine's do, pass reshard_after_forward=False to "
                "fully_shard for its module."
            )
        super().__getattr__(name)

    def _check_idle(self) -> None:
        phase = self._unit.phase()
        if phase != "idle":
            raise RuntimeError(
                f"'_training_state' of unit '{self._unit.name}' was set to IDLE while {phase} "
                "runs. Set it between steps."
            )

    reduce_grads = property(lambda self: self._unit.settings.requires_gradient_sync)
    all_reduce_grads = property(lambda self: self._unit.settings.requires_all_reduce)
    reshard_after_backward = property(lambda self: self._unit.settings.reshard_after_backward)
    reduce_scatter_unused_params = property(
        lambda self: self._unit.settings.reduce_scatter_unused_params
    )
    modules = property(lambda self: tuple(self._unit.modules))
    mesh = property(lambda self: self._unit.ranks.mesh)
    device = property(lambda self: self._unit.device)
    mp_policy = property(lambda self: self._unit.settings.mp_policy)
    fsdp_params = property(lambda self: [ParamView(self._unit, p) for p in self._unit.params])

    @property
    def mesh_info(self) -> FSDPMeshInfo:
        """The mesh that rows are sharded over."""
        if self.mesh.ndim == 2:
            return HSDPMeshInfo(self.mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        return FSDPMeshInfo(self.mesh, shard_mesh_dim=0)

    @property
    def post_forward_mesh_info(self) -> FSDPMeshInfo | None:
        """The mesh over which parameters are sharded after forward; None if they stay whole."""
        if self._unit.settings.reshard_group > 0:
            raise NotImplementedError(
                f"the groups of reshard_after_forward={self._unit.settings.reshard_after_forward} "
                "have no DeviceMesh. Compute their ranks from the mesh: they are consecutive."
            )
        return self.mesh_info if self._reshard_after_forward else None

    @property
    def _reshard_after_forward(self) -> bool:
        reshards = self._unit.settings.reshard_after_forward
        if reshards is None:
            root = self._unit.root
            reshards = root is None or root.number(self._unit) >= root.root_units
        return bool(reshards)

    # A module of `replicate` that prefetches this unit uses these four.

    unshard_async_op = False
    _module_fqn = property(lambda self: self._unit.name)

    def use_training_state(self, training_state: Any) -> contextlib.nullcontext[None]:
        """Do nothing: forward and backward gather alike."""
        return contextlib.nullcontext()

    def unshard(self, async_op: bool) -> None:
        """Issue the gather of the parameters. Forward waits for it."""
        ensure_root(self._unit).unshard(self._unit)

    def post_backward(self) -> None:
        """Reduce the accumulated gradients of the whole model."""
        if self._unit.root is not None:
            self._unit.root.reduce_accumulated(wait=True)


class _StateContextView(_StateView):
    """All units of a model, as ``FSDPStateContext``."""

    @property
    def all_states(self) -> list[StateView]:
        """The views of the root's modules; before the first forward only this unit's."""
        root = self._unit.root
        units: list[Unit] = [self._unit] if root is None else root.units
        views = dict.fromkeys(view_of(unit.modules[0]) for unit in units)
        return [view for view in views if view is not None]

    @property
    def is_last_backward(self) -> bool:
        """The value set with ``set_is_last_backward``."""
        return first_of_root(self._unit).settings.is_last_backward


class StateView(_StateView):
    """A unit, as ``FSDPState``."""

    # PyTorch's _get_module_fsdp_state checks isinstance(state, FSDPState). A real subclass would
    # inherit FSDPState's behaviour.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return FSDPState

    _state_ctx = property(lambda self: _StateContextView(self._unit))
    _mp_policy = property(lambda self: self._unit.settings.mp_policy)
    _device = property(lambda self: self._unit.device)

    @property
    def _fsdp_param_groups(self) -> list[ParamGroupView]:
        units = units_of(self._unit.modules[0])
        return [ParamGroupView(unit) for unit in units if unit.params]

    @property
    def _fsdp_param_group(self) -> ParamGroupView | None:
        groups = self._fsdp_param_groups
        if len(groups) > 1:
            raise AssertionError(
                f"Expected at most 1 param group, but the parameters of '{self._unit.name}' lie on "
                f"{len(groups)} meshes. Use _fsdp_param_groups."
            )
        return groups[0] if groups else None

    @property
    def _is_root(self) -> bool | None:
        root = self._unit.root
        return None if root is None or root.is_provisional else root.units[0] is self._unit

    def _lazy_init(self) -> None:
        """Make the unit's module a root, as its first forward does. Call it on all ranks."""
        if self._is_root is None:
            prepare_forward(self._unit, self._unit.modules[0])
            self._unit.root.impl.leave_if_idle()

    # PyTorch's register_fsdp_forward_method calls these two around the method.

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._unit.hooks[module].run_pre(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._unit.hooks[module].run_post(module, args, output)

    # PyTorch's pipelining calls this after the last micro-batch.

    def _root_post_backward_final_callback(self) -> None:
        ParamGroupView(self._unit).post_backward()
        root = self._unit.root
        number = -1 if root is None else root.impl.take_left_out()
        if root is not None and number >= 0:
            raise RuntimeError(
                f"unit '{root.units[number].name}' was resharded after forward, so a backward for "
                "the inputs of its pipeline stage lost its gradients. Zero-bubble schedules need "
                "reshard_after_forward=False in fully_shard for every unit."
            )


def register(unit: Unit) -> None:
    """Let PyTorch's functions find that ``fully_shard`` was applied to the unit's modules."""
    view, item = StateView(unit), RegistryItem()
    for module in unit.modules:
        module.__dict__.setdefault(STATE_KEY, {})[_FUNCTION] = view
        module.__dict__.setdefault(REGISTRY_KEY, {})[_FUNCTION.__name__] = item
        _module_state_mapping[module] = weakref.ref(cast(FSDPState, view))


def view_of(module: nn.Module) -> StateView | None:
    """Return the view of the module's unit; None if ``fully_shard`` was not applied to it."""
    view = module.__dict__.get(STATE_KEY, {}).get(_FUNCTION)
    return view if isinstance(view, StateView) else None
