"""The streams that copy optimizer states: Note [offloaded states]."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_ext.offloading.portion import Portion


class CopyStreams:
    """The streams that copy states. Each function's docstring names the work that it waits for.

    On the host, where tests run this, copies are done when they are issued.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        # Not on the current device, which may be another one.
        self._in = self._module.Stream(device)
        self._back = self._module.Stream(device)

    def copy_in(self, portion: Portion) -> None:
        """Copy states to the device, once earlier ones have left the staging tensor."""
        self._in.wait_stream(self._back)
        with self._module.stream(self._in):
            portion.device.copy_(portion.host, non_blocking=True)

    def wait_for_copy_in(self) -> None:
        """Let the current stream wait for the copies to the device so far."""
        self._module.current_stream(self._device).wait_stream(self._in)

    def copy_back(self, portion: Portion) -> None:
        """Copy states to the host, once the current stream has stepped them."""
        self._back.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._back):
            portion.host.copy_(portion.device, non_blocking=True)

    def wait_on_host(self) -> None:
        """Block until all states are back, because the user may read them next."""
        if self._device.type != "cpu":
            self._in.synchronize()
            self._back.synchronize()

    def take_over(self) -> None:
        """Let copies wait for earlier work that used the memory of the new staging tensors."""
        self._in.wait_stream(self._module.current_stream(self._device))

    def check_not_captured(self) -> None:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "an optimizer whose states are offloaded cannot be captured in a CUDA graph, since "
                "the host waits for its copies. Call step() outside of the graph."
            )
