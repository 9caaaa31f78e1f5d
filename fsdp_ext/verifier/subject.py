"""The subject of ``verify``: a model, a batch and settings, of which it makes copies."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_ext.sharding.api.entry import fully_shard
from fsdp_ext.sharding.params.ownership import own_grad_dtype
from fsdp_ext.sharding.params.param_group import keeps_dtype
from fsdp_ext.sharding.root.module_state import unit_of
from fsdp_ext.sharding.root.root import Root
from fsdp_ext.verifier.numbers import Reduction

# The learning rate of the plain SGD step after each backward. It is a power of two, so that its
# product with a gradient is exact. Otherwise vectorised code and the code for the last elements of
# a tensor round differently in half precision, and shards end elsewhere than whole parameters.
LR = 2.0**-10

# The attribute of a copy's parameter with the grad_dtype of the model's own parameter.
_GRAD_DTYPE = "_fsdp_ext_grad_dtype"

# Prepares a copy before its forward, for example with hooks.
Preparation = Callable[[nn.Module], None]


def forward_and_loss(
    model: nn.Module, batch: Any, loss: Callable[[Any], Tensor], weight: float
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of ``model`` for a copy of ``batch``, and the copy's tensors with gradients.

    Args:
        model: any copy.
        batch: a tensor, a tuple of arguments, or a mapping of keywords. It is not changed.
        loss: makes a scalar of the output.
        weight: the factor of the loss. It differs between ranks, so that an average over ranks is
            no rank's own gradient.
    """
    own = tree_map_only(Tensor, _copied, batch)
    if isinstance(own, Mapping):
        output = model(**own)
    else:
        output = model(*(own if isinstance(own, tuple) else (own,)))
    value = loss(output) * weight
    return value, [leaf for leaf in tree_leaves(own) if _is_trained_leaf(leaf)]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _is_trained_leaf(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf


@dataclass(frozen=True)
class Subject:
    """A model that is checked. Everything runs on copies, so the model itself stays as it is.

    Args:
        model: the unsharded model.
        batch: its arguments.
        loss: makes a scalar of its output.
        unit_names: the modules that become units besides the model, in the order of sharding.
        settings: further arguments of ``fully_shard``.
        device: the device of the copies.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Tensor]
    unit_names: tuple[str, ...]
    settings: Mapping[str, Any]
    device: torch.device

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The policy of all units."""
        return cast(MixedPrecisionPolicy, self.settings["mp_policy"])

    def plain(self, prepare: Preparation) -> nn.Module:
        """Return an unsharded copy that computes in the dtypes of the policy."""
        copied = copy.deepcopy(self.model).to(self.device)
        _copy_grad_dtypes(self.model, copied)
        prepare(copied)
        policy = self.policy
        for name in [*self.unit_names, ""]:
            module = copied.get_submodule(name)
            if policy.cast_forward_inputs and policy.param_dtype is not None:
                module.register_forward_pre_hook(_cast_inputs(policy.param_dtype), with_kwargs=True)
            if policy.output_dtype is not None:
                module.register_forward_hook(_cast_output(policy.output_dtype))
        return copied

    def sharded(self, prepare: Preparation, mesh: DeviceMesh) -> nn.Module:
        """Return a sharded copy."""
        copied = copy.deepcopy(self.model)
        _copy_grad_dtypes(self.model, copied)
        prepare(copied)
        for name in [*self.unit_names, ""]:
            fully_shard(copied.get_submodule(name), mesh=mesh, **self.settings)
        return copied


def _copy_grad_dtypes(model: nn.Module, copied: nn.Module) -> None:
    """Give the copy's parameters the ``grad_dtype`` of the model's, which a deep copy loses."""
    for param, of_copy in zip(model.parameters(), copied.parameters(), strict=True):
        dtype = own_grad_dtype(param)
        if dtype is not None:
            of_copy.grad_dtype = dtype
            vars(of_copy)[_GRAD_DTYPE] = dtype


def _cast_inputs(dtype: torch.dtype) -> Callable[..., Any]:
    def cast_all(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast((args, kwargs), dtype)

    return cast_all


def _cast_output(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda module, args, output: _cast(output, dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


@contextlib.contextmanager
def computing_in(model: nn.Module, policy: MixedPrecisionPolicy) -> Iterator[None]:
    """Let an unsharded copy compute with parameters in the policy's dtype.

    Afterwards the parameters are the original ones, with the gradients of the cast ones.
    """
    if policy.param_dtype is None:
        yield
        return
    cast_of: dict[nn.Parameter, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for prefix, module in model.named_modules():
        for name, param in list(module._parameters.items()):
            full = f"{prefix}.{name}" if prefix else name
            if param is None or not param.is_floating_point() or keeps_dtype(policy, full, param):
                continue
            if param not in cast_of:
                narrow = param.detach().to(policy.param_dtype)
                cast_of[param] = nn.Parameter(narrow, requires_grad=param.requires_grad)
                if _GRAD_DTYPE in vars(param):
                    cast_of[param].grad_dtype = vars(param)[_GRAD_DTYPE]
            places.append((module, name, param))
            module._parameters[name] = cast_of[param]
    try:
        yield
    finally:
        for module, name, param in places:
            module._parameters[name] = param
    for param, computed in cast_of.items():
        if computed.grad is not None:
            param.grad_dtype = None
            param.grad = computed.grad


def root_of(model: nn.Module) -> Root:
    """Return the root of a sharded copy that has run forward."""
    unit = unit_of(model)
    assert unit is not None
    root: Root = unit.root
    return root


def reductions_of(root: Root) -> dict[nn.Parameter, Reduction]:
    """Return how each sharded parameter's gradient is reduced."""
    return {
        param.sharded: Reduction.of(unit, param, root)
        for unit in root.units
        for param in unit.params
        if param.requires_grad
    }
