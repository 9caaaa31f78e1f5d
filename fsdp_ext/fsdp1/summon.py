"""Whole parameters in the modules for a while: ``summon_full_params`` and ``apply``.

Inside the context the modules of a unit have plain parameters that the unit does not know. Forward
runs them as they are, and neither gathers nor casts for the unit. Afterwards the modules have the
sharded parameters again, with the values that were written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from fsdp_ext._util.errors import MisuseError
from fsdp_ext._util.numbers import as_bool
from fsdp_ext._util.warn import warn_caller
from fsdp_ext.fsdp1.state_dict_forms import is_rank_0
from fsdp_ext.fsdp1.whole_tensors import shard_like, whole_copy
from fsdp_ext.sharding.params.entries import ShardedParam
from fsdp_ext.sharding.params.flat_parameter import own_parameters_shown
from fsdp_ext.sharding.params.module_attributes import set_parameter
from fsdp_ext.sharding.params.ownership import (
    carry_attributes,
    mark_goes_on_as,
    mark_overwritten,
    mark_unsharded,
)
from fsdp_ext.sharding.params.unreduced import is_unreduced
from fsdp_ext.sharding.root.agreement import called_by_ranks_of
from fsdp_ext.sharding.root.unit import Unit
from fsdp_ext.sharding.torch_compat.state_dict_hooks import settle

# Set on a whole parameter: the sharded one that it stands for.
_STANDS_FOR = "_fsdp_ext_stands_for"


@dataclass(frozen=True)
class Summoning:
    """How parameters are summoned: the arguments of ``summon_full_params``."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False

    def check(self) -> None:
        """Raise TypeError if a value is no bool, and NotImplementedError where FSDP1 does, too."""
        for name, value in vars(self).items():
            as_bool("summon_full_params", name, value)
        if self.with_grads and self.offload_to_cpu:
            raise NotImplementedError(
                "summon_full_params got with_grads=True and offload_to_cpu=True, which are not "
                "supported together. Move the gradients inside the context."
            )
        if self.writeback and self.rank0_only:
            raise NotImplementedError(
                "summon_full_params with rank0_only=True and writeback=True is not supported, "
                "because other ranks would not see what rank 0 writes. Pass writeback=False, or "
                "rank0_only=False and write the same values on all ranks."
            )
        if self.offload_to_cpu and not self.rank0_only:
            warn_caller(
                "summon_full_params got offload_to_cpu=True and rank0_only=False, so every rank of "
                "a host has a copy of the parameters there. Pass rank0_only=True, too, if one "
                "copy is enough."
            )


class _Stand:
    """A whole parameter that stands for a sharded one in the modules."""

    def __init__(self, param: ShardedParam, whole: nn.Parameter, *, is_flat: bool) -> None:
        self._param = param
        self._whole = whole
        self._is_flat = is_flat
        self.attributes = list(param.attributes)
        setattr(whole, _STANDS_FOR, param.sharded)
        if is_flat:
            mark_unsharded(whole, param.name)  # no optimizer can train it
        else:
            mark_goes_on_as(whole, param.sharded)  # optimizers may be made of whole parameters
            carry_attributes(param.sharded, whole)
        if whole.requires_grad:
            hooked: Any = whole  # torch leaves this untyped
            hooked.register_post_accumulate_grad_hook(_refuse_backward)

    def put(self, *, overwrites: bool) -> None:
        mark_overwritten(self._param.sharded, overwrites)
        for module, name in self.attributes:
            set_parameter(module, name, self._whole)

    def take_away(self) -> nn.Parameter:
        """Give the modules the sharded parameter again; return the whole one that they had."""
        mark_overwritten(self._param.sharded, False)
        found = self._whole
        for module, name in self.attributes:
            now = module._parameters.get(name)
            if now is not None and now is not self._whole:
                found = now  # the user has assigned another one
            set_parameter(module, name, self._param.sharded)
        if not self._is_flat:
            carry_attributes(found, self._param.sharded)
        return found

    def check_shape(self, written: nn.Parameter) -> None:
        if written.shape != self._param.sharded.shape:
            raise ValueError(
                f"parameter '{self._param.name}' had shape {tuple(self._param.sharded.shape)}, but "
                f"was given shape {tuple(written.shape)} while it was summoned. Its values are "
                "dropped. Change shapes before wrapping."
            )

    @torch.no_grad()
    def write_back(self, written: nn.Parameter, *, with_grads: bool) -> None:
        sharded = self._param.sharded
        sharded.copy_(shard_like(written.detach(), cast(DTensor, sharded)))
        if not self._is_flat:
            sharded.requires_grad_(written.requires_grad)
        if not with_grads:
            return
        if written.grad is None:
            sharded.grad = None
            return
        grad = shard_like(written.grad, cast(DTensor, sharded))
        if sharded.grad is None:
            sharded.grad = grad.clone()  # a shard must not keep the whole alive
        else:
            sharded.grad.copy_(grad)


@contextlib.contextmanager
def _refused_backward(stands: list[_Stand]) -> Iterator[None]:
    """Let backward also raise if it reaches a parameter that the user assigns in the block."""
    attributes = {attribute for stand in stands for attribute in stand.attributes}
    handles: list[Any] = []

    def watch(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        if value is not None and value.requires_grad and (module, name) in attributes:
            hooked: Any = value
            handles.append(hooked.register_post_accumulate_grad_hook(_refuse_backward))

    handles.append(register_module_parameter_registration_hook(watch))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse_backward(param: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        "backward reached a whole parameter of summon_full_params, whose gradient nothing would "
        "reduce. Run forward and backward outside of the context."
    )


def _check_can_summon(unit: Unit, how: Summoning, caller: str) -> None:
    """Raise MisuseError or NotImplementedError if ``unit`` cannot be summoned now."""
    if unit.is_summoned:
        raise MisuseError(
            f"{caller} was called on unit '{unit.name}', which is expected to be in states "
            "[TrainingState.IDLE], but its parameters are summoned already. Use the parameters "
            "that its modules have now, or leave the first context."
        )
    phase = unit.phase()
    if phase != "idle":
        raise MisuseError(
            f"Cannot manually unshard parameters during forward/backward: {caller} was called on "
            f"unit '{unit.name}' while {phase} runs. Call it between steps."
        )
    if how.with_grads and any(is_unreduced(param.sharded) for param in unit.params):
        raise MisuseError(
            f"{caller} got with_grads=True on unit '{unit.name}', whose gradients of no_sync are "
            "not reduced yet. Call it after a backward outside of no_sync."
        )
    if how.with_grads and unit.flat_param is not None:
        raise NotImplementedError(
            f"{caller} got with_grads=True on unit '{unit.name}', which has a flat parameter. Wrap "
            "with use_orig_params=True."
        )


@contextlib.contextmanager
def summon(units: Sequence[Unit], how: Summoning, caller: str) -> Iterator[None]:
    """Give the modules of ``units`` whole parameters. All ranks enter this.

    Units inside of them are summoned only if they are listed.
    """
    for unit in units:
        _check_can_summon(unit, how, caller)
    with called_by_ranks_of(units, caller):
        pass  # the body of the with statement may differ between ranks, with its own collectives
    with contextlib.ExitStack() as summoned:
        for unit in units:
            settle(unit)
            summoned.enter_context(own_parameters_shown(unit))
            summoned.enter_context(_whole_parameters(unit, how))
        yield


@contextlib.contextmanager
def _whole_parameters(unit: Unit, how: Summoning) -> Iterator[None]:
    stands = _gather(unit, how)
    if how.rank0_only and not is_rank_0(unit.ranks):
        stands = []
    flat = unit.flat_param
    _set_summoned(unit, True)
    for stand in stands:
        stand.put(overwrites=how.writeback)
    if flat is not None:
        mark_overwritten(flat.param, how.writeback)
    try:
        with _refused_backward(stands):
            yield
    finally:
        written = [stand.take_away() for stand in stands]
        if flat is not None:
            mark_overwritten(flat.param, False)
        _set_summoned(unit, False)
        if how.writeback:
            for stand, param in zip(stands, written, strict=True):
                stand.check_shape(param)
            for stand, param in zip(stands, written, strict=True):
                stand.write_back(param, with_grads=how.with_grads)


def _set_summoned(unit: Unit, value: bool) -> None:
    unit.is_summoned = value
    if unit.root is not None and unit.impl is not None:
        unit.root.apply([unit])


@torch.inference_mode(False)
def _gather(unit: Unit, how: Summoning) -> list[_Stand]:
    grads = _sharded_gradients(unit) if how.with_grads else [None] * len(unit.params)
    stands = []
    for param, grad in zip(unit.params, grads, strict=True):
        value = whole_copy(cast(DTensor, param.sharded))
        value = value.cpu() if how.offload_to_cpu else value
        whole = nn.Parameter(value, requires_grad=param.requires_grad)
        if grad is not None:
            whole.grad_dtype = None  # it may be that of keep_low_precision_grads
            whole.grad = whole_copy(grad)
        stands.append(_Stand(param, whole, is_flat=unit.flat_param is not None))
    return stands


@torch.no_grad()
def _sharded_gradients(unit: Unit) -> list[DTensor | None]:
    """Return the gradients of the unit, and zeros if only other ranks have one, as FSDP1 does."""
    own = [cast("DTensor | None", param.sharded.grad) for param in unit.params]
    if not own:
        return own
    exists = torch.tensor([int(grad is not None) for grad in own], device=unit.device)
    dist.all_reduce(exists, dist.ReduceOp.MAX, group=unit.ranks.shard_group)
    return [
        cast(DTensor, torch.zeros_like(param.sharded)) if grad is None and anywhere else grad
        for param, grad, anywhere in zip(unit.params, own, exists.tolist(), strict=True)
    ]


def stands_for(param: nn.Parameter) -> DTensor | None:
    """Return the sharded parameter that a summoned one stands for; None for other parameters."""
    sharded: DTensor | None = getattr(param, _STANDS_FOR, None)
    return sharded


class SummonMethods:
    """FSDP1's method that shows whole parameters. It is called on the class, with a module."""

    fsdp_modules: Callable[..., list[Any]]

    @classmethod
    @contextlib.contextmanager
    def summon_full_params(
        cls,
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Give the modules of wrappers whole parameters, which are plain tensors; on all ranks.

        They have the dtype of the sharded parameters, whatever mixed precision says. Forward may
        run inside, and computes with them. Backward may not.

        Args:
            module: a wrapper, or a module with wrappers in it.
            recurse: summon the parameters of all wrappers in ``module``. False means those of
                ``module`` itself, without the wrappers inside, which gather in forward.
            writeback: keep what is written into them. Each rank keeps its own shard of what it has
                written, so all have to write the same.
            rank0_only: only rank 0 of ``process_group`` gets them; the others have the sharded
                ones.
            offload_to_cpu: put them on the host.
            with_grads: gather gradients, too, and with ``writeback`` keep what is written there.

        Raises:
            MisuseError: in forward or backward, and for wrappers whose parameters are summoned
                already. It is an AssertionError, as FSDP1's.
            NotImplementedError: for ``writeback`` with ``rank0_only``, and for ``with_grads`` with
                ``offload_to_cpu`` or without ``use_orig_params``.
            RuntimeError: if a rank does not call it within the timeout of the process group.
            ValueError: if a parameter was given another shape inside.
        """
        how = Summoning(writeback, rank0_only, offload_to_cpu, with_grads)
        how.check()
        recurse = as_bool("summon_full_params", "recurse", recurse)
        wrappers = cls.fsdp_modules(module) if recurse or isinstance(module, cls) else []
        taken = wrappers if recurse else wrappers[:1]
        # A wrapper around a wrapper shares its unit, and the inner wrapper summons that.
        units = [each._fsdp_ext_unit for each in taken if not each._wraps_wrapper]
        with summon(units, how, "summon_full_params"):
            yield
