"""Sources without a build, and a build without a torch that fits, are refused in a sentence."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import fsdp_ext
from fsdp_ext import _build_info, _installed_torch
from fsdp_ext._installed_torch import why_unfit


def test_another_patch_or_cuda_of_the_same_minor_version_fits() -> None:
    assert why_unfit("CPU", "2.13.0+cu130", "2.13.1+cpu", None) is None
    assert why_unfit("CUDA", "2.13.0+cu130", "2.13.0+cu132", "13.2", built_cuda="13.0") is None


def test_another_minor_version_is_refused() -> None:
    reason = why_unfit("CPU", "2.11.0+cu130", "2.13.0+cpu", None)
    assert "built against torch 2.11, and torch 2.13.0+cpu is installed" in reason
    assert "for torch 2.13, or build it again: pip install" in reason


def test_a_cuda_build_needs_a_torch_with_cuda() -> None:
    reason = why_unfit("CUDA", "2.13.0+cu130", "2.13.0+cpu", None)
    assert "CUDA build, and torch 2.13.0+cpu has no CUDA" in reason


def test_a_cuda_build_needs_the_same_major_version_of_cuda() -> None:
    reason = why_unfit("CUDA", "2.13.0+cu130", "2.13.0+cu126", "12.6", built_cuda="13.0")
    assert "built for CUDA 13, and torch 2.13.0+cu126 has CUDA 12.6" in reason


def test_the_import_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build_info, "TORCH_VERSION", "2.10.0")
    with pytest.raises(ImportError, match=r"built against torch 2\.10"):
        importlib.reload(_installed_torch)


def test_sources_that_are_not_built_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fsdp_ext, "_build_info")
    monkeypatch.setitem(sys.modules, "fsdp_ext._build_info", None)
    with pytest.raises(ImportError, match="is source code that is not built there") as raised:
        importlib.reload(_installed_torch)
    assert str(Path(fsdp_ext.__file__).parents[1]) in str(raised.value)
    assert "start Python outside of that folder" in str(raised.value)
