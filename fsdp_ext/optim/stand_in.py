"""Objects that PyTorch's code steps in place of an optimizer.

Note [stand-ins]
PyTorch's code for a step reads tensors from ``param_groups`` and ``state``. To step others, it gets
a *stand-in*: an object that shares all other attributes of the optimizer. If they were
swapped in the optimizer itself, an interrupt could come before they are put back. For the same
reason a stand-in has its own ``found_inf``, with which PyTorch's fused code skips a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

_CLASS = "_fsdp_ext_stand_in"


def stand_in_of(
    optimizer: Optimizer,
    state: dict[Any, Any],
    groups: list[dict[str, Any]],
    found_inf: torch.Tensor | None,
) -> Any:
    """Return a stand-in with these states and groups: Note [stand-ins].

    ``found_inf`` is 1.0 to skip the step, and None to leave that to a GradScaler.
    """
    kind: Any = type(optimizer)
    stand_in = object.__new__(_class_for(kind))
    stand_in.__dict__ = vars(optimizer)
    stand_in.state, stand_in.param_groups = state, groups
    stand_in.found_inf = vars(optimizer).get("found_inf") if found_inf is None else found_inf
    return stand_in


class _StandIn:
    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Hide the class from an ``__init_subclass__`` of the user."""


def _class_for(kind: Any) -> Any:
    """Return the class of stand-ins, which ``kind`` keeps, so that both can be freed."""
    made = vars(kind).get(_CLASS)
    if made is None:
        # Slots are not in the dict of attributes, and come before those in it.
        slots = ("param_groups", "state", "found_inf")
        made = type(kind.__name__, (_StandIn, kind), {"__slots__": slots})
        setattr(kind, _CLASS, made)
    return made
