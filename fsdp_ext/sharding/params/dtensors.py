"""The DTensors of a unit: shards of parameters and of gradients.

Note [tensor parallelism]
A parameter may be a DTensor before it is sharded: tensor parallelism has given each rank a part of
it. The unit shards, gathers and reduces these parts as if they were whole parameters. Only two
things differ. The sharded DTensors lie on both meshes together. While the unit is unsharded,
modules have a DTensor on the mesh of tensor parallelism, whose local tensor is the gathered part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_ext import _C
from fsdp_ext.sharding.params.ranks import Ranks
from fsdp_ext.sharding.params.spmd import SpmdMesh


@dataclass(frozen=True)
class Spread:
    """How a tensor is spread over ranks."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]  # one for each dimension of the mesh
    shape: torch.Size  # shape of the whole tensor
    # Dimensions of the mesh over which the unit will reduce gradients.
    reduced: frozenset[int] = frozenset()

    @staticmethod
    def of(param: torch.Tensor, ranks: Ranks) -> Spread | None:
        """Return how ``param``, not sharded yet, is spread; None if it is a plain tensor."""
        if not isinstance(param, DTensor):
            return None
        reduced = frozenset() if ranks.spmd is None else ranks.spmd.data_parallel_indices
        return Spread(param.device_mesh, tuple(param.placements), param.shape, reduced)

    def dtensor(self, local: torch.Tensor) -> DTensor:
        """Return the DTensor with ``local`` as this rank's part, on the device of ``local``."""
        return self.wrap(local.view_as(local))  # from_local would move offloaded memory

    def wrap(self, local: torch.Tensor) -> DTensor:
        """Return a DTensor around ``local`` itself, whose class may not support views."""
        stride = contiguous_stride(self.shape)
        meta = TensorMeta(self.shape, stride, local.dtype)
        spec = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def place(self, gradient: DTensor) -> DTensor:
        """Return ``gradient`` with these placements and a local tensor that has arrived.

        Backward may bring partial sums for a parameter that is replicated. Partial sums over
        dimensions that the unit reduces stay as they are.
        """
        placements = tuple(
            theirs if dim in self.reduced else ours
            for dim, (ours, theirs) in enumerate(
                zip(self.placements, gradient.placements, strict=True)
            )
        )
        if tuple(gradient.placements) != placements:
            gradient = gradient.redistribute(placements=placements)
        local = gradient._local_tensor
        if not isinstance(local, AsyncCollectiveTensor):
            return gradient
        return replace(self, placements=placements).dtensor(local.wait())


def sharded_dims(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions of a tensor's mesh on which ranks have different parts of it."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return [
        dim
        for dim, placement in enumerate(tensor.placements)
        # Not is_shard(), which is false for _StridedShard.
        if mesh.size(dim) > 1 and not placement.is_replicate()
    ]


def shards_of(param: torch.Tensor, ranks: Ranks, dim: int) -> Spread:
    """Return how a parameter, and its gradient, are spread if ``ranks`` share dimension ``dim``.

    Raises:
        RuntimeError: if ``param`` is a DTensor whose mesh shares no root mesh with that of
            ``ranks``, or overlaps it.
    """
    if not isinstance(param, DTensor):
        return Spread(ranks.mesh, ranks.placements(Shard(dim)), param.shape)
    if ranks.spmd is not None:
        return _shards_on(ranks.spmd, param, ranks, dim)
    # Tensor parallelism cuts the dimension first, though its mesh comes last.
    shard = _shard_behind(dim, shards_before(param, dim))
    mesh = DeviceMesh._concatenate([ranks.mesh, param.device_mesh])
    return Spread(mesh, (*ranks.placements(shard), *param.placements), param.shape)


def _shards_on(spmd: SpmdMesh, param: DTensor, ranks: Ranks, dim: int) -> Spread:
    """Return :func:`shards_of` on the whole mesh. Dimensions that shard become one, as in FSDP2."""
    names = spmd.mesh.mesh_dim_names or ()
    first = names.index(spmd.shard_names[0])
    behind = range(first + 1, len(names))
    cuts = math.prod(spmd.mesh.size(j) for j in behind if _cuts(param.placements[j], dim))
    shard = _shard_behind(dim, cuts)
    if len(spmd.shard_names) == 1:
        before, after = param.placements[:first], param.placements[first + 1 :]
        return Spread(spmd.mesh, (*before, shard, *after), param.shape)
    meshes: list[DeviceMesh] = []
    placements: list[Placement] = []
    for name, placement in zip(names, param.placements, strict=True):
        if name == spmd.shard_names[0]:
            meshes.append(ranks.mesh)
            placements += ranks.placements(shard)
        elif name not in spmd.data_parallel_names:  # the mesh of the ranks has the others
            meshes.append(spmd.mesh[name])
            placements.append(placement)
    return Spread(DeviceMesh._concatenate(meshes), tuple(placements), param.shape)


def _cuts(placement: Placement, dim: int) -> bool:
    # Not is_shard(), which is false for _StridedShard.
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def _shard_behind(dim: int, cuts: int) -> Placement:
    """Return a shard's placement if other mesh dimensions cut ``dim`` into ``cuts`` pieces."""
    return _StridedShard(dim, split_factor=cuts) if cuts > 1 else Shard(dim)


def shards_before(param: torch.Tensor, dim: int) -> int:
    """Return the number of pieces into which tensor parallelism has cut dimension ``dim``."""
    return param._spec.num_shards_map[dim] if isinstance(param, DTensor) else 1


def part_of_this_rank(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter before it is sharded."""
    return param._local_tensor if isinstance(param, DTensor) else param


@dataclass(frozen=True)
class GradientPlace:
    """The place of a sharded gradient in the flat gradient."""

    offset: int  # its first byte
    local_shape: torch.Size  # shape of this rank's shard
    dtype: torch.dtype
    spread: Spread | None  # how the whole gradient is spread; None for a plain tensor


def gradient_maker(places: Sequence[GradientPlace]) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """Return a function that makes the sharded gradients at ``places`` of a flat gradient.

    The C++ unit keeps the function, so the function refers to nothing that refers to the unit.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def make(flat: torch.Tensor) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        for place in places:
            part = _C.FlatTensor.part_of(flat, place.offset, place.local_shape, place.dtype)
            made.append(part if place.spread is None else place.spread.wrap(part))
        return made

    return make


def contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, which need not exist."""
    stride = [1]
    for size in reversed(shape[1:]):
        stride.append(stride[-1] * max(size, 1))
    return tuple(reversed(stride))
