"""``FSDPModule``: the methods that a module has once ``fully_shard`` was applied to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from fsdp_ext.sharding.module_state import unit_of
from fsdp_ext.sharding.root import ensure_root
from fsdp_ext.sharding.state_dict_hooks import adopt_changes, reshard
from fsdp_ext.sharding.unit import Unit


class UnshardHandle:
    """An all-gather in flight.

    Args:
        unit: the unit that is gathered. None means that there is nothing to wait for.
    """

    def __init__(self, unit: Unit | None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Make the current stream wait, and register the unsharded parameters."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.root is not None:
            unit.root.wait_for_unshard(unit)


class FSDPModule:
    """The base class of a module's class once ``fully_shard`` was applied to the module."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the original class, as slicing an ``nn.Sequential`` does."""
        original: Any = original_class(cls)
        self: Any = original.__new__(original)
        self.__init__(*args, **kwargs)
        return self

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise NotImplementedError(
            "a sharded module cannot be deep-copied. Copy it before fully_shard, or copy its "
            "state_dict."
        )

    def reshard(self) -> None:
        """Free this unit's unsharded parameters and register the sharded ones. Not recursive."""
        reshard(self._unit)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters, following its mixed-precision policy. Not recursive.

        Args:
            async_op: return a handle at once instead of waiting. Forward waits by itself.
        """
        unit = self._unit
        ensure_root(unit).unshard(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Reshard all units and drop unreduced gradients, after an iteration that failed.

        The next forward does this by itself. The method exists because FSDP2 has it.
        """
        if self._unit.root is not None:
            self._unit.root.core.reset_iteration()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward waits for the gradient reductions at its end.

        The setting is the root's, so it holds for the whole model.
        """
        unit = self._unit
        unit.change(is_last_backward=is_last_backward)
        if unit.root is not None:
            unit.root.units[0].change(is_last_backward=is_last_backward)
            unit.root.core.set_is_last_backward(is_last_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients, or only accumulates them on each rank.

        Args:
            requires_gradient_sync: False has the effect of FSDP1's ``no_sync``.
            recurse: set it for all units below, too.
        """
        _change(self._units(recurse), requires_gradient_sync=requires_gradient_sync)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether units take part in backward that this rank's backward does not reach.

        Parameters that only some ranks use get the right gradient without this setting, as long as
        each rank's backward reaches their unit. See :meth:`join_empty` for units that this rank's
        forward does not run.

        Args:
            reduce_scatter_unused_params: whether a unit whose forward ran, but whose parameters get
                no gradient on this rank, sends zeros.
            recurse: set it for all units below, too.
        """
        _change(self._units(recurse), reduce_scatter_unused_params=reduce_scatter_unused_params)

    def join_empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take part in what other ranks do while they run this module, without running it.

        All ranks have to run the same units in the same order. Call this in forward on the ranks
        that leave this module out, where the others run it. Backward then sends zeros for its
        parameters.

        Args:
            tensor: a floating-point tensor that the loss depends on.

        Returns:
            The same values. Go on with this tensor, because backward passes this module through it.

        Raises:
            RuntimeError: outside of a forward of the root module.
            TypeError: if ``tensor`` is not a floating-point tensor.
        """
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(
                f"join_empty got {got}. Pass a floating-point tensor that the loss depends on."
            )
        return _join_empty(cast(nn.Module, self), tensor)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether forward frees the unsharded parameters at its end.

        With False, evaluations use them again until an optimizer's step or a write into the sharded
        parameters. Writes through ``.data`` are not noticed; call :meth:`reshard` after them.

        Args:
            reshard_after_forward: the new value. It holds for the root, too.
            recurse: set it for all units below, too.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward got {reshard_after_forward!r}. Pass True or False."
            )
        _change(self._units(recurse), reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward frees the unsharded parameters.

        Args:
            reshard_after_backward: False saves the next forward's all-gather when gradients are
                accumulated, and costs the memory of the unsharded parameters.
            recurse: set it for all units below, too.
        """
        _change(self._units(recurse), reshard_after_backward=reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set what to prefetch when this unit runs forward, instead of the recorded order.

        Args:
            modules: sharded modules; each needs a slot of the ring while it is ahead.
        """
        self._unit.forward_prefetch = _units_of(modules, "set_modules_to_forward_prefetch")
        _change([self._unit])

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set what to prefetch when this unit runs backward, instead of the reverse order.

        Args:
            modules: sharded modules; each needs a slot of the ring while it is ahead.
        """
        self._unit.backward_prefetch = _units_of(modules, "set_modules_to_backward_prefetch")
        _change([self._unit])

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the divisor of this unit's summed gradients, instead of the world size."""
        if not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"set_gradient_divide_factor got {factor!r}. Pass a positive number.")
        _change([self._unit], gradient_divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do what :meth:`set_gradient_divide_factor` does. It is FSDP2's older name for it."""
        self.set_gradient_divide_factor(factor)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Do nothing, as in FSDP2 on a 1-D mesh: only hybrid sharding has an all-reduce."""

    def flat_shard(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this unit's flat shard and flat gradient, for optimizers that work on them whole.

        The sharded parameters and, after backward, their gradients are views of the two. Both are
        1-D and of one length. An element and its gradient have the same index, and there is padding
        between parameters. If a parameter's ``.grad`` is None, its part of the flat gradient is out
        of date. Raw addresses, such as those of NumPy or CuPy arrays over the two, are valid until
        the next forward or backward, which may move the memory.

        Raises:
            ValueError: if the unit's parameters differ in dtype, or some are frozen.
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
        # module.to(), to_empty() and the like work on the sharded parameters and may replace them.
        self.reshard()
        core = self._unit.core
        if core is not None:
            core.release_gradients()  # torch.utils.swap_tensors wants to be their only holder
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        adopt_changes(self._unit)
        return result


# What to do instead of calling methods of FSDP2 that are missing here.
_INSTEAD = {
    "set_all_reduce_hook": "Change gradients in hooks of the sharded parameters "
    "(register_post_accumulate_grad_hook), or after backward",
    "set_custom_all_gather": "Choose what collectives travel by with fully_shard(transport=...)",
    "set_custom_reduce_scatter": "Choose what collectives travel by with "
    "fully_shard(transport=...)",
    "set_post_optim_event": "Leave the call out: gathers wait for the current stream",
    "set_force_sum_reduction_for_comms": "Leave the call out: reductions are sums already",
    "set_separate_reduce_scatter_group": "Leave the call out: gathers and reductions have "
    "communicators of their own already",
    "set_unshard_in_backward": "Call set_reshard_after_forward(False) on units that should not be "
    "gathered in backward",
}
_DEFAULT_INSTEAD = "Leave the call out: results do not depend on it"


def _unsupported(name: str) -> Callable[..., NoReturn]:
    instead = _INSTEAD.get(name, _DEFAULT_INSTEAD)

    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"FSDPModule.{name} is not supported yet. {instead}.")

    return method


# The methods of the installed PyTorch's FSDPModule that are missing here raise by name.
for _name in vars(TorchFSDPModule):
    if not _name.startswith("_") and not hasattr(FSDPModule, _name):
        setattr(FSDPModule, _name, _unsupported(_name))


def _join_empty(module: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    unit = unit_of(module)
    core = None if unit is None else unit.core
    if unit is not None:
        if core is None:
            raise RuntimeError(
                f"join_empty was called on unit '{unit.name}' before the first forward of the root "
                "module. Call it in that forward."
            )
        tensor = core.begin_skip(tensor)
    for child in module.children():
        tensor = _join_empty(child, tensor)
    if unit is not None and core is not None:
        core.end_skip(unit.modules.index(module), tensor)
    return tensor


def _change(units: list[Unit], **settings: Any) -> None:
    """Change settings of units, and apply them in the roots that run the units."""
    for unit in units:
        unit.change(**settings)
    for root in {unit.root for unit in units if unit.root is not None}:
        if "reshard_after_forward" in settings:  # the other ones need no resolving
            root.resolve_again()
        root.apply(unit for unit in units if unit.root is root)


def _units_of(modules: list[FSDPModule], caller: str) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"{caller} got a {type(module).__name__} that is not sharded. Pass modules that "
                "fully_shard was applied to."
            )
    return [module._unit for module in modules]


# - The class of a sharded module

_classes: dict[type[nn.Module], type[nn.Module]] = {}


def fsdp_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of ``FSDPModule`` and ``cls`` that sharded modules of ``cls`` have."""
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    return _classes[cls]


def original_class(cls: type[Any]) -> type[Any]:
    """Return the class that a module had before ``fully_shard``; ``cls`` if it is not sharded."""
    if not issubclass(cls, FSDPModule):
        return cls
    original: type[Any] = cls.__mro__[2]  # after FSDP<Class> and FSDPModule
    return original
