"""An optimizer's step over flat memory.

Note [flat steps]
PyTorch's code for a step loops over the parameters of each group. Here it steps a stand-in (Note
[stand-ins] in optim/stand_in.py), whose groups have runs in place of the parameters in them: Note
[flat runs] in optim/flat_runs.py. So all arithmetic, options and checks are PyTorch's own, and the
optimizer's groups and ``state`` always have the sharded parameters. A parameter's states are
DTensors over its part of the run's states. Scalars, such as Adam's count of steps, are equal for
all parameters of a run, and each parameter has a copy.

If someone replaces states, as ``load_state_dict`` does, the next step finds runs anew and copies
the states into them. Each parameter gets its part of a run's state as soon as that is copied, so at
most one state of one run exists twice. The same happens if a parameter has a gradient in one step
and none in the next.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd.profiler import record_function
from torch.distributed.tensor import DTensor

from fsdp_ext import _C
from fsdp_ext.optim.attached import agree_to_attach, units_to_attach
from fsdp_ext.optim.clip_in_backward import InBackward, Safeguards
from fsdp_ext.optim.flat_runs import FlatRun, FlatRuns
from fsdp_ext.optim.fused_steps import FusedSteps, asks_for_fused
from fsdp_ext.optim.stand_in import stand_in_of
from fsdp_ext.optim.state_entries import StateEntries, local_of, over
from fsdp_ext.sharding.params.settings import UnitUpdate
from fsdp_ext.sharding.root.setting_changes import change
from fsdp_ext.sharding.root.unit import Unit

UpdatePreHook = Callable[[frozenset[Any] | None], None]
_update_pre_hooks: list[UpdatePreHook] = []


def register_update_pre_hook(hook: UpdatePreHook) -> None:
    """Call ``hook`` before any attached optimizer steps a unit in backward, for good.

    The argument of ``hook`` is the unit's ``UnitUpdate.params``.
    """
    _update_pre_hooks.append(hook)


class FlatStep(FusedSteps):
    """Steps flat memory. Inherit from this class first, and then from PyTorch's optimizer.

    That optimizer has to step each element independently of the others.

    Args:
        params: as PyTorch's.
        args: positional options of PyTorch's optimizer.
        foreach: as PyTorch's.
        fused: as PyTorch's, but a group with None for this and ``foreach`` has a fused step where
            possible: Note [fused steps] in optim/fused_steps.py.
        differentiable: has to be false, also in each group.
        kwargs: other options of PyTorch's optimizer.

    Raises:
        ValueError: if ``differentiable`` is true.
    """

    def __init__(
        self,
        params: Any,
        *args: Any,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        **kwargs: Any,
    ) -> None:
        self._check_differentiable(differentiable)
        super().__init__(params, *args, **{**kwargs, "foreach": foreach, "fused": fused})

    @_disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as PyTorch's does."""
        if isinstance(param_group, dict):
            self._check_differentiable(param_group.get("differentiable", False))
        super().add_param_group(param_group)

    def _check_differentiable(self, differentiable: bool) -> None:
        if differentiable:
            raise ValueError(
                f"fsdp_ext.optim.{type(self).__name__} got differentiable=True, but it steps flat "
                f"memory in place. Use torch.optim.{type(self).__name__}."
            )

    # Steps outside of inference mode could not change states that are made in it.
    @_disable_dynamo
    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters, as PyTorch's does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Copies and unpickled optimizers have PyTorch's attributes only.
        own = vars(self)
        if own.get("_attached") and self._is_scaled:
            raise RuntimeError(
                "step got a GradScaler, but this optimizer is attached, so it has stepped in "
                "backward with scaled gradients. Call step() after backward instead of attaching "
                "the optimizer."
            )
        own.pop("_asked", None)
        every: _Part = own.setdefault("_every", _Part())
        every.params = [group["params"] for group in self.param_groups]
        clipping = self._clipping_now
        if clipping is None:
            self._step(every)
            return loss
        clipping.note([param for group in every.params for param in group])
        try:
            self._step(every)
        finally:  # also after an error, so that no other rank waits for the norm
            clipping.end_step()
        return loss

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, as PyTorch's does."""
        if set_to_none:
            # One call in C++: PyTorch's zero_grad loops over parameters in Python.
            with record_function(self._zero_grad_profile_name):
                for group in self.param_groups:
                    _C.remove_gradients(group["params"])
            return
        # PyTorch's foreach code refuses DTensors beside the plain gradients of ignored parameters.
        params = [param for group in self.param_groups for param in group["params"]]
        grads = [param.grad for param in params if param.grad is not None]
        for grad in grads:
            if grad.grad_fn is not None:
                grad.detach_()
            else:
                grad.requires_grad_(False)
        if grads:
            torch._foreach_zero_([local_of(grad) for grad in grads])

    def attach(
        self,
        model: nn.Module,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        last_norm: float | None = None,
        clip_by: Literal["last_step", "unit"] = "last_step",
        skip_nonfinite: bool = False,
    ) -> None:
        """Step each unit of ``model`` in backward, as soon as its gradients are reduced.

        Backward removes the gradients, so ``.grad`` is None afterwards, and on GPUs at most two
        buckets have gradients at a time. Each backward with gradient sync is a step, and belongs to
        one forward. Call ``step()`` after it as before: schedulers need it, and it steps parameters
        that still have a gradient. Groups are read when a unit is stepped, so change a learning
        rate only between ``step()`` and the next forward. PyTorch's ``clip_grad_norm_``, and step
        pre-hooks that change gradients, find no gradients: pass ``max_norm`` to clip.

        After an error in backward, each unit has either stepped once, or has its old parameters and
        states and no gradient. On the host, the units of the last two buckets before the error have
        not stepped. If some ranks did not use a unit, it may have stepped on the
        other ranks only.

        All ranks call this together, with the same arguments.

        Args:
            model: has units with parameters of this optimizer.
            max_norm: scales gradients down as ``clip_grad_norm_`` does.
            norm_type: ``p`` of the p-norm over all elements, above 0; ``inf`` for the maximum.
            last_norm: the norm for the first step, to go on as before a checkpoint. Only for
                ``clip_by="last_step"``.
            clip_by: ``"last_step"`` clips by the norm of the step before, because this step's is
                known only after backward. ``step()`` computes it, and is then required after each
                backward, on all ranks. The first step is not clipped, and a norm that is not finite
                is left out. ``"unit"`` clips each unit by its own norm, which costs a small
                all-reduce for each unit. Gradients that are left to ``step()`` are not clipped.
            skip_nonfinite: whether a unit whose gradients have a norm of NaN or Inf is not stepped,
                on all ranks alike. It costs the same all-reduce. Without it, the unit is stepped
                with NaN or Inf. On GPUs it needs PyTorch's fused code.

        Raises:
            RuntimeError: if one of the units already has an attached optimizer, or if another rank
                passes other arguments or does not call this.
            TypeError: if ``model`` is no module, or if a norm is no number.
            ValueError: if no unit has parameters of this optimizer, or if a unit is offloaded, or
                has a flat parameter, tensor extensions or hooks behind gradient accumulation. Also
                if the other arguments do not fit together, if a model was attached with others, or
                if ``skip_nonfinite`` is passed on a GPU with ``foreach``, ``fused=False`` or
                dampening.
        """
        units = units_to_attach(model, [group["params"] for group in self.param_groups])
        asked = Safeguards.of(max_norm, norm_type, last_norm, clip_by, skip_nonfinite)
        if skip_nonfinite and any(unit.device.type == "cuda" for unit in units):
            self._check_skips_fused()
        clipping = self._clipping_as(asked)
        agree_to_attach(units, str(asked))
        attached: weakref.WeakSet[Unit] = vars(self).setdefault("_attached", weakref.WeakSet())
        updates = {}
        for unit, own in units.items():
            part = _Part(own)
            measure = None
            if clipping is not None and clipping.measures:
                measure = partial(clipping.measure, part, own)
            updates[unit] = UnitUpdate(own, partial(self._step_in_backward, part), measure)
        try:
            for unit, update in updates.items():
                change([unit], update=update)
        except Exception:
            change([*updates], update=None)
            raise
        attached.update(updates)
        self._clipping = clipping

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of the last step's gradients before clipping.

        It is None unless ``attach`` got ``max_norm`` or ``skip_nonfinite``. With
        ``clip_by="last_step"``, gradients that ``step()`` steps count, too. Otherwise, the norm of
        plain experts on a mesh of their own covers only that mesh's ranks.
        """
        clipping: InBackward | None = vars(self).get("_clipping")
        return None if clipping is None else clipping.norm

    def detach(self) -> None:
        """Let only ``step()`` step parameters from now on, after :meth:`attach`."""
        vars(self).pop("_clipping", None)
        change([*vars(self).pop("_attached", ())], update=None)

    def _clipping_as(self, asked: Safeguards) -> InBackward | None:
        """Return what clips and skips as ``attach`` is asked to."""
        params = [param for group in self.param_groups for param in group["params"]]
        if not vars(self).get("_attached"):
            return asked.make(params)
        known = self._clipping_now
        before = Safeguards() if known is None else known.settings
        if asked != before:
            raise ValueError(
                f"attach got ({asked}), but another model of this optimizer is attached with "
                f"({before}). Pass the same for each."
            )
        if known is not None:
            known.note(params)
        return known

    def _check_skips_fused(self) -> None:
        # PyTorch's fused SGD cannot skip the first step with dampening.
        damped = any(group.get("momentum") and group["dampening"] for group in self.param_groups)
        if damped or not all(map(asks_for_fused, self.param_groups)):
            raise ValueError(
                "attach got skip_nonfinite=True, but a group of parameters has foreach=True, "
                "fused=False or dampening. On GPUs, only PyTorch's fused code can skip a step "
                "without a wait of the host. Leave these options out."
            )

    @property
    def _clipping_now(self) -> InBackward | None:
        """The clipping of the models that are attached and alive."""
        return vars(self).get("_clipping") if vars(self).get("_attached") else None

    def _step_in_backward(self, part: _Part) -> None:
        for hook in _update_pre_hooks:
            hook(part.own)
        before = part.groups
        part.follow(self._lists_now(part))
        self._step(part)
        for group in part.params:
            _C.remove_gradients(group)
        if not _C.same_objects(before, part.groups) and part.is_cuda:
            # States were copied on the stream of the reduction. Backward must not get the memory of
            # the old ones before that.
            torch.cuda.current_stream().synchronize()

    def _lists_now(self, part: _Part) -> list[list[Any]]:
        """Return copies of the groups' lists of parameters; the same object until they change.

        They are compared once a backward: at the first part after ``step()``, or when a part steps
        a second time.
        """
        own = vars(self)
        known: list[list[Any]] = own.setdefault("_lists", [])
        asked: set[_Part] = own.setdefault("_asked", set())
        if not asked or part in asked:
            asked.clear()
            now = [group["params"] for group in self.param_groups]
            if len(known) != len(now) or not all(map(_C.same_objects, known, now)):
                known = self._lists = list(map(list, now))
        asked.add(part)
        return known

    def _step(self, part: _Part) -> None:
        """Step some of the parameters, by PyTorch's code."""
        clipping = self._clipping_now
        parts = part.find_groups(self.state, None if clipping is None else clipping.key)
        states: defaultdict[Any, Any] = defaultdict(dict)
        groups = []
        try:
            for group, found in zip(self.param_groups, parts, strict=True):
                own = found.begin_step(self.state)
                states.update(own)
                fits = found.fits_fused_code and self._fits_fused_code(group, own)
                fused = self._fused_now(group, fits=fits)
                groups.append({**group, "params": list(own), "fused": fused})
            if clipping is not None:
                for found in parts if clipping.key is not None else ():
                    found.runs.clear_padding()
                clipping.clip(part, [pair for found in parts for pair in found.stepped()])
            nonfinite = None if clipping is None else clipping.nonfinite(part)
            if nonfinite is not None and not all(group["fused"] for group in groups):
                if self._is_nonfinite(nonfinite):
                    return
                nonfinite = None
            stand_in = stand_in_of(self, states, groups, nonfinite)
            step: Any = super(FlatStep, stand_in).step
            if getattr(step, "hooked", False):  # hooks run for the step of this class
                step = partial(step.__wrapped__, stand_in)
            step()
            for group, stepped in zip(self.param_groups, groups, strict=True):
                del stepped["params"], stepped["fused"]
                group.update(stepped)  # the step may count in its groups
        finally:
            for found in parts:
                found.end_step(self.state)
            part.note(self.state)

    @property
    def _may_be_skipped(self) -> bool:
        clipping = self._clipping_now
        return super()._may_be_skipped or (
            clipping is not None and clipping.settings.skip_nonfinite
        )

    @staticmethod
    def _is_nonfinite(nonfinite: torch.Tensor) -> bool:
        """Return whether to skip a step of code that cannot skip it. The host waits for it."""
        if nonfinite.is_cuda:
            raise RuntimeError(
                "An optimizer attached with skip_nonfinite=True needs PyTorch's fused code on a "
                "GPU, which cannot step these parameters. Call detach(), then attach() without "
                "skip_nonfinite."
            )
        return bool(nonfinite)


class _Part:
    """Parameters that step together, with what was found in their last step.

    Args:
        own: the parameters of a unit. None: the caller sets ``params``, to most of the optimizer's.

    Attributes:
        params: the parameters of each of the optimizer's groups.
        groups: their runs.
    """

    def __init__(self, own: frozenset[Any] | None = None) -> None:
        self.own = own
        self.params: list[list[Any]] = []
        self.groups: list[_Group] = []
        self._lists: list[list[Any]] | None = None
        # For most of the parameters, comparing all states of the optimizer is faster than looking
        # up the states of each.
        self._watches_all = own is None
        self._noted: tuple[list[Any], list[Any]] = [], []  # the optimizer's states

    def follow(self, lists: list[list[Any]]) -> None:
        """Find a unit's parameters in the groups' lists, unless they are those of the last call."""
        if lists is not self._lists:
            own = self.own or frozenset()
            self.params = [[each for each in group if each in own] for group in lists]
            self._lists = lists

    @property
    def is_cuda(self) -> bool:
        """Whether the parameters are on a GPU."""
        return any(group[0].is_cuda for group in self.params if group)

    def find_groups(
        self, states: dict[Any, Any], key: Callable[[Any], Hashable] | None
    ) -> list[_Group]:
        """Return the runs of each group. All parameters of a run have equal values of ``key``."""
        before: list[_Group | None] = [*self.groups]
        before += [None] * (len(self.params) - len(before))
        # Looking up each parameter would call the hash function of tensors, which is Python's.
        is_noted = self._watches_all and _C.has_items(states, *self._noted)
        self.groups = [
            known
            if known is not None and known.is_of(params, None if is_noted else states, key)
            else _Group(params, states, known, key)
            for params, known in zip(self.params, before, strict=False)
        ]
        return self.groups

    def note(self, states: dict[Any, Any]) -> None:
        """Note the states after a step."""
        if self._watches_all and not _C.has_items(states, *self._noted):
            self._noted = [*states], [*states.values()]


class _Group:
    """The runs of one group of parameters, with their states."""

    def __init__(
        self,
        params: list[Any],
        states: dict[Any, Any],
        before: _Group | None,
        key: Callable[[Any], Hashable] | None,
    ) -> None:
        read = _read_scalars([states[param] for param in params if param in states])
        self._key = key

        def kinds(param: Any) -> Hashable | None:
            own = _kinds_of(param, states.get(param), read)
            return own if own is None or key is None else (own, key(param))

        self.runs = FlatRuns(params, kinds)
        self._is_real = not any(param.is_complex() for param in self.runs.others)
        known = {} if before is None else before._intact(states)
        # Each run's states, a dict to which PyTorch's code adds.
        self._states = [
            (run, known.get(_key_of(run)) or _joined(run, states)) for run in self.runs.runs
        ]
        self._alone: list[_Alone] = []
        self._published: list[Any] = []  # values of runs' states that the parameters have, too
        self._scalars: list[_Scalars] = []
        if before is not None:
            before._give_own(self.runs.others, states)
        self._note(states)

    def is_of(
        self,
        params: list[Any],
        states: dict[Any, Any] | None,
        key: Callable[[Any], Hashable] | None,
    ) -> bool:
        """Return whether parameters, gradients and states are those of the last step.

        ``states`` is None if each parameter has the same dict as then.
        """
        return key == self._key and self.runs.are_of(params) and self._has_only(states)

    def begin_step(self, states: dict[Any, Any]) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the tensors that PyTorch's code steps, with their states."""
        self._alone = [_Alone(param, states) for param in _C.with_gradients(self.runs.others)]
        of_runs = {run.whole: own for run, own in self._states}
        return of_runs | {each.whole: each.states for each in self._alone}

    @property
    def fits_fused_code(self) -> bool:
        """Whether PyTorch's fused code takes these parameters with the gradients of this step."""
        return self._is_real and all(each.fits_fused_code for each in self._alone)

    def stepped(self) -> list[tuple[Any, torch.Tensor]]:
        """Return the tensors that a step changes, each with a parameter that lies in it."""
        of_runs = [(run.params[0], run.whole) for run, _ in self._states]
        return of_runs + [(each.param, each.whole) for each in self._alone]

    def end_step(self, states: dict[Any, Any]) -> None:
        """Give each parameter its part of new states, and the scalars of this step."""
        has_new = not _C.same_objects(self._values_of_runs(), self._published)
        if has_new:
            self._add_in_order(states)
        for each in self._alone:
            each.end_step(states)
        self._alone = []
        if has_new:
            self._publish(states)
        for scalars in self._scalars:
            scalars.follow()

    def _add_in_order(self, states: dict[Any, Any]) -> None:
        """Let each parameter with states have a dict, in the group's order, as PyTorch's code."""
        having = {param for run, own in self._states if own for param in run.params}
        having |= {each.param for each in self._alone if each.states}
        for param in self.runs.params:
            if param in having:
                states.setdefault(param, {})

    def _publish(self, states: dict[Any, Any]) -> None:
        """Give each parameter its part of the states of its run."""
        self._scalars = _Scalars.of(self._states)
        new: dict[Any, dict[str, Any]] = defaultdict(dict)
        for run, own in self._states:
            for name, value in own.items():
                is_whole = isinstance(value, torch.Tensor) and value.dim() > 0
                parts = run.parts_of(value) if is_whole else [value] * len(run.params)
                for param, part in zip(run.params, parts, strict=True):
                    new[param][name] = part
        for scalars in self._scalars:  # in place of the runs', in the same order
            scalars.put(new)
        known = [states[param] for param in new]
        # All at once: otherwise, after an interrupt, some parameters would lack their states.
        deque(map(dict.update, known, new.values()), maxlen=0)
        self._published = self._values_of_runs()
        self._note(states)

    def _values_of_runs(self) -> list[Any]:
        return [value for _, own in self._states for value in own.values()]

    def _note(self, states: dict[Any, Any]) -> None:
        in_runs = [param for run in self.runs.runs for param in run.params]
        self._entries = StateEntries(states, in_runs)
        self._values = self._entries.values()

    def _has_only(self, states: dict[Any, Any] | None) -> bool:
        """Return whether nobody else has replaced states or written scalars."""
        entries, values = self._entries, self._values
        has = entries.have_only(values) if states is None else entries.are_in(states, values)
        return has and not any(scalars.is_written() for scalars in self._scalars)

    @torch.no_grad()
    def _give_own(self, params: list[Any], states: dict[Any, Any]) -> None:
        """Copy states of parameters that are in no run now, so that none keeps a whole run's."""
        of_runs = set(map(id, self._values))
        for param in params:
            own = states.get(param, {})
            parts = {name: value for name, value in own.items() if id(value) in of_runs}
            own.update(
                {name: value.clone() for name, value in parts.items() if isinstance(value, DTensor)}
            )

    def _intact(self, states: dict[Any, Any]) -> dict[tuple[int, ...], dict[str, Any]]:
        """Return the states of each run, unless someone else has changed states."""
        if not self._has_only(states):
            return {}
        return {_key_of(run): own for run, own in self._states}


def _key_of(run: FlatRun) -> tuple[int, ...]:
    """Return the same for runs of the same parameters."""
    return tuple(map(id, run.params))


class _Alone:
    """A parameter that is in no run. The step changes its shard, or all of it if unsharded."""

    def __init__(self, param: Any, states: dict[Any, Any]) -> None:
        self.param = param
        self.whole = local_of(param)
        if isinstance(param, DTensor):
            grad: Any = param.grad
            self.whole.grad_dtype = param.grad_dtype
            if grad.placements != param.placements:
                grad = grad.redistribute(placements=param.placements)
            self.whole.grad = local_of(grad)
        self.states = {name: local_of(value) for name, value in states.get(param, {}).items()}

    @property
    def fits_fused_code(self) -> bool:
        """Whether PyTorch's fused code takes the gradient."""
        grad = self.whole.grad
        return grad is not None and not grad.is_sparse and grad.dtype == self.whole.dtype

    def end_step(self, states: dict[Any, Any]) -> None:
        """Give the parameter its new states."""
        own = states.setdefault(self.param, {})
        for name, value in self.states.items():
            if name not in own or local_of(own[name]) is not value:
                is_part = isinstance(value, torch.Tensor) and value.shape == self.whole.shape
                own[name] = over(value, like=self.param) if is_part else value
        if not own:
            del states[self.param]
        if self.whole is not self.param:
            self.whole.grad = None


class _Scalars:
    """The values of one scalar, such as Adam's count of steps, for runs and their parameters.

    The values of all runs are one tensor, and those of all parameters are another, so one operation
    copies them. No two parameters share a value, because PyTorch's code adds to each in place.
    """

    @torch.no_grad()
    def __init__(self, name: str, states: list[tuple[FlatRun, dict[str, Any]]]) -> None:
        self._name = name
        self._of_runs = torch.stack([own[name] for _, own in states])
        for (_, own), value in zip(states, self._of_runs.unbind(), strict=True):
            own[name] = value
        run_of = [number for number, (run, _) in enumerate(states) for _ in run.params]
        self._run_of = torch.tensor(run_of, device=self._of_runs.device)
        self._params = [param for run, _ in states for param in run.params]
        self._of_params = self._of_runs.index_select(0, self._run_of)
        self._version = 0

    @staticmethod
    def of(states: list[tuple[FlatRun, dict[str, Any]]]) -> list[_Scalars]:
        """Return all scalars. Those of one name may differ in dtype or device between runs."""
        having: defaultdict[Any, list[tuple[FlatRun, dict[str, Any]]]] = defaultdict(list)
        for run, own in states:
            for name, value in own.items():
                if _is_scalar(value):
                    having[name, value.dtype, value.device].append((run, own))
        return [_Scalars(name, found) for (name, _, _), found in having.items()]

    def put(self, states: dict[Any, Any]) -> None:
        """Let each parameter have its value as a state."""
        for param, value in zip(self._params, self._of_params.unbind(), strict=True):
            states[param][self._name] = value

    @torch.no_grad()
    def follow(self) -> None:
        """Copy the runs' values to the parameters."""
        torch.index_select(self._of_runs, 0, self._run_of, out=self._of_params)
        self._version = self._of_params._version

    def is_written(self) -> bool:
        """Return whether someone else has written a parameter's value."""
        return self._of_params._version != self._version


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dim() == 0


def _read_scalars(states: list[dict[str, Any]]) -> dict[int, float]:
    """Return the values of all scalars by their ids. Each dtype and device is waited for once."""
    by_kind: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
    for own in states:
        for value in filter(_is_scalar, own.values()):
            by_kind[value.dtype, value.device].append(value)
    read: dict[int, float] = {}
    for scalars in by_kind.values():
        read.update(zip(map(id, scalars), torch.stack(scalars).tolist(), strict=True))
    return read


def _kinds_of(param: Any, states: dict[str, Any] | None, read: dict[int, float]) -> Hashable | None:
    """Return what parameters of one run have in common in their states, or None for no run."""
    kinds: list[Hashable] = []
    for name, value in sorted((states or {}).items()):
        if _is_elementwise(param, value):
            kinds.append((name, value.dtype))
        elif _is_scalar(value):
            kinds.append((name, value.dtype, value.device, read[id(value)]))
        elif isinstance(value, torch.Tensor):
            return None
        elif value is None or isinstance(value, (bool, int, float, str)):
            kinds.append((name, type(value), value))
        else:  # parameters of a run would share an object that may change
            return None
    return tuple(kinds)


def _is_elementwise(param: Any, value: Any) -> bool:
    return (
        isinstance(value, DTensor)
        and value.placements == param.placements
        and value._local_tensor.shape == param._local_tensor.shape
    )


@torch.no_grad()
def _joined(run: FlatRun, states: dict[Any, Any]) -> dict[str, Any]:
    """Return the states of a run, from those of its parameters, which get parts of them."""
    joined: dict[str, Any] = {}
    for name, value in states.get(run.params[0], {}).items():
        if _is_elementwise(run.params[0], value):
            joined[name] = whole = torch.zeros_like(run.whole, dtype=value.dtype)
            for param, part in zip(run.params, run.parts_of(whole), strict=True):
                local_of(part).copy_(local_of(states[param][name]))
                states[param][name] = part
        else:
            joined[name] = value.clone() if isinstance(value, torch.Tensor) else value
    return joined
