"""Checks of the arguments of ``fully_shard``, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from fsdp_ext import _build_info
from fsdp_ext._util.errors import MisuseError
from fsdp_ext._util.numbers import as_bool, is_at_least
from fsdp_ext.comm.inline_group import is_inline
from fsdp_ext.sharding.params.dtensors import shards_before
from fsdp_ext.sharding.params.ranks import Ranks
from fsdp_ext.sharding.params.settings import MessageBytes
from fsdp_ext.sharding.root.module_state import state_of

# How to make a process group without torchrun.
_IN_ONE_PROCESS = """In a single process, such as a notebook, run these two lines first:

import torch.distributed as dist
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)"""
# The dtypes that C++ can compute gathers and sums in.
_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What is done in each dtype that C++ computes in, as errors say it.
_USES = {
    "param_dtype": "parameters cannot be gathered",
    "reduce_dtype": "gradients cannot be added",
}
_REINSTALL = (
    "or reinstall fsdp_ext where nvcc and a CUDA build of torch are; FORCE_CUDA=1 says what is "
    "missing."
)
MAKE_MESH = "Make one with torch.distributed.device_mesh.init_device_mesh."
# More buckets than any model has.
_MOST_BUCKETS = 2**16


def ensure_process_group() -> None:
    """Make the process group that the environment describes if there is none, as FSDP2 does."""
    if not dist.is_available() or dist.is_initialized():
        return
    try:
        dist.init_process_group()
    except ValueError as error:
        raise ValueError(
            "fully_shard needs a process group, and could not make one from the environment "
            f"({error}). Start the script with torchrun, or call "
            f"torch.distributed.init_process_group first. {_IN_ONE_PROCESS}"
        ) from error


def resolve_mesh(mesh: DeviceMesh | None, devices: Iterable[torch.device] = ()) -> DeviceMesh:
    """Return ``mesh``, or the mesh of all ranks, after checking that it can be sharded over.

    Args:
        mesh: the mesh, or None for all ranks.
        devices: where the model is.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs an initialised process group, and there is none. Call "
            "torch.distributed.init_process_group first; torchrun sets what it needs. "
            f"{_IN_ONE_PROCESS}"
        )
    if mesh is None:
        mesh = init_device_mesh(default_device_type(devices), (dist.get_world_size(),))
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}, a {mesh.ndim}-D mesh "
            f"{tuple(mesh.shape)}. Pass one of its dimensions, e.g. {_example_of(mesh)}, or two "
            "for hybrid sharding."
        )
    check_device_type(mesh.device_type)
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.tolist()}. Call "
            "fully_shard only on the ranks of its mesh."
        )
    if mesh.ndim == 2:
        _check_order(mesh.mesh.tolist())
    return mesh


def _check_order(rows: list[list[int]]) -> None:
    """Raise ValueError if ranks in a column of a 2-D mesh would have different shards.

    Process groups number the ranks of a row in rising order, whatever their order in the mesh.
    """
    orders = {tuple(sorted(range(len(row)), key=row.__getitem__)) for row in rows}
    if len(orders) > 1:
        raise ValueError(
            f"fully_shard got a mesh of ranks {rows}, whose rows are not in one order. Ranks in a "
            "column have the same shard, but process groups number the ranks of a row in rising "
            f"order. Make the mesh of ranks {[sorted(row) for row in rows]}."
        )


def _example_of(mesh: DeviceMesh) -> str:
    """Return how to select a dimension of a mesh to shard over."""
    names = mesh.mesh_dim_names
    if not names:
        return 'mesh["dp"] of a mesh made with mesh_dim_names=("dp", ...)'
    return f'mesh["{next((name for name in names if "shard" in name), names[0])}"]'


def default_device_type(devices: Iterable[torch.device] = ()) -> str:
    """Return the kind of devices of a mesh that is made without one, for a model on ``devices``.

    Raises:
        ValueError: if GPUs are meant, and this is a CPU build.
    """
    if not torch.cuda.is_available():
        return "cpu"
    if _build_info.BUILD_KIND == "CUDA":
        return "cuda"
    if any(device.type == "cuda" for device in devices):
        meant = "the model is on a GPU"
    elif _has_backend_for_gpus():
        meant = f"the process group has a backend for GPUs ('{dist.get_backend_config()}')"
    else:
        return "cpu"
    raise ValueError(
        f"fsdp_ext got no mesh, and {meant}, but this is a CPU build of fsdp_ext. Pass a mesh of "
        f"'cpu', {_REINSTALL}"
    )


def _has_backend_for_gpus() -> bool:
    """Return whether the default process group has a backend that is for GPUs alone.

    Gloo, for example, is for all devices by default.
    """
    if not dist.is_initialized():
        return False
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    return "cuda" in backends and backends["cuda"] != backends.get("cpu")


def check_device_type(device_type: str) -> None:
    """Raise ValueError if this build or this machine cannot use such devices."""
    if device_type == "cpu":
        return
    if device_type != "cuda":
        raise ValueError(
            f"fully_shard got a mesh of device type '{device_type}' but supports 'cuda' and 'cpu'. "
            "Make the mesh with init_device_mesh('cpu', ...)."
        )
    if _build_info.BUILD_KIND != "CUDA":
        raise ValueError(
            "fully_shard got a mesh of device type 'cuda', but this is a CPU build of fsdp_ext. "
            f"Use a mesh of 'cpu', {_REINSTALL}"
        )
    if not torch.cuda.is_available():
        raise ValueError(
            "fully_shard got a mesh of device type 'cuda', but torch finds no GPU. Install or "
            "update the NVIDIA driver (nvidia-smi shows it), or use a mesh of 'cpu'."
        )


def check_class(argument: str, value: object, kind: type[Any], advice: str) -> None:
    """Raise TypeError unless an argument is None or an instance of ``kind``."""
    if not (value is None or isinstance(value, kind)):
        name = f"an {kind.__name__}" if kind.__name__[0] in "AEIOU" else f"a {kind.__name__}"
        raise TypeError(f"{argument} is {value!r} but must be {name} or None. {advice}")


def check_types(mesh: object, mp_policy: object, shard_placement_fn: object) -> None:
    """Raise TypeError for arguments of ``fully_shard`` of a wrong type."""
    check_class("mesh", mesh, DeviceMesh, MAKE_MESH)
    check_policy(mp_policy)
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(
            f"shard_placement_fn is {shard_placement_fn!r}, which cannot be called. Pass a "
            "function of a parameter that returns a Shard or None."
        )


def resolve_ignored_params(given: object) -> set[nn.Parameter]:
    """Return ``ignored_params``, which may be an iterator, or raise TypeError."""
    if given is not None and not isinstance(given, Iterable):
        raise TypeError(
            f"ignored_params is {given!r} but must be a set of parameters. Take them from "
            "module.parameters()."
        )
    ignored = list(given or ())
    for param in ignored:
        if not isinstance(param, nn.Parameter):
            raise TypeError(
                f"ignored_params contains a {type(param).__name__} but must be a set of "
                "parameters. Take them from module.parameters()."
            )
    return set(ignored)


def check_policy(policy: object) -> None:
    """Raise TypeError if this is no ``MixedPrecisionPolicy`` or has values of wrong types."""
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy is {policy!r} but must be a MixedPrecisionPolicy. Pass "
            "MixedPrecisionPolicy(param_dtype=...)."
        )
    check_dtypes("mp_policy", policy, cast="output_dtype")
    as_bool("mp_policy", "cast_forward_inputs", policy.cast_forward_inputs)
    override = getattr(policy, "param_dtype_override_fn", None)
    if override is not None and not callable(override):
        raise TypeError(
            f"mp_policy has param_dtype_override_fn={override!r}, which cannot be called. Pass a "
            "function of a parameter, or None."
        )
    grad_dtype = getattr(policy, "grad_dtype", None)
    if grad_dtype is not None:
        raise NotImplementedError(
            f"mp_policy has grad_dtype={grad_dtype}, which is supported for parameters only. Leave "
            "it None, and set grad_dtype of the parameters before fully_shard."
        )


def check_dtypes(argument: str, policy: object, *, cast: str) -> None:
    """Check the dtypes of a policy for mixed precision.

    Args:
        argument: the name of the user's argument.
        policy: the policy.
        cast: the name of its dtype that tensors are only cast to.
    """
    for name in (*_USES, cast):
        dtype = getattr(policy, name)
        if dtype is None:
            continue
        if not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"{argument} has {name}={dtype!r}, which must be a torch.dtype or None. Pass, for "
                "example, torch.bfloat16."
            )
        if name in _USES and dtype not in _SUMMED:
            raise ValueError(
                f"{argument} has {name}={dtype}, in which {_USES[name]}. Pass torch.float16, "
                "torch.bfloat16, torch.float32, torch.float64 or None."
            )
        if not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(
                f"{argument} has {name}={dtype}, which is no floating-point dtype. Pass one, such "
                "as torch.float32, or None."
            )


def resolve_offload(policy: object, device_type: str) -> bool:
    """Return whether the shards of GPUs are on the host. The shards of CPUs are there anyway."""
    check_class("offload_policy", policy, OffloadPolicy, "Pass OffloadPolicy(), the default.")
    if not isinstance(policy, CPUOffloadPolicy):
        return False
    as_bool("offload_policy", "pin_memory", policy.pin_memory)
    if device_type == "cpu":
        return False
    if not policy.pin_memory:
        raise NotImplementedError(
            "offload_policy is CPUOffloadPolicy(pin_memory=False), but GPUs can only read pinned "
            "memory of the host. Pass CPUOffloadPolicy()."
        )
    return True


@dataclass(frozen=True)
class ParamsOnMesh:
    """The parameters of one ``fully_shard`` call on one mesh, which become a unit."""

    ranks: Ranks  # the mesh
    # The parameters, with names for error messages.
    params: dict[nn.Parameter, str] = field(default_factory=dict)
    # The sharded dimension of each parameter that is not sharded over dimension 0.
    shard_dims: dict[nn.Parameter, int] = field(default_factory=dict)


def resolve_placements(
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    params: Mapping[nn.Parameter, str],
    ranks: Ranks,
) -> list[ParamsOnMesh]:
    """Return the parameters by their meshes, the largest mesh first.

    The first unit of a root has to have the ranks of all others. The order is the same on all
    ranks.
    """
    if shard_placement_fn is None or not params:
        return [ParamsOnMesh(ranks, dict(params))]
    found: dict[DeviceMesh, ParamsOnMesh] = {}
    for param, name in params.items():
        placement = shard_placement_fn(param)
        on = ranks
        if hasattr(placement, "mesh_info"):  # a ShardPlacementResult, which torch 2.11 has not
            on = _ranks_of_placement(placement.mesh_info, name, ranks)
            placement = placement.placement
        on_mesh = found.setdefault(on.mesh, ParamsOnMesh(on))
        on_mesh.params[param] = name
        dim = _shard_dim(placement, param, name)
        if dim == 0:
            continue
        shares = on.size * shards_before(param, dim)
        if param.shape[dim] % shares != 0:
            raise NotImplementedError(
                f"shard_placement_fn returned {placement!r} for parameter '{name}', whose "
                f"dimension {dim} has size {param.shape[dim]}. FSDP does not support uneven "
                f"sharding on dim {dim}, so return a dimension that {shares} ranks divide, or "
                "Shard(0)."
            )
        on_mesh.shard_dims[param] = dim
    return sorted(found.values(), key=lambda on_mesh: -on_mesh.ranks.world_size)


def _ranks_of_placement(mesh_info: Any, name: str, ranks: Ranks) -> Ranks:
    """Return the ranks of the mesh in a ``ShardPlacementResult``."""
    mesh = getattr(mesh_info, "mesh", None)
    if not isinstance(mesh, DeviceMesh):
        raise MisuseError(
            f"shard_placement_fn returned mesh_info={mesh_info!r} for parameter '{name}'. Return "
            "FSDPMeshInfo(mesh, shard_mesh_dim=0)."
        )
    if ranks.spmd is not None:
        if mesh == ranks.mesh:
            return ranks
        raise NotImplementedError(
            f"shard_placement_fn returned another mesh than fully_shard's for parameter '{name}', "
            f"{mesh}, which is not supported with dp_mesh_dims. Shard it over fully_shard's mesh, "
            "or pass it in ignored_params."
        )
    mesh = resolve_mesh(mesh)
    replicates = 0 if mesh.ndim == 2 else None
    if (mesh_info.replicate_mesh_dim, mesh_info.shard_mesh_dim) != (replicates, mesh.ndim - 1):
        raise MisuseError(
            f"shard_placement_fn returned {type(mesh_info).__name__} for parameter '{name}', which "
            f"shards dimension {mesh_info.shard_mesh_dim} of {mesh}. Return FSDPMeshInfo(mesh, "
            "shard_mesh_dim=0) of a 1-D mesh, or HSDPMeshInfo(mesh, shard_mesh_dim=1, "
            "replicate_mesh_dim=0) of a 2-D mesh."
        )
    return ranks if mesh == ranks.mesh else Ranks(mesh)


def _shard_dim(placement: object, param: nn.Parameter, name: str) -> int:
    if placement is None:
        return 0
    if type(placement) is not Shard:
        raise MisuseError(
            f"shard_placement_fn returned {placement!r} for parameter '{name}'. Return a Shard, or "
            "None for Shard(0)."
        )
    dim = placement.dim + param.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < param.ndim:
        raise MisuseError(
            f"shard_placement_fn returned {placement!r} for parameter '{name}'. Shard dim "
            f"{placement.dim} is invalid for {param.ndim}D tensors. Return a Shard of one of the "
            "parameter's dimensions."
        )
    return dim


def check_modules(modules: Iterable[object]) -> None:
    """Raise ValueError if this cannot be a unit's module."""
    for module in modules:
        name = type(module).__name__
        if not isinstance(module, nn.Module):
            raise ValueError(f"fully_shard got a {name}. Pass a module or a list of modules.")
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"fully_shard got a {name}, which has no hooks. Pass the module that was scripted."
            )
        if state_of(module) is not None:
            raise MisuseError(
                f"fully_shard got a {name} that is sharded already. Each distinct composable "
                "distributed API can only be applied to a module once. To shard it again, for "
                "example in a notebook, first run the code that makes the model."
            )
        if any(
            cls.__name__ in ("FSDPModule", "FullyShardedDataParallel")
            for cls in type(module).__mro__
        ):
            raise MisuseError(
                f"fully_shard got a {name} that PyTorch's own FSDP has sharded. Use one of the two."
            )


def has_no_forward(module: object) -> bool:
    """Return whether ``module`` is a list or a dict of modules that nothing calls."""
    return (
        isinstance(module, (nn.ModuleList, nn.ModuleDict))
        and type(module).forward is nn.Module.forward
    )


def check_containers(modules: Iterable[object]) -> None:
    """Raise ValueError for lists and dicts of modules that have no forward."""
    for module in modules:
        if has_no_forward(module):
            raise ValueError(
                "fully_shard does not support containers that do not implement forward, and got a "
                f"{type(module).__name__}: nothing would gather its parameters. Shard its elements "
                "instead."
            )


def reshard_over(value: bool | int | None, ranks: int) -> bool | int | None:
    """Return ``reshard_after_forward`` for a unit that ``ranks`` ranks share, or raise ValueError.

    A number in the result is between 1 and ``ranks``.
    """
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ValueError(
            f"reshard_after_forward is {value!r}. Pass True, False, None or a number of ranks."
        )
    if value < 1 or ranks % value != 0:
        raise ValueError(
            f"reshard_after_forward={value} is not a factor of {ranks}, the number of ranks that "
            "share the parameters. Pass a factor, True or False."
        )
    if value == ranks:
        return True
    return False if value == 1 else value


def resolve_reshard(value: bool | int | None, on_mesh: ParamsOnMesh) -> bool | int | None:
    """Return ``reshard_after_forward``: a bool, a number between 1 and all ranks, or None."""
    ranks = on_mesh.ranks
    value = reshard_over(value, ranks.size)
    if value is None or isinstance(value, bool):
        return value
    if ranks.spmd is not None:
        raise NotImplementedError(
            f"reshard_after_forward={value} is not supported with dp_mesh_dims. FSDP2 does not "
            "support it, either. Pass True or False."
        )
    if is_inline(ranks.shard_group):
        raise NotImplementedError(
            f"reshard_after_forward={value} needs a process group that serves any thread, and "
            f"'{dist.get_backend(ranks.shard_group)}' does not. Use gloo, or pass True or False."
        )
    for param, name in on_mesh.params.items():
        if isinstance(param, DTensor):
            raise NotImplementedError(
                f"reshard_after_forward={value} is not supported for parameter '{name}', which is "
                "a DTensor. FSDP2 does not support it, either. Pass True or False."
            )
    return value


def check_numbers(
    bucket_bytes: int | None = None,
    max_message_bytes: MessageBytes | None = None,
    prefetch: int | None = None,
    check_every: int | None = None,
) -> None:
    """Raise ValueError for one of these arguments of ``fully_shard`` that is out of its range."""
    if not (bucket_bytes is None or is_at_least(bucket_bytes, 0)):
        raise ValueError(
            f"bucket_bytes is {bucket_bytes!r}. Pass a number of bytes below 2**63 (0 sends each "
            "unit by itself), or None."
        )
    asked: Any = max_message_bytes
    limits = asked if isinstance(asked, tuple) and len(asked) == 2 else (asked,)
    if not all(most is None or is_at_least(most, 1) for most in limits):
        raise ValueError(
            f"max_message_bytes is {max_message_bytes!r}. Pass a positive number of bytes below "
            "2**63, None for the default, or a tuple of two of these for gathers and for "
            "reductions."
        )
    if not (prefetch is None or is_at_least(prefetch, 0, _MOST_BUCKETS)):
        raise ValueError(
            f"prefetch is {prefetch!r}. Pass a number of buckets up to {_MOST_BUCKETS} (1 is "
            "usual, 0 turns it off), or None."
        )
    if not (check_every is None or is_at_least(check_every, 1)):
        raise ValueError(
            f"check_every is {check_every!r}. Pass a number of steps below 2**63 (100 is usual, 1 "
            "checks every step), or None for no checks."
        )


def resolve_keep_gather_inputs(caller: str, value: bool | None) -> bool | None:
    """Return ``keep_gather_inputs`` of ``caller`` as a bool or None, or raise TypeError."""
    return None if value is None else as_bool(caller, "keep_gather_inputs", value)
