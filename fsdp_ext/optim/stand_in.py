"""Objects that PyTorch's code steps in place of an optimizer.

Note [stand-ins]
PyTorch's code for a step reads tensors from ``param_groups`` and ``state``. To step others, it gets
a *stand-in*: an object that has all attributes in common with the optimizer, except for these two.
If they were swapped in the optimizer itself, an interrupt could come before they are put back.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer


def stand_in_of(optimizer: Optimizer, state: dict[Any, Any], groups: list[dict[str, Any]]) -> Any:
    """Return a stand-in with these states and groups: Note [stand-ins]."""
    kind: Any = type(optimizer)
    stand_in = object.__new__(_class_for(kind))
    stand_in.__dict__ = vars(optimizer)
    stand_in.state, stand_in.param_groups = state, groups
    return stand_in


class _StandIn:
    # Slots are not in the dict of attributes, and come before those in it.
    __slots__ = ("param_groups", "state")

    def __init_subclass__(cls) -> None:
        """Hide the class from an ``__init_subclass__`` of the user."""


@functools.cache
def _class_for(kind: type[Optimizer]) -> Any:
    return type(kind.__name__, (_StandIn, kind), {"__slots__": ()})
