"""The ranks of a mesh: those that share a model, and the replicas of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from fsdp_ext._util.errors import MisuseError
from fsdp_ext.sharding.params.spmd import SpmdMesh


@dataclass(frozen=True)
class Ranks:
    """A mesh by its dimensions."""

    # 1-D, or 2-D for hybrid sharding. Then the ranks of the last dimension share the rows of
    # parameters, and those of the first are replicas, which have the same rows.
    mesh: DeviceMesh
    # The mesh of all kinds of parallelism; None without ``dp_mesh_dims``.
    spmd: SpmdMesh | None = None

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that share the rows of each parameter."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh of the shard group."""
        if self.mesh.ndim == 1:
            return self.mesh
        if self.mesh.mesh_dim_names is None:
            raise MisuseError(
                "parameters whose class has fsdp_pre_all_gather need a 2-D mesh with names. Pass "
                "mesh_dim_names to init_device_mesh."
            )
        return self.mesh[self.mesh.mesh_dim_names[-1]]

    @property
    def rank(self) -> int:
        """This rank's number in the shard group."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    @property
    def size(self) -> int:
        """How many ranks the shard group has."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that have the same rows as this one; None if there are no others."""
        return self.mesh.get_group(0) if self.replicas > 1 else None

    @property
    def replicas(self) -> int:
        """How many ranks have the same rows."""
        return self.mesh.size(0) if self.mesh.ndim == 2 else 1

    @property
    def world_size(self) -> int:
        """How many ranks the mesh has."""
        return self.size * self.replicas

    @property
    def global_ranks(self) -> list[int]:
        """The global ranks of the mesh, shard group by shard group."""
        ranks: list[int] = self.mesh.mesh.flatten().tolist()
        return ranks

    @property
    def rank_in_mesh(self) -> int:
        """This rank's number among all ranks of the mesh, shard group by shard group."""
        replica = self.mesh.get_local_rank(0) if self.mesh.ndim == 2 else 0
        return replica * self.size + self.rank

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The shard group and, if there are replicas, the replicate group."""
        return [group for group in (self.shard_group, self.replicate_group) if group is not None]

    def placements(self, shard: Placement) -> tuple[Placement, ...]:
        """Return the placements of parameters and gradients, sharded by ``shard``."""
        return (shard,) if self.mesh.ndim == 1 else (Replicate(), shard)
