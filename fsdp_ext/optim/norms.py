"""Norms of gradients over all ranks, from flat memory where possible."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
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


def norm_dtype(params: Iterable[Any]) -> torch.dtype:
    """Return the dtype in which the norm of gradients of ``params`` is computed."""
    return promoted([torch.float32, *{param.dtype for param in params}])


def promoted(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype to which all of these promote."""
    return functools.reduce(torch.promote_types, dtypes)


@dataclass(frozen=True)
class NormRanks:
    """The ranks over which a parameter's gradient is sharded.

    Args:
        groups: one for each dimension of a mesh that shards; none if each rank has it whole.
        device_type: the device on which the groups reduce.
    """

    groups: tuple[dist.ProcessGroup, ...] = ()
    device_type: str = "cpu"

    @classmethod
    def of(cls, param: Any, owners: dict[nn.Parameter, Unit], caller: str) -> NormRanks:
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            # Not is_shard(), which is false for _StridedShard.
            dims = [i for i, spread in enumerate(param.placements) if not spread.is_replicate()]
            groups = tuple(mesh.get_group(dim) for dim in dims if mesh.size(dim) > 1)
            return cls(groups, mesh.device_type)
        if is_flat(param):
            if param not in owners:
                raise RuntimeError(
                    f"{caller} got a flat parameter whose wrapper no longer exists. Pass the "
                    "parameters of the wrapped model."
                )
            return cls((owners[param].ranks.shard_group,), owners[param].device.type)
        return cls(device_type=param.device.type)


class Gradients:
    """The gradients of some parameters, in runs where possible.

    Args:
        params: the parameters; the same on all ranks.
        caller: the public function, for messages.
    """

    def __init__(self, params: list[Any], caller: str) -> None:
        self._given = params
        self._caller = caller
        params = _sharded(params)
        owners = owners_of(units_alive())
        ranks = {param: NormRanks.of(param, owners, caller) for param in params}
        self._runs = FlatRuns(params, ranks.get)
        # From the parameters, because other ranks may lack gradients that this rank has.
        self.ranks = list(dict.fromkeys(ranks.values()))
        self._of_runs = [(ranks[run.params[0]], run.grad) for run in self._runs.runs]
        self._of_others = [(ranks[param], param) for param in self._runs.others]
        # Also from the parameters, so that all ranks reduce one dtype.
        self.dtype = norm_dtype(params)

    @property
    def units(self) -> list[Unit]:
        """The units of the parameters that are alive."""
        return self._runs.units

    def are_of(self, params: list[Any]) -> bool:
        """Return whether the runs are still those of ``params``."""
        return _C.same_objects(params, self._given) and self._runs.are_of(self._runs.params)

    def by_ranks(self) -> dict[NormRanks, list[torch.Tensor]]:
        """Return this rank's gradients. All ranks have the same keys in the same order."""
        found: dict[NormRanks, list[torch.Tensor]] = {ranks: [] for ranks in self.ranks}
        for ranks, grad in self._of_runs:
            found[ranks].append(grad)
        for ranks, param in self._of_others:
            if param.grad is not None:
                found[ranks].append(self._local_grad(param))
        return found

    def _local_grad(self, param: Any) -> torch.Tensor:
        grad: torch.Tensor = param.grad
        if not isinstance(grad, DTensor):
            return grad
        if grad.placements != param.placements:
            raise NotImplementedError(
                f"{self._caller} got a gradient with the placements {tuple(grad.placements)} for a "
                f"parameter with {tuple(param.placements)}. Redistribute it to those first."
            )
        return grad.to_local()


def _sharded(params: list[Any]) -> list[Any]:
    """Return ``params`` with sharded parameters in place of those of units that are unsharded."""
    sharded = {param.registered(): param.sharded for unit in units_alive() for param in unit.params}
    return [sharded.get(param, param) for param in params]


def total_norm(
    local_parts: dict[NormRanks, torch.Tensor], norm_type: float, dtype: torch.dtype, caller: str
) -> torch.Tensor:
    """Return the norm over all ranks, from each rank's :func:`local_part`."""
    is_max = norm_type == math.inf
    parts = []
    for ranks, local in local_parts.items():
        part = local.to(ranks.device_type)
        for group in ranks.groups:
            with explaining_errors(f"reduce the norm in {caller}", group):
                dist.all_reduce(part, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group)
        parts.append(part)
    every = sum_of_parts([part.to(parts[0].device) for part in parts], norm_type, dtype)
    return every if is_max else every ** (1 / norm_type)


def sum_of_parts(parts: list[torch.Tensor], norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the :func:`local_part` of all gradients together."""
    if not parts:
        return torch.zeros((), dtype=dtype)
    together = torch.stack(parts)
    return together.max() if norm_type == math.inf else together.sum()


def local_part(grads: list[torch.Tensor], norm_type: float, dtype: torch.dtype) -> torch.Tensor:
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


def multiply(grads: list[torch.Tensor], scale_on: Callable[[torch.device], torch.Tensor]) -> None:
    """Multiply gradients in place by the scale that ``scale_on`` returns for their device."""
    for device in {grad.device for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.device == device], scale_on(device))
