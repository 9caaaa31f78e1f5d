"""Whole tensors for an export, each gathered only to the rank that writes it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_ext.checkpoint.ranks import Ranks
from fsdp_ext.checkpoint.transfers import (
    as_bytes,
    call_roll,
    full_tensor,
    mesh_of,
    new_memory,
    sharded_dims,
    to_send,
)
from fsdp_ext.checkpoint.weights import Weight

_STEP = 16 << 20  # bytes of each file that travel at once, unless one tensor is larger

_Slices = tuple[slice, ...]


def gathered(
    weights: Mapping[str, Weight],
    files: Sequence[Iterable[str]],
    dtype: torch.dtype | None,
    ranks: Ranks,
    caller: str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of this rank's files, in their order. All ranks iterate.

    Rank r writes the files r, r + size, and so on. All ranks write at the same time: a step gathers
    the next few tensors of one file of each rank. While a rank writes the tensors of one step, the
    next step is in flight.

    Args:
        weights: the weights, by name.
        files: the names in each file.
        dtype: the dtype of floating-point tensors; None for that of the sharded parameters.
        ranks: the ranks that write.
        caller: the public function, for messages.
    """
    call_roll(weights.values(), caller)
    _connect(weights.values(), ranks)
    known = _KnownParts()
    ahead: _Step | None = None
    for tensors in [*_steps(weights, files, dtype, ranks), []]:
        step, ahead = ahead, _Step(tensors, dtype, ranks, known)
        if step is not None:
            yield from step.land()


def _connect(weights: Iterable[Weight], ranks: Ranks) -> None:
    """Let all ranks connect, because NCCL's first call in a group needs all ranks of the group."""
    connected = set()
    for weight in weights:
        group = _group_of(weight.tensor, ranks) if sharded_dims(weight.tensor) else None
        if group is not None and group not in connected:
            connected.add(group)
            sample = torch.zeros(1, device=weight.local.device)
            dist.all_reduce(sample.to(mesh_of(weight.tensor).device_type), group=group)


def _group_of(tensor: torch.Tensor, ranks: Ranks) -> dist.ProcessGroup | None:
    """Return the group in which the parts of a sharded tensor travel; None if it cannot be."""
    dims, kind = sharded_dims(tensor), mesh_of(tensor).device_type
    group = mesh_of(tensor).get_group(dims[0]) if len(dims) == 1 else ranks.group
    assert group is not None
    try:
        backend = group._get_backend(torch.device(kind))
    except RuntimeError:
        return None
    # gloo's sends read the memory of the host alone.
    return None if kind != "cpu" and backend.name() == "gloo" else group


@dataclass
class _Target:
    """A tensor, and the rank that writes it."""

    name: str
    weight: Weight
    writer: int


def _steps(
    weights: Mapping[str, Weight],
    files: Sequence[Iterable[str]],
    dtype: torch.dtype | None,
    ranks: Ranks,
) -> Iterator[list[_Target]]:
    """Yield the tensors of each step: the next few of one file of each rank."""
    for first in range(0, len(files), ranks.size):
        cut = [
            _cut([_Target(name, weights[name], writer) for name in file], dtype)
            for file, writer in zip(files[first:], ranks.members, strict=False)
        ]
        for together in itertools.zip_longest(*cut, fillvalue=()):
            yield [*itertools.chain.from_iterable(together)]


def _cut(targets: list[_Target], dtype: torch.dtype | None) -> Iterator[list[_Target]]:
    """Cut a file's tensors into pieces of at most ``_STEP`` bytes, or of one tensor."""
    piece: list[_Target] = []
    size = 0
    for target in targets:
        nbytes = target.weight.tensor.numel() * target.weight.dtype_as(dtype).itemsize
        if piece and size + nbytes > _STEP:
            yield piece
            piece, size = [], 0
        piece.append(target)
        size += nbytes
    yield piece


class _Step:
    """Tensors in flight to the ranks that write them.

    Args:
        targets: the tensors.
        dtype, ranks: as :func:`gathered` has them.
        known: a cache of the parts of tensors.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self, targets: list[_Target], dtype: torch.dtype | None, ranks: Ranks, known: _KnownParts
    ) -> None:
        self._targets = targets
        self._dtype = dtype
        self._me = ranks.members[ranks.rank]
        self._whole: dict[str, torch.Tensor] = {}  # the tensors that arrive here
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # to make at the end
        self._by_dtensor: set[str] = set()
        # In the same order on all ranks, also if a rank takes part in none of a group's transfers.
        self._transfers: dict[dist.ProcessGroup, list[dist.P2POp]] = {}
        for target in targets:
            tensor = target.weight.tensor
            if sharded_dims(tensor):
                group, parts = _group_of(tensor, ranks), known.of(tensor, target.writer)
                if group is None or parts is None:
                    self._by_dtensor.add(target.name)
                else:
                    self._start(target, parts, group)
        started = (dist.batch_isend_irecv(ops) for ops in self._transfers.values() if ops)
        self._works = [work for works in started for work in works]

    def _start(self, target: _Target, parts: dict[int, _Slices], group: dist.ProcessGroup) -> None:
        """Add this rank's transfers of a tensor."""
        transfers = self._transfers.setdefault(group, [])
        if self._me not in parts:
            return
        own = to_send(target.weight, self._dtype)
        if self._me != target.writer:
            if own.numel():
                data = as_bytes(own.contiguous())
                transfers.append(dist.P2POp(dist.isend, data, target.writer, group))
            return
        shape = target.weight.tensor.shape
        whole = new_memory(shape.numel() * own.itemsize, own.device).view(own.dtype).view(shape)
        self._whole[target.name] = whole
        for rank, box in parts.items():
            part = whole[box]
            if part.numel() == 0:
                continue  # FSDP2 may give an empty shard another shape than DTensor
            if rank == self._me:
                part.copy_(own)
            else:
                arriving = part
                if not part.is_contiguous():
                    arriving = torch.empty_like(part, memory_format=torch.contiguous_format)
                    self._copies.append((part, arriving))
                transfers.append(dist.P2POp(dist.irecv, as_bytes(arriving), rank, group))

    def land(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait, and yield the tensors that this rank writes."""
        self._finish()
        for target in self._targets:
            whole = self._land(target)
            if target.writer == self._me:
                yield target.name, whole

    @torch.inference_mode(False)
    @torch.no_grad()
    def _finish(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        self._transfers.clear()
        for part, arrived in self._copies:
            part.copy_(arrived)
        self._copies.clear()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _land(self, target: _Target) -> torch.Tensor:
        """Return a tensor, whole on the rank that writes it. All ranks call this."""
        whole = self._whole.pop(target.name, target.weight.local)
        if target.name in self._by_dtensor:
            whole = full_tensor(target.weight, self._dtype)
        if target.writer != self._me:
            return whole
        return whole.to(target.weight.dtype_as(self._dtype))


class _KnownParts:
    """A cache of the parts that ranks have of tensors, because DTensor computes them slowly."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], dict[int, _Slices] | None] = {}

    def of(self, tensor: torch.Tensor, writer: int) -> dict[int, _Slices] | None:
        """Return the parts that make up a tensor for its writer, by rank.

        Each part is on the replica nearest to the writer. None: some part is no box, so the tensor
        has to be gathered by DTensor's own methods.
        """
        assert isinstance(tensor, DTensor)
        mesh, dims = tensor.device_mesh, sharded_dims(tensor)
        kinds = {type(tensor.placements[dim]) for dim in dims}
        if type(tensor._local_tensor) is not torch.Tensor or not kinds <= {Shard, _StridedShard}:
            return None
        homes = (mesh.mesh == writer).nonzero().tolist()
        if not homes:
            return {}  # a replica on another mesh is nearer to the writer
        along = tuple(
            range(length) if dim in dims else range(homes[0][dim], homes[0][dim] + 1)
            for dim, length in enumerate(mesh.shape)
        )
        key = (mesh, tensor.placements, tensor.shape, along)
        if key not in self._known:
            self._known[key] = _parts_of(tensor, along)
        return self._known[key]


def _parts_of(tensor: DTensor, along: Sequence[range]) -> dict[int, _Slices] | None:
    """Return the parts on the ranks that have these numbers along each dimension of the mesh."""
    mesh, whole = tensor.device_mesh, tuple(tensor.shape)
    parts = {}
    for place in itertools.product(*along):
        sizes, begins = _compute_local_shape_and_global_offset(
            whole, mesh.shape, list(place), tensor.placements
        )
        pairs = zip(begins, sizes, strict=True)
        parts[int(mesh.mesh[place])] = tuple(slice(begin, begin + size) for begin, size in pairs)
    return parts if _fill(whole, parts.values()) else None


def _fill(whole: tuple[int, ...], boxes: Collection[_Slices]) -> bool:
    """Return whether boxes fill a tensor and do not overlap."""
    sizes = [[part.stop - part.start for part in box] for box in boxes]
    if sum(map(math.prod, sizes)) != math.prod(whole):
        return False
    for dim, length in enumerate(whole):
        position = 0
        for begin, end in sorted({(box[dim].start, box[dim].stop) for box in boxes}):
            if begin < end and begin != position:
                return False
            position = max(position, end)
        if position != length:
            return False
    return True
