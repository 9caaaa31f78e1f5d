"""The weights of a model, whatever shards or wraps it, by the names of its state dict."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.nn.parallel import DistributedDataParallel

from fsdp_ext._util.errors import MisuseError
from fsdp_ext._util.names import WRAPPED
from fsdp_ext.fsdp1.wrapper import FullyShardedDataParallel
from fsdp_ext.optim.state_entries import local_of
from fsdp_ext.sharding.params.flat_parameter import is_flat, own_parameters_shown
from fsdp_ext.sharding.root.module_state import unit_of, units_below
from fsdp_ext.sharding.torch_compat.state_dict_hooks import settle


@dataclass(frozen=True)
class Weight:
    """A parameter or a buffer that is saved."""

    names: list[str]  # several if it is tied
    # This rank's shard as a DTensor, or a plain tensor, which the rank has whole.
    tensor: torch.Tensor
    dtype: torch.dtype  # in the state dict; FSDP1's wrapper may have cast a buffer

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of it, without autograd."""
        return cast(torch.Tensor, local_of(self.tensor)).detach()

    def dtype_as(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype after a cast to ``dtype``."""
        return cast_dtype(self.dtype, dtype)


def cast_dtype(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return ``dtype`` in place of a floating-point dtype, unless it is None."""
    return dtype if dtype is not None and own.is_floating_point else own


def versions_of(model: nn.Module) -> dict[str, int]:
    """Return the versions that modules give their state dicts, by prefix."""
    versions = {place.prefix: place.module._version for place in places_in(model)}
    return {prefix: version for prefix, version in versions.items() if type(version) is int}


def metadata_of(model: nn.Module, versions: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return what ``load_state_dict`` expects as the ``_metadata`` of a state dict.

    Args:
        model: the model that loads the state dict.
        versions: as :func:`versions_of` returns them. A module without an entry counts as its
            present version.
    """
    return {
        place.path[:-1]: {"version": versions.get(place.prefix, place.module._version)}
        for place in places_in(model)
    }


def weights_by_unit(model: nn.Module, caller: str) -> list[list[Weight]]:
    """Return the weights that a state dict has: those of each unit, in the order of a state dict.

    Units are resharded. Weights outside of units belong to the model's own group.
    """
    refuse_summoned(model)
    for unit in units_below(model):
        if unit.phase() != "idle":
            raise RuntimeError(
                f"{caller} was called while {unit.phase()} runs. Call it between steps."
            )
        settle(unit)
    for module in model.modules():
        handle = module._handle if isinstance(module, TorchFSDP) else None
        if handle is not None and handle.uses_sharded_strategy:
            raise NotImplementedError(
                f"{caller} got a model that PyTorch's FullyShardedDataParallel has sharded. Wrap "
                "it with fsdp_ext.FullyShardedDataParallel."
            )
    groups = _groups(model)
    for weight in (weight for group in groups for weight in group):
        _check(weight, caller)
    return groups


def refuse_summoned(model: nn.Module) -> None:
    """Raise MisuseError in ``summon_full_params``, where ranks may have different parameters."""
    for unit in units_below(model):
        if unit.is_summoned:
            raise MisuseError(
                f"unit '{unit.name}' has whole parameters inside summon_full_params. Leave that "
                "context before you save, load, export or stream the model."
            )


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return the further names of tied weights, with the first name of each."""
    weights = [weight for group in _groups(model) for weight in group]
    return {name: weight.names[0] for weight in weights for name in weight.names[1:]}


def is_wrapped(model: nn.Module) -> bool:
    """Return whether the model has wrappers, which add prefixes to names."""
    wrappers = (TorchFSDP, FullyShardedDataParallel, DistributedDataParallel)
    return any(
        isinstance(module, wrappers) or not WRAPPED.isdisjoint(module._modules.keys())
        for module in model.modules()
    )


def names_of(model: nn.Module) -> dict[torch.Tensor, str]:
    """Return the first name of each parameter and buffer."""
    return {weight.tensor: weight.names[0] for group in _groups(model) for weight in group}


def _groups(model: nn.Module) -> list[list[Weight]]:
    """Return the weights of each unit. Flat parameters are replaced by the original ones."""
    with contextlib.ExitStack() as shown:
        for unit in units_below(model):
            shown.enter_context(own_parameters_shown(unit))
        places = list(places_in(model))
        saved = [(place, *each) for place in places for each in _saved_by(place.module)]
    cast = {
        place.prefix + name: dtype
        for place in places
        for name, dtype in vars(place.module).get("_buffer_dtypes", {}).items()  # FSDP1's wrapper's
    }
    groups: dict[object, list[Weight]] = {}
    found: dict[torch.Tensor, Weight] = {}
    for place, name, tensor in saved:
        full = place.prefix + name
        if tensor in found:
            found[tensor].names.append(full)
        else:
            found[tensor] = Weight([full], tensor, cast.get(full, tensor.dtype))
            groups.setdefault(unit_of(place.owner) or place.owner, []).append(found[tensor])
    return list(groups.values())


class Place(NamedTuple):
    """Where a model has a module."""

    module: nn.Module
    owner: nn.Module  # the sharded module that it belongs to
    prefix: str = ""  # the prefix of its names in a state dict
    # The prefix with the names of wrappers, under which ``load_state_dict`` finds it.
    path: str = ""


def places_in(model: nn.Module) -> Iterator[Place]:
    """Yield the places of all modules in the order of a state dict.

    A module that is used in several places comes once for each of them.
    """
    return _walk(Place(model, model))


def _walk(place: Place) -> Iterator[Place]:
    module = place.module
    if isinstance(module, FSDPModule) or unit_of(module) is not None:
        place = place._replace(owner=module)
    yield place
    for name, child in module._modules.items():
        if child is not None:
            wraps = name in WRAPPED or isinstance(module, DistributedDataParallel)
            prefix = place.prefix if wraps else f"{place.prefix}{name}."
            yield from _walk(Place(child, place.owner, prefix, f"{place.path}{name}."))


def _saved_by(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and persistent buffers of a module, without those of modules inside."""
    for name, param in module._parameters.items():
        if param is not None:
            yield name, param
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _check(weight: Weight, caller: str) -> None:
    name = weight.names[0]
    if is_flat(weight.tensor):
        raise NotImplementedError(
            f"{caller} got a model with the flat parameter '{name}' of PyTorch's FSDP1. Wrap it "
            "with fsdp_ext.FullyShardedDataParallel."
        )
    if weight.local.is_meta:
        raise RuntimeError(
            f"{caller} got a model whose '{name}' is on the meta device. Call "
            "module.to_empty(device=...) before."
        )
