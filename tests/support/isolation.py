"""The state that one call in a rank's process may change, and how it is hidden from the next call.

Tests change some state on purpose, which is restored. State that no test should change is checked:
a call that changes it fails, with a message that names it.
"""

from __future__ import annotations

import copy
import gc
import logging
import operator
import os
import random
import resource
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import fsdp_ext
from fsdp_ext.comm import lanes

_LONGEST_END = 5.0  # seconds
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class ProcessState:
    """The state of this process when it was made."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._directory = os.getcwd()
        self._path = list(sys.path)
        self._streams = sys.stdout, sys.stderr
        self._filters = list(warnings.filters)
        self._show = warnings.showwarning
        self._loggers = {name: _logger_state(name) for name in ("", "fsdp_ext")}
        self._threads = torch.get_num_threads()
        self._dtype = torch.get_default_dtype()
        self._random = random.getstate()
        self._torch_random = torch.get_rng_state()
        numpy = sys.modules.get("numpy")
        self._numpy_random = numpy.random.get_state() if numpy else None
        self._contents = [(value, copy.copy(value)) for value in _containers()]
        self._checked = dict(_checked())
        self._named = list(_named())
        # Objects that exist now live for ever, so no later collection has to look at them.
        gc.collect()
        gc.freeze()

    def restore(self) -> None:
        """Put back what is restored, and check the rest.

        Raises:
            RuntimeError: the call has left something behind that is not restored.
        """
        self._restore_python()
        self._restore_torch()
        for container, content in self._contents:
            _refill(container, content)
        _forget_sharding()
        _wait_for_ending_threads(self._checked["threads"])
        # Modules that this call imported stay loaded. The garbage collector skips frozen objects.
        gc.freeze()
        now = dict(_checked())
        left = [name for name, value in self._checked.items() if now.get(name) != value]
        left += (name for owner, values in self._named for name in _changed(owner, values))
        if left:
            raise RuntimeError(
                f"the call has left these changed: {', '.join(left)}. Put them back in the test, "
                "or pass fresh=True to run_ranks."
            )

    def _restore_python(self) -> None:
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ |= self._environment
        os.chdir(self._directory)
        sys.path[:] = self._path
        sys.stdout, sys.stderr = self._streams
        # Not only where filters differ: warnings that are shown once are to be shown again.
        warnings.resetwarnings()
        warnings.filters[:] = self._filters  # type: ignore[index]
        warnings.showwarning = self._show
        for name, (level, handlers) in self._loggers.items():
            logging.getLogger(name).setLevel(level)
            logging.getLogger(name).handlers[:] = handlers
        random.setstate(self._random)
        if self._numpy_random is not None:
            sys.modules["numpy"].random.set_state(self._numpy_random)

    def _restore_torch(self) -> None:
        torch.set_num_threads(self._threads)
        torch.set_default_dtype(self._dtype)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_rng_state(self._torch_random)
        # Their entries have meshes, which compare equal to those of the next call's groups.
        clear_sharding_caches()


def clear_sharding_caches() -> None:
    """Forget torch's permanent caches of how operators shard and redistribute DTensors.

    torch computes it anew when it is needed. Its names for this are private, and the last one is
    not in every torch.
    """
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    clear_planners = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    if clear_planners is not None:
        clear_planners()


def _logger_state(name: str) -> tuple[int, list[logging.Handler]]:
    logger = logging.getLogger(name)
    return logger.level, list(logger.handlers)


def _containers() -> Iterator[dict[Any, Any] | set[Any] | list[Any]]:
    """Yield the module variables of fsdp_ext that remember earlier calls."""
    for module in _modules():
        for name, value in vars(module).items():
            if isinstance(value, (dict, set, list)) and not name.startswith("__"):
                yield value


def _refill(container: Any, content: Any) -> None:
    if container == content:
        return
    container.clear()
    container.extend(content) if isinstance(container, list) else container.update(content)


def _forget_sharding() -> None:
    """Forget the lanes of the call's process groups.

    Raises:
        RuntimeError: something still holds lanes, such as a model that is not freed.
    """
    # The groups themselves are no measure: torch keeps the first one of a process.
    left = [weakref.ref(one) for of_group in lanes._lanes.values() for one in of_group.values()]
    lanes._lanes.clear()
    # Graphs of autograd hold hooks, which the collector does not see. So objects held by an
    # exception's frames through a graph are garbage only after the first collection.
    gc.collect()
    gc.collect()
    if held := [one.transport for ref in left if (one := ref()) is not None]:
        raise RuntimeError(
            f"the call's process groups are gone, but lanes over them are still held: {held}"
        )


def _wait_for_ending_threads(known: set[str]) -> None:
    """Wait for threads that end by themselves after a call, such as those of transformers."""
    for thread in threading.enumerate():
        if thread.name not in known:
            thread.join(_LONGEST_END)


def _checked() -> Iterator[tuple[str, Any]]:
    """Yield the state that calls must not change, by name."""
    yield "threads", {thread.name for thread in threading.enumerate()}
    yield "sys.getprofile()", sys.getprofile()
    yield "sys.gettrace()", sys.gettrace()
    yield "signal handlers", [signal.getsignal(number) for number in signal.valid_signals()]
    yield "resource limits", [resource.getrlimit(limit) for limit in _LIMITS]


def _named() -> Iterator[tuple[ModuleType | type, dict[str, Any]]]:
    """Yield the variables of fsdp_ext's modules, and the methods of its classes, by their owner."""
    for module in _modules():
        yield module, dict(vars(module))
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                methods = (FunctionType, property)
                yield value, {k: v for k, v in vars(value).items() if isinstance(v, methods)}


def _changed(owner: ModuleType | type, values: dict[str, Any]) -> Iterator[str]:
    """Yield the names of variables that are not the same objects any more."""
    now = vars(owner)
    # This is done for thousands of names after each call, so first for all at once.
    if not all(map(operator.is_, map(now.get, values), values.values())):
        of = (
            owner.__name__
            if isinstance(owner, ModuleType)
            else f"{owner.__module__}.{owner.__name__}"
        )
        yield from (f"{of}.{name}" for name, value in values.items() if now.get(name) is not value)


def _modules() -> list[ModuleType]:
    name = fsdp_ext.__name__
    return [m for key, m in sys.modules.items() if key == name or key.startswith(f"{name}.")]
