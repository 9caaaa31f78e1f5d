"""Shared set-up of the Python tests."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Failed asserts of these helpers show values as those of test files do.
pytest.register_assert_rewrite("support.parity", "support.fsdp1_parity", "support.profiling")

# For `import bench`. It comes last, because the checkout's own fsdp_ext may be unbuilt, or built
# for another torch.
sys.path.append(str(Path(__file__).resolve().parents[1]))

# On some processors, MKL's products depend on where their operands begin in memory, and tests
# compare systems that place parameters differently. The processes of ranks inherit this.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

# Ranks that fail on purpose write flight records. The processes of ranks inherit this.
_records = tempfile.TemporaryDirectory(prefix="fsdp_ext_flight_records_")
os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{_records.name}/rank_"


@pytest.fixture(scope="session", autouse=True)
def ranks_end_well() -> Iterator[None]:
    """End the processes that tests have shared, and fail if one of them does not end well."""
    from support.launcher import end_pools

    yield
    end_pools()
