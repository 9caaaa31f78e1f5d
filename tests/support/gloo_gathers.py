"""Keeps the gathers of ``full_tensor()`` off a data race in PyTorch's gloo backend.

The two workers of a gloo group write the name of each collective that has ended into one string,
without a lock. The gather of ``full_tensor()`` is ALLGATHER_COALESCED there, whose name needs
memory, so both workers may free the same block (docs/reliability.md, "Not covered"). Names of up to
15 characters need none.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

_library = torch.library.Library("_c10d_functional", "IMPL")  # holds what is registered


def install() -> None:
    """Let functional all-gathers of CPU tensors be _ALLGATHER_BASE, of 15 characters."""
    _library.impl("all_gather_into_tensor", _all_gather, "CPU")


def _all_gather(mine: Tensor, ranks: int, group: str | dist.ProcessGroup) -> Tensor:
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)
    of_all = mine.new_empty(mine.shape[0] * ranks, *mine.shape[1:])
    group._allgather_base(of_all, mine.contiguous()).wait()
    return of_all
