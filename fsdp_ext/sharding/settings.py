"""The settings that users ask for, and the resolved ones that a whole model runs with."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_ext.comm.transports import Transport

Auto = Literal["auto"]
AUTO: Auto = "auto"

# As in FSDP2: one all-gather is in flight ahead of the unit that runs.
DEFAULT_PREFETCH = 1


@dataclass(frozen=True)
class AllReduceHook:
    """See :meth:`fsdp_ext.FSDPModule.set_all_reduce_hook`.

    Args:
        function: changes a unit's reduced gradients.
        stream: the stream to run it on; None for that of the reductions.
    """

    function: Callable[[torch.Tensor], object]
    stream: torch.Stream | None = None

    def run(self, gradients: torch.Tensor, handle: int) -> None:
        """Call the function where its work belongs.

        Args:
            gradients: the tensor for the function.
            handle: that of the stream of the reductions; 0 on the host, which runs this there.
        """
        with _on_stream(gradients.device, handle, self.stream):
            self.function(gradients)


@dataclass(frozen=True)
class CommunicationHook:
    """See ``register_comm_hook`` of :class:`fsdp_ext.FullyShardedDataParallel`.

    Args:
        function: reduces a unit's gradients in place of a collective.
        state: its first argument.
    """

    function: Callable[..., object]
    state: object

    def run(self, gradients: torch.Tensor, handle: int, source: torch.Tensor | None = None) -> None:
        """Call the function where its work belongs.

        Args:
            gradients: where the reduced gradients go. Without ``source`` it has those to reduce.
            handle: that of the stream of the reductions; 0 on the host, which runs this there.
            source: the gradients to reduce, if ranks share parameters: the rows of each rank, one
                rank after the other.
        """
        result = gradients.detach()
        with _on_stream(gradients.device, handle, None):
            if source is None:
                self.function(self.state, result)
            else:
                self.function(self.state, source, result)
            if result.data_ptr() != gradients.data_ptr():
                gradients.copy_(result)  # PyTorch's hooks that compress set result.data


@contextlib.contextmanager
def _on_stream(device: torch.device, handle: int, stream: torch.Stream | None) -> Iterator[None]:
    """Run the block on ``stream``, ordered after and before work on the stream of reductions.

    Args:
        device: the device of the gradients.
        handle: the native handle of the stream of reductions; unused on the host.
        stream: where the block runs; None stands for the stream of reductions.
    """
    if device.type == "cpu":
        cpu_stream: Any = stream
        with contextlib.nullcontext() if stream is None else torch.cpu.stream(cpu_stream):
            yield
        return
    cuda: Any = torch.cuda  # its classes are not typed
    reductions = cuda.ExternalStream(handle, device=device)
    chosen = reductions if stream is None else stream
    chosen.wait_stream(reductions)
    with cuda.stream(chosen):
        yield
    reductions.wait_stream(chosen)


@dataclass(frozen=True)
class UnitSettings:
    """The settings that a user has asked for in one unit. None leaves a setting open.

    The arguments of :func:`fsdp_ext.fully_shard` come first. Methods of
    :class:`fsdp_ext.FSDPModule` change the others.
    """

    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009 - frozen
    reshard_after_forward: bool | int | None = None  # a number is the size of a smaller group
    transport: Transport = None
    bucket_bytes: int | Auto | None = None
    max_message_bytes: int | None = None
    prefetch: int | Auto | None = None  # only the root's is used
    keep_low_precision_grads: bool = False  # of FSDP1's mixed precision
    offloads: bool = False  # shards and gradients are on the host, and the rest is not

    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True  # of units with replicas
    reduce_scatter_unused_params: bool = False
    gradient_divide_factor: float | None = None
    all_reduce_hook: AllReduceHook | None = None
    communication_hook: CommunicationHook | None = None
    is_last_backward: bool = True  # only the root's is used
    finalizes_by_hand: bool = False  # only the root's is used

    @property
    def reshard_group(self) -> int:
        """How many ranks share the parameters between forward and backward; 0 stands for all."""
        asked = self.reshard_after_forward
        return 0 if asked is None or isinstance(asked, bool) else asked

    @property
    def has_hook(self) -> bool:
        """Whether the user's code sees gradients when they are reduced."""
        return self.all_reduce_hook is not None or self.communication_hook is not None

    @property
    def waits_for_reductions(self) -> bool:
        """Whether a backward waits for the reductions of gradients at its end."""
        return self.is_last_backward and not self.finalizes_by_hand


@dataclass(frozen=True)
class RootSettings:
    """The settings that the schedule of a model runs with. Nothing is left open.

    Args:
        prefetch: how many buckets' all-gathers are in flight ahead of the unit that runs.
        bucket_bytes: for each unit, the size up to which its bucket may grow.
        max_message_bytes: for each unit, the size of its largest message; 0 for any size.
        reshard_after_forward: for each unit, whether it is resharded after forward.
        reshard_groups: for each unit, over how many ranks; 0 for all.
    """

    prefetch: int
    bucket_bytes: tuple[int, ...]
    max_message_bytes: tuple[int, ...]
    reshard_after_forward: tuple[bool, ...]
    reshard_groups: tuple[int, ...]

    @property
    def stays_unsharded(self) -> tuple[int, ...]:
        """Numbers of the units below the root that stay unsharded after forward."""
        below = enumerate(self.reshard_after_forward[1:], start=1)
        return tuple(number for number, reshards in below if not reshards)


@dataclass(frozen=True)
class Choice:
    """Values for settings that users may leave open.

    Args:
        bucket_bytes: the root's value of this argument of :func:`fsdp_ext.fully_shard`.
        prefetch: the root's value of this argument.
        stays_unsharded: numbers of the units below the root that stay unsharded after forward.
    """

    bucket_bytes: int
    prefetch: int
    stays_unsharded: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the choice as arguments of ``fully_shard``."""
        text = f"bucket_bytes={self.bucket_bytes:,}, prefetch={self.prefetch}"
        count = len(self.stays_unsharded)
        return text + (f", {count} units with reshard_after_forward=False" if count else "")


class Scope(enum.Enum):
    """Which settings a :class:`Choice` decides."""

    AUTO = "those that are 'auto'"
    OPEN = "those that are 'auto' or None"
    ALL = "those that are open, every unit's bucket size and the prefetch, whatever was asked"


@dataclass(frozen=True)
class Decision:
    """A choice and the settings that it decides."""

    choice: Choice
    scope: Scope

    def covers(self, asked: int | Auto | None) -> bool:
        """Return whether the choice decides a setting for which the user asked ``asked``."""
        if self.scope is Scope.ALL:
            return True
        return asked == AUTO or (asked is None and self.scope is Scope.OPEN)
