"""Which parameters can be sharded, and which unit has sharded a parameter."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

# Set on a parameter that a unit has replaced: its name, and the name of the unit.
_SHARDED_AS = "_fsdp_ext_sharded_as"
# Set on the replacement: the name of the unit.
_SHARDED_IN = "_fsdp_ext_sharded_in"
# Set on an unsharded parameter, which modules have only while forward and backward run: its name.
_UNSHARDED = "_fsdp_ext_unsharded"


def check_parameter(name: str, param: nn.Parameter, device: torch.device) -> None:
    """Raise an error that names the parameter if it cannot be sharded."""
    owner = replaced_as(param)
    if owner is not None:
        raise ValueError(
            f"parameter '{name}' is also '{owner[0]}' of {owner[1]}, which is a unit already. Put "
            "modules that share a parameter into one unit: fully_shard([a, b])."
        )
    unit = getattr(param, _SHARDED_IN, None)
    if unit is not None:
        raise ValueError(
            f"parameter '{name}' is in the unit of {unit} already. Call fully_shard on the layers "
            "first and on the whole model last."
        )
    if isinstance(param, DTensor):
        raise NotImplementedError(
            f"parameter '{name}' is a DTensor already (tensor parallelism), which is not supported "
            "yet. Pass plain parameters."
        )
    if isinstance(param, UninitializedParameter):
        raise ValueError(
            f"parameter '{name}' belongs to a lazy module and has no shape yet. Run one forward "
            "before fully_shard."
        )
    # Sharding makes new parameters of the rows, which would be plain ones.
    if type(param) is not nn.Parameter:
        raise NotImplementedError(
            f"parameter '{name}' is a {type(param).__name__}, and fully_shard would lose what this "
            "class adds to a plain tensor. Convert it to an nn.Parameter, or pass it in "
            "ignored_params."
        )
    check_grad_dtype(name, param)
    if param.ndim == 0:
        raise ValueError(
            f"parameter '{name}' is a scalar, which has no rows to shard. Make it a 1-D tensor "
            "with one element."
        )
    if param.is_complex():
        raise ValueError(
            f"parameter '{name}' is {param.dtype}, and only real parameters can be sharded. Store "
            "it as a real tensor with a last dimension of 2, and use torch.view_as_complex in "
            "forward."
        )
    # Shards of parameters on the host move to the device, as in FSDP2.
    if param.device.type not in ("meta", "cpu", device.type):
        raise ValueError(
            f"parameter '{name}' is on {param.device}, but the mesh is of {device}. Move the "
            f"module to {device} (or meta) first."
        )


def check_grad_dtype(name: str, param: nn.Parameter) -> None:
    """Raise NotImplementedError if gradients of ``param`` are to have another dtype than it."""
    grad_dtype = getattr(param, "grad_dtype", param.dtype)  # since torch 2.9
    if param.requires_grad and grad_dtype != param.dtype:
        raise NotImplementedError(
            f"parameter '{name}' is {param.dtype} but has grad_dtype={grad_dtype}, which is not "
            "supported. Leave grad_dtype as it is; MixedPrecisionPolicy(reduce_dtype=...) sets the "
            "dtype in which gradients are reduced."
        )


def mark_sharded(param: nn.Parameter, sharded: nn.Parameter, name: str, unit: str) -> None:
    """Remember that ``sharded``, called ``name`` in ``unit``, has replaced ``param``."""
    setattr(param, _SHARDED_AS, (name, unit))
    setattr(sharded, _SHARDED_IN, unit)


def replaced_as(param: nn.Parameter) -> tuple[str, str] | None:
    """Return the names of the parameter and of the unit that has replaced it, or None."""
    owner: tuple[str, str] | None = getattr(param, _SHARDED_AS, None)
    return owner


def mark_unsharded(unsharded: nn.Parameter, name: str) -> None:
    """Remember that ``unsharded`` is what modules have for ``name`` while its unit is unsharded."""
    setattr(unsharded, _UNSHARDED, name)


def unsharded_name(param: nn.Parameter) -> str | None:
    """Return the name of an unsharded parameter; None for other parameters."""
    name: str | None = getattr(param, _UNSHARDED, None)
    return name
