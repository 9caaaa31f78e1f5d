"""The state dicts of a model and of its optimizers, by the names of parameters.

Saving uses state dicts, which have extra state and users' hooks. Streaming needs the units of a
model, too: weights.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FlatParameter, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.optim import Optimizer

from fsdp_ext._util.names import without_fsdp1, without_wrappers
from fsdp_ext.checkpoint.weights import is_wrapped, names_of, places_in, refuse_summoned
from fsdp_ext.fsdp1.setup import without_checkpointing
from fsdp_ext.fsdp1.state_dict_forms import shared_memory
from fsdp_ext.fsdp1.wrapper import FullyShardedDataParallel
from fsdp_ext.sharding.params.flat_parameter import NAME

# - A model


def weights_of(model: nn.Module) -> dict[str, Any]:
    """Return what a model's state dict has, by name without the prefixes of wrappers.

    Tensors share memory with the model's.
    """
    refuse_summoned(model)
    # For a model without wrappers both return the same, and state_dict() is several times faster.
    with shared_memory():
        weights = get_model_state_dict(model) if is_wrapped(model) else model.state_dict()
    for name, value in weights.items():
        if isinstance(value, ShardedTensor):
            raise TypeError(
                "checkpoints got a model in PyTorch's FSDP1 wrapper without a device_mesh: "
                f"'{name}' is a ShardedTensor. Pass device_mesh= to FullyShardedDataParallel, or "
                "use torch.distributed.checkpoint."
            )
    return weights


def set_weights(model: nn.Module, weights: dict[str, Any]) -> None:
    """Load what :func:`weights_of` returned, with other values."""
    keys: Any
    if is_wrapped(model):
        keys = set_model_state_dict(model, weights, options=StateDictOptions(strict=False))
    else:
        keys = model.load_state_dict(weights, strict=False)
    unexpected = getattr(keys, "unexpected_keys", None) or ()  # a user's own method may return None
    # PyTorch's function knows a module that is used in several places under its first name only.
    again = tuple(_further_prefixes(model))
    ignored = [name for name in unexpected if not name.startswith(again)]
    if ignored:
        raise ValueError(
            f"the model's state_dict() returns '{ignored[0]}', which its load_state_dict() does "
            "not know. Override both, so that one loads what the other returns."
        )


def _further_prefixes(model: nn.Module) -> Iterator[str]:
    """Yield the prefixes of modules that have come before under another prefix."""
    seen: set[nn.Module] = set()
    for module, _, prefix, _ in places_in(model):
        if module in seen and prefix:
            yield prefix
        seen.add(module)


# - Optimizers

State = dict[str, Any]
Optimizers = Optimizer | Iterable[Optimizer] | None
_NOT_OPTIONS = ("params", "param_names")  # entries of a group that are no options


def as_optimizers(given: Optimizers) -> Sequence[Optimizer]:
    """Return the optimizers that an argument names."""
    if given is None:
        return ()
    optimizers = (given,) if isinstance(given, Optimizer) else tuple(given)
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise TypeError(
                f"checkpoints got optimizer= with a {type(each).__name__}. Pass an optimizer, or a "
                "list of optimizers."
            )
    return optimizers


def optimizer_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> State:
    """Return the state of optimizers by the names of their parameters.

    Returns:
        ``state``: the state of each parameter; ``groups``: the names and options of each group.
    """
    found: State = {"state": {}, "groups": []}
    known: set[str] = set()
    for optimizer in optimizers:
        state, names = _state_and_names(model, optimizer)
        _check_state(optimizer, state, names, known)
        by_key: dict[Any, str] = {}
        for group, of_group in zip(state["param_groups"], names, strict=True):
            by_key |= zip(group["params"], of_group, strict=True)
            found["groups"].append(named_group(group, of_group))
        found["state"] |= {by_key[key]: value for key, value in state["state"].items()}
    return found


def named_group(group: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a group of an optimizer's state dict as ``names`` and ``options``."""
    options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
    return {"names": list(names), "options": options}


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
        state, names = _state_and_names(model, optimizer, needs_states=False)
        groups, states = [], {}
        for group, of_group in zip(state["param_groups"], names, strict=True):
            own: dict[str, Any] = next((options[n] for n in of_group if n in options), {})
            groups.append({**group, **_new_options(own, group)})
            for key, name in zip(group["params"], of_group, strict=True):
                if name in saved["state"]:
                    states[key] = saved["state"][name]
        loadable = {**state, "state": states, "param_groups": groups}
        if _is_wrapped_by_torch(model):
            with TorchFSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                loadable = TorchFSDP.optim_state_dict_to_load(model, optimizer, loadable)
        elif _flat_parameters(optimizer):
            cls = FullyShardedDataParallel
            loadable = cls.flatten_sharded_optim_state_dict(loadable, model, optimizer)
        optimizer.load_state_dict(loadable)


def _new_options(saved: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """Return options for a group alone. Tensors go to the device of those that it has now."""
    options = copy.deepcopy(saved)
    for key, now in group.items():
        if isinstance(now, torch.Tensor) and isinstance(options.get(key), torch.Tensor):
            options[key] = options[key].to(now.device)
    return options


def parameters_of(
    model: nn.Module, optimizers: Sequence[Optimizer], weights: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the model's weights that optimizers step, by name.

    If the model overrides ``state_dict()``, ``weights`` may lack them or have other names.
    """
    known = {name: tensor for tensor, name in names_of(model).items()} | weights
    params: dict[str, torch.Tensor] = {}
    for optimizer in optimizers:
        _, names = _state_and_names(model, optimizer, needs_states=False)
        params |= {name: known[name] for of_group in names for name in of_group}
    return params


def _state_and_names(
    model: nn.Module, optimizer: Optimizer, *, needs_states: bool = True
) -> tuple[State, list[list[str]]]:
    """Return an optimizer's state dict, and the names of the parameters of each group.

    Without ``needs_states``, ranks call no collectives, and the states may be missing.
    """
    if _is_wrapped_by_torch(model):
        known = {param: _torch_name(name) for name, param in model.named_parameters()}
        keys, state = _names_of_groups(optimizer, known), optimizer.state_dict()
        groups = zip(state["param_groups"], keys, strict=True)
        state |= {"state": {}, "param_groups": [{**group, "params": own} for group, own in groups]}
        if needs_states:
            with TorchFSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                state["state"] = TorchFSDP.optim_state_dict(model, optimizer)["state"]
        return state, [[*map(without_wrappers, own)] for own in keys]
    if not _flat_parameters(optimizer):
        return optimizer.state_dict(), _names_of_groups(optimizer, names_of(model))
    with shared_memory():
        state = FullyShardedDataParallel.sharded_optim_state_dict(model, optimizer)
    return state, [list(group["params"]) for group in state["param_groups"]]


def _is_wrapped_by_torch(model: nn.Module) -> bool:
    """Return whether PyTorch's FSDP1 wraps modules, so that parameters are parts of shards."""
    return any(isinstance(module, TorchFSDP) for module in model.modules())


def flat_tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield flat parameters and their states, of which checkpoints have parts, with a name."""
    names = {param: without_fsdp1(name) for name, param in model.named_parameters()}
    for param in _flat_parameters(optimizer):
        name = names.get(param, "_flat_param")  # the second if the model does not have it
        yield name, param
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key}", value


def _flat_parameters(optimizer: Optimizer) -> list[FlatParameter]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return [param for param in params if isinstance(param, FlatParameter)]


def _torch_name(name: str) -> str:
    """Return the name that PyTorch's FSDP1 has for a parameter. It keeps that of torch.compile."""
    return without_checkpointing(without_fsdp1(name))


def _names_of_groups(optimizer: Optimizer, names: Mapping[Any, str]) -> list[list[str]]:
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        unknown = [i for i, param in enumerate(group["params"]) if param not in names]
        if unknown:
            raise ValueError(
                f"checkpoints got an optimizer whose group {number} has parameters that are not "
                f"the model's, the first at place {unknown[0]}. Make the optimizer after "
                "fully_shard, and pass the model that it steps."
            )
        groups.append([own for each in group["params"] for own in _own_names(each, names[each])])
    return groups


def _own_names(param: torch.Tensor, name: str) -> list[str]:
    """Return the names of the parameters in a flat parameter of PyTorch's, or else ``name``."""
    if not isinstance(param, FlatParameter):
        return [name]
    return [_torch_name(name.removesuffix(NAME) + own) for own in param._fqns]
