"""What training would take, before it starts: memory of each rank, and time over a link.

    import fsdp_ext

    with torch.device("meta"):
        model = GPT(config)
    print(fsdp_ext.plan(model, world_size=64, units=Block, batch=tokens, flops_per_second=400e12))

Sizes are those of the run, since layout, buckets and buffers come from the same code
(csrc/core/layout.h, merging.h, memory_plan.h). Times are simulated: fsdp_ext/schedule.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_ext import _C
from fsdp_ext._util.files import write_text
from fsdp_ext._util.numbers import is_at_least
from fsdp_ext.comm.costs import typical_link
from fsdp_ext.comm.link import PRESETS, Link
from fsdp_ext.comm.simulated import Simulated
from fsdp_ext.comm.transports import (
    Transport,
    may_share_memory,
    resolve_transport,
    why_no_shared_memory,
)
from fsdp_ext.planner.flops import count_flops
from fsdp_ext.planner.schedule import Prediction, Stage, predict
from fsdp_ext.planner.sizes import (
    PlannedBucketSizes,
    PlannedMemory,
    PlannedUnitSizes,
    bucket_sizes,
    memory_of,
    unit_sizes,
)
from fsdp_ext.planner.table import lines_of
from fsdp_ext.planner.units import (
    PlannedRoot,
    Units,
    units_of_plain,
    units_of_sharded,
)
from fsdp_ext.sharding.arguments import (
    check_types,
    resolve_bucket_bytes,
    resolve_max_message_bytes,
    resolve_prefetch,
)
from fsdp_ext.sharding.module_state import sharded_module, unit_of
from fsdp_ext.sharding.settings import UnitSettings
from fsdp_ext.sharding.unit import Unit

# Note [gather plans] in csrc/core/layout.h, and the table of transports in docs/design.md.
_GATHER_BY = {"nccl": "size", "shared_memory": "parameter", "process_group": "packing"}


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` has found; ``str`` of it is a table.

    ``prediction`` is None where it was not said how fast a rank computes.
    """

    model: str
    world_size: int
    device_type: str
    transport: str
    link: Link
    bucket_bytes: int
    units: tuple[PlannedUnitSizes, ...]
    buckets: tuple[PlannedBucketSizes, ...]
    memory: PlannedMemory
    prediction: Prediction | None

    def __str__(self) -> str:
        """Return the tables of units and memory, and the times."""
        return "\n".join(lines_of(self))

    def to_json(self, path: str | Path | None = None) -> str | None:
        """Return it as JSON, or write it to ``path``: bytes, seconds and floating-point operations.

        Keys of times begin with ``simulated``.
        """
        document = asdict(self)
        document["memory"] |= {"ring": self.memory.ring, "peak": self.memory.peak}
        del document["prediction"]
        if self.prediction is not None:
            document["simulated_seconds"] = {
                name: getattr(self.prediction, name)
                for name in ("step", "compute", "exposed", "wire")
            }
        text = json.dumps(document, indent=2) + "\n"
        if path is None:
            return text
        write_text(path, text)
        return None


def plan(
    model: nn.Module,
    world_size: int | None = None,
    *,
    units: Units | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    bucket_bytes: int | None = None,
    max_message_bytes: int | None = None,
    prefetch: int | None = None,
    reshard_after_forward: bool | None = None,
    transport: Transport = None,
    link: Link | str | None = None,
    device_type: str | None = None,
    optimizer_states: int = 2,
    batch: Any = None,
    flops_per_second: float | None = None,
    compute: Mapping[str, tuple[float, float]] | None = None,
    contention: float = 0.0,
    copies: tuple[float, float] = (0.0, 0.0),
    memory_limit: int | None = None,
) -> Plan:
    """Return what each rank of a training would hold, and how long a step would take.

    Nothing is allocated, and ``model`` stays as it is: a copy without memory is worked on. No
    process group is needed. Buckets are those of the order in which modules are registered, which
    is the run's own for its first iteration, and for good where forward takes the same order.

    Memory is what fsdp_ext and the optimizer allocate; activations are not in it. Time comes from
    :func:`planner.schedule.predict` and is simulated: compute and collectives, and casts and
    copies if ``copies`` says what they take, without the optimizer's step. Where units enclose
    others besides the root, each computes before those inside it.

    Args:
        model: one that ``fully_shard`` was applied to, or that ``FullyShardedDataParallel`` wraps,
            which knows its units and their settings; or a plain one, with ``units``. It may be on
            the meta device.
        world_size: how many ranks; by default those of the model's mesh, or of a simulated
            transport.
        units: of a model without units: module classes, modules, or a function that says of a
            module whether it becomes one. The model itself always does.
        mp_policy: of a model without units: see :func:`fsdp_ext.fully_shard`.
        bucket_bytes: see there; of a model with units this replaces the root's.
        max_message_bytes: see there, and likewise.
        prefetch: see there, and likewise; ``set_modules_to_forward_prefetch`` may say more.
        reshard_after_forward: of a model without units, for each of them: see there.
        transport: see there; it decides how gathers are laid out, and the default of
            ``bucket_bytes``.
        link: that times are of: a Link, or the name of one of ``comm.link.PRESETS``; by
            default what is typical of the transport.
        device_type: "cuda" or "cpu"; by default the mesh's, or "cuda".
        optimizer_states: tensors of each trainable parameter's size and dtype that the optimizer
            keeps: 2 for AdamW, 1 for SGD with momentum.
        batch: what one rank calls the model with (tensors, of which shapes and dtypes matter; a
            tuple of arguments or a mapping of keywords), to count floating-point operations:
            :func:`planner.flops.count_flops` says which. It needs no memory on the meta device.
        flops_per_second: that a rank computes at; with ``batch``.
        compute: instead, by unit: seconds of forward and backward; the root is "the root".
        contention: see :func:`planner.schedule.predict`.
        copies: seconds a byte of casts and unpacking around gathers, and of packing around
            reductions.
        memory_limit: bytes that a rank has.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument or a parameter does not fit, or memory does not fit
            ``memory_limit``; the message then has the table.
    """
    if isinstance(model, nn.Module):
        model = sharded_module(model)
    check_types(None, mp_policy or MixedPrecisionPolicy(), None)
    _check_numbers(optimizer_states, flops_per_second, batch, compute, memory_limit)
    unit = _check_model(model, units, mp_policy, reshard_after_forward)
    device_type = device_type or (unit.mesh.device_type if unit is not None else "cuda")
    transport = transport if transport is not None or unit is None else unit.settings.transport
    ranks = _world_size(world_size, unit, transport)
    name, transport = _transport(transport, device_type, unit)
    settings = UnitSettings(mp_policy or MixedPrecisionPolicy(), reshard_after_forward)
    copied = (
        units_of_plain(model, units, ranks, settings)
        if unit is None
        else units_of_sharded(model, ranks)
    )
    typical = typical_link(name, transport, ranks)
    overrides = {
        "bucket_bytes": resolve_bucket_bytes(bucket_bytes),
        "prefetch": resolve_prefetch(prefetch),
        "max_message_bytes": resolve_max_message_bytes(max_message_bytes),
    }
    given = {name: value for name, value in overrides.items() if value is not None}
    decision = unit.root.decision if unit is not None and unit.root is not None else None
    root = PlannedRoot(copied, typical, decision, **given)
    depth = root.most_ahead()
    layouts = [each.layout_for(training=True) for each in root.units]
    found = find_buckets(root, layouts, gather_by_of(name, device_type), depth)
    flops = None if batch is None else count_flops(copied, batch, root.module_names())
    seconds = _seconds(root, flops, flops_per_second, compute)
    the_link = _link(link, typical).over(ranks)
    result = Plan(
        model=type(root.module).__name__,
        world_size=ranks,
        device_type=device_type,
        transport=name,
        link=the_link,
        bucket_bytes=root.settings.bucket_bytes[0],
        units=unit_sizes(root, layouts, found, flops),
        buckets=bucket_sizes(root, found),
        memory=memory_of(root, layouts, found, optimizer_states),
        prediction=None
        if seconds is None
        else predict_plan(root, found, seconds, the_link, depth, contention, copies),
    )
    if memory_limit is not None and result.memory.peak > memory_limit:
        raise ValueError(
            f"{result.model} expects {result.memory.peak:,} bytes on each rank, without "
            f"activations, but memory_limit is {memory_limit:,}; use more ranks, smaller units or "
            f"other dtypes\n{result}"
        )
    return result


# - Arguments


def _check_numbers(
    optimizer_states: int,
    flops_per_second: float | None,
    batch: Any,
    compute: object,
    memory_limit: object,
) -> None:
    if memory_limit is not None and not is_at_least(memory_limit, 1):
        raise ValueError(
            "plan expects memory_limit to be a positive whole number of bytes, or None, but got "
            f"{memory_limit!r}; 60 * 2**30, say"
        )
    if not is_at_least(optimizer_states, 0):
        raise ValueError(
            "optimizer_states expects a number of tensors for each parameter, 0 or more, but got "
            f"{optimizer_states!r}; AdamW has 2"
        )
    if flops_per_second is not None and compute is not None:
        raise ValueError(
            "plan expects flops_per_second or compute but got both; compute is measured seconds"
        )
    if flops_per_second is not None and batch is None:
        raise ValueError(
            "flops_per_second expects a batch to count floating-point operations with but got "
            "none; pass batch=, what one rank calls the model with"
        )
    if flops_per_second is not None and not flops_per_second > 0:
        raise ValueError(
            f"flops_per_second expects a positive rate but got {flops_per_second!r}; about half of "
            "a GPU's peak is usual"
        )


def _check_model(
    model: nn.Module,
    units: Units | None,
    mp_policy: MixedPrecisionPolicy | None,
    reshard_after_forward: bool | None,
) -> Unit | None:
    """Return the first unit of a model that has some."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"plan expects a module but got {model!r}; pass the model")
    if not any(unit_of(module) is not None for module in model.modules()):
        return None
    own = {
        "units": units,
        "mp_policy": mp_policy,
        "reshard_after_forward": reshard_after_forward,
    }
    given = [name for name, value in own.items() if value is not None]
    if given:
        raise ValueError(
            f"plan expects no {' or '.join(given)} for a model that fully_shard was applied to, "
            "which has its own, but got some; leave them out"
        )
    return next(unit for m in model.modules() if (unit := unit_of(m)) is not None)


def _world_size(asked: int | None, unit: Unit | None, transport: Transport) -> int:
    simulated = transport.world_size if isinstance(transport, Simulated) else None
    if asked is None:
        asked = simulated if unit is None else unit.mesh.size()
    if asked is None:
        raise ValueError(
            "plan expects world_size for a model without a mesh but got none; pass how many ranks "
            "there would be"
        )
    if not isinstance(asked, int) or asked < 1:
        raise ValueError(f"world_size expects 1 or more ranks but got {asked!r}; correct it")
    if simulated is not None and unit is None and asked != simulated:
        raise ValueError(
            f"plan expects as many ranks as the simulated transport has, {simulated}, but got "
            f"world_size={asked}; leave one out"
        )
    return asked


def _transport(asked: Transport, device_type: str, unit: Unit | None) -> tuple[str, Transport]:
    """Return the name of what the run would choose, and what was asked for."""
    if device_type not in ("cuda", "cpu"):
        raise ValueError(f"device_type expects 'cuda' or 'cpu' but got {device_type!r}; correct it")
    asked = resolve_transport(asked, device_type)
    if isinstance(asked, Simulated):
        return "simulated", asked
    if asked is not None:
        return asked, asked
    if device_type == "cuda":
        return "nccl", None
    shares = unit is None or may_share_memory(unit.mesh.get_group(), None)
    return ("shared_memory" if shares and not why_no_shared_memory() else "process_group"), None


def gather_by_of(transport: str, device_type: str) -> str:
    """Return how a transport gathers: Note [gather plans] in csrc/core/layout.h."""
    if transport == "simulated":
        transport = "nccl" if device_type == "cuda" else "shared_memory"
    return _GATHER_BY[transport]


def _link(asked: Link | str | None, typical: Link) -> Link:
    if isinstance(asked, str) and asked in PRESETS:
        return PRESETS[asked]
    if asked is not None and not isinstance(asked, Link):
        raise ValueError(
            f"link expects a Link or one of {', '.join(PRESETS)} but got {asked!r}; Link.load "
            "reads a measured one"
        )
    return asked or typical


# - Time


def _seconds(
    root: PlannedRoot,
    flops: list[tuple[int, int]] | None,
    flops_per_second: float | None,
    compute: Mapping[str, tuple[float, float]] | None,
) -> list[tuple[float, float]] | None:
    """Return how long each unit's forward and backward compute, if that can be known."""
    if flops is not None and flops_per_second is not None:
        return [(f / flops_per_second, b / flops_per_second) for f, b in flops]
    if compute is None:
        return None
    names = [unit.name for unit in root.units]
    unknown = sorted(set(compute) - set(names))
    missing = [name for name in names[1:] if name not in compute]
    if unknown or missing:
        raise ValueError(
            f"compute expects seconds of each unit but {', '.join(unknown or missing)} "
            f"{'is none' if unknown else 'has none'}; the units are {', '.join(names)}"
        )
    return [compute.get(name, (0.0, 0.0)) for name in names]


def predict_plan(
    root: PlannedRoot,
    found: _C.MemoryPlan,
    seconds: Sequence[tuple[float, float]],
    link: Link,
    depth: int,
    contention: float,
    copies: tuple[float, float] = (0.0, 0.0),
) -> Prediction:
    """Return how long a step takes.

    Args:
        root: the units.
        found: their buckets and slots.
        seconds: of each unit's forward and backward.
        link: that collectives take.
        depth: of the prefetch.
        contention: see :func:`planner.schedule.predict`.
        copies: seconds a byte around gathers and around reductions.
    """
    sends = root.units[0].world_size > 1
    # A single rank has its whole parameters; only a cast makes others of them.
    copied = [sends or _casts(root, bucket["units"]) for bucket in found["buckets"]]
    stages = [
        Stage(
            name=root.units[bucket["units"][0]].name,
            forward=sum(seconds[number][0] for number in bucket["units"]),
            backward=sum(seconds[number][1] for number in bucket["units"]),
            gather_bytes=bucket["gather_bytes"] if sends else 0,
            reduce_bytes=bucket["reduce_bytes"] if sends else 0,
            reshards=bucket["reshards_after_forward"],
            copy_seconds_gather=copies[0] * bucket["gather_bytes"] if copies_too else 0.0,
            copy_seconds_reduce=copies[1] * bucket["reduce_bytes"] if copies_too else 0.0,
            gather_messages=bucket["gather_messages"],
            reduce_messages=bucket["reduce_messages"],
        )
        for bucket, copies_too in zip(found["buckets"], copied, strict=True)
    ]
    trained = (parameter for parameter in root.module.parameters() if parameter.requires_grad)
    first = next(trained, None)  # whose gradient comes last, by order of registration
    return predict(
        stages[0],
        stages[1:],
        link,
        depth=depth,
        slots=max(1, found["ring_slots"]),
        contention=contention,
        root_begins=any(param.parameter is first for param in root.units[0].params),
    )


def _casts(root: PlannedRoot, units: Sequence[int]) -> bool:
    """Return whether a parameter of these units is computed with in another dtype."""
    return any(
        unit.compute_dtype(param.dtype) != param.dtype
        for unit in (root.units[number] for number in units)
        for param in unit.params
    )


def find_buckets(
    root: PlannedRoot, layouts: Sequence[_C.UnitLayout], gather_by: str, depth: int
) -> _C.MemoryPlan:
    """Return the buckets of planned units, and the buffers that they take.

    Args:
        root: the units.
        layouts: of each of them, for training.
        gather_by: see :func:`gather_by_of`.
        depth: of the prefetch.
    """
    return _C.plan_memory(
        root.configs(layouts),
        gather_by=gather_by,
        nesting=root.nesting(),
        prefetch_depth=depth,
    )
