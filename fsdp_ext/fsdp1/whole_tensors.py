"""Gathers whole tensors from sharded ones, and shards whole tensors."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_ext.comm.transports import gathering_device
from fsdp_ext.optim.state_entries import over


@torch.inference_mode(False)  # so that training can use the result
@torch.no_grad()
def whole_copy(sharded: DTensor) -> torch.Tensor:
    """Return the whole tensor in memory of its own. All ranks that share it call this."""
    local = sharded.to_local()
    whole = _where_its_group_sends(sharded).full_tensor().to(local.device)
    if whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
        whole = whole.clone()  # on one rank, a shard is the whole tensor
    return whole


def _where_its_group_sends(sharded: DTensor) -> DTensor:
    """Return a shard on the device from which its process groups gather."""
    mesh, local = sharded.device_mesh, sharded.to_local()
    device = gathering_device(mesh.get_all_groups(), mesh.device_type, local)
    return sharded if local.device == device else cast(DTensor, over(local.to(device), sharded))


def shard_like(whole: torch.Tensor, param: DTensor) -> DTensor:
    """Shard a tensor, which all ranks have, like ``param``, without communication."""
    local = whole.to(device=param.device)
    return distribute_tensor(local, param.device_mesh, param.placements, src_data_rank=None)


def without_sharded_tensor(name: str, value: Any, param: object) -> Any:
    """Return a ShardedTensor, which FSDP1 makes without a device_mesh, as a DTensor.

    It shares memory with the ShardedTensor. Any other value is returned as it is.
    """
    if not isinstance(value, ShardedTensor):
        return value
    if not isinstance(param, DTensor):
        raise NotImplementedError(
            f"'{name}' is a ShardedTensor, and the parameter is not sharded. Save it as "
            "FULL_STATE_DICT, or wrap the saving model with device_mesh=, so that it saves "
            "DTensors."
        )
    size, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    shards = value.local_shards()
    parts = [(shard.metadata.shard_sizes, shard.metadata.shard_offsets) for shard in shards]
    needed = [(list(size), list(offset))] if 0 not in size else []
    if value.shape != param.shape or [part for part in parts if 0 not in part[0]] != needed:
        raise NotImplementedError(
            f"'{name}' is a ShardedTensor of {tuple(value.shape)} with the parts (sizes, offsets) "
            f"{parts} on this rank. The parameter of {tuple(param.shape)} has {needed} here. Load "
            "it on as many ranks as have saved it, save it as FULL_STATE_DICT, or wrap the saving "
            "model with device_mesh=, so that it saves DTensors."
        )
    local = shards[0].tensor if needed else param.to_local().new_empty(size, dtype=value.dtype)
    return over(local.detach().to(param.device), param)
