"""Attempts of a job as torchrun makes them: new processes each time, and one store for all of them.

A rank's process runs ``python -m support.attempts WHAT``. In the first attempt it is ended, or
fails. In the second one, rank 1 is late, and rank 0 must not take what the first attempt has left
in the store for an answer of rank 1.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ext import fully_shard

_BEGUN = "test/begun"
_WAIT_S = 60.0
_LATE_S = 1.5  # longer than three looks of those that watch for deadlocks


def run_attempts(what: str) -> list[str]:
    """Run two attempts of two ranks, and return the output of each rank of the second one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in (0, 1):
        ranks = [_start(what, attempt, rank, store.port) for rank in (0, 1)]
        if attempt == 0:
            store.wait([f"{_BEGUN}/{rank}" for rank in (0, 1)])
            time.sleep(_LATE_S)
            for process in ranks:
                process.kill()
        outputs = [process.communicate(timeout=_WAIT_S)[0] for process in ranks]
        for key in store.list_keys():  # gloo may connect to addresses of the first attempt
            if "fsdp_ext" not in key:
                store.delete_key(key)
    assert [process.returncode for process in ranks] == [0, 0], outputs
    return outputs


def _start(what: str, attempt: int, rank: int, port: int) -> subprocess.Popen[str]:
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "support.attempts", what],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


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


def main(what: str) -> None:
    """Run one rank in one attempt."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.barrier()

    def begin() -> None:
        store.set(f"{_BEGUN}/{rank}", "")

    work = {"forward": _forward, "deadlock": _deadlock, "calls": _calls}[what]
    print(work(attempt, rank, begin), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
