"""``clip_grad_norm_`` over flat memory."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ext import _C
from fsdp_ext.optim.collectives import explaining_errors
from fsdp_ext.optim.flat_runs import FlatRuns
from fsdp_ext.sharding.params.flat_parameter import is_flat
from fsdp_ext.sharding.root.unit import Unit, owners_of, units_alive


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
    gradients.

    Args:
        parameters: a module, or parameters; the same on all ranks.
        max_norm: the largest norm to leave.
        norm_type: ``p`` of the p-norm over all elements, above 0; ``inf`` for the maximum.
        error_if_nonfinite: whether to raise if the norm is NaN or Inf. The check waits for the GPU.
        foreach: has no effect, since a unit is one tensor.

    Returns:
        The norm before scaling: a scalar in the dtype that gradients promote to, computed in at
        least float32. It is equal on all ranks if all parameters are sharded.

    Raises:
        RuntimeError: if the norm is not finite and ``error_if_nonfinite`` is true, or if the norm
            cannot be reduced, for example because another rank did not call this in time.
        TypeError: if ``max_norm`` or ``norm_type`` is not a number.
        ValueError: if ``norm_type`` is not positive.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    params = list(parameters)
    limits = Limits.of(max_norm, norm_type)
    return clip(params, limits, error_if_nonfinite=error_if_nonfinite)


@dataclass(frozen=True)
class Limits:
    """The checked arguments of a clipping.

    Args:
        max_norm: the largest norm to leave.
        norm_type: ``p`` of the p-norm.
    """

    max_norm: float
    norm_type: float

    @classmethod
    def of(cls, max_norm: Any, norm_type: Any) -> Limits:
        """Check the arguments, which may be tensors of one element."""
        limits = cls(_number("max_norm", max_norm), _number("norm_type", norm_type))
        if not limits.norm_type > 0:
            raise ValueError(f"clip_grad_norm_ got norm_type={norm_type}. Pass a positive number.")
        return limits


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"clip_grad_norm_ got {name}={value!r}. Pass a number.") from error


@torch.no_grad()
def clip(params: list[Any], limits: Limits, *, error_if_nonfinite: bool = False) -> torch.Tensor:
    """Scale the gradients of ``params`` down. See :func:`clip_grad_norm_`."""
    found = _gradients_of(params)
    if any(unit.settings.update is not None for unit in found.units):
        raise RuntimeError(
            "clip_grad_norm_ got parameters that an attached optimizer has stepped in backward, so "
            "their gradients no longer exist. To clip, do not attach the optimizer."
        )
    grads = found.by_ranks()
    total = _total_norm(grads, limits.norm_type, found.dtype)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {limits.norm_type} for gradients from `parameters` is "
            "non-finite, so it cannot be clipped. To disable this error and scale the gradients by "
            "the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    scale = (limits.max_norm / (total + 1e-6)).clamp(max=1.0)
    every = [grad for own in grads.values() for grad in own]
    for device in {grad.device for grad in every}:
        torch._foreach_mul_([grad for grad in every if grad.device == device], scale.to(device))
    dtypes = {grad.dtype for grad in every} or {param.dtype for param in params}
    return total.to(_promoted(dtypes)) if dtypes else total


def _promoted(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)


@dataclass(frozen=True)
class _Ranks:
    """The ranks over which a parameter's gradient is sharded.

    Args:
        groups: one for each dimension of a mesh that shards; none if each rank has it whole.
        device_type: the device on which the groups reduce.
    """

    groups: tuple[dist.ProcessGroup, ...] = ()
    device_type: str = "cpu"

    @classmethod
    def of(cls, param: Any, owners: dict[nn.Parameter, Unit]) -> _Ranks:
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            # Not is_shard(), which is false for _StridedShard.
            dims = [i for i, spread in enumerate(param.placements) if not spread.is_replicate()]
            groups = tuple(mesh.get_group(dim) for dim in dims if mesh.size(dim) > 1)
            return cls(groups, mesh.device_type)
        if is_flat(param):
            if param not in owners:
                raise RuntimeError(
                    "clip_grad_norm_ got a flat parameter whose wrapper no longer exists. Pass the "
                    "parameters of the wrapped model."
                )
            return cls((owners[param].ranks.shard_group,), owners[param].device.type)
        return cls(device_type=param.device.type)


class _Gradients:
    """The gradients of some parameters, in runs where possible.

    Args:
        params: the parameters; the same on all ranks.
    """

    def __init__(self, params: list[Any]) -> None:
        self._given = params
        params = _sharded(params)
        owners = owners_of(units_alive())
        ranks = {param: _Ranks.of(param, owners) for param in params}
        self._runs = FlatRuns(params, ranks.get)
        # From the parameters, because other ranks may lack gradients that this rank has.
        self._all_ranks = list(dict.fromkeys(ranks.values()))
        self._of_runs = [(ranks[run.params[0]], run.grad) for run in self._runs.runs]
        self._of_others = [(ranks[param], param) for param in self._runs.others]
        # Also from the parameters, so that all ranks reduce one dtype.
        self.dtype = _promoted([torch.float32, *{param.dtype for param in params}])
        self.watches = [weakref.ref(unit, _forget) for unit in self._runs.units]

    @property
    def units(self) -> list[Unit]:
        """The units of the parameters that are alive."""
        return self._runs.units

    def are_of(self, params: list[Any]) -> bool:
        """Return whether the runs are still those of ``params``."""
        return _C.same_objects(params, self._given) and self._runs.are_of(self._runs.params)

    def by_ranks(self) -> dict[_Ranks, list[torch.Tensor]]:
        """Return this rank's gradients. All ranks have the same keys in the same order."""
        found: dict[_Ranks, list[torch.Tensor]] = {ranks: [] for ranks in self._all_ranks}
        for ranks, grad in self._of_runs:
            found[ranks].append(grad)
        for ranks, param in self._of_others:
            if param.grad is not None:
                found[ranks].append(_local_grad(param))
        return found


# Those of earlier calls, by the id of the first parameter, which they keep alive. All of them go
# when one of their units does, so that they keep no model alive.
_known: dict[int, _Gradients] = {}


def _forget(_: weakref.ref[Unit]) -> None:
    _known.clear()


def _gradients_of(params: list[Any]) -> _Gradients:
    first = id(params[0]) if params else 0
    known = _known.get(first)
    if known is None or not known.are_of(params):
        known = _Gradients(params)
        if known.watches:
            _known[first] = known
    return known


def _sharded(params: list[Any]) -> list[Any]:
    """Return ``params`` with sharded parameters in place of those of units that are unsharded."""
    sharded = {param.registered(): param.sharded for unit in units_alive() for param in unit.params}
    return [sharded.get(param, param) for param in params]


def _local_grad(param: Any) -> torch.Tensor:
    grad: torch.Tensor = param.grad
    if not isinstance(grad, DTensor):
        return grad
    if grad.placements != param.placements:
        raise NotImplementedError(
            f"clip_grad_norm_ got a gradient with the placements {tuple(grad.placements)} for a "
            f"parameter with {tuple(param.placements)}. Redistribute it to those first."
        )
    return grad.to_local()


def _total_norm(
    grads: dict[_Ranks, list[torch.Tensor]], norm_type: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return the norm over all ranks."""
    is_max = norm_type == math.inf
    parts = []
    for ranks, own in grads.items():
        part = _local_part(own, norm_type, dtype).to(ranks.device_type)
        for group in ranks.groups:
            with explaining_errors("reduce the norm in clip_grad_norm_", group):
                dist.all_reduce(part, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group)
        parts.append(part)
    if not parts:
        return torch.zeros((), dtype=dtype)
    together = torch.stack([part.to(parts[0].device) for part in parts])
    return together.max() if is_max else together.sum() ** (1 / norm_type)


def _local_part(grads: list[torch.Tensor], norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the p-th power of this rank's norm, which ranks add up; for p = inf the maximum."""
    # Shards may be empty, and the maximum of nothing is an error.
    own = [grad for grad in grads if grad.numel()]
    if not own:
        return torch.zeros((), dtype=dtype)
    devices = {grad.device for grad in own}  # some may be offloaded
    by_device = [[grad for grad in own if grad.device == device] for device in devices]
    norms = [torch.stack(torch._foreach_norm(each, norm_type, dtype)) for each in by_device]
    together = torch.cat([each.to(norms[0].device) for each in norms])
    norm: torch.Tensor = torch.linalg.vector_norm(together, norm_type)
    return norm if norm_type == math.inf else norm.pow(norm_type)
