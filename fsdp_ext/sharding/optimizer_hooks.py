"""Hooks on every optimizer's step: checks before it, and afterwards a sign to gather again."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_ext import _C
from fsdp_ext.comm.lanes import check_lanes
from fsdp_ext.sharding.ownership import replaced_as, unsharded_name

# How many parameters an optimizer had when it was checked. add_param_group() adds more.
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


@functools.cache
def install() -> None:
    """Register the hooks for all optimizers of the process. Later calls do nothing."""
    register_optimizer_step_pre_hook(_check_optimizer)
    register_optimizer_step_post_hook(_note_step)


def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    check_lanes()
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) == count:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            owner = replaced_as(param)
            if owner is not None:
                raise RuntimeError(
                    f"the optimizer has '{owner[0]}' of {owner[1]} as it was before fully_shard, "
                    "which no longer takes part in training. Make the optimizer after fully_shard."
                )
            unsharded = unsharded_name(param)
            if unsharded is not None:
                raise RuntimeError(
                    f"the optimizer has the unsharded '{unsharded}', which is a copy for one "
                    "forward and backward, so it would train nothing. Make the optimizer before "
                    "the first forward, or after reshard()."
                )
    _checked[optimizer] = count


def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _C.note_optimizer_step()
