"""What is saved of a model and an optimizer, and which part of each tensor a rank has.

Saving uses state dicts, which have extra state and users' hooks. Streaming needs the units of a
model, too: weights.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _get_fqns,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from fsdp_ext.checkpoint.tensor_files import Part
from fsdp_ext.fsdp1.wrapper import FullyShardedDataParallel

_SMALL = 1 << 20  # bytes; rank 0 writes smaller tensors that all ranks have


# - One tensor


@dataclass(frozen=True)
class Box:
    """A rank's part of a tensor.

    Attributes:
        tensor: the rank's elements.
        owner: the whole tensor; a DTensor if ranks share it.
        whole: the shape of the whole tensor.
        offset: where the rank's elements begin in the whole tensor.
        copies: how many ranks have the same elements.
        copy: which of them this rank is.
        is_sharded: whether ranks have different parts.
    """

    tensor: torch.Tensor
    owner: torch.Tensor
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    copies: int
    copy: int
    is_sharded: bool

    @property
    def part(self) -> Part:
        return Part(self.tensor.dtype, tuple(self.tensor.shape), self.whole, self.offset)


def box_of(name: str, tensor: torch.Tensor, rank: int, world_size: int) -> Box | None:
    """Return this rank's part of a tensor; None if it has none.

    Raises:
        TypeError: if the tensor is of a kind that cannot be saved by its bytes.
    """
    if not isinstance(tensor, DTensor):
        _check_plain(name, tensor)
        whole = tuple(tensor.shape)
        return Box(tensor, tensor, whole, (0,) * len(whole), world_size, rank, False)
    local = tensor.to_local()
    _check_plain(name, local)
    mesh, whole = tensor.device_mesh, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    shape, offset = compute_local_shape_and_global_offset(whole, mesh, tensor.placements)
    if tuple(local.shape) != tuple(shape) or any(p.is_partial() for p in tensor.placements):
        raise TypeError(
            f"'{name}' has placements {tensor.placements}, and its local part has shape "
            f"{tuple(local.shape)} instead of {tuple(shape)}. Save tensors that are sharded or "
            "replicated."
        )
    copies, copy = 1, 0
    for size, place, placement in zip(mesh.shape, coordinate, tensor.placements, strict=True):
        if isinstance(placement, Replicate):
            copies, copy = copies * size, copy * size + place
    if local.numel() == 0:
        # One rank keeps a tensor that has no elements at all.
        if math.prod(whole) or any(coordinate):
            return None
        offset = (0,) * len(whole)
    return Box(local, tensor, whole, tuple(offset), copies, copy, True)


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise TypeError(
            f"'{name}' is on the meta device and has no elements yet. Call to_empty first."
        )
    if not _is_plain(tensor):
        raise TypeError(
            f"'{name}' is a {type(tensor).__name__} of layout {tensor.layout}, which cannot be "
            "stored by its bytes. Use torch.distributed.checkpoint for this model."
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    kinds = (torch.Tensor, nn.Parameter, nn.Buffer)
    return type(tensor) in kinds and tensor.layout == torch.strided and not tensor.is_meta


def own_boxes(tensors: Mapping[str, torch.Tensor], rank: int, world_size: int) -> dict[str, Box]:
    """Return the parts that a rank may have to write, in the order of their memory.

    Ranks that have the same part of a sharded tensor share the work. Each decides by the tensor's
    place in the order of names, which is the same on all of them. Tensors that are not sharded are
    returned on all ranks: see :func:`without_others`.
    """
    boxes: dict[str, Box] = {}
    for number, name in enumerate(sorted(tensors)):
        box = box_of(name, tensors[name], rank, world_size)
        if box is not None and (not box.is_sharded or number % box.copies == box.copy):
            boxes[name] = box
    return dict(sorted(boxes.items(), key=lambda item: item[1].tensor.data_ptr()))


def without_others(boxes: dict[str, Box]) -> dict[str, Box]:
    """Leave out the whole tensors that other ranks write.

    All ranks have to have whole tensors of the same names.
    """
    names = [name for name in sorted(boxes) if not boxes[name].is_sharded]
    writers = {
        name: number if boxes[name].part.nbytes >= _SMALL else 0
        for number, name in enumerate(names)
    }
    return {
        name: box
        for name, box in boxes.items()
        if box.is_sharded or writers[name] % box.copies == box.copy
    }


# - A model


def weights_of(model: nn.Module) -> dict[str, Any]:
    """Return what a model's state dict has, by name without the prefixes of wrappers."""
    weights: dict[str, Any] = get_model_state_dict(model)
    return weights


def set_weights(model: nn.Module, weights: dict[str, Any]) -> None:
    """Load what :func:`weights_of` returned, with other values."""
    set_model_state_dict(model, weights, options=StateDictOptions(strict=False))


# - Optimizers

State = dict[str, Any]
Optimizers = Optimizer | Iterable[Optimizer] | None
NOT_OPTIONS = ("params", "param_names")  # entries of a group that are no options


def as_optimizers(given: Optimizers) -> Sequence[Optimizer]:
    """Return the optimizers that an argument names."""
    if given is None:
        return ()
    return (given,) if isinstance(given, Optimizer) else tuple(given)


def optimizer_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> State:
    """Return the state of optimizers by the names of their parameters.

    Returns:
        ``state``: the state of each parameter; ``groups``: the names and options of each group.

    Raises:
        ValueError: if an optimizer has a parameter that is not the model's.
    """
    found: State = {"state": {}, "groups": []}
    known: set[str] = set()
    for optimizer in optimizers:
        state, names = _state_and_names(model, optimizer)
        _check_state(optimizer, state, names, known)
        by_key: dict[Any, str] = {}
        for group, of_group in zip(state["param_groups"], names, strict=True):
            by_key |= zip(group["params"], of_group, strict=True)
            options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
            found["groups"].append({"names": of_group, "options": options})
        found["state"] |= {by_key[key]: value for key, value in state["state"].items()}
    return found


def _check_state(
    optimizer: Optimizer, state: State, names: list[list[str]], known: set[str]
) -> None:
    """Raise ValueError if a state cannot be saved by the names of parameters."""
    kind = type(optimizer).__name__
    own = {name for of_group in names for name in of_group}
    if own & known:
        raise ValueError(
            f"checkpoints got two optimizers that step '{min(own & known)}'. Save one of them "
            "beside the model, and the state_dict() of the other one in extra."
        )
    known |= own
    keys = {key for group in state["param_groups"] for key in group["params"]}
    others = [*(state.keys() - {"state", "param_groups"}), *(state["state"].keys() - keys)]
    if others:
        raise ValueError(
            f"checkpoints got {kind}, whose state_dict() has the entry {others[0]!r} that belongs "
            "to no parameter. Save the state_dict() in extra."
        )


def set_optimizer_state(model: nn.Module, optimizers: Sequence[Optimizer], saved: State) -> None:
    """Load what :func:`optimizer_state` returned.

    Each group gets the options that the group of its first parameter had.
    """
    options = {name: group["options"] for group in saved["groups"] for name in group["names"]}
    for optimizer in optimizers:
        state, names = _state_and_names(model, optimizer)
        groups, states = [], {}
        for group, of_group in zip(state["param_groups"], names, strict=True):
            groups.append({**group, **next((options[n] for n in of_group if n in options), {})})
            for key, name in zip(group["params"], of_group, strict=True):
                if name in saved["state"]:
                    states[key] = saved["state"][name]
        loadable = {**state, "state": states, "param_groups": groups}
        if _is_flat(optimizer):
            loadable = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, loadable)
        optimizer.load_state_dict(loadable)


def parameters_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, torch.Tensor]:
    """Return the parameters of optimizers by name. States have the same placements."""
    weights = weights_of(model)
    params: dict[str, torch.Tensor] = {}
    for optimizer in optimizers:
        _, names = _state_and_names(model, optimizer)
        params |= {name: weights[name] for of_group in names for name in of_group}
    return params


def _state_and_names(model: nn.Module, optimizer: Optimizer) -> tuple[State, list[list[str]]]:
    """Return an optimizer's state dict, and the names of the parameters of each group."""
    if not _is_flat(optimizer):
        return optimizer.state_dict(), _names_of_groups(model, optimizer)
    state = FullyShardedDataParallel.sharded_optim_state_dict(model, optimizer)
    return state, [list(group["params"]) for group in state["param_groups"]]


def _is_flat(optimizer: Optimizer) -> bool:
    return any(
        isinstance(param, FlatParameter)
        for group in optimizer.param_groups
        for param in group["params"]
    )


def _names_of_groups(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    names: dict[int, str] = {}
    for raw, param in model.named_parameters():
        (name,) = _get_fqns(model, raw)
        names[id(param)] = name
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        unknown = [i for i, param in enumerate(group["params"]) if id(param) not in names]
        if unknown:
            raise ValueError(
                f"checkpoints got an optimizer whose group {number} has parameters that are not "
                f"the model's, the first at place {unknown[0]}. Make the optimizer after "
                "fully_shard, and pass the model that it steps."
            )
        groups.append([names[id(param)] for param in group["params"]])
    return groups
