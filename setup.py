"""Builds fsdp_ext: finds torch, decides for CPU or CUDA, and drives CMake.

Sources and flags are in CMakeLists.txt, everything else about the package in pyproject.toml.

    FORCE_CPU=1     make the CPU build
    FORCE_CUDA=1    make the CUDA build, or fail
    MAX_JOBS=n      compile at most n files at a time
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 11)
EXTENSION = "fsdp_ext._C"
BUILD_INFO = "_build_info.py"


@dataclass(frozen=True)
class Torch:
    """The torch to build against."""

    directory: Path
    version: str
    cuda: str | None
    cxx_standard: int
    cxx11_abi: bool


def find_torch() -> Torch:
    """Describe the torch that is importable here.

    Raises:
        SystemExit: if there is none, or one that is too old.
    """
    oldest = ".".join(map(str, OLDEST_TORCH))
    try:
        import torch
    except ImportError as error:
        raise SystemExit(
            f"The build of fsdp_ext expects torch {oldest} or newer but cannot import it "
            f"({error}); install torch, or build without --no-build-isolation."
        ) from error
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    if (int(major), int(minor)) < OLDEST_TORCH:
        raise SystemExit(
            f"fsdp_ext expects torch {oldest} or newer but got {torch.__version__}; upgrade torch."
        )
    directory = Path(torch.__file__).parent
    # The standard that torch gives extensions: its headers may need more than they check for.
    source = (directory / "utils" / "cpp_extension.py").read_text(encoding="utf-8")
    standard = re.search(r"cpp_flag_prefix \+ 'c\+\+(\d\d)'", source)
    return Torch(
        directory=directory,
        version=torch.__version__,
        cuda=torch.version.cuda,
        cxx_standard=int(standard.group(1)) if standard else 20,
        cxx11_abi=torch.compiled_with_cxx11_abi(),
    )


def choose_kind(torch: Torch) -> tuple[str, str]:
    """Return what to build, "CPU" or "CUDA", and why.

    Raises:
        SystemExit: if the environment asks for what cannot be built.
    """
    force_cpu = os.environ.get("FORCE_CPU", "0") not in ("", "0")
    force_cuda = os.environ.get("FORCE_CUDA", "0") not in ("", "0")
    if force_cpu and force_cuda:
        raise SystemExit(
            "The build of fsdp_ext expects FORCE_CPU=1 or FORCE_CUDA=1 but got both; unset one."
        )
    if force_cuda:
        raise SystemExit(
            "FORCE_CUDA=1 asks for the CUDA build of fsdp_ext, but CUDA sources do not exist in "
            "this version; unset FORCE_CUDA to make the CPU build."
        )
    if force_cpu:
        return "CPU", "FORCE_CPU=1"
    if torch.cuda is None:
        return "CPU", f"torch {torch.version} is built without CUDA"
    if shutil.which("nvcc") is None:
        return "CPU", "there is no nvcc on the PATH"
    return "CPU", "nvcc and a CUDA torch are here, but this version has no CUDA sources yet"


def find_tool(name: str, module: str, directory: str) -> str:
    """Return the path of a build tool: the one of the wheel `module`, else the one on the PATH.

    Raises:
        SystemExit: if there is neither.
    """
    try:
        path = Path(getattr(importlib.import_module(module), directory)) / name
        if path.is_file():
            return str(path)
    except (ImportError, AttributeError):
        pass
    found = shutil.which(name)
    if found is None:
        raise SystemExit(
            f"The build of fsdp_ext expects {name} but found none; `pip install {module}`."
        )
    return found


def jobs() -> int:
    """Return how many files to compile at a time: MAX_JOBS, else one for each core."""
    value = os.environ.get("MAX_JOBS", "")
    if not value:
        return os.cpu_count() or 1
    if not value.isdigit() or int(value) < 1:
        raise SystemExit(
            f"MAX_JOBS expects a positive number but got {value!r}; change or unset it."
        )
    return int(value)


def build_directory(torch: Torch, kind: str) -> Path:
    """Return where objects are kept between builds, one directory for each thing they depend on."""
    # pip's isolated environments have another torch directory each time.
    isolated = "" if torch.directory.is_relative_to(sys.prefix) else "-isolated"
    tag = f"{kind.lower()}-torch{torch.version}-{sys.implementation.cache_tag}{isolated}"
    return ROOT / "build" / tag


def run_cmake(version: str) -> Path:
    """Configure and build the extension; return the directory that has it and its build info."""
    torch = find_torch()
    kind, why = choose_kind(torch)
    print(f"fsdp_ext: {kind} build against torch {torch.version} ({why})", flush=True)
    directory = build_directory(torch, kind)
    cmake = find_tool("cmake", "cmake", "CMAKE_BIN_DIR")
    settings = {
        "CMAKE_MAKE_PROGRAM": find_tool("ninja", "ninja", "BIN_DIR"),
        "FSDP_KIND": kind,
        "FSDP_TORCH_CXX11_ABI": int(torch.cxx11_abi),
        "FSDP_TORCH_CXX_STANDARD": torch.cxx_standard,
        "FSDP_TORCH_DIR": torch.directory.as_posix(),
        "FSDP_TORCH_VERSION": torch.version,
        "FSDP_VERSION": version,
        "Python_EXECUTABLE": Path(sys.executable).as_posix(),
    }
    configure = [cmake, "--log-level=NOTICE", "-S", str(ROOT), "-B", str(directory), "-G", "Ninja"]
    configure += [f"-D{name}={value}" for name, value in settings.items()]
    build = [cmake, "--build", str(directory), "--target", "_C", "--parallel", str(jobs())]
    for command in (configure, build):
        result = subprocess.run(command, check=False)
        if result.returncode != 0:
            raise SystemExit(f"The build of fsdp_ext failed, see above: {' '.join(command)}")
    return directory


class CMakeBuild(build_ext):
    """Builds the extension with CMake and puts it and its build info into the package."""

    def build_extension(self, ext: Extension) -> None:
        """Build `ext`, the only one there is."""
        built = run_cmake(self.distribution.get_version())
        self.force = True  # another torch's extension may be newer than this one
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(built / "_C.so"), str(target))
        self.copy_file(str(built / BUILD_INFO), str(target.parent / BUILD_INFO))

    def copy_extensions_to_source(self) -> None:
        """Bring the build info along, for builds in place and editable ones."""
        super().copy_extensions_to_source()
        built = Path(self.build_lib) / "fsdp_ext" / BUILD_INFO
        self.copy_file(str(built), str(ROOT / "fsdp_ext" / BUILD_INFO))


setup(ext_modules=[Extension(EXTENSION, sources=[])], cmdclass={"build_ext": CMakeBuild})
