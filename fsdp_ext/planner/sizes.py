"""The sizes in a plan: those of each unit and bucket, and the memory of each rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from fsdp_ext import _C
from fsdp_ext.planner.units import Moment, PlannedParam, PlannedRoot, PlannedUnit


@dataclass(frozen=True)
class PlannedUnitSizes:
    """The sizes of one unit.

    Args:
        name: the unit's name.
        parameters: elements of its whole parameters, or of the parts that tensor parallelism has
            given to this rank.
        shard: bytes of each rank's shard.
        padding: bytes of all shards together that hold no parameter.
        bucket: number of its bucket.
        flops: floating-point operations of forward and of backward on each rank; None if they were
            not counted.
    """

    name: str
    parameters: int
    shard: int
    padding: int
    bucket: int
    flops: tuple[int, int] | None


@dataclass(frozen=True)
class PlannedBucketSizes:
    """The sizes of one bucket: units that are gathered and reduced together.

    ``gather`` and ``reduce`` are bytes on the wire, summed over the ranks that shard the model.
    ``all_reduce`` is bytes of each rank, which are summed over replicas; 0 if there are none.
    ``unsharded`` is bytes of each rank, too.
    """

    units: tuple[str, ...]
    gather: int
    reduce: int
    gather_messages: int
    reduce_messages: int
    unsharded: int
    gather_plan: str
    all_reduce: int = 0


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes of the first rank, which has the most rows. docs/design/memory.md explains each.

    The figures assume that each backward reduces and that gradients are set to None between steps.
    Adding to existing gradients needs the reduce output, too, and units that accumulate without
    reducing need a reduce input of their own.

    Args:
        shards: the flat shards.
        gradients: the flat gradients. With an attached optimizer on GPUs, those of two buckets.
        optimizer_states: the optimizer's tensors.
        gather_inputs: shards in the dtype of the wire.
        group_shards: what units with ``reshard_after_forward=k`` keep for backward.
        ring_slots: how many slots the ring has.
        ring_slot: the size of the largest slot.
        ring: the size of the whole ring.
        staging: gathered shards before they are unpacked.
        reduce_input: packed gradients.
        reduce_output: reduced gradients before they are cast or accumulated.
        kept_unsharded: units that stay unsharded after forward.
        gradients_in_flight: the most that unsharded gradients take at once.
        message_staging: messages of a composed collective.
        optimizer_temporaries: what the optimizer's step allocates and frees.
        on_host: bytes of offloaded units in the host's memory: shards, gradients and optimizer
            states.
        fsdp2_peak: the peak of FSDP2 with the same units (``planner/fsdp2.py``); None if it is not
            computed.
    """

    shards: int
    gradients: int
    optimizer_states: int
    gather_inputs: int
    group_shards: int
    ring_slots: int
    ring_slot: int
    ring: int
    staging: int
    reduce_input: int
    reduce_output: int
    kept_unsharded: int
    gradients_in_flight: int
    message_staging: int
    optimizer_temporaries: int = 0
    on_host: int = 0
    fsdp2_peak: int | None = None

    @property
    def peak(self) -> int:
        """The sum, without activations, inputs, module buffers and unused allocator memory.

        What NCCL's communicators and the CUDA context take is not counted (docs/design/memory.md).
        Unsharded gradients are gone when the optimizer's step begins, so the larger of them and of
        its temporaries counts.
        """
        of_units = self.shards + self.gradients + self.optimizer_states + self.gather_inputs
        buffers = self.ring + self.staging + self.reduce_input + self.reduce_output
        buffers += self.message_staging + self.group_shards
        passing = max(self.gradients_in_flight, self.optimizer_temporaries)
        return of_units + buffers + self.kept_unsharded + passing


def find_buckets(root: PlannedRoot, transports: tuple[str, str], device_type: str) -> _C.MemoryPlan:
    """Return the buckets of planned units and the buffers that they need.

    The first of ``transports`` decides how buckets are gathered, the second is between replicas.
    """
    on_gpu = device_type == "cuda"
    return _C.plan_memory(
        root.configs(root.layouts),
        transport=transports[0],
        on_gpu=on_gpu,
        nesting=root.nesting(),
        prefetch_depth=root.most_ahead(),
        has_prefetch_lists=root.has_prefetch_lists(),
        keeps_gather_inputs=root.keeps_gather_inputs(device_type),
        replicas=root.units[0].replicas,
        replica_transport=transports[1],
    )


def unit_sizes(
    root: PlannedRoot,
    found: _C.MemoryPlan,
    flops: list[tuple[int, int]] | None,
) -> tuple[PlannedUnitSizes, ...]:
    """Return the sizes of each unit, in order of registration."""
    bucket_of = {n: i for i, bucket in enumerate(found["buckets"]) for n in bucket["units"]}
    sizes = []
    for number, (unit, layout) in enumerate(zip(root.units, root.layouts, strict=True)):
        held = sum(param.shape.numel() * param.dtype.itemsize for param in unit.params)
        sizes.append(
            PlannedUnitSizes(
                name=unit.name,
                parameters=sum(param.shape.numel() for param in unit.params),
                shard=layout.shard_bytes,
                padding=layout.shard_bytes * layout.world_size - held,
                bucket=bucket_of[number],
                flops=None if flops is None else flops[number],
            )
        )
    return tuple(sizes)


def bucket_sizes(root: PlannedRoot, found: _C.MemoryPlan) -> tuple[PlannedBucketSizes, ...]:
    """Return the sizes of each bucket."""
    return tuple(
        PlannedBucketSizes(
            units=tuple(root.units[number].name for number in bucket["units"]),
            gather=bucket["gather_bytes"],
            reduce=bucket["reduce_bytes"],
            gather_messages=bucket["gather_messages"],
            reduce_messages=bucket["reduce_messages"],
            unsharded=bucket["unsharded_bytes"],
            gather_plan=bucket["gather_plan"],
            all_reduce=all_reduce_bytes(root, bucket),
        )
        for bucket in found["buckets"]
    )


def all_reduce_bytes(root: PlannedRoot, bucket: _C.PlannedBucket) -> int:
    """Return the bytes of each rank that a bucket's reduction sums over replicas."""
    first = root.units[0]
    return bucket["reduce_bytes"] // first.world_size if first.replicas > 1 else 0


def optimizer_tensors(states: int, device_type: str, *, is_fused: bool) -> tuple[int, int]:
    """Return how many tensors an optimizer keeps per parameter, and how many its step allocates.

    On GPUs, PyTorch's optimizers step all parameters together by default, and Adam's and AdamW's
    square root of a state is a tensor of each parameter's size (``_multi_tensor_adam``). Those
    with fewer states are taken to allocate nothing, and so are steps one parameter at a time.
    """
    allocates = states > 1 and device_type == "cuda" and not is_fused
    return states, int(allocates)


def memory_of(
    root: PlannedRoot, found: _C.MemoryPlan, tensors: tuple[int, int], device_type: str
) -> PlannedMemory:
    """Return the memory of the first rank, without FSDP2's peak.

    ``tensors`` are the :func:`optimizer_tensors`.
    """
    shards, states, temporaries, on_host = 0, 0, 0, 0
    for unit, layout in zip(root.units, root.layouts, strict=True):
        of_states = tensors[0] * trained_bytes(unit)
        if unit.settings.offloads:
            on_host += layout.shard_bytes + layout.gradient_bytes + of_states
        else:
            shards += layout.shard_bytes
            states += of_states
            # An attached optimizer steps flat memory by PyTorch's fused code.
            temporaries += 0 if unit.frees_gradients else tensors[1] * trained_bytes(unit)
    return PlannedMemory(
        shards=shards,
        gradients=_sharded_gradients(root, found, lends=device_type == "cuda"),
        optimizer_states=states,
        gather_inputs=found["gather_input_bytes"],
        group_shards=found["group_shard_bytes"],
        ring_slots=found["ring_slots"],
        ring_slot=found["ring_slot_bytes"],
        ring=found["ring_bytes"],
        staging=found["staging_bytes"],
        reduce_input=found["reduce_input_bytes"],
        reduce_output=found["reduce_output_bytes"],
        kept_unsharded=found["kept_bytes"],
        gradients_in_flight=_gradients_in_flight(root, found),
        message_staging=found["message_staging_bytes"],
        optimizer_temporaries=temporaries,
        on_host=on_host,
    )


def _sharded_gradients(root: PlannedRoot, found: _C.MemoryPlan, *, lends: bool) -> int:
    """Return the most bytes of sharded gradients on the device.

    With ``lends``, two buckets that an attached optimizer updates have some at a time: Note
    [updates in backward] in csrc/core/reduce/unit_update.h.
    """
    staying, updated = 0, [0]  # 0, so that a single bucket is a pair, too
    for bucket in found["buckets"]:
        units = [number for number in bucket["units"] if root.layouts[number].gradient_bytes > 0]
        on_device = [number for number in units if not root.units[number].settings.offloads]
        nbytes = sum(root.layouts[number].gradient_bytes for number in on_device)
        if lends and units and all(root.units[number].frees_gradients for number in units):
            updated.append(nbytes)
        else:
            staying += nbytes
    return staying + max((sum(pair) for pair in pairwise(updated)), default=0)


def trained_bytes(unit: PlannedUnit) -> int:
    """Return the bytes that the first rank trains."""
    return sum(
        unit.shard_numel(param) * param.dtype.itemsize for param in unit.params if param.is_trained
    )


def _gradients_in_flight(root: PlannedRoot, found: _C.MemoryPlan) -> int:
    """Return the most bytes of unsharded gradients that are alive at once.

    Autograd makes the gradients of a bucket one after the other. They are alive until they are
    packed and one of these holds: the next bucket is complete, or backward enters a bucket for
    which there would not be enough room otherwise. The rules are those of Note [gradient lifetime]
    in ``csrc/core/reduce/packed_gradients.h`` and Note [order of reductions] in
    ``csrc/core/schedule/backward_schedule.h``.
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
    """The gradients that are alive at a moment of backward, and the most bytes so far."""

    def __init__(self, root: PlannedRoot, found: _C.MemoryPlan, backward: list[Moment]) -> None:
        self.most = 0
        self._limit = found["most_gradient_bytes"]
        self._bytes = [bucket["gradient_bytes"] for bucket in found["buckets"]]
        self._units = [[root.units[n] for n in bucket["units"]] for bucket in found["buckets"]]
        self._bucket_of = {unit: i for i, units in enumerate(self._units) for unit in units}
        # The buckets that backward has still to pack. The last one is next.
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
