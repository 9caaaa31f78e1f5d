"""FSDP1's static methods, for models wrapped by fsdp_ext, by PyTorch, or not at all.

Libraries call these methods on the class, with any model. Lightning, for example, calls
``rekey_optim_state_dict`` with models that are not wrapped.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel as TorchFullyShardedDataParallel

from fsdp_ext.fsdp1.wrapper import FullyShardedDataParallel

# What serve_both has replaced, by name: a method of the class itself, or None for an inherited one.
_own: dict[str, Any] = {}
_fsdp_modules = FullyShardedDataParallel.fsdp_modules


def serve_both() -> None:
    """Let the static methods call PyTorch's for models without fsdp_ext's wrappers."""
    for name, value in vars(TorchFullyShardedDataParallel).items():
        is_public = isinstance(value, (staticmethod, classmethod)) and not name.startswith("_")
        if is_public and hasattr(FullyShardedDataParallel, name):
            _own[name] = vars(FullyShardedDataParallel).get(name)
            method = _of_both(getattr(FullyShardedDataParallel, name), name)
            setattr(FullyShardedDataParallel, name, staticmethod(method))


def serve_ours() -> None:
    """Undo :func:`serve_both`."""
    for name, method in _own.items():
        if method is None:
            delattr(FullyShardedDataParallel, name)
        else:
            setattr(FullyShardedDataParallel, name, method)
    _own.clear()


def _of_both(ours: Callable[..., Any], name: str) -> Callable[..., Any]:
    torchs: Callable[..., Any] = getattr(TorchFullyShardedDataParallel, name)
    signature = inspect.signature(torchs)
    key = "model" if "model" in signature.parameters else "module"

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        model = signature.bind(*args, **kwargs).arguments[key]
        return (ours if _fsdp_modules(model) else torchs)(*args, **kwargs)

    return call
