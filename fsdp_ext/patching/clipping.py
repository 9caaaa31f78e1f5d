"""PyTorch's ``clip_grad_norm_``, for parameters sharded by fsdp_ext, by PyTorch, or not at all.

Accelerate and Lightning, for example, look the name up in ``torch.nn.utils`` when they clip.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdp_ext.optim.clip import clip_grad_norm_
from fsdp_ext.optim.norms import groups_of_plain_experts, is_on_other_mesh
from fsdp_ext.sharding.params.ownership import is_sharded
from fsdp_ext.sharding.root.unit import owners_of, units_alive

_MODULES, _NAME = ("torch.nn.utils", "torch.nn.utils.clip_grad"), "clip_grad_norm_"

_served: dict[str, tuple[Any, Any]] = {}  # PyTorch's function and ours, by module


def serve_both() -> None:
    """Let ``clip_grad_norm_`` call fsdp_ext's for parameters that fsdp_ext has sharded."""
    for name in _MODULES:
        module = importlib.import_module(name)
        torchs = getattr(module, _NAME)
        _served[name] = torchs, _of_both(torchs)
        setattr(module, _NAME, _served[name][1])


def serve_torchs() -> None:
    """Undo :func:`serve_both`, except where the program has replaced the function since."""
    for name, (torchs, ours) in _served.items():
        module = importlib.import_module(name)
        if getattr(module, _NAME) is ours:
            setattr(module, _NAME, torchs)
    _served.clear()


def _of_both(torchs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(torchs)
    def clip(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        rest = (max_norm, norm_type, error_if_nonfinite, foreach)
        if torch.compiler.is_compiling():  # only PyTorch's can be traced
            return torchs(parameters, *rest)
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not (_are_ours(params) and float(norm_type) > 0):
            return torchs(params or parameters, *rest)  # PyTorch warns of an empty generator
        try:
            norm = clip_grad_norm_(params, float(max_norm), norm_type, error_if_nonfinite)
        except NotImplementedError:  # the caller has redistributed a gradient
            return torchs(params, *rest)
        grad = next((param.grad for param in params if isinstance(param.grad, DTensor)), None)
        if grad is None:
            return norm
        everywhere = [Replicate()] * grad.device_mesh.ndim
        return DTensor.from_local(norm, grad.device_mesh, everywhere, run_check=False)

    return clip


def _are_ours(params: list[Any]) -> bool:
    """Return whether fsdp_ext's function clips these parameters as PyTorch's does."""
    # PyTorch's function raises for plain parameters beside DTensors. Ours would add the norms of
    # each rank's plain parameters, which may differ. Flat parameters of FSDP1's wrapper are plain,
    # too. PyTorch's function clips each rank's part of them by the part's own norm.
    if any(param.requires_grad and not isinstance(param, DTensor) for param in params):
        return False
    if not any(is_sharded(param) and isinstance(param, DTensor) for param in params):
        return False
    # If all parameters are plain experts, PyTorch's norm is that of the ranks of the experts' mesh,
    # and ours that of the root's ranks.
    experts = owners_of(filter(is_on_other_mesh, units_alive()))
    if experts and all(groups_of_plain_experts(param, experts.get(param)) for param in params):
        return False
    # PyTorch's function counts a parameter twice if it is passed twice, and finds no gradients in
    # units with an attached optimizer.
    ids = set(map(id, params))
    attached = owners_of(unit for unit in units_alive() if unit.settings.update is not None)
    return len(ids) == len(params) and ids.isdisjoint(map(id, attached))
