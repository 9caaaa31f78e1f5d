"""Runs a function on ranks that are threads of one process, over PyTorch's threaded group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed import multi_threaded_pg as threaded

T = TypeVar("T")


def run_threads(worker: Callable[..., T], world_size: int, *args: Any) -> list[T]:
    """Call `worker(rank, *args)` on every rank and return the results by rank.

    The default process group is the threaded one meanwhile. If ranks raise, one of their errors is
    raised, and the others are woken.
    """
    store = dist.HashStore()
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = worker(rank, *args)
            dist.barrier()
            if hasattr(dist.distributed_c10d._world, "comms"):  # torch 2.11 cannot, of threads
                dist.destroy_process_group()
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)

    # As PyTorch's own tests do. Threads that start now inherit it.
    with torch.autograd.set_multithreading_enabled(False):
        threaded._install_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        _set_thread_isolation_mode(True)  # each thread has groups of its own
        try:
            ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
            for thread in ranks:
                thread.start()
            for thread in ranks:
                thread.join()
        finally:
            _set_thread_isolation_mode(False)
            threaded.ProcessLocalGroup.reset()
            threaded._uninstall_threaded_pg()
    for error in errors:
        raise error
    return [results[rank] for rank in range(world_size)]
