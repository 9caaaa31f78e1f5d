"""Keeps set-up out of the transforms of ``torch.func``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_of_transforms(function: Function) -> Function:
    """Return ``function``, run outside of all transforms that are active, such as ``grad``.

    Inside of them, operators return wrappers of tensors, which have no storage.
    """

    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return function(*args, **kwargs)
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        with temporarily_clear_interpreter_stack():
            return function(*args, **kwargs)

    return cast(Function, outside)
