"""The memory that a planned model's unsharded gradients take.

The rules are those of Note [gradient lifetime] in ``csrc/core/reduce/reducer.h`` and Note [order of
reductions] in ``csrc/core/schedule/reduction_order.h``.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from torch import nn

from fsdp_ext import _C
from fsdp_ext.planner.units import Moment, PlannedParam, PlannedRoot, PlannedUnit


def gradients_in_flight(root: PlannedRoot, found: _C.MemoryPlan) -> int:
    """Return the most bytes of unsharded gradients that are alive at once.

    Autograd makes the gradients of a bucket one after the other. They are alive until they are
    packed and one of these holds: the next bucket is complete, or backward enters a bucket for
    which there would not be enough room otherwise.

    Args:
        root: the planned units.
        found: their buckets.
    """
    backward = list(root.moments())[::-1]
    following = dict(pairwise(moment for moment in backward if moment.kind != "use"))
    gradients = _Gradients(root, found, backward)
    for moment in backward:
        if moment.param is not None:
            gradients.differentiate(moment.unit, moment.param)
        elif moment.kind == "leave":
            gradients.enter(moment.unit)
        else:
            gradients.leave(moment.unit, following.get(moment))
    return gradients.most


class _Gradients:
    """The gradients that are alive at a moment of backward, and the most bytes so far.

    Args:
        root: the planned units.
        found: their buckets.
        backward: all moments of backward.
    """

    def __init__(self, root: PlannedRoot, found: _C.MemoryPlan, backward: list[Moment]) -> None:
        self.most = 0
        self._limit = found["most_gradient_bytes"]
        self._bytes = [bucket["gradient_bytes"] for bucket in found["buckets"]]
        self._units = [[root.units[n] for n in bucket["units"]] for bucket in found["buckets"]]
        self._bucket_of = {unit: i for i, units in enumerate(self._units) for unit in units}
        # The buckets that backward has not packed yet. It packs the last one next.
        in_forward = (self._bucket_of[moment.unit] for moment in reversed(backward))
        self._order = list(dict.fromkeys(in_forward))
        trained = [moment.param for moment in backward if moment.param and moment.param.is_trained]
        self._uses_left: Counter[nn.Parameter] = Counter(param.parameter for param in trained)
        self._left: set[PlannedUnit] = set()
        self._alive: dict[nn.Parameter, int] = {}
        self._packed: int | None = None  # the bucket whose gradients are in flight
        self._packed_bytes = 0

    def enter(self, unit: PlannedUnit) -> None:
        """Backward reaches the unit's outputs."""
        self._make_room(self._bucket_of[unit])

    def differentiate(self, unit: PlannedUnit, param: PlannedParam) -> None:
        """Autograd computes a gradient.

        A parameter that is used twice has two, and their sum is a third tensor.
        """
        parameter = param.parameter
        if not param.is_trained:
            return
        nbytes = param.shape.numel() * (param.grad_dtype or unit.compute_dtype(param)).itemsize
        is_second = parameter in self._alive
        self._alive[parameter] = nbytes
        of_sum = 2 * nbytes if is_second else 0
        self.most = max(self.most, sum(self._alive.values()) + self._packed_bytes + of_sum)
        self._uses_left[parameter] -= 1

    def leave(self, unit: PlannedUnit, following: Moment | None) -> None:
        """Backward has passed the unit's inputs. ``following`` is the next unit's moment."""
        self._left.add(unit)
        while self._order and self._left.issuperset(self._units[self._order[-1]]):
            self._pack(self._order.pop())
        if following is not None and following.kind == "enter":  # it encloses the unit
            self._make_room(self._bucket_of[following.unit])

    def _pack(self, bucket: int) -> None:
        if self._bytes[bucket] == 0:
            return
        params = [param.parameter for unit in self._units[bucket] for param in unit.params]
        self._packed = bucket
        self._packed_bytes = sum(
            self._alive.pop(parameter)
            for parameter in params
            if parameter in self._alive and self._uses_left[parameter] == 0
        )

    def _make_room(self, bucket: int) -> None:
        if self._packed is None:
            return
        if self._bytes[self._packed] + self._bytes[bucket] > self._limit:
            self._packed = None
            self._packed_bytes = 0
