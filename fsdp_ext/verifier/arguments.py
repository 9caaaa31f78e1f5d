"""Checks of the arguments of ``verify``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.tensor import DTensor

from fsdp_ext.planner.units import Units, chosen_modules
from fsdp_ext.sharding.root.module_state import state_of
from fsdp_ext.verifier.subject import Subject


def check_model(model: Any) -> None:
    """Check that ``verify`` can copy and shard the model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"verify got a {type(model).__name__}. Pass an nn.Module.")
    name = type(model).__name__
    is_sharded = any(
        state_of(module) is not None or isinstance(module, (TorchFSDPModule, TorchFSDP))
        for module in model.modules()
    )
    if is_sharded:
        raise ValueError(
            f"verify got a {name} that is sharded already, so there is nothing to compare it with. "
            "Call verify before fully_shard, and name its units with units=."
        )
    for param_name, param in [*model.named_parameters(), *model.named_buffers()]:
        if param.is_meta:
            raise ValueError(
                f"verify got a {name} whose '{param_name}' is on the meta device, so it has no "
                "values to train with. Materialise the model first, with to_empty() and its "
                "initialisation."
            )
        if isinstance(param, DTensor):
            raise ValueError(
                f"verify got a {name} whose '{param_name}' is a DTensor, which has no unsharded "
                "counterpart on one rank. Call verify before parallelize_module."
            )


def check_is_on_host(model: nn.Module) -> None:
    """Check that the model can be checked without a process group."""
    for name, param in model.named_parameters():
        if param.device.type != "cpu":
            raise ValueError(
                f"verify got a model whose '{name}' is on {param.device}, and there is no process "
                "group. Start the script with torchrun, or move the model to the CPU."
            )


def names_of_units(model: nn.Module, units: Units | None) -> tuple[str, ...]:
    """Return the names of the modules that become units, in the order of sharding."""
    chosen = set(chosen_modules(model, units, "verify"))
    names = [name for name, module in model.named_modules() if module in chosen and name]
    return tuple(reversed(names))  # users shard inner modules first, too


def check_copy(subject: Subject) -> None:
    """Check that the model can be copied."""
    try:
        with torch.no_grad():
            subject.plain()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"verify trains copies of the {type(subject.model).__name__}, but copy.deepcopy of it "
            f"raised {type(error).__name__}: {error} Remove what cannot be copied, such as locks, "
            "handles and tensors with a history, from its modules."
        ) from error
