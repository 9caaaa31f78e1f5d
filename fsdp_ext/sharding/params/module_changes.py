"""Notices modules and parameters that users add under a sharded module.

Nothing runs in a step. torch's global registration hooks note that a watched module has changed,
and the next outermost forward looks at the modules again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fsdp_ext import _C
from fsdp_ext._util.tracing import untraced

_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@functools.cache
def install() -> None:
    """Register the hooks for all modules of the process. Later calls do nothing."""
    register_module_module_registration_hook(_note_change)
    register_module_parameter_registration_hook(_note_change)


def watch(modules: Iterable[nn.Module]) -> None:
    """Let the next forward of every root look at its modules again if one of these changes."""
    _watched.update(modules)


# Compiled autograd creates modules while Dynamo evaluates frames, and the hook gets them before
# they are initialised. Dynamo fails if it traces a function that has such a module.
@untraced
def _note_change(module: nn.Module, name: str, value: Any) -> None:
    if module in _watched:
        _C.note_module_change()
