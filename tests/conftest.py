"""Shared set-up of the Python tests."""

from __future__ import annotations

import pytest

# Helpers whose asserts should show values as those of test files do.
pytest.register_assert_rewrite("parity", "fsdp1_parity")
