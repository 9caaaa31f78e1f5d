"""Code of the user that runs in gathers and reductions: hooks and custom collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class AllReduceHook:
    """See :meth:`fsdp_ext.FSDPModule.set_all_reduce_hook`."""

    function: Callable[[torch.Tensor], object]
    stream: torch.Stream | None = None  # None for that of the reductions

    def run(self, gradients: torch.Tensor, handle: int) -> None:
        """Call the function on its stream. ``handle`` is that of the reductions' stream."""
        with on_stream(gradients.device, handle, self.stream):
            self.function(gradients)


@dataclass(frozen=True)
class CommunicationHook:
    """See ``register_comm_hook`` of :class:`fsdp_ext.FullyShardedDataParallel`."""

    function: Callable[..., object]
    state: object

    def run(self, gradients: torch.Tensor, handle: int, source: torch.Tensor | None = None) -> None:
        """Call the function on the reductions' stream.

        If ranks share parameters, ``source`` has the gradients to reduce, the rows of each rank one
        after another, and ``gradients`` gets the reduced ones.
        """
        result = gradients.detach()
        with on_stream(gradients.device, handle, None):
            if source is None:
                self.function(self.state, result)
            else:
                self.function(self.state, source, result)
            if result.data_ptr() != gradients.data_ptr():
                gradients.copy_(result)  # PyTorch's hooks that compress set result.data


class CustomCollective:
    """An object of the user that gathers or reduces: Note [custom collectives].

    The note is in ``csrc/core/reduce/user_collective.h``. The object gets tensors that it has
    allocated itself, so each message is copied once more on each side. They are allocated once for
    each size, and units that have the same object share them. Nothing else may use the group at the
    same time.
    """

    def __init__(self, comm: Any, group: dist.ProcessGroup) -> None:
        self.comm = comm
        self.group = group
        self._buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def gather(self, output: torch.Tensor, handle: int, source: torch.Tensor) -> None:
        """Let the object gather ``source`` on the gathers' stream. The schedule calls this."""
        with on_stream(output.device, handle, None):
            gathered = self._buffer_like(output)
            rows = gathered.narrow(0, self.group.rank() * source.numel(), source.numel())
            rows.copy_(source)
            _finish(self.comm(output_tensor=gathered, input_tensor=rows, group=self.group))
            output.copy_(gathered)

    def reduce(self, output: torch.Tensor, handle: int, source: torch.Tensor) -> None:
        """Let the object add up gradients on the reductions' stream. The schedule calls this.

        ``source`` has the rows of each rank one after another; ``output`` gets this rank's.
        """
        with on_stream(output.device, handle, None):
            packed, reduced = self._buffer_like(source), self._buffer_like(output)
            packed.copy_(source)
            work = self.comm(
                output_tensor=reduced, input_tensor=packed, group=self.group, op=dist.ReduceOp.SUM
            )
            _finish(work)
            output.copy_(reduced)

    def _buffer_like(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.numel(), tensor.dtype)
        if key not in self._buffers:
            self._buffers[key] = self.comm.allocate(
                (tensor.numel(),), dtype=tensor.dtype, device=tensor.device
            )
        return self._buffers[key]


def check_comm(caller: str, comm: object) -> None:
    """Raise TypeError if ``comm``, an argument of the method ``caller``, cannot communicate."""
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(
            f"{caller} got {comm!r}. Pass an object that can be called and has allocate()."
        )


def _finish(work: Any) -> None:
    """Wait for a collective that has returned its work."""
    if work is not None:
        work.wait()


@contextlib.contextmanager
def on_stream(device: torch.device, handle: int, stream: torch.Stream | None) -> Iterator[None]:
    """Run the block on ``stream``, ordered after and before work on the lane's stream.

    ``handle`` is the native one of the lane's stream; 0 on the host, whose stream is this thread.
    None for ``stream`` stands for the lane's stream.
    """
    if device.type == "cpu":
        cpu_stream: Any = stream
        with contextlib.nullcontext() if stream is None else torch.cpu.stream(cpu_stream):
            yield
        return
    cuda: Any = torch.cuda  # its classes are not typed
    of_lane = cuda.ExternalStream(handle, device=device)
    chosen = of_lane if stream is None else stream
    chosen.wait_stream(of_lane)
    try:
        with cuda.stream(chosen):
            yield
    finally:
        of_lane.wait_stream(chosen)  # also for work before an exception
