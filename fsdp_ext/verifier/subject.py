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

from fsdp_ext._util.losses import output_of
from fsdp_ext.sharding.api.entry import fully_shard
from fsdp_ext.sharding.params.ownership import own_grad_dtype
from fsdp_ext.sharding.params.param_group import keeps_dtype

# The learning rate of the plain SGD step after each backward. It is a power of two, so that its
# product with a gradient is exact. Otherwise vectorised code and the code for the last elements of
# a tensor round differently in half precision, and shards end elsewhere than whole parameters.
LR = 2.0**-10

# The attribute of a copy's parameter with the grad_dtype of the model's own parameter.
_GRAD_DTYPE = "_fsdp_ext_grad_dtype"

# Prepares a copy before its forward, for example with hooks.
Preparation = Callable[[nn.Module], object]


def no_preparation(model: nn.Module) -> None:
    """Leave a copy as it is."""


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _is_trained_leaf(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf


@dataclass(frozen=True)
class Subject:
    """A model that is checked. Everything runs on copies, so the model itself stays as it is."""

    model: nn.Module  # unsharded
    batch: Any
    loss: Callable[[Any], Tensor]  # makes a scalar of its output
    # The modules that become units besides the model, in the order of sharding.
    unit_names: tuple[str, ...]
    settings: Mapping[str, Any]  # further arguments of ``fully_shard``
    device: torch.device  # of the copies

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The policy of all units."""
        return cast(MixedPrecisionPolicy, self.settings["mp_policy"])

    def forward_and_loss(self, model: nn.Module, weight: float) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of a copy for a copy of the batch, and that one's tensors with gradients.

        Args:
            model: any copy.
            weight: the factor of the loss. It differs between ranks, so that an average over ranks
                is no rank's own gradient.
        """
        own = tree_map_only(Tensor, _copied, self.batch)
        value = self.loss(output_of(model, own)) * weight
        return value, [leaf for leaf in tree_leaves(own) if _is_trained_leaf(leaf)]

    def plain(self, prepare: Preparation = no_preparation) -> nn.Module:
        """Return an unsharded copy that computes in the dtypes of the policy."""
        copied = self._copy(prepare).to(self.device)
        inputs = self.policy.param_dtype if self.policy.cast_forward_inputs else None
        outputs = self.policy.output_dtype
        for name in [*self.unit_names, ""]:
            module = copied.get_submodule(name)
            module.register_forward_pre_hook(
                lambda _, args, kwargs: cast_floating((args, kwargs), inputs), with_kwargs=True
            )
            module.register_forward_hook(lambda _, args, out: cast_floating(out, outputs))
        return copied

    def sharded(self, mesh: DeviceMesh, prepare: Preparation = no_preparation) -> nn.Module:
        """Return a sharded copy."""
        copied = self._copy(prepare)
        for name in [*self.unit_names, ""]:
            fully_shard(copied.get_submodule(name), mesh=mesh, **self.settings)
        return copied

    def _copy(self, prepare: Preparation) -> nn.Module:
        """Return a copy that also has the ``grad_dtype`` of parameters, which deep copies lose."""
        copied = copy.deepcopy(self.model)
        for param, of_copy in zip(self.model.parameters(), copied.parameters(), strict=True):
            dtype = own_grad_dtype(param)
            if dtype is not None:
                of_copy.grad_dtype = dtype
                vars(of_copy)[_GRAD_DTYPE] = dtype
        prepare(copied)
        return copied


def cast_floating(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return a tree with its floating-point tensors in another dtype, if there is one."""
    if dtype is None:
        return tree
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
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
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
            replaced.append((module, name, param))
            module._parameters[name] = cast_of[param]
    try:
        yield
    finally:
        for module, name, param in replaced:
            module._parameters[name] = param
    for param, computed in cast_of.items():
        if computed.grad is not None:
            param.grad_dtype = None
            param.grad = computed.grad
