"""Norms of gradients over all ranks."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ext.comm.transports import device_of
from fsdp_ext.sharding.params.dtensors import sharded_dims
from fsdp_ext.sharding.params.flat_parameter import is_flat
from fsdp_ext.sharding.params.ownership import own_grad_dtype
from fsdp_ext.sharding.root.unit import Unit


def norm_dtype(params: Iterable[Any]) -> torch.dtype:
    """Return the dtype in which the norm of gradients of ``params`` is computed."""
    return promoted([torch.float32, *{own_grad_dtype(param) or param.dtype for param in params}])


def promoted(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the real dtype to which all of these promote."""
    return functools.reduce(torch.promote_types, dtypes).to_real()


@dataclass(frozen=True)
class NormRanks:
    """The ranks over which a gradient's norm is reduced.

    Plain experts on a mesh of their own differ between the root's ranks, so their norm is reduced
    over the root's shard group.
    """

    # One for each dimension of a mesh that shards; none if each rank has it whole.
    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device  # the device on which the groups reduce

    @classmethod
    def of(cls, param: Any, owners: dict[nn.Parameter, Unit], caller: str) -> NormRanks:
        unit = owners.get(param)
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            groups = groups_of_plain_experts(param, unit) or tuple(
                map(mesh.get_group, sharded_dims(param))
            )
            device = device_of(mesh.device_type, param) if unit is None else unit.device
            return cls(groups, device)
        if is_flat(param):
            if unit is None:
                raise RuntimeError(
                    f"{caller} got a flat parameter whose wrapper no longer exists. Pass the "
                    "parameters of the wrapped model."
                )
            return cls((unit.ranks.shard_group,), unit.device)
        return cls((), param.device)


def final_roots(units: Iterable[Unit]) -> int:
    """Return how many units have a root that stays. With it, :class:`NormRanks` may change."""
    return sum(unit.root is not None and not unit.root.is_provisional for unit in units)


def is_on_other_mesh(unit: Unit) -> bool:
    """Return whether a unit has another mesh than its root."""
    root = unit.root
    return root is not None and root.meshes[root.number(unit)] != 0


def groups_of_plain_experts(param: Any, unit: Unit | None) -> tuple[dist.ProcessGroup, ...]:
    """Return the root's shard group if it has different parameters of one name; else nothing."""
    root = None if unit is None else unit.root
    if unit is None or root is None or not is_on_other_mesh(unit):
        return ()
    if unit.settings.all_reduce_hook is not None:
        return ()  # it may keep the parameters of all meshes equal
    was_plain = any(each.sharded is param and each.unsharded is None for each in unit.params)
    return (root.units[0].ranks.shard_group,) if was_plain else ()


def norms_of(grads: list[torch.Tensor], norm_type: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the norm of each gradient that has elements on this rank, in a tensor a device."""
    # Shards may be empty, and the maximum of nothing is an error.
    # vector_norm rejects a real dtype for complex gradients.
    own = [grad.abs() if grad.is_complex() else grad for grad in grads if grad.numel()]
    devices = {grad.device for grad in own}  # some may be offloaded
    by_device = [[grad for grad in own if grad.device == device] for device in devices]
    return [torch.stack(torch._foreach_norm(each, norm_type, dtype)) for each in by_device]


def total_norm(
    norms: dict[NormRanks, list[torch.Tensor]], norm_type: float, dtype: torch.dtype, caller: str
) -> torch.Tensor:
    """Return the norm over all ranks, from the :func:`norms_of` each rank's gradients.

    All ranks have the same keys in the same order.
    """
    is_max = norm_type == math.inf
    parts = []
    for ranks, own in norms.items():
        every = [each.to(ranks.device) for each in own]
        every = every or [torch.zeros(1, dtype=dtype, device=ranks.device)]
        together = every[0] if len(every) == 1 else torch.cat(every)
        part = torch.linalg.vector_norm(together, norm_type)
        if is_max:
            part = _maximum(part, ranks, caller)
        else:
            part = part.pow(norm_type)
            _all_reduce(part, dist.ReduceOp.SUM, ranks, caller)
        parts.append(part)
    if not parts:
        return torch.zeros((), dtype=dtype)
    total: torch.Tensor = parts[0]
    if len(parts) > 1:
        together = torch.stack([part.to(total.device) for part in parts])
        total = together.max() if is_max else together.sum()
    return total if is_max else total.pow(1 / norm_type)


def _maximum(norm: torch.Tensor, ranks: NormRanks, caller: str) -> torch.Tensor:
    """Return the largest of all ranks' norms, or NaN if one is NaN."""
    # Backends may drop the NaN of some ranks from a maximum.
    both = torch.stack([norm.nan_to_num(0.0, math.inf), norm.isnan().to(norm.dtype)])
    _all_reduce(both, dist.ReduceOp.MAX, ranks, caller)
    return torch.where(both[1] > 0, math.nan, both[0])


def _all_reduce(value: torch.Tensor, op: Any, ranks: NormRanks, caller: str) -> None:
    for group in ranks.groups:
        with explaining_errors(f"reduce the norm in {caller}", group):
            dist.all_reduce(value, op, group)


@contextlib.contextmanager
def explaining_errors(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Make errors of a step's collectives say what the ranks have to do.

    Only the host sees such errors. Over NCCL, torch's watchdog ends the process.

    Args:
        what: what the rank could not do.
        group: the ranks of the collective.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} could not {what}. All of the ranks "
            f"{dist.get_process_group_ranks(group)} have to do this in the same step, for the same "
            f"parameters. The backend says: {error}"
        ) from error


def multiply(grads: list[torch.Tensor], scale_on: Callable[[torch.device], torch.Tensor]) -> None:
    """Multiply gradients in place by the scale that ``scale_on`` returns for their device."""
    for device in {grad.device for grad in grads}:
        scale = scale_on(device)
        if device.type != "cpu" or scale.item() != 1:  # reading a GPU's would make the host wait
            torch._foreach_mul_([grad for grad in grads if grad.device == device], scale)
