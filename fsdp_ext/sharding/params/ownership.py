"""Which parameters can be sharded, and which unit has sharded a parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from fsdp_ext._util.errors import MisuseError
from fsdp_ext.sharding.params.dtensors import part_of_this_rank, shards_of
from fsdp_ext.sharding.params.ranks import Ranks
from fsdp_ext.sharding.params.spmd import SpmdMesh

_OURS = "_fsdp_ext_"  # begins the names of all attributes that are set here
# Set on a parameter that a unit has replaced: its name, and the name of the unit.
_SHARDED_AS = "_fsdp_ext_sharded_as"
# Set on such a parameter if optimizers may go on with its replacement: the replacement. It is not a
# weak reference, because torch.utils.swap_tensors refuses those, and module.to() calls it.
_GOES_ON_AS = "_fsdp_ext_goes_on_as"
# Set on the replacement: the name of the unit.
_SHARDED_IN = "_fsdp_ext_sharded_in"
# Set on an unsharded parameter, which modules have only while forward and backward run: its name.
_UNSHARDED = "_fsdp_ext_unsharded"
# Set by spmd_types on a tensor that it has annotated: a type for each dimension of a mesh.
_SPMD_TYPE = "_local_type"


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
            "first and on the whole model last. Put modules that share a submodule into one unit: "
            "fully_shard([a, b])."
        )
    if isinstance(param, UninitializedParameter):
        raise ValueError(
            f"parameter '{name}' belongs to a lazy module and has no shape yet. Run one forward "
            "before fully_shard."
        )
    part = part_of_this_rank(param)
    has_own_rows = keeps_own_rows(name, part)
    if not has_own_rows:
        _check_plain(name, part)
    check_grad_dtype(name, param, is_extension=has_own_rows)
    if param.ndim == 0:
        raise ValueError(
            f"parameter '{name}' is a scalar, which has no rows to shard. Change {name} to a 1D "
            "tensor with numel equal to 1."
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


def is_extension(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a tensor's class says how it is gathered: Note [tensor extensions]."""
    methods = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
    found = [method for method in methods if hasattr(tensor, method)]
    if len(found) == 1:
        raise MisuseError(
            f"parameter '{name}' is a {type(tensor).__name__}, which has {found[0]} only. A class "
            f"that says how it is gathered needs both {methods[0]} and {methods[1]}."
        )
    return len(found) == 2


def keeps_own_rows(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a parameter's rows stay in memory of their own, as those of extensions do.

    As in FSDP2, a class that implements operators may get its two methods after ``fully_shard``.
    """
    implements_operators = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return is_extension(name, tensor) or implements_operators


def quantization_of(tensor: torch.Tensor) -> Any:
    """Return bitsandbytes' state of a weight quantized to 4 bits; None for any other tensor.

    The weight holds packed numbers, whose rows can be sharded like any others. Its scales are in
    the returned object. Each rank keeps the whole object, and the layer's forward reads it.
    """
    return getattr(tensor, "quant_state", None) if _is_of_4_bits(tensor) else None


def _is_of_4_bits(tensor: torch.Tensor) -> bool:
    kind = type(tensor)  # known by its name, so that bitsandbytes need not be imported
    return kind.__name__ == "Params4bit" and kind.__module__.startswith("bitsandbytes")


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raise NotImplementedError if ``tensor`` has more than numbers, which shards would lose."""
    if getattr(tensor, _SPMD_TYPE, None):
        raise NotImplementedError(
            f"parameter '{name}' has a type of spmd_types, which says how its gradients are "
            "reduced, and fully_shard would lose it. Make the parameter a DTensor with "
            "distribute_module, and do without spmd_types."
        )
    kind = type(tensor)
    if quantization_of(tensor) is not None:
        return
    if _is_of_4_bits(tensor):
        raise NotImplementedError(
            f"parameter '{name}' is a Params4bit that is not quantized yet. Move the module to its "
            "device before fully_shard: bitsandbytes quantizes the weight then."
        )
    if kind not in (nn.Parameter, torch.Tensor):
        refuse_class(name, tensor)


def refuse_class(name: str, tensor: torch.Tensor) -> NoReturn:
    """Raise NotImplementedError for a parameter whose class adds something to a plain tensor."""
    raise NotImplementedError(
        f"parameter '{name}' is a {type(tensor).__name__}, and fully_shard would lose what this "
        "class adds to a plain tensor. Convert it to an nn.Parameter, or give its class "
        "fsdp_pre_all_gather and fsdp_post_all_gather, or pass it in ignored_params."
    )


def check_tensor_parallel(name: str, param: nn.Parameter, ranks: Ranks) -> None:
    """Raise an error if ``param`` is a DTensor that cannot be sharded over ``ranks``."""
    if isinstance(param, DTensor) and any(placement.is_partial() for placement in param.placements):
        raise ValueError(
            f"parameter '{name}' is a DTensor of partial sums, {param.placements}. Redistribute it "
            "to Shard or Replicate before fully_shard."
        )
    if ranks.spmd is not None:
        _check_on_spmd_mesh(name, param, ranks.spmd)
        return
    if not isinstance(param, DTensor):
        return
    if len(param.placements) > 2:
        raise NotImplementedError(
            f"parameter '{name}' is a DTensor on a {len(param.placements)}-D mesh, and FSDP can be "
            "combined with one or two other dimensions. Use fewer, or pass it in ignored_params."
        )
    try:
        shards_of(param, ranks, 0)
    except RuntimeError as error:
        raise ValueError(
            f"parameter '{name}' is a DTensor on {param.device_mesh}, and fully_shard got "
            f"{ranks.mesh}. They have to be different dimensions of one mesh: make it with "
            "init_device_mesh, and pass mesh['tp'] to parallelize_module and mesh['dp'] to "
            "fully_shard."
        ) from error


def _check_on_spmd_mesh(name: str, param: nn.Parameter, spmd: SpmdMesh) -> None:
    """Raise ValueError if ``param`` is no DTensor that data parallelism replicates."""
    if not isinstance(param, DTensor) or param.device_mesh != spmd.mesh:
        given = f"a DTensor on {param.device_mesh}" if isinstance(param, DTensor) else "no DTensor"
        raise ValueError(
            f"parameter '{name}' is {given}, and with dp_mesh_dims every parameter has to be one "
            f"on {spmd.mesh}. Distribute it with distribute_module."
        )
    for index, placement in enumerate(param.placements):
        if index in spmd.data_parallel_indices and not placement.is_replicate():
            raise ValueError(
                f"parameter '{name}' has {placement} on dimension {index} of its mesh, which "
                "dp_mesh_dims names. It has to be Replicate() there; fully_shard shards it."
            )


def own_grad_dtype(param: nn.Parameter) -> torch.dtype | None:
    """Return the user's dtype for gradients of ``param``; None if it is the parameter's own."""
    dtype: torch.dtype | None = getattr(param, "grad_dtype", None)  # since torch 2.9
    return dtype if param.requires_grad and dtype != param.dtype else None


def asked_grad_dtype(param: nn.Parameter) -> torch.dtype | None:
    """Return the gradients' dtype that conversions of ``param`` keep.

    None if it follows the parameter's. Since torch 2.15 conversions keep any dtype that the user
    has set, even the parameter's own.
    """
    if getattr(param, "_has_grad_dtype_override", False):
        dtype: torch.dtype | None = param.grad_dtype
        return dtype
    return own_grad_dtype(param)


def check_grad_dtype(name: str, param: nn.Parameter, *, is_extension: bool = False) -> None:
    """Raise an error if gradients of ``param`` cannot have the dtype that the user wants."""
    dtype = own_grad_dtype(param)
    if dtype is None:
        return
    if is_extension:
        raise NotImplementedError(
            f"parameter '{name}' has grad_dtype={dtype}, which is not supported for parameters "
            "whose class has fsdp_pre_all_gather. Leave grad_dtype as it is."
        )
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(
            f"parameter '{name}' has grad_dtype={dtype}, in which gradients cannot be added. Pass "
            "float16, bfloat16, float32 or float64."
        )


def mark_sharded(param: nn.Parameter, sharded: nn.Parameter, name: str, unit: str) -> None:
    """Remember that ``sharded``, called ``name`` in ``unit``, has replaced ``param``."""
    setattr(param, _SHARDED_AS, (name, unit))
    mark_owned(sharded, unit)


def mark_owned(sharded: nn.Parameter, unit: str) -> None:
    """Remember that ``unit`` has ``sharded`` as a sharded parameter."""
    setattr(sharded, _SHARDED_IN, unit)


def replaced_as(param: nn.Parameter) -> tuple[str, str] | None:
    """Return the names of the replaced parameter and of the unit that has replaced it, or None."""
    owner: tuple[str, str] | None = getattr(param, _SHARDED_AS, None)
    return owner


def mark_goes_on_as(param: nn.Parameter, sharded: nn.Parameter) -> None:
    """Let optimizers that have ``param`` go on with ``sharded``."""
    setattr(param, _GOES_ON_AS, sharded)
    if hasattr(sharded, _GOES_ON_AS):  # it was replaced before, and is back
        delattr(sharded, _GOES_ON_AS)


def hand_over(param: nn.Parameter, sharded: nn.Parameter) -> None:
    """Let optimizers that have ``param`` go on with ``sharded``, which has replaced it.

    ``param`` gives up its memory.
    """
    mark_goes_on_as(param, sharded)
    param.data = param.data.new_empty(0)


def goes_on_as(param: nn.Parameter) -> nn.Parameter | None:
    """Return the parameter that takes ``param``'s place in optimizers; None if none may."""
    sharded: nn.Parameter | None = getattr(param, _GOES_ON_AS, None)
    later = None if sharded is None else goes_on_as(sharded)
    return sharded if later is None else later


def carry_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Set the attributes on ``target`` that users have set on ``source``.

    Users group the parameters of an optimizer by such attributes, for example.
    """
    given = vars(source).items()
    vars(target).update({name: value for name, value in given if not name.startswith(_OURS)})


# The ids of sharded parameters that summoned ones will be written into.
_overwritten: set[int] = set()


def mark_overwritten(sharded: nn.Parameter, value: bool) -> None:
    """Remember whether ``sharded`` is summoned, and will be written when that ends."""
    (_overwritten.add if value else _overwritten.discard)(id(sharded))


def is_any_overwritten(params: Iterable[nn.Parameter]) -> bool:
    """Return whether writes into some of ``params`` would be lost now."""
    return bool(_overwritten) and any(id(goes_on_as(p) or p) in _overwritten for p in params)


def is_sharded(param: nn.Parameter) -> bool:
    """Return whether a unit has ``param`` as a sharded parameter."""
    return hasattr(param, _SHARDED_IN)


def mark_unsharded(unsharded: nn.Parameter, name: str) -> None:
    """Remember that modules have ``unsharded`` as ``name`` while its unit is unsharded."""
    setattr(unsharded, _UNSHARDED, name)


def unsharded_name(param: nn.Parameter) -> str | None:
    """Return the name of an unsharded parameter; None for other parameters."""
    name: str | None = getattr(param, _UNSHARDED, None)
    return name
