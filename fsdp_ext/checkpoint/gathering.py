"""What each rank writes of an export: its own rows, and tensors that are gathered to it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ext.checkpoint.boxes import own_boxes, without_others
from fsdp_ext.checkpoint.ranks import Ranks
from fsdp_ext.checkpoint.tensor_files import checksum, digest, memory_of, on_host
from fsdp_ext.checkpoint.transfers import (
    as_bytes,
    call_roll,
    full_tensor,
    mesh_of,
    new_tensor,
    shared,
    to_send,
)
from fsdp_ext.checkpoint.weights import Weight
from fsdp_ext.comm.transports import gathering_device
from fsdp_ext.optim.state_entries import local_of
from fsdp_ext.sharding.params.dtensors import sharded_dims

T = TypeVar("T")

_STEP = 16 << 20  # bytes of each file that travel at once, unless one tensor is larger


class Piece(NamedTuple):
    """Some elements of a tensor that follow one another."""

    name: str
    first: int  # the number of the first element
    tensor: torch.Tensor  # the elements


def own_pieces(
    weights: Mapping[str, Weight],
    dtype: torch.dtype | None,
    ranks: Ranks,
    files: Sequence[Sequence[str]],
    are_shared: bool,
) -> Iterator[Piece]:
    """Yield what this rank writes. All ranks iterate.

    The caller casts it to ``dtype``, since an error here would leave other ranks waiting.

    Args:
        weights: the weights, by name.
        dtype: the dtype that floating-point tensors are to have; None for that of the sharded
            parameters.
        ranks: the ranks that write.
        files: the names in each file.
        are_shared: whether all ranks may write each file. If not, or if a rank's part is not some
            rows, a tensor is gathered to the rank that owns its file.
    """
    in_rows = {name for name, weight in weights.items() if are_shared and _is_in_rows(weight)}
    of_ranks = {name: weights[name].tensor for name in in_rows}
    boxes = without_others(own_boxes(of_ranks, ranks.rank, ranks.size))
    begin = ranks.rank * len(files) // ranks.size  # each rank begins with another file
    for name in itertools.chain(*files[begin:], *files[:begin]):
        if name in boxes:
            box = boxes[name]
            first = box.offset[0] * math.prod(box.whole[1:]) if box.whole else 0
            yield Piece(name, first, box.tensor)
    rest = {name: weight for name, weight in weights.items() if name not in in_rows}
    files_of_rest = [[name for name in file if name in rest] for file in files]
    yield from _gathered(rest, files_of_rest, dtype, ranks)


def has_all_ranks(weights: Iterable[Weight], ranks: Ranks) -> bool:
    """Return whether all ranks of the weights' meshes are among ``ranks``."""
    tensors = (weight.tensor for weight in weights)
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    return all({*mesh.mesh.flatten().tolist()} <= {*ranks.members} for mesh in meshes)


def check_groups(weights: Mapping[str, Weight], ranks: Ranks) -> None:
    """Raise ValueError if a weight has to be gathered from other ranks than ``ranks``."""
    members = {*ranks.members}
    for name, weight in weights.items():
        for dim in sharded_dims(weight.tensor):
            group = mesh_of(weight.tensor).get_group(dim)
            others = {*dist.get_process_group_ranks(group)} - members
            if others:
                raise ValueError(
                    f"export got a process_group= without ranks {sorted(others)}, which have parts "
                    f"of '{name}'. Pass a process_group= of all ranks that share the model's "
                    "parameters."
                )


def checksums_of_partial_meshes(
    weights: Mapping[str, Weight], ranks: Ranks
) -> dict[str, list[str]]:
    """Return the position and checksum of this rank's part of each weight whose mesh lacks ranks.

    Ranks compare them. Such weights are parameters that tensor parallelism leaves whole and, by
    mistake, different experts of one name. Weights of tensor subclasses, and parts of meshes of
    different sizes, are not compared.
    """
    found = {}
    sharded = {name: each for name, each in weights.items() if isinstance(each.tensor, DTensor)}
    meshes = {mesh_of(weight.tensor) for weight in sharded.values()}
    small = {mesh for mesh in meshes if {*ranks.members} - {*mesh.mesh.flatten().tolist()}}
    for name, weight in sharded.items():
        mesh = mesh_of(weight.tensor)
        if mesh not in small or type(weight.local) is not torch.Tensor:
            continue
        coordinate: Sequence[int] = mesh.get_coordinate() or ()
        place = [[mesh.size(dim), coordinate[dim]] for dim in sharded_dims(weight.tensor)]
        pieces = on_host(weight.local, weight.local.dtype)
        found[name] = [str(place), digest([checksum(memory_of(piece)) for piece in pieces])]
    return found


def _is_in_rows(weight: Weight) -> bool:
    """Return whether each rank has some rows of a weight, or all of it. All ranks agree on it."""
    tensor = weight.tensor
    if not sharded_dims(tensor):
        return type(local_of(tensor)) in (torch.Tensor, nn.Parameter, nn.Buffer)
    travels = shared(tensor)
    return travels is not None and travels[1] == 0


def _gathered(
    weights: Mapping[str, Weight],
    files: Sequence[Iterable[str]],
    dtype: torch.dtype | None,
    ranks: Ranks,
) -> Iterator[Piece]:
    """Yield the whole tensors of this rank's files, in their order. All ranks iterate.

    Rank r owns the files r, r + size, and so on. All ranks write at the same time: a step gathers
    the next few tensors of one file of each rank. While a rank writes the tensors of one step, the
    next step is in flight. Tensors are sent in ``dtype`` if it is smaller.
    """
    call_roll(weights.values(), "export")
    _connect(weights.values())
    ahead: _Step | None = None
    for tensors in [*_steps(weights, files, dtype, ranks), []]:
        step, ahead = ahead, _Step(tensors, dtype, ranks)
        if step is not None:
            yield from step.land()


def _connect(weights: Iterable[Weight]) -> None:
    """Let all ranks connect, because NCCL's first call in a group needs all ranks of the group."""
    sent = {}
    for weight in weights:
        if travels := shared(weight.tensor):
            kind = mesh_of(weight.tensor).device_type
            sent[travels[0]] = gathering_device(travels[:1], kind, weight.local)
    for group, device in sent.items():
        dist.all_reduce(torch.zeros(1, device=device), group=group)


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

    def nbytes_of(target: _Target) -> int:
        return target.weight.tensor.numel() * target.weight.dtype_as(dtype).itemsize

    for first in range(0, len(files), ranks.size):
        pieces = [
            cut([_Target(name, weights[name], writer) for name in file], nbytes_of, _STEP)
            for file, writer in zip(files[first:], ranks.members, strict=False)
        ]
        for together in itertools.zip_longest(*pieces, fillvalue=()):
            yield [*itertools.chain.from_iterable(together)]


def cut(items: Iterable[T], nbytes_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Cut a sequence into pieces of at most ``limit`` bytes, or of one item."""
    piece: list[T] = []
    size = 0
    for item in items:
        nbytes = nbytes_of(item)
        if piece and size + nbytes > limit:
            yield piece
            piece, size = [], 0
        piece.append(item)
        size += nbytes
    if piece:
        yield piece


class _Step:
    """Tensors in flight to the ranks that write them."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, targets: list[_Target], dtype: torch.dtype | None, ranks: Ranks) -> None:
        self._targets = targets
        self._dtype = dtype
        self._me = ranks.members[ranks.rank]
        self._whole: dict[str, torch.Tensor] = {}  # the tensors that arrive here
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # to make at the end
        # All ranks have the same order of groups and tensors, even where a rank sends nothing.
        self._transfers: dict[dist.ProcessGroup, list[dist.P2POp]] = {}
        for target in targets:
            if travels := shared(target.weight.tensor):
                self._start(target, *travels)
        started = (dist.batch_isend_irecv(ops) for ops in self._transfers.values() if ops)
        self._works = [work for works in started for work in works]

    def _start(self, target: _Target, group: dist.ProcessGroup, dim: int) -> None:
        """Add this rank's transfers of a tensor."""
        transfers = self._transfers.setdefault(group, [])
        members = dist.get_process_group_ranks(group)
        if target.writer not in members:
            return  # another replica sends it
        own = to_send(target.weight, self._dtype)
        if self._me != target.writer:
            if own.numel():
                data = as_bytes(own.contiguous())
                transfers.append(dist.P2POp(dist.isend, data, target.writer, group))
            return
        shape = target.weight.tensor.shape
        whole = new_tensor(shape, own.dtype, own.device)
        self._whole[target.name] = whole
        rows = -(-shape[dim] // len(members))
        for rank, part in zip(
            members, torch.split(whole, rows, dim), strict=False
        ):  # the last have none
            if rank == self._me:
                part.copy_(own)
                continue
            arriving = part
            if not part.is_contiguous():
                arriving = torch.empty_like(part, memory_format=torch.contiguous_format)
                self._copies.append((part, arriving))
            transfers.append(dist.P2POp(dist.irecv, as_bytes(arriving), rank, group))

    def land(self) -> Iterator[Piece]:
        """Wait, and yield the tensors that this rank writes."""
        self._finish()
        for target in self._targets:
            whole = self._whole.pop(target.name, None)
            if shared(target.weight.tensor) is None:
                whole = full_tensor(target.weight, self._dtype)  # all ranks gather it
            if whole is not None and target.writer == self._me:
                yield Piece(target.name, 0, whole)

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
