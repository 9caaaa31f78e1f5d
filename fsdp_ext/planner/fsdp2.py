"""The peak memory of PyTorch's FSDP2 for planned units, to compare with that of fsdp_ext.

``fsdp2_peak`` walks through one training step and adds up the tensors that FSDP2 then holds. The
rules are those of ``torch/distributed/fsdp/_fully_shard`` in torch 2.11 to 2.15. Each rule below
names the function that it follows. FSDP2 frees tensors when the host has issued what uses them, so
the sum is what torch's allocator counts as allocated, not as reserved.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from torch import nn

from fsdp_ext.planner.sizes import trained_bytes
from fsdp_ext.planner.units import Moment, PlannedParam, PlannedRoot, PlannedUnit
from fsdp_ext.sharding.api.handles import HAS_FINALIZATION

_FREES_BEFORE_COPIES = HAS_FINALIZATION  # both since torch 2.15


def fsdp2_peak(root: PlannedRoot, tensors: tuple[int, int]) -> int | None:
    """Return the most bytes that FSDP2 allocates on the first rank, without activations.

    Gradients are None at the start of the step, the optimizer's states exist already, and each
    backward reduces.

    Args:
        root: the planned units. FSDP2 has the same ones, with the same settings.
        tensors: how many the optimizer keeps per trained parameter, and how many its step
            allocates.

    Returns:
        The bytes on the device, or None where the walk does not know FSDP2's rules: if one rank has
        whole parameters, with calls of ``set_modules_to_forward_prefetch`` and the like, for units
        that skip a reshard or an unshard in backward, and for parameters that are sharded in
        another dimension than 0 or split by tensor parallelism.
    """
    if not all(_is_known(unit) for unit in root.units):
        return None
    kept = zip(root.units, root.settings.reshard_after_forward, strict=True)
    # FSDP2 makes no FSDPParamGroup for a unit without parameters of its own.
    groups = {
        unit: unit.settings.reshard_group if reshards else None
        for unit, reshards in kept
        if unit.params
    }
    step = _Step(groups)
    on_device = [unit for unit in root.units if not unit.settings.offloads]
    for unit in on_device:
        step.hold("shards", unit, sum(_shard_bytes(unit, param) for param in unit.params))
        step.hold("optimizer states", unit, tensors[0] * trained_bytes(unit))
    step.forward(moment for moment in root.moments() if moment.unit.params)
    step.backward(moment for moment in root.backward_moments if moment.unit.params)
    for unit in on_device:
        step.hold("optimizer temporaries", unit, tensors[1] * trained_bytes(unit))
    return step.peak


def _is_known(unit: PlannedUnit) -> bool:
    asked = unit.settings
    has_lists = bool(unit.forward_prefetch or unit.backward_prefetch)
    is_usual = asked.reshard_after_backward and asked.unshard_in_backward
    has_rows = all(param.shard_dim == 0 and not param.is_split for param in unit.params)
    return unit.world_size > 1 and has_rows and is_usual and not has_lists


# - Sizes of tensors


def _shard_bytes(unit: PlannedUnit, param: PlannedParam) -> int:
    """Return the bytes of a shard, padded to equal rows (``FSDPParam._init_sharded_param``)."""
    return unit.shard_numel(param) * param.dtype.itemsize


def _unit_bytes(unit: PlannedUnit) -> int:
    """Return the bytes of unsharded parameters (``FSDPParam.init_all_gather_outputs``)."""
    of_shard = sum(
        unit.shard_numel(param) * unit.compute_dtype(param).itemsize for param in unit.params
    )
    return of_shard * unit.world_size


class _Step:
    """The tensors that FSDP2 holds at a moment of a step, and their largest sum so far.

    Args:
        groups: how many ranks share each unit between forward and backward; 0 stands for all, and
            None for units that stay unsharded.
    """

    def __init__(self, groups: dict[PlannedUnit, int | None]) -> None:
        self.peak = 0
        self._sum = 0
        self._held: dict[tuple[str, Hashable], int] = {}
        self._groups = groups
        self._gathered: PlannedUnit | None = None  # FSDPCommContext.all_gather_state
        self._reduced: PlannedUnit | None = None  # FSDPCommContext.reduce_scatter_states
        self._order: list[PlannedUnit] = []  # FSDPCommContext.post_forward_order
        # The trained parameters in FSDP2's order, which is that of their first use.
        self._trained: dict[PlannedUnit, list[PlannedParam]] = {unit: [] for unit in groups}

    def hold(self, what: str, of: Hashable, nbytes: int) -> None:
        """Allocate a tensor, or several that are freed together."""
        self._held[what, of] = nbytes
        self._sum += nbytes
        self.peak = max(self.peak, self._sum)

    def _free(self, what: str, of: Hashable) -> None:
        self._sum -= self._held.pop((what, of), 0)

    def _has(self, what: str, of: Hashable) -> bool:
        return (what, of) in self._held

    def forward(self, moments: Iterable[Moment]) -> None:
        """``FSDPState._pre_forward`` and ``_post_forward`` of each unit."""
        used: set[nn.Parameter] = set()
        for kind, unit, param in moments:
            if kind == "enter":
                self._unshard(unit)
                self._wait_for_unshard(unit, in_forward=True)
            elif param is not None and param.is_trained and param.parameter not in used:
                used.add(param.parameter)
                self._trained[unit].append(param)
            elif kind == "leave":
                self._reshard_after_forward(unit)
                self._order.append(unit)
        self._free("all-gather output", self._gathered)

    def backward(self, moments: Iterable[Moment]) -> None:
        """``FSDPState._pre_backward``, ``FSDPParamGroup.post_backward`` and the final callback.

        If nothing that is trained is used before a unit's start, autograd computes no gradient of
        its inputs, and the final callback runs its ``post_backward``. That is the case of the root
        and often of an embedding.
        """
        waiting = set(self._groups)
        for kind, unit, param in moments:
            if kind == "leave":
                self._unshard(unit)
                self._wait_for_unshard(unit, in_forward=False)
                before = self._order.index(unit) - 1
                if before >= 0:  # FSDPParamGroup._backward_prefetch
                    self._unshard(self._order[before])
            elif kind == "use":
                self._differentiate(unit, param)
            else:
                self._post_backward(unit)
                waiting.remove(unit)
        for unit in self._groups:  # FSDPState._root_post_backward_final_callback
            if unit in waiting:
                self._post_backward(unit)
            self._free("reduce-scatter output", unit)
            self._free("all-gather output", unit)  # prefetched without a backward
        self._free("reduce-scatter input", self._reduced)

    def _unshard(self, unit: PlannedUnit) -> None:
        """``foreach_all_gather``: shards are cast, and then copied into their part of the output.

        Cast shards, and the copies of offloaded ones, are left out. They are freed before the
        output is copied into parameters, which are larger.
        """
        if not self._has("unsharded", unit) and not self._has("all-gather output", unit):
            self.hold("all-gather output", unit, _unit_bytes(unit))

    def _wait_for_unshard(self, unit: PlannedUnit, *, in_forward: bool) -> None:
        """``FSDPParamGroup.wait_for_unshard``: the output is copied into parameters.

        In forward, the output is kept until this function is called for the next unit. Before
        torch 2.15, a local variable keeps it until the end of that call.
        """
        if not self._has("all-gather output", unit):
            return
        freed = self._gathered if in_forward else unit
        if in_forward and _FREES_BEFORE_COPIES:
            self._free("all-gather output", freed)
        self.hold("unsharded", unit, _unit_bytes(unit))
        self._free("kept for backward", unit)
        self._free("all-gather output", freed)
        self._gathered = unit if in_forward else None

    def _reshard_after_forward(self, unit: PlannedUnit) -> None:
        """``FSDPParamGroup.reshard``; a smaller group keeps clones of its own shards."""
        group = self._groups[unit]
        if group is None:
            return
        if group > 0:
            self.hold("kept for backward", unit, _unit_bytes(unit) // group)
        self._free("unsharded", unit)

    def _differentiate(self, unit: PlannedUnit, param: PlannedParam | None) -> None:
        """Autograd computes a gradient in the dtype of computation.

        A parameter that is used twice has two, and their sum is a third tensor.
        """
        if param is None or not param.is_trained:
            return
        nbytes = param.shape.numel() * unit.compute_dtype(param).itemsize
        if self._has("gradient", param.parameter):
            self.hold("second gradient and sum", param.parameter, 2 * nbytes)
            self._free("second gradient and sum", param.parameter)
        else:
            self.hold("gradient", param.parameter, nbytes)

    def _post_backward(self, unit: PlannedUnit) -> None:
        """``FSDPParamGroup.post_backward`` and ``foreach_reduce``.

        The input of the previous reduce-scatter is kept until here. While the reduction is issued,
        a loop variable of ``foreach_reduce`` keeps the gradient of the last parameter. With
        replicas and a cast, the output is kept until the end (``AllReduceState``). With CPU
        offload, the sharded gradient is freed when its copy to the host is issued.
        """
        self._free("unsharded", unit)
        self._free("reduce-scatter input", self._reduced)
        params = [param for param in self._trained[unit] if self._has("gradient", param.parameter)]
        if not params:
            return
        self._reduced = unit
        reduce_dtype = unit.grad_dtypes()[1]
        reduced = sum(unit.shard_numel(param) for param in params) * reduce_dtype.itemsize
        self.hold("reduce-scatter input", unit, reduced * unit.world_size)
        for param in params[:-1]:
            self._free("gradient", param.parameter)
        self.hold("reduce-scatter output", unit, reduced)
        sharded = sum(_shard_bytes(unit, param) for param in params)
        if reduce_dtype == params[-1].dtype:
            self._free("reduce-scatter output", unit)  # it becomes the sharded gradient
        self.hold("sharded gradient", unit, sharded)
        if unit.replicas == 1:
            self._free("reduce-scatter output", unit)
        self._free("gradient", params[-1].parameter)
        if unit.settings.offloads:
            self._free("sharded gradient", unit)
