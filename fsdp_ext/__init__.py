"""Fully sharded data parallelism with no Python on the hot path."""

from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdp_ext._build_info import VERSION as __version__
from fsdp_ext.fully_shard import (
    FSDPModule,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
)

__all__ = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "__version__",
    "fully_shard",
    "register_fsdp_forward_method",
]
