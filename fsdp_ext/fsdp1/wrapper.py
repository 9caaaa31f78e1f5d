"""``FullyShardedDataParallel``: FSDP1's wrapper as a thin class over ``fully_shard``.

A wrapper has the module as its only child and makes one unit of it; an ``auto_wrap_policy`` wraps
children first. The unit moves the data. This file has FSDP1's arguments, names and methods.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import _Policy

from fsdp_ext._util.names import WRAPPED_BY_FSDP1, without_fsdp1
from fsdp_ext._util.numbers import as_bool
from fsdp_ext.comm.transports import resolve_transport
from fsdp_ext.fsdp1.casts import map_floating, run_in_float32
from fsdp_ext.fsdp1.groups import Groups, resolve_group, strategy_on
from fsdp_ext.fsdp1.setup import (
    CHECKPOINTED,
    RESHARD_AFTER_FORWARD,
    are_children_wrapped,
    cast_buffers,
    check_arguments,
    check_booleans,
    check_communication_hook,
    check_container,
    check_flattened,
    check_same_ranks,
    check_single_device,
    materialise,
    own_modules,
    own_parameters,
    place,
    refuse_subclasses,
    refuse_torchs_wrappers,
    resolve_device,
    resolve_ignored,
    wrap_children,
    wrap_under_all_names,
)
from fsdp_ext.fsdp1.state_dict_forms import (
    DEFAULT,
    is_called_by_checkpointing,
    refuse_optimizers_of_flat_parameters,
    takes_state_dict_names,
)
from fsdp_ext.fsdp1.state_dict_hooks import (
    add_wrapper_names,
    clean_incompatible_keys,
    keep_flat_name,
    remove_wrapper_names,
    shard_whole_parameters,
)
from fsdp_ext.fsdp1.state_dicts import StateDictMethods
from fsdp_ext.fsdp1.summon import Summoning, SummonMethods, summon
from fsdp_ext.fsdp1.torchs_methods import refuse_torchs_methods
from fsdp_ext.fsdp1.views import WrapperViews, flatten_unit, mark_flattened
from fsdp_ext.optim.clip import Limits, clip
from fsdp_ext.optim.norms import NormRanks
from fsdp_ext.sharding.api.arguments import (
    check_modules,
    check_numbers,
    resolve_mesh,
    resolve_offload,
)
from fsdp_ext.sharding.api.entry import install, make_units
from fsdp_ext.sharding.api.fsdp_module import FSDPModule
from fsdp_ext.sharding.params.flat_parameter import own_parameters_shown
from fsdp_ext.sharding.params.optimizer_in_backward import watch_optimizers_in_backward
from fsdp_ext.sharding.params.ownership import carry_attributes, hand_over, is_sharded
from fsdp_ext.sharding.params.ranks import Ranks
from fsdp_ext.sharding.params.settings import UnitSettings
from fsdp_ext.sharding.params.user_hooks import CommunicationHook
from fsdp_ext.sharding.root.module_state import (
    ModuleState,
    refuse_copy,
    set_state,
    sharded_module,
)
from fsdp_ext.sharding.root.optimizer_hooks import let_optimizers_go_on
from fsdp_ext.sharding.torch_compat.state_dict_hooks import (
    convert_shards,
    reshard_and_forget,
    settle,
)

_Named = TypeVar("_Named")


class FullyShardedDataParallel(StateDictMethods, SummonMethods, WrapperViews, nn.Module):
    """Shard a module's parameters, gradients and optimizer state over data-parallel ranks.

    With ``use_orig_params=True``, the module's own parameters are DTensors with ``Shard(0)``.
    Otherwise optimizers see one flat parameter for each wrapper. ``state_dict`` holds full tensors
    on all ranks until ``state_dict_type`` says otherwise, and ``load_state_dict`` takes these and
    DTensors. Names in state dicts are those of the unwrapped model, and of a flat parameter
    ``<wrapped module>._flat_param``. Names of ``named_parameters()`` and ``named_modules()`` also
    have ``_fsdp_wrapped_module`` for each wrapper, as FSDP1's.

    Args:
        module: the module to wrap, whose class stays as it is. Make the optimizer afterwards, or
            see ``use_orig_params``. A list or a dict of modules needs wrapped elements. A wrapper
            may be wrapped again, which shards nothing more: the outer one's settings have no
            effect.
        process_group: ranks to shard over, all by default. Excludes ``device_mesh``. With hybrid
            sharding a pair: the ranks that shard the model, and those that have the same shard. By
            default the ranks of each host shard it (``LOCAL_WORLD_SIZE`` if a launcher sets that).
        sharding_strategy: ``FULL_SHARD`` (the default), ``SHARD_GRAD_OP``, ``NO_SHARD``, or for
            hybrid sharding ``HYBRID_SHARD`` or ``_HYBRID_SHARD_ZERO2``. A single rank has
            ``NO_SHARD``, with a warning if another one was passed.
        cpu_offload: None or a ``CPUOffload``. ``offload_params=True`` is fully_shard's
            ``CPUOffloadPolicy()``.
        auto_wrap_policy: which submodules to wrap, too: a policy of
            ``torch.distributed.fsdp.wrap`` or a callable of ``module``, ``recurse`` and
            ``nonwrapped_numel``. Containers without a forward are left as they are, because
            nothing would gather their parameters.
        backward_prefetch: no effect: the schedule prefetches in backward as in forward. None and
            ``BACKWARD_POST``, which would save memory, do not.
        mixed_precision: dtypes of computation, reduction and buffers. Buffers are cast at once;
            ``state_dict`` holds them in their own dtype. With ``keep_low_precision_grads``,
            gradients have ``param_dtype``.
        ignored_modules: modules whose parameters and buffers are left as they are. A warning is
            given if ``module`` itself is among them.
        param_init_fn: called with each module of a unit that has tensors on meta; gives memory
            and values to the tensors that the module itself owns. By default ``to_empty`` and
            ``reset_parameters``.
        device_id: where to move a unit's tensors before they are sharded.
        sync_module_states: start from the parameters and buffers of the group's rank 0.
        forward_prefetch: no effect: the schedule always prefetches.
        limit_all_gathers: no effect: the ring of gather buffers always limits them.
        use_orig_params: whether ``parameters()`` has the module's own parameters, as DTensors.
            Optimizers that were made before wrapping then go on with these. With False, the
            default, it has a 1-D parameter for each wrapper, over this rank's flat shard. Then all
            parameters of a wrapper need one dtype, and all or none of them are trained. With True
            parameters keep their shapes, and FSDP1's are 1-D outside of forward. So with groups by
            ``p.dim() >= 2``, as in nanoGPT, matrices decay here, and nothing decays under FSDP1. To
            get FSDP1's losses here, pass ``weight_decay=0``. To get these losses under FSDP1,
            record ``p.dim()`` by name before wrapping.
        ignored_states: ``ignored_modules`` that may also be parameters; pass one of the two.
        device_mesh: 1-D device mesh to shard over; with hybrid sharding a 2-D mesh, which
            replicates over its first dimension and shards over its second.
        check_every: as for :func:`fsdp_ext.fully_shard`. PyTorch's class does not have it.

    Raises:
        NotImplementedError: for what is not supported yet, by name.
        RuntimeError: if there is no process group.
        TypeError: for a policy or an ignored state of the wrong type, or a module on meta that
            nothing can initialise.
        ValueError: for arguments that exclude each other, a policy for a model that has wrappers
            in it, and what ``fully_shard`` raises it for.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Groups = None,
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
        *,
        check_every: int | None = None,
    ) -> None:
        # The arguments for the wrappers of children, read before there are other local variables.
        kwargs = {k: v for k, v in locals().items() if k not in ("self", "module", "__class__")}
        super().__init__()
        check_booleans(kwargs)
        # A wrapper around a wrapper has no unit of its own, since it would have no parameters.
        self._wraps_wrapper = isinstance(module, FullyShardedDataParallel)
        if not self._wraps_wrapper:
            check_modules([module])
        elif check_every is not None:
            raise ValueError(
                f"check_every={check_every} was passed to a wrapper of a wrapper, which has no "
                "unit of its own. Pass it to the wrapper inside."
            )
        refuse_torchs_wrappers(module)
        strategy = ShardingStrategy.FULL_SHARD if sharding_strategy is None else sharding_strategy
        precision = MixedPrecision() if mixed_precision is None else mixed_precision
        check_arguments(strategy, cpu_offload, backward_prefetch, precision, param_init_fn)
        ignored, ignored_params = resolve_ignored(module, ignored_modules, ignored_states)
        device = resolve_device(device_id)
        devices = {param.device for param in set(module.parameters()) - ignored_params}
        check_single_device(devices, device)
        mesh = resolve_group(module, process_group, device_mesh, device, strategy)
        strategy = strategy_on(mesh, strategy)
        if auto_wrap_policy is not None:
            kwargs.update(auto_wrap_policy=None, sharding_strategy=strategy)
            kwargs.update(process_group=None, device_mesh=mesh)
            kwargs.update(ignored_modules=None, ignored_states=[*ignored, *ignored_params])
            cls = FullyShardedDataParallel
            wrap_children(module, auto_wrap_policy, ignored, ignored_params, kwargs, cls)
        wrap_under_all_names(module)
        check_container(module, ignored_params)
        inside = self.fsdp_modules(module)
        for wrapper in inside:
            check_same_ranks(strategy, wrapper.sharding_strategy)

        whole = strategy is ShardingStrategy.NO_SHARD
        self.process_group = mesh.get_group(0) if whole else Ranks(mesh).shard_group
        self.sharding_strategy = strategy
        self.mixed_precision = precision
        self.cpu_offload = cpu_offload or CPUOffload()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self._device_mesh = device_mesh
        self._comm_hook: Callable[..., object] | None = None
        self._comm_hook_state: object = None
        self._state_dict_settings = DEFAULT
        self._is_root = True
        self._runs_in_float32 = False
        self._ignored_params = ignored_params
        own = own_modules(module, ignored)
        refuse_subclasses(own, ignored_params)
        materialise(own, param_init_fn, device or torch.device(mesh.device_type))
        below = [each for each in module.modules() if each in ignored]
        place(own, ignored_params, below, device, mesh if sync_module_states else None)
        self._buffer_dtypes = cast_buffers(own, precision.buffer_dtype)
        if not use_orig_params:
            check_flattened(own, ignored_params)
        self.add_module(WRAPPED_BY_FSDP1, module)
        hooked: Any = self  # torch leaves these three untyped
        hooked.register_state_dict_post_hook(remove_wrapper_names)
        hooked.register_load_state_dict_pre_hook(add_wrapper_names)
        hooked.register_load_state_dict_post_hook(clean_incompatible_keys)
        refuse_torchs_methods(self)
        if isinstance(module, FullyShardedDataParallel):
            self._use_orig_params = module._use_orig_params
            set_state(self, ModuleState(sharded_module(module)))
        else:
            self._use_orig_params = use_orig_params
            originals = own_parameters(own.values()) if use_orig_params else {}
            self._make_unit(module, mesh, originals, check_every)
        for wrapper in inside:  # last, so that they stay outermost if this wrapper raises
            wrapper._is_root = False
        if not are_children_wrapped():
            _let_optimizers_go_on([self, *inside])

    def _make_unit(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        originals: dict[tuple[nn.Module, str], nn.Parameter],
        check_every: int | None,
    ) -> None:
        """Make the unit of ``module``. Its parameters get what users gave to ``originals``.

        Empties the dict, so that no original stays alive.
        """
        precision = self.mixed_precision
        mesh = resolve_mesh(mesh)
        check_numbers(check_every=check_every)
        offload = CPUOffloadPolicy() if self.cpu_offload.offload_params else None
        settings = UnitSettings(
            reshard_after_forward=RESHARD_AFTER_FORWARD[self.sharding_strategy],
            mp_policy=MixedPrecisionPolicy(
                param_dtype=precision.param_dtype,
                reduce_dtype=precision.reduce_dtype or precision.param_dtype,
                cast_forward_inputs=precision.cast_forward_inputs,
            ),
            transport=resolve_transport(None, mesh.device_type),
            check_every=check_every,
            offloads=resolve_offload(offload, mesh.device_type),
            keep_low_precision_grads=precision.keep_low_precision_grads,
            shows_accumulated=True,
            calls_setattr=os.environ.get("FSDP_USE_UNSAFE_SETATTR") != "1",
        )
        install(make_units([module], Ranks(mesh), settings, self._ignored_params))
        convert_shards(module)
        set_state(self, ModuleState(module))
        unit = self._fsdp_ext_unit
        if not self._use_orig_params:
            flatten_unit(unit)
        mark_flattened(unit)
        replaced = _carry_over_to_shards(originals)
        originals.clear()
        self._has_referenced_originals = any(param() is not None for param in replaced)
        owners: set[Any] = {owner for owner, _ in unit.attributes()}
        for owner in owners:
            owner.register_load_state_dict_pre_hook(shard_whole_parameters)
        if unit.flat_param is not None and CHECKPOINTED in module._modules:
            cast(Any, module).register_load_state_dict_pre_hook(keep_flat_name)

    # - The module

    _is_root: bool
    _use_orig_params: bool
    # Whether anything, maybe an optimizer, still refers to original parameters.
    _has_referenced_originals = False

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without the wrapper of activation checkpointing."""
        module = cast(nn.Module, self._modules[WRAPPED_BY_FSDP1])
        return module._modules.get(CHECKPOINTED) or module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, which gathers and frees its own parameters."""
        module = cast(nn.Module, self._modules[WRAPPED_BY_FSDP1])
        if self._runs_in_float32:
            return run_in_float32(module, args, kwargs)
        if self._is_root:
            watch_optimizers_in_backward()  # they may have been imported since the last forward
        # The unit cannot do this: it is made before it is known whether it is the root's.
        if self._is_root and self.mixed_precision.cast_root_forward_inputs:
            dtype = self.mixed_precision.param_dtype
            if dtype is not None and not self._fsdp_ext_unit.is_summoned:
                args, kwargs = map_floating(lambda x: x.to(dtype), (args, kwargs))
        return module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED_BY_FSDP1:  # not constructed yet
                raise
            return getattr(super().__getattr__(WRAPPED_BY_FSDP1), name)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_copy()

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Return modules with FSDP1's names, from which those of parameters and buffers come.

        torch.distributed.checkpoint and Lightning's loading of DTensors get those of the unwrapped
        model: the wrapped module has the wrapper's own name.
        """
        # Dynamo traces no call stack.
        if not torch.compiler.is_compiling() and takes_state_dict_names():
            return self._modules_with_short_names(memo, prefix, remove_duplicate)
        named: Iterator[tuple[str, nn.Module]]
        named = super().named_modules(memo, prefix, remove_duplicate)
        return named

    def _modules_with_short_names(
        self, memo: set[nn.Module] | None, prefix: str, remove_duplicate: bool
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for child in self._modules.values():  # one
            if child is not None:
                yield from child.named_modules(memo, prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return parameters with FSDP1's names: without the wrappers' if they are summoned."""
        return self._cleaned(super().named_parameters(prefix, recurse, remove_duplicate))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return buffers with FSDP1's names: without the wrappers' if parameters are summoned."""
        return self._cleaned(super().named_buffers(prefix, recurse, remove_duplicate))

    def _cleaned(self, named: Iterator[tuple[str, _Named]]) -> Iterator[tuple[str, _Named]]:
        # A copy for plan() has no unit.
        is_summoned = any(unit.is_summoned for unit in self._fsdp_ext_units(recurse=False))
        return ((without_fsdp1(name), each) for name, each in named) if is_summoned else named

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the wrapped module with its name."""
        with contextlib.ExitStack() as shown:
            if is_called_by_checkpointing():  # it lists the parameters of each child that it gets
                settle(self._fsdp_ext_unit)
                shown.enter_context(own_parameters_shown(self._fsdp_ext_unit))
            yield from super().named_children()

    def _fqn_modifiers(self) -> dict[str, str]:
        # torch.distributed.checkpoint drops the values of this dict from its names.
        if not self._use_orig_params:
            refuse_optimizers_of_flat_parameters()
        return {"": WRAPPED_BY_FSDP1}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those of shards that are hidden until backward.

        Args:
            set_to_none: whether gradients are None afterwards, and not zeros.
        """
        super().zero_grad(set_to_none)
        for wrapper in self.fsdp_modules(self):
            unit = wrapper._fsdp_ext_unit
            if unit.flat_param is not None or unit.is_summoned:
                continue
            for param in unit.params:
                grad = param.sharded.grad
                if grad is None or param.registered() is param.sharded:
                    continue
                if set_to_none:
                    param.sharded.grad = None
                else:
                    grad.detach().zero_()

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply ``fn`` to all submodules, children first, and then to this one; on all ranks.

        ``fn`` sees whole parameters. Afterwards each rank keeps its own shard of them.
        """
        # A wrapper around a wrapper shares its unit, and the inner wrapper summons that.
        units = [] if self._wraps_wrapper else [self._fsdp_ext_unit]
        with summon(units, Summoning(), "apply"):
            super().apply(fn)
        return self

    # - FSDP1's methods

    def check_is_root(self) -> bool:
        """Return whether this is the outermost wrapper."""
        return self._is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the wrappers in ``module``, which may be one; the outermost if ``root_only``."""
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"FullyShardedDataParallel got an object of type {type(module).__name__} in place "
                "of a model. Pass a wrapper, or a module with wrappers in it."
            )
        root_only = as_bool("fsdp_modules", "root_only", root_only)
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [m for m in found if m._is_root or not root_only]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank; the first backward after the context reduces them.

        Until then ``.grad`` is the unsharded sum of this rank's gradients, not averaged, in the
        dtype of the computation. Changes of it take effect, such as scaling or setting it to None.

        Raises:
            RuntimeError: if this is not the root.
        """
        self._expect_root("no_sync")
        before = self._sync_gradients
        self._set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._set_requires_gradient_sync(before)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients down in place to a total norm of at most ``max_norm``; on all ranks.

        For a finite ``norm_type``, each rank counts its own gradients of ignored parameters. If
        these differ between ranks, so do the norm and the scale, as under FSDP1: average them
        before. For ``inf``, the maximum is that of all ranks' ignored gradients, too.

        Args:
            max_norm: the largest norm to leave.
            norm_type: ``p`` of the p-norm over all elements, above 0; ``inf`` for the maximum.

        Returns:
            The norm before scaling: a plain scalar, computed in at least float32 and returned in
            the dtype that this rank's gradients promote to, or its parameters if it has no
            gradients.

        Raises:
            TypeError: if an argument is no number.
            RuntimeError: if this is not the root, or if the reduction of the norm fails, for
                example because another rank did not call this within the timeout.
            ValueError: if ``norm_type`` is not positive.
        """
        self._expect_root("clip_grad_norm_")
        limits = Limits.of("clip_grad_norm_", max_norm, norm_type)
        for wrapper in self.fsdp_modules(self):
            reshard_and_forget(wrapper._fsdp_ext_unit)  # the sharded parameters have the gradients
        unit = self._fsdp_ext_unit
        every_rank = NormRanks(tuple(unit.ranks.groups), unit.device)
        return clip(list(self.parameters()), limits, maximum_over=every_rank)

    # FSDP1 lacks these methods. Errors about ranks that run different units recommend them.
    join_empty: Any = FSDPModule.join_empty
    set_reduce_scatter_unused_params: Any = FSDPModule.set_reduce_scatter_unused_params

    def _expect_root(self, method: str) -> None:
        if not self._is_root:
            raise RuntimeError(
                f"{method} was called on a FullyShardedDataParallel inside another one, but should "
                "only be called on the root FSDP instance. Call it on the outermost one."
            )

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Let ``hook`` reduce the gradients of all wrappers, each by itself.

        Wrappers that share parameters call ``hook(state, input, output)``. ``input`` has this
        rank's gradients of the rows of each rank, one rank after the other, as a reduce-scatter
        takes them, and ``output`` gets the average of this rank's rows over all ranks. With
        ``NO_SHARD``, and on a single rank, they call ``hook(state, gradients)``, which averages in
        place. All are 1-D and have the dtype of reductions.

        On the host the hook runs on the thread of the reductions, while backward goes on. Its
        collectives need a process group that nothing else uses during backward. PyTorch's hooks in
        ``torch.distributed.algorithms._comm_hooks.default_hooks`` can be used. Those of them that
        compress need GPUs, as under FSDP1.

        Args:
            state: the first argument of the hook.
            hook: the function. If it raises, the end of backward raises its error.

        Raises:
            MisuseError: if this is not the root, or has a hook already, and for hybrid sharding. It
                is an AssertionError, as FSDP1's.
            RuntimeError: after the first forward.
            ValueError: if the hook is not a function.
        """
        wrappers = self.fsdp_modules(self)
        check_communication_hook(self._is_root, wrappers, hook)
        for wrapper in wrappers:
            wrapper._comm_hook, wrapper._comm_hook_state = hook, state
            wrapper._fsdp_ext_unit.change(communication_hook=CommunicationHook(hook, state))


def _let_optimizers_go_on(wrappers: list[FullyShardedDataParallel]) -> None:
    """Give optimizers the sharded parameters.

    Searches for them only if one may have original parameters.
    """
    if any(wrapper._has_referenced_originals for wrapper in wrappers):
        let_optimizers_go_on()
    for wrapper in wrappers:
        wrapper._has_referenced_originals = False


def _carry_over_to_shards(
    originals: dict[tuple[nn.Module, str], nn.Parameter],
) -> list[weakref.ref[nn.Parameter]]:
    """Pass attributes and optimizers of the original parameters on to the sharded ones.

    Returns:
        weak references to the replaced parameters.
    """
    replaced = []
    for (module, name), param in originals.items():
        sharded = module._parameters[name]
        if sharded is not None and sharded is not param and is_sharded(sharded):
            if type(param) is nn.Parameter:  # not what other classes add
                carry_attributes(param, sharded)
            hand_over(param, sharded)
            replaced.append(weakref.ref(param))
    return replaced
