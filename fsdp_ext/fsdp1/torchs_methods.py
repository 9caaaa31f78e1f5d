"""An error for PyTorch's static methods of ``FullyShardedDataParallel`` on wrappers of fsdp_ext.

PyTorch's methods, such as ``state_dict_type`` and ``summon_full_params``, ask each module for its
state, and pass over modules without one. They would silently do nothing on fsdp_ext's wrappers. So
a wrapper has an entry in the table of states that PyTorch reads, and the entry raises.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import _composable_state

from fsdp_ext._util.errors import MisuseError
from fsdp_ext.fsdp1.state_dict_forms import calls_of

_TORCHS = "torch.distributed.fsdp.fully_sharded_data_parallel"
_LOOKS_ONLY = "fsdp_modules"  # torch.distributed.checkpoint calls it with models of all kinds
_no_state = _composable_state._State()  # of a wrapper that PyTorch's FSDP does not manage


def _state_for_torch() -> _composable_state._State:
    """Return a state without contents, or raise if a method of PyTorch's FSDP1 asks for it."""
    calls = [frame.f_code.co_name for frame in calls_of(_TORCHS)]
    if not calls or (called := calls[-1]) == _LOOKS_ONLY:
        return _no_state
    raise MisuseError(
        f"PyTorch's FullyShardedDataParallel.{called} was called with a model that fsdp_ext's "
        f"FullyShardedDataParallel wraps. Call fsdp_ext.FullyShardedDataParallel.{called}, or call "
        "fsdp_ext.patch() before the imports."
    )


def refuse_torchs_methods(wrapper: nn.Module) -> None:
    """Let PyTorch's static methods raise for models with ``wrapper`` in them."""
    # PyTorch has weak references in this table, and calls them.
    table: Any = _composable_state._module_state_mapping
    table[wrapper] = _state_for_torch
