"""CuPy can use the flat shard without a copy."""

from __future__ import annotations

import pytest
import torch
from support.launcher import run_ranks


def _step_of_cupy() -> None:
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import cupy_optimizer

    first, last = cupy_optimizer.train(steps=20, width=64)
    assert last < 0.5 * first
    torch.cuda.synchronize()


@pytest.mark.timeout(120)
def test_an_optimizer_written_with_cupy_trains() -> None:
    pytest.importorskip("cupy", reason="pip install fsdp-ext[gpu]")
    run_ranks(_step_of_cupy, 1, timeout=100.0, device="cuda")
