"""The norm of all ranks' gradients, for ``clip_grad_norm_``."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist


def norm_to_combine(
    grads: list[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the p-th power of the norm, which ranks add up; for p = inf the maximum."""
    # Shards may be empty, and the maximum of nothing is an error.
    norms = [
        torch.linalg.vector_norm(g, norm_type, dtype=dtype).to(device) for g in grads if g.numel()
    ]
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm if norm_type == math.inf else norm.pow(norm_type)


def combine_norms(
    total: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> None:
    """Reduce the norm over all ranks. There is no roll call, because each step calls this."""
    try:
        dist.all_reduce(total, op, group=group)
    except RuntimeError as error:  # on the host; over NCCL its watchdog ends the process
        raise RuntimeError(
            f"rank {dist.get_rank()} could not reduce the norm in clip_grad_norm_. All of the "
            f"ranks {dist.get_process_group_ranks(group)} have to call it in the same step. The "
            f"backend says: {error}"
        ) from error
