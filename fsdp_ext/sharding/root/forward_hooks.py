"""The forward hooks of a unit's modules: Python at the first forward, C++ from then on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp_ext import _C
from fsdp_ext._util.tracing import expect_graph_breaks, hidden_from_dynamo
from fsdp_ext.sharding.root.unit import Unit

# Some libraries recognise FSDP2's hooks by their module, for example to remove them for a while.
_MODULE_OF_TORCHS_HOOKS = "torch.distributed.fsdp._fully_shard._fsdp_state"


class ForwardHooks:
    """The two hooks of one module of a unit.

    Args:
        unit: the module's unit.
        index: the module's place in ``unit.modules``.
        prepare: makes the unit's C++ side before the first forward, and before the first one after
            :meth:`disconnect`.
    """

    def __init__(self, unit: Unit, index: int, prepare: Callable[[Unit, nn.Module], None]) -> None:
        module = unit.modules[index]
        self._index = index
        self._unit = weakref.ref(unit)
        self._module = weakref.ref(module)
        self._prepare = prepare
        self._pre: RemovableHandle = module.register_forward_pre_hook(
            self._first_pre_forward, prepend=True, with_kwargs=True
        )
        # torch also calls it if forward raises, except for a KeyboardInterrupt.
        self._post: RemovableHandle = module.register_forward_hook(
            _no_post_forward, always_call=True
        )

    def connect(self, impl: _C.TorchUnit) -> None:
        """Let the module's hooks call C++ directly."""
        expect_graph_breaks("fsdp_pre_forward|fsdp_post_forward")
        pre, post = impl.pre_forward_hook(self._index), impl.post_forward_hook(self._index)
        pre.__module__ = post.__module__ = _MODULE_OF_TORCHS_HOOKS
        self._set(pre, post)

    def disconnect(self) -> None:
        """Let the next forward prepare the unit again."""
        self._set(self._first_pre_forward, _no_post_forward)

    def run_pre(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Run the hook before forward, as the module would, and return forward's arguments."""
        changed = module._forward_pre_hooks[self._pre.id](module, args, kwargs)
        return (args, kwargs) if changed is None else changed

    def run_post(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Run the hook after forward, as the module would, and return forward's result."""
        changed = module._forward_hooks[self._post.id](module, args, output)
        return output if changed is None else changed

    def _set(self, pre: Callable[..., Any], post: Callable[..., Any]) -> None:
        module = self._module()
        if module is not None:
            module._forward_pre_hooks[self._pre.id] = pre
            module._forward_hooks[self._post.id] = post

    @hidden_from_dynamo
    def _first_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        unit = self._unit()
        assert unit is not None
        self._prepare(unit, module)
        assert unit.impl is not None
        return unit.impl.pre_forward_hook(self._index)(module, args, kwargs)

    _first_pre_forward.__module__ = _MODULE_OF_TORCHS_HOOKS


def _no_post_forward(module: nn.Module, args: Any, output: Any) -> None:
    return None


_no_post_forward.__module__ = _MODULE_OF_TORCHS_HOOKS
