"""What a rank saves: the tensors and the rest of each of its files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_ext.checkpoint.boxes import Box, own_boxes
from fsdp_ext.checkpoint.ranks import Ranks
from fsdp_ext.checkpoint.state_dicts import State, optimizer_state, weights_of
from fsdp_ext.checkpoint.tensor_files import checksum, memory_of, round_up
from fsdp_ext.checkpoint.trees import encode
from fsdp_ext.checkpoint.weights import aliases_of

_ALIGNMENT = 16  # bytes, at which a view of any dtype may begin


@dataclass(frozen=True)
class Kind:
    """What a rank writes into one file.

    Attributes:
        boxes: the tensors, by name.
        tree: everything else, as JSON.
        stepped: the names of the tensors that nothing but an optimizer's step changes.
    """

    boxes: dict[str, Box]
    tree: Any
    stepped: frozenset[str] = frozenset()


class Copy(NamedTuple):
    """A copy that is to be made.

    Attributes:
        name: the tensor.
        target: where it is copied to.
        source: the rank's elements.
        owner: the tensor that they are of, whose version counts writes.
        is_stepped: whether nothing but an optimizer's step changes it.
    """

    name: str
    target: torch.Tensor
    source: torch.Tensor
    owner: torch.Tensor
    is_stepped: bool


@dataclass(frozen=True)
class Snapshot:
    """What a rank saves, by the kind of file: "weights", "optimizer", "extra".

    Attributes:
        kinds: the files' contents.
        elements: the elements of all whole tensors of the model and the optimizer.
        mesh: the shape of the model's mesh, by the names of its dimensions, for ``inspect``.
    """

    kinds: dict[str, Kind]
    elements: int
    mesh: dict[str, int]

    @classmethod
    def take(
        cls, model: nn.Module, optimizers: Sequence[Optimizer], extra: Any, ranks: Ranks
    ) -> Snapshot:
        """Collect what a rank saves. Tensors share memory with the model's.

        Raises:
            TypeError: if something cannot be saved.
            ValueError: if an optimizer is not the model's.
        """
        state = optimizer_state(model, optimizers)
        everything = weights_of(model)
        tensors = {n: value for n, value in everything.items() if isinstance(value, torch.Tensor)}
        aliases = {name: first for name, first in aliases_of(model).items() if name in tensors}
        weights = {name: tensor for name, tensor in tensors.items() if name not in aliases}
        other = {name: value for name, value in everything.items() if name not in tensors}
        tree = {name: encode(value, name, weights) for name, value in other.items()}
        trained = frozenset(name for group in state["groups"] for name in group["names"])
        kinds = {
            "weights": Kind(
                own_boxes(weights, ranks.rank, ranks.size),
                {"aliases": aliases, "other": tree},
                trained,
            )
        }
        elements = sum(tensor.numel() for tensor in weights.values())
        if optimizers:
            states, options, tree = encoded_optimizer(state)
            stepped = frozenset(states)
            states |= options
            kinds["optimizer"] = Kind(own_boxes(states, ranks.rank, ranks.size), tree, stepped)
            elements += sum(tensor.numel() for tensor in states.values())
        if extra is not None:
            kinds["extra"] = _extra_kind(extra)
        return cls(kinds, elements, _mesh_of(tensors))

    @property
    def digest_of_names(self) -> str:
        """A checksum of the names of whole tensors, and of the number of elements in all."""
        names = [
            name
            for kind in ("weights", "optimizer")
            if kind in self.kinds
            for name, box in sorted(self.kinds[kind].boxes.items())
            if not box.is_sharded
        ]
        return checksum(json.dumps([names, self.elements]).encode())

    def checksums_of_whole_states(self) -> dict[str, str]:
        """Return checksums of the optimizer's states that are no DTensors, if the model has some.

        Such a state may differ between ranks, for example if an optimizer makes it from the rank's
        shard.
        """
        boxes = self.kinds["optimizer"].boxes if self.mesh and "optimizer" in self.kinds else {}
        checksums = {}
        for name, box in sorted(boxes.items()):
            if not box.is_sharded:
                host = box.tensor.detach().cpu().contiguous()
                checksums[name] = checksum(memory_of(host))
        return checksums

    def staged(self, memory: torch.Tensor) -> tuple[Snapshot, list[Copy]]:
        """Return a snapshot of copies in ``memory``, and the copies that are still to be made."""
        position = 0
        kinds, copies = {}, []
        views: dict[torch.dtype, torch.Tensor] = {}
        for name, kind in self.kinds.items():
            boxes = {}
            for key, box in kind.boxes.items():
                source = box.tensor
                if source.dtype not in views:
                    views[source.dtype] = memory.view(source.dtype)
                begin = position // source.itemsize
                copy = views[source.dtype][begin : begin + source.numel()].view(source.shape)
                copies.append(Copy(key, copy, source, box.owner, key in kind.stepped))
                boxes[key] = box._replace(tensor=copy, owner=copy)
                position += round_up(source.nbytes, _ALIGNMENT)
            kinds[name] = dataclasses.replace(kind, boxes=boxes)
        return dataclasses.replace(self, kinds=kinds), copies

    @property
    def is_on_gpu(self) -> bool:
        """Whether some of it is on a GPU."""
        boxes = (box for kind in self.kinds.values() for box in kind.boxes.values())
        return any(box.tensor.is_cuda for box in boxes)

    @property
    def nbytes(self) -> int:
        """The bytes that :meth:`staged` needs."""
        return sum(
            round_up(box.tensor.nbytes, _ALIGNMENT)
            for kind in self.kinds.values()
            for box in kind.boxes.values()
        )


def encoded_optimizer(
    state: State,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
    """Return what :func:`optimizer_state` returned: tensors of states, of options, and the rest."""
    tensors: dict[str, torch.Tensor] = {}
    of_options: dict[str, torch.Tensor] = {}
    states = {name: encode(value, name, tensors) for name, value in state["state"].items()}
    groups = [
        {
            "names": group["names"],
            "options": encode(group["options"], f"options of group {number}", of_options),
        }
        for number, group in enumerate(state["groups"])
    ]
    return tensors, of_options, {"state": states, "groups": groups}


def _extra_kind(extra: Any) -> Kind:
    tensors: dict[str, torch.Tensor] = {}
    tree = encode(extra, "extra", tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise TypeError(
                f"{name} is a DTensor. extra holds what each rank has of its own: pass its "
                "to_local() or full_tensor()."
            )
    return Kind(own_boxes(tensors, 0, 1), tree)


def _mesh_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    for tensor in tensors.values():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            names = mesh.mesh_dim_names or tuple(str(i) for i in range(mesh.ndim))
            return dict(zip(names, mesh.shape, strict=True))
    return {}
