"""Libraries besides torch: DeepSpeed, Megatron-FSDP and FairScale, for `step --peers`.

`optimizer --peers` runs DeepSpeed's AdamW on the host.

Each is imported only when it is built, so that `step` lists a library that is missing or cannot run
here with its own error. `make bench-peers` installs them.
"""

from __future__ import annotations

import logging
import os
import sysconfig
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.models.training import GPT, Block, Build, Sharded, adamw

# DeepSpeed's defaults, 5e7 and 5e8 elements, are larger than a model for the CPU: it would prefetch
# the whole model, and reduce all gradients at once. Two blocks are what FSDP2 prefetches.
DEEPSPEED_BLOCKS = 2


class DeepSpeedOptimizer:
    """The engine's step with the interface of an optimizer."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def zero_grad(self) -> None:
        """Do nothing: the engine's step does it."""

    def step(self) -> None:
        """Update the parameters."""
        self.engine.step()


def shard_deepspeed(model: GPT, dtype: torch.dtype, device: torch.device) -> Sharded:
    """Shard with DeepSpeed's ZeRO-3 (docs/_pages/config-json.md names its settings)."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise it looks for a GPU
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    bucket = DEEPSPEED_BLOCKS * sum(p.numel() for p in model.blocks[0].parameters())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": dist.get_world_size(),
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # the default is 1.0, and no other system clips
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "stage3_prefetch_bucket_size": bucket,
            "reduce_bucket_size": bucket,
        },
    }
    # It calls collectives by names that torch 2.13 deprecates, with a warning at each call.
    warnings.filterwarnings("ignore", message=".*torch.distributed", category=FutureWarning)
    optimizer = adamw(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def backward(loss: Tensor) -> None:
        engine.backward(loss)

    settings = f"overlap_comm, contiguous_gradients, buckets of {DEEPSPEED_BLOCKS} blocks"
    return Sharded(engine, settings, DeepSpeedOptimizer(engine), backward)


def deepspeed_cpu_adam(params: list[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Return DeepSpeed's AdamW for the host. Its first use compiles it, which takes minutes."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # it has an OpenMP library of its own
    os.environ["PATH"] += os.pathsep + sysconfig.get_path("scripts")  # where ninja is
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(params, lr=lr, weight_decay=1e-2)
    return optimizer


def shard_megatron(model: GPT, dtype: torch.dtype, device: torch.device) -> Sharded:
    """Shard with Megatron-FSDP (its README's quick start)."""
    from megatron_fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    sharded, optimizer = fully_shard(
        model.to(dtype),
        adamw(model.parameters()),
        device_mesh=mesh,
        dp_shard_dim="dp",
        fsdp_unit_modules=[Block],
        zero_dp_strategy=3,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        device=device,
    )
    settings = "ZeRO-3, overlap_grad_reduce, overlap_param_gather"
    return Sharded(sharded, settings, optimizer)


def shard_fairscale(model: GPT, dtype: torch.dtype, device: torch.device) -> Sharded:
    """Wrap with FairScale's FSDP, from which torch's FSDP1 was made."""
    from fairscale.nn import FullyShardedDataParallel

    mixed = dtype != torch.float32
    options: dict[str, Any] = {
        "mixed_precision": mixed,
        "compute_dtype": dtype,
        "fp32_reduce_scatter": mixed,
        "compute_device": device,
    }

    for i, block in enumerate(model.blocks):
        model.blocks[i] = FullyShardedDataParallel(block, **options)
    wrapped = FullyShardedDataParallel(model, **options)
    return Sharded(wrapped, "flatten_parameters, reduce-scatter group of its own: defaults")


PEERS: dict[str, Build] = {
    "DeepSpeed ZeRO-3": shard_deepspeed,
    "Megatron-FSDP": shard_megatron,
    "FairScale FSDP": shard_fairscale,
}
