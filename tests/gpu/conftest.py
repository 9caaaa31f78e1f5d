"""Tests of this directory are skipped without FSDP_EXT_TEST_NEEDS_GPU=1, which shows them a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.devices import HAS_GPU, IS_EMULATED

HERE = Path(__file__).parent
# Files that the emulated GPU (tests/emulated_gpu) cannot run, and why.
NOT_EMULATED = {
    "test_gpu_cupy.py": "CuPy has kernels of its own, and the emulated GPU runs none of them",
    "test_gpu_kernels.py": "CuPy compiles its kernels with NVRTC, which is not emulated",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this directory where they see no GPU.

    Raises:
        pytest.UsageError: if FSDP_EXT_TEST_NEEDS_GPU=1 and the machine cannot run them.
    """
    if IS_EMULATED:
        _skip_what_is_not_emulated(items)
    if HAS_GPU:
        return
    if os.environ.get("FSDP_EXT_TEST_NEEDS_GPU") == "1":
        raise pytest.UsageError(
            "FSDP_EXT_TEST_NEEDS_GPU=1 needs a CUDA build and a GPU, and one of them is missing. "
            "Unset the variable to skip these tests."
        )
    reason = "needs FSDP_EXT_TEST_NEEDS_GPU=1, which `make gpu-check` sets, a CUDA build and a GPU"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


def _skip_what_is_not_emulated(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and item.path.name in NOT_EMULATED:
            reason = f"not on the emulated GPU: {NOT_EMULATED[item.path.name]}"
            item.add_marker(pytest.mark.skip(reason=reason))
