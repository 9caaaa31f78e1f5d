"""The settings that users ask for, and the resolved ones that a whole model runs with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_ext.comm.transports import Transport
from fsdp_ext.sharding.params.user_hooks import AllReduceHook, CommunicationHook

# Of gathers and of reductions; a single number is for both.
MessageBytes = int | tuple[int | None, int | None]

# As in FSDP2: one all-gather is in flight ahead of the unit that runs.
DEFAULT_PREFETCH = 1


@dataclass(frozen=True)
class UnitUpdate:
    """How an attached optimizer updates a unit: ``csrc/core/reduce/unit_update.h``."""

    params: frozenset[nn.Parameter]  # the sharded parameters of the unit that it steps
    step: Callable[[], None]  # steps those that have a gradient
    # Measures the gradients of the unit that is passed; None if nothing is measured.
    measure: Callable[[Any], None] | None


@dataclass(frozen=True)
class UnitSettings:
    """The settings that a user has asked for in one unit. None leaves a setting open.

    The arguments of :func:`fsdp_ext.fully_shard` come first. Methods of
    :class:`fsdp_ext.FSDPModule` change the others.
    """

    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009 - frozen
    reshard_after_forward: bool | int | None = None  # a number is the size of a smaller group
    transport: Transport = None
    bucket_bytes: int | None = None
    max_message_bytes: MessageBytes | None = None
    prefetch: int | None = None  # only the root's is used
    keep_gather_inputs: bool | None = None  # only the root's is used
    check_every: int | None = None  # only the root's is used
    keep_low_precision_grads: bool = False  # of FSDP1's mixed precision
    offloads: bool = False  # shards and gradients are on the host, and the rest is not
    shows_accumulated: bool = False  # FSDP1's: csrc/torch/shown_gradients.h
    calls_setattr: bool = True  # False if FSDP1's FSDP_USE_UNSAFE_SETATTR is 1
    is_flat: bool = False  # FSDP1's use_orig_params=False: Note [flat parameters in Python]

    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True  # of units with replicas
    reduce_scatter_unused_params: bool = False
    gradient_divide_factor: float | None = None
    all_reduce_hook: AllReduceHook | None = None
    communication_hook: CommunicationHook | None = None
    custom_all_gather: Callable[..., object] | None = None
    custom_reduce_scatter: Callable[..., object] | None = None
    update: UnitUpdate | None = None  # an attached optimizer's
    is_last_backward: bool = True  # only the root's is used
    finalizes_by_hand: bool = False  # only the root's is used

    @property
    def message_bytes(self) -> tuple[int | None, int | None]:
        """The largest messages of gathers and of reductions that the user has asked for."""
        asked = self.max_message_bytes
        return asked if isinstance(asked, tuple) else (asked, asked)

    @property
    def reshard_group(self) -> int:
        """How many ranks share the parameters between forward and backward; 0 stands for all."""
        asked = self.reshard_after_forward
        return 0 if asked is None or isinstance(asked, bool) else asked

    @property
    def has_hook(self) -> bool:
        """Whether the user's code runs in gathers or reductions, which carry the unit alone."""
        hooks = (
            self.all_reduce_hook,
            self.communication_hook,
            self.custom_all_gather,
            self.custom_reduce_scatter,
        )
        return any(hook is not None for hook in hooks)


@dataclass(frozen=True)
class RootSettings:
    """The settings that the schedule of a model runs with. Nothing is left open."""

    prefetch: int  # how many buckets' all-gathers are in flight ahead of the unit that runs
    bucket_bytes: tuple[int, ...]  # for each unit, the size up to which its bucket may grow
    # For each unit, the largest size of a gather's message and of a reduction's; 0 means no limit.
    message_limits: tuple[tuple[int, int], ...]
    reshard_after_forward: tuple[bool, ...]  # for each unit, whether it is resharded after forward

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


@dataclass(frozen=True)
class Decision:
    """A choice for the settings that are open."""

    choice: Choice
    # Whether it replaces bucket sizes and a prefetch that the user asked for, too.
    overrides: bool = False

    def covers(self, asked: int | None) -> bool:
        """Return whether the choice decides a setting for which the user asked ``asked``."""
        return self.overrides or asked is None
