"""The part of a tensor that a rank has, and which rank writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_ext.checkpoint.tensor_files import Part

_SMALL = 1 << 20  # bytes; rank 0 writes smaller tensors that all ranks have


class Box(NamedTuple):
    """A rank's part of a tensor."""

    tensor: torch.Tensor
    whole: tuple[int, ...]  # the shape of the whole tensor
    offset: tuple[int, ...]  # where the rank's elements begin in the whole tensor
    copies: int  # how many ranks have the same elements
    copy: int  # which of them this rank is
    is_sharded: bool  # whether ranks have different parts

    @property
    def part(self) -> Part:
        return Part(self.tensor.dtype, tuple(self.tensor.shape), self.whole, self.offset)


# Where a rank's part lies, by mesh, placements and whole shape: the part's shape, and its offset.
KnownParts = dict[tuple[object, ...], tuple[tuple[int, ...], tuple[int, ...]]]


def box_of(
    name: str, tensor: torch.Tensor, rank: int, world_size: int, known: KnownParts | None = None
) -> Box | None:
    """Return this rank's part of a tensor; None if it has none."""
    if not isinstance(tensor, DTensor):
        plain, whole = _plain(name, tensor), tuple(tensor.shape)
        return Box(plain, whole, (0,) * len(whole), world_size, rank, False)
    local = _plain(name, tensor._local_tensor.detach())
    mesh, whole = tensor.device_mesh, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    key = (mesh, tensor.placements, whole)
    known = {} if known is None else known
    if key not in known:
        with torch.device("cpu"):  # DTensor computes with tensors on the default device
            known[key] = compute_local_shape_and_global_offset(whole, mesh, tensor.placements)
    shape, offset = known[key]
    if tuple(local.shape) != tuple(shape) or any(p.is_partial() for p in tensor.placements):
        raise TypeError(
            f"'{name}' has placements {tensor.placements}, and its local part has shape "
            f"{tuple(local.shape)} instead of {tuple(shape)}. Save tensors that are sharded or "
            "replicated."
        )
    copies, copy = 1, 0
    for size, number, placement in zip(mesh.shape, coordinate, tensor.placements, strict=True):
        if isinstance(placement, Replicate):
            copies, copy = copies * size, copy * size + number
    if local.numel() == 0:
        # One rank keeps a tensor that has no elements at all.
        if math.prod(whole) or any(coordinate):
            return None
        offset, copies, copy = (0,) * len(whole), 1, 0
    return Box(local, whole, tuple(offset), copies, copy, True)


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose bytes are stored: that in a wrapper, if it has one of its shape."""
    kinds = (torch.Tensor, nn.Parameter, nn.Buffer)
    if type(tensor) not in kinds and is_traceable_wrapper_subclass(tensor):
        attributes, _ = tensor.__tensor_flatten__()
        inner = getattr(tensor, attributes[0])
        if len(attributes) == 1 and inner.shape == tensor.shape:
            return _plain(name, inner)
    if type(tensor) not in kinds or tensor.layout != torch.strided:
        raise TypeError(
            f"'{name}' is a {type(tensor).__name__} of layout {tensor.layout}, which cannot be "
            "stored by its bytes. Use torch.distributed.checkpoint for this model."
        )
    if tensor.is_meta:
        raise TypeError(
            f"'{name}' is on the meta device and has no elements yet. Call to_empty first."
        )
    return tensor


def own_boxes(tensors: Mapping[str, torch.Tensor], rank: int, world_size: int) -> dict[str, Box]:
    """Return the parts that a rank may have to write, in the order of their memory.

    Ranks that have the same part of a sharded tensor share the work: the one with the fewest bytes
    so far writes the next part. Each decides by the names and sizes of the tensors of a mesh, which
    all ranks of the mesh have. Ranks may have different tensors beside these. Tensors that are not
    sharded are returned on all ranks: see :func:`without_others`.
    """
    boxes: dict[str, Box] = {}
    known: KnownParts = {}
    assigned: dict[tuple[DeviceMesh, int], list[int]] = {}  # the bytes of each copy so far
    for name in sorted(tensors):
        tensor, writer = tensors[name], 0
        box = box_of(name, tensor, rank, world_size, known)
        if isinstance(tensor, DTensor):  # also if this rank has no elements of it
            mesh = tensor.device_mesh
            sizes = zip(mesh.shape, tensor.placements, strict=True)
            copies = math.prod(size for size, each in sizes if isinstance(each, Replicate))
            of_copies = assigned.setdefault((mesh, copies), [0] * copies)
            writer = _assign(of_copies, tensor.numel() * tensor.element_size())
        if box is not None and (not box.is_sharded or writer % box.copies == box.copy):
            boxes[name] = box
    return dict(sorted(boxes.items(), key=lambda item: item[1].tensor.data_ptr()))


def without_others(boxes: dict[str, Box]) -> dict[str, Box]:
    """Leave out the whole tensors that other ranks write.

    The tensors that are not sharded have to have the same names and sizes on all ranks.
    """
    assigned: list[int] = []  # the bytes of each rank so far
    writers = {}
    for name, box in sorted(boxes.items()):
        if not box.is_sharded:
            assigned = assigned or [0] * box.copies
            nbytes = box.part.nbytes
            writers[name] = _assign(assigned, nbytes) if nbytes >= _SMALL else 0
    return {name: box for name, box in boxes.items() if writers.get(name, box.copy) == box.copy}


def _assign(assigned: list[int], nbytes: int) -> int:
    """Return the writer that has the fewest bytes, and add ``nbytes`` to them."""
    writer = assigned.index(min(assigned))
    assigned[writer] += nbytes
    return writer
