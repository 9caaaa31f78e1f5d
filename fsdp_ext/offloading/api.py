"""``offload_optimizer``: optimizer states in the host's memory, stepped on the GPU."""

from __future__ import annotations

import inspect
from itertools import chain

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_ext._util.errors import UnsupportedError
from fsdp_ext._util.numbers import as_bool
from fsdp_ext.offloading.states import OffloadedStates, params_by_group
from fsdp_ext.optim.flat_step import FlatStep
from fsdp_ext.sharding.root.module_state import sharded_module, units_below
from fsdp_ext.sharding.root.unit import Unit, owners_of

# PyTorch's optimizers that change each parameter by its own gradient and states alone.
_SEPARABLE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop",
              "Rprop", "SGD")  # fmt: skip

# The name of the attribute in which an optimizer keeps its OffloadedStates.
_STATES = "_fsdp_ext_offloaded_states"


def offload_optimizer(
    optimizer: Optimizer, model: nn.Module, *, is_separable: bool | None = None
) -> None:
    """Keep the optimizer's states in the host's memory, and step on the GPU.

    From then on, ``optimizer.step()`` copies the states of a few units at a time to the GPU, steps
    these units there, and copies the states back while the next units are stepped. Results are the
    same. Parameters and gradients stay on the GPU. Between steps the states are DTensors on the
    host, for state dicts and checkpoints. On a mesh of CPUs there is nothing to do.

    Parameters that are not sharded keep their states where they are.

    Args:
        optimizer: an optimizer of the model's parameters, made after ``fully_shard``.
        model: the sharded model.
        is_separable: whether ``step`` changes each parameter by its own gradient and states alone,
            so that it can run for a few parameters at a time. Needed for optimizers that are not
            PyTorch's.

    Raises:
        TypeError: if ``fully_shard`` was not applied to ``model``, or another argument has a wrong
            type.
        ValueError: if the optimizer has none of the model's parameters, or cannot be stepped for
            some parameters after others.
        RuntimeError: if the optimizer is offloaded already, or its ``step`` was replaced.
        NotImplementedError: if units are offloaded by ``CPUOffloadPolicy``.
    """
    units = _units_of(model)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"offload_optimizer got {optimizer!r}. Pass a torch.optim.Optimizer of the model's "
            "parameters."
        )
    if is_separable is not None:
        is_separable = as_bool("offload_optimizer", "is_separable", is_separable)
    _check_optimizer(optimizer, units, is_separable)
    device = units[0].device
    if not _is_on_host(device):
        vars(optimizer)[_STATES] = OffloadedStates(optimizer, units, device)


def _is_on_host(device: torch.device) -> bool:
    """Return whether states are on the host anyway. Tests change this."""
    return device.type == "cpu"


def _units_of(model: nn.Module) -> list[Unit]:
    units = units_below(sharded_module(model)) if isinstance(model, nn.Module) else []
    if not units:
        raise TypeError(
            f"offload_optimizer got a {type(model).__name__} without units. Pass the model that "
            "fully_shard was applied to."
        )
    return units


def _check_optimizer(optimizer: Optimizer, units: list[Unit], is_separable: bool | None) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, FlatStep):
        raise ValueError(
            f"offload_optimizer got a {kind}, which steps flat memory as fsdp_ext.optim does, and "
            "keeps its states on the device. Use the optimizer of torch.optim."
        )
    if is_separable is None:
        known = [getattr(torch.optim, name) for name in _SEPARABLE if hasattr(torch.optim, name)]
        step_of_class = inspect.unwrap(type(optimizer).step)
        is_separable = any(inspect.unwrap(kind.step) is step_of_class for kind in known)
    if not is_separable:
        raise ValueError(
            f"offload_optimizer got a {kind}, which is not known to change each parameter by its "
            "own gradient and states alone. If it does, pass is_separable=True. Otherwise it "
            "cannot be stepped a few parameters at a time."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"offload_optimizer got a {kind} with differentiable=True, whose states have to stay "
            "for backward. Leave differentiable out."
        )
    offloaded = [unit.name for unit in units if unit.settings.offloads]
    if offloaded:
        raise UnsupportedError(
            f"offload_optimizer got a model whose units {offloaded} have CPUOffloadPolicy, so "
            "their optimizer is on the host already. Leave out one of the two."
        )
    step = vars(optimizer).get("step")
    if _STATES in vars(optimizer) or not (step is None or hasattr(step, "_wrapped_by_lr_sched")):
        raise RuntimeError(
            f"offload_optimizer got a {kind} whose step was replaced before, by {step!r}. Call "
            "offload_optimizer once, right after making the optimizer."
        )
    if not owners_of(units).keys() & set(chain.from_iterable(params_by_group(optimizer))):
        raise ValueError(
            f"offload_optimizer got a {kind} that has no parameter of the model. Make the "
            "optimizer of model.parameters() after fully_shard."
        )
