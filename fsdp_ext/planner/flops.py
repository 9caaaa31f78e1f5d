"""The floating-point operations of each unit, counted on the meta device."""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_ext._util.losses import output_of
from fsdp_ext._util.names import without_fsdp1

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


def count_flops(
    model: nn.Module, batch: Any, units: Sequence[Sequence[str]]
) -> list[tuple[int, int]]:
    """Return the floating-point operations of each unit's forward and backward, on one rank.

    The count covers the operations in ``torch.utils.flop_counter``: matrix products, convolutions
    and attention, with a multiplication and an addition as two operations. Elementwise operations,
    norms, softmax, embeddings and the optimizer are left out; memory bandwidth limits those, not
    arithmetic. A unit's count excludes the units inside it. The root has the rest.

    Args:
        model: a model on the meta device. Backward sets its parameters' gradients.
        batch: what one rank calls it with: a tensor, a tuple of arguments, or a mapping of
            keywords. Only shapes and dtypes of tensors matter.
        units: the names of each unit's modules. The root module's name is empty.
    """
    from torch.utils.flop_counter import FlopCounterMode  # a slow import that few plans need

    counter = FlopCounterMode(display=False)
    flops = _FlopsOfUnits(model, counter, units)
    shapes = tree_map_only(
        Tensor,
        lambda x: torch.empty_like(x, device="meta", requires_grad=x.requires_grad),
        batch,
    )
    try:
        with torch.device("meta"), counter, flops.hooks(), flops:
            leaves = tree_leaves(output_of(model, shapes))
            trained = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
            losses = [leaf.float().sum() for leaf in trained]
            flops.end_forward()
            if losses:
                torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        why = (str(error).strip() or "no message").splitlines()[0]
        raise ValueError(
            f"plan could not count flops: {type(model).__name__} raised {type(error).__name__} on "
            f"the meta device with this batch ({why}). Pass a batch that fits, or "
            "compute= with measured seconds of each unit."
        ) from error
    if not losses:
        raise ValueError(
            f"plan could not count flops: {type(model).__name__} returned no tensor that requires "
            "a gradient. Let some parameter require one."
        )
    return list(zip(flops.forward, flops.backward, strict=True))


class _FlopsOfUnits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds the flops of each operation to the unit that it belongs to.

    Note [whose flops]
    In forward an operation belongs to the innermost unit that runs. In backward it belongs to the
    unit that ran when the operation's node of autograd was made. Nodes are numbered as they are
    made, so the first number after each begin and end of a unit assigns them to units. Gradients of
    a module's inputs and outputs would not do: those of an encoder's output, which all layers of a
    decoder read, arrive last. A node that a reentrant checkpoint makes in backward belongs to the
    unit whose flops came before it, since the checkpoint has just run forward again.

    Args:
        model: the model that runs.
        counter: an active counter of all flops.
        units: the names of each unit's modules. The root module's name is empty.
    """

    supports_higher_order_operators = True

    def __init__(
        self, model: nn.Module, counter: FlopCounterMode, units: Sequence[Sequence[str]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = [0] * len(units)
        self.backward = [0] * len(units)
        self._counts = self.forward
        self._counter = counter
        modules = {
            without_fsdp1(name): module
            for name, module in model.named_modules(remove_duplicate=False)
        }
        numbers = {name: number for number, names in enumerate(units) for name in names}
        self._modules = [(modules[name], number) for name, number in numbers.items() if name]
        self._last_unit = numbers[""]
        self._running = [self._last_unit]
        self._first_nodes: list[int] = []
        self._units_of_nodes: list[int | None] = []

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Follow which units run."""
        with contextlib.ExitStack() as stack:
            for module, number in self._modules:
                begin, end = functools.partial(self._begin, number), self._end
                stack.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
                # Checkpoints end a forward that they run again by an exception.
                stack.callback(module.register_forward_hook(end, always_call=True).remove)
            self._note()
            yield

    def end_forward(self) -> None:
        """Count the following operations as backward."""
        self._running.clear()
        self._note()
        self._counts = self.backward

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = self._counter.get_total_flops()
        result = func(*args, **(kwargs or {}))
        flops = self._counter.get_total_flops() - before
        if flops:
            self._last_unit = self._unit()
            self._counts[self._last_unit] += flops
        return result

    def _unit(self) -> int:
        if self._running:
            return self._running[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return self._last_unit
        index = bisect_right(self._first_nodes, node._sequence_nr()) - 1
        unit = self._units_of_nodes[index] if index >= 0 else None
        return self._last_unit if unit is None else unit

    def _begin(self, number: int, *_: Any) -> None:
        self._running.append(number)
        self._note()

    def _end(self, *_: Any) -> None:
        self._running.pop()
        self._note()

    def _note(self) -> None:
        self._first_nodes.append(torch._C._autograd._get_sequence_nr())
        self._units_of_nodes.append(self._running[-1] if self._running else None)
