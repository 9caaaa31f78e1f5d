"""One unit in Python: its parameters as sharded DTensors over one flat shard.

Everything here runs before training or between steps. ``csrc/torch`` has the code that runs in a
step.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_ext import _C
from fsdp_ext.comm.transports import zeros_for_shard
from fsdp_ext.sharding.params.checked_optimizers import check_again
from fsdp_ext.sharding.params.dtensors import (
    GradientPlace,
    Spread,
    gradient_maker,
    part_of_this_rank,
    shards_of,
)
from fsdp_ext.sharding.params.entries import (
    Entry,
    GatherInput,
    OwnRows,
    ShardedParam,
    bound_objects,
    gradient_places,
    lies_in,
    wait_for_arrival,
)
from fsdp_ext.sharding.params.extensions import (
    Extension,
    check_can_extend,
    place_extensions,
)
from fsdp_ext.sharding.params.flat_parameter import FlatParameter, registered
from fsdp_ext.sharding.params.module_attributes import set_parameter, swapped_attribute
from fsdp_ext.sharding.params.optimizer_in_backward import (
    let_backward_step,
    refuse_unsharded_with_optimizer,
)
from fsdp_ext.sharding.params.ownership import (
    asked_grad_dtype,
    check_grad_dtype,
    check_parameter,
    check_tensor_parallel,
    is_extension,
    keeps_own_rows,
    mark_goes_on_as,
    mark_owned,
    mark_sharded,
    quantization_of,
    refuse_class,
    unsharded_name,
)
from fsdp_ext.sharding.params.param_group import ParamGroup, check_can_cast, keeps_dtype
from fsdp_ext.sharding.params.ranks import Ranks
from fsdp_ext.sharding.params.settings import UnitSettings
from fsdp_ext.sharding.params.user_hooks import CustomCollective, on_stream

_alive: weakref.WeakSet[Unit] = weakref.WeakSet()
# By the id of the sharded parameter, which may have another owner since.
_owners: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()


def units_alive() -> list[Unit]:
    """Return all units of the process, in no particular order."""
    return list(_alive)


def owners_of(units: Iterable[Unit]) -> dict[nn.Parameter, Unit]:
    """Return the unit of each parameter that an optimizer may have."""
    owners = {param.sharded: unit for unit in units for param in unit.params}
    flat = {unit.flat_param.param: unit for unit in owners.values() if unit.flat_param is not None}
    return {**owners, **flat}


def _shows(attribute: tuple[nn.Module, str], param: ShardedParam) -> bool:
    """Return whether a module's attribute refers to the parameter, sharded or unsharded."""
    now = registered(*attribute)
    return now is param.sharded or (now is not None and unsharded_name(now) is not None)


def _is_in_use(sharded: nn.Parameter, besides: Unit) -> bool:
    """Return whether modules of another unit have the sharded parameter."""
    owner = _owners.get(id(sharded))
    return (
        owner is not None
        and owner.sharded is sharded
        and not any(param is owner for param in besides.params)
        and any(_shows(attribute, owner) for attribute in owner.attributes)
    )


class Unit(ParamGroup):
    """The parameters of one ``fully_shard`` call that are in no other unit.

    ``shard_dims`` has the sharded dimension of those that are not sharded on dimension 0.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        params: dict[nn.Parameter, str],
        shard_dims: Mapping[nn.Parameter, int],
        ranks: Ranks,
        device: torch.device,
        settings: UnitSettings,
    ) -> None:
        super().__init__(type(modules[0]).__name__, ranks.size, settings, ranks.replicas)
        self.modules = modules
        self.ranks = ranks
        self.device = device
        # The Root that runs this unit, from the first forward on, and the ForwardHooks of modules,
        # none if those of another unit run this one. Their files import this file, so the types
        # cannot be named here.
        self.root: Any = None
        self.hooks: dict[nn.Module, Any] = {}
        # The _comm_ctx that views show to PyTorch's code; they make it.
        self.comm_context: object = None
        self.impl: _C.TorchUnit | None = None
        # Whether the modules have whole parameters, by FSDP1's summon_full_params or apply.
        self.is_summoned = False
        # The objects that run the user's collectives, by the name of the setting.
        self.collectives: dict[str, CustomCollective] = {}
        self._core_hooks: dict[str, tuple[weakref.WeakMethod[Any], _C.UserCollective]] = {}
        # Modules and the names of their attributes that were passed as ignored_params.
        self.ignored: set[tuple[nn.Module, str]] = set()
        # The flat parameter under FSDP1's use_orig_params=False: Note [flat parameters in Python].
        self.flat_param: FlatParameter | None = None
        self.shard_device = torch.device("cpu") if settings.offloads else device
        self.pins_memory = settings.offloads and device.type == "cuda"
        self.flat_shard = torch.empty(0, dtype=torch.uint8, device=self.shard_device)
        # Each entry's part of the flat shard. See Note [own storages] in csrc/torch/flat_tensor.h.
        self.shard_parts: list[torch.Tensor] = []
        # Objects outside that refer to the flat shard or gradient, such as FlatRuns of optimizers.
        # free() of each is called when the unit gets another flat shard.
        self.flat_readers: weakref.WeakSet[Any] = weakref.WeakSet()
        # The inputs of extensions; empty until the C++ side is made: Note [tensor extensions].
        self.inputs: list[GatherInput] = []
        self._extensions: list[Extension] = []
        for param, name in params.items():
            check_parameter(name, param, device)
            check_tensor_parallel(name, param, ranks)
        # Sharded replacements by original parameter, until take_parameters puts them in.
        self._replacements = {
            param: self._shard(param, name, shard_dims.get(param, 0))
            for param, name in params.items()
        }
        sharded = list(self._replacements.values())
        # Reductions are checked at the first forward, since parameters may still be frozen.
        self.check_message_bytes(sharded, settings.message_bytes[0])
        self.params: list[ShardedParam] = sharded
        self._param_of: dict[tuple[nn.Module, str], ShardedParam] = {}  # by attribute
        self._place_in_flat_shard(loading=True)  # some may be on meta
        _alive.add(self)

    @property
    def entries(self) -> Sequence[Entry]:
        """The parameters and the inputs of extensions, in the layout's order."""
        if not self.inputs:
            return self.params
        entries: list[Entry] = [*self.params, *self.inputs]
        return [entries[index] for index in self._layout_order(entries)]

    def change(self, **settings: Any) -> None:
        """Replace settings of this unit. :meth:`Root.apply` passes them to the schedule."""
        changed = copy.copy(self.settings)  # dataclasses.replace() takes three times as long
        vars(changed).update(settings)
        self.settings = changed

    def core_hook(self, kind: str, run: Callable[..., None]) -> _C.UserCollective:
        """Return the C++ hook that calls the method ``run``.

        The hook lives as long as the method, because it holds an error until a wait. It must not
        keep the user's function, which may refer to the model.
        """
        kept = self._core_hooks.get(kind)
        # Methods are equal only if they belong to the same object.
        if kept is None or kept[0]() != run:
            method = weakref.WeakMethod(run)
            kept = self._core_hooks[kind] = (method, _C.UserCollective(method, self.device))
        return kept[1]

    def core_update(self) -> _C.UnitUpdate:
        """Return the C++ hook that steps this unit's parameters in backward."""
        update = self.settings.update
        measures = update is not None and update.measure is not None
        return _C.UnitUpdate(weakref.WeakMethod(self._update), measures)

    def _update(self, handle: int, measures: bool) -> None:
        update = self.settings.update
        if update is None:
            return
        with on_stream(self.device, handle, None):
            if not measures:
                update.step()
            elif update.measure is not None:
                update.measure(self)

    # - Sharding

    @torch.inference_mode(False)
    @torch.no_grad()
    def _shard(self, param: nn.Parameter, name: str, dim: int) -> ShardedParam:
        """Return a sharded parameter with this rank's shard, on meta if the parameter is there."""
        part = part_of_this_rank(param)
        spread = shards_of(param, self.ranks, dim)
        own = quantization = None
        if keeps_own_rows(name, part):
            check_can_extend(name, part, dim, self.settings)
            own = OwnRows.of(part, name, self.ranks, self.device)
            dtensor = spread.wrap(own.local)
        else:
            dtensor = spread.dtensor(self._rows_of(part, dim))
            quantization = quantization_of(param)
        sharded = nn.Parameter(dtensor, requires_grad=param.requires_grad)
        grad_dtype = asked_grad_dtype(param)
        if grad_dtype is not None:
            sharded.grad_dtype = grad_dtype
        if quantization is not None and not param.is_meta:
            quantization.to(self.device)  # as the numbers
        policy = self.settings.mp_policy
        keeps = quantization is not None or keeps_dtype(policy, name, param)
        if own is None and not keeps:
            check_can_cast(policy, name, part)
        before = Spread.of(param, self.ranks)
        return ShardedParam(
            name, part.shape, sharded, dim, spread, before, keeps, own, quantization=quantization
        )

    def _rows_of(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Copy this rank's rows to the device of shards. Rows on meta stay there."""
        first, count = self._range(part.shape, dim)
        # A view would keep the whole parameter in memory, and give the DTensor its offset.
        rows = part.narrow(dim, first, count).clone(memory_format=torch.contiguous_format)
        return rows if rows.is_meta else rows.to(self.shard_device)

    def take_parameters(self) -> None:
        """Put the sharded parameters into the modules, which are unchanged until then."""
        by_param, self._replacements = self._replacements, {}
        for module in self.modules:
            for submodule in module.modules():
                for attribute, value in submodule._parameters.items():
                    found = by_param.get(value) if value is not None else None
                    if found is not None and (submodule, attribute) not in found.attributes:
                        found.attributes.append((submodule, attribute))
                        self._param_of[submodule, attribute] = found
        for param, found in by_param.items():
            for submodule, attribute in found.attributes:
                set_parameter(submodule, attribute, found.sharded)
                if found.quantization is not None:
                    # bitsandbytes would convert it into memory of its own, outside of the slot.
                    submodule.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
            mark_sharded(param, found.sharded, found.name, self.name)
            _owners[id(found.sharded)] = found

    def _range(self, shape: torch.Size, dim: int) -> tuple[int, int]:
        """Return where this rank's shard begins in dimension ``dim``, and its size there."""
        chunk = -(-shape[dim] // self.world_size)
        first = min(chunk * self.ranks.rank, shape[dim])
        return first, min(chunk, shape[dim] - first)

    @torch.inference_mode(False)
    @torch.no_grad()
    def flatten(self, *, loading: bool = False) -> bool:
        """Make the sharded parameters views of one flat shard again.

        ``module.to()``, ``to_empty`` and ``load_state_dict(assign=True)`` give the modules other
        tensors or other parameters. Their rows are copied into a new flat shard, unless they all
        lie in the present one already.

        Args:
            loading: whether modules are being loaded one after another. If so, nothing is copied
                while some parameters are on another device than the rest, or those of an offloaded
                unit on a GPU. The next forward raises if they still are.

        Returns:
            Whether anything changed. If so, the C++ side has to be made anew.
        """
        if self.is_summoned:
            return False
        if self.flat_param is not None:
            self.flat_param.adopt()
        is_tied = self._merge_tied()
        replaced = self._adopt_all(self.params, loading=loading)
        return self._place_in_flat_shard(loading=loading) or replaced or is_tied

    @torch.inference_mode(False)
    @torch.no_grad()
    def _place_in_flat_shard(self, *, loading: bool) -> bool:
        """Copy the sharded parameters into a new flat shard unless all lie in the present one.

        See :meth:`flatten`. Returns whether anything changed.
        """
        # The order depends on which parameters are gathered.
        self.params = [self.params[index] for index in self._layout_order(self.params)]
        layout = self.layout_for(training=False)
        entries = self.entries
        if self._is_flat(entries, layout):
            return False
        devices = {param.local.device.type for param in self.params}
        if loading and len(devices) > 1:
            return True
        if len(devices) > 1:
            on_meta = [param.name for param in self.params if param.local.is_meta]
            advice = (
                f"of which {on_meta} are on meta. Materialise all of them with to_empty(device=...)"
                if on_meta
                else "which have to be on one device. Move them by module.to(device)"
            )
            raise RuntimeError(f"unit '{self.name}' has parameters on {sorted(devices)}, {advice}.")
        device = next((param.local.device for param in self.params), self.shard_device)
        if self.settings.offloads and device.type not in ("cpu", "meta"):
            if loading:
                return True  # as by FSDP2: the module may be moved to the host before it is used
            raise RuntimeError(
                f"unit '{self.name}' is offloaded to the host, but its parameters are on {device}. "
                'Move them back by module.to("cpu"), or materialise them by '
                'module.to_empty(device="cpu").'
            )
        flat = zeros_for_shard(
            layout.shard_bytes,
            device,
            self.ranks.shard_group,
            self.settings.transport,
            pin_memory=self.pins_memory and device.type == "cpu",
        )
        parts = self._parts_of(flat, entries, layout)
        before = self.flat_shard.device if self.flat_shard.is_cuda else self.device
        wait_for_arrival(device, before)
        for entry, part in zip(entries, parts, strict=True):
            if isinstance(entry, ShardedParam) and entry.is_gathered:
                if not entry.local.is_meta:
                    part.copy_(entry.local)
                entry.sharded._local_tensor = part  # type: ignore[attr-defined]
        self.flat_shard, self.shard_parts = flat, parts
        for reader in list(self.flat_readers):
            reader.free()
        if self.flat_param is not None:
            self.flat_param.follow()
        return True

    def attributes(self) -> list[tuple[nn.Module, str]]:
        """Return the modules and names of all attributes that refer to its parameters."""
        return [attribute for param in self.params for attribute in param.attributes]

    def clear_gradients(self) -> None:
        """Set ``.grad`` of its sharded, unsharded and flat parameters to None."""
        for param in self.params:
            param.sharded.grad = None
            if param.whole is not None:
                param.whole.grad = None
        if self.flat_param is not None:
            self.flat_param.param.grad = None

    def phase(self) -> str:
        """Return which pass of its model runs: "forward", "backward" or "idle"."""
        if self.root is None or self.impl is None:
            return "idle"
        phase: str = self.root.phase()
        return phase

    def has_changed(self) -> bool:
        """Return whether an attribute refers to another parameter than when it was sharded."""
        if self.is_summoned:
            return False
        if self.flat_param is not None and self.flat_param.is_replaced():
            return True
        return not all(
            _shows(attribute, param) for param in self.params for attribute in param.attributes
        )

    def _merge_tied(self) -> bool:
        """Merge parameters that the user has tied; return whether there were any."""
        by_sharded = {param.sharded: param for param in self.params}
        tied = False
        for param in self.params:
            for attribute in list(param.attributes):
                other = by_sharded.get(registered(*attribute), param)
                if other is not param:
                    param.attributes.remove(attribute)
                    other.attributes.append(attribute)
                    self._param_of[attribute] = other
                    tied = True
        if tied:
            self.params = [param for param in self.params if param.attributes]
        return tied

    @torch.inference_mode(False)
    @torch.no_grad()
    def adopt(self, attributes: Iterable[tuple[nn.Module, str]]) -> bool:
        """Adopt the parameters that ``load_state_dict`` has given to some of the attributes.

        Their rows stay where they are until :meth:`build`, which moves the whole unit at once.

        Returns:
            Whether the C++ side has to be made anew.
        """
        if self.is_summoned:
            return False
        self._adopt_all([self._param_of[attribute] for attribute in attributes], loading=True)
        return True

    def _adopt_all(self, params: Sequence[ShardedParam], *, loading: bool) -> bool:
        """Adopt the parameters that modules have now. Return whether any was replaced."""
        try:
            replaced = [self._adopt(param, loading) for param in params]
        except ValueError:
            for param in params:  # so that the model is as it was before
                self._register(param)
            raise
        return any(replaced)

    def _adopt(self, param: ShardedParam, loading: bool) -> bool:
        """Adopt the parameter that the module has now. Return whether it was replaced.

        ``load_state_dict(assign=True)`` gives each attribute of a tied parameter one of its own.
        They stay tied, to the first.
        """
        now = param.registered()
        if now is not param.sharded:
            self._check_replacement(param, now)
        local_shape = list(param.shape)
        _, local_shape[param.shard_dim] = self._range(param.shape, param.shard_dim)
        shape = param.spread.shape
        if now.shape != shape or list(now._local_tensor.shape) != local_shape:
            raise ValueError(
                f"parameter '{param.name}' had shape {tuple(shape)}, {tuple(local_shape)} on this "
                f"rank, when it was sharded, but now has {tuple(now.shape)} with local shape "
                f"{tuple(now._local_tensor.shape)}. Change shapes before fully_shard."
            )
        replaced = now is not param.sharded
        if replaced:
            self._check_unowned(param, now)
            mark_goes_on_as(param.sharded, now)
            mark_owned(now, self.name)
            grad_dtype = asked_grad_dtype(param.sharded)
            if grad_dtype is not None and asked_grad_dtype(now) is None:
                now.grad_dtype = grad_dtype
            check_again()
            param.sharded = now
            _owners[id(now)] = param
        if replaced or (loading and self._is_untied(param)):
            self._register(param)
            replaced = True
        return self._adopt_own_rows(param) or replaced

    def _check_replacement(self, param: ShardedParam, now: object) -> None:
        """Raise ValueError if the parameter cannot be replaced by ``now``."""
        if not (isinstance(now, nn.Parameter) and isinstance(now, DTensor)):
            raise ValueError(
                f"parameter '{param.name}' was replaced by a {type(now).__name__} after "
                "fully_shard had made a DTensor of it. Replace parameters before fully_shard."
            )
        if tuple(now.placements) != param.spread.placements:
            raise ValueError(
                f"parameter '{param.name}' has the placements {param.spread.placements}, and "
                f"was replaced by a DTensor with {tuple(now.placements)}. Redistribute that, "
                "or load it without assign=True."
            )

    def _check_unowned(self, param: ShardedParam, now: nn.Parameter) -> None:
        """Raise ValueError if ``now``, which replaces the parameter, is in use in another unit."""
        if not _is_in_use(now, besides=self):
            return
        gc.collect()  # else a deleted model might be there on some ranks alone
        if _is_in_use(now, besides=self):
            raise ValueError(
                f"parameter '{param.name}' was replaced by a parameter that another unit still "
                "has, and each unit needs memory of its own. To tie parameters, do so before "
                "fully_shard, and pass both modules in one call: fully_shard([a, b]). Otherwise "
                "replace it by a clone: nn.Parameter(other.detach().clone())."
            )

    def _adopt_own_rows(self, param: ShardedParam) -> bool:
        """Follow the class and the methods of a parameter's rows. Return whether they changed."""
        was_gathered = param.is_gathered
        if not keeps_own_rows(param.name, param.local):
            param.own = None
            return not was_gathered
        if param.own is None:
            check_can_extend(param.name, param.local, param.shard_dim, self.settings)
            most = -(-param.shape[0] // self.world_size)
            param.own = OwnRows(torch.Size([most, *param.shape[1:]]), torch.empty(0))
        return param.own.adopt(param.sharded)

    def _register(self, param: ShardedParam) -> None:
        """Let all modules have a sharded parameter."""
        flat = self.flat_param
        for module, name in param.attributes:
            if flat is not None:
                flat.home(module)[name] = param.sharded
            elif registered(module, name) is not param.sharded:
                set_parameter(module, name, param.sharded)

    def _is_untied(self, param: ShardedParam) -> bool:
        """Return whether an attribute has another DTensor than the first, as after loading."""
        values = [registered(module, name) for module, name in param.attributes]
        return any(isinstance(value, DTensor) and value is not values[0] for value in values)

    def _is_flat(self, entries: Sequence[Entry], layout: _C.UnitLayout) -> bool:
        if self.flat_shard.numel() != layout.shard_bytes or len(self.shard_parts) != len(entries):
            return False
        return all(
            lies_in(entry, part, self.flat_shard, place.shard_offset)
            for entry, part, place in zip(entries, self.shard_parts, layout.placements, strict=True)
        )

    def _parts_of(
        self,
        flat: torch.Tensor,
        entries: Sequence[Entry],
        layout: _C.UnitLayout,
    ) -> list[torch.Tensor]:
        """Return each entry's part of a flat shard, without values on meta."""
        kinds = [entry.shape_and_dtype_of_part for entry in entries]
        if flat.is_meta:
            return [torch.empty(shape, dtype=dtype, device=flat.device) for shape, dtype in kinds]
        return [
            _C.FlatTensor.part_of(flat, place.shard_offset, shape, dtype)
            for (shape, dtype), place in zip(kinds, layout.placements, strict=True)
        ]

    def let_optimizers_step(self) -> None:
        """Let backward step the optimizers that parameters were given for that."""
        if self.flat_param is not None:
            self.flat_param.refuse_optimizer_in_backward()
        for param in self.params:
            refuse_unsharded_with_optimizer(param.whole)
            let_backward_step(param.sharded)

    # - The C++ side

    @torch.inference_mode(False)  # training may follow a first forward in inference mode
    @torch.no_grad()
    def build(self, name: str, names: dict[nn.Parameter, str]) -> _C.TorchUnit:
        """Return a C++ unit for the parameters as they are now. :meth:`bind` takes it into use."""
        self.name = name
        self.flatten()
        if self.flat_param is not None:
            self.flat_param.freeze()
        for param in self.params:
            if self.flat_param is None:
                param.note_freezing()
            param.name = names.get(param.sharded, param.name)
            check_grad_dtype(param.name, param.sharded, is_extension=not param.is_gathered)
        self.let_optimizers_step()
        on_meta = [param.name for param in self.params if param.local.is_meta]
        if on_meta:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: {on_meta}. Call "
                "module.to_empty(device=...) and initialise them before the first forward."
            )
        if self.flat_shard.device != self.shard_device:
            raise RuntimeError(
                f"unit '{self.name}' runs on {self.device}, but its shards are on "
                f"{self.flat_shard.device}. Move them by module.to({str(self.shard_device)!r})."
            )
        self._extensions = self._find_extensions()
        return self._make_impl(self.layout_for(training=True))

    def _make_impl(self, layout: _C.UnitLayout) -> _C.TorchUnit:
        """Make the C++ unit, which has no parameters of Python yet."""
        policy = self.settings.mp_policy
        flat_gradient = torch.empty(
            layout.gradient_bytes,
            dtype=torch.uint8,
            device=self.shard_device,
            pin_memory=self.pins_memory,
        )
        return _C.TorchUnit(
            layout=layout,
            shard=_C.FlatTensor(self.flat_shard, self.shard_parts),
            flat_gradient=flat_gradient,
            parameters=[self._unit_parameter(entry) for entry in self.entries],
            device=self.device,
            cast_inputs=policy.param_dtype if policy.cast_forward_inputs else None,
            cast_outputs=policy.output_dtype,
            module_count=len(self.modules),
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def bind(self, impl: _C.TorchUnit) -> None:
        """Give the C++ unit its parameters, what makes their gradients, and their attributes.

        The unsharded parameters leave the C++ unit that they belonged to, so call this once no
        setting can be refused any more.
        """
        entries, views = self.entries, impl.unsharded_views()
        params = [entry if isinstance(entry, ShardedParam) else None for entry in entries]
        objects = [bound_objects(param, view) for param, view in zip(params, views, strict=True)]
        flat = self.flat_param
        places = gradient_places(params, impl.layout, self.grad_dtype)
        if flat is not None and places:
            dtype = places[0].dtype
            whole = torch.Size([impl.layout.gradient_bytes // dtype.itemsize])
            places = [GradientPlace(0, whole, dtype, None)]
        impl.bind(
            objects=objects,
            make_gradients=gradient_maker(places),
            extensions=place_extensions(self._extensions, entries, self.shard_parts, views),
            flat_parameter=None if flat is None else flat.param,
            attributes=[
                swapped_attribute(
                    module,
                    attribute,
                    index,
                    is_plain=flat is not None,
                    may_call_setattr=self.settings.calls_setattr,
                )
                for index, param in enumerate(params)
                if param is not None
                for module, attribute in param.attributes
            ],
        )
        if self.settings.shows_accumulated:
            spreads = {i: param.spread for i, param in enumerate(params) if param is not None}
            impl.show_accumulated(lambda index, gradient: spreads[index].dtensor(gradient))
        self.impl = impl

    def _unit_parameter(self, entry: Entry) -> _C.UnitParameter:
        if isinstance(entry, GatherInput):
            return _C.UnitParameter(entry.shape_in_slot, entry.input_dtype, is_input=True)
        return _C.UnitParameter(
            entry.shape_in_slot, self.compute_dtype(entry), toggles=entry.toggles
        )

    def _find_extensions(self) -> list[Extension]:
        """Return the extensions, with places for their inputs in the flat shard."""
        policy = self.settings.mp_policy
        extended = [param for param in self.params if not param.is_gathered]
        for param in extended:
            if not is_extension(param.name, param.local):
                refuse_class(param.name, param.local)
        extensions = [
            Extension(param, self.ranks, policy, self.compute_dtype(param)) for param in extended
        ]
        had_inputs = bool(self.inputs)
        self.inputs = [each for extension in extensions for each in extension.inputs]
        if had_inputs or self.inputs:
            self.flatten()
        return extensions
