"""Objects that PyTorch's code steps in place of an optimizer.

Note [stand-ins]
PyTorch's code for a step reads tensors from ``param_groups`` and ``state``. To step others, it gets
a *stand-in*: an object that shares all attributes of the optimizer but these two. If they were
swapped in the optimizer itself, an interrupt could come before they are put back.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

_CLASS = "_fsdp_ext_stand_in"


def stand_in_of(optimizer: Optimizer, state: dict[Any, Any], groups: list[dict[str, Any]]) -> Any:
    """Return a stand-in with these states and groups: Note [stand-ins]."""
    kind: Any = type(optimizer)
    stand_in = object.__new__(_class_for(kind))
    stand_in.__dict__ = vars(optimizer)
    stand_in.state, stand_in.param_groups = state, groups
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
        made = type(kind.__name__, (_StandIn, kind), {"__slots__": ("param_groups", "state")})
        setattr(kind, _CLASS, made)
    return made
