"""What the last check of each optimizer has found."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import NamedTuple

import torch
import torch.distributed as dist


class Checked(NamedTuple):
    """What was found of an optimizer. add_param_group() adds parameters, and fully_shard may
    replace those that it has.
    """

    params: int  # how many
    steps_shards: bool
    # The process groups of its parameters' roots. They may be destroyed before the optimizer is.
    groups: Collection[weakref.ref[dist.ProcessGroup]]  # no WeakSet, which Dynamo cannot trace


# Those that need no check before their next step.
checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, Checked] = weakref.WeakKeyDictionary()


def check_again() -> None:
    """Have all optimizers checked again, since their parameters or the roots of these changed."""
    checked.clear()


def steps_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer steps shards, as far as its last check tells."""
    found = checked.get(optimizer)
    return found is None or found.steps_shards
