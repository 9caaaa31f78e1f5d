"""``stream_weights``: whole weights, one unit after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ext.checkpoint.transfers import (
    as_bytes,
    call_roll,
    full_tensor,
    new_tensor,
    shared,
    to_send,
)
from fsdp_ext.checkpoint.weights import Weight, weights_by_unit
from fsdp_ext.comm.collectives import all_gather


def stream_weights(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    shard: Callable[[str, torch.Size], Any] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator over the names and whole tensors of a model's state dict.

    All ranks iterate over it. While the caller uses the tensors of one unit, those of the next one
    are gathered, so beside its shards a rank has the tensors of two units. The units stay sharded.
    Values are those of the sharded parameters, whatever mixed precision says.

    A rank that stops early takes part in the remaining gathers when it closes the iterator, as the
    end of a ``for`` loop does. Finish it before other collectives of the same process groups.

    Args:
        model: sharded by ``fully_shard``, wrapped by ``FullyShardedDataParallel``, tensor parallel,
            or a plain one.
        dtype: the dtype of floating-point tensors; None for that of the sharded parameters. They
            are cast before they are gathered if that makes them smaller.
        device: where the tensors go; None for where each one's shard is.
        shard: returns which part of a tensor is wanted on this rank, from its name and shape: an
            index such as ``(slice(0, 8), slice(None))``, or None for the whole tensor. Parts are
            copies, which keep no whole tensor alive.

    Returns:
        Parameters and persistent buffers, with the names of the state dict, unit by unit. A tied
        parameter comes under each of its names. Tensors that each rank has whole share memory with
        the model, so do not write into them.

    Raises:
        NotImplementedError: for weights that PyTorch's FSDP1 shards.
        RuntimeError: from the iterator, if a rank does not call this within the timeout of the
            process group, if the model runs, or if it has weights on the meta device.
        TypeError: if ``dtype`` is no floating-point dtype, or ``shard`` is no function.
    """
    check_dtype(dtype, "stream_weights")
    if shard is not None and not callable(shard):
        raise TypeError(
            f"stream_weights got shard={shard!r}. Pass a function of a name and a shape, or None."
        )
    to = None if device is None else torch.device(device)
    return _by_name(model, dtype, to, shard)


def _by_name(
    model: nn.Module,
    dtype: torch.dtype | None,
    device: torch.device | None,
    shard: Callable[[str, torch.Size], Any] | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    units = weights_by_unit(model, "stream_weights")
    call_roll([weight for unit in units for weight in unit], "stream_weights")
    whole = _whole(units, dtype)
    try:
        for weight, gathered in whole:
            # _whole does not cast, because a generator cannot continue after an error.
            tensor = _placed(gathered, device or weight.local.device, weight.dtype_as(dtype))
            del gathered
            for name in weight.names:
                yield name, tensor if shard is None else _part(tensor, shard(name, tensor.shape))
            del tensor  # before the next unit's gather needs memory
    finally:
        for _ in whole:  # other ranks may go on, and their gathers need this one
            pass


@torch.inference_mode(False)
@torch.no_grad()
def _placed(gathered: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return gathered.to(device, dtype)


@torch.inference_mode(False)
@torch.no_grad()
def _part(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    return tensor if index is None else tensor[index].clone()


def check_dtype(dtype: torch.dtype | None, caller: str) -> None:
    """Raise TypeError if weights cannot be cast to ``dtype``."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{caller} got dtype={dtype!r}. Pass a floating-point dtype or None.")


def _whole(
    units: list[list[Weight]], dtype: torch.dtype | None
) -> Iterator[tuple[Weight, torch.Tensor]]:
    ahead: _Flight | None = None
    for unit in [*units, []]:
        flight, ahead = ahead, _Flight(unit, dtype)
        if flight is not None:
            for weight in flight.weights:
                yield weight, flight.land(weight)


# - One unit


class _Flight:
    """The gathers of a unit, in flight.

    Parameters sharded over one dimension of a mesh are in flight together. Other ones, such as
    those that tensor parallelism has cut, too, are gathered when they are needed.
    """

    def __init__(self, weights: list[Weight], dtype: torch.dtype | None) -> None:
        self.weights = weights
        self._dtype = dtype
        self._arriving: dict[str, _Arriving] = {}
        for weight in weights:
            if found := shared(weight.tensor):
                one = _Arriving(weight, to_send(weight, self._dtype), *found)
                self._arriving[weight.names[0]] = one
                # Gathers are not coalesced: two coalesced ones of a gloo group in flight at once
                # corrupt the heap (docs/reliability.md, "Not covered").
                one.work = all_gather(one.output, one.sent(), one.group, async_op=True)

    @torch.inference_mode(False)
    @torch.no_grad()
    def land(self, weight: Weight) -> torch.Tensor:
        """Wait for a weight, and return it whole. Its memory is the caller's then."""
        arriving = self._arriving.pop(weight.names[0], None)
        return full_tensor(weight, self._dtype) if arriving is None else arriving.wait()


@dataclass
class _Arriving:
    """A parameter that one dimension of a mesh shares, in one of its own dimensions.

    Rank r has rows r * chunk to (r + 1) * chunk, as far as there are any. So what is gathered of
    ``chunk`` rows from each rank begins with the whole parameter.
    """

    weight: Weight
    local: torch.Tensor
    group: dist.ProcessGroup
    dim: int
    work: Any = None

    @torch.inference_mode(False)
    def __post_init__(self) -> None:
        nbytes = math.prod(self._shape[1:]) * self.chunk * self.group.size() * self.local.itemsize
        self.output = new_tensor((nbytes,), torch.uint8, self.local.device)

    @property
    def _shape(self) -> list[int]:
        """The shape of the whole parameter, with the dimension that ranks share in front."""
        shape = list(self.weight.tensor.shape)
        return [shape.pop(self.dim), *shape]

    @property
    def chunk(self) -> int:
        """The number of rows that each rank sends."""
        return -(-self._shape[0] // self.group.size())

    @torch.inference_mode(False)
    @torch.no_grad()
    def sent(self) -> torch.Tensor:
        """Return this rank's rows, padded to a whole chunk, as bytes."""
        rows = self.local.movedim(self.dim, 0)
        if rows.shape[0] < self.chunk:
            padded = rows.new_zeros(self.chunk, *rows.shape[1:])
            padded[: rows.shape[0]] = rows
            rows = padded
        return as_bytes(rows.contiguous())

    def wait(self) -> torch.Tensor:
        """Return the whole parameter once it has come."""
        self.work.wait()
        shape = [self.chunk * self.group.size(), *self._shape[1:]]
        padded = self.output.view(self.local.dtype).view(shape)
        return padded[: self._shape[0]].movedim(0, self.dim).contiguous()
