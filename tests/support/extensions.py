"""Two tensor subclasses with FSDP2's extensions, and a model of them.

`Int8Weight` is quantised and frozen: it gathers numbers and scales. `HalfWeight` is trained: its
rows are fp32, and it gathers them in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

aten: Any = torch.ops.aten

# The results of other operators are plain tensors.
_KEEPS_CLASS = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.split.Tensor,
    aten.new_zeros.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.slice.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten.t.default,
}


def _wrapper(cls: Any, like: Tensor, dtype: torch.dtype) -> Any:
    return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device
    )


class HalfWeight(Tensor):
    """A trained weight that travels in bf16, multiplied by a number that travels as metadata."""

    SCALE = 0.5  # a power of two: it changes no digit

    @staticmethod
    def __new__(cls, data: Tensor) -> HalfWeight:
        made: HalfWeight = _wrapper(cls, data, data.dtype)
        return made

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def __repr__(self) -> str:  # type: ignore[override]
        return f"HalfWeight({self._data})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> HalfWeight:
        return HalfWeight(inner["_data"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(HalfWeight, lambda tensor: tensor._data, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func._schema.name.endswith("_") and isinstance(args[0], HalfWeight):
            return args[0]
        if func in _KEEPS_CLASS:
            return pytree.tree_map_only(Tensor, cls, result)
        return result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        assert mesh.ndim == 1
        assert isinstance(module, nn.Module)
        assert tuple(torch.empty(outer_size, device="meta").stride()) == tuple(outer_stride)
        rows = self._data
        whole = -(-outer_size[0] // mesh.size())
        if rows.size(0) < whole:
            rows = F.pad(rows, (0, 0, 0, whole - rows.size(0)))
        scale = self.SCALE if mp_policy.param_dtype is None else 1.0
        return ((rows * scale).to(torch.bfloat16),), {"scale": scale}

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (gathered,) = outputs
        out = out._local_tensor if isinstance(out, DTensor) else out
        assert gathered.dtype == torch.bfloat16
        scale = metadata["scale"]
        if param_dtype == torch.bfloat16:  # the unsharded parameter lies in the gathered memory
            assert scale == 1.0
            if out is None:
                return HalfWeight(gathered), (gathered,)
            assert out._data.untyped_storage()._cdata == gathered.untyped_storage()._cdata
            return None
        if out is None:
            own = gathered.to(param_dtype) / scale
            return HalfWeight(own), (gathered, own)
        torch.div(gathered.to(param_dtype)[: out.size(0)], scale, out=out._data)
        return None


class Int8Weight(Tensor):
    """A frozen weight of int8 numbers, with a scale in fp32 for each row."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Int8Weight:
        made: Int8Weight = _wrapper(cls, numbers, dtype)
        return made

    def __init__(self, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self._numbers, self._scales = numbers, scales

    @staticmethod
    def of(weight: Tensor) -> Int8Weight:
        scales = weight.abs().amax(1, keepdim=True).float() / 127
        return Int8Weight((weight / scales).round().to(torch.int8), scales, weight.dtype)

    def whole(self) -> Tensor:
        return (self._numbers * self._scales).to(self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Int8Weight({self._numbers}, {self._scales})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["_numbers", "_scales"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: Any, dtype: Any, size: Any, stride: Any) -> Int8Weight:
        return Int8Weight(inner["_numbers"], inner["_scales"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default:
            args[0]._numbers.copy_(args[1]._numbers)
            args[0]._scales.copy_(args[1]._scales)
            return args[0]
        first = args[0]
        if func not in _KEEPS_CLASS:
            plain = pytree.tree_map_only(Int8Weight, Int8Weight.whole, (args, kwargs))
            return func(*plain[0], **plain[1])
        if func is aten._to_copy.default and kwargs.get("dtype") is not None:
            raise NotImplementedError("Int8Weight has no other dtype")

        def each(inner: Tensor, columns: int) -> Any:
            if func is aten.view.default or func is aten.as_strided.default:
                rows = args[1][0] if len(args[1]) == 2 else inner.size(0)
                return inner[:rows]
            if func is aten.new_zeros.default:
                return func(inner, [args[1][0], columns], **{**kwargs, "dtype": inner.dtype})
            return func(inner, *args[1:], **kwargs)

        numbers, scales = each(first._numbers, first._numbers.size(1)), each(first._scales, 1)
        if isinstance(numbers, Tensor):
            return Int8Weight(numbers, scales, first.dtype)
        return [Int8Weight(n, s, first.dtype) for n, s in zip(numbers, scales, strict=True)]

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self._numbers, self._scales), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        numbers, scales = outputs
        if out is None:
            return Int8Weight(numbers, scales, param_dtype), outputs
        assert out._numbers.untyped_storage().data_ptr() == numbers.untyped_storage().data_ptr()
        return None


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Int8Weight) -> Tensor:
        ctx.weight = weight
        return x @ weight.whole().t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient @ ctx.weight.whole(), None


class Block(nn.Module):
    """A frozen quantised layer with a trained correction of low rank, and a trained layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.base = nn.Parameter(Int8Weight.of(torch.randn(hidden, width)), requires_grad=False)
        self.low = nn.Linear(width, 2, bias=False)
        self.high = nn.Linear(2, hidden, bias=False)
        self.down = nn.Linear(hidden, width)
        self.down.weight = nn.Parameter(HalfWeight(self.down.weight.detach()))

    def forward(self, x: Tensor) -> Tensor:
        x = _FrozenLinear.apply(x, self.base) + self.high(self.low(x))
        return self.down(torch.tanh(x))


class Model(nn.Module):
    def __init__(self, width: int = 7, hidden: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.head = nn.Linear(width, 1)  # one row, so other ranks have none
        self.head.weight = nn.Parameter(HalfWeight(self.head.weight.detach()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def contents(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors inside `tensor`."""
    if isinstance(tensor, HalfWeight):
        return [tensor._data]
    if isinstance(tensor, Int8Weight):
        return [tensor._numbers, tensor._scales]
    return [tensor]


def linear_of(weight: Tensor) -> nn.Linear:
    """Return a layer without bias that has this weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight)
    return layer


def checkpointed(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that runs again in backward."""
    return lambda x: checkpoint(forward, x, use_reentrant=False)
