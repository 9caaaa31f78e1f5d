"""The steps of ``FullyShardedDataParallel`` before its unit is made.

It translates FSDP1's arguments, wraps the modules that a policy chooses, and materialises, moves
and broadcasts the tensors of the unit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.fully_sharded_data_parallel import (
    FullyShardedDataParallel as TorchFSDP,
)
from torch.distributed.fsdp.wrap import (
    _construct_wrap_fn,
    _Policy,
    _post_order_apply,
    _recursive_wrap,
)
from torch.distributed.tensor import DTensor

from fsdp_ext._util.errors import MisuseError
from fsdp_ext._util.names import WRAPPED_BY_FSDP1, without_fsdp1
from fsdp_ext._util.numbers import as_bool
from fsdp_ext._util.warn import warn_caller
from fsdp_ext.comm.transports import device_of
from fsdp_ext.fsdp1.groups import HYBRID
from fsdp_ext.sharding.api.arguments import check_class, check_dtypes, has_no_forward
from fsdp_ext.sharding.params.flat_parameter import NAME as FLAT
from fsdp_ext.sharding.params.optimizer_in_backward import has_optimizer_in_backward
from fsdp_ext.sharding.params.ownership import is_sharded, keeps_own_rows
from fsdp_ext.sharding.root.module_state import managed_params

CHECKPOINTED = "_checkpoint_wrapped_module"
# None frees the parameters after forward, except the root's, as FSDP1 does.
RESHARD_AFTER_FORWARD = {
    ShardingStrategy.FULL_SHARD: None,
    ShardingStrategy.SHARD_GRAD_OP: False,
    ShardingStrategy.NO_SHARD: False,
    ShardingStrategy.HYBRID_SHARD: None,
    ShardingStrategy._HYBRID_SHARD_ZERO2: False,
}


def without_checkpointing(name: str) -> str:
    """Return a name without the names of activation checkpointing's wrappers."""
    return name.replace(f"{CHECKPOINTED}.", "")


def is_wrapper(module: nn.Module) -> bool:
    """Return whether ``module`` is a ``FullyShardedDataParallel``, ours or PyTorch's."""
    return WRAPPED_BY_FSDP1 in module._modules


def check_booleans(arguments: Mapping[str, object]) -> None:
    """Raise TypeError if an argument that has to be a bool is not one."""
    for name in ("sync_module_states", "forward_prefetch", "limit_all_gathers", "use_orig_params"):
        as_bool("FullyShardedDataParallel", name, arguments[name])


def check_arguments(
    strategy: ShardingStrategy,
    cpu_offload: CPUOffload | None,
    backward_prefetch: BackwardPrefetch | None,
    precision: MixedPrecision,
    param_init_fn: Callable[[nn.Module], None] | None,
) -> None:
    """Check the arguments that name no module and no ranks."""
    advice = "Pass ShardingStrategy.FULL_SHARD."
    check_class("sharding_strategy", strategy, ShardingStrategy, advice)
    check_class("cpu_offload", cpu_offload, CPUOffload, "Pass CPUOffload(offload_params=True).")
    if not (param_init_fn is None or callable(param_init_fn)):
        raise ValueError(
            f"param_init_fn is {param_init_fn!r}, but has to be callable. Pass a function of a "
            "module, or None."
        )
    advice = "Pass MixedPrecision(param_dtype=...)."
    check_class("mixed_precision", precision, MixedPrecision, advice)
    check_dtypes("mixed_precision", precision, cast="buffer_dtype")
    for name in ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"):
        as_bool("mixed_precision", name, getattr(precision, name))
    if cpu_offload is not None:
        as_bool("cpu_offload", "offload_params", cpu_offload.offload_params)
    if precision.param_dtype is not None and os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1":
        raise NotImplementedError(
            "FSDP_USE_FULL_PREC_IN_EVAL is 1, but evaluation here has the param_dtype of training. "
            "Unset it, or leave out param_dtype and train under torch.autocast."
        )
    advice = "Pass BackwardPrefetch.BACKWARD_PRE."
    check_class("backward_prefetch", backward_prefetch, BackwardPrefetch, advice)


def check_communication_hook(is_root: bool, wrappers: Iterable[Any], hook: object) -> None:
    """Raise for a communication hook that cannot be set, or not now."""
    if not callable(hook):
        raise ValueError(f"register_comm_hook got {hook!r}. Pass a function.")
    # Two of these messages are FSDP1's, word for word, because scripts compare them as a whole.
    if not is_root:
        raise MisuseError("register_comm_hook can only be called on a root instance.")
    for wrapper in wrappers:
        if wrapper.sharding_strategy in HYBRID:
            raise MisuseError(
                "Communication hook is not supported for hybrid strategies, which reduce gradients "
                f"in two steps, and a wrapper has {wrapper.sharding_strategy}. Use another "
                "strategy."
            )
        if wrapper._comm_hook is not None:
            raise MisuseError("A communication hook is already registered")
        if wrapper._fsdp_ext_unit.root is not None:
            raise RuntimeError(
                "register_comm_hook was called after the first forward. Call it before."
            )


def check_same_ranks(outer: ShardingStrategy, inner: ShardingStrategy) -> None:
    """Raise NotImplementedError if two wrappers of one model would shard over different ranks."""
    for kind in ((ShardingStrategy.NO_SHARD,), HYBRID):
        if (outer in kind) != (inner in kind):
            raise NotImplementedError(
                f"wrappers of one model have the strategies {inner} and {outer}, which shard over "
                "different ranks. That is not supported; pass the same sharding_strategy to each."
            )


def resolve_device(device_id: Any) -> torch.device | None:
    """Return the device that a unit's tensors move to; None if they stay."""
    try:
        return None if device_id is None else torch.device(device_id)
    except (RuntimeError, TypeError, ValueError) as error:
        of_right_type = isinstance(device_id, (int, str)) and not isinstance(device_id, bool)
        kind = ValueError if of_right_type else TypeError
        raise kind(
            f"device_id is {device_id!r}, which is no device of this machine. Pass "
            "torch.cuda.current_device() on GPUs, or leave device_id out on CPUs."
        ) from error


def resolve_ignored(
    root: nn.Module, modules: Iterable[Any] | None, states: Iterable[Any] | None
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Return the ignored modules, with all modules below them, and the ignored parameters."""
    if modules is not None and states is not None:
        raise ValueError("both ignored_modules and ignored_states were passed. Pass one of them.")
    for name, states_given in (("ignored_modules", modules), ("ignored_states", states)):
        if states_given is not None and not isinstance(states_given, Iterable):
            raise TypeError(f"{name} is {states_given!r}. Pass a list of modules, or leave it out.")
    given = list(modules or states or ())
    kinds = (nn.Module,) if modules is not None else (nn.Module, nn.Parameter)
    if not all(isinstance(state, kinds) for state in given):
        types = sorted({type(state) for state in given}, key=repr)
        expected, instead = (
            ("ignored_modules expects nn.Module", "Pass parameters as ignored_states.")
            if modules is not None
            else ("ignored_states expects nn.Parameter or nn.Module", "Leave others out.")
        )
        raise ValueError(f"{expected} list elements but got types {types}. {instead}")
    if any(isinstance(state, nn.Module) and is_wrapper(state) for state in given):
        raise ValueError(
            "ignored modules should not include FSDP modules, but one of these is wrapped already. "
            "Leave it out: its parameters belong to its own wrapper."
        )
    ignored: set[nn.Module] = set()
    params: set[nn.Parameter] = set()
    for state in given:
        if isinstance(state, nn.Module):
            ignored.update(state.modules())
            params.update(state.parameters())
        else:
            params.add(state)
    if root in ignored:
        warn_caller(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will "
            "result in all parameters being ignored. Pass modules inside of it."
        )
    return ignored, params


def check_single_device(devices: Iterable[torch.device], device_id: torch.device | None) -> None:
    """Raise RuntimeError if parameters are on several GPUs and there is no ``device_id``.

    Parameters on meta are materialised, and those on the host move to the mesh's device.
    """
    there = {device for device in devices if device.type not in ("cpu", "meta")}
    if len(there) > 1 and device_id is None:
        raise RuntimeError(
            f"FSDP only supports single device modules but got params on "
            f"{sorted(map(str, there))}. Move the module to one device, or pass device_id."
        )


def check_container(module: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Check a list or dict of modules that has no forward, whose elements have to be wrapped."""
    if not has_no_forward(module):
        return
    kind = type(module).__name__
    left = managed_params([module], ignored)
    if left:
        raise ValueError(
            f"FullyShardedDataParallel got a {kind}, which has no forward that would gather "
            f"'{next(iter(left.values()))}'. Wrap its elements instead."
        )
    warn_caller(
        "FSDP will not all-gather parameters for containers that do not implement forward: a "
        f"{kind} was wrapped. Its elements are wrapped, too, so leave its own wrapper out."
    )


_children_are_wrapped: ContextVar[bool] = ContextVar("children_are_wrapped", default=False)


def are_children_wrapped() -> bool:
    """Return whether the ``auto_wrap_policy`` of an outer wrapper is making wrappers."""
    return _children_are_wrapped.get()


def wrap_children(
    root: nn.Module,
    policy: Callable[..., bool] | _Policy,
    ignored: set[nn.Module],
    ignored_params: set[nn.Parameter],
    kwargs: dict[str, Any],
    wrapper_class: type[Any],
) -> None:
    """Wrap the modules below ``root`` that ``policy`` chooses.

    ``wrapper_class`` is ``FullyShardedDataParallel``, whose file imports this one.
    """
    for name, module in root.named_modules():
        if is_wrapper(module):
            raise ValueError(
                "FSDP auto wrapping requires modules to not already have FSDP applied but found "
                f"{name} in the model: '{name}' is wrapped already. Pass a policy, or wrap modules "
                "yourself, not both."
            )
    targets: dict[nn.Module, dict[str, Any]] = {}
    if isinstance(policy, _Policy):
        targets = policy._run_policy(root, ignored, kwargs)
    elif callable(policy):

        def choose(module: nn.Module) -> nn.Module:
            targets[module] = dict(kwargs)
            return module

        _recursive_wrap(root, policy, choose, ignored, ignored_params, only_wrap_children=True)
    else:
        raise TypeError(
            f"auto_wrap_policy is a {type(policy).__name__}. Pass a callable, or a policy of "
            "torch.distributed.fsdp.wrap."
        )
    in_float32: set[nn.Module] = set()
    if kwargs["mixed_precision"] is not None:
        classes = tuple(kwargs["mixed_precision"]._module_classes_to_ignore)
        in_float32 = {m for m in root.modules() if isinstance(m, classes)} - ignored
    for module in in_float32:
        targets.setdefault(module, dict(kwargs))["mixed_precision"] = None

    def wrap(module: nn.Module, **its_kwargs: Any) -> nn.Module:
        if type(module).forward is nn.Module.forward:
            return module
        is_inherited = its_kwargs["device_mesh"] is kwargs["device_mesh"]
        if its_kwargs["process_group"] is not None and is_inherited:  # the policy gave the group
            its_kwargs["device_mesh"] = None
        wrapper: nn.Module = wrapper_class(module, **its_kwargs)
        wrapper.__dict__["_runs_in_float32"] = module in in_float32
        return wrapper

    token = _children_are_wrapped.set(True)
    try:
        _post_order_apply(root, _construct_wrap_fn(root, targets, wrap))
    finally:
        _children_are_wrapped.reset(token)


def wrap_under_all_names(root: nn.Module) -> None:
    """Replace modules in ``root`` that have a wrapper, and a second name without it."""
    wrappers = [module for module in root.modules() if is_wrapper(module)]
    wrapper_of = {inner: m for m in wrappers for inner in (m._modules[WRAPPED_BY_FSDP1], m.module)}
    for parent in [module for module in root.modules() if not is_wrapper(module)]:
        if parent in wrapper_of and CHECKPOINTED in parent._modules:
            continue  # its child is what the wrapper wraps
        for name, child in list(parent._modules.items()):
            wrapper = child
            while wrapper in wrapper_of:
                wrapper = wrapper_of[wrapper]
            if wrapper is not child:
                setattr(parent, name, wrapper)


def own_modules(root: nn.Module, ignored: set[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules of ``root``'s unit by name: neither ignored nor under another wrapper."""
    own: dict[str, nn.Module] = {}
    seen = set(ignored)

    def collect(name: str, module: nn.Module) -> None:
        # Where only its other name is wrapped, a module has its wrapper's flat parameter.
        if module not in seen and not is_wrapper(module) and FLAT not in module._parameters:
            seen.add(module)
            own[name] = module
            for child_name, child in module.named_children():
                collect(f"{name}.{child_name}" if name else child_name, child)

    collect("", root)
    return own


def refuse_torchs_wrappers(module: nn.Module) -> None:
    """Raise MisuseError if PyTorch's FSDP1 wraps something in ``module``."""
    for name, inside in module.named_modules():
        if isinstance(inside, TorchFSDP):
            raise MisuseError(
                f"'{without_fsdp1(name) or type(module).__name__}' is wrapped by PyTorch's "
                "FullyShardedDataParallel. Use one of the two systems for a whole model."
            )


def _named_parameters(
    own: dict[str, nn.Module], ignored: set[nn.Parameter]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that the modules ``own`` have themselves, without ignored ones."""
    for prefix, module in own.items():
        for name, param in module.named_parameters(prefix, recurse=False):
            if param not in ignored:
                yield name, param


def refuse_subclasses(own: dict[str, nn.Module], ignored: set[nn.Parameter]) -> None:
    """Raise NotImplementedError if a parameter that no unit has made needs ``fully_shard``."""
    for name, param in _named_parameters(own, ignored):
        if is_sharded(param):
            continue
        if isinstance(param, DTensor):
            raise NotImplementedError(
                f"parameter '{name}' is a DTensor already (tensor parallelism), which "
                "FullyShardedDataParallel does not support. Use fully_shard, which does."
            )
        if keeps_own_rows(name, param):
            raise NotImplementedError(
                f"parameter '{name}' is a {type(param).__name__}, and FullyShardedDataParallel "
                "does not call fsdp_pre_all_gather. Use fully_shard, which does."
            )


def check_flattened(own: dict[str, nn.Module], ignored: set[nn.Parameter]) -> None:
    """Raise ValueError if these modules' parameters cannot be one flat parameter, as FSDP1 does.

    Raise RuntimeError if a parameter has optimizers that step in backward. FSDP1 drops them.
    """
    params = {param: name for name, param in _named_parameters(own, ignored)}
    for param, name in params.items():
        if has_optimizer_in_backward(param):
            raise RuntimeError(
                f"parameter '{name}' has an optimizer that steps in backward, which is only "
                "supported with use_orig_params=True. Pass that, or make the optimizer after "
                "wrapping and call its step() after backward."
            )
    first: Any = next(iter(params), None)
    for kind, attribute in (("dtypes", "dtype"), ("requires_grad", "requires_grad")):
        for param, name in params.items():
            if getattr(param, attribute) != getattr(first, attribute):
                raise ValueError(
                    f"use_orig_params=False makes one parameter of '{params[first]}' and '{name}', "
                    f"which differ in {kind}. Pass use_orig_params=True, or wrap their modules "
                    "apart."
                )
    integer = [name for param, name in params.items() if not param.is_floating_point()]
    if integer:
        raise ValueError(
            f"use_orig_params=False cannot make a flat parameter of '{integer[0]}', which has "
            "integers. Pass use_orig_params=True, or ignore it."
        )


def place(
    own: Mapping[str, nn.Module],
    ignored: Container[torch.Tensor],
    ignored_modules: Iterable[nn.Module],
    device: torch.device | None,
    mesh: DeviceMesh | None,
) -> None:
    """Move the modules' own tensors to ``device``, and give them rank 0's values on ``mesh``.

    As under FSDP1, buffers of ignored modules get rank 0's values, too.
    """
    tensors = [tensor for tensor in own_tensors(own.values()) if tensor not in ignored]
    if device is not None:
        for tensor in tensors:
            tensor.data = tensor.data.to(device)
    if mesh is not None:
        of_ignored = (
            buffer.to_local() if isinstance(buffer, DTensor) else buffer
            for module in ignored_modules
            for buffer in module.buffers(recurse=False)
            if not buffer.is_meta
        )
        broadcast([*dict.fromkeys((*tensors, *of_ignored))], mesh)


def own_tensors(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return the tensors that these modules own themselves, each once."""
    found: dict[torch.Tensor, None] = {}
    for module in modules:
        found.update(dict.fromkeys(module.parameters(recurse=False)))
        found.update(dict.fromkeys(module.buffers(recurse=False)))
    return [tensor for tensor in found if not isinstance(tensor, DTensor)]


def own_parameters(modules: Iterable[nn.Module]) -> dict[tuple[nn.Module, str], nn.Parameter]:
    """Return the parameters that these modules own themselves, by module and attribute."""
    return {
        (module, name): param
        for module in modules
        for name, param in module._parameters.items()
        if param is not None
    }


def materialise(
    own: dict[str, nn.Module],
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
) -> None:
    """Give memory and values to the tensors of ``own`` that are on meta."""
    if not any(map(_is_on_meta, own.values())):
        return
    for name, module in own.items():
        if param_init_fn is not None:
            param_init_fn(module)
        elif _is_on_meta(module):
            if not callable(getattr(module, "reset_parameters", None)):
                raise TypeError(
                    f"'{name}' is on meta, and {type(module).__name__} has no reset_parameters "
                    "method that would initialise it. Pass param_init_fn."
                )
            with torch.no_grad():
                module.to_empty(device=device, recurse=False)
                cast(Any, module).reset_parameters()
    on_meta = [name for name, module in own.items() if _is_on_meta(module)]
    if on_meta:
        raise ValueError(
            f"{on_meta} are still on meta after param_init_fn. Call "
            "module.to_empty(device=..., recurse=False) in it."
        )


def _is_on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in own_tensors([module]))


def broadcast(tensors: list[torch.Tensor], mesh: DeviceMesh) -> None:
    """Overwrite ``tensors`` with the tensors of the mesh's first rank.

    They are sent as bytes, which every backend can do.
    """
    given = [tensor.detach() for tensor in tensors if tensor.numel() > 0]
    if not given:
        return
    rows = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in given]
    flat = torch.cat([row.to(device_of(mesh.device_type, row)) for row in rows])
    for group in mesh.get_all_groups():
        dist.broadcast(flat, group=group, group_src=0)
    received = torch.split(flat, [row.numel() for row in rows])
    for tensor, row in zip(given, received, strict=True):
        tensor.copy_(row.clone().view(tensor.dtype).view(tensor.shape))  # the clone is aligned


def cast_buffers(own: dict[str, nn.Module], dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Cast floating-point buffers to ``dtype``; return their former dtypes by name."""
    before: dict[str, torch.dtype] = {}
    for module_name, module in own.items():
        for buffer_name, buffer in module.named_buffers(module_name, recurse=False):
            if dtype is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                before[without_checkpointing(buffer_name)] = buffer.dtype
                buffer.data = buffer.data.to(dtype)
    return before
