"""The forms of FSDP1's state dicts.

A state dict is full, sharded or local. A full one, the default, has whole tensors on all ranks or
on one. A sharded one has the DTensors of the parameters, and a local one flat parameters.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from fsdp_ext.fsdp1.whole_tensors import whole_copy
from fsdp_ext.sharding.params.ranks import Ranks

State = dict[str, Any]

DEFAULT = StateDictSettings(
    StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
)
CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}
_shares_memory: ContextVar[bool] = ContextVar("shares_memory", default=False)
_CHECKPOINTING = "torch.distributed.checkpoint.state_dict"
# They load a model with DTensors as one of FSDP2, whose modules are named as in its state dicts.
_TAKE_STATE_DICT_NAMES = (
    _CHECKPOINTING,
    "lightning.fabric.strategies.model_parallel",
    "lightning_fabric.strategies.model_parallel",
)


@dataclass(frozen=True)
class Form:
    """How the tensors of a state dict are returned: whole or sharded, on which device and ranks.

    They are copies, so that training goes on while they are written. Two forms share memory with
    the model: the local one, as in FSDP1, and the sharded one inside :func:`shared_memory`.
    """

    is_full: bool
    offload_to_cpu: bool
    rank0_only: bool
    is_local: bool = False

    @staticmethod
    def of(settings: StateDictSettings, *, optimizer: bool) -> Form:
        """Return the form that was set, for models or for optimizers."""
        config: Any = settings.optim_state_dict_config if optimizer else settings.state_dict_config
        is_full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
        is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT and not optimizer
        return Form(is_full, config.offload_to_cpu, is_full and config.rank0_only, is_local)

    @staticmethod
    def of_model(settings: StateDictSettings) -> Form:
        """Return the form of a ``state_dict`` that is being made.

        ``get_model_state_dict`` and similar functions need the DTensors of the parameters, which
        they gather or move as their own options say. They set FSDP1's types on PyTorch's class
        only, so only the call stack distinguishes them from other callers.
        """
        return SHARDED if any(calls_of(_CHECKPOINTING)) else Form.of(settings, optimizer=False)

    def convert(self, value: Any) -> Any:
        """Return one value of a state dict. All ranks call this for the same values in order."""
        if not isinstance(value, torch.Tensor):
            return value
        moves = self.offload_to_cpu and value.device.type != "cpu"
        if self.is_full and isinstance(value, DTensor):
            value = whole_copy(value)
        elif not moves and not self.is_local and not _shares_memory.get():
            value = value.clone()
        return value.cpu() if moves else value

    def convert_all(self, state_dict: State, names: Iterable[str], ranks: Ranks) -> None:
        """Convert the entries ``names`` of a model's state dict, one after the other.

        Ranks that do not get them drop each one at once, so they need memory for one only.
        """
        keeps = not self.rank0_only or is_rank_0(ranks)
        for name in names:
            value = self.convert(state_dict[name])
            if keeps:
                state_dict[name] = value
            else:
                del state_dict[name]


@contextlib.contextmanager
def shared_memory() -> Iterator[None]:
    """Let sharded state dicts of the block share memory with the model and its optimizers."""
    token = _shares_memory.set(True)
    try:
        yield
    finally:
        _shares_memory.reset(token)


def is_rank_0(ranks: Ranks) -> bool:
    """Return whether this rank is the first in FSDP1's ``process_group``.

    With hybrid sharding, these are the ranks of one shard group, so each group has a first rank.
    """
    return (ranks.rank if ranks.size > 1 else ranks.rank_in_mesh) == 0


SHARDED = Form(is_full=False, offload_to_cpu=False, rank0_only=False)


def calls_of(*modules: str) -> Iterator[FrameType]:
    """Yield the functions of Python modules that are being called, the innermost first."""
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_globals.get("__name__") in modules:
            yield frame
        frame = frame.f_back


def takes_state_dict_names() -> bool:
    """Return whether a function is being called that expects modules named as in state dicts."""
    return any(calls_of(*_TAKE_STATE_DICT_NAMES))


def is_called_by_checkpointing() -> bool:
    """Return whether torch.distributed.checkpoint.state_dict has called the caller directly."""
    return sys._getframe(2).f_globals.get("__name__") == _CHECKPOINTING


def refuse_optimizers_of_flat_parameters() -> None:
    """Raise NotImplementedError in a function of torch.distributed.checkpoint for optimizers.

    It takes the names and shapes of optimizer states from the optimizer's parameters, so it would
    save and load flat parameters as if they were equal on all ranks.
    """
    if any(frame.f_locals.get("optims") for frame in calls_of(_CHECKPOINTING)):
        raise NotImplementedError(
            "torch.distributed.checkpoint.state_dict got an optimizer of flat parameters, whose "
            "state it cannot name. Call FullyShardedDataParallel.optim_state_dict and "
            "optim_state_dict_to_load instead, or wrap with use_orig_params=True."
        )
