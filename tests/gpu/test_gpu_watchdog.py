"""The watchdog of NCCL's lanes ends a collective that hangs, and writes what ran."""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults.test_flight_records import _labels, _sharded, _step
from support import nccl_library
from support.devices import IS_EMULATED
from support.launcher import run_ranks
from torch.distributed.device_mesh import DeviceMesh

TIMEOUT = timedelta(seconds=8)
GATHER = "the all-gather of unit 'layers.0'"


def _late(folder: str) -> None:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/rank_"
    mesh = DeviceMesh.from_group(dist.new_group(timeout=TIMEOUT), "cuda")
    with torch.device("cuda"):
        model = _sharded(mesh, "nccl")
        for _ in range(3):  # later steps agree on nothing
            _step(model)
        torch.cuda.synchronize()
        if dist.get_rank() == 0:
            model(torch.ones(2, 8))
            torch.cuda.synchronize()  # it returns when the watchdog has ended the collective
            with pytest.raises(RuntimeError) as raised:
                _step(model)
            path = Path(folder) / "fsdp_ext_rank_0"
            assert f"rank 0 of 2 waited 8000 ms for {GATHER}." in str(raised.value), raised.value
            assert f"The flight record of rank 0 is in {path}" in str(raised.value)
            record = pickle.loads(path.read_bytes())
            states = {
                label: entry["state"]
                for label, entry in zip(_labels(record), record["entries"], strict=True)
            }
            assert states[f"{GATHER} in forward"] == "started"
    nccl_library.meet()


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "variables", [{}, *([{"EMULATED_GPU_NCCL": "2.30.7"}] if IS_EMULATED else [])]
)
def test_the_watchdog_writes_a_flight_record_when_a_rank_is_late(
    variables: dict[str, str], tmp_path: Path
) -> None:
    run_ranks(_late, 2, str(tmp_path), timeout=80.0, device="cuda", variables=variables)
