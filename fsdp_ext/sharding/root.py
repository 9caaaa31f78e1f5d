"""All units under one root module, from the first forward on."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp_ext import _C
from fsdp_ext.comm.costs import default_bucket_bytes, log_default, typical_link
from fsdp_ext.comm.lanes import lanes_of
from fsdp_ext.sharding.settings import AUTO, Choice, chosen_for
from fsdp_ext.sharding.unit import Unit

# Gathers in flight ahead of the unit that runs, as FSDP2 has it.
DEFAULT_PREFETCH = 1


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that ``fully_shard`` made of ``module``, if it did."""
    unit: Unit | None = module.__dict__.get("_fsdp_ext_unit")
    return unit


def managed_params(modules: list[nn.Module], ignored: set[nn.Parameter]) -> dict[nn.Parameter, str]:
    """Return the parameters under ``modules`` outside of nested units, with their names."""
    params: dict[nn.Parameter, str] = {}
    seen: set[nn.Module] = set()

    def collect(module: nn.Module, prefix: str) -> None:
        seen.add(module)
        for name, param in module._parameters.items():
            if param is not None and param not in ignored:
                params.setdefault(param, prefix + name)
        for name, child in module._modules.items():
            if child is not None and child not in seen and unit_of(child) is None:
                collect(child, f"{prefix}{name}.")

    for module in modules:
        collect(module, f"{type(module).__name__}." if len(modules) > 1 else "")
    return params


def sharded_module(model: nn.Module) -> nn.Module:
    """Return what ``fully_shard`` was applied to: the model, or what FSDP1's wrapper wraps."""
    module: nn.Module = model.__dict__.get("_sharded", model)
    return module


def running_root(model: nn.Module, caller: str) -> Root:
    """Return the root of a model, or of what FSDP1's wrapper wraps, that has run forward.

    Raises:
        TypeError: if ``fully_shard`` was not applied to it; the message names ``caller``.
        RuntimeError: before the first forward.
    """
    unit = unit_of(sharded_module(model)) if isinstance(model, nn.Module) else None
    if unit is None:
        raise TypeError(
            f"{caller} expects a module that fully_shard was applied to but got "
            f"{type(model).__name__}"
        )
    if unit.root is None or unit.core is None:
        raise RuntimeError(
            f"{caller} expects a model that has run forward; run a step before, or two for the "
            "order that forward takes"
        )
    root: Root = unit.root
    return root


class Root:
    """The units of one root module and the C++ schedule that they share.

    Made by the first unit to run forward, when the user has sharded all that is to be sharded.

    Args:
        module: the root module.
        provisional: made before the first forward, for a unit unsharded by hand; the root that
            runs forward first takes its units over.

    Raises:
        RuntimeError: if a unit under it was run as a root of its own before.
    """

    profiled_by: object = None  # whose block this is in

    # By tune, and whether that was of this model; else of one that looks like it.
    choice: Choice | None = None
    tuned = False
    # While tune measures costs, whatever the user has set.
    forced_bucket_bytes: int | None = None

    def __init__(self, module: nn.Module, *, provisional: bool = False) -> None:
        self.provisional = provisional
        self._module = weakref.ref(module)
        self.units: list[Unit] = []
        self.check_order = True
        for name, submodule in module.named_modules():
            unit = unit_of(submodule)
            if unit is None or unit in self.units:
                continue
            if unit.root is not None and unit.root.provisional:
                unit.root.reshard(unit)
            elif unit.root is not None:
                raise RuntimeError(
                    f"expects the first forward to be the root module's but '{name}' ran forward "
                    "before, as a root of its own; run the outermost sharded module first"
                )
            if submodule is module and len(unit.modules) > 1 and not provisional:
                raise RuntimeError(
                    f"expects a single root module but the unit that ran first has "
                    f"{len(unit.modules)}; shard the module that contains them, too"
                )
            self.units.append(unit)
        if len({unit.mesh for unit in self.units}) > 1:
            raise NotImplementedError(
                "expects all units under one root to have one mesh but got "
                f"{len({unit.mesh for unit in self.units})}; that is not supported yet"
            )
        asked = {unit.transport for unit in self.units}
        if len(asked) > 1:
            raise ValueError(
                "expects all units under one root to have one transport but got "
                f"{' and '.join(sorted(map(repr, asked)))}; pass the same to each fully_shard"
            )
        self.core = self.build()
        # Last: if that raised, the next forward starts over.
        for unit in self.units:
            unit.root = self

    @staticmethod
    def of(unit: Unit) -> Root:
        """Return the root of ``unit``, a provisional one before the first forward."""
        if unit.root is None:
            Root(unit.modules[0], provisional=True)
        elif unit.core is None:
            unit.root.rebuild()
        root: Root = unit.root
        return root

    def invalidate(self) -> None:
        """Make the C++ side anew at the next use."""
        for unit in self.units:
            self.reshard(unit)
            if unit.core is not None:
                unit.core = None
                for hooks in forward_hooks(unit):
                    hooks.disconnect(unit)

    @property
    def module(self) -> nn.Module:
        """The root module."""
        module = self._module()
        if module is None:
            raise RuntimeError("the root module is gone")
        return module

    def build(self) -> _C.TorchRoot:
        """(Re)make the C++ side for the parameters as they are now and hook it in."""
        module = self.module
        first = self.units[0]
        method = weakref.WeakMethod(self._pre_forward_when_stale)
        lanes = lanes_of(first.mesh.get_group(), first.device, first.transport)
        self.lanes = lanes
        if AUTO in (first.bucket_bytes, first.prefetch) and not self.tuned:
            self.choice = chosen_for(self)
        self.prefetch_depth = self.depth()
        self.link = typical_link(lanes.transport, first.transport, first.mesh.size())
        if first.bucket_bytes is None and first.mesh.get_local_rank() == 0 and self.check_order:
            log_default(self.bucket_bytes(first), self.link)
        core = _C.TorchRoot(
            lanes=lanes,
            prefetch_depth=self.prefetch_depth,
            nesting=self._nesting(),
            check_order=self.check_order,
            when_stale=method,
        )
        names = {param: name for name, param in module.named_parameters()}
        unit_names = {
            id(unit): name
            for name, submodule in reversed(list(module.named_modules()))
            if (unit := unit_of(submodule)) is not None
        }
        cores = []
        for unit in self.units:
            cores.append(unit.build(unit_names[id(unit)] or "the root", names))
        for unit, unit_core, parent in zip(self.units, cores, self._parents(), strict=True):
            core.add_unit(unit_core, self.config_of(unit, unit_core.layout, parent))
        self.core = core
        for unit in self.units:
            self.apply_settings(unit)
            if not self.provisional:
                hook_forward(unit)
        core.set_is_last_backward(self.units[0].is_last_backward)
        return core

    def config_of(self, unit: Unit, layout: _C.UnitLayout, parent: int) -> _C.UnitConfig:
        """Return what the schedule has to know of ``unit``, which unit ``parent`` encloses."""
        pack_scale, reduce_scale = unit.gradient_scales()
        return _C.UnitConfig(
            name=unit.name,
            layout=layout,
            parent=parent,
            reshard_after_forward=self.reshards(unit),
            reshard_after_backward=unit.reshard_after_backward,
            pack_scale=pack_scale,
            reduce_scale=reduce_scale,
            bucket_bytes=self.bucket_bytes(unit),
            max_message_bytes=self.max_message_bytes(unit),
        )

    def rebuild(self) -> None:
        """Start over after parameters were replaced, converted, frozen or unfrozen."""
        for unit in self.units:
            self.reshard(unit)
        self.check_order = False
        self.build()

    def reshards(self, unit: Unit) -> bool:
        """Return whether ``unit`` is resharded after forward: by default all but the root."""
        if unit.reshard_after_forward is None:
            kept = self.choice.kept if self.choice is not None else ()
            return unit is not self.units[0] and self.number(unit) not in kept
        return unit.reshard_after_forward

    def apply_choice(self, choice: Choice, *, force: bool = False) -> None:
        """Run as ``tune`` has chosen, or tries out, from the next forward on.

        Args:
            choice: the settings.
            force: take its ``bucket_bytes`` for all units, also where the user has set others;
                until the next choice is applied without that.
        """
        self.choice = choice
        self.tuned = True
        self.forced_bucket_bytes = choice.bucket_bytes if force else None
        self.prefetch_depth = choice.prefetch
        self.core.set_prefetch_depth(choice.prefetch)
        for number, unit in enumerate(self.units):
            self.core.set_bucket_bytes(number, self.bucket_bytes(unit))
            self.apply_settings(unit)

    def _chosen(self, asked: int | str | None) -> Choice | None:
        """Return what was chosen, if that is to be used where ``asked`` is what the user said."""
        return self.choice if asked == AUTO or (asked is None and self.tuned) else None

    def depth(self) -> int:
        """Return how many gathers are under way ahead of the unit that runs."""
        asked = self.units[0].prefetch
        if isinstance(asked, int):
            return asked
        chosen = self._chosen(asked)
        return DEFAULT_PREFETCH if chosen is None else chosen.prefetch

    def apply_settings(self, unit: Unit) -> None:
        """Tell the schedule what the user has set on ``unit``."""
        number = self.number(unit)
        self.core.set_reshard_after_forward(number, self.reshards(unit))
        self.core.set_reshard_after_backward(number, unit.reshard_after_backward)
        self.core.set_requires_gradient_sync(number, unit.requires_gradient_sync)
        self.core.set_gradient_scales(number, *unit.gradient_scales())
        self.core.set_forward_prefetch(number, [self.number(u) for u in unit.forward_prefetch])
        self.core.set_backward_prefetch(number, [self.number(u) for u in unit.backward_prefetch])

    def number(self, unit: Unit) -> int:
        """Return the unit's place in order of registration."""
        return self.units.index(unit)

    def reshard(self, unit: Unit) -> None:
        """Free the unit's unsharded parameters and register the sharded ones."""
        self.core.reshard(self.number(unit))

    def _nesting(self) -> int:
        """Return how many units below the root enclose each other, at most."""

        def depth(module: nn.Module, enclosing: frozenset[int]) -> int:
            unit = unit_of(module)
            if unit is not None and unit is not self.units[0]:
                enclosing = enclosing | {id(unit)}
            return max([len(enclosing)] + [depth(child, enclosing) for child in module.children()])

        return max(1, depth(self.module, frozenset()))

    def _parents(self) -> list[int]:
        """Return which unit encloses each one, by number; -1 for the root."""
        parents: dict[int, int] = {}

        def visit(module: nn.Module, parent: int) -> None:
            unit = unit_of(module)
            if unit is not None:
                parents.setdefault(number := self.number(unit), parent)
                parent = number
            for child in module.children():
                visit(child, parent)

        visit(self.module, -1)
        return [parents[number] for number in range(len(self.units))]

    def bucket_bytes(self, unit: Unit) -> int:
        """Return how large a bucket may be that ``unit`` shares: its own setting or the root's."""
        for asked in (self.forced_bucket_bytes, unit.bucket_bytes, self.units[0].bucket_bytes):
            if isinstance(asked, int):
                return asked
        chosen = self._chosen(self.units[0].bucket_bytes)
        return default_bucket_bytes(self.link) if chosen is None else chosen.bucket_bytes

    def max_message_bytes(self, unit: Unit) -> int:
        """Return how much a message of ``unit`` may carry: its own setting or the root's; 0: any.

        Raises:
            ValueError: if that is less than one row of a parameter from each rank.
        """
        asked = unit.max_message_bytes or self.units[0].max_message_bytes
        if asked is None or unit.mesh.size() == 1:
            return 0
        for slot in unit.slots:
            row = unit.row_bytes(slot)
            if row > asked:
                raise ValueError(
                    f"max_message_bytes expects room for a row of parameter '{slot.name}' from "
                    f"each of {unit.mesh.size()} ranks, {row} bytes, but got {asked}; give more, "
                    "or leave it out"
                )
        return asked

    def _pre_forward_when_stale(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.rebuild()
        unit = unit_of(module)
        assert unit is not None
        assert unit.core is not None
        return unit.core.pre_forward_hook(unit.modules.index(module))(module, args, kwargs)


class ForwardHooks:
    """The two hooks of one of a unit's modules: at first they make the root, then they are C++."""

    def __init__(self, unit: Unit, index: int) -> None:
        module = unit.modules[index]
        self.index = index
        self._unit = weakref.ref(unit)
        self.pre: RemovableHandle = module.register_forward_pre_hook(
            self._first_pre_forward, prepend=True, with_kwargs=True
        )
        self.post: RemovableHandle = module.register_forward_hook(_no_post_forward)

    def _first_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        unit = self._unit()
        assert unit is not None
        if unit.root is None or unit.root.provisional:
            Root(module)
        elif unit.core is None:
            unit.root.rebuild()
        assert unit.core is not None
        return unit.core.pre_forward_hook(self.index)(module, args, kwargs)

    def connect(self, unit: Unit, core: _C.TorchUnit) -> None:
        """Let the module call C++ without a detour."""
        module = unit.modules[self.index]
        module._forward_pre_hooks[self.pre.id] = core.pre_forward_hook(self.index)
        module._forward_hooks[self.post.id] = core.post_forward_hook(self.index)

    def disconnect(self, unit: Unit) -> None:
        """Rebuild the root at the next forward."""
        module = unit.modules[self.index]
        module._forward_pre_hooks[self.pre.id] = self._first_pre_forward
        module._forward_hooks[self.post.id] = _no_post_forward


def _no_post_forward(module: nn.Module, args: Any, output: Any) -> None:
    return None


def hook_forward(unit: Unit) -> None:
    """Point the module hooks of ``unit`` at its C++ side."""
    assert unit.core is not None
    for hooks in forward_hooks(unit):
        hooks.connect(unit, unit.core)


def forward_hooks(unit: Unit) -> list[ForwardHooks]:
    """Return the module hooks of ``unit``, one object for each of its modules."""
    hooks: list[ForwardHooks] = unit.modules[0].__dict__["_fsdp_ext_hooks"]
    return hooks
