"""`make wheels` names wheels by what they need, and says which it leaves out."""

from __future__ import annotations

import re
import shutil
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

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
    there = {"python3.12": "Python 3.12.1", "nvcc": "release 13.0, V13.0.88"}

    def run(*command: str) -> str:
        if command[0] not in there:
            raise RuntimeError(f"pyenv: {command[0]}: command not found")
        return there[command[0]]

    monkeypatch.setattr(make_wheels.shutil, "which", there.get)
    monkeypatch.setattr(make_wheels, "run", run)
    target = make_wheels.Target
    assert make_wheels.why_not(target("3.12", "2.11", "cpu")) is None
    assert make_wheels.why_not(target("3.12", "2.11", "cu130")) is None
    assert "no python3.9" in make_wheels.why_not(target("3.9", "2.11", "cpu"))
    assert "no nvcc 12.9" in make_wheels.why_not(target("3.12", "2.11", "cu129"))


@pytest.mark.parametrize(
    ("kind", "index", "reason"),
    [
        # What the index has of torch 2.13, by version and CUDA, with pip's choice first.
        ("cu130", [("2.13.0+cu130", "13.0")], None),
        ("cu130", [("2.13.0+cpu", ""), ("2.13.0", "13.2")], None),
        ("cu130", [("2.13.0+cpu", "")], "the indexes have torch 2.13.0+cpu and none with CUDA"),
        ("cu126", [("2.13.0", "13.0")], "the indexes have torch 2.13.0 for CUDA 13.0"),
        ("cpu", [("2.13.0", "13.0")], None),
        ("cpu", [], "pip can install no torch 2.13 for Python 3.12 from the indexes"),
    ],
)
def test_a_torch_that_no_index_has_leaves_the_row_out(
    make_wheels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    index: list[tuple[str, str]],
    reason: str | None,
) -> None:
    installed: list[tuple[str, str]] = []

    def run(*command: object) -> str:
        exactly = str(command[-1]).partition("===")[2]
        found = [torch for torch in index if not exactly or torch[0] == exactly]
        if not found:
            raise RuntimeError(f"ERROR: No matching distribution found for {command[-1]}")
        installed[:] = found[:1]
        return ""

    monkeypatch.setattr(make_wheels, "run", run)
    monkeypatch.setattr(make_wheels, "torch_of", lambda python: installed[0])
    target = make_wheels.Target("3.12", "2.13", kind)
    assert make_wheels.install_torch(target, Path("python"), "") == reason


def test_torch_without_cuda_is_installed_first(
    make_wheels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = []

    def make(target: Any, *more: object) -> str:
        kinds.append(target.kind)
        return "ok"

    monkeypatch.setattr(make_wheels, "make", make)
    monkeypatch.setattr(make_wheels, "why_not", lambda target: None)
    monkeypatch.setattr(make_wheels, "make_environment", lambda *_: Path("python"))
    command = ["make_wheels.py", "--python", "3.12", "--torch", "2.11", "--kind", "cu130", "cpu"]
    monkeypatch.setattr(sys, "argv", command)
    assert make_wheels.main() == 0
    assert kinds == ["cpu", "cu130"]


def test_other_failures_of_pip_fail_the_row(
    make_wheels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*command: object) -> str:
        raise RuntimeError(says)

    monkeypatch.setattr(make_wheels, "run", run)
    target = make_wheels.Target("3.10", "2.15", "cpu")
    says = "ERROR: Cannot install torch==2.15.* because these package versions have conflicts"
    assert "no torch 2.15 for" in make_wheels.install_torch(target, Path("python"), "")
    says = "ERROR: No space left on device"
    with pytest.raises(RuntimeError, match="No space left"):
        make_wheels.install_torch(target, Path("python"), "")


def test_the_platform_tag_is_what_the_binary_needs(
    make_wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_wheels, "DIST", tmp_path / "dist")
    extension = Path(_C.__file__)
    contents = tmp_path / "some-1"
    info = contents / "some-1.dist-info"
    info.mkdir(parents=True)
    (contents / "some").mkdir()
    shutil.copy(extension, contents / "some")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some\nVersion: 1\n")
    version = "Wheel-Version: 1.0\nGenerator: test\n"
    (info / "WHEEL").write_text(f"{version}Root-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n")
    make_wheels.run(sys.executable, "-m", "wheel", "pack", "--dest-dir", tmp_path, contents)
    (wheel,) = tmp_path.glob("*.whl")
    tagged = make_wheels.set_platform_tag(Path(sys.executable), wheel)
    glibc = int(re.search(r"manylinux_2_(\d+)_\w+\.whl$", tagged.name)[1])
    needed = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", extension.read_bytes())]
    assert glibc >= max(needed)
    with zipfile.ZipFile(tagged) as archive:
        libraries = [name for name in archive.namelist() if ".so" in name]
    assert libraries == [f"some/{extension.name}"]  # torch's are not copied into it
