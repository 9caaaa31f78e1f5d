"""Attempts of a job as torchrun makes them: new processes each time, and one store for all of them.

In the first attempt the ranks are ended, or fail. In the second one, rank 1 is late, and rank 0
must not take what the first attempt has left in the store for an answer of rank 1.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ext import fully_shard
from support import launcher

_BEGUN = "test/begun"
_RESULT = "test/result"
_WAIT_S = 120.0
_LATE_S = 1.5  # longer than three looks of those that watch for deadlocks


def run_attempts(what: str) -> list[str]:
    """Run two attempts of two ranks, and return the results of the ranks of the second one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher._start_server()
    for attempt in (0, 1):
        ranks = [
            launcher._context.Process(target=main, args=(what, attempt, rank, store.port))
            for rank in (0, 1)
        ]
        for process in ranks:
            process.start()
        try:
            if attempt == 0:
                store.wait([f"{_BEGUN}/{rank}" for rank in (0, 1)])
                time.sleep(_LATE_S)
            else:
                for process in ranks:
                    process.join(_WAIT_S)
        finally:
            exit_codes = [process.exitcode for process in ranks]
            for process in ranks:
                process.kill()
                process.join(_WAIT_S)
        for key in store.list_keys():  # gloo may connect to addresses of the first attempt
            if "fsdp_ext" not in key and not key.startswith(_RESULT):
                store.delete_key(key)
    assert exit_codes == [0, 0]
    return [store.get(f"{_RESULT}/{rank}").decode() for rank in (0, 1)]


def _model(transport: str | None = None) -> Any:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for module in [*model, model]:
        fully_shard(module, transport=transport, bucket_bytes=0, reshard_after_forward=False)
    return model


def _forward(attempt: int, rank: int, begin: Callable[[], None]) -> object:
    """In the first attempt rank 1 begins its first forward, and rank 0 has only sharded."""
    model = _model()
    begin()
    time.sleep(_WAIT_S if attempt == rank == 0 else _LATE_S if attempt == rank == 1 else 0)
    return model(torch.ones(1, 8)).shape


def _deadlock(attempt: int, rank: int, begin: Callable[[], None]) -> object:
    """In the first attempt rank 0 is in backward and rank 1 in the next forward."""
    model = _model("process_group")
    batch = torch.ones(1, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(batch).sum()
    if attempt == 0:
        if rank == 1:
            optimizer.step()
        try:
            loss.backward() if rank == 0 else model(batch)
        finally:
            begin()
    time.sleep(_LATE_S if rank == 1 else 0)
    loss.backward()
    optimizer.step()
    return model(batch).shape


def _calls(attempt: int, rank: int, begin: Callable[[], None]) -> object:
    """In the first attempt each rank is in another call."""
    from fsdp_ext.checkpoint.ranks import Ranks
    from fsdp_ext.comm.roll_call import call_roll

    group = dist.group.WORLD
    assert group is not None
    begin()
    if attempt == 0 and rank == 1:
        Ranks(group).agree("a test", "old", list)
    time.sleep(_LATE_S if rank == 1 else 0)
    before = time.time()
    call_roll({group: torch.device("cpu")}, "a call")
    waited = time.time() - before
    time.sleep(_LATE_S if rank == 1 else 0)
    said = Ranks(group).agree("a test", f"new {rank}", list)
    return said, waited > _LATE_S / 2


def main(what: str, attempt: int, rank: int, port: int) -> None:
    """Run one rank in one attempt."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=_WAIT_S / 2))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.barrier()

    def begin() -> None:
        store.set(f"{_BEGUN}/{rank}", "")

    work = {"forward": _forward, "deadlock": _deadlock, "calls": _calls}[what]
    store.set(f"{_RESULT}/{rank}", str(work(attempt, rank, begin)))
    dist.barrier()
    dist.destroy_process_group()
