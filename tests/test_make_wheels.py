"""`make wheels` names wheels by what they need, and says which it leaves out."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from support.tools import TOOLS, load_tool

from fsdp_ext import _C


@pytest.fixture
def make_wheels() -> ModuleType:
    return load_tool(TOOLS / "make_wheels.py")


def test_a_build_tag_begins_with_a_digit(make_wheels: ModuleType) -> None:
    assert make_wheels.Target("3.12", "2.11", "cu130").build_tag == "211cu130"


def test_what_cannot_be_built_is_left_out(
    make_wheels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"python3.12": "/bin/python3.12", "nvcc": "/bin/nvcc"}
    monkeypatch.setattr(make_wheels.shutil, "which", found.get)
    monkeypatch.setattr(make_wheels, "run", lambda *command: "release 13.0, V13.0.88")
    target = make_wheels.Target
    assert make_wheels.why_not(target("3.12", "2.11", "cpu")) is None
    assert make_wheels.why_not(target("3.12", "2.11", "cu130")) is None
    assert "no python3.9" in make_wheels.why_not(target("3.9", "2.11", "cpu"))
    assert "no nvcc 12.9" in make_wheels.why_not(target("3.12", "2.11", "cu129"))


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_the_platform_tag_is_what_the_binary_needs(make_wheels: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(_C.__file__, f"fsdp_ext/{Path(_C.__file__).name}")
    needed = make_wheels.oldest_glibc(wheel)
    text = Path(_C.__file__).read_bytes()
    assert needed >= make_wheels.TORCH_GLIBC
    assert f"GLIBC_{needed[0]}.{needed[1]}".encode() in text or needed == make_wheels.TORCH_GLIBC
    assert f"GLIBC_{needed[0]}.{needed[1] + 1}\0".encode() not in text
