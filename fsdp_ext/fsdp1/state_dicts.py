"""FSDP1's methods about state dicts of models and optimizers.

An optimizer's state has the names and the shapes of the parameters that it belongs to.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    OptimStateDictConfig,
    OptimStateKeyType,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.optim import Optimizer

from fsdp_ext._util.names import without_fsdp1
from fsdp_ext.fsdp1.flat_optimizer_states import FlatParameters
from fsdp_ext.fsdp1.optimizer_states import (
    as_rank_0_has_it,
    check_names,
    check_state,
    from_rank_0,
    in_order_of_names,
    received,
    saved_group,
    shard_values,
    with_keys,
    with_values,
)
from fsdp_ext.fsdp1.setup import without_checkpointing
from fsdp_ext.fsdp1.state_dict_forms import CONFIGS, DEFAULT, SHARDED, Form, State
from fsdp_ext.sharding.params.flat_parameter import own_parameters_shown, show_flat
from fsdp_ext.sharding.root.agreement import called_by_ranks_of
from fsdp_ext.sharding.root.unit import Unit
from fsdp_ext.sharding.torch_compat.state_dict_hooks import reshard_and_forget, settle


class StateDictMethods:
    """FSDP1's methods about state dicts. They are called on the class, with a module or model."""

    fsdp_modules: Callable[..., list[Any]]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state as ``nn.Module`` does, in the form of ``state_dict_type``.

        All ranks call this if the form is full, also with ``rank0_only``.

        Raises:
            RuntimeError: if a rank does not call it within the timeout of the process group.
        """
        wrapper: Any = self
        unit = wrapper._fsdp_ext_unit
        settle(unit)
        form = Form.of_model(wrapper._state_dict_settings)
        names = contextlib.nullcontext() if form.is_local else own_parameters_shown(unit)
        gathers = form.is_full and unit.params and not unit.is_summoned
        together = called_by_ranks_of([unit] if gathers else [], "state_dict")
        with together, torch.inference_mode(False), names:  # DTensors cannot be detached there
            return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a result of ``state_dict`` in the form of ``state_dict_type``, or full."""
        try:
            return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        finally:  # after an error, too
            for wrapper in self.fsdp_modules(self):
                show_flat(wrapper._fsdp_ext_unit)

    @classmethod
    def set_state_dict_type(
        cls,
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the form of ``state_dict`` and ``optim_state_dict`` for the wrappers in ``module``.

        Args:
            module: a wrapper, or a module with wrappers in it.
            state_dict_type: ``FULL_STATE_DICT``, the default, ``SHARDED_STATE_DICT`` or
                ``LOCAL_STATE_DICT``, which has flat parameters.
            state_dict_config: whether tensors move to the host, and for full ones whether only rank
                0 of the mesh gets them.
            optim_state_dict_config: the same for optimizers.

        Returns:
            The settings of the first wrapper before.

        Raises:
            NotImplementedError: for ``LOCAL_STATE_DICT`` with ``use_orig_params=True``.
            RuntimeError: if a configuration is one of another type.
        """
        wrappers = cls.fsdp_modules(module)
        if not isinstance(state_dict_type, StateDictType):
            raise TypeError(
                f"state_dict_type is {state_dict_type!r}. Pass StateDictType.FULL_STATE_DICT, "
                "SHARDED_STATE_DICT or LOCAL_STATE_DICT."
            )
        is_local = state_dict_type is StateDictType.LOCAL_STATE_DICT
        if is_local and any(wrapper._use_orig_params for wrapper in wrappers):
            raise NotImplementedError(
                f"state_dict_type={state_dict_type} is about flat parameters, and with "
                "use_orig_params=True there are none. Pass StateDictType.SHARDED_STATE_DICT or "
                "FULL_STATE_DICT."
            )
        model_type, optim_type = CONFIGS[state_dict_type]
        settings = StateDictSettings(
            state_dict_type,
            state_dict_config or model_type(),
            optim_state_dict_config or optim_type(),
        )
        for name, given, needed in (
            ("state_dict_config", settings.state_dict_config, model_type),
            ("optim_state_dict_config", settings.optim_state_dict_config, optim_type),
        ):
            if type(given) is not needed:
                raise RuntimeError(
                    f"Expected {name} of type {needed} for {state_dict_type}, which got a "
                    f"{type(given).__name__}. Pass a {needed.__name__}."
                )
        before = wrappers[0]._state_dict_settings if wrappers else DEFAULT
        for wrapper in wrappers:
            wrapper._state_dict_settings = settings
        return before

    @classmethod
    def get_state_dict_type(cls, module: nn.Module) -> StateDictSettings:
        """Return the settings of the wrappers in ``module``.

        Raises:
            RuntimeError: if they have different settings.
        """
        found = [wrapper._state_dict_settings for wrapper in cls.fsdp_modules(module)]
        for other in found[1:]:
            if other != found[0]:
                types = [settings.state_dict_type.name for settings in (found[0], other)]
                raise RuntimeError(
                    f"wrappers in the {type(module).__name__} have different types of state dicts, "
                    f"{types[0]} and {types[1]}, or configurations. Call set_state_dict_type on "
                    "the whole module."
                )
        return found[0] if found else DEFAULT

    @classmethod
    @contextlib.contextmanager
    def state_dict_type(
        cls,
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Call :meth:`set_state_dict_type` for a ``with`` block."""
        before = [(wrapper, wrapper._state_dict_settings) for wrapper in cls.fsdp_modules(module)]
        cls.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for wrapper, settings in before:
                wrapper._state_dict_settings = settings

    # - Optimizers

    @classmethod
    def optim_state_dict(
        cls,
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: State | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """Return an optimizer's state by the names of the parameters; on all ranks.

        Args:
            model: the wrapped model.
            optim: an optimizer of its parameters.
            optim_state_dict: ``optim.state_dict()``, which is taken if this is None.
            group: not used: the wrapper knows its ranks.

        Returns:
            Tensors of the form that :meth:`set_state_dict_type` has set, or an empty dict on ranks
            that get none.

        Raises:
            ValueError: if the optimizer has a parameter that is not the model's.
        """
        form = Form.of(cls.get_state_dict_type(model), optimizer=True)
        return cls._optimizer_state(model, optim, form, "optim_state_dict", optim_state_dict)

    @classmethod
    def optim_state_dict_to_load(
        cls,
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: State,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """Return a state by names, for ``optim.load_state_dict``; on all ranks.

        Args:
            model: the wrapped model.
            optim: an optimizer of its parameters.
            optim_state_dict: what :meth:`optim_state_dict` returned, whole or sharded. If
                ``rank0_only`` is set, that of rank 0 is used.
            is_named_optimizer: whether the optimizer has names as keys.
            load_directly: whether to load it, too.
            group: not used: the wrapper knows its ranks.

        Raises:
            ValueError: if it has a parameter that is not the optimizer's.
        """
        form = Form.of(cls.get_state_dict_type(model), optimizer=True)
        loadable = cls._to_load(
            model,
            _groups_of(optim),
            optim_state_dict,
            only_rank_0_has_it=form.rank0_only,
            named=is_named_optimizer,
        )
        if load_directly:
            optim.load_state_dict(loadable)
        return loadable

    @classmethod
    def full_optim_state_dict(
        cls,
        model: nn.Module,
        optim: Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """Return the whole state on the host: an older :meth:`optim_state_dict`.

        ``optim_input`` has no effect, because ``optim`` has the parameters.
        """
        form = Form(is_full=True, offload_to_cpu=True, rank0_only=rank0_only)
        return cls._optimizer_state(model, optim, form, "full_optim_state_dict")

    @classmethod
    def sharded_optim_state_dict(
        cls, model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
    ) -> State:
        """Return the sharded state: an older :meth:`optim_state_dict`."""
        return cls._optimizer_state(model, optim, SHARDED, "sharded_optim_state_dict")

    @classmethod
    def shard_full_optim_state_dict(
        cls,
        full_optim_state_dict: State,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> State:
        """Return a whole state that all ranks have, for ``optim.load_state_dict``.

        Args:
            full_optim_state_dict: what :meth:`full_optim_state_dict` returned.
            model: the wrapped model.
            optim_input: the parameters or groups that the optimizer was made of.
            optim: the optimizer, which can take the place of ``optim_input``. Without either, it
                has ``model.parameters()``.
        """
        groups = cls._groups_in(model, optim_input, optim)
        return cls._to_load(model, groups, full_optim_state_dict, only_rank_0_has_it=False)

    @classmethod
    def flatten_sharded_optim_state_dict(
        cls, sharded_optim_state_dict: State, model: nn.Module, optim: Optimizer
    ) -> State:
        """Return a sharded state in the form that ``optim.load_state_dict`` takes."""
        return cls._to_load(
            model, _groups_of(optim), sharded_optim_state_dict, only_rank_0_has_it=False
        )

    @classmethod
    def scatter_full_optim_state_dict(
        cls,
        full_optim_state_dict: State | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> State:
        """Return rank 0's whole state, for each rank's ``optim.load_state_dict``.

        The arguments are those of :meth:`shard_full_optim_state_dict`.
        """
        groups = cls._groups_in(model, optim_input, optim)
        return cls._to_load(model, groups, full_optim_state_dict or {}, only_rank_0_has_it=True)

    @classmethod
    def rekey_optim_state_dict(
        cls,
        optim_state_dict: State,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> State:
        """Return a state with names in place of parameter numbers, or vice versa.

        Args:
            optim_state_dict: a state with either.
            optim_state_key_type: the kind of keys in the result.
            model: any module without flat parameters, wrapped or not, whose parameters the
                optimizer has.
            optim_input: the parameters or groups that the optimizer was made of.
            optim: the optimizer, which can take the place of ``optim_input``. Without either, it
                has ``model.parameters()``.

        Raises:
            ValueError: if the state has a parameter that is not one of these.
        """
        check_state(optim_state_dict)
        if not isinstance(optim_state_key_type, OptimStateKeyType):
            raise TypeError(
                f"optim_state_key_type is {optim_state_key_type!r}. Pass "
                "OptimStateKeyType.PARAM_ID or PARAM_NAME."
            )
        params = list(chain.from_iterable(cls._groups_in(model, optim_input, optim)))
        names = cls._names_of(params, model)
        flat = cls._flat_parameters(names, params, model)
        kind = type(model).__name__
        if any(flat.own_names(name) != [name] for name in names):
            raise ValueError(
                f"rekey_optim_state_dict got a {kind} with flat parameters. Pass the unwrapped "
                "model."
            )
        is_by_number = optim_state_key_type is OptimStateKeyType.PARAM_ID
        keys: dict[Any, Any] = dict(enumerate(names))
        if is_by_number:
            keys = {name: number for number, name in keys.items()}

        def rename(key: Any) -> Any:
            if isinstance(key, int if is_by_number else str):
                return key
            if key not in keys:
                raise ValueError(
                    f"rekey_optim_state_dict got a state with {key!r}, which is no parameter of "
                    f"the {kind}. Pass the model and the optimizer that the state is of."
                )
            return keys[key]

        rekeyed = with_keys(optim_state_dict, rename)
        if is_by_number:  # optimizers number parameters in order, and load them by their places
            for group in rekeyed.get("param_groups", ()):
                group["params"].sort()
        return rekeyed

    @classmethod
    def _optimizer_state(
        cls,
        model: nn.Module,
        optim: Optimizer,
        form: Form,
        caller: str,
        state: State | None = None,
    ) -> State:
        """Return ``state``, or that of ``optim``, by names and in the given form."""
        params = list(chain.from_iterable(_groups_of(optim)))
        state = optim.state_dict() if state is None else state
        check_state(state)
        names = cls._names_of(params, model)
        state = with_keys(state, lambda key: names[key] if isinstance(key, int) else key)
        state = cls._flat_parameters(names, params, model).split(state)
        unit = cls._unit_of(model)
        is_first = unit.ranks.rank_in_mesh == 0  # also with hybrid sharding, as in FSDP1
        keeps = is_first or not form.rank0_only

        def convert(value: Any) -> Any:
            converted = form.convert(value)
            return converted if keeps else None  # drop each whole value before the next is gathered

        with called_by_ranks_of([unit] if form.is_full else [], caller):
            if form.is_full:
                keeps_plain = all(each._use_orig_params for each in cls.fsdp_modules(model))
                state = as_rank_0_has_it(state, unit, keeps_plain=keeps_plain)
            else:
                state = in_order_of_names(state)
            state = with_values(state, convert)
        return state if keeps else {}

    @classmethod
    def _to_load(
        cls,
        model: nn.Module,
        groups: list[list[nn.Parameter]],
        state: State,
        *,
        only_rank_0_has_it: bool,
        named: bool = False,
    ) -> State:
        """Return ``state``, which is keyed by names, for an optimizer with these parameters.

        Args:
            model: the wrapped model.
            groups: the optimizer's parameters.
            state: the state.
            only_rank_0_has_it: whether rank 0 has the state and sends it to the others.
            named: whether the optimizer has names as keys.
        """
        if not only_rank_0_has_it:
            check_state(state)
        params = list(chain.from_iterable(groups))
        names = cls._names_of(params, model)
        flats = cls._flat_parameters(names, params, model)
        own_params = flats.own_parameters()
        take: Callable[[Any], Any] = _unchanged
        if only_rank_0_has_it:
            unit = cls._unit_of(model)
            with called_by_ranks_of([unit], "the loading of rank 0's state", with_replicas=True):
                state = from_rank_0(state, unit, own_params)
            take = functools.partial(received, unit=unit)
        else:
            check_names(state["state"], own_params)
        keys: dict[str, Any] = {name: name if named else i for i, name in enumerate(names)}
        states = flats.join(shard_values(state["state"], own_params, take))
        loadable = {**state, "state": {keys[name]: values for name, values in states.items()}}
        if "param_groups" not in state:
            return loadable
        name_of = dict(zip(params, names, strict=True))
        loadable["param_groups"] = []
        for group in groups:
            own_names = [own for param in group for own in flats.own_names(name_of[param])]
            # Optimizers match parameters by their places in these lists.
            places = [keys[name_of[param]] for param in group]
            loadable["param_groups"].append({**saved_group(state, own_names), "params": places})
        return loadable

    @classmethod
    def _flat_parameters(
        cls, names: list[str], params: list[nn.Parameter], model: nn.Module
    ) -> FlatParameters:
        units = [wrapper._fsdp_ext_unit for wrapper in cls.fsdp_modules(model)]
        flats = [unit.flat_param for unit in units if unit.flat_param is not None]
        return FlatParameters(dict(zip(names, params, strict=True)), flats)

    @classmethod
    def _names_of(cls, params: list[nn.Parameter], model: nn.Module) -> list[str]:
        """Return the names of an optimizer's parameters in ``state_dict``."""
        for wrapper in cls.fsdp_modules(model):
            reshard_and_forget(wrapper._fsdp_ext_unit)  # the optimizer has the sharded ones
        names = {param: name for name, param in model.named_parameters()}
        if any(param not in names for param in params):
            raise ValueError(
                f"the optimizer has a parameter that is not one of the {type(model).__name__}. "
                "Make the optimizer of the wrapped model's parameters, and pass that model."
            )
        return [without_checkpointing(without_fsdp1(names[param])) for param in params]

    @classmethod
    def _groups_in(
        cls, model: nn.Module, optim_input: Any, optim: Optimizer | None
    ) -> list[list[nn.Parameter]]:
        """Return an optimizer's groups; those that it was made of, or all parameters as one."""
        cls.fsdp_modules(model)  # raises if it is no module
        groups = None if optim is None else _groups_of(optim)
        if optim_input is None:
            return [list(model.parameters())] if groups is None else groups
        given = _groups_given(optim_input)
        if groups is not None and [[*map(id, g)] for g in groups] != [[*map(id, g)] for g in given]:
            raise ValueError(
                "optim_input has other parameters than optim, or in another order. Pass one of the "
                "two."
            )
        return given

    @classmethod
    def _unit_of(cls, model: nn.Module) -> Unit:
        """Return a unit of the model: the outermost one."""
        wrappers = cls.fsdp_modules(model)
        if not wrappers:
            raise ValueError(
                f"the {type(model).__name__} has no FullyShardedDataParallel in it. Pass "
                "a wrapped model."
            )
        unit: Unit = wrappers[0]._fsdp_ext_unit
        return unit


def _unchanged(value: Any) -> Any:
    return value


def _groups_of(optim: Optimizer) -> list[list[nn.Parameter]]:
    if not hasattr(optim, "param_groups"):
        raise TypeError(
            f"an object of type {type(optim).__name__} was passed in place of an optimizer. Pass "
            "the model's."
        )
    return [group["params"] for group in optim.param_groups]


def _groups_given(optim_input: Any) -> list[list[nn.Parameter]]:
    """Return the groups of the argument that an optimizer was made of."""
    entries = list(optim_input) if isinstance(optim_input, Iterable) else []
    if entries and all(isinstance(entry, torch.Tensor) for entry in entries):
        return [entries]
    if not entries or not all(isinstance(entry, dict) and "params" in entry for entry in entries):
        raise TypeError(
            "optim_input is not what an optimizer can be made of. Pass a list of parameters, or of "
            "groups, which are dicts with 'params'."
        )
    given: list[Any] = [entry["params"] for entry in entries]
    return [[one] if isinstance(one, nn.Parameter) else list(one) for one in given]
