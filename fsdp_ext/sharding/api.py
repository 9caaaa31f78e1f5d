"""``fully_shard``: FSDP2's entry point, and what it makes of a module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, NoReturn, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.utils import _get_root_modules

from fsdp_ext.comm.simulated import Simulated
from fsdp_ext.comm.transports import resolve_transport
from fsdp_ext.sharding import optimizer_hooks
from fsdp_ext.sharding.arguments import (
    check_modules,
    check_types,
    device_of,
    resolve_bucket_bytes,
    resolve_max_message_bytes,
    resolve_mesh,
    resolve_prefetch,
)
from fsdp_ext.sharding.root import ForwardHooks, Root, managed_params, unit_of
from fsdp_ext.sharding.unit import Unit


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    transport: str | Simulated | None = ...,
    bucket_bytes: int | Literal["auto"] | None = ...,
    max_message_bytes: int | None = ...,
    prefetch: int | Literal["auto"] | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    transport: str | Simulated | None = ...,
    bucket_bytes: int | Literal["auto"] | None = ...,
    max_message_bytes: int | None = ...,
    prefetch: int | Literal["auto"] | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    transport: str | Simulated | None = None,
    bucket_bytes: int | Literal["auto"] | None = None,
    max_message_bytes: int | None = None,
    prefetch: int | Literal["auto"] | None = None,
) -> FSDPModule | list[FSDPModule]:
    """Shard ``module``'s parameters, gradients and optimizer state over data-parallel ranks.

    The parameters of ``module`` that no earlier call on a submodule has taken become one *unit*:
    they are gathered in one collective before forward, freed after it, gathered again for backward,
    and their gradients are reduced in one collective. Apply it bottom-up, to the layers first and
    to the whole model last, and make the optimizer afterwards.

    Parameters and buffers may be on the host, on the mesh's device or on meta; from the host they
    move to the device, of which torch's current one is taken.

    Between steps the module's parameters are DTensors with ``Shard(0)``: rank ``r`` of ``N`` has
    rows ``[r * c, (r + 1) * c)`` with ``c = ceil(rows / N)``, as ``torch.chunk`` has it. In forward
    and backward they are plain tensors of the full shape. Names, arguments and meaning are those of
    ``torch.distributed.fsdp.fully_shard``.

    Args:
        module: the module to shard in place, or a list of modules to treat as one unit.
        mesh: 1-D device mesh to shard over; all ranks by default.
        reshard_after_forward: whether to free the unsharded parameters after forward. By default
            True, but False for the root, which backward needs first.
        shard_placement_fn: not supported yet.
        mp_policy: dtypes of computation, reduction and results, see
            :class:`torch.distributed.fsdp.MixedPrecisionPolicy`.
        offload_policy: not supported yet.
        ignored_params: parameters to leave as they are, neither sharded nor reduced.
        transport: what collectives travel by: "nccl" on GPUs; on the host "shared_memory" or
            "process_group". By default what FSDP_EXT_TRANSPORT names, else NCCL on GPUs, shared
            memory between gloo's ranks of one host, and the process group otherwise. Or a
            :class:`fsdp_ext.Simulated` one, without peers. One for all units of a model.
        bucket_bytes: units that forward runs one after the other travel together as long as their
            all-gather carries at most so many bytes, of all ranks together; 0: each by itself. A
            unit without a value has the root's, by default four times what the transport carries
            in the time of a launch (:func:`fsdp_ext.describe_buckets` shows it); "auto" is what
            :func:`fsdp_ext.tune` has chosen for such a model, the default until then. It changes no
            result where a transport adds ranks up in one order, as shared memory does.
        max_message_bytes: what is larger travels as several messages, between parameters where
            that is possible, so that the casts and copies of one are beside the wire of another;
            staging and reduce input are two messages then. Units with other values are in other
            buckets. A unit without a value has the root's, by default any size. A parameter of
            which a message carries only some rows is copied once more.
        prefetch: how many buckets' gathers are under way ahead of the unit that runs, in forward
            and in backward; the root's counts, by default 1. Each takes a slot of the largest
            bucket's size; 0 gathers when a unit needs its parameters; "auto" is what
            :func:`fsdp_ext.tune` has chosen.

    Returns:
        ``module``, whose class is now a subclass of :class:`FSDPModule` and its own class.

    Raises:
        RuntimeError: if there is no process group.
        TypeError: if ``mesh``, ``mp_policy``, ``ignored_params`` or ``transport`` is of another
            type.
        ValueError: if the mesh, the transport, a module or a parameter does not fit; the message
            says why.
        NotImplementedError: for arguments that are not supported yet, by name.
    """
    check_types(mesh, mp_policy, ignored_params)
    _refuse_unsupported(shard_placement_fn, offload_policy, mp_policy)
    modules = [module] if isinstance(module, nn.Module) else list(_root_modules(module))
    check_modules(modules)
    if isinstance(transport, Simulated):
        transport.init_process_group()
    mesh = resolve_mesh(mesh)
    transport = resolve_transport(transport, mesh.device_type)
    if isinstance(transport, Simulated):
        transport.check_group(mesh.size(), mesh.get_local_rank())
    unit = Unit(
        modules,
        managed_params(modules, set(ignored_params or ())),
        mesh,
        device_of(mesh),
        mp_policy,
        _resolve_reshard(reshard_after_forward, mesh),
        transport,
        resolve_bucket_bytes(bucket_bytes),
        resolve_max_message_bytes(max_message_bytes),
        resolve_prefetch(prefetch),
    )
    _move_buffers(modules, unit.device)
    optimizer_hooks.install()
    for submodule in modules:
        submodule.__dict__["_fsdp_ext_unit"] = unit
        submodule.__class__ = _fsdp_class(type(submodule))
    hooks = [ForwardHooks(unit, index) for index in range(len(modules))]
    for submodule in modules:
        submodule.__dict__["_fsdp_ext_hooks"] = hooks
    _add_state_dict_hooks(unit)
    return cast("FSDPModule | list[FSDPModule]", module)


def _refuse_unsupported(
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    offload_policy: OffloadPolicy | None,
    mp_policy: MixedPrecisionPolicy,
) -> None:
    if shard_placement_fn is not None:
        raise NotImplementedError("shard_placement_fn is not supported yet; leave it out")
    if offload_policy is not None and type(offload_policy) is not OffloadPolicy:
        raise NotImplementedError(
            f"offload_policy={type(offload_policy).__name__} is not supported yet; leave it out"
        )
    if getattr(mp_policy, "param_dtype_override_fn", None) is not None:  # since torch 2.15
        raise NotImplementedError(
            "MixedPrecisionPolicy's param_dtype_override_fn is not supported yet; leave it out, "
            "and shard modules that keep their dtype as units of their own"
        )


def _root_modules(modules: Any) -> Iterable[nn.Module]:
    if not isinstance(modules, (list, tuple)) or not modules:
        raise ValueError(
            f"fully_shard expects a module or a non-empty list of modules but got {modules!r}"
        )
    check_modules(modules)
    roots: list[nn.Module] = _get_root_modules(list(modules))
    return roots


def _resolve_reshard(value: bool | int | None, mesh: DeviceMesh) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ValueError(f"reshard_after_forward expects a bool, an int or None but got {value!r}")
    if value < 1 or mesh.size() % value != 0:
        raise ValueError(
            f"reshard_after_forward expects a factor of the world size {mesh.size()} but got "
            f"{value}"
        )
    if value == mesh.size():
        return True
    if value == 1:
        return False
    raise NotImplementedError(
        f"reshard_after_forward={value} (resharding to a smaller group) is not supported yet; use "
        "True or False"
    )


def _move_buffers(modules: list[nn.Module], device: torch.device) -> None:
    """Move buffers to the device that the shards went to, as FSDP2 does."""
    for module in modules:
        for buffer in module.buffers():
            if not buffer.is_meta and buffer.device.type != device.type:
                buffer.data = buffer.to(device)


_fsdp_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _fsdp_class(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _fsdp_classes:
        _fsdp_classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    return _fsdp_classes[cls]


def _add_state_dict_hooks(unit: Unit) -> None:
    """Sharded parameters are what is saved, and loading may replace them."""

    def to_sharded(*_: Any) -> None:
        _reshard(unit)

    def loaded(*_: Any) -> None:
        _adopt_changes(unit)

    for module in {module for slot in unit.slots for module, _ in slot.attributes}:
        hooked: Any = module  # torch leaves these three untyped
        hooked.register_state_dict_pre_hook(to_sharded)
        hooked._register_load_state_dict_pre_hook(to_sharded)
        hooked.register_load_state_dict_post_hook(loaded)


def _reshard(unit: Unit) -> None:
    if unit.root is not None:
        unit.root.reshard(unit)


def _adopt_changes(unit: Unit) -> None:
    """Follow sharded parameters that were replaced, converted or moved."""
    if unit.flatten(loading=True) and unit.root is not None:
        unit.root.invalidate()


class UnshardHandle:
    """A gather that is on its way.

    Args:
        unit: whose gather; None makes a handle with nothing to wait for.
    """

    def __init__(self, unit: Unit | None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Make the current stream wait, and register the unsharded parameters."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.root is not None:
            unit.root.core.wait_for_unshard(unit.root.number(unit))


class FSDPModule:
    """What a module's class is a subclass of once ``fully_shard`` was applied to it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the original class, as slicing an ``nn.Sequential`` does."""
        original: Any = cls.__mro__[2]  # after FSDP<Class> and FSDPModule
        self: Any = original.__new__(original)
        self.__init__(*args, **kwargs)
        return self

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise NotImplementedError(
            "a sharded module cannot be deep-copied; copy it before fully_shard, or use state_dict"
        )

    def reshard(self) -> None:
        """Free this unit's unsharded parameters and register the sharded ones. Not recursive."""
        _reshard(self._unit)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters, following its mixed-precision policy. Not recursive.

        Args:
            async_op: return at once, with a handle to wait on; forward waits by itself.
        """
        unit = self._unit
        root = Root.of(unit)
        root.core.unshard(root.number(unit))
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Forget an iteration that an exception ended: reshard, drop gradients not reduced yet.

        Calling it is not needed here: the next forward does it. It has FSDP2's name for code that
        does call it.
        """
        if self._unit.root is not None:
            self._unit.root.core.reset_iteration()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward waits for the gradient reductions at its end."""
        unit = self._unit
        unit.is_last_backward = is_last_backward
        if unit.root is not None:
            unit.root.core.set_is_last_backward(is_last_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients, or only accumulates them on each rank.

        Args:
            requires_gradient_sync: False is FSDP1's ``no_sync``.
            recurse: set it for all units below, too.
        """
        for unit in self._units(recurse):
            unit.requires_gradient_sync = requires_gradient_sync
            _apply_settings(unit)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether forward frees the unsharded parameters at its end.

        Args:
            reshard_after_forward: also for the root, whose default is False.
            recurse: set it for all units below, too.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward expects a bool but got {reshard_after_forward!r}"
            )
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward
            _apply_settings(unit)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward frees the unsharded parameters.

        Args:
            reshard_after_backward: False saves the next forward's gather when accumulating
                gradients, for the memory of the unsharded parameters.
            recurse: set it for all units below, too.
        """
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward
            _apply_settings(unit)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set what is gathered ahead when this unit runs forward, instead of the recorded order.

        Args:
            modules: sharded modules; each needs a slot of the ring while it is ahead.
        """
        self._unit.forward_prefetch = _units_of(modules)
        _apply_settings(self._unit)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set what is gathered ahead when this unit runs backward, instead of the reverse order.

        Args:
            modules: sharded modules; each needs a slot of the ring while it is ahead.
        """
        self._unit.backward_prefetch = _units_of(modules)
        _apply_settings(self._unit)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what this unit's summed gradients are divided by, instead of the world size."""
        if not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(
                f"set_gradient_divide_factor expects a positive number but got {factor!r}"
            )
        self._unit.gradient_divide_factor = float(factor)
        _apply_settings(self._unit)

    def flat_shard(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this unit's flat shard and flat gradient, for optimizers that work on them whole.

        The sharded parameters and, after backward, their gradients are views of the two. Both are
        1-D, of one length, and have each element in the same place; what is between two parameters
        is padding. Where a parameter's ``.grad`` is None, its part of the gradient is old. Raw
        addresses, such as NumPy or CuPy arrays over them have, hold until the next forward: buckets
        may be formed anew there, which moves the memory under the tensors.

        Raises:
            ValueError: if parameters differ in dtype, or some are frozen.
            RuntimeError: before the first forward.
        """
        return self._unit.flat()

    @property
    def _unit(self) -> Unit:
        unit = unit_of(cast(nn.Module, self))
        assert unit is not None
        return unit

    def _units(self, recurse: bool) -> list[Unit]:
        modules = cast(nn.Module, self).modules() if recurse else [cast(nn.Module, self)]
        units = (unit_of(module) for module in modules)
        return list(dict.fromkeys(unit for unit in units if unit is not None))

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # module.to(), to_empty() and the like: on the sharded parameters, which they may replace.
        self.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        _adopt_changes(self._unit)
        return result


def _later(name: str) -> Callable[..., NoReturn]:
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"FSDPModule.{name} is not supported yet; leave the call out")

    return method


# What the PyTorch that is installed has beyond this says so when it is called.
for _name in vars(TorchFSDPModule):
    if not _name.startswith("_") and not hasattr(FSDPModule, _name):
        setattr(FSDPModule, _name, _later(_name))


def _apply_settings(unit: Unit) -> None:
    if unit.root is not None:
        unit.root.apply_settings(unit)


def _units_of(modules: list[FSDPModule]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"expects modules that fully_shard was applied to but got {type(module).__name__}"
            )
    return [module._unit for module in modules]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module``'s method gather and free parameters as its ``forward`` does.

    Args:
        module: does nothing unless ``fully_shard`` was applied to it.
        method_name: of the method.

    Raises:
        ValueError: if there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} expects a method '{method_name}' but has none")
    method = getattr(module, method_name)
    unit = module._unit
    hooks: ForwardHooks = module.__dict__["_fsdp_ext_hooks"][unit.modules.index(module)]

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        changed = module._forward_pre_hooks[hooks.pre.id](module, args, kwargs)
        if changed is not None:
            args, kwargs = changed
        output = method(*args, **kwargs)
        result = module._forward_hooks[hooks.post.id](module, args, output)
        return output if result is None else result

    setattr(module, method_name, wrapped)
