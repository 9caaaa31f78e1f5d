"""Runs a worker that was written for the host on another device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

_TESTS = str(Path(__file__).resolve().parent.parent)
_LAYERS = str(Path(nn.__file__).parent)


class MakesTensorsOn(TorchFunctionMode):
    """Tests and layers of torch make their tensors on a device, if they name none.

    Values are drawn on the host, so they equal those of a generator of the host. Other callers,
    such as fsdp_ext, are left alone. `torch.set_default_device` would change other callers, too.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._constructors = _device_constructors()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        if function not in self._constructors or kwargs.get("device") is not None:
            return made
        caller = sys._getframe(1).f_code.co_filename
        if not isinstance(made, Tensor) or not caller.startswith((_TESTS, _LAYERS)):
            return made
        return made.detach().to(self._device).requires_grad_(made.requires_grad)
