"""Shared set-up of the Python tests."""

from __future__ import annotations

import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

# Failed asserts of these helpers show values as those of test files do.
pytest.register_assert_rewrite("support")

# For `import bench`. It comes last, because the checkout's own fsdp_ext may be unbuilt, or built
# for another torch.
sys.path.append(str(Path(__file__).resolve().parents[1]))

# Without a mesh, models are sharded over GPUs that torch sees. Only tests for GPUs are to see them.
# The processes of ranks and other programs inherit this.
if os.environ.get("FSDP_EXT_TEST_NEEDS_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# On some processors, MKL's products depend on where their operands begin in memory, and tests
# compare systems that place parameters differently. The processes of ranks inherit this.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

# Ranks that fail on purpose write flight records. The processes of ranks inherit this.
_records = tempfile.TemporaryDirectory(prefix="fsdp_ext_flight_records_")
os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{_records.name}/rank_"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the exhaustive tests of the part that FSDP_EXT_TEST_PART asks for: "2/3", for example.

    Which part a test is in follows from its name, so that all parts together are all tests.
    """
    part, _, parts = os.environ.get("FSDP_EXT_TEST_PART", "").partition("/")
    if not parts:
        return
    kept, left = [], []
    for item in items:
        is_of_part = zlib.crc32(item.nodeid.encode()) % int(parts) == int(part) - 1
        is_kept = is_of_part or item.get_closest_marker("exhaustive") is None
        (kept if is_kept else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


@pytest.fixture(scope="session", autouse=True)
def ranks_end_well() -> Iterator[None]:
    """End the processes that tests have shared, and fail if one of them does not end well."""
    from support.launcher import end_pools

    yield
    end_pools()
