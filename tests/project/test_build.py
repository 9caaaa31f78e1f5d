"""What ``pip install`` builds: which torch, CPU or CUDA, and with which nvcc."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import setuptools
import torch

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("FORCE_CPU", "FORCE_CUDA", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, path.stem, module)  # for dataclasses
        patch.setattr(setuptools, "setup", lambda **_: None)
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The functions of setup.py on a machine without variables, driver and nvcc."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "on_the_path"))
    module: Any = _load(ROOT / "setup.py")
    monkeypatch.setattr(module, "DEFAULT_CUDA", str(tmp_path / "default" / "bin"))
    monkeypatch.setattr(module, "has_driver", lambda: False)
    return module


@pytest.fixture
def add_nvcc(tmp_path: Path) -> Callable[[str, str], str]:
    def add(directory: str, release: str) -> str:
        path = tmp_path / directory / "nvcc"
        path.parent.mkdir(parents=True)
        path.write_text(
            f'#!/bin/sh\necho "Cuda compilation tools, release {release}, V{release}"\n'
        )
        path.chmod(0o755)
        return str(path)

    return add


def _torch(build: Any, cuda: str | None) -> Any:
    return build.Torch(Path("torch"), "2.11.0", cuda, 17, True)


def test_nvcc_is_looked_for_where_torch_looks(
    build: Any, add_nvcc: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert build.find_nvcc() is None
    default = add_nvcc("default/bin", "13.0")
    assert build.find_nvcc() == default
    on_the_path = add_nvcc("on_the_path", "13.1")
    assert build.find_nvcc() == on_the_path
    home = add_nvcc("home/bin", "13.2")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "home"))
    assert build.find_nvcc() == home
    assert build.nvcc_version() == "13.2"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    assert build.find_nvcc() is None
    assert "nothing has no bin/nvcc" in build.why_no_cuda(_torch(build, "13.0"))


def test_torch_and_nvcc_decide_what_is_built(
    build: Any, add_nvcc: Callable[[str, str], str]
) -> None:
    assert build.choose_kind(_torch(build, "13.0")) == ("CPU", "there is no nvcc")
    add_nvcc("on_the_path", "13.2")
    assert build.choose_kind(_torch(build, "13.0")) == ("CUDA", "with nvcc 13.2")
    kind, why = build.choose_kind(_torch(build, "12.8"))
    assert (kind, why) == ("CPU", "nvcc belongs to CUDA 13.2 and torch to CUDA 12.8")
    assert build.choose_kind(_torch(build, None))[0] == "CPU"


def test_a_machine_with_a_driver_gets_no_cpu_build_without_being_asked(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "has_driver", lambda: True)
    with pytest.raises(SystemExit) as error:
        build.choose_kind(_torch(build, "13.0"))
    assert str(error.value) == (
        "This machine has NVIDIA's driver and torch 2.11.0 has CUDA, but there is no nvcc. Install "
        "the CUDA toolkit 13 and set CUDA_HOME to it, or set FORCE_CPU=1 for a build of fsdp_ext "
        "without CUDA."
    )
    assert build.choose_kind(_torch(build, None))[0] == "CPU"
    monkeypatch.setenv("FORCE_CPU", "1")
    assert build.choose_kind(_torch(build, "13.0")) == ("CPU", "FORCE_CPU=1")


def test_the_build_uses_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = _load(ROOT / "tools" / "build_backend.py")

    class Distribution:
        version = torch.__version__

        def locate_file(self, path: str) -> Path:
            return Path("/environment") / path

    found = Distribution()
    monkeypatch.setattr(backend, "distributions", lambda **_: [found])
    seen: list[list[str]] = []
    monkeypatch.setattr(backend.build_meta, "build_wheel", lambda *_: seen.append([*sys.path]))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert backend.torch_requirements() == []
    backend.build_wheel("wheels")
    assert seen[0][-1] == "/environment"
    found.version = "2.5.1+cu124"  # too old to build against, so pip gets a newer one
    assert backend.torch_requirements() == ["torch>=2.11"]
    assert backend.installed_torch() is None
