"""Whole tensors of sharded ones, and shards of whole ones."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.inference_mode(False)  # so that training can use the result
@torch.no_grad()
def whole_copy(sharded: DTensor) -> torch.Tensor:
    """Return the whole tensor in memory of its own. All ranks that share it call this."""
    local = sharded.to_local()
    whole = sharded.full_tensor()
    if whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
        whole = whole.clone()  # on one rank, a shard is the whole tensor
    return whole


def shard_like(whole: torch.Tensor, param: DTensor) -> DTensor:
    """Shard a tensor, which all ranks have, as ``param`` is sharded, without communication."""
    local = whole.to(device=param.device)
    return distribute_tensor(local, param.device_mesh, param.placements, src_data_rank=None)
