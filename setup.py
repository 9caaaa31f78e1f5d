"""Build fsdp_ext: find torch, choose CPU or CUDA, and run CMake.

CMakeLists.txt has the sources and flags, and pyproject.toml everything else about the package.

    FORCE_CPU=1     make the CPU build
    FORCE_CUDA=1    make the CUDA build, or fail
    CUDA_HOME=dir   use this CUDA toolkit; otherwise the one of the nvcc on the PATH, or else
                    /usr/local/cuda
    MAX_JOBS=n      compile at most n files at a time
    TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX"
                    build for these GPUs, as torch's own extensions do; the default is 8.0, 9.0
                    and 10.0+PTX, without those that nvcc does not know
"""

from __future__ import annotations

import ctypes
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
OLDEST_ARCHITECTURE = 80  # bf16 conversions in hardware
DEFAULT_ARCHITECTURES = (80, 90, 100)
DEFAULT_CUDA = "/usr/local/cuda/bin"
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
            f"The build of fsdp_ext needs torch {oldest} or newer and cannot import torch "
            f"({error}). Install it, or build without --no-build-isolation."
        ) from error
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    if (int(major), int(minor)) < OLDEST_TORCH:
        raise SystemExit(
            f"fsdp_ext needs torch {oldest} or newer and found {torch.__version__}. Upgrade torch."
        )
    directory = Path(torch.__file__).parent
    # torch's headers may need the C++ standard that torch builds its own extensions with.
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
        SystemExit: if the environment asks for a build that is impossible here.
    """
    force_cpu = os.environ.get("FORCE_CPU", "0") not in ("", "0")
    force_cuda = os.environ.get("FORCE_CUDA", "0") not in ("", "0")
    if force_cpu and force_cuda:
        raise SystemExit(
            "The build of fsdp_ext got both FORCE_CPU=1 and FORCE_CUDA=1. Unset one of them."
        )
    if force_cpu:
        return "CPU", "FORCE_CPU=1"
    missing = why_no_cuda(torch)
    if missing is None:
        return "CUDA", "FORCE_CUDA=1" if force_cuda else f"with nvcc {nvcc_version()}"
    if force_cuda:
        raise SystemExit(
            f"FORCE_CUDA=1 asks for the CUDA build of fsdp_ext, but {missing}. Install what is "
            "missing, or unset FORCE_CUDA to make the CPU build."
        )
    if torch.cuda is not None and has_driver():
        raise SystemExit(
            f"This machine has NVIDIA's driver and torch {torch.version} has CUDA, but {missing}. "
            f"Install the CUDA toolkit {torch.cuda.split('.')[0]} and set CUDA_HOME to it, or set "
            "FORCE_CPU=1 for a build of fsdp_ext without CUDA."
        )
    return "CPU", missing


def why_no_cuda(torch: Torch) -> str | None:
    """Return why a CUDA build is impossible, or None if it is possible."""
    if torch.cuda is None:
        return f"torch {torch.version} is built without CUDA"
    version = nvcc_version()
    if version is None:
        home = cuda_home()
        return f"CUDA_HOME={home} has no bin/nvcc" if home else "there is no nvcc"
    if version.split(".")[0] != torch.cuda.split(".")[0]:
        return f"nvcc belongs to CUDA {version} and torch to CUDA {torch.cuda}"
    return None


def has_driver() -> bool:
    """Return whether NVIDIA's driver is installed."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def cuda_home() -> str | None:
    """Return the directory of the CUDA toolkit that the environment names, or None."""
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or None


def find_nvcc() -> str | None:
    """Return the path of nvcc, or None. It is looked for where torch looks."""
    home = cuda_home()
    if home is not None:
        return shutil.which("nvcc", path=os.path.join(home, "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path=DEFAULT_CUDA)


def nvcc_version() -> str | None:
    """Return the release of nvcc, such as "13.0", or None if there is none."""
    nvcc = find_nvcc()
    if nvcc is None:
        return None
    result = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"release (\d+\.\d+)", result.stdout)
    return match.group(1) if match else None


def cuda_architectures() -> list[str]:
    """Return the GPUs to build for, by their names in CMake.

    Raises:
        SystemExit: if TORCH_CUDA_ARCH_LIST is malformed, or nvcc does not know its GPUs.
    """
    known = {
        int(number)
        for number in re.findall(
            r"compute_(\d+)",
            subprocess.run(
                [find_nvcc() or "nvcc", "--list-gpu-arch"],
                capture_output=True,
                text=True,
                check=False,
            ).stdout,
        )
    }
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if not listed.strip():
        chosen = [number for number in DEFAULT_ARCHITECTURES if number in known]
        if not chosen:
            raise SystemExit(
                f"The CUDA build of fsdp_ext needs an nvcc that knows one of "
                f"{DEFAULT_ARCHITECTURES}. This one knows {sorted(known)}. Upgrade it."
            )
        return [f"{number}-real" for number in chosen] + [f"{chosen[-1]}-virtual"]
    result = []
    for item in re.split(r"[;, ]+", listed.strip()):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
        if match is None:
            raise SystemExit(
                f"TORCH_CUDA_ARCH_LIST has {item!r}. Use numbers such as 9.0 or 9.0+PTX, or unset "
                "it."
            )
        major, minor, suffix, ptx = match.groups()
        number = int(major + minor)
        if number < OLDEST_ARCHITECTURE or number not in known:
            raise SystemExit(
                f"TORCH_CUDA_ARCH_LIST has {item!r}. Use {OLDEST_ARCHITECTURE / 10} or newer, and "
                f"only GPUs that this nvcc knows ({sorted(known)}), or unset it."
            )
        result.append(f"{number}{suffix}-real")
        if ptx:
            result.append(f"{number}{suffix}-virtual")
    return result


def find_tool(name: str, module: str, directory: str) -> str:
    """Return the path of a build tool from the wheel `module`, or else from the PATH.

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
            f"The build of fsdp_ext needs {name} and found none. Run `pip install {module}`."
        )
    return found


def jobs() -> int:
    """Return how many files to compile at a time: MAX_JOBS, or one for each core."""
    value = os.environ.get("MAX_JOBS", "")
    if not value:
        return os.cpu_count() or 1
    if not value.isdigit() or int(value) < 1:
        raise SystemExit(f"MAX_JOBS is {value!r}. Set it to a positive number, or unset it.")
    return int(value)


def build_directory(torch: Torch, kind: str) -> Path:
    """Return the directory that keeps objects between builds of the same kind."""
    # Each of pip's isolated environments has torch in another directory.
    isolated = "" if torch.directory.is_relative_to(sys.prefix) else "-isolated"
    # If the compiler of a build directory changes, CMake drops all settings of that directory.
    kind = f"{kind}-nvcc{nvcc_version()}" if kind == "CUDA" else kind
    tag = f"{kind.lower()}-torch{torch.version}-{sys.implementation.cache_tag}{isolated}"
    return ROOT / "build" / tag


def run_cmake(version: str) -> Path:
    """Configure and build the extension; return the directory of it and its build info."""
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
    if kind == "CUDA":
        settings["CMAKE_CUDA_COMPILER"] = find_nvcc()
        settings["CMAKE_CUDA_ARCHITECTURES"] = ";".join(cuda_architectures())
    configure = [cmake, "--log-level=NOTICE", "-S", str(ROOT), "-B", str(directory), "-G", "Ninja"]
    configure += [f"-D{name}={value}" for name, value in settings.items()]
    build = [cmake, "--build", str(directory), "--target", "_C", "--parallel", str(jobs())]
    for command in (configure, build):
        result = subprocess.run(command, check=False)
        if result.returncode != 0:
            raise SystemExit(f"The build of fsdp_ext failed; see above: {' '.join(command)}")
    return directory


class CMakeBuild(build_ext):
    """Builds the extension with CMake and copies it and its build info into the package."""

    def build_extension(self, ext: Extension) -> None:
        """Build `ext`, the only one there is."""
        built = run_cmake(self.distribution.get_version())
        self.force = True  # the file in place may be newer and of another torch
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(built / "_C.so"), str(target))
        self.copy_file(str(built / BUILD_INFO), str(target.parent / BUILD_INFO))

    def copy_extensions_to_source(self) -> None:
        """Copy the build info, too, for builds in place and editable ones."""
        super().copy_extensions_to_source()
        built = Path(self.build_lib) / "fsdp_ext" / BUILD_INFO
        self.copy_file(str(built), str(ROOT / "fsdp_ext" / BUILD_INFO))


setup(ext_modules=[Extension(EXTENSION, sources=[])], cmdclass={"build_ext": CMakeBuild})
