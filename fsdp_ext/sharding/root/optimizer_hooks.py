"""Hooks on every optimizer's step: checks before it, and a request to gather again after it."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_ext import _C
from fsdp_ext.comm.lanes import check_lanes
from fsdp_ext.sharding.params.checked_optimizers import (
    Checked,
    check_again,
    checked,
    steps_shards,
)
from fsdp_ext.sharding.params.flat_parameter import is_flat
from fsdp_ext.sharding.params.ownership import (
    goes_on_as,
    is_any_overwritten,
    is_sharded,
    replaced_as,
    unsharded_name,
)
from fsdp_ext.sharding.params.unreduced import is_unreduced
from fsdp_ext.sharding.root.unit import Unit, owners_of, units_alive


def watch_optimizers() -> None:
    """Have all optimizers of the process checked before their next step, and their steps noted.

    Each ``fully_shard`` calls this.
    """
    _register()
    check_again()


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_check_optimizer)
    register_optimizer_step_pre_hook(_check_gradients)
    register_optimizer_step_post_hook(_note_step)


def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if is_any_overwritten(_params_of(optimizer)):
        raise RuntimeError(
            "an optimizer's step was called inside summon_full_params, and leaving that would "
            "overwrite its result. Call step() outside, or pass writeback=False."
        )
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    found = checked.get(optimizer)
    if found is None or found.params != count:
        _check_params(optimizer)
        owners = owners_of(units_alive())
        has_shards = any(map(_is_shard, _params_of(optimizer)))
        found = Checked(count, has_shards, _groups_of(optimizer, owners))
        checked[optimizer] = found
        if any(param not in owners for param in _params_of(optimizer)):
            # torch's registration hooks do not report ModuleList.insert, or a new parameter that is
            # unfrozen later. So the next forward checks whether a sharded model has this one.
            _C.note_module_change()
    check_lanes([group for ref in found.groups if (group := ref()) is not None])


def _check_params(optimizer: torch.optim.Optimizer) -> None:
    _let_go_on(optimizer)
    for param in _params_of(optimizer):
        owner = replaced_as(param)
        if owner is not None:
            raise RuntimeError(
                f"the optimizer has '{owner[0]}' of {owner[1]} as it was before fully_shard, "
                "which no longer takes part in training. Make the optimizer after fully_shard."
            )
        unsharded = unsharded_name(param)
        if unsharded is not None:
            raise RuntimeError(
                f"the optimizer has the unsharded '{unsharded}', which is a copy for one "
                "forward and backward, so it would train nothing. Make the optimizer before "
                "the first forward, or after reshard()."
            )


def _groups_of(
    optimizer: torch.optim.Optimizer, owners: dict[nn.Parameter, Unit]
) -> set[weakref.ref[dist.ProcessGroup]]:
    """Return the groups of all roots whose shards the optimizer steps.

    The unit of a local tensor or of a flat shard is not known, so all units count then.
    """
    shards = list(filter(_is_shard, _params_of(optimizer)))
    is_known = owners.keys() >= set(shards)
    units = {owners[param] for param in shards} if is_known else set(units_alive())
    roots = {unit.root.units[0] for unit in units if unit.root is not None}
    return {weakref.ref(group) for unit in units | roots for group in unit.ranks.groups}


def _check_gradients(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Check that gradients are reduced: before the step, or after each call of its closure."""
    if not _C.any_unit_shows_gradients():
        return None
    closure = kwargs.get("closure") or next(iter(args[1:]), None)  # args[0] is the optimizer
    if not callable(closure):
        _raise_if_unreduced(optimizer)
        return None

    @functools.wraps(closure)
    def checked() -> Any:
        loss = closure()
        _raise_if_unreduced(optimizer)
        return loss

    if "closure" in kwargs:
        return args, kwargs | {"closure": checked}
    return (args[0], checked, *args[2:]), kwargs


def _raise_if_unreduced(optimizer: torch.optim.Optimizer) -> None:
    if any(map(is_unreduced, _params_of(optimizer))):
        raise RuntimeError(
            "an optimizer's step was called, but gradients of no_sync are not reduced yet. Run the "
            "last backward of each step outside of no_sync."
        )


def _params_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (param for group in optimizer.param_groups for param in group["params"])


def let_optimizers_go_on() -> None:
    """Give existing optimizers the sharded parameters in place of the original ones.

    So calls on an optimizer before its first step act on these, too: ``zero_grad``, state dicts,
    gradient scalers. Otherwise ``GradScaler.unscale_`` would find no gradient, and the scaler's
    step would fail.
    """
    for found in gc.get_objects():
        if issubclass(type(found), torch.optim.Optimizer):  # isinstance would ask proxies
            _let_go_on(found)


def _let_go_on(optimizer: torch.optim.Optimizer) -> None:
    for group in getattr(optimizer, "param_groups", ()):
        for index, param in enumerate(group["params"]):
            successor = goes_on_as(param)
            if successor is not None:
                _go_on(optimizer, group, index, successor)


@torch.no_grad()
def _go_on(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], index: int, sharded: nn.Parameter
) -> None:
    """Put a sharded parameter in place of the original, and shard the optimizer's state for it."""
    state = optimizer.state.pop(group["params"][index], {})
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == sharded.shape:
            whole, param = value.to(sharded.device), cast(DTensor, sharded)
            state[name] = distribute_tensor(
                whole, param.device_mesh, param.placements, src_data_rank=None
            ).clone()
    if state:
        optimizer.state[sharded] = state
    group["params"][index] = sharded


def _is_shard(param: Any) -> bool:
    """Return whether this is a sharded parameter, or the local tensor of one."""
    return is_sharded(param) or is_flat(param) or _C.FlatTensor.has_storage_of(param)


def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # Others may step on some ranks alone, which would gather again what the other ranks still have.
    if steps_shards(optimizer):
        _C.note_optimizer_step()
