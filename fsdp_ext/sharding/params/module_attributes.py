"""Sets the parameters of modules, which are sharded, unsharded and summoned in turns.

If a module's class overrides ``__setattr__``, parameters are set through it, as under FSDP1 and
FSDP2. Otherwise they are set without the checks of ``nn.Module.__setattr__``.
"""

from __future__ import annotations

import weakref

from torch import nn

from fsdp_ext import _C


def overrides_setattr(module: nn.Module) -> bool:
    """Return whether ``module`` has another ``__setattr__`` than ``nn.Module``."""
    return getattr(module.__setattr__, "__func__", None) is not nn.Module.__setattr__


def set_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Set the attribute ``name`` of ``module`` to ``param``."""
    if overrides_setattr(module):
        setattr(module, name, param)
    else:
        module._parameters[name] = param


def swapped_attribute(
    module: nn.Module, name: str, parameter: int, *, is_plain: bool, may_call_setattr: bool
) -> _C.ModuleAttribute:
    """Return the attribute ``name`` of ``module`` for the C++ side, which swaps its value.

    ``parameter`` is the index of its parameter in the unit. A plain attribute is in ``__dict__``,
    because the unit has a flat parameter. With ``may_call_setattr``, a ``__setattr__`` of the
    module's class is called.
    """
    calls_setattr = may_call_setattr and overrides_setattr(module)
    return _C.ModuleAttribute(
        holder=weakref.ref(module) if is_plain or calls_setattr else module._parameters,
        name=name,
        parameter=parameter,
        is_plain=is_plain,
        calls_setattr=calls_setattr,
    )
