"""Fully sharded data parallelism whose training step runs in C++.

This module exports the public names and may import every package; no package imports a public name
from it. Start reading with ``sharding/api/entry.py``.
"""

from torch.distributed import fsdp as _torch_fsdp
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FlatParameter,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fsdp_ext import _installed_torch  # noqa: F401  (before what loads the extension)
from fsdp_ext import checkpoint as checkpoint
from fsdp_ext._build_info import VERSION as __version__
from fsdp_ext.comm.link import Link
from fsdp_ext.comm.simulated import Simulated
from fsdp_ext.fsdp1.wrapper import FullyShardedDataParallel
from fsdp_ext.offloading.api import offload_optimizer
from fsdp_ext.optim.clip import clip_grad_norm_
from fsdp_ext.patching.api import patch
from fsdp_ext.planner.api import plan
from fsdp_ext.planner.result import Plan
from fsdp_ext.profiler.api import profile
from fsdp_ext.sharding.api.describe import describe_buckets
from fsdp_ext.sharding.api.entry import fully_shard, register_fsdp_forward_method, share_comm_ctx
from fsdp_ext.sharding.api.fsdp_module import FSDPModule
from fsdp_ext.sharding.api.handles import GradientReductionHandle, UnshardHandle
from fsdp_ext.sharding.root.flight_record import write_flight_record
from fsdp_ext.sharding.root.gradient_health import Health, UnitHealth, health
from fsdp_ext.tuner.api import tune
from fsdp_ext.tuner.result import Tuning
from fsdp_ext.verifier.api import verify
from fsdp_ext.verifier.result import Verification

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "Health",
    "Link",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "Plan",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "Simulated",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "Tuning",
    "UnitHealth",
    "UnshardHandle",
    "Verification",
    "__version__",
    "clip_grad_norm_",
    "describe_buckets",
    "fully_shard",
    "health",
    "offload_optimizer",
    "patch",
    "plan",
    "profile",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "tune",
    "verify",
    "write_flight_record",
]

if hasattr(_torch_fsdp, "DataParallelMeshDims"):  # not in torch 2.11
    DataParallelMeshDims = _torch_fsdp.DataParallelMeshDims
    __all__ += ["DataParallelMeshDims"]
