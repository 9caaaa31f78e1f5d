"""``FSDPModule``: the methods that a module has once ``fully_shard`` was applied to it."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from fsdp_ext._util.numbers import as_bool, is_real, scalar_of
from fsdp_ext.sharding.api.handles import HAS_FINALIZATION, GradientReductionHandle, UnshardHandle
from fsdp_ext.sharding.params.flat_parameter import flat_tensors
from fsdp_ext.sharding.params.user_hooks import AllReduceHook, check_comm
from fsdp_ext.sharding.root.module_state import refuse_copy, unit_of, units_below, units_of
from fsdp_ext.sharding.root.root import Root, ensure_root
from fsdp_ext.sharding.root.setting_changes import change, refuse_custom_collectives, targets_of
from fsdp_ext.sharding.root.unit import Unit
from fsdp_ext.sharding.torch_compat import torch_state
from fsdp_ext.sharding.torch_compat.state_dict_hooks import applied, reshard_and_forget


class FSDPModule(TorchFSDPModule):
    """The base class of a module's class once ``fully_shard`` was applied to the module.

    It is a subclass of PyTorch's, for code that asks ``isinstance(module, FSDPModule)``, but
    inherits no behaviour: each of PyTorch's methods has one of its own here, or raises.
    """

    _orig_cls_mro_index = 3  # FSDP<Class>, this class, PyTorch's, then the original one

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the original class, as slicing an ``nn.Sequential`` does."""
        original: Any = original_class(cls)
        self: Any = original.__new__(original)
        self.__init__(*args, **kwargs)
        return self

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise pickle.PicklingError(
            f"a sharded {original_class(type(self)).__name__} cannot be pickled or saved as a "
            "whole, because its parameters belong to this rank. Save its state dict instead, e.g. "
            "torch.save(model.state_dict(), path), or use torch.distributed.checkpoint."
            f"{_advice_for_precompile()}"
        )

    def __copy__(self) -> Any:
        """Make a shallow copy of the original class. copy.copy would call ``__reduce_ex__``."""
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def reshard(self) -> None:
        """Free this unit's unsharded parameters and register the sharded ones. Not recursive.

        The next use gathers them from all ranks again, so it sees whatever was written into the
        sharded parameters before this call. Call it on all ranks.
        """
        for unit in self._fsdp_ext_units(recurse=False):
            reshard_and_forget(unit)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters, following its mixed-precision policy. Not recursive.

        Args:
            async_op: return a handle at once instead of waiting. Forward waits by itself.
        """
        async_op = as_bool("unshard", "async_op", async_op)
        # The parameters of summoned units are whole already.
        units = [unit for unit in self._fsdp_ext_units(recurse=False) if not unit.is_summoned]
        for unit in units:
            ensure_root(unit).unshard(unit)
        handle = UnshardHandle(units)
        if async_op:
            return handle
        handle.wait()
        return None

    def prefetch_next_forward(self) -> None:
        """Issue the first gathers of the model's next forward now, so that they overlap the loader.

        Call it after ``optimizer.step()``, on all ranks. It issues no gathers before the first
        forward, between a conversion (``model.to()``) and the next forward, and once a CUDA graph
        has captured a step. If an optimizer's step,
        ``load_state_dict`` or a write in place changes parameters of a unit before the forward, the
        unit is gathered again. Such changes have to happen on all ranks. Writes through ``.data``,
        local tensors, ``flat_shard()`` or ``torch._foreach_`` functions may not be noticed, and
        race with the gathers: ranks may then compute with different weights, and only a checked
        step (``check_every``) raises. Make such writes before this call.

        Raises:
            RuntimeError: if forward or backward runs.
        """
        root = self._fsdp_ext_unit.root
        if root is not None and self._fsdp_ext_unit.impl is not None:
            root.impl.prefetch_next_forward()

    def reset_iter_state(self) -> None:
        """Reshard all units and drop unreduced gradients, after an iteration that failed.

        The next forward does this by itself. But if a forward has failed, it keeps the gradients
        that were accumulated before. This method exists for FSDP2's users. Since PyTorch 2.15 it
        also sets ``.grad`` of the parameters to None, as FSDP2's does.

        Raises:
            RuntimeError: if this module is not the root.
        """
        root = self._fsdp_ext_own_root("reset_iter_state")
        if root is None:
            return
        root.reset_iteration()
        if HAS_FINALIZATION:  # as FSDP2's since torch 2.15
            for unit in root.units:
                unit.clear_gradients()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward waits for the gradient reductions at its end.

        The setting is the root's, so it holds for the whole model. If it is False, a GPU may still
        reduce when backward returns: read and step gradients only after a last backward.
        """
        is_last = as_bool("set_is_last_backward", "is_last_backward", is_last_backward)
        self._fsdp_ext_change_root(is_last_backward=is_last)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether backwards leave the wait for reductions to :meth:`finalize_backward`.

        The setting is the root's, so it holds for the whole model. FSDP2 has it since torch 2.15.

        Raises:
            RuntimeError: below the root, and if the mode changes between a backward and its
                finalization.
        """
        by_hand = as_bool("set_manual_backward_finalization", "enabled", enabled)
        root = self._fsdp_ext_own_root("set_manual_backward_finalization")
        changes = by_hand != self._fsdp_ext_unit.settings.finalizes_by_hand
        if changes and root is not None and root.has_open_backward():
            raise RuntimeError(
                "set_manual_backward_finalization cannot change the mode while reductions of a "
                "backward are not waited for. Call it before backward, or after a last backward or "
                "finalize_backward()."
            )
        self._fsdp_ext_change_root(finalizes_by_hand=by_hand)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backwards of a step: reduce the accumulated gradients, and wait.

        Backwards accumulate after ``set_requires_gradient_sync(False)``. Units that still have this
        setting keep their gradients. Before the first forward there is nothing to do.

        Args:
            async_op: return a handle at once instead of waiting. Wait for it before the optimizer's
                step and before the next forward.

        Raises:
            RuntimeError: without :meth:`set_manual_backward_finalization`, while forward or
                backward runs, while a handle is pending, and below the root.
        """
        async_op = as_bool("finalize_backward", "async_op", async_op)
        root = self._fsdp_ext_own_root("finalize_backward")
        if root is None or root.is_provisional:
            return GradientReductionHandle() if async_op else None
        if root.pending_reduction is not None:
            raise RuntimeError(
                "finalize_backward was called while a handle of an earlier call is pending. Call "
                "wait() of that handle first."
            )
        if not self._fsdp_ext_unit.settings.finalizes_by_hand:
            raise RuntimeError(
                "finalize_backward was called, but backwards end by themselves. Call "
                "set_manual_backward_finalization(True) before forward."
            )
        root.reduce_accumulated(wait=not async_op)
        if not async_op:
            return None
        return GradientReductionHandle(root, root.leave_reduction_pending())

    def get_pending_gradients(
        self, *, recurse: bool = True
    ) -> dict[nn.Parameter, tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Return the gradients that backwards have accumulated and not reduced yet.

        They are this rank's gradients of the unsharded parameters, in the dtype of the reduction.
        Nothing is sent, except after a conversion (``module.to()``): then all ranks have to call
        this, or run a forward before. The tensors are copies, which are kept until the next
        backward, reduction or ``module.to()``. Until then in-place changes take effect, except
        those through ``.data``. Afterwards call this again. PyTorch 2.15 does not have this method
        yet.

        Args:
            recurse: also return gradients of all units below.

        Returns:
            For each sharded parameter with such a gradient: the gradient, and None. FSDP2 returns a
            gradient that is reduced over shards, but not yet over replicas, in the place of None.

        Raises:
            RuntimeError: while backward runs.
        """
        pending: dict[nn.Parameter, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        for unit in self._fsdp_ext_units(recurse):
            if unit.root is None:
                continue
            if unit.root.phase() == "backward":
                raise RuntimeError(
                    "get_pending_gradients was called while backward runs. Call it after backward."
                )
            of_unit = unit.root.pending_gradients(unit)
            pending |= {param: (gradient, None) for param, gradient in of_unit.items()}
        return pending

    def synchronize_gradients(self, *, recurse: bool = True) -> None:
        """Reduce the accumulated gradients, add them to ``.grad``, and wait.

        Call it on all ranks after backward. It does not change the setting of
        :meth:`set_requires_gradient_sync`. PyTorch 2.15 does not have this method yet.

        Args:
            recurse: do it for all units below, too.

        Raises:
            RuntimeError: while forward or backward runs.
        """
        units = self._fsdp_ext_units(recurse)
        for root in dict.fromkeys(unit.root for unit in units if unit.root is not None):
            root.synchronize_gradients(unit for unit in units if unit.root is root)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients, or only accumulates them on each rank.

        Args:
            requires_gradient_sync: False has the effect of FSDP1's ``no_sync``. The value is also
                passed to :meth:`set_requires_all_reduce`, as in FSDP2.
            recurse: set it for all units below, too.
        """
        caller = "set_requires_gradient_sync"
        syncs = as_bool(caller, "requires_gradient_sync", requires_gradient_sync)
        units = self._fsdp_ext_units(recurse, caller)
        change(units, requires_gradient_sync=syncs, requires_all_reduce=syncs)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward sums gradients over replicas, on a 2-D mesh.

        Without it, gradients accumulate as they do without
        :meth:`set_requires_gradient_sync`. FSDP2 reduces them within the ranks that share a model,
        which takes less memory and communicates more. On a 1-D mesh this has no effect.

        Args:
            requires_all_reduce: the new value.
            recurse: set it for all units below, too.
        """
        caller = "set_requires_all_reduce"
        sums = as_bool(caller, "requires_all_reduce", requires_all_reduce)
        change(self._fsdp_ext_units(recurse, caller), requires_all_reduce=sums)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward also reduces units that this rank's backward does not reach.

        Parameters that only some ranks use get the right gradient without this setting, as long as
        each rank's backward reaches their unit. See :meth:`join_empty` for units that this rank's
        forward does not run.

        Args:
            reduce_scatter_unused_params: whether a unit whose forward ran, but whose parameters get
                no gradient on this rank, sends zeros. Then parameters that no rank uses have zeros
                as gradients after a reduction, and otherwise None.
            recurse: set it for all units below, too.
        """
        caller = "set_reduce_scatter_unused_params"
        reduces = as_bool(caller, "reduce_scatter_unused_params", reduce_scatter_unused_params)
        units = self._fsdp_ext_units(recurse, caller)
        change(units, reduce_scatter_unused_params=reduces)

    def join_empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take part in the collectives of this module without running it.

        All ranks have to run the same units in the same order. Call this in forward on the ranks
        that leave this module out, at the place where others run it. Backward then sends zeros for
        its parameters. Units inside this module take part in the order of their registration, so
        its forward has to run them in that order.

        Args:
            tensor: a floating-point tensor that the loss depends on.

        Returns:
            The same values. Go on with this tensor, because backward passes this module through it.

        Raises:
            RuntimeError: outside of a forward of the root module.
            TypeError: if ``tensor`` is not a floating-point tensor.
        """
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(
                f"join_empty got {got}. Pass a floating-point tensor that the loss depends on."
            )
        return _join_empty(cast(nn.Module, self), tensor)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether forward frees the unsharded parameters at its end.

        With False, evaluations use them again until an optimizer's step or a write into the sharded
        parameters. Writes through ``.data`` are not noticed; call :meth:`reshard` after them.

        Args:
            reshard_after_forward: the new value. It holds for the root, too.
            recurse: set it for all units below, too.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward got {reshard_after_forward!r}. Pass True or False."
            )
        units = self._fsdp_ext_units(recurse, "set_reshard_after_forward")
        change(units, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward frees the unsharded parameters.

        Args:
            reshard_after_backward: False saves the next forward's all-gather when gradients are
                accumulated, and costs the memory of the unsharded parameters.
            recurse: set it for all units below, too.
        """
        caller = "set_reshard_after_backward"
        reshards = as_bool(caller, "reshard_after_backward", reshard_after_backward)
        change(self._fsdp_ext_units(recurse, caller), reshard_after_backward=reshards)

    def set_modules_to_forward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Set the units to prefetch when this unit runs forward, instead of the recorded order.

        Args:
            modules: sharded modules; each needs a slot of the ring while it is ahead.
        """
        units = self._fsdp_ext_units(recurse=False)
        targets = targets_of(units, modules, "set_modules_to_forward_prefetch")
        for unit, ahead in zip(units, targets, strict=True):
            unit.forward_prefetch = ahead
        change(units)

    def set_modules_to_backward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Set the units to prefetch when this unit runs backward, instead of the reverse order.

        Args:
            modules: sharded modules; each needs a slot of the ring while it is ahead.
        """
        units = self._fsdp_ext_units(recurse=False)
        targets = targets_of(units, modules, "set_modules_to_backward_prefetch")
        for unit, ahead in zip(units, targets, strict=True):
            unit.backward_prefetch = ahead
        change(units)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Set the divisor of this unit's summed gradients, instead of the world size.

        A backward that reduces accumulated gradients divides their sum by the factor in effect
        then.

        Args:
            factor: a positive number. None stands for the world size again.
        """
        divisor = scalar_of(factor)
        if divisor is not None and (not is_real(divisor) or divisor <= 0):
            raise ValueError(
                f"set_gradient_divide_factor got {factor!r}. Pass a positive number, or None for "
                "the world size."
            )
        divisor = None if divisor is None else float(divisor)
        change(self._fsdp_ext_units(recurse=False), gradient_divide_factor=divisor)

    def set_reduce_scatter_divide_factor(self, factor: float | None) -> None:
        """Call :meth:`set_gradient_divide_factor`; this is FSDP2's older name for it."""
        self.set_gradient_divide_factor(factor)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers this unit's parameters. Not recursive.

        Args:
            unshard_in_backward: pass False if backward does not read them, as for an embedding. If
                backward reads them, it raises. Gradients do not depend on this setting.
        """
        needed = as_bool("set_unshard_in_backward", "unshard_in_backward", unshard_in_backward)
        change(self._fsdp_ext_units(recurse=False), unshard_in_backward=needed)

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """Make the current stream wait for the end of an optimizer's step on another stream.

        The next gathers wait for the current stream, and so for ``event``. FSDP2's gathers wait for
        ``event`` alone.

        Args:
            event: recorded after the step. None waits for nothing: ``record_event()`` of the CPU's
                streams returns it.

        Raises:
            TypeError: if ``event`` is neither an event nor None.
        """
        if event is None:
            return
        if not isinstance(event, torch.Event):
            raise TypeError(
                f"set_post_optim_event got {event!r}. Pass a torch.Event that was recorded after "
                "the optimizer's step."
            )
        # The host has no streams of its own to wait for.
        if self._fsdp_ext_unit.device.type != "cpu":
            event.wait()

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], object] | None, *, stream: torch.Stream | None = None
    ) -> None:
        """Set a function that may change this unit's reduced gradients in place. Not recursive.

        It gets a 1-D tensor of the reduction's dtype after the reduce-scatter and, on a 2-D mesh,
        after the all-reduce over replicas. So on a 1-D mesh it can be an all-reduce over other
        ranks. The tensor contains all trainable parameters of the unit, in the order of the flat
        gradient of :meth:`flat_shard`. The padding between them is zero. It is valid until the hook
        returns.

        On the host the hook runs on the thread of the reductions, while backward goes on. If it
        calls collectives, they need a process group that nothing else uses during backward. Set it
        on all ranks, before the same forward. The unit then shares no bucket.

        Args:
            hook: the function; None for none. If it raises, the end of backward raises its error,
                on that rank only, and the unit's gradients there are undefined.
            stream: the stream to run it on. By default it is the reductions' stream.

        Raises:
            TypeError: if ``hook`` is not a function, or ``stream`` no stream.
            ValueError: if ``stream`` is given on a 2-D mesh or without a hook.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"set_all_reduce_hook got {hook!r}. Pass a function of one tensor.")
        if stream is not None and not isinstance(stream, (torch.Stream, torch.cpu.Stream)):
            raise TypeError(
                f"set_all_reduce_hook got stream={stream!r}. Pass a torch.Stream, or leave it out."
            )
        unit = self._fsdp_ext_only_unit("set_all_reduce_hook")
        if stream is not None and (hook is None or unit.ranks.mesh.ndim > 1):
            where = "no hook" if hook is None else "a 2-D mesh, whose all-reduce has a stream"
            raise ValueError(f"set_all_reduce_hook got a stream and {where}. Leave stream out.")
        change([unit], all_reduce_hook=None if hook is None else AllReduceHook(hook, stream))

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Set an object that gathers this unit's parameters. Not recursive.

        The unit shares no bucket then, and ``comm`` is called for each of its messages. Over shared
        memory each parameter is a message, and over NCCL each large one. Calls are in the order of
        gathers: on their stream on GPUs, on their thread on the host. ``group`` has the ranks of
        the mesh, and only such objects use it. ``comm`` gets tensors that it has allocated; the
        input is this rank's part of the output. Set it on all ranks, before the same forward.

        Args:
            comm: implements PyTorch's ``AllGather``.

        Raises:
            TypeError: if ``comm`` cannot be called or has no ``allocate``.
        """
        check_comm("set_custom_all_gather", comm)
        change([self._fsdp_ext_only_unit("set_custom_all_gather")], custom_all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Set an object that adds up this unit's gradients over the ranks. Not recursive.

        The notes of :meth:`set_custom_all_gather` on messages, streams, ``group`` and tensors hold
        here, too. ``op`` is SUM, because gradients are scaled before. On a 2-D mesh, the all-reduce
        over replicas follows.

        Args:
            comm: implements PyTorch's ``ReduceScatter``.

        Raises:
            TypeError: if ``comm`` cannot be called or has no ``allocate``.
        """
        check_comm("set_custom_reduce_scatter", comm)
        change([self._fsdp_ext_only_unit("set_custom_reduce_scatter")], custom_reduce_scatter=comm)

    # - Methods of FSDP2 that change nothing here, because their effect is always on

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing: reductions are sums, and gradients are scaled before them."""
        as_bool("set_force_sum_reduction_for_comms", "enable", enable)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Do nothing: gathers and reductions always have communicators of their own."""
        as_bool("set_separate_reduce_scatter_group", "enable", enable)
        as_bool("set_separate_reduce_scatter_group", "recurse", recurse)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Do nothing: computation never waits for the buffer that gradients are packed into.

        Packing runs on a stream of the reduce lane, so only that stream waits for a buffer.

        Raises:
            TypeError: if ``max_input_buffers`` is not an integer.
            ValueError: if it is less than 1.
        """
        caller = "set_reduce_scatter_max_input_buffers"
        is_int = isinstance(max_input_buffers, int) and not isinstance(max_input_buffers, bool)
        if not is_int or max_input_buffers < 1:
            kind = ValueError if is_int else TypeError
            raise kind(f"{caller} got {max_input_buffers!r}. Pass an integer of 1 or more.")
        as_bool(caller, "recurse", recurse)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Do nothing: where NCCL can register buffers, the planned buffers come from its allocator.

        Raises:
            TypeError: if ``enable`` is not a bool.
            ValueError: after :meth:`set_custom_all_gather` or :meth:`set_custom_reduce_scatter`,
                whose objects allocate their own tensors. It is an AssertionError, too, as FSDP2's.
        """
        caller = "set_allocate_memory_from_process_group_for_comm"
        as_bool(caller, "enable", enable)
        refuse_custom_collectives(self._fsdp_ext_unit, caller)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Do nothing: buffers on GPUs are registered with NCCL already.

        Raises:
            ValueError: if ``backend`` is not "NCCL", or after :meth:`set_custom_all_gather` or
                :meth:`set_custom_reduce_scatter`.
        """
        if backend != "NCCL":
            raise ValueError(f"set_symm_mem_for_comm got backend={backend!r}. Pass 'NCCL'.")
        refuse_custom_collectives(self._fsdp_ext_unit, "set_symm_mem_for_comm")

    def set_keep_unsharded_storage(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: unsharded parameters lie in slots that are allocated once and kept."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: gathers allocate no memory, so the choice of a stream has no effect."""

    def flat_shard(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this unit's flat shard and flat gradient, for optimizers that work on them whole.

        The sharded parameters and, after backward, their gradients are views of the two. Both are
        1-D and of one length. An element and its gradient have the same index, and there is padding
        between parameters. If a parameter's ``.grad`` is None, its part of the flat gradient is out
        of date. Raw addresses, such as those of NumPy or CuPy arrays over the two, are valid until
        the next forward or backward, which may move the memory.

        Raises:
            ValueError: if the unit's parameters differ in dtype, some are frozen, or gradients are
                padded otherwise because they are reduced in a smaller dtype.
            RuntimeError: before the first forward.
        """
        return flat_tensors(self._fsdp_ext_only_unit("flat_shard"))

    def _fsdp_ext_change_root(self, **settings: bool) -> None:
        self._fsdp_ext_unit.change(**settings)
        if self._fsdp_ext_unit.root is not None:
            self._fsdp_ext_unit.root.change(**settings)

    def _fsdp_ext_own_root(self, caller: str) -> Root | None:
        """Return the root; None before the first forward.

        Raises:
            RuntimeError: if this module is below the root.
        """
        root: Root | None = self._fsdp_ext_unit.root
        if root is not None and root.number(self._fsdp_ext_unit) > 0:
            raise RuntimeError(
                f"{caller} was called on unit '{self._fsdp_ext_unit.name}'. Call it on the root "
                "module, which is the one that ran forward first."
            )
        return root

    @property
    def _fsdp_ext_unit(self) -> Unit:
        unit = unit_of(cast(nn.Module, self))
        assert unit is not None
        return unit

    def _fsdp_ext_units(self, recurse: bool, caller: str = "FSDPModule") -> list[Unit]:
        """Return the units that a call of the method ``caller`` concerns."""
        recurse = as_bool(caller, "recurse", recurse)
        module = cast(nn.Module, self)
        return units_below(module) if recurse else units_of(module)

    def _fsdp_ext_only_unit(self, caller: str) -> Unit:
        """Return the module's unit for a method that has no meaning for several ones."""
        units = self._fsdp_ext_units(recurse=False)
        if len(units) > 1:
            raise ValueError(
                f"{caller} is not supported with multiple param groups, and the parameters of unit "
                f"'{units[0].name}' lie on {len(units)} meshes. Call fully_shard for the modules "
                "of each mesh, and this method on these modules."
            )
        return units[0]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        original: Any = super(TorchFSDPModule, self)
        with applied(self._fsdp_ext_units(recurse=False)):
            return original._apply(*args, **kwargs)

    def _get_fsdp_state(self) -> Any:
        """Return a view of the unit with a part of PyTorch's ``FSDPState``."""
        return torch_state.view_of(cast(nn.Module, self))


def _join_empty(module: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """Take part for ``module``, a unit or a module of one, and for the units inside it."""
    unit = unit_of(module)
    if unit is None:
        return _join_children(module, tensor)
    if unit.impl is None:
        raise RuntimeError(
            f"join_empty was called on unit '{unit.name}' before the first forward of the root "
            "module. Call it in that forward."
        )
    tensor = _join_children(module, unit.impl.begin_skip(tensor))
    unit.impl.end_skip(unit.modules.index(module), tensor)
    return tensor


def _join_children(module: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    for child in module.children():
        tensor = _join_empty(child, tensor)
    return tensor


def refuse_rest(cls: type, base: type) -> None:
    """Give ``cls`` a method that raises for each method of ``base`` that it does not override.

    PyTorch's methods would look for its own state on the module. Newer versions of PyTorch may add
    methods, so the list is read from the installed version.
    """
    for name, value in vars(base).items():
        if callable(value) and name not in vars(cls) and not name.startswith("__"):
            setattr(cls, name, functools.partialmethod(_refuse, name))


def _refuse(self: object, name: str, /, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(f"FSDPModule.{name} is not supported yet. Leave the call out.")


refuse_rest(FSDPModule, TorchFSDPModule)
# The methods that PyTorch's class does not have.
_ADDED = [
    name for name in vars(FSDPModule) if name[0] != "_" and not hasattr(TorchFSDPModule, name)
]


def _advice_for_precompile() -> str:
    """Return what to do if ``torch.compile``, which pickles modules then, may have asked."""
    dynamo = sys.modules.get("torch._dynamo.config")
    if not getattr(dynamo, "caching_precompile", False):
        return ""
    return " torch._dynamo.config.caching_precompile pickles compiled modules, so leave it off."


# - The class of a sharded module

_classes: dict[type[nn.Module], type[nn.Module]] = {}


def fsdp_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of ``FSDPModule`` and ``cls`` that sharded modules of ``cls`` have."""
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (_methods_for(cls), cls), {})
    return _classes[cls]


def _methods_for(cls: type[nn.Module]) -> type[FSDPModule]:
    """Return the class of methods whose instances have the memory layout of those of ``cls``.

    A base class without a ``__dict__``, such as ``ABC``, may come before ``nn.Module``. Python
    gives an instance another class only if both add the ``__dict__`` to the same base class.
    """
    base: Any = cls
    while base.__base__.__dictoffset__ != 0:
        base = base.__base__
    if base.__base__ is object:
        return FSDPModule
    # The MRO is: the new class, this base, `cls`, and later FSDPModule. So `cls` is at index 2.
    # typing.Generic refuses a class that inherits from it without naming it in its bases, unless
    # the class has `__orig_bases__`.
    attributes = {"_orig_cls_mro_index": 2, "__orig_bases__": (FSDPModule,)}
    return type("FSDPModule", (base.__base__, FSDPModule), attributes)


def set_classes(modules: Sequence[nn.Module]) -> None:
    """Give modules their new classes: all of them, or none if one cannot have it."""
    for module in modules:
        own = {*module._modules, *module._parameters, *module._buffers}
        hidden = [name for name in _ADDED if name in own or hasattr(type(module), name)]
        if hidden:
            raise ValueError(
                f"fully_shard got a {type(module).__name__}, whose own attributes {hidden} would "
                "be hidden by methods that fsdp_ext adds to FSDPModule. Rename them."
            )
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for module in modules:
            before = type(module)
            module.__class__ = fsdp_class(before)
            changed.append((module, before))
    except TypeError as error:
        for done, before in changed:
            done.__class__ = before
        raise TypeError(
            f"fully_shard got a {before.__name__}, whose class it cannot replace by a subclass "
            f"with FSDPModule's methods ({error}). Put the module into a plain nn.Module, and "
            "shard that."
        ) from error


def original_class(cls: type[Any]) -> type[Any]:
    """Return the class that a module had before ``fully_shard``; ``cls`` if it is not sharded."""
    if not issubclass(cls, FSDPModule):
        return cls
    original: type[Any] = cls.__mro__[cls._orig_cls_mro_index]
    return original
