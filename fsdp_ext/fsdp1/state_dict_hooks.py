"""A wrapper's hooks of ``state_dict`` and ``load_state_dict``, which convert names and forms."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ext._util.names import WRAPPED_BY_FSDP1, without_fsdp1
from fsdp_ext.fsdp1.setup import CHECKPOINTED, is_wrapper, without_checkpointing
from fsdp_ext.fsdp1.state_dict_forms import Form
from fsdp_ext.fsdp1.summon import stands_for
from fsdp_ext.fsdp1.views import mark_flattened
from fsdp_ext.fsdp1.whole_tensors import shard_like, whole_copy, without_sharded_tensor
from fsdp_ext.sharding.params.flat_parameter import NAME as FLAT
from fsdp_ext.sharding.params.flat_parameter import show_flat
from fsdp_ext.sharding.torch_compat.state_dict_hooks import adopt_changes, settle


def remove_wrapper_names(
    module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]
) -> None:
    """After saving, use the unwrapped module's names, the buffers' dtypes, and the chosen form."""
    inside = f"{prefix}{WRAPPED_BY_FSDP1}."
    for key in [key for key in state_dict if key.startswith(inside)]:
        state_dict[prefix + key[len(inside) :]] = state_dict.pop(key)
    # A version has two names: with the prefix, as in FSDP1, for models wrapped in the same places,
    # and without it for unwrapped models.
    versions = getattr(state_dict, "_metadata", {})
    for key in [key for key in versions if f"{key}.".startswith(inside)]:
        versions[(prefix + f"{key}."[len(inside) :])[:-1]] = versions[key]
    wrapper = cast(Any, module)
    if wrapper._wraps_wrapper:
        return  # the wrapper inside has converted everything
    for name, dtype in wrapper._buffer_dtypes.items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = state_dict[prefix + name].to(dtype)
    form = Form.of_model(wrapper._state_dict_settings)
    names = _own_names(wrapper, state_dict, prefix)
    unit = wrapper._fsdp_ext_unit
    if unit.is_summoned:
        _take_summoned(module, state_dict, prefix, names, form)
    if form.is_local and unit.flat_param is not None:
        state_dict[prefix + FLAT] = unit.flat_param.local_shard(state_dict[prefix + FLAT])
    if not form.is_local:
        _refuse_flat(names)
    form.convert_all(state_dict, names, unit.ranks)


def _own_names(wrapper: nn.Module, state_dict: Any, prefix: str) -> list[str]:
    """Return the names of a wrapper's entries, without those of wrappers inside of it.

    Hooks of the wrappers inside run first, so their entries are converted already.
    """
    inside = tuple(
        prefix + without_checkpointing(f"{without_fsdp1(name)}.")
        for name, module in wrapper.named_modules(remove_duplicate=False)
        if is_wrapper(module) and module is not wrapper
    )
    return [name for name in state_dict if name.startswith(prefix) and not name.startswith(inside)]


def _refuse_flat(names: list[str]) -> None:
    """Raise RuntimeError if a name is that of a flat parameter, which has a shard of this rank."""
    for name in names:
        if name.rpartition(".")[2] == FLAT:
            raise RuntimeError(
                f"state_dict found '{name}', a shard of a module that is wrapped under another "
                "name only. Replace the module by its wrapper under this name, too."
            )


def _take_summoned(
    module: nn.Module, state_dict: Any, prefix: str, names: list[str], form: Form
) -> None:
    """Replace the whole parameters of ``summon_full_params`` if shards of them are wanted."""
    for own_name, param in module.named_parameters(remove_duplicate=False):
        name = prefix + without_checkpointing(without_fsdp1(own_name))
        if name not in names:
            continue
        if form.is_full and isinstance(param, DTensor):
            raise RuntimeError(
                "state_dict was called in summon_full_params(rank0_only=True) on another rank than "
                "0, which has no whole parameters. Call it on rank 0 only."
            )
        sharded = stands_for(param)
        if not form.is_full and sharded is not None:
            state_dict[name] = shard_like(state_dict[name], sharded)


def add_wrapper_names(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before loading, add the wrapper's name to all names, and gather summoned parameters."""
    if not cast(Any, module)._wraps_wrapper:
        _convert_to_load(module, state_dict, prefix)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}{WRAPPED_BY_FSDP1}.{key[len(prefix) :]}"] = state_dict.pop(key)


def _convert_to_load(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Bring a wrapper's own entries into the form that its parameters load."""
    wrapper = cast(Any, module)
    unit = wrapper._fsdp_ext_unit
    settle(unit)
    if unit.flat_param is not None and not Form.of_model(wrapper._state_dict_settings).is_local:
        unit.flat_param.hide()
    local: Any = state_dict.get(prefix + FLAT)
    if isinstance(local, DTensor):
        state_dict[prefix + FLAT] = local.to_local()
    try:
        for own_name, param in module.named_parameters(remove_duplicate=False):
            name = prefix + without_checkpointing(without_fsdp1(own_name))
            if name not in state_dict:
                continue
            sharded = stands_for(param)
            value = state_dict[name]
            value = without_sharded_tensor(name, value, param if sharded is None else sharded)
            is_summoned = sharded is not None and isinstance(value, DTensor)
            state_dict[name] = whole_copy(value) if is_summoned else value
    except Exception:
        show_flat(unit)
        raise


def keep_flat_name(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a checkpointing wrapper loads, undo its renaming of its own flat parameter."""
    renamed = f"{prefix}{CHECKPOINTED}.{FLAT}"
    if renamed in state_dict:
        state_dict[prefix + FLAT] = state_dict.pop(renamed)


def shard_whole_parameters(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Before a module inside loads its own parameters, shard those that are whole.

    Hooks of the user's, which come before this one, may have renamed or joined the entries.
    """
    for name, param in module._parameters.items():
        value: Any = state_dict.get(prefix + name)
        # Libraries have classes of tensors that are read from a file when they are used.
        whole = hasattr(value, "__torch_function__") and not isinstance(value, DTensor)
        if isinstance(param, DTensor) and whole and value.shape == param.shape:
            state_dict[prefix + name] = shard_like(torch.detach(value).to(param.dtype), param)


def clean_incompatible_keys(module: nn.Module, keys: Any) -> None:
    """After loading, report names without the wrapper's."""
    unit = cast(Any, module)._fsdp_ext_unit
    show_flat(unit)
    adopt_changes(unit)  # assign=True has made a new flat parameter, or others
    mark_flattened(unit)
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = map(without_fsdp1, names)
