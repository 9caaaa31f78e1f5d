"""The modules of PyTorch with the names of FSDP, and the objects that outside code gets.

While the patch lasts, these modules have a class of their own. An import reads an attribute of a
module, and this class then returns fsdp_ext's object in place of PyTorch's. The modules' globals do
not change, so PyTorch's functions inside still find PyTorch's objects. Code that took one of these
functions before the patch needs that: PyTorch's ``fully_shard`` calls itself by its global name,
and its ``FullyShardedDataParallel`` wraps children in the class of that name.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

import torch.distributed.fsdp._traversal_utils as traversal
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_ext.fsdp1.wrapper import FullyShardedDataParallel
from fsdp_ext.sharding.api.entry import fully_shard

NAMESPACES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed.fsdp._traversal_utils",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
# Modules of PyTorch that take a name at import and have to get PyTorch's. With PyTorch's names,
# their code serves models of both systems. With ours, it would treat PyTorch's models as plain
# ones.
_USERS_OF_BOTH = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim.named_optimizer",
    "torch.distributed.pipelining.stage",
)
# Modules of Python and PyTorch that save and load objects.
_PICKLERS = ("torch.serialization", "torch._weights_only_unpickler", "pickle")

# FSDP1's traversals of models, for code that averages flat parameters or makes an optimizer for
# each wrapper.
_torchs_states_with_modules = traversal._get_fsdp_states_with_modules
_wrappers_in = FullyShardedDataParallel.fsdp_modules


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[Any], list[Any]]:
    wrappers = _wrappers_in(module)
    return (wrappers, list(wrappers)) if wrappers else _torchs_states_with_modules(module)


def _get_fsdp_states(module: nn.Module) -> list[Any]:
    return _get_fsdp_states_with_modules(module)[0]


def _get_fsdp_handles(module: nn.Module) -> list[Any]:
    return [state._handle for state in _get_fsdp_states(module) if state._handle is not None]


# (PyTorch's, ours) by name.
_OBJECTS: dict[str, tuple[Any, Any]] = {
    "fully_shard": (torch_fully_shard, fully_shard),
    "FullyShardedDataParallel": (TorchFullyShardedDataParallel, FullyShardedDataParallel),
    **{
        ours.__name__: (getattr(traversal, ours.__name__), ours)
        for ours in (_get_fsdp_states_with_modules, _get_fsdp_states, _get_fsdp_handles)
    },
}


class _Namespace(ModuleType):
    """A module of PyTorch with fsdp_ext's names in place of PyTorch's."""

    # A property would not do: CPython may cache an attribute of a module past the module's class.
    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        torchs, ours = _OBJECTS.get(name, (None, None))
        if torchs is None or value is not torchs:
            return value
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # PyTorch's own code gets PyTorch's objects, because it uses their internals. A pickle names
        # a class by its module, and has to find the same class there.
        is_torchs = caller.startswith("torch.distributed.fsdp.") or caller in _PICKLERS
        return value if is_torchs else ours


_unpatched: dict[str, dict[str, Any]] = {}  # the objects that had the names, by module


def import_users_of_both() -> None:
    """Import the modules that have to get PyTorch's names, before the patch."""
    with warnings.catch_warnings():
        # torch.distributed.optim compiles functions by torch.jit.script, which is deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        for name in _USERS_OF_BOTH:
            importlib.import_module(name)


def put_ours() -> None:
    """Let the namespaces give fsdp_ext's objects to code outside."""
    for name in NAMESPACES:
        module = importlib.import_module(name)
        _unpatched[name] = {key: vars(module)[key] for key in _OBJECTS if key in vars(module)}
        module.__class__ = _Namespace


def put_torchs() -> None:
    """Undo :func:`put_ours`, and later assignments to the names by other code."""
    for name, objects in _unpatched.items():
        module = sys.modules[name]
        module.__class__ = ModuleType
        vars(module).update(objects)
    _unpatched.clear()


def holders() -> list[str]:
    """Return the names under which modules other than PyTorch's hold PyTorch's objects."""
    torchs = {id(pair[0]) for pair in _OBJECTS.values()}
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "fsdp_ext") or not isinstance(module, ModuleType):
            continue
        # Not vars(module): that would load modules that are imported lazily.
        for key, value in list(object.__getattribute__(module, "__dict__").items()):
            if id(value) in torchs:
                found.append(f"{name}.{key}")
    return found
