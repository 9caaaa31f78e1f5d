"""Shared set-up of the Python tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Helpers whose asserts should show values as those of test files do.
pytest.register_assert_rewrite("parity", "fsdp1_parity")

# For `import bench`. Last: the checkout's own fsdp_ext may be unbuilt, or built for another torch.
sys.path.append(str(Path(__file__).resolve().parents[1]))
