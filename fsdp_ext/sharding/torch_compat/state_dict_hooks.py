"""Hooks of ``state_dict`` and ``load_state_dict``, and conversions by ``module.to()`` and the like.

State dicts hold the sharded parameters. Loading and conversions may replace these.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ext.sharding.params.flat_parameter import registered
from fsdp_ext.sharding.params.ownership import asked_grad_dtype
from fsdp_ext.sharding.root.module_state import units_of
from fsdp_ext.sharding.root.unit import Unit


def install(unit: Unit) -> None:
    """Register the hooks on every module that has a parameter of ``unit``."""
    before: dict[nn.Module, list[Any]] = {}  # parameters of modules that are being loaded
    attributes: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for attribute in unit.attributes():
        attributes.setdefault(attribute[0], []).append(attribute)

    def to_sharded(*_: Any) -> None:
        reshard(unit)

    def held(module: nn.Module) -> list[Any]:
        """Return the module's parameters, and their local tensors, which conversions replace."""
        params = [registered(*attribute) for attribute in attributes.get(module, ())]
        return [*params, *(getattr(param, "_local_tensor", None) for param in params)]

    def before_load(module: nn.Module, *_: Any) -> None:
        reshard(unit)
        before[module] = held(module)

    def loaded(module: nn.Module, *_: Any) -> None:
        had, has = before.pop(module, []), held(module)
        # Most loads copy into existing parameters, after which nothing is left to do. Anything that
        # looks at the whole unit here takes seconds for a unit of hundreds of modules.
        if len(had) == len(has) and all(map(_is_same, had, has)):
            return
        if unit.flat_param is not None:
            adopt_changes(unit)
        elif unit.adopt(attributes[module]):
            invalidate(unit)

    for module in attributes:
        hooked: Any = module  # torch leaves these three untyped
        hooked.register_state_dict_pre_hook(to_sharded)
        hooked._register_load_state_dict_pre_hook(before_load, with_module=True)
        hooked.register_load_state_dict_post_hook(loaded)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two parameters or local tensors are one, or lie in the same memory."""
    return one is other or (
        type(one) is type(other) is torch.Tensor
        and one.untyped_storage()._cdata == other.untyped_storage()._cdata
    )


def reshard(unit: Unit) -> None:
    """Reshard the unit. Before its first forward it is sharded already."""
    if unit.root is not None:
        unit.root.reshard(unit)


def settle(unit: Unit) -> None:
    """Reshard the unit, and adopt the parameters that its modules were given."""
    reshard(unit)
    if unit.flat_param is not None or unit.has_changed():
        adopt_changes(unit)


def adopt_changes(unit: Unit) -> None:
    """Adopt sharded parameters that were replaced, converted or moved."""
    if unit.flatten(loading=True):
        invalidate(unit)


def invalidate(unit: Unit) -> None:
    """Have the C++ side of the unit's root made anew."""
    if unit.root is not None:
        unit.root.invalidate()


@contextlib.contextmanager
def applied(units: Sequence[Unit]) -> Iterator[None]:
    """Let the block, which is ``Module._apply``, work on the units' sharded parameters."""
    with contextlib.ExitStack() as conversions:
        for unit in units:
            reshard_and_forget(unit)
            if unit.impl is not None:
                # torch.utils.swap_tensors wants to be the only holder of gradients.
                unit.impl.release_gradients()
            conversions.enter_context(converting(unit))
        yield


def reshard_and_forget(unit: Unit) -> None:
    """Reshard the unit, and have its next use gather from all ranks again."""
    reshard(unit)
    if unit.root is not None:
        unit.root.forget(unit)


def convert_shards(module: nn.Module) -> None:
    """Let ``_apply`` of a unit's module, which keeps its class, work on the sharded parameters.

    ``FSDPModule`` has such a method in its class. Here the module itself gets this method.
    """
    weakly = weakref.ref(module)

    def _apply(*args: Any, **kwargs: Any) -> Any:
        own: Any = weakly()
        assert own is not None
        with applied(units_of(own)):
            return type(own)._apply(own, *args, **kwargs)

    module.__dict__["_apply"] = _apply


@contextlib.contextmanager
def converting(unit: Unit) -> Iterator[None]:
    """Adopt the sharded parameters that the block converts or moves, with their attributes.

    ``Module._apply`` swaps a parameter that is a DTensor with a new one that lacks its attributes.
    """
    now = [(attribute, registered(*attribute)) for attribute in unit.attributes()]
    kept = [(attribute, dict(vars(param))) for attribute, param in now if param is not None]
    with _keeping_gradients(unit):
        yield
    for attribute, attributes in kept:
        param = registered(*attribute)
        if param is not None:
            vars(param).update(attributes)
    adopt_changes(unit)


@contextlib.contextmanager
def _keeping_gradients(unit: Unit) -> Iterator[None]:
    """Keep each grad_dtype that users set, and those parameters' gradients, during a conversion.

    ``Module._apply`` cannot attach gradients of other dtypes than the parameter's, such as those
    of FSDP1's ``keep_low_precision_grads``.
    """
    kept = []
    for param in unit.params:
        sharded, dtype = param.sharded, asked_grad_dtype(param.sharded)
        gradient = sharded.grad
        if dtype is None and (gradient is None or gradient.dtype == sharded.dtype):
            continue
        if gradient is not None:
            sharded.grad = None  # Module._apply would convert it like the parameter
        kept.append((param, sharded.dtype, dtype, gradient))
    try:
        yield
    finally:
        for param, before, dtype, gradient in kept:
            now = param.registered()
            if isinstance(now, DTensor):
                now.grad_dtype = dtype
                if gradient is not None:
                    is_kept = dtype is not None or now.dtype == before
                    now.grad = gradient.to(now.device, gradient.dtype if is_kept else now.dtype)
