"""States of optimizers that have flat parameters, converted to the original parameters and back.

A saved state has the names and shapes of the original parameters, whatever ``use_orig_params`` is.
So both kinds of wrappers load each other's saved states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ext.fsdp1.optimizer_states import with_states
from fsdp_ext.fsdp1.state_dict_forms import State
from fsdp_ext.sharding.params.flat_parameter import NAME, FlatParameter


class FlatParameters:
    """The flat parameters of an optimizer, and the names of the parameters in them."""

    def __init__(self, named: Mapping[str, nn.Parameter], flats: Iterable[FlatParameter]) -> None:
        by_param = {flat.param: flat for flat in flats}
        self._named = named
        self._flats = {name: by_param[param] for name, param in named.items() if param in by_param}

    def own_names(self, name: str) -> list[str]:
        """Return the names of the parameters in a flat one; any other name is unchanged."""
        if name not in self._flats:
            return [name]
        flat: Any = self._flats[name].param
        return [name.removesuffix(NAME) + own for own in flat._fqns]

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, with the sharded ones in place of flat ones."""
        found: dict[str, nn.Parameter] = {}
        for name, param in self._named.items():
            flat = self._flats.get(name)
            own = [param] if flat is None else [each.sharded for each in flat.params]
            found.update(zip(self.own_names(name), own, strict=True))
        return found

    def split(self, state: State) -> State:
        """Return a state keyed by names, with the original parameters in place of flat ones.

        Tensors share memory with those of ``state``.
        """
        states: State = {}
        for name, values in state["state"].items():
            flat = self._flats.get(name)
            if flat is None:
                states[name] = values
                continue
            parts = {key: _split(value, flat) for key, value in values.items()}
            for number, own in enumerate(self.own_names(name)):
                states[own] = {key: of_params[number] for key, of_params in parts.items()}
        return with_states(state, states, self.own_names)

    def join(self, states: State) -> State:
        """Return the states of flat parameters, joined from the shards of states of their parts."""
        joined = dict(states)
        for name, flat in self._flats.items():
            own = self.own_names(name)
            missing = [each for each in own if each not in states]
            if len(missing) == len(own):
                continue
            if missing:
                raise ValueError(
                    f"the optimizer's state has none for {missing}, which are in one flat "
                    "parameter with others. Save the state of all parameters of a wrapper, or use "
                    "use_orig_params=True."
                )
            own_states = [joined.pop(each) for each in own]
            keys = dict.fromkeys(chain.from_iterable(own_states))
            parts = {key: [values.get(key) for values in own_states] for key in keys}
            for key, values in parts.items():
                _check_agree(key, values, own)
            joined[name] = {key: _join(values, flat) for key, values in parts.items()}
        return joined


def _split(value: Any, flat: FlatParameter) -> list[Any]:
    """Cut a value of a flat parameter's state into one for each parameter in it."""
    if isinstance(value, torch.Tensor) and value.shape == flat.param.shape:
        return [param.spread.dtensor(part) for param, part in flat.parts(value)]
    return [value for _ in flat.params]


def _check_agree(key: str, values: list[Any], own: list[str]) -> None:
    """Raise ValueError if a flat parameter's state cannot have the values of all ``own`` in it."""
    kinds = [_kind(value) for value in values]
    for name, kind in zip(own, kinds, strict=True):
        if kind != kinds[0]:
            raise ValueError(
                f"the optimizer's state of '{own[0]}' has '{key}' {kinds[0]}, and that of '{name}' "
                f"{kind}, but they are in one flat parameter, which has one value for all. Use "
                "use_orig_params=True, or save a state in which they agree."
            )


def _kind(value: Any) -> str:
    """Return in words what values of one flat parameter have in common."""
    if isinstance(value, DTensor):
        return f"of each element, in {value.dtype}"
    if isinstance(value, torch.Tensor):
        return f"{value.tolist()} in {value.dtype}"
    return repr(value)


def _join(values: list[Any], flat: FlatParameter) -> Any:
    """Join values of the parameters in a flat one; reverse of :func:`_split`."""
    if not isinstance(values[0], DTensor):
        return values[0]
    joined = torch.zeros(flat.param.shape, dtype=values[0].dtype, device=values[0].device)
    for value, (_, part) in zip(values, flat.parts(joined), strict=True):
        part.copy_(value.to_local())
    return joined
