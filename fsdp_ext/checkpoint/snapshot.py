"""What a rank saves: the tensors and the rest of each of its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_ext.checkpoint.boxes import Box, own_boxes
from fsdp_ext.checkpoint.ranks import Ranks
from fsdp_ext.checkpoint.state_dicts import State, optimizer_state, weights_of
from fsdp_ext.checkpoint.tensor_files import checksum, digest, memory_of, resolved, round_up
from fsdp_ext.checkpoint.trees import encode, tensors_in
from fsdp_ext.checkpoint.weights import aliases_of, versions_of

_ALIGNMENT = 16  # bytes, at which a view of any dtype may begin


@dataclass(frozen=True)
class Content:
    """What all ranks write into one kind of file."""

    tensors: dict[str, torch.Tensor]
    tree: Any  # everything but tensors, as JSON
    # The names of tensors that only an optimizer's step changes, each with its parameter's name.
    stepped: Mapping[str, str] = field(default_factory=dict)

    def split(self, names: Container[str]) -> tuple[Content, Content]:
        """Return two contents: the tensors of these names, and the other tensors."""
        chosen = {name: t for name, t in self.tensors.items() if name in names}
        others = {name: t for name, t in self.tensors.items() if name not in names}
        return dataclasses.replace(self, tensors=chosen), dataclasses.replace(self, tensors=others)


def collect(model: nn.Module, optimizers: Sequence[Optimizer], extra: Any) -> dict[str, Content]:
    """Collect what is saved, by the kind of file: "weights", "optimizer", "extra".

    Tensors share memory with the model's.
    """
    weights = weights_of(model)  # first, since it reshards units: names are looked up below
    state = optimizer_state(model, optimizers)
    trained = [name for group in state["groups"] for name in group["names"]]
    tied, versions = aliases_of(model), versions_of(model)
    contents = {"weights": content_of_weights(weights, tied, trained, versions)}
    if optimizers:
        contents["optimizer"] = content_of_optimizer(state)
    if extra is not None:
        contents["extra"] = content_of_extra(extra)
    return contents


def content_of_weights(
    weights: Mapping[str, Any],
    tied: Mapping[str, str],
    stepped: Iterable[str],
    versions: Mapping[str, int],
) -> Content:
    """Return the content of a file of weights.

    Args:
        weights: a model's state dict.
        tied: further names of tied weights, with the first name of each.
        stepped: the names of the weights that an optimizer steps.
        versions: the versions of modules, by prefix, as far as they are known.
    """
    tensors = {name: each for name, each in weights.items() if isinstance(each, torch.Tensor)}
    aliases = {name: first for name, first in tied.items() if {name, first} <= tensors.keys()}
    kept = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    others = {name: each for name, each in weights.items() if name not in tensors}
    encoded = {name: encode(value, name, kept) for name, value in others.items()}
    tree = {"aliases": aliases, "other": encoded, "versions": dict(versions)}
    return Content(kept, tree, {name: name for name in stepped if name in kept})


def content_of_optimizer(state: State) -> Content:
    """Return the content of an optimizer's file, from the result of :func:`optimizer_state`."""
    tensors: dict[str, torch.Tensor] = {}
    of_options: dict[str, torch.Tensor] = {}
    states = {name: encode(value, name, tensors) for name, value in state["state"].items()}
    stepped = {each: name for name, tree in states.items() for each in tensors_in(tree)}
    groups = [
        {
            "names": group["names"],
            # By the first parameter: other ranks may have another group under this number.
            "options": encode(group["options"], f"options of {group['names'][:1]}", of_options),
        }
        for group in state["groups"]
    ]
    return Content(tensors | of_options, {"state": states, "groups": groups}, stepped)


def content_of_extra(extra: Any) -> Content:
    """Return the content of a file of ``extra``."""
    tensors: dict[str, torch.Tensor] = {}
    tree = encode(extra, "extra", tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise TypeError(
                f"{name} is a DTensor. extra holds what each rank has of its own: pass its "
                "to_local() or full_tensor()."
            )
    return Content(tensors, tree)


@dataclass(frozen=True)
class Kind:
    """What a rank writes into one file: tensors by name, and everything else as JSON."""

    boxes: dict[str, Box]
    tree: Any


@dataclass(frozen=True)
class Snapshot:
    """What a rank saves, by the kind of file, as in :func:`collect`."""

    kinds: dict[str, Kind]
    # The name, dtype and shape of all tensors of the model and the optimizer, whoever writes them.
    described: frozenset[tuple[str, str, tuple[int, ...]]]
    elements: int  # the elements of these tensors as wholes
    # The shape of the model's mesh, by the names of its dimensions, for ``inspect``.
    mesh: dict[str, int]

    @classmethod
    def of(cls, contents: Mapping[str, Content], ranks: Ranks) -> Snapshot:
        """Return what this rank saves. Tensors share memory with those in ``contents``."""
        kinds, described, elements = {}, list[tuple[str, str, tuple[int, ...]]](), 0
        for name, content in contents.items():
            rank, size = (0, 1) if name == "extra" else (ranks.rank, ranks.size)
            kinds[name] = Kind(own_boxes(content.tensors, rank, size), content.tree)
            if name != "extra":
                described += map(_describe, content.tensors, content.tensors.values())
                elements += sum(tensor.numel() for tensor in content.tensors.values())
        return cls(kinds, frozenset(described), elements, _mesh_of(contents["weights"].tensors))

    def __or__(self, other: Snapshot) -> Snapshot:
        """Return a snapshot with the tensors of both, of the same kinds of files."""
        kinds = {
            name: Kind(kind.boxes | other.kinds[name].boxes, kind.tree)
            for name, kind in self.kinds.items()
        }
        described, elements = self.described | other.described, self.elements + other.elements
        return Snapshot(kinds, described, elements, self.mesh or other.mesh)

    @property
    def whole_names(self) -> list[str]:
        """The names of the tensors that are not sharded."""
        boxes = chain.from_iterable(kind.boxes.items() for kind in self.kinds.values())
        return [name for name, box in boxes if not box.is_sharded]

    @property
    def digests(self) -> tuple[str, str]:
        """Checksums of names, dtypes and shapes, by which ranks decide who writes each tensor.

        The first is of the tensors that are not sharded, and the second of all tensors. Each
        includes the number of elements of all tensors.
        """
        not_sharded = [
            _describe(name, box.tensor)
            for kind in ("weights", "optimizer")
            if kind in self.kinds
            for name, box in sorted(self.kinds[kind].boxes.items())
            if not box.is_sharded
        ]
        return digest([not_sharded, self.elements]), digest([sorted(self.described), self.elements])

    def checksums_of_whole_states(self) -> dict[str, str]:
        """Return checksums of what has to be equal in all ranks' optimizers of a sharded model.

        These are the options of each parameter, and the states that are no DTensors. They may
        differ by mistake, for example if an optimizer makes a state from the rank's shard.
        """
        if not self.mesh or "optimizer" not in self.kinds:
            return {}
        optimizer = self.kinds["optimizer"]
        checksums: dict[str, str] = {}
        for group in optimizer.tree["groups"]:
            options = digest(group["options"])
            checksums |= {f"the options of '{name}'": options for name in group["names"]}
        for name, states in optimizer.tree["state"].items():
            checksums[f"the state of '{name}' beside tensors"] = digest(states)
        for name, box in sorted(optimizer.boxes.items()):
            if not box.is_sharded:
                host = resolved(box.tensor).cpu()
                checksums[f"the state '{name}', which is no DTensor"] = checksum(memory_of(host))
        return checksums

    def placed_in(self, memory: torch.Tensor) -> Snapshot:
        """Return a snapshot whose tensors lie in ``memory``. Their values are not set yet."""
        position = 0
        kinds = {}
        views: dict[torch.dtype, torch.Tensor] = {}
        for name, kind in self.kinds.items():
            boxes = {}
            for key, box in kind.boxes.items():
                source = box.tensor
                if source.dtype not in views:
                    views[source.dtype] = memory.view(source.dtype)
                begin = position // source.itemsize
                place = views[source.dtype][begin : begin + source.numel()].view(source.shape)
                boxes[key] = box._replace(tensor=place)
                position += round_up(source.nbytes, _ALIGNMENT)
            kinds[name] = Kind(boxes, kind.tree)
        return dataclasses.replace(self, kinds=kinds)

    @property
    def nbytes(self) -> int:
        """The bytes that :meth:`placed_in` needs."""
        return sum(
            round_up(box.tensor.nbytes, _ALIGNMENT)
            for kind in self.kinds.values()
            for box in kind.boxes.values()
        )


def _describe(name: str, tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...]]:
    return name, str(tensor.dtype), tuple(tensor.shape)


def _mesh_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    for tensor in tensors.values():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            names = mesh.mesh_dim_names or tuple(str(i) for i in range(mesh.ndim))
            return dict(zip(names, mesh.shape, strict=True))
    return {}
