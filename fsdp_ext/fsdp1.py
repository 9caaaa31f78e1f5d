"""`FullyShardedDataParallel`, the wrapper of PyTorch's FSDP1, as a thin class over `fully_shard`.

A wrapper holds the module as its only child and makes it one unit of `fully_shard`; wrapping a
model with an `auto_wrap_policy` makes the children wrappers first, bottom up. All communication
is the unit's. What is left here is FSDP1's surface: arguments, names, `no_sync`, `clip_grad_norm_`.

Where it differs from torch.distributed.fsdp.FullyShardedDataParallel:
- Parameters are always the module's own, as DTensors with `Shard(0)`; there is no FlatParameter.
- `state_dict` holds these DTensors (FSDP1's SHARDED_STATE_DICT); `load_state_dict` takes DTensors
  and full tensors.
- A wrapper is a root until another wrapper is built around it, with no lazy initialization.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import _Policy
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_ext.fully_shard import fully_shard

__all__ = ["FSDP", "FullyShardedDataParallel"]

_WRAPPED = "_fsdp_wrapped_module"  # FSDP1's name for the child; activation checkpointing uses it
_CHECKPOINTED = "_checkpoint_wrapped_module"
_RESHARD_AFTER_FORWARD = {
    # None is the core's default: True, except for the root, whose parameters backward needs first.
    ShardingStrategy.FULL_SHARD: None,
    ShardingStrategy.SHARD_GRAD_OP: False,
}


def _not_implemented(name: str, instead: str) -> Callable[..., Any]:
    """Return a method that raises NotImplementedError with its own name and what to do instead."""

    def method(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"FullyShardedDataParallel.{name} is not implemented yet; {instead}"
        )

    method.__name__ = name
    return method


_MODEL_STATE = "use torch.distributed.checkpoint.state_dict.get_model_state_dict instead"
_OPTIM_STATE = "use torch.distributed.checkpoint.state_dict.get_optimizer_state_dict instead"
_OPTIM_LOAD = "use torch.distributed.checkpoint.state_dict.set_optimizer_state_dict instead"


class FullyShardedDataParallel(nn.Module):
    """Shards the parameters, gradients and optimizer state of `module` over the ranks of a group.

    Args (in FSDP1's order):
        module: module to wrap; build the optimizer after wrapping it.
        process_group: ranks to shard over; default: all. Not together with `device_mesh`.
        sharding_strategy: FULL_SHARD (default) frees the parameters after forward (not those of
            the root); SHARD_GRAD_OP keeps them until the end of backward.
        cpu_offload: None or `CPUOffload(offload_params=False)`.
        auto_wrap_policy: chooses the submodules to wrap with the same arguments: a policy of
            torch.distributed.fsdp.wrap, or a callable of (module, recurse, nonwrapped_numel).
            Containers without a forward are left unwrapped: no forward would gather them.
        backward_prefetch: BACKWARD_PRE.
        mixed_precision: dtypes of parameters, reductions and buffers. Buffers are cast here, at
            construction, and saved by `state_dict` in their original dtype.
        ignored_modules: modules whose parameters and buffers are left alone.
        param_init_fn: called with each module of a unit that has meta tensors, to materialize
            the tensors that the module itself owns; default: `to_empty`, `reset_parameters`.
        device_id: device (or index of an accelerator) to move the module to before sharding.
        sync_module_states: broadcast parameters and buffers from the group's rank 0 first.
        forward_prefetch: accepted; the schedule always prefetches in execution order.
        limit_all_gathers: accepted; the ring of gather buffers always limits them.
        use_orig_params: accepted, either way; behaves as True.
        ignored_states: `ignored_modules`, as modules or parameters. Not together with it.
        device_mesh: 1-D mesh to shard over.

    Raises:
        NotImplementedError: for values other than these, by name.
        ValueError: arguments that exclude each other, a policy on a model that is partly wrapped
            already, or tensors left on the meta device.
        TypeError: a policy, an ignored state or `reset_parameters` that is not what it must be.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., bool] | _Policy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Module] | Iterable[nn.Parameter] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        precision = mixed_precision or MixedPrecision()
        _check_supported(strategy, cpu_offload, backward_prefetch, precision)
        ignored, ignored_params = _ignored(ignored_modules, ignored_states)
        mesh = _mesh(module, process_group, device_mesh, device_id)
        if auto_wrap_policy is not None:
            kwargs: dict[str, Any] = {
                "process_group": process_group,
                "sharding_strategy": sharding_strategy,
                "cpu_offload": cpu_offload,
                "auto_wrap_policy": None,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
                "ignored_states": [*ignored, *ignored_params],
                "device_mesh": device_mesh,
            }
            _wrap_children(module, _targets(module, auto_wrap_policy, ignored, kwargs))
        for child in FullyShardedDataParallel.fsdp_modules(module):
            child._is_root = False

        self.sharding_strategy = strategy
        self.mixed_precision = precision
        self.process_group = mesh.get_group() if mesh is not None else dist.group.WORLD
        self._is_root = True
        self._sync_gradients = True
        self._runs_in_float32 = False  # set for classes that mixed precision ignores
        self._ignored = ignored
        self._root_input_dtype = (
            precision.param_dtype if precision.cast_root_forward_inputs else None
        )
        own = list(_own_modules(module, ignored))
        _materialize(own, param_init_fn, _init_device(mesh, device_id))
        states = [t for t in _own_tensors(own) if t not in ignored_params]
        if device_id is not None:
            device = _device(device_id)
            for tensor in states:
                tensor.data = tensor.data.to(device)
        if sync_module_states:
            _broadcast(states, self.process_group)
        self._buffer_dtypes = _cast_buffers(own, precision.buffer_dtype)

        self.add_module(_WRAPPED, module)
        # The unit stays the same module when activation checkpointing is put in between later; in
        # __dict__ because it must not be a second child.
        self.__dict__["_unit"] = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=_RESHARD_AFTER_FORWARD[strategy],
            mp_policy=MixedPrecisionPolicy(
                param_dtype=precision.param_dtype,
                reduce_dtype=precision.reduce_dtype,
                cast_forward_inputs=precision.cast_forward_inputs,
            ),
            ignored_params=ignored_params or None,
        )
        self.register_state_dict_post_hook(_clean_state_dict)
        self.register_load_state_dict_pre_hook(_prepare_load)
        self.register_load_state_dict_post_hook(_clean_incompatible_keys)

    @property
    def module(self) -> nn.Module:
        """The wrapped module (below an activation checkpointing wrapper, if there is one)."""
        module: nn.Module = self._modules[_WRAPPED]  # type: ignore[assignment]
        return module._modules.get(_CHECKPOINTED) or module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, whose unit gathers and frees its parameters around it."""
        module: nn.Module = self._modules[_WRAPPED]  # type: ignore[assignment]
        if self._runs_in_float32:
            return _run_in_float32(module, args, kwargs)
        # Only here is it known which wrapper is the root: the unit was made before its parents.
        if self._is_root and self._root_input_dtype is not None:
            args, kwargs = _cast((args, kwargs), self._root_input_dtype)
        return module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == _WRAPPED:  # not constructed yet
                raise
            return getattr(super().__getattr__(_WRAPPED), name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """As in nn.Module, with the wrapped module under the wrapper's own name.

        Parameter and buffer names are made from these, so they are those of the unwrapped model.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, child in self._modules.items():
            if child is not None:
                path = prefix if name == _WRAPPED else f"{prefix}.{name}" if prefix else name
                yield from child.named_modules(memo, path, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        # torch.distributed.checkpoint.state_dict leaves out the names that stand here as values.
        return {"": _WRAPPED}

    def check_is_root(self) -> bool:
        """Return whether no other wrapper has been built around this one."""
        return self._is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the wrappers in `module`, itself included; only the roots if `root_only`."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [m for m in found if m._is_root or not root_only]

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply `fn` to every submodule, children first, and self, with full parameters.

        Each rank keeps its shard of what `fn` writes. Collective: call it on all ranks.
        """
        self._unit.reshard()
        full: dict[nn.Parameter, nn.Parameter] = {}
        places: list[tuple[dict[str, nn.Parameter | None], str, DTensor]] = []
        for _, module in _own_modules(self._unit, self._ignored):
            for name, param in module._parameters.items():
                if isinstance(param, DTensor):
                    if param not in full:
                        value = param.detach().full_tensor()
                        full[param] = nn.Parameter(value, requires_grad=param.requires_grad)
                    module._parameters[name] = full[param]
                    places.append((module._parameters, name, param))
        try:
            super().apply(fn)
        finally:
            for parameters, name, param in places:
                changed = parameters[name]
                parameters[name] = param  # type: ignore[assignment]
                if changed is not None:
                    with torch.no_grad():
                        param.to_local().copy_(_shard_like(changed.detach(), param).to_local())
        return self

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them, until a backward outside of the context.

        Raises:
            RuntimeError: this is not the root wrapper.
        """
        self._check_root("no_sync")
        before = self._sync_gradients
        self._sync_gradients = False
        self._unit.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._sync_gradients = before
            self._unit.set_requires_gradient_sync(before)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients in place so that their total norm is at most `max_norm`.

        The norm is that of all full gradients as one vector, summed in at least float32. Gradients
        of ignored parameters count as each rank has them. Collective: call it on all ranks.

        Args:
            max_norm: largest norm to leave.
            norm_type: p of the p-norm, above 0; `float("inf")` for the maximum.

        Returns:
            The norm before scaling: scalar tensor, equal on all ranks, in the dtype to which the
            dtypes of the parameters promote.

        Raises:
            RuntimeError: this is not the root wrapper.
            ValueError: `norm_type` is not above 0.
        """
        self._check_root("clip_grad_norm_")
        p = float(norm_type)
        if not p > 0:
            raise ValueError(f"clip_grad_norm_ expects norm_type above 0 but got {norm_type}.")
        # Grouped by the parameters, not the gradients, so that ranks whose gradients differ (an
        # unused parameter) take part in the same collectives, with the same dtype.
        groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[torch.Tensor]] = {}
        out_dtype, device = None, None
        for param in self.parameters():
            out_dtype = (
                param.dtype if out_dtype is None else torch.promote_types(out_dtype, param.dtype)
            )
            device = param.device
            where: tuple[DeviceMesh | None, tuple[int, ...]] = (None, ())
            if isinstance(param, DTensor):
                shards = (d for d, place in enumerate(param.placements) if place.is_shard())
                where = (param.device_mesh, tuple(shards))
            grads = groups.setdefault(where, [])
            if param.grad is not None:
                grad = param.grad
                grads.append(grad.to_local() if isinstance(grad, DTensor) else grad)
        out_dtype = out_dtype or torch.float32
        dtype = torch.promote_types(out_dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=device)
        for (mesh, dims), grads in groups.items():
            # An empty shard has no maximum.
            norms = torch._foreach_norm([g for g in grads if g.numel()], p, dtype=dtype)
            part = torch.linalg.vector_norm(torch.stack(norms), p) if norms else total.new_zeros(())
            part = part if p == math.inf else part**p
            op = dist.ReduceOp.MAX if p == math.inf else dist.ReduceOp.SUM
            for dim in dims:
                assert mesh is not None
                dist.all_reduce(part, op=op, group=mesh.get_group(dim))
            total = torch.maximum(total, part) if p == math.inf else total + part
        total = total if p == math.inf else total ** (1 / p)
        scale = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        for grads in groups.values():
            if grads:
                torch._foreach_mul_(grads, scale)
        return total.to(out_dtype)

    def _check_root(self, name: str) -> None:
        if not self._is_root:
            raise RuntimeError(
                f"{name} expects the root FullyShardedDataParallel but got one that is nested in "
                "another; call it on the outermost wrapper."
            )

    set_state_dict_type = _not_implemented("set_state_dict_type", _MODEL_STATE)
    get_state_dict_type = _not_implemented("get_state_dict_type", _MODEL_STATE)
    state_dict_type = _not_implemented("state_dict_type", _MODEL_STATE)
    summon_full_params = _not_implemented(
        "summon_full_params",
        "use full_tensor() of the parameters instead, or apply() to change them",
    )
    optim_state_dict = _not_implemented("optim_state_dict", _OPTIM_STATE)
    full_optim_state_dict = _not_implemented("full_optim_state_dict", _OPTIM_STATE)
    sharded_optim_state_dict = _not_implemented("sharded_optim_state_dict", _OPTIM_STATE)
    optim_state_dict_to_load = _not_implemented("optim_state_dict_to_load", _OPTIM_LOAD)
    shard_full_optim_state_dict = _not_implemented("shard_full_optim_state_dict", _OPTIM_LOAD)
    scatter_full_optim_state_dict = _not_implemented("scatter_full_optim_state_dict", _OPTIM_LOAD)
    flatten_sharded_optim_state_dict = _not_implemented(
        "flatten_sharded_optim_state_dict", _OPTIM_LOAD
    )
    rekey_optim_state_dict = _not_implemented("rekey_optim_state_dict", _OPTIM_LOAD)
    register_comm_hook = _not_implemented(
        "register_comm_hook", "use mixed_precision's reduce_dtype to reduce in another dtype"
    )


FSDP = FullyShardedDataParallel


def _check_supported(
    strategy: ShardingStrategy,
    cpu_offload: CPUOffload | None,
    backward_prefetch: BackwardPrefetch | None,
    precision: MixedPrecision,
) -> None:
    if strategy not in _RESHARD_AFTER_FORWARD:
        name = getattr(strategy, "name", strategy)
        raise NotImplementedError(
            f"ShardingStrategy.{name} is not implemented yet; use FULL_SHARD or SHARD_GRAD_OP."
        )
    if cpu_offload is not None and cpu_offload.offload_params:
        raise NotImplementedError(
            "cpu_offload=CPUOffload(offload_params=True) is not implemented yet; use None."
        )
    if backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
        raise NotImplementedError(
            f"backward_prefetch={backward_prefetch} is not implemented yet; use BACKWARD_PRE."
        )
    if precision.keep_low_precision_grads:
        raise NotImplementedError(
            "MixedPrecision.keep_low_precision_grads=True is not implemented yet; use False."
        )


def _ignored(
    modules: Iterable[nn.Module] | None, states: Iterable[Any] | None
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Return the ignored modules with all their submodules, and the ignored parameters."""
    if modules is not None and states is not None:
        raise ValueError(
            "FullyShardedDataParallel expects ignored_modules or ignored_states but got both; "
            "pass one of them."
        )
    ignored: set[nn.Module] = set()
    params: set[nn.Parameter] = set()
    for state in (modules if modules is not None else states) or ():
        if isinstance(state, nn.Parameter) and modules is None:
            params.add(state)
        elif isinstance(state, FullyShardedDataParallel) or not isinstance(state, nn.Module):
            raise TypeError(
                "ignored_modules expects modules that are not wrapped (ignored_states: also "
                f"parameters) but got {type(state).__name__}; pass these."
            )
        else:
            ignored.update(state.modules())
            params.update(state.parameters())
    return ignored, params


def _device(device_id: int | torch.device) -> torch.device:
    if not isinstance(device_id, int):
        return torch.device(device_id)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise ValueError(
            f"device_id={device_id} expects an accelerator but this machine has none; "
            'pass None or torch.device("cpu").'
        )
    return torch.device(accelerator.type, device_id)


def _mesh(
    module: nn.Module,
    group: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
    device_id: int | torch.device | None,
) -> DeviceMesh | None:
    """Return the mesh to shard over, or None for the core's default, which is all ranks."""
    if group is not None and mesh is not None:
        raise ValueError(
            "FullyShardedDataParallel expects process_group or device_mesh but got both; "
            "pass one of them."
        )
    if isinstance(group, (tuple, list)):
        raise NotImplementedError(
            "A pair of process groups is for ShardingStrategy.HYBRID_SHARD, which is not "
            "implemented yet; pass one process group."
        )
    if mesh is not None or (group is None and device_id is None):
        return mesh
    types = {p.device.type for p in module.parameters()} - {"cpu", "meta"}
    if device_id is not None:
        kind = _device(device_id).type
    elif types:
        kind = types.pop()
    else:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        on_host = accelerator is None or dist.get_backend(group) in ("gloo", "mpi")
        kind = "cpu" if on_host else accelerator.type  # type: ignore[union-attr]
    return DeviceMesh.from_group(group or dist.group.WORLD, kind)  # type: ignore[arg-type]


def _init_device(mesh: DeviceMesh | None, device_id: int | torch.device | None) -> torch.device:
    """Return the device that meta tensors are materialized on."""
    if device_id is not None:
        return _device(device_id)
    if mesh is not None:
        return torch.device(mesh.device_type)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _targets(
    root: nn.Module,
    policy: Callable[..., bool] | _Policy,
    ignored: set[nn.Module],
    kwargs: dict[str, Any],
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules below `root` that `policy` wraps, with the arguments for each."""
    for name, module in root.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                "auto_wrap_policy expects a model without FullyShardedDataParallel in it but got "
                f"one at '{name}'; wrap by hand or by policy, not both."
            )
    targets: dict[nn.Module, dict[str, Any]] = {}
    if isinstance(policy, _Policy):
        targets = policy._run_policy(root, ignored, kwargs)
    elif callable(policy):
        ignored_params = {s for s in kwargs["ignored_states"] if isinstance(s, nn.Parameter)}

        def visit(module: nn.Module) -> int:
            """Decide bottom up; return how many of the elements below are in targets."""
            numel = sum(p.numel() for p in module.parameters() if p not in ignored_params)
            if not policy(module=module, recurse=True, nonwrapped_numel=numel):
                return 0
            wrapped = sum(visit(child) for child in module.children() if child not in ignored)
            rest = numel - wrapped
            if module is root or not policy(module=module, recurse=False, nonwrapped_numel=rest):
                return wrapped
            targets[module] = dict(kwargs)
            return numel

        visit(root)
    else:
        raise TypeError(
            "auto_wrap_policy expects a callable or a policy of torch.distributed.fsdp.wrap but "
            f"got {type(policy).__name__}."
        )
    if kwargs["mixed_precision"] is not None:
        classes = tuple(kwargs["mixed_precision"]._module_classes_to_ignore)
        for module in root.modules():
            if isinstance(module, classes) and module not in ignored:
                targets.setdefault(module, dict(kwargs))["mixed_precision"] = _IN_FLOAT32
    targets.pop(root, None)
    return {m: kw for m, kw in targets.items() if type(m).forward is not nn.Module.forward}


# Stands for mixed_precision=None in a module whose class mixed precision ignores: its inputs are
# cast to float32 and its outputs back, so that its neighbours never see another dtype.
_IN_FLOAT32 = MixedPrecision(cast_root_forward_inputs=False)


def _wrap_children(root: nn.Module, targets: dict[nn.Module, dict[str, Any]]) -> None:
    """Put wrappers of `targets` in their places below `root`, children first."""
    wrappers: dict[nn.Module, FullyShardedDataParallel] = {}
    visited: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        visited.add(module)
        for name, child in list(module._modules.items()):
            if child is None:
                continue
            if child not in visited:
                visit(child)
            if child in targets:
                if child not in wrappers:
                    kwargs = targets[child]
                    wrappers[child] = FullyShardedDataParallel(child, **kwargs)
                    wrappers[child]._runs_in_float32 = kwargs["mixed_precision"] is _IN_FLOAT32
                setattr(module, name, wrappers[child])

    visit(root)


def _own_modules(root: nn.Module, ignored: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of `root`'s unit with their names: not ignored, not wrapped themselves."""
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or module in ignored or isinstance(module, FullyShardedDataParallel):
            return
        seen.add(module)
        yield name, module
        for child_name, child in module.named_children():
            yield from visit(f"{name}.{child_name}" if name else child_name, child)

    return visit("", root)


def _own_tensors(own: list[tuple[str, nn.Module]]) -> list[torch.Tensor]:
    """Return the parameters and buffers of these modules, each once."""
    tensors: dict[torch.Tensor, None] = {}
    for _, module in own:
        tensors.update(dict.fromkeys(module.parameters(recurse=False)))
        tensors.update(dict.fromkeys(module.buffers(recurse=False)))
    return [t for t in tensors if not isinstance(t, DTensor)]


def _materialize(
    own: list[tuple[str, nn.Module]],
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
) -> None:
    """Give a unit's meta tensors memory and values, by `param_init_fn` or `reset_parameters`."""
    if not any(t.is_meta for t in _own_tensors(own)):
        return
    for name, module in own:
        if param_init_fn is not None:
            param_init_fn(module)
        elif any(t.is_meta for t in _own_tensors([(name, module)])):
            reset = getattr(module, "reset_parameters", None)
            if not callable(reset):
                raise TypeError(
                    f"'{name}' is on the meta device and expects a reset_parameters method but "
                    f"{type(module).__name__} has none; add it or pass param_init_fn."
                )
            with torch.no_grad():
                module.to_empty(device=device, recurse=False)
                reset()
    for name, module in own:
        if any(t.is_meta for t in _own_tensors([(name, module)])):
            raise ValueError(
                f"param_init_fn expects to leave no tensor on the meta device but '{name}' "
                f"({type(module).__name__}) still has one; call to_empty(recurse=False) in it."
            )


def _broadcast(tensors: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Overwrite `tensors` with those of the group's rank 0, in one message for each device.

    As bytes, so that neither the dtypes nor what a backend supports matter.
    """
    for device in dict.fromkeys(t.device for t in tensors):
        mine = [t.detach() for t in tensors if t.device == device and t.numel()]
        if not mine:
            continue
        flat = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in mine])
        dist.broadcast(flat, group=group, group_src=0)
        for tensor, part in zip(mine, flat.split([t.nbytes for t in mine]), strict=True):
            # clone: a view as a wider dtype has to start at a multiple of its size
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _cast_buffers(
    own: list[tuple[str, nn.Module]], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Cast a unit's floating-point buffers; return the names and dtypes of those changed."""
    changed: dict[str, torch.dtype] = {}
    if dtype is None:
        return changed
    for module_name, module in own:
        for buffer_name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.dtype != dtype:
                name = f"{module_name}.{buffer_name}" if module_name else buffer_name
                changed[name.replace(f"{_CHECKPOINTED}.", "")] = buffer.dtype
                buffer.data = buffer.data.to(dtype)
    return changed


def _map_floating(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply `fn` to the floating-point tensors in `value`, also in containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        return fn(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        new = copy.copy(value)  # keeps the type and what else it has, such as a default factory
        new.update((key, _map_floating(fn, item)) for key, item in value.items())
        return new
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)
        for field in dataclasses.fields(value):
            # object's own __setattr__, since a frozen dataclass refuses others
            object.__setattr__(new, field.name, _map_floating(fn, getattr(value, field.name)))
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_floating(fn, item) for item in value))
    if isinstance(value, (list, tuple, set)):
        return type(value)(_map_floating(fn, item) for item in value)
    return value


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return _map_floating(lambda tensor: tensor.to(dtype), value)


def _run_in_float32(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `module` on inputs cast to float32; cast its outputs to the dtype that came."""
    came: list[torch.dtype] = []

    def up(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float32:
            came.append(tensor.dtype)
        return tensor.float()

    args, kwargs = _map_floating(up, (args, kwargs))
    output = module(*args, **kwargs)
    return _cast(output, came[0]) if came else output


def _shard_like(full: torch.Tensor, param: DTensor) -> DTensor:
    """Shard `full`, which all ranks have, as `param` is, without communication."""
    full = full.to(param.device)
    return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)


def _clean_state_dict(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
) -> None:
    """State-dict post-hook: leave out the wrapper's name, buffers in their original dtype."""
    inner = f"{prefix}{_WRAPPED}."
    metadata: MutableMapping[str, Any] = getattr(state_dict, "_metadata", {})
    for entries in (state_dict, metadata):
        for key in [k for k in entries if f"{k}.".startswith(inner)]:
            entries[f"{prefix}{f'{key}.'[len(inner) :]}"[:-1]] = entries.pop(key)
    for name, dtype in module._buffer_dtypes.items():  # type: ignore[operator, union-attr]
        if (key := prefix + name) in state_dict:
            state_dict[key] = state_dict[key].to(dtype)


def _prepare_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Load-state-dict pre-hook: put in the wrapper's name, shard parameters that come full."""
    for name, param in module.named_parameters():
        value = state_dict.get(prefix + name)
        full = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if isinstance(param, DTensor) and full and value.shape == param.shape:
            state_dict[prefix + name] = _shard_like(value.detach(), param)
    for key in [k for k in state_dict if k.startswith(prefix)]:
        state_dict[f"{prefix}{_WRAPPED}.{key[len(prefix) :]}"] = state_dict.pop(key)


def _clean_incompatible_keys(module: nn.Module, incompatible: Any) -> None:
    """Load-state-dict post-hook: report missing and unexpected names without the wrapper's."""
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [key.replace(f"{_WRAPPED}.", "") for key in keys]
