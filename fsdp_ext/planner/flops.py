"""The floating-point operations of each unit, counted on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


def count_flops(
    model: nn.Module, batch: Any, units: Sequence[Sequence[str]]
) -> list[tuple[int, int]]:
    """Return the floating-point operations of each unit's forward and backward, on one rank.

    The count covers what ``torch.utils.flop_counter`` knows: matrix products, convolutions and
    attention, with a multiplication and an addition as two operations. Elementwise operations,
    norms, softmax, embeddings and the optimizer are left out; memory bandwidth limits those, not
    arithmetic. A unit's count excludes the units inside it. The root has the rest.

    Args:
        model: a model on the meta device. Backward sets its parameters' gradients.
        batch: what one rank calls it with: a tensor, a tuple of arguments, or a mapping of
            keywords. Only shapes and dtypes of tensors matter.
        units: the names of each unit's modules. The root module's name is empty.

    Raises:
        ValueError: if the model does not run on the meta device, or returns nothing that requires a
            gradient.
    """
    from torch.utils.flop_counter import FlopCounterMode  # a slow import that few plans need

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
            f"plan could not count flops: {type(model).__name__} raised {type(error).__name__} on "
            f"the meta device with this batch ({_first_line(error)}). Pass a batch that fits, or "
            "compute= with measured seconds of each unit."
        ) from error
    if not losses:
        raise ValueError(
            f"plan could not count flops: {type(model).__name__} returned no tensor that requires "
            "a gradient. Let some parameter require one."
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
    """Return the counts by module name. The root module's name is empty."""
    counts = {name: sum(of.values()) for name, of in counter.get_flop_counts().items()}
    whole = counts.pop("Global", 0)
    return {name.partition(".")[2]: count for name, count in counts.items()} | {"": whole}


def _own(counts: Mapping[str, int], units: Sequence[Sequence[str]]) -> list[int]:
    """Return the count of each unit without the units inside it."""
    unit_of = {name: number for number, names in enumerate(units) for name in names}
    own = [0] * len(units)
    for name, number in unit_of.items():
        count = counts.get(name, 0)
        own[number] += count
        if name:
            around = [other for other in unit_of if other and name.startswith(f"{other}.")]
            own[unit_of[max(around, key=len, default="")]] -= count
    return own
