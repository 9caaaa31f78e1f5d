"""The four systems that can shard the model. Everything else in the example is common to them.

A system is imported only when it is used, so none needs the others to be installed.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from corpus import UsageError
from gpt_model import GPT, Block
from torch import nn

SYSTEMS = ("ours", "fsdp2", "fsdp1", "ddp")


def shard(system: str, model: GPT, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Shard `model` over all ranks. Each block is a unit, and the rest is the root unit.

    Args:
        system: one of `SYSTEMS`.
        model: the same fp32 values on every rank, on `device`.
        dtype: dtype of the computation. The sharded parameters, the gradients on the wire and the
            optimizer stay in fp32.
        device: the device of this rank.

    Returns:
        the module to call: `model` itself, or the wrapper around it.

    Raises:
        UsageError: if `system` is not installed.
    """
    if system in ("ours", "fsdp2"):
        return _fully_shard(system, model, dtype)
    if system == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32),
            # FSDP1 needs it on a CPU, too: otherwise it looks for an accelerator and fails.
            device_id=device,
            use_orig_params=True,
        )
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def _fully_shard(system: str, model: GPT, dtype: torch.dtype) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if system == "ours":
        try:
            from fsdp_ext import fully_shard
        except ImportError as error:
            raise UsageError(
                f"--system ours needs fsdp_ext, which cannot be imported ({error}); "
                "install it with `pip install .`, or give --system fsdp2"
            ) from error
    else:
        from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def compute_dtype(
    system: str, dtype: torch.dtype, device: torch.device
) -> AbstractContextManager[object]:
    """Context of the forward pass. DDP has no mixed precision of its own, so it uses autocast."""
    if system == "ddp" and dtype != torch.float32:
        return torch.autocast(device.type, dtype)
    return contextlib.nullcontext()


def clip_gradients(system: str, model: nn.Module, max_norm: float) -> None:
    """Scale the gradients so that their norm over all ranks is at most `max_norm`.

    FSDP1 needs its own method, because its local gradients are plain tensors and not DTensors.
    """
    if system == "fsdp1":
        model.clip_grad_norm_(max_norm)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def keep_unsharded(system: str, model: nn.Module) -> None:
    """Keep parameters gathered from one forward pass to the next, where the system offers that.

    Sampling runs one short forward pass for each byte, and no training follows it.
    """
    if system in ("ours", "fsdp2"):
        model.set_reshard_after_forward(False)
