"""What a model computes, by unit, without computing it: on a copy on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_ext.sharding.fsdp_module import original_class
from fsdp_ext.sharding.module_state import is_state

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

# Hooks belong to the model that was copied: those of fully_shard above all.
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)


def meta_copy(model: nn.Module) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    """Return a copy of ``model`` whose tensors have shapes and no memory, and whose is which.

    Parameters that are shared are shared in the copy, too. It has no hooks, and what fully_shard
    has changed is there as it was before. Attributes that cannot be copied are those of the
    original.
    """
    memo: dict[int, Any] = {}
    shells: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        cls: Any = original_class(type(module))
        shells[module] = memo[id(module)] = cls.__new__(cls)
        attributes = {**module.__dict__, **module._parameters, **module._buffers}
        for value in attributes.values():
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = _without_memory(value)
    for module, shell in shells.items():
        shell.__dict__.update(
            (name, type(value)() if name in _HOOKS else _copied(value, memo))
            for name, value in module.__dict__.items()
            if not is_state(name)
        )
    return shells[model], shells


def _without_memory(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # locks, handles, process groups
        return value


def count_flops(
    model: nn.Module, batch: Any, units: Sequence[Sequence[str]]
) -> list[tuple[int, int]]:
    """Return the floating-point operations of each unit's forward and backward, on one rank.

    Those that ``torch.utils.flop_counter`` knows are counted, a multiplication and an addition as
    two: matrix products, convolutions and attention. Elementwise operations, norms, softmax,
    embeddings and the optimizer are not; they take memory bandwidth rather than arithmetic. What a
    unit runs is its own without that of the units inside it; the root has the rest.

    Args:
        model: on the meta device; its parameters' gradients are set, as backward does.
        batch: what it is called with, for one rank: a tensor, a tuple of arguments, or a mapping of
            keywords. Of tensors only shapes and dtypes matter.
        units: the names of each one's modules. The root's, which is empty, is among them.

    Raises:
        ValueError: if the model does not run on the meta device, or returns nothing that requires a
            gradient.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports much, and few need it

    counter = FlopCounterMode(display=False)
    arguments, keywords = _call_of(tree_map_only(Tensor, _shape_alone, batch))
    try:
        with torch.device("meta"), counter:
            output = model(*arguments, **keywords)
            forward = _by_module(counter)
            losses = [leaf.float().sum() for leaf in _trainable(output)]
            if losses:
                torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
            both = _by_module(counter)
    except Exception as error:
        raise ValueError(
            f"counting flops expects a model that runs on the meta device with this batch but "
            f"{type(model).__name__} raised {type(error).__name__} ({_first_line(error)}); pass "
            "compute= with measured seconds of each unit, or a batch that fits"
        ) from error
    if not losses:
        raise ValueError(
            f"counting flops expects {type(model).__name__} to return a tensor that requires a "
            "gradient but it returned none; let some parameter require one"
        )
    own_forward, own_both = (_own(counts, units) for counts in (forward, both))
    return [(f, b - f) for f, b in zip(own_forward, own_both, strict=True)]


def _call_of(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(batch, Mapping):
        return (), batch
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def _shape_alone(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


def _trainable(output: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else "no message"


def _by_module(counter: FlopCounterMode) -> dict[str, int]:
    """Return the counts under each module's name; the root's is empty."""
    counts = {name: sum(of.values()) for name, of in counter.get_flop_counts().items()}
    whole = counts.pop("Global", 0)
    return {name.partition(".")[2]: count for name, count in counts.items()} | {"": whole}


def _own(counts: Mapping[str, int], units: Sequence[Sequence[str]]) -> list[int]:
    """Return what each unit counts without the units inside it."""
    unit_of = {name: number for number, names in enumerate(units) for name in names}
    own = [0] * len(units)
    for name, number in unit_of.items():
        count = counts.get(name, 0)
        own[number] += count
        if name:
            around = [other for other in unit_of if other and name.startswith(f"{other}.")]
            own[unit_of[max(around, key=len, default="")]] -= count
    return own
