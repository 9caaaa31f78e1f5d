"""One tensor for each unit: FSDP1's ``use_orig_params=False``, and ``flat_shard()``.

Note [flat parameters in Python]
The flat parameter is a plain parameter over the unit's flat shard, and its gradient is the flat
gradient: Note [flat parameters] in csrc/torch/sharded_gradients.h. The module has it in
``_parameters``, so optimizers and ``zero_grad`` see it alone. The unit's own parameters, sharded or
whole, are plain attributes in ``__dict__``, where forward finds them. State dicts and
``summon_full_params`` need their names or whole values, so they show them as parameters in place of
the flat one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_ext.sharding.params.dtensors import Spread
from fsdp_ext.sharding.params.optimizer_in_backward import has_optimizer_in_backward
from fsdp_ext.sharding.params.ownership import own_grad_dtype

NAME = "_flat_param"  # as FSDP1 names it
_IS_FLAT = "_is_flat_param"  # FSDP1's mark, which isinstance(param, FlatParameter) reads

# A unit and a parameter of it. Their files import this file, so the types cannot be named here.
Unit = Any
ShardedParam = Any


def is_flat(param: torch.Tensor) -> bool:
    """Return whether ``param`` is a flat parameter."""
    return getattr(param, _IS_FLAT, False)


def registered(module: nn.Module, name: str) -> Any:
    """Return the parameter ``name`` of ``module``, even while the flat one is shown, or None."""
    parameters = module._parameters
    return parameters[name] if name in parameters else module.__dict__.get(name)


class FlatParameter:
    """The flat parameter of a unit whose parameters have one dtype and one ``requires_grad``.

    Args:
        unit: the unit, not run yet. Its module gets the flat parameter.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._module = unit.modules[0]
        first = unit.params[0]
        flat = unit.flat_shard.view(first.dtype)
        self.param = nn.Parameter(flat, requires_grad=first.requires_grad)
        setattr(self.param, _IS_FLAT, True)
        self._name_shard()
        self.is_shown = False
        self.show()

    @property
    def params(self) -> list[ShardedParam]:
        """The unit's parameters."""
        params: list[ShardedParam] = self._unit.params
        return params

    def home(self, module: nn.Module) -> dict[str, Any]:
        """Return the dict of ``module`` that has the unit's own parameters now."""
        return module.__dict__ if self.is_shown else module._parameters

    def show(self) -> None:
        """Let the module have the flat parameter. The unit is sharded."""
        if not self.is_shown:
            self.is_shown = True
            for module, name in self._unit.attributes():
                module.__dict__[name] = module._parameters.pop(name)
            self._module._parameters[NAME] = self.param

    def hide(self) -> None:
        """Let the modules have the unit's own parameters instead. The unit is sharded."""
        if self.is_shown:
            self.is_shown = False
            del self._module._parameters[NAME]
            for module, name in self._unit.attributes():
                module._parameters[name] = module.__dict__.pop(name)

    def adopt(self) -> None:
        """Copy the flat parameter's values into the unit if the flat parameter has other memory.

        ``module.to()``, ``share_memory_()`` and assignments to ``data`` give it other memory. A
        parameter that took its place, as by ``load_state_dict(assign=True)``, gives its memory to
        the flat one.
        """
        unit = self._unit
        if self.is_replaced():
            given = self._module._parameters.get(NAME)
            self._module._parameters[NAME] = self.param
            if given is None:
                raise ValueError(
                    f"the flat parameter of unit '{unit.name}' was removed. Leave it there, or set "
                    "its data."
                )
            self.param.data = given.detach()
        flat = self.param.detach()
        if self._lies_in_shard():
            return
        itemsize = unit.params[0].dtype.itemsize
        if flat.numel() * itemsize != unit.flat_shard.numel():
            raise ValueError(
                f"the flat parameter of unit '{unit.name}' had shape "
                f"{(unit.flat_shard.numel() // itemsize,)} and was given {tuple(flat.shape)}. "
                "Give it data of the same shape."
            )
        for param, part in self.parts(flat):
            sharded = nn.Parameter(param.spread.dtensor(part), requires_grad=param.requires_grad)
            for module, name in param.attributes:
                self.home(module)[name] = sharded

    def is_replaced(self) -> bool:
        """Return whether the module has another parameter in its place."""
        return self.is_shown and self._module._parameters.get(NAME) is not self.param

    def follow(self) -> None:
        """Move into the unit's flat shard, if it lies elsewhere."""
        unit = self._unit
        if not self._lies_in_shard():
            self.param.data = unit.flat_shard.view(unit.params[0].dtype)
        self._name_shard()

    def _name_shard(self) -> None:
        """Set FSDP1's ``_local_shard``, another tensor over the memory of the flat parameter."""
        local_shard = self.param.detach()
        setattr(self.param, "_local_shard", local_shard)  # noqa: B010

    def freeze(self) -> None:
        """Give the unit's parameters the ``requires_grad`` of the flat one."""
        self.refuse_optimizer_in_backward()
        if own_grad_dtype(self.param) is not None:
            raise NotImplementedError(
                f"the flat parameter of unit '{self._unit.name}' has grad_dtype="
                f"{self.param.grad_dtype}. Leave that as it is, or pass use_orig_params=True."
            )
        for param in self._unit.params:
            param.sharded.requires_grad_(self.param.requires_grad)

    def refuse_optimizer_in_backward(self) -> None:
        """Raise RuntimeError if the flat parameter has an optimizer that steps in backward."""
        if has_optimizer_in_backward(self.param):
            raise RuntimeError(
                f"the flat parameter of unit '{self._unit.name}' has an optimizer that steps in "
                "backward, which is only supported with use_orig_params=True. Pass that, or call "
                "the optimizer's step() after backward."
            )

    def parts(self, flat: torch.Tensor) -> Iterator[tuple[ShardedParam, torch.Tensor]]:
        """Yield each parameter of the unit and its rows in a tensor like the flat parameter."""
        return parts_of_flat(self._unit, flat)

    def local_shard(self, flat: torch.Tensor) -> DTensor:
        """Return a tensor like the flat parameter as this rank's shard of a DTensor."""
        ranks = self._unit.ranks
        whole = torch.Size([flat.numel() * ranks.size])
        return Spread(ranks.mesh, ranks.placements(Shard(0)), whole).dtensor(flat)

    def _lies_in_shard(self) -> bool:
        ours, theirs = self._unit.flat_shard.untyped_storage(), self.param.untyped_storage()
        if self.param.dtype != self._unit.params[0].dtype or ours._cdata != theirs._cdata:
            return False
        # share_memory_() moves the flat parameter or the unit's shard. While the module shows the
        # flat parameter, the flat parameter has the newer values.
        return not self.is_shown or all(
            param.local.data_ptr() == part.data_ptr()
            for param, part in self.parts(self.param.detach())
            if part.numel() > 0 and not part.is_meta
        )


def parts_of_flat(unit: Unit, flat: torch.Tensor) -> Iterator[tuple[ShardedParam, torch.Tensor]]:
    """Yield each parameter of a unit, with its rows in a tensor like the flat shard.

    The parameters have one dtype.
    """
    for param, place in zip(unit.params, unit.layout_for(training=False).placements, strict=True):
        first = place.shard_offset // param.dtype.itemsize
        yield param, flat[first : first + param.local.numel()].view(param.local.shape)


def make_flat(unit: Unit) -> None:
    """Give ``unit`` a flat parameter. It has run no forward yet."""
    if not unit.params:
        return
    unit.change(is_flat=True)
    unit.flatten()
    unit.flat_param = FlatParameter(unit)


@contextlib.contextmanager
def own_parameters_shown(unit: Unit) -> Iterator[None]:
    """Let the modules of a sharded unit have its own parameters in place of the flat one."""
    flat = unit.flat_param
    if flat is None or not flat.is_shown:
        yield
        return
    flat.hide()
    try:
        yield
    finally:
        flat.show()


def show_flat(unit: Unit) -> None:
    """Let the module of a sharded unit have the flat parameter, if there is one."""
    if unit.flat_param is not None and not unit.is_summoned:
        unit.flat_param.show()


def flat_tensors(unit: Unit) -> tuple[torch.Tensor, torch.Tensor]:
    """See :meth:`fsdp_ext.FSDPModule.flat_shard`."""
    dtypes = {param.dtype for param in unit.params}
    grad_dtypes = {unit.grad_dtype(param) for param in unit.params}
    frozen = [param.name for param in unit.params if not param.requires_grad]
    own = [param.name for param in unit.params if not param.is_gathered]
    if own:
        raise ValueError(
            f"flat_shard needs parameters that lie in the flat shard, but those of unit "
            f"'{unit.name}' named {own} have memory of their own, since their class has "
            "fsdp_pre_all_gather. Use its parameters one by one."
        )
    if len(dtypes) != 1 or len(grad_dtypes) != 1 or frozen:
        raise ValueError(
            "flat_shard needs a unit whose parameters have one dtype and are all trained, but "
            f"'{unit.name}' has dtypes {sorted(map(str, dtypes | grad_dtypes))} and the frozen "
            f"parameters {frozen}. Use its parameters one by one."
        )
    if unit.impl is None:
        raise RuntimeError(
            f"flat_shard needs the flat gradient of unit '{unit.name}', which its first "
            "forward makes, so run a forward before."
        )
    dtype = dtypes.pop()
    if any(
        place.shard_offset != place.grad_offset * dtype.itemsize
        for place in unit.impl.layout.placements
    ):
        _, reduce_dtype = unit.grad_dtypes()
        raise ValueError(
            f"flat_shard needs gradients that lie as their parameters do, but those of unit "
            f"'{unit.name}' are reduced in {reduce_dtype}, which needs more padding. Use its "
            f"parameters one by one, or MixedPrecisionPolicy(reduce_dtype={dtype})."
        )
    return unit.flat_shard.view(dtype), unit.impl.share_flat_gradient().view(grad_dtypes.pop())
