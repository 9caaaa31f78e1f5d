"""Meshes of data parallelism and other kinds, with the dimensions of each named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class SpmdMesh:
    """A mesh on which every parameter is a DTensor: that of ``fully_shard(dp_mesh_dims=...)``."""

    mesh: DeviceMesh
    shard_names: tuple[str, ...]
    replicate_names: tuple[str, ...]

    @staticmethod
    def of(mesh: DeviceMesh | None, dims: Any) -> SpmdMesh:
        """Return ``mesh`` with the dimensions that PyTorch's ``DataParallelMeshDims`` name."""
        if not (hasattr(dims, "shard_names") and hasattr(dims, "replicate_names")):
            raise TypeError(
                f"dp_mesh_dims is {dims!r} but must be a DataParallelMeshDims or None. Pass "
                "DataParallelMeshDims(shard=...) and the whole mesh."
            )
        names = None if mesh is None else mesh.mesh_dim_names
        if mesh is None or names is None:
            raise ValueError(
                f"fully_shard got dp_mesh_dims={dims!r} and no mesh with names. Pass the whole "
                "mesh, made with mesh_dim_names."
            )
        found = SpmdMesh(mesh, tuple(dims.shard_names), tuple(dims.replicate_names))
        missing = [name for name in found.data_parallel_names if name not in names]
        if missing:
            raise ValueError(
                f"dp_mesh_dims names {missing}, and the mesh has the dimensions {list(names)}. "
                "Name some of these."
            )
        if not found.shard_names:
            raise NotImplementedError(
                "dp_mesh_dims without a dimension that shards, which is data parallelism alone, is "
                "not supported. Pass shard=..., or use PyTorch's replicate."
            )
        first = names.index(found.shard_names[0])
        if names[first : first + len(found.shard_names)] != found.shard_names:
            raise ValueError(
                f"dp_mesh_dims shards over {list(found.shard_names)}, which are not neighbours in "
                f"the mesh's dimensions {list(names)}. Name neighbours, in their order."
            )
        return found

    @property
    def data_parallel_names(self) -> tuple[str, ...]:
        """The dimensions over which gradients are reduced."""
        return self.shard_names + self.replicate_names

    @property
    def data_parallel_indices(self) -> frozenset[int]:
        """Their places in the mesh."""
        names = self.mesh.mesh_dim_names or ()
        return frozenset(names.index(name) for name in self.data_parallel_names)

    def data_parallel_mesh(self) -> DeviceMesh:
        """Return the mesh to shard over: 1-D, or 2-D if there are replicas."""
        shards = self._flat(self.shard_names)
        if not self.replicate_names:
            return shards
        return DeviceMesh._concatenate([self._flat(self.replicate_names), shards])

    def _flat(self, names: tuple[str, ...]) -> DeviceMesh:
        if len(names) == 1:
            return self.mesh[names[0]]
        return self.mesh[names]._flatten("_".join(names))
