"""How accelerate, and the trainers that use it, run on the ranks of these tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState
from ecosystem.systems import set_variables_of_torchrun
from support.parity import device


@contextlib.contextmanager
def accelerate_on_these_ranks() -> Iterator[None]:
    """Let accelerate find this rank's place, and forget it at the end."""
    set_variables_of_torchrun()
    try:
        yield
    finally:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()


def present_cpus_as_gpus() -> None:
    """Change accelerate's state, once it is made. accelerate shards on accelerators only."""
    if device().type == "cuda":
        return
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    PartialState._shared_state["device"] = torch.device("cpu")
