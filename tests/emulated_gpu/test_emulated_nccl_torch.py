"""PyTorch's ProcessGroupNCCL: its watchdog and its flight recorder work over the emulated NCCL."""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import nccl_library as nccl
from support.devices import IS_EMULATED
from support.launcher import run_ranks

pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="tests the emulated GPU: make rehearsal")

TIMEOUT_S = 8
NUMEL = 64


def _a_rank_that_does_not_come(after_abort: str) -> None:
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=TIMEOUT_S))
    data = torch.ones(NUMEL, device="cuda")
    dist.all_reduce(data, group=group)
    torch.cuda.synchronize()
    assert data[0].item() == 2
    if dist.get_rank() == 0:
        late = dist.all_reduce(data, group=group, async_op=True)
        assert late is not None
        assert not late.is_completed()
        torch.cuda.synchronize()  # until the watchdog aborts the communicator
        Path(after_abort).write_bytes(torch._C._distributed_c10d._dump_nccl_trace())
    nccl.meet()
    os._exit(0)  # leaving the group would wait for PyTorch's monitor


def _last_entry(file: Path) -> dict[str, Any]:
    entry: dict[str, Any] = pickle.loads(file.read_bytes())["entries"][-1]
    return entry


def test_the_watchdog_aborts_and_the_flight_recorder_names_the_collective(tmp_path: Path) -> None:
    variables = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # abort, but do not end the process
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",  # the abort waits four times as long
        "TORCH_NCCL_ENABLE_TIMING": "1",  # so that a record tells what has started
        "TORCH_FR_BUFFER_SIZE": "100",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "rank_"),
    }
    after_abort = str(tmp_path / "after_abort")
    run_ranks(
        _a_rank_that_does_not_come,
        2,
        after_abort,
        timeout=60.0,
        device="cuda",
        lost=[0, 1],
        variables=variables,
    )
    for file in (tmp_path / "rank_0", Path(after_abort)):
        entry = _last_entry(file)
        assert entry["profiling_name"] == "nccl:all_reduce"
        assert entry["collective_seq_id"] == 2
        assert [list(sizes) for sizes in entry["input_sizes"]] == [[NUMEL]]
        assert entry["timeout_ms"] == 1000 * TIMEOUT_S
    assert _last_entry(tmp_path / "rank_0")["state"] == "started"
