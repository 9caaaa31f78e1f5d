"""Keeps ``torch.compile`` and ``torch.func`` out of functions that they should not trace."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])


def hidden_from_dynamo(function: Function) -> Function:
    """Return ``function``, run eagerly with all that it calls, also inside compiled code.

    Dynamo takes a second to import, so this does not import it. It cannot be tracing before it is
    imported. Dynamo must not trace the frame of the wrapper either: with ``fullgraph``, it would
    refuse the call of ``disable``.
    """

    @functools.wraps(function)
    def hidden(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        disable: Any = torch._dynamo.disable
        return disable(function, recursive=True)(*args, **kwargs)

    return cast(Function, untraced(hidden))


def untraced(function: Function) -> Function:
    """Let Dynamo run a function's own frame, and those that it calls, without tracing them."""
    # Private names: a version of torch without them may trace the function.
    action: Any = getattr(eval_frame, "_FrameAction", None)
    strategy: Any = getattr(eval_frame, "_FrameExecStrategy", None)
    if action is not None and strategy is not None:
        skips = strategy(action.SKIP, action.SKIP)
        eval_frame.set_code_exec_strategy(function.__code__, skips)
    return function


def expect_graph_breaks(function_names: str) -> None:
    """Silence Dynamo's warning about C++ functions at which it is meant to break graphs."""
    warnings.filterwarnings(
        "ignore", rf"Dynamo does not know how to trace the builtin `[^`]*\.({function_names})\."
    )


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
