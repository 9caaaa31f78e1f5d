"""``fully_shard``: FSDP2's entry point."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypedDict, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.utils import _get_root_modules

from fsdp_ext.comm.meeting import announce_process
from fsdp_ext.comm.simulated import Simulated
from fsdp_ext.comm.transports import device_of, resolve_transport
from fsdp_ext.sharding.api.arguments import (
    ParamsOnMesh,
    check_containers,
    check_modules,
    check_numbers,
    check_types,
    ensure_process_group,
    resolve_ignored_params,
    resolve_keep_gather_inputs,
    resolve_mesh,
    resolve_offload,
    resolve_placements,
    resolve_reshard,
)
from fsdp_ext.sharding.api.fsdp_module import FSDPModule, set_classes
from fsdp_ext.sharding.params.ranks import Ranks
from fsdp_ext.sharding.params.settings import UnitSettings
from fsdp_ext.sharding.params.spmd import SpmdMesh
from fsdp_ext.sharding.root import module_changes, optimizer_hooks
from fsdp_ext.sharding.root.forward_hooks import ForwardHooks
from fsdp_ext.sharding.root.module_state import (
    ModuleState,
    attributes_of,
    managed_modules,
    managed_params,
    replicated_params,
    set_state,
)
from fsdp_ext.sharding.root.root import abandon_forward, prepare_forward
from fsdp_ext.sharding.root.setting_changes import sharded_units
from fsdp_ext.sharding.root.unit import Unit
from fsdp_ext.sharding.torch_compat import state_dict_hooks, torch_state

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Options(TypedDict, total=False):
    """The keyword arguments of ``fully_shard``, for its overloads."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: Any
    transport: str | Simulated | None
    bucket_bytes: int | None
    max_message_bytes: int | tuple[int | None, int | None] | None
    prefetch: int | None
    keep_gather_inputs: bool | None
    check_every: int | None


@overload
def fully_shard(module: nn.Module, **options: Unpack[_Options]) -> FSDPModule: ...


@overload
def fully_shard(module: list[nn.Module], **options: Unpack[_Options]) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    transport: str | Simulated | None = None,
    bucket_bytes: int | None = None,
    max_message_bytes: int | tuple[int | None, int | None] | None = None,
    prefetch: int | None = None,
    keep_gather_inputs: bool | None = None,
    check_every: int | None = None,
) -> FSDPModule | list[FSDPModule]:
    """Shard ``module``'s parameters, gradients and optimizer state over data-parallel ranks.

    The parameters of ``module`` that are in no other unit yet become one *unit*. They are gathered
    together before forward, freed after it, and gathered again for backward. Their gradients are
    reduced together. Call it bottom-up, on the layers first and on the whole model last, and make
    the optimizer afterwards.

    Parameters and buffers may be on the host, on the mesh's device or on meta. Those on the host
    move to the device; on GPUs that is torch's current device. Parameters that are not contiguous,
    such as channels_last ones, become contiguous.

    Between steps the module's parameters are DTensors with ``Shard(0)`` (on a 2-D mesh, with
    ``Replicate()`` before it): rank ``r`` of ``N`` has rows ``[r * c, (r + 1) * c)`` with ``c =
    ceil(rows / N)``, as in ``torch.chunk``. In forward and backward they are plain tensors of the
    full shape. Parameters that tensor parallelism has made DTensors before are sharded on both
    meshes, and are DTensors on their own mesh in forward and backward. Parameters of a class with
    ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, such as quantised ones, are gathered by
    these methods. The arguments that ``torch.distributed.fsdp.fully_shard`` also has mean the same
    here.

    Args:
        module: the module to shard in place, or a list or another collection of modules to treat
                as one unit.
        mesh: device mesh to shard over. By default all ranks. If there is no process group then,
            ``init_process_group()`` makes one from the environment. A 2-D mesh shards over its
            second dimension and replicates over its first (hybrid sharding): gradients are
            reduce-scattered over the second, then all-reduced over the first. Units of one model,
            such as experts, may have meshes of their own, if the root's has all their ranks and
            their replicas are the root's.
        reshard_after_forward: whether to free the unsharded parameters after forward. The default
            is False for the root, because backward needs it first, and True for other units. A
            number ``k`` has to be a factor of the number of ranks that share the parameters. Each
            of ``k`` consecutive ranks, for example those of one host, then keeps one ``k``-th of
            the unsharded parameters, and backward gathers over these ranks only.
        shard_placement_fn: returns the ``Shard(dim)`` of a parameter, None for ``Shard(0)``, or a
            ``ShardPlacementResult``, which also gives the parameter a mesh of its own, as for
            experts. There is then a unit for each mesh, and all of them run with the modules. The
            size of a dimension other than 0 has to be a multiple of the number of ranks. A message
            carries such a parameter whole, so ``max_message_bytes`` must have room for the largest.
        mp_policy: dtypes of computation, reduction and results
            (:class:`torch.distributed.fsdp.MixedPrecisionPolicy`).
        offload_policy: ``OffloadPolicy()``, the default, or ``CPUOffloadPolicy()``. On GPUs the
            latter keeps sharded parameters, their gradients and so the optimizer in the host's
            pinned memory. Meta parameters then materialise with ``to_empty(device="cpu")``. On a
            mesh of CPUs, where everything is on the host, both mean the same.
        ignored_params: parameters to leave as they are, neither sharded nor reduced. Those of
            modules to which PyTorch's ``replicate`` was applied are left, too.
        dp_mesh_dims: PyTorch's ``DataParallelMeshDims``, which names the dimensions of ``mesh``
            that shard and those that replicate. Every parameter has to be a DTensor on ``mesh``.
        transport: what collectives travel by, the same for all units of a model: "nccl" on GPUs,
            "shared_memory" or "process_group" on the host, or a :class:`fsdp_ext.Simulated` one,
            which has no peers. The default is what FSDP_EXT_TRANSPORT names. If that is not set, it
            is NCCL on GPUs, shared memory between gloo's ranks of one host, and else the process
            group.
        bucket_bytes: the largest all-gather that several units share, in bytes summed over all
            ranks. Units share it if forward runs them one after the other; 0 lets each unit travel
            by itself. A unit without a value has the root's. The root's default is four times what
            the transport carries in the time of a launch (:func:`fsdp_ext.describe_buckets` shows
            it). Results do not depend on it if the transport adds up ranks in a fixed order, as
            shared memory does.
        max_message_bytes: the largest message, in bytes summed over all ranks. A larger bucket
            travels as several messages, so that casts and copies overlap communication. It is cut
            between parameters where that is possible; a parameter that is cut between rows is
            copied once more. The staging buffer and the reduce input then are as large as two
            messages. A tuple has the value for gathers and the one for reductions. None stands for
            the root's value, and for the root itself means that gathers have any size and
            reductions at most 256 MiB, or over many ranks up to 1 GiB or the size of the median
            unit. Units with different values do not share a bucket.
        prefetch: how many buckets' gathers are in flight ahead of the unit that runs, in forward
            and in backward. Only the root's value is used; the default is 1. Each one needs a slot
            for one more bucket. With 0, a unit is gathered when it needs its parameters.
        keep_gather_inputs: whether each rank keeps its shards as it has cast them in forward, to
            gather them again in backward. Otherwise they are cast for each gather, which takes no
            memory. By default they are kept on the CPU, and not on a GPU. If they are kept, shards
            that ``CPUOffloadPolicy`` has on the host cross PCIe once a step instead of twice. Only
            the root's value is used.
        check_every: the number of steps from one checked step to the next. In a checked step all
            ranks compare gathered parameters, and with hybrid sharding the shards of replicas. A
            difference, or a shard that changed although nothing wrote it, raises RuntimeError at
            the end of backward, which names the ranks, the unit and the step. Only the root's value
            is used, and it has to be the same on all ranks. By default nothing is compared. See
            ``docs/reliability.md``.

    Returns:
        ``module``. Its new class is a subclass of :class:`FSDPModule` and of its old class.

    Raises:
        RuntimeError: if ``mesh`` belongs to no process group.
        TypeError: if ``mesh``, ``mp_policy``, ``ignored_params`` or ``transport`` has a wrong type.
        ValueError: if another argument, a module or a parameter cannot be used. The message says
            why. It is an AssertionError, too, where FSDP2 raises one.
        NotImplementedError: if an argument is not supported yet. The message names it.
    """
    modules = [module] if isinstance(module, nn.Module) else _outermost(module)
    check_containers(modules)
    check_types(mesh, mp_policy, shard_placement_fn)
    ignored = resolve_ignored_params(ignored_params)
    check_modules(modules)
    if isinstance(transport, Simulated):
        transport.init_process_group()
    elif mesh is None:
        ensure_process_group()
    spmd = None if dp_mesh_dims is None else SpmdMesh.of(mesh, dp_mesh_dims)
    devices = (param.device for one in modules for param in one.parameters())
    mesh = resolve_mesh(mesh if spmd is None else spmd.data_parallel_mesh(), devices)
    check_numbers(bucket_bytes, max_message_bytes, prefetch, check_every)
    settings = UnitSettings(
        mp_policy=mp_policy,
        reshard_after_forward=reshard_after_forward,
        transport=resolve_transport(transport, mesh.device_type),
        bucket_bytes=bucket_bytes,
        max_message_bytes=max_message_bytes,
        prefetch=prefetch,
        keep_gather_inputs=resolve_keep_gather_inputs("fully_shard", keep_gather_inputs),
        check_every=check_every,
        offloads=resolve_offload(offload_policy, mesh.device_type),
    )
    units = make_units(modules, Ranks(mesh, spmd), settings, ignored, shard_placement_fn)
    set_classes(modules)
    install(units)
    return cast("FSDPModule | list[FSDPModule]", module)


def make_units(
    modules: list[nn.Module],
    ranks: Ranks,
    settings: UnitSettings,
    ignored: set[nn.Parameter],
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
) -> list[Unit]:
    """Return the units of one call of :func:`fully_shard`, one for each mesh of parameters.

    The modules keep their parameters until :func:`install`, so an error leaves them as they were.
    """
    ignored = ignored | replicated_params(modules)
    placed = resolve_placements(shard_placement_fn, managed_params(modules, ignored), ranks)
    units = [_unit_on_mesh(modules, on_mesh, settings) for on_mesh in placed]
    units[0].ignored = attributes_of(modules, ignored)
    _move_buffers(modules, units[0].device)
    return units


def install(units: list[Unit]) -> None:
    """Give the modules of new units the sharded parameters, and their forward its hooks."""
    first = units[0]
    for unit in units:
        unit.take_parameters()
        state_dict_hooks.install(unit)
    _mark_for_dynamo(first.modules)
    for index, module in enumerate(first.modules):
        first.hooks[module] = ForwardHooks(first, index, prepare_forward)
        set_state(module, ModuleState(module, tuple(units)))
    torch_state.register(first)
    optimizer_hooks.watch_optimizers()
    module_changes.install()


def _unit_on_mesh(modules: list[nn.Module], on_mesh: ParamsOnMesh, settings: UnitSettings) -> Unit:
    """Return the unit of a call's parameters on one mesh. The modules are not changed yet."""
    ranks = on_mesh.ranks
    reshards = resolve_reshard(settings.reshard_after_forward, on_mesh)
    settings = dataclasses.replace(settings, reshard_after_forward=reshards)
    if isinstance(settings.transport, Simulated):
        settings.transport.check_mesh(ranks.world_size, ranks.rank_in_mesh, ranks.replicas)
    for group in ranks.groups:
        announce_process(group)
    device = device_of(ranks.mesh.device_type)
    return Unit(modules, on_mesh.params, on_mesh.shard_dims, ranks, device, settings)


# The same attribute as on PyTorch's function. It is not annotated, because users see no such
# attribute.
cast(Any, fully_shard).state = torch_state.view_of


def _outermost(modules: Any) -> list[nn.Module]:
    """Return the modules of a collection that are not inside another one of it."""
    if isinstance(modules, (set, frozenset)):
        raise ValueError("fully_shard got a set, whose order differs between ranks. Pass a list.")
    listed = list(modules) if isinstance(modules, Collection) else []
    if not listed:
        raise ValueError(f"fully_shard got {modules!r}. Pass a module or a non-empty list of them.")
    check_modules(listed)
    roots: list[nn.Module] = _get_root_modules(listed)
    return roots


def _move_buffers(modules: list[nn.Module], device: torch.device) -> None:
    """Move buffers to the device that the shards went to, as FSDP2 does."""
    elsewhere = [
        buffer
        for module in modules
        for buffer in module.buffers()
        if not buffer.is_meta and buffer.device != device
    ]
    moved = [buffer.to(device) for buffer in elsewhere]
    for buffer, there in zip(elsewhere, moved, strict=True):
        buffer.data = there


def _mark_for_dynamo(modules: list[nn.Module]) -> None:
    """Set the attributes that Dynamo looks for in modules that FSDP manages, as FSDP2 does.

    Dynamo then makes parameters inputs of its graphs instead of guarding on each of them.
    """
    for module in managed_modules(modules):
        marked: Any = module
        marked._is_fsdp_managed_module = True
        marked._fsdp_use_orig_params = True


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module``'s method gather and free parameters as its ``forward`` does.

    Args:
        module: a sharded module. Nothing happens if ``fully_shard`` was not applied to it.
        method_name: name of the method.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if the module has no such method.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"register_fsdp_forward_method got {module!r}. Pass a sharded module.")
    if not isinstance(method_name, str):
        raise TypeError(
            f"register_fsdp_forward_method got method_name={method_name!r}. Pass the name of one "
            "of the module's methods."
        )
    if not isinstance(module, FSDPModule):
        return
    if not callable(getattr(module, method_name, None)):
        raise ValueError(
            f"{type(module).__name__} has no method '{method_name}' to register. Pass the "
            "name of one of its methods."
        )
    method = getattr(module, method_name)
    unit = module._fsdp_ext_unit
    hooks = unit.hooks[cast(nn.Module, module)]

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            args, kwargs = hooks.run_pre(module, args, kwargs)
            return hooks.run_post(module, args, method(*args, **kwargs))
        except BaseException:
            abandon_forward(unit)
            raise

    setattr(module, method_name, wrapped)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Check that the modules share their streams, as modules over one group of ranks always do.

    Args:
        modules: sharded modules, for example the root of each stage of a pipeline.

    Raises:
        TypeError: if ``modules`` is no collection.
        ValueError: if ``fully_shard`` was not applied to one of them.
        NotImplementedError: if they have different groups of ranks or transports.
    """
    units = sharded_units(modules, "share_comm_ctx")
    lanes = {(unit.ranks.shard_group, unit.settings.transport) for unit in units}
    if len(lanes) > 1:
        raise NotImplementedError(
            f"share_comm_ctx got modules over {len(lanes)} groups of ranks or transports, which "
            "cannot share streams. Leave the call out; modules of one group share theirs already."
        )
    for unit in units:
        torch_state.first_of_root(unit).comm_context = torch_state.StateView(units[0])._comm_ctx
