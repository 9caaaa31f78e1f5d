"""What users hand over, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_ext import _build_info
from fsdp_ext.sharding.settings import AUTO

# Set on a parameter that a unit has taken over: the names of its replacement and of the unit.
SHARDED_AS = "_fsdp_ext_sharded_as"
# Set on the replacement: the name of the unit.
SHARDED_IN = "_fsdp_ext_sharded_in"


def resolve_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Return ``mesh``, or the mesh of all ranks, after checking that it can be sharded over.

    Raises:
        RuntimeError: if there is no process group.
        ValueError: if the mesh is not one-dimensional or not of a device this build supports.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "fully_shard expects an initialised process group but there is none; call "
            "torch.distributed.init_process_group first (torchrun sets what it needs)"
        )
    if mesh is None:
        on_gpu = _build_info.BUILD_KIND == "CUDA" and torch.cuda.is_available()
        mesh = init_device_mesh("cuda" if on_gpu else "cpu", (dist.get_world_size(),))
    if mesh.ndim == 2:
        raise NotImplementedError(
            f"fully_shard expects a 1-D mesh but got a 2-D one, {tuple(mesh.shape)}; hybrid "
            "sharding is not supported yet, pass one dimension of it: mesh['name']"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"fully_shard expects a 1-D mesh but got {mesh.ndim} dimensions, {tuple(mesh.shape)}; "
            "pass one dimension of it: mesh['name']"
        )
    check_device_type(mesh.device_type)
    return mesh


def check_device_type(device_type: str) -> None:
    """Raise ValueError if this build or this machine cannot use such devices."""
    if device_type == "cpu":
        return
    if device_type != "cuda":
        raise ValueError(
            f"fully_shard expects a mesh of device type 'cuda' or 'cpu' but got '{device_type}'; "
            "make it with init_device_mesh('cpu', ...)"
        )
    if _build_info.BUILD_KIND != "CUDA":
        raise ValueError(
            "fully_shard expects a mesh of device type 'cpu', which is what this CPU build of "
            "fsdp_ext supports, but got 'cuda'; install it again where nvcc and a CUDA build of "
            "torch are (FORCE_CUDA=1 says what is missing)"
        )
    if not torch.cuda.is_available():
        raise ValueError(
            "fully_shard expects a GPU for a mesh of device type 'cuda' but torch finds none; "
            "install or update the NVIDIA driver (nvidia-smi shows it), or use a mesh of 'cpu'"
        )


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device: for CUDA, the current one."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def check_types(mesh: object, mp_policy: object, ignored_params: Iterable[object] | None) -> None:
    """Raise TypeError for arguments of ``fully_shard`` that are of another type altogether."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh expects a DeviceMesh or None but got {mesh!r}; make one with "
            "torch.distributed.device_mesh.init_device_mesh"
        )
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy expects a MixedPrecisionPolicy but got {mp_policy!r}; pass "
            "MixedPrecisionPolicy(param_dtype=...)"
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mp_policy, name)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"mp_policy expects {name} to be a torch.dtype or None but got {dtype!r}; pass "
                "torch.bfloat16, say"
            )
    if ignored_params is not None and not isinstance(ignored_params, Iterable):
        raise TypeError(
            f"ignored_params expects a set of parameters but got {ignored_params!r}; take them "
            "from module.parameters()"
        )
    for param in ignored_params or ():
        if not isinstance(param, nn.Parameter):
            raise TypeError(
                f"ignored_params expects a set of parameters but it has a {type(param).__name__}; "
                "take them from module.parameters()"
            )


def check_modules(modules: Iterable[nn.Module]) -> None:
    """Raise ValueError for what cannot be a unit's module."""
    for module in modules:
        name = type(module).__name__
        if not isinstance(module, nn.Module):
            raise ValueError(f"fully_shard expects a module or a list of modules but got {name}")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and (
            type(module).forward is nn.Module.forward
            or type(module).forward is getattr(nn.ModuleList, "forward", None)
        ):
            raise ValueError(
                f"fully_shard expects modules whose forward is called but got a {name}, which has "
                "none; shard its elements instead"
            )
        if hasattr(module, "_fsdp_ext_unit"):
            raise ValueError(
                f"fully_shard expects a module that is not sharded yet but got a {name} that is; "
                "shard each module once"
            )
        if any(
            cls.__name__ in ("FSDPModule", "FullyShardedDataParallel")
            for cls in type(module).__mro__
        ):
            raise ValueError(
                f"fully_shard expects a module that PyTorch's own FSDP has not sharded but got "
                f"{name}; use one of the two"
            )


def check_parameter(name: str, param: nn.Parameter, device: torch.device) -> None:
    """Raise for a parameter that cannot be sharded, naming it."""
    owner = getattr(param, SHARDED_AS, None)
    if owner is not None:
        raise ValueError(
            f"expects every parameter in one unit but '{name}' is shared with '{owner[0]}' of "
            f"{owner[1]}, a unit already; put both modules into one unit: fully_shard([a, b])"
        )
    unit = getattr(param, SHARDED_IN, None)
    if unit is not None:
        raise ValueError(
            f"expects parameters that no unit has yet but '{name}' is in that of {unit} already; "
            "call fully_shard on the layers first and on the whole model last"
        )
    if isinstance(param, DTensor):
        raise NotImplementedError(
            f"parameter '{name}' is a DTensor already (tensor parallelism); that is not supported "
            "yet"
        )
    if param.ndim == 0:
        raise ValueError(
            f"expects parameters of at least one dimension but '{name}' is a scalar; change it to "
            "a 1-D tensor with one element"
        )
    if param.is_complex():
        raise ValueError(
            f"expects real parameters but '{name}' is {param.dtype}; store it as a real tensor "
            "with a last dimension of 2 and use torch.view_as_complex in forward"
        )
    # From the host, shards move to the device, as in FSDP2.
    if param.device.type not in ("meta", "cpu", device.type):
        raise ValueError(
            f"expects parameters on {device} (or meta) but '{name}' is on {param.device}; move the "
            "module first"
        )
    if not param.is_contiguous():
        raise ValueError(
            f"expects contiguous parameters but '{name}' has strides {param.stride()} for shape "
            f"{tuple(param.shape)}; make it contiguous first"
        )


def mark_sharded(param: nn.Parameter, sharded: nn.Parameter, name: str, unit: str) -> None:
    """Remember that ``sharded``, which is ``name`` of ``unit``, has replaced ``param``."""
    setattr(param, SHARDED_AS, (name, unit))
    setattr(sharded, SHARDED_IN, unit)


Auto = Literal["auto"]


def resolve_bucket_bytes(value: int | Auto | None) -> int | Auto | None:
    """Return ``bucket_bytes`` as it is.

    Raises:
        ValueError: if it is none.
    """
    expected = "a number of bytes, 0 or more, 'auto'"
    return _resolve("bucket_bytes", value, expected, "0 sends each unit by itself")


def resolve_prefetch(value: int | Auto | None) -> int | Auto | None:
    """Return ``prefetch`` as it is.

    Raises:
        ValueError: if it is none.
    """
    return _resolve("prefetch", value, "a number of buckets, 0 or more, 'auto'", "1 is usual")


def resolve_max_message_bytes(value: int | None) -> int | None:
    """Return ``max_message_bytes`` as it is.

    Raises:
        ValueError: if it is none.
    """
    if value is None or is_at_least(value, 1):
        return value
    raise ValueError(
        f"max_message_bytes expects a number of bytes, 1 or more, or None but got {value!r}; leave "
        "it out for any size"
    )


def _resolve(name: str, value: int | Auto | None, expected: str, advice: str) -> int | Auto | None:
    if value is None or value == AUTO or is_at_least(value, 0):
        return value
    raise ValueError(f"{name} expects {expected} or None but got {value!r}; {advice}")


def is_at_least(value: object, least: int) -> bool:
    """Return whether ``value`` is an integer, and no bool, of at least so much."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
