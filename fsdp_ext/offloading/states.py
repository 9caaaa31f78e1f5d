"""Optimizer states that lie in the host's memory, while the optimizer steps on the GPU.

Note [offloaded states]
A *portion* is some units in a row whose parameters are stepped together. All its states lie in one
pinned tensor on the host, so a copy moves them all. The GPU has two staging tensors of the largest
portion's size, which portions take in turns:

    stream in       | in 0 | in 1 |        in 2 |        in 3 |
    compute stream         | step 0 | step 1 |   | step 2 |   | step 3 |
    stream back                     | back 0 | back 1 |  | back 2 |  | back 3 |

Before a portion is stepped, the optimizer's states are replaced with DTensors over the staging
tensor, and afterwards with the ones on the host again. All these DTensors exist beforehand. The
optimizer's own step runs for each portion, with the parameters of this portion alone in its groups.
Scalars, such as Adam's count of steps, stay where the optimizer has made them.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_ext import _C
from fsdp_ext._util.errors import UnsupportedError
from fsdp_ext.optim.state_entries import StateEntries, local_of, over
from fsdp_ext.sharding.root.unit import Unit, owners_of

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")  # not on a default device
_ALIGNMENT = 64  # bytes, of each state in the memory of a portion


@dataclass
class _Portion:
    """Parameters that are stepped together, and where their states are."""

    by_group: list[list[nn.Parameter]]  # for each group of the optimizer
    is_sharded: bool  # whether their states are offloaded
    on_host: list[torch.Tensor] = field(default_factory=list)
    on_device: list[torch.Tensor] = field(default_factory=list)
    host: torch.Tensor = _NOTHING  # the memory of them all
    device: torch.Tensor = _NOTHING  # a part of a staging tensor

    def __post_init__(self) -> None:
        # The optimizer has no states yet. The entries record states once they are offloaded.
        self.entries = StateEntries({}, self.params(), _is_offloaded)

    def params(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(self.by_group)

    @property
    def nbytes(self) -> int:
        return self.host.numel()

    def settle(self, states: dict[Any, Any]) -> None:
        """Move the states that the optimizer has now into one tensor on the host."""
        self.entries = StateEntries(states, self.params(), _is_offloaded)
        old = self.entries.values()
        for name, value in zip(self.entries.names, old, strict=True):
            if type(local_of(value)) is not torch.Tensor:
                raise UnsupportedError(
                    f"offload_optimizer got an optimizer whose state '{name}' is a "
                    f"{type(local_of(value)).__name__}. Use one whose states are plain tensors."
                )
        sizes = [-(-local_of(value).nbytes // _ALIGNMENT) * _ALIGNMENT for value in old]
        pins = torch.cuda.is_available()
        self.host = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pins)
        self.on_host = self._views(self.host, old)
        self.leave()
        for new, value in zip(self.on_host, old, strict=True):
            local_of(new).copy_(local_of(value))
        self.entries.put(self.on_host)

    def leave(self) -> None:
        """Forget the tensors that place() makes."""
        self.on_device = []
        self.device = _NOTHING

    def place(self, staging: torch.Tensor) -> None:
        """Make the tensors that the optimizer has while it steps this portion."""
        self.device = staging[: self.nbytes]
        self.on_device = self._views(self.device, self.on_host)

    def _views(self, memory: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
        views, first = [], 0
        for value in like:
            local = local_of(value)
            part = _C.FlatTensor.part_of(memory, first, local.shape, local.dtype)
            views.append(over(part, value))
            first += -(-local.nbytes // _ALIGNMENT) * _ALIGNMENT
        return views


def _is_offloaded(value: object) -> bool:
    """Return whether a state is kept on the host. Scalars and empty shards are not worth a copy."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and local_of(value).numel() > 0


class OffloadedStates:
    """Steps an optimizer portion by portion: Note [offloaded states]."""

    def __init__(self, optimizer: Optimizer, units: list[Unit], device: torch.device) -> None:
        self._units = units
        self._device = device
        self._streams = _CopyStreams(device)
        self._portions: list[_Portion] = []
        self._params: list[list[nn.Parameter]] = []  # as the portions have them
        self._staging: list[torch.Tensor] = []
        step: Any = type(optimizer).step
        # Hooks run once a step, and not once a portion.
        self._step_of_class: Callable[..., Any] = step.__wrapped__
        scheduled = vars(optimizer).get("step")

        def step_in_portions(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._step(optimizer, *args, **kwargs)

        stepped: Any = Optimizer.profile_hook_step(step_in_portions)
        stepped.hooked = True
        if scheduled is not None:  # schedulers that exist look for this mark
            stepped._wrapped_by_lr_sched = True
        optimizer.step = types.MethodType(stepped, optimizer)  # type: ignore[method-assign]
        optimizer.register_load_state_dict_pre_hook(self._hold_loaded)
        optimizer.register_load_state_dict_post_hook(self._take_loaded, prepend=True)
        self._plan(optimizer)
        for portion in self._sharded():
            portion.settle(optimizer.state)

    # - A step

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it
        self._streams.check_not_captured()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._is_plan_of(params_by_group(optimizer)):
            self._plan(optimizer)
        for portion in self._sharded():
            if not portion.entries.are_in(optimizer.state, portion.on_host):
                portion.settle(optimizer.state)  # someone else has changed them
        self._place()
        lists = params_by_group(optimizer)
        try:
            self._step_portions(optimizer)
        finally:
            for group, params in zip(optimizer.param_groups, lists, strict=True):
                group["params"] = params
            self._streams.wait_on_host()
        return loss

    def _step_portions(self, optimizer: Optimizer) -> None:
        waiting = deque(portion for portion in self._portions if portion.nbytes)
        if waiting:
            self._streams.copy_in(waiting[0])
        for portion in self._portions:
            moves = portion.nbytes > 0
            if moves:
                self._streams.wait_for_copy_in()
                waiting.popleft()
                if waiting:
                    self._streams.copy_in(waiting[0])
                portion.entries.put(portion.on_device)
            for group, params in zip(optimizer.param_groups, portion.by_group, strict=True):
                group["params"] = params
            is_done = False
            try:
                self._step_of_class(optimizer)
                is_done = True
            finally:
                if is_done and portion.entries.are_in(optimizer.state, portion.on_device):
                    if moves:
                        self._streams.copy_back(portion)
                        portion.entries.put(portion.on_host)
                elif portion.is_sharded:
                    portion.settle(optimizer.state)  # the optimizer has made states, or failed

    # - Portions

    def _sharded(self) -> Iterator[_Portion]:
        return (portion for portion in self._portions if portion.is_sharded)

    def _is_plan_of(self, params: list[list[nn.Parameter]]) -> bool:
        return len(params) == len(self._params) and all(map(_C.same_objects, params, self._params))

    def _plan(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's parameters into portions, the rest of them last."""
        self._params = [list(params) for params in params_by_group(optimizer)]
        owners = owners_of(self._units)
        of_optimizer = set(chain.from_iterable(self._params))
        sizes = dict.fromkeys(self._units, 0)
        for param, unit in owners.items():
            # The sizes of all ranks' shards, so that ranks whose shards differ have the same
            # portions.
            sizes[unit] += param.numel() * param.element_size() if param in of_optimizer else 0
        numbers: dict[Unit, int] = {}
        most, in_portion, number = max(sizes.values()), 0, 0
        for unit, nbytes in sizes.items():
            if in_portion + nbytes > most:
                number, in_portion = number + 1, 0
            in_portion += nbytes
            numbers[unit] = number
        number_of = {param: numbers[unit] for param, unit in owners.items()}
        self._portions = []
        for index in range(number + 2):
            by_group = [
                [param for param in params if number_of.get(param, number + 1) == index]
                for params in self._params
            ]
            self._portions.append(_Portion(by_group, is_sharded=index <= number))

    def _place(self) -> None:
        """Make the staging tensors as large as needed, and portions over them."""
        moving = [portion for portion in self._portions if portion.nbytes]
        if all(portion.device.numel() for portion in moving):
            return
        most = max(portion.nbytes for portion in moving)
        turns = min(2, len(moving))
        if len(self._staging) < turns or self._staging[0].numel() < most:
            for portion in moving:
                portion.leave()
            self._staging = []  # now that nothing views it, its memory is free
            self._staging = [
                torch.empty(most, dtype=torch.uint8, device=self._device) for _ in range(turns)
            ]
            self._streams.take_over()
        for turn, portion in enumerate(moving):
            portion.place(self._staging[turn % turns])

    # - State dicts

    def _hold_loaded(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Keep load_state_dict from moving all states to the GPU at once."""
        states = {
            key: {
                name: _Held(value) if _is_offloaded(value) else value
                for name, value in values.items()
            }
            if isinstance(values, dict)
            else values
            for key, values in state_dict["state"].items()
        }
        return {**state_dict, "state": states}

    def _take_loaded(self, optimizer: Optimizer) -> None:
        owners = owners_of(self._units)
        for param, values in optimizer.state.items():
            for name, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, _Held):
                    loaded = value.value
                    if isinstance(param, torch.Tensor) and param.is_floating_point():
                        loaded = loaded.to(param.dtype)  # as load_state_dict does
                    if isinstance(param, torch.Tensor) and param not in owners:
                        loaded = loaded.to(param.device)
                    values[name] = loaded
        for portion in self._sharded():
            portion.settle(optimizer.state)


class _CopyStreams:
    """The streams that copy states. Each function's docstring names the work that it waits for.

    On the host, where tests run this, copies are done when they are issued.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        # Not on the current device, which may be another one.
        self._in = self._module.Stream(device)
        self._back = self._module.Stream(device)

    def copy_in(self, portion: _Portion) -> None:
        """Copy states to the device, once earlier ones have left the staging tensor."""
        self._in.wait_stream(self._back)
        with self._module.stream(self._in):
            portion.device.copy_(portion.host, non_blocking=True)

    def wait_for_copy_in(self) -> None:
        """Let the current stream wait for the copies to the device so far."""
        self._module.current_stream(self._device).wait_stream(self._in)

    def copy_back(self, portion: _Portion) -> None:
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


def params_by_group(optimizer: Optimizer) -> list[list[nn.Parameter]]:
    return [group["params"] for group in optimizer.param_groups]


@dataclass
class _Held:
    """A state that load_state_dict shall not move to the GPU."""

    value: torch.Tensor
