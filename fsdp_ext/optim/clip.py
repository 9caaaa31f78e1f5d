"""``clip_grad_norm_`` over flat memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor

from fsdp_ext import _C
from fsdp_ext.optim.flat_runs import FlatRuns
from fsdp_ext.optim.norms import (
    NormRanks,
    final_roots,
    multiply,
    norm_dtype,
    norms_of,
    promoted,
    total_norm,
)
from fsdp_ext.sharding.root.unit import Unit, owners_of, units_alive

_CALLER = "clip_grad_norm_"


@_disable_dynamo
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients down in place to a total norm of at most ``max_norm``; on all ranks.

    As ``torch.nn.utils.clip_grad_norm_``, but over one tensor for each unit, with one all-reduce
    for each dimension of a mesh that shards, and with a plain tensor as result. The order of sums
    may differ from PyTorch's. For parameters that are not sharded, each rank counts its own
    gradients. Plain experts on a mesh of their own count on all ranks of the root's shard group,
    or on their mesh's ranks if their unit has an all-reduce hook.

    Args:
        parameters: a module, or parameters; the same on all ranks.
        max_norm: the largest norm to leave.
        norm_type: ``p`` of the p-norm over all elements, above 0; ``inf`` for the maximum.
        error_if_nonfinite: whether to raise if the norm is NaN or Inf. The check waits for the GPU.
        foreach: has no effect, since a unit is one tensor.

    Returns:
        The norm before scaling: a scalar in the real dtype that gradients promote to, computed in
        at least float32. It is equal on all ranks if all parameters are sharded.

    Raises:
        RuntimeError: if the norm is not finite and ``error_if_nonfinite`` is true, or if the norm
            cannot be reduced, for example because another rank did not call this in time.
        TypeError: if ``max_norm`` or ``norm_type`` is not a number.
        ValueError: if ``norm_type`` is not positive.
    """
    if isinstance(parameters, nn.Module):
        params = parameters_of(parameters)
    elif isinstance(parameters, torch.Tensor):
        params = [parameters]
    else:
        params = list(parameters)
    limits = Limits.of(_CALLER, max_norm, norm_type)
    return clip(params, limits, error_if_nonfinite=error_if_nonfinite)


# What module.parameters() calls on the module.
_WALK = {
    name: getattr(nn.Module, name) for name in ("parameters", "named_parameters", "_named_members")
}


def parameters_of(module: nn.Module) -> list[torch.Tensor]:
    """Return what ``module.parameters()`` lists; by C++ unless a module has a way of its own."""
    kind = type(module)
    own = vars(module)
    if all(getattr(kind, name) is walk and name not in own for name, walk in _WALK.items()):
        found = _C.parameters_of(module, nn.Module.named_modules)
        if found is not None:
            return found
    return list(module.parameters())


@dataclass(frozen=True)
class Limits:
    """The checked arguments of a clipping."""

    max_norm: float
    norm_type: float

    @classmethod
    def of(cls, caller: str, max_norm: Any, norm_type: Any) -> Limits:
        """Check the arguments of ``caller``, which may be tensors of one element."""
        limits = cls(
            number_of(caller, "max_norm", max_norm), number_of(caller, "norm_type", norm_type)
        )
        if not limits.norm_type > 0:
            raise ValueError(f"{caller} got norm_type={norm_type}. Pass a positive number.")
        return limits

    def scale(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the factor that clips gradients of this norm."""
        return (self.max_norm / (norm + 1e-6)).clamp(max=1.0)


def number_of(caller: str, name: str, value: Any) -> float:
    """Return an argument of ``caller`` as a number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{caller} got {name}={value!r}. Pass a number.") from error


@_disable_dynamo
@torch.no_grad()
def clip(
    params: list[Any],
    limits: Limits,
    *,
    maximum_over: NormRanks | None = None,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of ``params`` down. See :func:`clip_grad_norm_`.

    The maximum of gradients that are not sharded is taken over ``maximum_over``.
    """
    found = _gradients_of(params)
    if any(unit.settings.update is not None for unit in found.units):
        raise RuntimeError(
            f"{_CALLER} got parameters that an attached optimizer has stepped in backward, so "
            "their gradients no longer exist. To clip, pass max_norm to its attach()."
        )
    found.runs.clear_padding()
    grads = found.by_ranks()
    if maximum_over is not None and limits.norm_type == math.inf:
        grads = _with_whole_over(grads, maximum_over)
    norms = {ranks: norms_of(own, limits.norm_type, found.dtype) for ranks, own in grads.items()}
    total = total_norm(norms, limits.norm_type, found.dtype, _CALLER)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {limits.norm_type} for gradients from `parameters` is "
            "non-finite, so it cannot be clipped. To disable this error and scale the gradients by "
            "the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    every = [grad for own in grads.values() for grad in own]
    multiply(every, limits.scale(total).to)
    dtypes = {grad.dtype for grad in every} or {param.dtype for param in params}
    return total.to(promoted(dtypes)) if dtypes else total


def _with_whole_over(
    grads: dict[NormRanks, list[torch.Tensor]], over: NormRanks
) -> dict[NormRanks, list[torch.Tensor]]:
    """Return gradients by ranks, with those that are not sharded under ``over``."""
    found: dict[NormRanks, list[torch.Tensor]] = {}
    for ranks, own in grads.items():
        found.setdefault(ranks if ranks.groups else over, []).extend(own)
    return found


class _Gradients:
    """The gradients of parameters, which are the same on all ranks, in runs where possible."""

    def __init__(self, params: list[Any]) -> None:
        self._given = params
        params = list(dict.fromkeys(_sharded(params)))
        owners = owners_of(units_alive())
        ranks = {param: NormRanks.of(param, owners, _CALLER) for param in params}
        self.runs = FlatRuns(params, ranks.get)
        # From the parameters, because other ranks may lack gradients that this rank has.
        self._ranks = list(dict.fromkeys(ranks.values()))
        self._ranks_of = ranks
        self._places = [self._ranks.index(ranks[run.params[0]]) for run in self.runs.runs]
        # Also from the parameters, so that all ranks reduce one dtype.
        self.dtype = norm_dtype(params)

    @property
    def units(self) -> list[Unit]:
        """The units of the parameters that are alive."""
        return self.runs.units

    def are_of(self, params: list[Any]) -> bool:
        """Return whether the runs are still those of ``params``."""
        return _C.same_objects(params, self._given) and self.runs.are_of(self.runs.params)

    def by_ranks(self) -> dict[NormRanks, list[torch.Tensor]]:
        """Return this rank's gradients. All ranks have the same keys in the same order."""
        found: list[list[torch.Tensor]] = [[] for _ in self._ranks]
        for place, grad in zip(self._places, self.runs.grads, strict=True):
            found[place].append(grad)
        for param in _C.with_gradients(self.runs.others):
            found[self._ranks.index(self._ranks_of[param])].append(_local_grad(param))
        return dict(zip(self._ranks, found, strict=True))


def _local_grad(param: Any) -> torch.Tensor:
    grad: torch.Tensor = param.grad
    if not isinstance(grad, DTensor):
        return grad
    if grad.placements != param.placements:
        raise NotImplementedError(
            f"{_CALLER} got a gradient with the placements {tuple(grad.placements)} for a "
            f"parameter with {tuple(param.placements)}. Redistribute it to those first."
        )
    return grad.to_local()


def _sharded(params: list[Any]) -> list[Any]:
    """Return ``params`` with sharded parameters in place of those of units that are unsharded."""
    sharded = {param.registered(): param.sharded for unit in units_alive() for param in unit.params}
    return [sharded.get(param, param) for param in params]


# Found by earlier calls, by the id of the first parameter, which they keep alive. All of them go
# when one of their units does, so that they keep no model alive. The number is that of final roots.
_known: dict[int, tuple[_Gradients, int, list[weakref.ref[Unit]]]] = {}


def _forget(_: weakref.ref[Unit]) -> None:
    _known.clear()


def _gradients_of(params: list[Any]) -> _Gradients:
    first = id(params[0]) if params else 0
    known, roots, _ = _known.get(first, (None, 0, []))
    if known is None or roots != final_roots(known.units) or not known.are_of(params):
        known = _Gradients(params)
        if units := known.units:
            watched = [weakref.ref(unit, _forget) for unit in units]
            _known[first] = known, final_roots(units), watched
    return known
