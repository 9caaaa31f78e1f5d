"""Load a checkpoint: read everything first, and then change the model on all ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer

from fsdp_ext.checkpoint import state_dicts
from fsdp_ext.checkpoint.boxes import box_of
from fsdp_ext.checkpoint.reading import Checkpoint, Parts, Reader, Weights, decoded, shape_of
from fsdp_ext.checkpoint.tensor_files import QUANTIZED, DamagedFileError, Part, TensorFile
from fsdp_ext.checkpoint.transfers import new_for_reading
from fsdp_ext.checkpoint.trees import tensors_in
from fsdp_ext.checkpoint.weights import aliases_of, metadata_of
from fsdp_ext.optim.state_entries import local_of, over


@dataclass(frozen=True)
class Loaded:
    """What a rank has read, before it is put into the model."""

    weights: dict[str, Any]  # as :func:`state_dicts.weights_of` returns them
    # As :func:`state_dicts.optimizer_state` returns it; None if none was asked for.
    optimizer: state_dicts.State | None
    extra: Any  # what this rank saved as ``extra``

    def put_into(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Change the model and the optimizers.

        Raises:
            ValueError: if an optimizer cannot load the states, for example those of another class.
                Nothing has changed then.
        """
        before = [(each, each.state, each.param_groups) for each in optimizers]
        try:
            # Optimizers first: only their load_state_dict can tell whether it takes the states.
            if self.optimizer is not None:
                _set_optimizers(model, optimizers, self.optimizer)
            state_dicts.set_weights(model, self.weights)
        except Exception:
            for optimizer, states, groups in before:  # load_state_dict has replaced both
                optimizer.state, optimizer.param_groups = states, groups
            raise


def _set_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], state: state_dicts.State
) -> None:
    try:
        state_dicts.set_optimizer_state(model, optimizers, state)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        kinds = ", ".join(type(each).__name__ for each in optimizers)
        raise ValueError(
            f"{kinds} cannot load the optimizer's states in the checkpoint "
            f"({type(error).__name__}: {error}). Load them into an optimizer of the class that was "
            "saved, or load the model alone."
        ) from error


def read(
    path: Path, model: nn.Module, optimizers: Sequence[Optimizer], rank: int, *, strict: bool
) -> Loaded:
    """Read what a rank needs of a checkpoint.

    Raises:
        DamagedFileError: if the checkpoint is not what was written.
        ValueError: if it is of another model.
    """
    checkpoint = Checkpoint(path)
    wanted = state_dicts.weights_of(model)
    state = None
    with Reader() as reader:
        weights, _ = plan_weights(checkpoint.weights(), model, wanted, reader, strict)
        if optimizers:
            params = state_dicts.parameters_of(model, optimizers, wanted)
            state = _plan_optimizer(checkpoint, params, reader)
        extra = checkpoint.extra_of(rank)
    return Loaded(weights, state, extra)


# - Plans. They return tensors whose values are there at the end of the reader's block.


def _plan_tensor(
    name: str, like: torch.Tensor, dtype: torch.dtype, parts: Parts, reader: Reader
) -> torch.Tensor:
    """Plan to read a tensor with the placements of ``like``."""
    # All ranks read their parts, so which rank this is does not matter.
    box = box_of(name, like, 0, 1, reader.known)
    # It stays on the host. load_state_dict copies one tensor at a time to the device.
    read = new_for_reading(local_of(like), dtype)
    if box is not None:
        reader.add(name, parts[name], box.offset, read)
    return over(read, like)


def _plan_tree(
    tree: Any,
    like: Callable[[str], torch.Tensor],
    parts: Parts,
    reader: Reader,
    path: Path,
) -> Any:
    """Plan to read an encoded value and its tensors, which get the placements of ``like(name)``."""
    tensors = {}
    for name in tensors_in(tree):
        if name not in parts:
            raise DamagedFileError(f"{path} has no tensor '{name}'.")
        dtype = parts[name][0][1].dtype
        tensors[name] = _plan_tensor(name, like(name), dtype, parts, reader)
    return decoded(tree, tensors.__getitem__, path)


def plan_weights(
    stored: Weights, model: nn.Module, wanted: dict[str, Any], reader: Reader, strict: bool
) -> tuple[dict[str, Any], list[str]]:
    """Plan to read a model's weights.

    Args:
        stored: the weights in the files.
        wanted: the result of :func:`state_dicts.weights_of`.
        strict: whether files and model must have the same names.

    Returns:
        the weights as a state dict, and the names of weights that the files lack. A tied weight
        may be stored under any one of its names.
    """
    parts, aliases, other = stored.parts, stored.aliases, stored.other
    names = {*stored.whole, *other, *aliases}
    first = aliases_of(model)
    present = {first.get(name, name) for name in wanted if name in names}
    missing = [name for name in wanted if first.get(name, name) not in present]
    unknown = sorted(names - {*wanted, *aliases})
    _check_scales(stored, wanted, unknown)
    if strict and (missing or unknown):
        differences = [f"lacks {_some(missing)}"] * bool(missing)
        differences += [f"has {_some(unknown)}, which the model lacks"] * bool(unknown)
        raise ValueError(
            f"{stored.path} {' and '.join(differences)}. Load it into the model that it was saved "
            "from, or pass strict=False."
        )
    planned: Any = OrderedDict()  # a dict has no attributes
    planned._metadata = metadata_of(model, stored.versions)
    for name in (name for name in wanted if name in names):
        is_extra = name in parts and _is_extra_state(name, parts[name], wanted[name])
        if is_extra or name in other:
            tree = {"tensor": name} if is_extra else other[name]
            whole = partial(_whole_like, parts)
            planned[name] = _plan_tree(tree, whole, parts, reader, stored.path)
        else:
            source, value = aliases.get(name, name), wanted[name]
            _check_fits(name, parts[source][0], value)
            planned[name] = _plan_tensor(source, value, value.dtype, parts, reader)
    return planned, missing


def _is_extra_state(name: str, parts: list[tuple[TensorFile, Part]], value: Any) -> bool:
    """Return whether a tensor is that of ``get_extra_state``, whose shape and class may change.

    Those of sharded tensors may not.
    """
    is_sharded = isinstance(value, DTensor) or any(part.shape != part.whole for _, part in parts)
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX and not is_sharded


def _check_fits(name: str, stored: tuple[TensorFile, Part], value: Any) -> None:
    file, part = stored
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"{file.path} has '{name}' as a tensor, and the model as a {type(value).__name__}. "
            "Load it into the model that it was saved from."
        )
    if part.whole != tuple(value.shape):
        raise ValueError(
            f"{file.path} has '{name}' of shape {part.whole}, and the model has shape "
            f"{tuple(value.shape)}. Load it into the model that it was saved from."
        )
    strides = () if isinstance(value, DTensor) else value.stride()
    if any(step == 0 and length > 1 for step, length in zip(strides, value.shape, strict=False)):
        raise ValueError(
            f"the model's '{name}' is an expanded tensor, whose elements share memory, so values "
            "cannot be loaded into it. Replace it with its clone()."
        )
    if part.dtype.is_floating_point != value.dtype.is_floating_point:
        raise ValueError(
            f"{file.path} has '{name}' as {part.dtype}, and the model as {value.dtype}. {QUANTIZED}"
        )


def _check_scales(stored: Weights, wanted: dict[str, Any], unknown: list[str]) -> None:
    """Check that no float8 weight is cast without its scale, which a file has beside it."""
    scales = [name for name in unknown if "scale" in name.lower()]
    for name, value in wanted.items() if scales else ():
        source = stored.aliases.get(name, name)
        if source not in stored.parts or not isinstance(value, torch.Tensor):
            continue
        file, part = stored.parts[source][0]
        if not part.dtype.is_floating_point or not part.dtype.itemsize == 1 < value.dtype.itemsize:
            continue
        of_input = f"{name.rpartition('.')[0]}.input_scale".removeprefix(".")
        own = (s for s in scales if s == of_input or _is_scale_of(s, name))
        scale = next(own, None)
        if scale is not None:
            raise ValueError(
                f"{file.path} has '{name}' as {part.dtype}, and the model as {value.dtype} without "
                f"'{scale}'. {QUANTIZED}"
            )


def _is_scale_of(name: str, weight: str) -> bool:
    return name.startswith(weight) and "scale" in name[len(weight) :].lower()


def _whole_like(parts: Parts, name: str) -> torch.Tensor:
    return torch.empty(shape_of(parts[name]), device="cpu")


def _plan_optimizer(
    checkpoint: Checkpoint, params: dict[str, torch.Tensor], reader: Reader
) -> state_dicts.State:
    if "optimizer" not in checkpoint.files:
        raise ValueError(
            f"{checkpoint.path} was saved without an optimizer. Load it without one, or save with "
            "optimizer=."
        )
    parts = checkpoint.parts("optimizer")
    groups = checkpoint.groups()
    known = {name for group in groups for name in group["names"]}
    unknown = [name for name in params if name not in known]
    if unknown:
        raise ValueError(
            f"{checkpoint.path} has no state of {_some(unknown)}, which the optimizer steps. Load "
            "it into an optimizer of the same parameters."
        )
    states = {
        name: _plan_tree(
            tree, partial(_state_like, parts, params[name]), parts, reader, checkpoint.path
        )
        for name, tree in checkpoint.states().items()
        if name in params
    }
    whole = partial(_whole_like, parts)
    planned = [
        {**group, "options": _plan_tree(group["options"], whole, parts, reader, checkpoint.path)}
        for group in groups
    ]
    return {"state": states, "groups": planned}


def _state_like(parts: Parts, param: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor with the placements that a state of a parameter should have."""
    whole = shape_of(parts[name])
    if whole == tuple(param.shape):
        return param
    if any(part.shape != whole for _, part in parts[name]):
        raise ValueError(
            f"the state '{name}' of shape {whole} was saved in parts, and its parameter has shape "
            f"{tuple(param.shape)}, so how ranks share it is unknown. Use "
            "torch.distributed.checkpoint for this optimizer."
        )
    return torch.empty(whole, device="cpu")


def _some(names: Iterable[str]) -> str:
    """Return some names for a message."""
    names = list(names)
    text = ", ".join(f"'{name}'" for name in names[:3])
    return text if len(names) <= 3 else f"{text} and {len(names) - 3} more"
