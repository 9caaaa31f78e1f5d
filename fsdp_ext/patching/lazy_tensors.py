"""Tensors that a library reads from a file when they are used.

Lightning loads a full checkpoint as objects of a class of its own. For FSDP1's parameters it passes
them to ``load_state_dict``, which reads one after the other. The parameters of our wrapper are
DTensors, so Lightning passes the objects to ``set_model_state_dict``, as it does for FSDP2. PyTorch
pickles everything that is not a tensor, and these objects cannot be pickled: they hold an open
file.
"""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

import torch

_MODULE, _NAME = "torch.distributed.checkpoint.state_dict", "set_model_state_dict"


def read_when_set() -> None:
    """Let ``set_model_state_dict`` read such tensors before it loads them."""
    module = importlib.import_module(_MODULE)
    torchs = getattr(module, _NAME)

    @functools.wraps(torchs)
    def read_and_set(model: Any, model_state_dict: Any, **kwargs: Any) -> Any:
        # PyTorch replaces whole tensors in its dict with shards, to free their memory. If another
        # dict had the tensors that are read here, they would stay. A copy keeps _metadata.
        if model_state_dict and any(map(_is_lazy, model_state_dict.values())):
            model_state_dict = copy.copy(model_state_dict)
            for name in [name for name, value in model_state_dict.items() if _is_lazy(value)]:
                model_state_dict[name] = torch.detach(model_state_dict[name])
        return torchs(model, model_state_dict, **kwargs)

    setattr(module, _NAME, read_and_set)


def pass_on() -> None:
    """Undo :func:`read_when_set`."""
    module = importlib.import_module(_MODULE)
    setattr(module, _NAME, getattr(module, _NAME).__wrapped__)


def _is_lazy(value: Any) -> bool:
    return hasattr(value, "__torch_function__") and not isinstance(value, torch.Tensor)
