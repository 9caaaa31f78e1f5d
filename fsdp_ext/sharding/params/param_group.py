"""The parameters of a unit as the layout sees them: shapes, dtypes, order.

A unit that trains and a unit that is only planned (``planner/units.py``) follow the same rules.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_ext import _C
from fsdp_ext._util.errors import UnsupportedError
from fsdp_ext.sharding.params.settings import UnitSettings

# Before torch 2.15, reduce_dtype=None means param_dtype. Since then it means the parameters' own
# dtype ("versionchanged" in MixedPrecisionPolicy's docstring). The policy is PyTorch's own class,
# so it means what the installed PyTorch says. Its field param_dtype_override_fn came in 2.15, too,
# and tells pre-releases apart.
_REDUCES_AS_COMPUTED = not hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")

# Parameters at least this large are gathered directly: Note [gather plans] in
# csrc/core/memory/layout.h. Tests change it.
DIRECT_BYTES = _C.DIRECT_BYTES


class Param(Protocol):
    """The properties of a parameter that a layout needs.

    ``dtype`` is the sharded parameter's, and ``shard_dim`` the dimension that ranks share.
    ``keeps_dtype`` says whether it keeps its own dtype in computation, whatever ``param_dtype`` is.
    ``grad_dtype`` is the dtype that the user wants for its gradients, if that is not its own.
    A parameter that is not gathered is only reduced: Note [tensor extensions] in
    sharding/params/extensions.py.
    """

    name: str
    keeps_dtype: bool

    @property
    def shape(self) -> torch.Size: ...

    @property
    def shard_dim(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def is_trained(self) -> bool: ...

    @property
    def grad_dtype(self) -> torch.dtype | None: ...

    @property
    def is_gathered(self) -> bool: ...


def keeps_dtype(policy: MixedPrecisionPolicy, name: str, param: nn.Parameter) -> bool:
    """Return whether the policy's ``param_dtype_override_fn`` leaves ``param`` in its own dtype."""
    override = getattr(policy, "param_dtype_override_fn", None)
    dtype = None if override is None else override(param)
    if dtype not in (None, policy.param_dtype, param.dtype):
        raise ValueError(
            f"param_dtype_override_fn returned {dtype!r} for parameter '{name}'. Return None or "
            f"param_dtype ({policy.param_dtype}) to cast it, or its own dtype ({param.dtype}) to "
            "keep that."
        )
    return dtype is not None and dtype == param.dtype


def check_can_cast(policy: MixedPrecisionPolicy, name: str, part: torch.Tensor) -> None:
    """Raise NotImplementedError if the policy casts a parameter from a dtype of one byte."""
    is_one_byte = part.dtype.is_floating_point and part.dtype.itemsize == 1
    if is_one_byte and policy.param_dtype not in (None, part.dtype):
        raise UnsupportedError(
            f"parameter '{name}' has dtype {part.dtype}, which cannot be cast to the param_dtype "
            f"{policy.param_dtype}. Convert it before fully_shard, pass it in ignored_params, or "
            "leave param_dtype out."
        )


class ParamGroup:
    """The parameters of one unit, gathered and reduced together."""

    params: Sequence[Param]

    def __init__(
        self, name: str, world_size: int, settings: UnitSettings, replicas: int = 1
    ) -> None:
        self.name = name
        self.world_size = world_size
        self.replicas = replicas
        self.settings = settings
        # The units given to set_modules_to_forward_prefetch and to the same for backward.
        self.forward_prefetch: Sequence[ParamGroup] = ()
        self.backward_prefetch: Sequence[ParamGroup] = ()

    @property
    def entries(self) -> Sequence[Param]:
        """The entries of the layout, in its order."""
        return self.params

    def layout_for(self, training: bool) -> _C.UnitLayout:
        """Return the places of parameters, and in training of gradients, in shards and buffers."""
        return self._layout(self.entries, training)

    def _layout(self, params: Sequence[Param], training: bool) -> _C.UnitLayout:
        grad_dtype, reduce_dtype = self.grad_dtypes() if training else (torch.float32,) * 2
        specs = self._specs(params, training)
        return _C.UnitLayout(
            specs,
            self.world_size,
            grad_dtype,
            reduce_dtype,
            DIRECT_BYTES,
            is_offloaded=self.settings.offloads,
        )

    def compute_dtype(self, param: Param) -> torch.dtype:
        """Return the dtype in which ``param`` is gathered and computed with."""
        dtype = self.settings.mp_policy.param_dtype
        is_cast = dtype is not None and param.dtype.is_floating_point and not param.keeps_dtype
        return dtype if dtype is not None and is_cast else param.dtype

    def grad_dtype(self, param: Param) -> torch.dtype:
        """Return the dtype of the sharded gradient of ``param``.

        It is the sharded parameter's dtype or, if low-precision gradients are kept, the dtype that
        ``param`` is computed with. The parameter's own ``grad_dtype`` takes precedence.
        """
        keeps_low = self.settings.keep_low_precision_grads
        return param.grad_dtype or (self.compute_dtype(param) if keeps_low else param.dtype)

    def grad_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the smallest dtype of the sharded gradients, and the dtype of their reduction.

        If no ``reduce_dtype`` says otherwise, gradients of several dtypes are reduced in one that
        holds the values of all of them.
        """
        sharded = [self.grad_dtype(param) for param in self.params if param.is_trained]
        reduce_dtype = functools.reduce(torch.promote_types, self._dtypes_to_reduce())
        return min(sharded, key=lambda dtype: dtype.itemsize, default=torch.float32), reduce_dtype

    def _dtypes_to_reduce(self) -> list[torch.dtype]:
        """Return the dtypes whose values a reduction has to hold."""
        policy = self.settings.mp_policy
        if policy.reduce_dtype is not None:
            return [policy.reduce_dtype]
        computed = policy.param_dtype if _REDUCES_AS_COMPUTED else None
        trainable = [param for param in self.params if param.is_trained]
        dtypes = [param.grad_dtype or computed or param.dtype for param in trainable]
        return dtypes or [computed or torch.float32]

    def reduction_bytes(self) -> int:
        """Return about how many bytes the unit's reduction has, without padding.

        It may be called before the dtypes of gradients are checked.
        """
        numel = sum(param.shape.numel() for param in self.params if param.is_trained)
        dtypes = self._dtypes_to_reduce()
        try:
            itemsize = functools.reduce(torch.promote_types, dtypes).itemsize
        except RuntimeError:  # float8 beside another dtype
            itemsize = max(dtype.itemsize for dtype in dtypes)
        return numel * itemsize

    def check_message_bytes(
        self, params: Sequence[Param], gather: int | None, reduction: int | None = None
    ) -> None:
        """Check that messages have room for one row of a parameter of each rank.

        ``gather`` and ``reduction`` are the sizes of the largest ones, summed over all ranks.
        """
        for most, training in ((gather, False), (reduction, True)):
            if most is not None and self.world_size > 1:
                self._check_rows(params, most, training)

    def _check_rows(self, params: Sequence[Param], most: int, training: bool) -> None:
        layout = self._layout(params, training)
        for index, param in enumerate(params):
            row = layout.row_bytes(index)
            if row > most and param.shard_dim > 0:
                raise ValueError(
                    f"max_message_bytes={most} is less than parameter '{param.name}' with its "
                    f"{row} bytes, which is sharded in dimension {param.shard_dim}, so messages "
                    "cannot cut it. Pass at least that, or shard it by Shard(0)."
                )
            if row > most:
                raise ValueError(
                    f"max_message_bytes={most} is less than one row of parameter '{param.name}' "
                    f"from each of {self.world_size} ranks, {row} bytes in "
                    f"{'reductions' if training else 'gathers'}. Pass at least that, or leave it "
                    "out."
                )

    def gradient_scales(self, reduce_dtype: torch.dtype) -> tuple[float, float]:
        """Return the factors for gradients before and after a reduction in ``reduce_dtype``.

        They are FSDP2's (``_get_gradient_divide_factors``). Together they average over the ranks.
        Only fp32 and bf16 are divided at once. Other dtypes, above all fp16 with its small range,
        are divided by about the square root of the divisor on each side.
        """
        if self.settings.communication_hook is not None:
            return 1.0, 1.0  # it averages
        ranks = self.world_size * self.replicas
        factor = self.settings.gradient_divide_factor or float(ranks)
        if reduce_dtype in (torch.float32, torch.bfloat16):
            return 1.0 / factor, 1.0
        before = 1
        while factor % before == 0 and factor / before > before:
            before *= 2
        return 1.0 / before, before / factor

    def _layout_order(self, params: Sequence[Param]) -> list[int]:
        """Return the indices of ``params`` in the order of csrc/core/memory/layout.h."""
        return _C.layout_order(self._specs(params, False), self.world_size, DIRECT_BYTES)

    def _specs(self, params: Sequence[Param], training: bool) -> list[_C.ParamSpec]:
        return [self._spec(param, training and param.is_trained) for param in params]

    def _spec(self, param: Param, is_trained: bool) -> _C.ParamSpec:
        return _C.ParamSpec(
            name=param.name,
            shape=param.shape,
            shard_dim=param.shard_dim,
            ranks=self.world_size,
            shard_dtype=param.dtype,
            param_dtype=self.compute_dtype(param),
            trainable=is_trained,
            gathered=param.is_gathered,
            grad_dtype=self.grad_dtype(param) if is_trained else None,
            unsharded_grad_dtype=param.grad_dtype if is_trained else None,
            is_uniform=self.settings.is_flat,
        )
