"""Lets only one thread at a time prepare the units of a model.

Once the C++ side exists, it has an owner: Note [one thread] in ``csrc/torch/root_owner.h``. Until
then, this module keeps a second thread out.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator

from fsdp_ext.sharding.params.param_group import ParamGroup

_lock = threading.Lock()
_threads: weakref.WeakKeyDictionary[ParamGroup, threading.Thread] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def preparing(units: Iterable[ParamGroup]) -> Iterator[None]:
    """Keep other threads from preparing these units, all of a model, meanwhile."""
    mine = threading.current_thread()
    with _lock:
        entered = [unit for unit in units if _threads.get(unit) is not mine]
        for unit in entered:
            if unit in _threads:
                raise RuntimeError(
                    f"The thread '{mine.name}' entered this model while thread "
                    f"'{_threads[unit].name}' is preparing it for a forward. A sharded model "
                    "serves one thread at a time. Hold a lock during each step and each "
                    "evaluation, or give each thread a model of its own."
                )
        for unit in entered:
            _threads[unit] = mine
    try:
        yield
    finally:
        with _lock:
            for unit in entered:
                del _threads[unit]
