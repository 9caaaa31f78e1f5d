"""Muon on shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from fsdp_ext import _C
from fsdp_ext.comm.transports import device_of
from fsdp_ext.optim.owned_matrices import OwnedMatrices, ShardedMatrix
from fsdp_ext.optim.state_entries import local_of, over
from fsdp_ext.sharding.params.dtensors import sharded_dims

# PyTorch's code orthogonalises in this dtype, so shards may travel in it.
_DTYPE = torch.bfloat16

_Function = Callable[[torch.Tensor], torch.Tensor]


class MuonStep(torch.optim.Muon):
    """Steps shards of matrices, by the algorithm of PyTorch's Muon.

    Momentum, weight decay and the update are computed on shards. A matrix is orthogonalised by its
    owner: Note [owned matrices] in ``optim/owned_matrices.py``. A matrix that several dimensions of
    a mesh shard, as with tensor parallelism, is gathered and orthogonalised on each rank.
    """

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all matrices that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Copies and unpickled optimizers have PyTorch's attributes only.
        known: dict[int, _Matrices] = getattr(self, "_matrices", {})
        self._matrices: dict[int, _Matrices] = {}
        for number, group in enumerate(self.param_groups):
            params: list[Any] = []
            grads: list[Any] = []
            momenta: list[Any] = []
            self._init_group(group, params, grads, momenta)
            if params:
                self._place_as_params(params, grads, momenta)
                matrices = known.get(number)
                if matrices is None or not matrices.are_of(params):
                    matrices = _Matrices(params)
                self._matrices[number] = matrices
                _step(group, matrices, params, grads, momenta)
        return loss

    def attach(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise, because ranks exchange whole matrices in ``step()``."""
        raise NotImplementedError(
            "fsdp_ext.optim.Muon cannot be attached, because ranks exchange whole matrices in its "
            "step(). Call step() after backward."
        )

    def _place_as_params(self, params: list[Any], grads: list[Any], momenta: list[Any]) -> None:
        """Redistribute gradients and momenta whose placements differ from the parameter's."""
        for i, (param, grad, momentum) in enumerate(zip(params, grads, momenta, strict=True)):
            if isinstance(param, DTensor) and not isinstance(grad, DTensor):
                raise TypeError(
                    f"Muon got a plain tensor as gradient of a sharded matrix of shape "
                    f"{tuple(param.shape)}. Set .grad to a DTensor with the matrix's placements."
                )
            if isinstance(grad, DTensor) and grad.placements != param.placements:
                grads[i] = grad.redistribute(placements=param.placements)
            if isinstance(momentum, DTensor) and momentum.placements != param.placements:
                momenta[i] = momentum.redistribute(placements=param.placements)
                self.state[param]["momentum_buffer"] = momenta[i]


def _step(
    group: dict[str, Any],
    matrices: _Matrices,
    params: list[Any],
    grads: list[Any],
    momenta: list[Any],
) -> None:
    """Step the matrices of a group of parameters."""
    lr, momentum = group["lr"], group["momentum"]
    own_params, own_grads, own_momenta = (
        list(map(local_of, tensors)) for tensors in (params, grads, momenta)
    )
    torch._foreach_lerp_(own_momenta, own_grads, 1 - momentum)
    directions = own_momenta
    if group["nesterov"]:
        directions = list(torch._foreach_lerp(own_grads, own_momenta, momentum))
    orthogonalize = partial(
        _zeropower_via_newtonschulz,
        ns_coefficients=group["ns_coefficients"],
        ns_steps=group["ns_steps"],
        eps=group["eps"],
    )
    updates = matrices.apply(orthogonalize, directions)
    _scale(own_params, float(1 - lr * group["weight_decay"]))
    by_lr: defaultdict[float, list[int]] = defaultdict(list)
    for i, param in enumerate(params):
        by_lr[float(_adjust_lr(lr, group["adjust_lr_fn"], param.shape))].append(i)
    for adjusted, found in by_lr.items():
        some, theirs = [own_params[i] for i in found], [updates[i] for i in found]
        torch._foreach_add_(some, theirs, alpha=-adjusted)


def _scale(tensors: list[torch.Tensor], factor: float) -> None:
    if not any(each.is_cpu for each in tensors):
        torch._foreach_mul_(tensors, factor)
        return
    for each in tensors:  # on the host, foreach rounds the factor to the tensor's dtype
        each.mul_(factor)


class _Matrices:
    """The parameters of a group that have a gradient, by the ranks that shard them."""

    def __init__(self, params: list[Any]) -> None:
        self._params = params
        self._alone: list[int] = []
        by_ranks: defaultdict[Any, list[tuple[int, ShardedMatrix]]] = defaultdict(list)
        for i, param in enumerate(params):
            found = _sharding_of(param)
            if found is None:
                self._alone.append(i)
            else:
                ranks, matrix = found
                by_ranks[ranks].append((i, matrix))
        self._owned = [
            (
                [i for i, _ in found],
                OwnedMatrices([each for _, each in found], ranks, device, _DTYPE),
            )
            for (ranks, device), found in by_ranks.items()
        ]

    def are_of(self, params: list[Any]) -> bool:
        """Return whether these are the matrices of ``params``."""
        return _C.same_objects(params, self._params)

    def apply(self, function: _Function, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Apply a function to the whole matrices of these shards; return the shards of its results.

        The function may overwrite the matrices.
        """
        results = list(shards)
        for numbers, owned in self._owned:
            of_group = owned.apply(function, [shards[i] for i in numbers])
            for i, result in zip(numbers, of_group, strict=True):
                results[i] = result
        for i in self._alone:
            param = self._params[i]
            part = over(shards[i].to(_DTYPE, copy=True), like=param)
            if isinstance(part, DTensor):
                result = function(part.full_tensor())
                part = distribute_tensor(
                    result, part.device_mesh, part.placements, src_data_rank=None
                )
                results[i] = part.to_local()
            else:
                results[i] = function(part)
        return results


def _sharding_of(
    param: Any,
) -> tuple[tuple[dist.ProcessGroup, torch.device], ShardedMatrix] | None:
    """Return the ranks that shard a matrix along one dimension; None if it is spread otherwise."""
    dims = sharded_dims(param)
    if len(dims) != 1 or not param.placements[dims[0]].is_shard():
        return None
    mesh = param.device_mesh
    matrix = ShardedMatrix(param.shape, param.placements[dims[0]].dim)
    group = mesh.get_group(dims[0])
    if matrix.shapes(group.size())[group.rank()] != tuple(local_of(param).shape):
        return None
    return (group, device_of(mesh.device_type, param)), matrix
