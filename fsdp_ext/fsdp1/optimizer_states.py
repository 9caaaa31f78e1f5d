"""Saved states of optimizers: dicts with 'state' and, mostly, 'param_groups'."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from fsdp_ext.fsdp1.setup import broadcast
from fsdp_ext.fsdp1.state_dict_forms import State
from fsdp_ext.fsdp1.whole_tensors import shard_like, without_sharded_tensor
from fsdp_ext.sharding.root.agreement import exchange, together
from fsdp_ext.sharding.root.unit import Unit


def check_state(state: Any) -> None:
    """Raise TypeError if this is no state of an optimizer."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        raise TypeError(
            f"an object of type {type(state).__name__} was passed in place of an optimizer's state,"
            " which is a dict with 'state'. Pass what optim_state_dict or the optimizer's "
            "state_dict() returned."
        )
    for key, values in state["state"].items():
        if not isinstance(values, Mapping):
            raise TypeError(
                f"the optimizer state of {key!r} is of type {type(values).__name__}. It must be a "
                "dict. Pass what optim_state_dict or the optimizer's state_dict() returned."
            )


def saved_group(state: State, names: list[str]) -> dict[str, Any]:
    """Return the group of a saved state that has exactly the parameters ``names``."""
    for group in state["param_groups"]:
        if set(group["params"]) == set(names):
            return dict(group)
    raise ValueError(
        f"the optimizer has a group of {len(names)} parameters that begins with {names[:1]}, and "
        f"the state has none of the same parameters among its {len(state['param_groups'])} groups. "
        "Make the optimizer with the groups that were saved."
    )


def check_names(states: State, params: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError if there are states of other parameters than the optimizer's."""
    unknown = sorted(set(states) - set(params))
    if unknown:
        raise ValueError(
            f"the optimizer's state has {unknown}, which are no parameters of the optimizer. "
            "Pass what optim_state_dict returned for the same model."
        )


def shard_values(
    states: State, params: Mapping[str, nn.Parameter], take: Callable[[Any], Any]
) -> State:
    """Return copies of this rank's values in saved states, whole or sharded, of ``params``.

    ``take`` is called with each value before it is sharded, and returns the value to use.
    """
    return {
        name: {
            key: _shard_value(f"{name}.{key}", take(value), params[name])
            for key, value in values.items()
        }
        for name, values in states.items()
    }


def _shard_value(name: str, value: Any, param: nn.Parameter) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = without_sharded_tensor(name, value, param)
    if isinstance(param, DTensor) and value.shape == param.shape and value.ndim > 0:
        value = value if isinstance(value, DTensor) else shard_like(value, param)
        return value.to(param.device).clone()  # a shard must not keep the whole alive
    return value.clone()


def with_values(state: State, convert: Callable[[Any], Any]) -> State:
    """Return an optimizer's state with other values."""
    states = {
        key: {name: convert(value) for name, value in values.items()}
        for key, values in state["state"].items()
    }
    return {**state, "state": states}


def with_keys(state: State, rename: Callable[[Any], Any]) -> State:
    """Return an optimizer's state with other keys of its parameters."""
    states = {rename(key): values for key, values in state["state"].items()}
    return with_states(state, states, lambda key: [rename(key)])


def with_states(state: State, states: State, keys_of: Callable[[Any], list[Any]]) -> State:
    """Return an optimizer's state with ``states``, and with other keys in its groups.

    A state without 'param_groups' stays without them. ``keys_of`` returns the new keys that take
    the place of a key.
    """
    changed = {**state, "state": states}
    if "param_groups" in state:
        changed["param_groups"] = [
            {**group, "params": [new for key in group["params"] for new in keys_of(key)]}
            for group in state["param_groups"]
        ]
    return changed


@dataclass(frozen=True)
class _Blank:
    """A tensor that is sent separately."""

    shape: torch.Size
    dtype: torch.dtype


def in_order_of_names(state: State) -> State:
    """Order the states and the values in each by name, so that all ranks gather in one order."""
    states = {name: _sorted(values) for name, values in _sorted(state["state"]).items()}
    return {**state, "state": states}


def _sorted(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return dict(sorted(values.items(), key=lambda item: str(item[0])))


def as_rank_0_has_it(state: State, unit: Unit, *, keeps_plain: bool) -> State:
    """Order the values as rank 0 of the unit's group has them, so that all ranks gather the same.

    Values that rank 0 lacks are left out. If ``keeps_plain``, each rank keeps its states without a
    DTensor as they are. They belong to plain parameters, which other ranks may lack. FSDP1 keeps
    them with ``use_orig_params=True``, and otherwise leaves out what rank 0 lacks.
    """
    states = state["state"]
    plain = {
        name: values
        for name, values in states.items()
        if keeps_plain and not any(isinstance(value, DTensor) for value in values.values())
    }
    group = unit.ranks.shard_group
    mine = {name: list(values) for name, values in states.items() if name not in plain}
    of_ranks = exchange(unit, mine, [group])
    wanted: dict[str, list[str]] = of_ranks[0]
    for rank, has in enumerate(of_ranks):
        missing = [name for name, keys in wanted.items() if not set(keys) <= set(has.get(name, ()))]
        if missing:
            raise RuntimeError(
                "FSDP currently requires each rank to have at least the optimizer states needed by "
                "rank 0's optimizer but some ranks are missing some of those states: rank "
                f"{dist.get_global_rank(group, rank)} has none, or not all, of {missing}. Make the "
                "optimizer of the same parameters on all ranks, and step it on all of them."
            )
    gathered = {name: {key: states[name][key] for key in keys} for name, keys in wanted.items()}
    return {**state, "state": gathered | plain}


def from_rank_0(state: State, unit: Unit, params: Mapping[str, nn.Parameter]) -> State:
    """Return the state of rank 0 of the unit's mesh, whose values :func:`received` takes.

    Raises:
        TypeError: if rank 0 has no state of an optimizer. All ranks raise it.
        ValueError: if it has shards, or states of parameters that a rank's optimizer lacks.
        RuntimeError: if one of its values cannot be pickled.
    """
    ranks = unit.ranks
    has_it = ranks.rank_in_mesh == 0
    sent: list[bytes] = [b""]
    with together(unit, "the load", "reading rank 0's state"):
        if has_it:
            sent = [pickle.dumps(_to_send(state))]
    for group in reversed(ranks.groups):  # to rank 0 of each shard group, and then within these
        dist.broadcast_object_list(sent, dist.get_global_rank(group, 0), group=group)
    with together(unit, "the load", "matching the state with the optimizer"):
        if not has_it:
            state = pickle.loads(sent[0])
        check_names(state["state"], params)
    return _with_options(state, lambda value: received(value, unit))


def received(value: Any, unit: Unit) -> Any:
    """Return a value of :func:`from_rank_0`'s state, for which rank 0 sends tensors.

    All ranks call this for the same values in order. A rank that shards each one before it takes
    the next needs memory for one.
    """
    if isinstance(value, _Blank):
        value = torch.empty(value.shape, dtype=value.dtype, device=unit.device)
    elif _is_sent_apart(value):
        value = value.to(unit.device)
    else:
        return value
    broadcast([value], unit.ranks.mesh)
    return value


def _to_send(state: State) -> State:
    """Return a state with blanks in place of tensors, which have to be whole."""
    check_state(state)
    for name, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, (DTensor, ShardedTensor)):
                raise ValueError(
                    f"rank 0's whole state was to be loaded, and its '{key}' of '{name}' is a "
                    f"{type(value).__name__}, a shard. Set StateDictType.SHARDED_STATE_DICT, or "
                    "call flatten_sharded_optim_state_dict."
                )
    return _with_options(with_values(state, _to_blank), _to_blank)


def _with_options(state: State, convert: Callable[[Any], Any]) -> State:
    """Return an optimizer's state with other options in its groups."""
    if "param_groups" not in state:
        return state
    return {**state, "param_groups": tree_map(convert, state["param_groups"])}


def _to_blank(value: Any) -> Any:
    return _Blank(value.shape, value.dtype) if _is_sent_apart(value) else value


def _is_sent_apart(value: Any) -> bool:
    """Return whether a value is broadcast. Pickling is slow, and keeps the device of rank 0."""
    return isinstance(value, torch.Tensor) and (value.ndim > 0 or value.device.type != "cpu")
