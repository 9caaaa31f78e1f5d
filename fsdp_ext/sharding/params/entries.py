"""The entries of a unit's layout, and their places in the flat shard and in a slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ext import _C
from fsdp_ext.sharding.params.dtensors import GradientPlace, Spread
from fsdp_ext.sharding.params.flat_parameter import registered
from fsdp_ext.sharding.params.ownership import is_extension, mark_unsharded, own_grad_dtype
from fsdp_ext.sharding.params.ranks import Ranks


@dataclass
class OwnRows:
    """One rank's rows of an extension, in memory of their own: Note [tensor extensions].

    Methods here call only operators that FSDP2 calls, because the tensor's class may lack others.
    """

    size: torch.Size  # size of that memory, which is the same on all ranks
    local: torch.Tensor  # the rows, which begin it
    metadata: Any = None  # the metadata from ``fsdp_pre_all_gather`` for ``fsdp_post_all_gather``

    @staticmethod
    def of(part: torch.Tensor, name: str, ranks: Ranks, device: torch.device) -> OwnRows:
        """Return this rank's rows of a parameter."""
        if not part.is_contiguous():
            raise NotImplementedError(
                f"parameter '{name}' is a {type(part).__name__} that is not contiguous: shape "
                f"{tuple(part.shape)}, strides {part.stride()}. Make it contiguous first."
            )
        chunks = torch.chunk(part, ranks.size)
        size = chunks[0].size()
        mine = chunks[ranks.rank] if ranks.rank < len(chunks) else None
        padded, count = part.new_zeros(size), 0
        if mine is not None and mine.numel() > 0:
            count = mine.size(0)
            padded.narrow(0, 0, count).copy_(mine)
        if not part.is_meta and padded.device != device:
            padded = padded.to(device)
        local = padded.narrow(0, 0, count)
        if type(local) is not type(part) and not is_extension(name, local):
            raise NotImplementedError(
                f"parameter '{name}' is a {type(part).__name__}, but its rows are a "
                f"{type(local).__name__} without fsdp_pre_all_gather. Its class has to return "
                "itself from chunk, new_zeros and narrow."
            )
        return OwnRows(size, local)

    def adopt(self, sharded: nn.Parameter) -> bool:
        """Adopt the rows of a sharded parameter; return whether they are new."""
        param: Any = sharded
        local: torch.Tensor = param._local_tensor
        if local is self.local:
            return False
        wait_for_arrival(local.device, self.local.device)
        if type(local) is torch.Tensor:
            # The user has set the methods on this object, which was a part of the flat shard.
            local.data = local.clone()
        elif local.size() != self.size and not local.is_meta:
            padded, count = local.new_zeros(self.size), local.size(0)
            if local.numel() > 0:
                padded.narrow(0, 0, count).copy_(local)
            local = param._local_tensor = padded.narrow(0, 0, count)
        self.local = local
        return True


def wait_for_arrival(device: torch.device, before: torch.device) -> None:
    """Wait for copies to ``device`` from ``before``, before the host reads them.

    With ``non_blocking=True``, calls such as ``module.cpu`` return before such copies end.
    """
    if device.type == "cpu" and before.type == "cuda":
        torch.cuda.current_stream(before).synchronize()


class GatherInput:
    """One tensor that an extension gathers, as an entry of the layout: rows of bytes."""

    shard_dim = 0
    keeps_dtype = True
    dtype = torch.uint8
    is_trained = False
    grad_dtype: torch.dtype | None = None
    is_gathered = True

    def __init__(self, name: str, like: torch.Tensor, ranks: int) -> None:
        rows = like.shape[0] if like.ndim > 0 else 1
        row = like.shape[1:]
        self.name = name
        self.size = like.shape
        self.input_dtype = like.dtype
        self.shape_in_slot = torch.Size([ranks * rows, *row])
        self.shape_and_dtype_of_part = torch.Size([like.numel() * like.dtype.itemsize]), self.dtype
        self.shape = torch.Size([ranks * rows, row.numel() * like.dtype.itemsize])
        # Both are empty tensors until the unit is built.
        self.part = torch.empty(0)  # then this rank's bytes in the flat shard
        self.output = torch.empty(0)  # then the gathered tensor, in a slot

    def is_like(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` has the size and dtype of the first one."""
        return tensor.shape == self.size and tensor.dtype == self.input_dtype


@dataclass
class ShardedParam:
    """One parameter of a unit and every module attribute that refers to it (tied ones, too)."""

    name: str  # its name in the unit's module, and from the first forward on in the root module
    # Shape of the whole parameter, or of the part that tensor parallelism has given to this rank.
    shape: torch.Size
    sharded: nn.Parameter  # the DTensor that modules have while the unit is sharded
    shard_dim: int  # the dimension of it that ranks share
    spread: Spread  # how the DTensor is spread
    unsharded: Spread | None  # how the parameter was spread before; None if it was a plain tensor
    keeps_dtype: bool  # whether it is computed with in its own dtype, whatever ``param_dtype`` is
    # This rank's rows, if the parameter's class says how it is gathered: Note [tensor extensions]
    # in sharding/params/extensions.py. None for others, which lie in the flat shard.
    own: OwnRows | None = None
    # Modules and the names of their attributes.
    attributes: list[tuple[nn.Module, str]] = field(default_factory=list)
    quantization: Any = None  # the state that bitsandbytes computes with; None for other parameters
    # Whether it has gradients to reduce, though it may be frozen now: Note [frozen parameters] in
    # csrc/torch/torch_unit.h.
    awaits_reduction: bool = False
    was_frozen: bool = False  # whether the last C++ unit did not train it
    toggles: bool = False  # whether it was frozen before and unfrozen again: the same note
    # The parameter that modules have while the unit is unsharded; None before the first C++ unit,
    # and if an extension makes it. Later C++ units use the same object, because users may have put
    # hooks and attributes on it.
    whole: nn.Parameter | None = None

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard of the parameter."""
        local: torch.Tensor = self.sharded._local_tensor  # type: ignore[attr-defined]
        return local

    @property
    def is_gathered(self) -> bool:
        """Whether its rows are gathered from the flat shard, unchanged."""
        return self.own is None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sharded parameter."""
        return self.sharded.dtype

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype that the user wants for its gradients; None if that is its own."""
        return own_grad_dtype(self.sharded)

    @property
    def requires_grad(self) -> bool:
        """Whether autograd computes its gradient."""
        return self.sharded.requires_grad

    @property
    def is_trained(self) -> bool:
        """Whether it takes part in reductions."""
        return self.requires_grad or self.awaits_reduction or self.toggles

    def note_freezing(self) -> None:
        """Note whether the user froze or unfroze it. Call it when a C++ unit is made."""
        self.toggles = self.toggles or (self.was_frozen and self.requires_grad)
        self.was_frozen = not self.is_trained

    @property
    def shape_in_slot(self) -> torch.Size:
        """The shape of its view of a slot, which is empty if an extension gathers it."""
        return self.shape if self.is_gathered else torch.Size([0])

    @property
    def shape_and_dtype_of_part(self) -> tuple[torch.Size, torch.dtype]:
        """The shape and dtype of its part of the flat shard, which is empty for an extension."""
        if self.is_gathered:
            return self.local.shape, self.dtype
        return torch.Size([0]), torch.uint8

    def registered(self) -> Any:
        """Return the present value of the first attribute."""
        module, name = self.attributes[0]
        return registered(module, name)


# The entries of a layout: parameters, and the inputs of extensions.
Entry = ShardedParam | GatherInput

BoundObjects = tuple[nn.Parameter | None, nn.Parameter | None, Callable[[DTensor], DTensor] | None]


def bound_objects(param: ShardedParam | None, view: torch.Tensor) -> BoundObjects:
    """Return what the C++ unit needs of a parameter; None stands for an input of an extension.

    These are the sharded parameter, the unsharded one if no extension makes it, and the function
    that gives a DTensor's gradient its placements.
    """
    if param is None:
        return None, None, None
    param.whole = _unsharded_parameter(param, view) if param.is_gathered else None
    return param.sharded, param.whole, None if param.unsharded is None else param.unsharded.place


def _unsharded_parameter(param: ShardedParam, view: torch.Tensor) -> nn.Parameter:
    """Return the unsharded parameter over a view of the slot.

    It is the object of the last C++ unit unless its dtype or device has changed.
    """
    tensor: Any = view if param.unsharded is None else param.unsharded.dtensor(view)
    unsharded: Any = param.whole
    if unsharded is None or (unsharded.dtype, unsharded.device) != (tensor.dtype, tensor.device):
        unsharded = nn.Parameter(tensor, requires_grad=param.requires_grad)
    else:
        if param.unsharded is None:
            unsharded.data = tensor
        else:  # PyTorch ignores an assignment to .data
            unsharded._local_tensor = tensor._local_tensor
        unsharded.grad = None
        unsharded.requires_grad_(param.requires_grad)
    if own_grad_dtype(unsharded) != param.grad_dtype:
        unsharded.grad_dtype = param.grad_dtype or unsharded.dtype
    if param.quantization is not None:
        # bitsandbytes' layers replace a parameter that has no quant_state.
        unsharded.quant_state = param.quantization
    mark_unsharded(unsharded, param.name)
    whole: nn.Parameter = unsharded
    return whole


def gradient_places(
    params: Sequence[ShardedParam | None],
    layout: _C.UnitLayout,
    dtype_of: Callable[[ShardedParam], torch.dtype],
) -> list[GradientPlace]:
    """Return where the gradients of the trainable parameters lie in the flat gradient.

    ``params`` are the layout's; None stands for an input of an extension.
    """
    return [
        GradientPlace(place.flat_gradient_offset, param.local.shape, dtype_of(param), param.spread)
        for param, place in zip(params, layout.placements, strict=True)
        if param is not None and param.is_trained
    ]


def lies_in(entry: Entry, part: torch.Tensor, flat: torch.Tensor, offset: int) -> bool:
    """Return whether ``part`` is the entry's shard, and begins at byte ``offset`` of ``flat``."""
    begin = part.untyped_storage().data_ptr()
    if part.numel() > 0 and begin != flat.untyped_storage().data_ptr() + offset:
        return False
    if isinstance(entry, GatherInput):
        return (part.shape, part.dtype) == entry.shape_and_dtype_of_part
    local = entry.local
    if not entry.is_gathered:
        return local.device.type == flat.device.type
    return (
        local.device == flat.device
        and not local.is_meta
        and local.is_contiguous()
        and local.dtype == part.dtype
        and local.untyped_storage()._cdata == part.untyped_storage()._cdata
        and local.storage_offset() == 0
    )
