"""All units under one root module, from the first forward on."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_ext import _C
from fsdp_ext._util.errors import UnsupportedError
from fsdp_ext._util.names import without_fsdp1, without_wrappers
from fsdp_ext._util.tracing import hidden_from_dynamo, outside_of_transforms
from fsdp_ext.comm.costs import link_of_buckets
from fsdp_ext.comm.lanes import add_group_lanes, group_beside, lanes_of
from fsdp_ext.comm.simulated import Simulated
from fsdp_ext.sharding.params import unreduced
from fsdp_ext.sharding.params.checked_optimizers import check_again
from fsdp_ext.sharding.params.entries import Entry
from fsdp_ext.sharding.params.optimizer_in_backward import watch_optimizers_in_backward
from fsdp_ext.sharding.params.param_group import ParamGroup
from fsdp_ext.sharding.params.pending import PendingGradients
from fsdp_ext.sharding.params.settings import Decision
from fsdp_ext.sharding.params.user_hooks import CustomCollective
from fsdp_ext.sharding.root import module_changes
from fsdp_ext.sharding.root.agreement import has_peers, together
from fsdp_ext.sharding.root.comparisons import compare_groups, compare_models
from fsdp_ext.sharding.root.meshes import add_meshes, check_meshes, refuse_several_meshes
from fsdp_ext.sharding.root.module_state import sharded_module, unit_of, units_below, units_of
from fsdp_ext.sharding.root.preparing import preparing
from fsdp_ext.sharding.root.step_checks import MeshRanks, compare_step
from fsdp_ext.sharding.root.unit import Unit
from fsdp_ext.sharding.root.unit_tree import UnitTree


class Root(UnitTree):
    """The units of one root module and the C++ schedule that they share.

    The first forward makes it, since the user has sharded everything by then.

    Args:
        module: the root module.
        is_provisional: whether it is made before the first forward, because the user calls
            unshard() on a unit. The root that runs forward first replaces it.
    """

    units: list[Unit]

    def __init__(self, module: nn.Module, *, is_provisional: bool = False) -> None:
        super().__init__(module)
        self.is_provisional = is_provisional
        self._needs_order_check = True  # of the first iteration's collectives
        # Identifies the reductions that a handle waits for; None without a pending handle.
        self.pending_reduction: object = None
        self._impl: _C.TorchRoot | None = None
        # What the next C++ side takes over from the last one.
        self._unreduced: list[unreduced.Unreduced] = []
        self._awaits_finalization = False
        # Units that the user has unsharded, and whether their unsharded parameters are registered.
        # It is right in a provisional root alone, because passes do not update it.
        self._unsharded: dict[Unit, bool] = {}
        self._check_units()
        self._placed: list[Sequence[Entry]] = []
        self._pending = PendingGradients()
        unsharded: dict[Unit, bool] = {}
        for provisional in dict.fromkeys(unit.root for unit in self.units if unit.root is not None):
            unsharded |= provisional._unsharded
            self._unreduced += provisional.give_up()
        self._make_lanes()
        first = self.units[0]
        names = (self.lanes.transport, (self.replicas or self.lanes).transport)
        self.link = link_of_buckets(
            names, first.settings.transport, first.world_size, first.replicas
        )
        self.decision: Decision | None = None
        self.settings = self.resolve(self.link, self.decision)
        self.mesh_ranks = MeshRanks(self._ranks(), first.ranks.size)
        self.checks = self._make_checks()
        self._build()
        self._put_unreduced()
        # From here on the root is in use. If anything above raises, the next forward starts over.
        for unit in self.units:
            unit.root = self
        check_again()  # each optimizer asks the lanes of its own roots
        for unit, is_registered in unsharded.items():
            if unit in self.units:
                self.unshard(unit)
                if is_registered:
                    self.wait_for_unshard(unit)

    def _check_units(self) -> None:
        names = [of_unit[0] for of_unit in self.module_names()]
        for unit, name in zip(self.units, names, strict=True):
            if unit.root is not None and not unit.root.is_provisional:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\n"
                    f"FSDP requires running forward through the root module first, but '{name}' "
                    "ran forward before, as a root of its own. Run the outermost sharded module "
                    "first."
                )
        if len(self.units[0].modules) > 1 and not self.is_provisional:
            raise RuntimeError(
                f"FSDP requires a single root module but got {len(self.units[0].modules)} modules, "
                "those of the unit that ran forward first. Call fully_shard on the module that "
                "contains them, too."
            )
        for unit, name in zip(self.units[1:], names[1:], strict=True):
            if unit.settings.finalizes_by_hand and not self.is_provisional:
                raise RuntimeError(
                    f"set_manual_backward_finalization was called on '{name}'. Call it on the root "
                    "module."
                )
        check_meshes(self.units, [name or "the root" for name in names])
        transports = {unit.settings.transport for unit in self.units}
        if len(transports) > 1:
            raise ValueError(
                f"the units under one root ask for {len(transports)} transports, "
                f"{' and '.join(sorted(map(repr, transports)))}. Pass the same one to each "
                "fully_shard."
            )

    def _make_lanes(self) -> None:
        """Make communicators for all groups of ranks, after ranks have compared these groups."""
        first = self.units[0]
        transport = between = first.settings.transport
        if isinstance(transport, Simulated):
            transport, between = transport.within_shard_group(), transport.between_replicas()
        replicas = first.ranks.replicate_group
        at_once = 2 if replicas is None else 4
        if first.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "A CUDA graph capture has the model's first forward, which makes communicators and "
                "buffers. Run a few whole steps before capturing one."
            )
        self.lanes = lanes_of(first.ranks.shard_group, first.device, transport, at_once=at_once)
        if has_peers(first):
            compare_groups(self.lanes, self.units, self.module_names())
        self.meshes = add_meshes(self.lanes, self.units)
        for ranks in sorted({unit.settings.reshard_group for unit in self.units} - {0}):
            add_group_lanes(self.lanes, first.ranks.shard_group, first.device, transport, ranks)
        # Lanes between replicas, which have the same shard: Note [replicas] in
        # csrc/core/reduce/reducer.h.
        self.replicas: _C.Lanes | None = None
        if replicas is not None:
            self.replicas = lanes_of(
                replicas, first.device, between, at_once=at_once, between_replicas=True
            )

    # - The C++ side

    @property
    def impl(self) -> _C.TorchRoot:
        """The C++ side. It exists whenever :attr:`is_built`."""
        assert self._impl is not None
        return self._impl

    @property
    def is_built(self) -> bool:
        """Whether the C++ side exists. A conversion may free it until the next use."""
        return self._impl is not None

    def phase(self) -> str:
        """Return which pass runs: "forward", "backward" or "idle"."""
        return "idle" if self._impl is None else self._impl.phase()

    def has_unreduced(self) -> bool:
        """Return whether there are gradients of backwards without gradient sync."""
        return bool(self._unreduced) if self._impl is None else self._impl.has_unreduced()

    def _build(self) -> None:
        """Make the C++ side for the parameters as they are now, and connect the hooks to it."""
        impl = _C.TorchRoot(
            lanes=self.lanes,
            replicas=self.replicas,
            prefetch_depth=self.settings.prefetch,
            nesting=self.nesting(),
            has_peers=has_peers(self.units[0]),
            check_order=self._needs_order_check,
            keeps_gather_inputs=self.keeps_gather_inputs(self.units[0].device.type),
            mesh_ranks=self.mesh_ranks.numbers,
            when_stale=weakref.WeakMethod(self._pre_forward_when_stale),
            checks=self.checks,
        )
        if self._needs_order_check:
            caller = "unshard" if self.is_provisional else "forward"
            with together(self.units[0], caller, "the building of units", impl.all_gather):
                impls = self._build_units(impl)
            self._compare_models(impl)
        else:
            impls = self._build_units(impl)
        configs = self.configs([unit_impl.layout for unit_impl in impls], self.meshes)
        for unit, unit_impl in zip(self.units, impls, strict=True):
            unit.bind(unit_impl)
        self._nest_units_of_one_module()
        for unit_impl, config in zip(impls, configs, strict=True):
            impl.add_unit(unit_impl, config)
        self._impl = impl
        self._placed = [unit.entries for unit in self.units]
        impl.set_is_last_backward(self.waits_for_reductions)
        # Last: if the above raised, the next forward starts over.
        if not self.is_provisional:
            for unit, unit_impl in zip(self.units, impls, strict=True):
                for hooks in unit.hooks.values():
                    hooks.connect(unit_impl)

    def _compare_models(self, impl: _C.TorchRoot) -> None:
        every, settings = self.units[0].settings.check_every, self.settings
        lines = [("the root", f"(transport={self.lanes.transport}, check_every={every})")]
        # Ranks of other meshes have other parameters.
        compared = [number for number, mesh in enumerate(self.meshes) if mesh == 0]
        for number in compared:
            unit = self.units[number]
            reshards = unit.settings.reshard_group or settings.reshard_after_forward[number]
            facts = (
                f"(bucket_bytes={settings.bucket_bytes[number]}, max_message_bytes="
                f"{settings.message_limits[number]}, reshard_after_forward={reshards})"
            )
            lines.append((f"unit '{without_wrappers(unit.name)}'", facts))
        units = [self.units[number] for number in compared]
        compare_models(units, lines, self.mesh_ranks, impl.all_gather)

    def _build_units(self, impl: _C.TorchRoot) -> list[_C.TorchUnit]:
        self._check_modules(impl)
        watch_optimizers_in_backward()
        names = {param: without_fsdp1(name) for name, param in self.module.named_parameters()}
        return [
            unit.build(self._name_of(unit, modules[0]), names)
            for unit, modules in zip(self.units, self.module_names(), strict=True)
        ]

    def _check_modules(self, impl: _C.TorchRoot) -> None:
        may_train = module_changes.check_parameters(self.module, self.units)
        module_changes.watch(self.module.modules())
        impl.accept_module_changes(may_train)

    def _name_of(self, unit: Unit, module_name: str) -> str:
        name = module_name or "the root"
        is_first = units_of(unit.modules[0])[0] is unit
        return name if is_first else f"{name} [{unit.ranks.world_size} ranks]"

    def _nest_units_of_one_module(self) -> None:
        """Let the hooks of each module run all its units."""
        for units in {tuple(units_of(unit.modules[0])) for unit in self.units}:
            for unit, inner in itertools.pairwise(units):
                assert unit.impl is not None
                assert inner.impl is not None
                unit.impl.enclose(inner.impl)

    @outside_of_transforms
    def rebuild(self) -> None:
        """Start over after parameters were replaced, converted, frozen or unfrozen."""
        replaced = self._impl
        if replaced is not None:
            replaced.refuse_after_capture()
            self._settle(replaced)
        self._needs_order_check = False
        self.settings = self.resolve(self.link, self.decision)
        if replaced is not None:
            self._take_over_from(replaced)
        try:
            self._build()
        finally:
            if self._impl is not replaced:
                if replaced is not None:
                    replaced.retire()  # a graph may own it, and must not run backward through it
            elif replaced is not None:
                self._unreduced = []  # the old impl keeps them
            else:
                for unit in self.units:
                    unit.impl = None  # some are bound already
        self.impl.set_awaits_finalization(self._awaits_finalization)
        self.impl.set_handle_pending(self.pending_reduction is not None)
        self._put_unreduced()

    def _settle(self, impl: _C.TorchRoot) -> None:
        """Reshard all units, after a pass that has failed, too."""
        impl.recover()
        self._settle_pending()
        for unit in self.units:
            self.reshard(unit)

    def _take_over_from(self, impl: _C.TorchRoot) -> None:
        """Keep what the next C++ side gets from this one."""
        self._unreduced = self._unreduced or unreduced.take(impl, self._placed)
        self._awaits_finalization = impl.awaits_finalization()

    def _put_unreduced(self) -> None:
        unreduced.put(self.impl, self._placed, self._unreduced)
        self._unreduced = []

    def give_up(self) -> list[unreduced.Unreduced]:
        """Reshard the units for another root, and return the gradients not reduced yet."""
        if self._impl is None:
            return self._unreduced
        self._settle_pending()
        for unit in self.units:
            self.reshard(unit)
        return unreduced.take(self.impl, self._placed)

    def invalidate(self) -> None:
        """Drop the C++ side, whose units have other parameters now. The next use makes it anew.

        This frees the old shards and all buffers, unless a pass or a graph still uses them. Then
        the next forward frees them.
        """
        if self._impl is None:
            return
        for unit in self.units:
            self.reshard(unit)
            if unit.impl is not None:
                unit.impl.release_gradients()  # this root's C++ side may outlive the call
                unit.impl = None
                for hooks in unit.hooks.values():
                    hooks.disconnect()
        impl = self._impl
        if impl.phase() == "idle" and not impl.is_needed_by_graph() and not self._shows_unreduced():
            self._settle(impl)
            self._take_over_from(impl)
            self._impl = None
            impl.retire()  # someone else may refer to it, such as a profile

    def _shows_unreduced(self) -> bool:
        """Return whether ``.grad`` has unsharded gradients, which their units keep track of."""
        numbers = range(len(self.units))
        return any(is_shown for number in numbers for is_shown, _ in self.impl.shown(number))

    @hidden_from_dynamo
    def _pre_forward_when_stale(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.impl.needs_new_units() or self._has_other_parameters():
            self.rebuild()
        else:  # some module was changed, or given an optimizer, perhaps in another model
            for each in self.units:
                each.let_optimizers_step()
            self._check_modules(self.impl)
        unit = unit_of(module)
        assert unit is not None
        assert unit.impl is not None
        return unit.impl.pre_forward_hook(unit.modules.index(module))(module, args, kwargs)

    def _has_other_parameters(self) -> bool:
        """Return whether parameters were replaced or converted since the C++ side was made."""
        return any(unit.impl is None or unit.has_changed() for unit in self.units)

    # - Checked steps

    def _ranks(self) -> list[int]:
        """Return the mesh's global ranks, group by group; without peers, this rank alone."""
        unit = self.units[0]
        ranks = unit.ranks.global_ranks
        return ranks if has_peers(unit) else [ranks[unit.ranks.rank_in_mesh]]

    def _make_checks(self) -> _C.StepChecks | None:
        every = self.units[0].settings.check_every
        if every is None:
            return None
        refuse_several_meshes(self.units, "check_every")
        return _C.StepChecks(every=every, compare=weakref.WeakMethod(self._compare_step))

    def _compare_step(self, step: int, numbers: list[list[int]]) -> None:
        every = self.units[0].settings.check_every
        assert every is not None
        names = [unit.name for unit in self.units]
        compare_step(step, every, numbers, names, self.mesh_ranks, self.impl.all_gather)

    # - Settings

    def decide(self, decision: Decision | None) -> None:
        """Run with ``decision`` from the next forward on. None stands for the defaults."""
        self.decision = decision
        self.resolve_again()
        self.apply(self.units)

    def resolve_again(self) -> None:
        """Resolve the settings after a decision, or a change of ``reshard_after_forward``.

        The caller applies the settings of units.
        """
        self.settings = self.resolve(self.link, self.decision)
        if self._impl is not None:
            self._impl.set_prefetch_depth(self.settings.prefetch)

    def apply(self, units: Iterable[Unit]) -> None:
        """Tell the schedule the settings of ``units`` of this root, from the next use on."""
        for unit in units:
            number = self.number(unit)
            if self._impl is None:
                self.core_settings(number, unit.grad_dtypes()[1])  # raises if one is not supported
            else:
                dtype = self._impl.layout_of(number).reduce_dtype
                self._impl.apply(number, self.core_settings(number, dtype))

    def _numbers_of(self, targets: Sequence[ParamGroup]) -> list[int]:
        """Return the units' numbers, without units that a provisional root does not have."""
        return [
            self.number(target)
            for target in targets
            if not self.is_provisional or target in self.units
        ]

    def core_settings(self, number: int, reduce_dtype: torch.dtype) -> _C.UnitSettings:
        """Return all C++ settings of one unit."""
        settings = super().core_settings(number, reduce_dtype)
        unit = self.units[number]
        asked = unit.settings
        # Note [after an evaluation] in csrc/core/gather/unit_gather.h
        casts_anew = asked.shows_accumulated and unit.world_size == 1  # FSDP1's NO_SHARD
        settings.keeps_slot_after_evaluation = (
            asked.reshard_after_forward is False and not casts_anew
        )
        settings.unshards_in_backward = asked.unshard_in_backward
        settings.requires_gradient_sync = asked.requires_gradient_sync and (
            asked.requires_all_reduce or unit.replicas == 1
        )
        settings.reduces_unused = asked.reduce_scatter_unused_params
        settings.is_summoned = unit.is_summoned
        settings.forward_prefetch = self._numbers_of(unit.forward_prefetch)
        settings.backward_prefetch = self._numbers_of(unit.backward_prefetch)
        if asked.update is not None:
            settings.update = unit.core_update()
        if asked.has_hook:
            self._set_hooks(settings, unit)
        return settings

    def _set_hooks(self, settings: _C.UnitSettings, unit: Unit) -> None:
        if (hook := unit.settings.all_reduce_hook) is not None:
            settings.reduce_hook = unit.core_hook("reduce", hook.run)
        if (communication := unit.settings.communication_hook) is not None:
            settings.communication_hook = unit.core_hook("communication", communication.run)
        if (gather := self._custom_collective(unit, "custom_all_gather")) is not None:
            settings.gather_hook = unit.core_hook("gather", gather.gather)
        if (reduce := self._custom_collective(unit, "custom_reduce_scatter")) is not None:
            settings.scatter_hook = unit.core_hook("scatter", reduce.reduce)

    def _custom_collective(self, unit: Unit, setting: str) -> CustomCollective | None:
        """Return the runner of the user's collective, shared by units, and keep it with the unit.

        Queued work keeps replaced objects alive.
        """
        comm = getattr(unit.settings, setting)
        before = unit.collectives.pop(setting, None)
        if comm is None or unit.ranks.size == 1:
            return None
        if not has_peers(unit):
            raise UnsupportedError(
                f"unit '{unit.name}' has a {setting}, which cannot run on simulated ranks. Leave "
                f"set_{setting} out."
            )
        if setting == "custom_all_gather" and unit.settings.reshard_group > 0:
            raise UnsupportedError(
                f"unit '{unit.name}' has a custom_all_gather, which is not supported with "
                f"reshard_after_forward={unit.settings.reshard_group}. Pass True or False."
            )
        group = group_beside(unit.ranks.shard_group, unit.device, setting)
        of_units = (before, *(other.collectives.get(setting) for other in self.units))
        alike = (c for c in of_units if c is not None and c.comm is comm and c.group is group)
        found = next(alike, None) or CustomCollective(comm, group)
        unit.collectives[setting] = found
        return found

    @property
    def waits_for_reductions(self) -> bool:
        """Whether a backward waits for the reductions of gradients at its end.

        On the host, every backward waits. FSDP2's collectives block there, so users may read
        gradients after any backward.
        """
        settings = self.units[0].settings
        is_waited = settings.is_last_backward or self.units[0].device.type == "cpu"
        return is_waited and not settings.finalizes_by_hand

    def change(self, **settings: bool) -> None:
        """Change settings that belong to the root alone."""
        self.units[0].change(**settings)
        if self._impl is not None:
            self._impl.set_is_last_backward(self.waits_for_reductions)

    def reduce_accumulated(self, *, wait: bool) -> None:
        """Reduce the gradients that backwards without gradient sync have accumulated.

        If ``wait``, the current stream waits for all reductions, earlier ones, too.
        """
        if self.phase() == "idle" and self._has_other_parameters():
            self.rebuild()
        self._settle_pending()
        self.impl.set_is_last_backward(wait)
        try:
            self.impl.reduce_accumulated()
        finally:
            self.impl.leave_if_idle()
            self.impl.set_is_last_backward(self.waits_for_reductions)

    def has_open_backward(self) -> bool:
        """Return whether reductions of earlier backwards are not waited for."""
        awaits = self._awaits_finalization
        if self._impl is not None:
            awaits = self._impl.awaits_finalization()
        return self.pending_reduction is not None or awaits

    def leave_reduction_pending(self) -> object:
        """Let a handle wait for the reductions later. Return a token that identifies them."""
        self.pending_reduction = object()
        self.impl.set_handle_pending(True)
        return self.pending_reduction

    def wait_for_pending(self, reduction: object) -> None:
        """Make the current stream wait for reductions.

        Raises:
            RuntimeError: if they were dropped.
        """
        if reduction is not self.pending_reduction:
            raise RuntimeError(
                "wait was called on a handle of gradient reductions that reset_iter_state has "
                "dropped. Run the step again."
            )
        if self._impl is not None:  # else the host has waited for them
            self._impl.wait_for_reductions()
            self._impl.leave_if_idle()
        self.pending_reduction = None

    def reset_iteration(self) -> None:
        """Reshard all units and drop unreduced gradients."""
        self.pending_reduction = None
        self._unsharded.clear()
        if self._impl is not None:
            self._impl.reset_iteration()
        for each in self._unreduced:
            each.param.awaits_reduction = False
        self._unreduced, self._awaits_finalization = [], False

    def synchronize_gradients(self, units: Iterable[Unit]) -> None:
        """Reduce accumulated gradients of ``units`` of this root alone, whatever their settings."""
        if self.phase() == "idle" and self._has_other_parameters():
            self.rebuild()
        asked = set(units)
        try:
            for number, unit in enumerate(self.units):
                dtype = self.impl.layout_of(number).reduce_dtype
                settings = self.core_settings(number, dtype)
                settings.requires_gradient_sync = unit in asked
                self.impl.apply(number, settings)
            self.reduce_accumulated(wait=True)
        finally:
            self.apply(self.units)

    def pending_gradients(self, unit: Unit) -> dict[nn.Parameter, torch.Tensor]:
        """Return the accumulated gradients of ``unit``, by sharded parameter.

        In-place changes take effect until the next backward begins.
        """
        if self._impl is None:
            if not self._unreduced:
                return {}
            self.rebuild()
        number = self.number(unit)
        pending = self._pending.of(self.impl, number, self._placed[number])
        if pending:
            self.impl.set_before_backward(weakref.WeakMethod(self._settle_pending))
        return pending

    def _settle_pending(self) -> None:
        if self._impl is not None:
            self._pending.settle(self._impl)
            self._impl.set_before_backward(None)

    # - unshard() and reshard(), called by the user

    def reshard(self, unit: Unit) -> None:
        """Free the unit's unsharded parameters and register the sharded ones."""
        self._unsharded.pop(unit, None)
        if self._impl is not None:
            self._impl.reshard(self.number(unit))

    def forget(self, unit: Unit) -> None:
        """Have the next gather of the unit's bucket read the sharded parameters of all ranks.

        Otherwise a gather in the same iteration could reuse parameters that a slot or a smaller
        group of ranks still holds, because no version shows that the sharded ones have changed.
        """
        if self._impl is not None:
            self._impl.invalidate(self.number(unit))

    def unshard(self, unit: Unit) -> None:
        """Issue the gather of the unit's parameters."""
        self.impl.unshard(self.number(unit))
        self._unsharded.setdefault(unit, False)

    def wait_for_unshard(self, unit: Unit) -> None:
        """Make the current stream wait for the gather, and register the unsharded parameters."""
        if self._impl is not None:
            self._impl.wait_for_unshard(self.number(unit))
            if unit in self._unsharded:
                self._unsharded[unit] = True


@outside_of_transforms
def prepare_forward(unit: Unit, module: nn.Module) -> None:
    """Make the C++ side of ``unit`` before a forward of ``module``, and the root if need be."""
    with preparing(_units_with(unit, module)):
        if unit.root is None or unit.root.is_provisional:
            Root(module)
        elif unit.impl is None:
            unit.root.rebuild()


def ensure_root(unit: Unit) -> Root:
    """Return the root of ``unit``, a provisional one before the first forward.

    The C++ side of the unit exists afterwards.
    """
    with preparing(_units_with(unit, unit.modules[0])):
        if unit.root is None:
            Root(unit.modules[0], is_provisional=True)
        elif unit.impl is None:
            unit.root.rebuild()
    root: Root = unit.root
    root.impl.leave_if_idle()
    return root


def _units_with(unit: Unit, module: nn.Module) -> Sequence[Unit]:
    """Return the units of the root that ``unit`` has, or gets if ``module`` runs forward."""
    if unit.root is not None and not unit.root.is_provisional:
        units: Sequence[Unit] = unit.root.units
        return units
    return units_below(module)


def abandon_forward(unit: Unit) -> None:
    """Register sharded parameters again after an exception in the forward of ``unit``.

    Nothing happens if the forward of another unit encloses it.
    """
    if unit.root is not None and unit.impl is not None:
        unit.root.impl.abandon_forward(unit.root.number(unit))


def running_root(model: nn.Module, caller: str) -> Root:
    """Return the root of a model that has run forward, a sharded module or FSDP1's wrapper."""
    unit = unit_of(sharded_module(model)) if isinstance(model, nn.Module) else None
    if unit is None:
        raise TypeError(
            f"{caller} got a {type(model).__name__} that fully_shard was not applied to. Pass the "
            "root module of a sharded model."
        )
    if unit.root is None or unit.impl is None:
        raise RuntimeError(
            f"{caller} needs a model that has run forward. Run a step before, or two if buckets "
            "should follow the order of forward."
        )
    root: Root = unit.root
    return root
