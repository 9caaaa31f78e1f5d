"""Build fsdp_ext: find torch, choose CPU or CUDA, and run CMake.

CMakeLists.txt has the sources and flags, and pyproject.toml everything else about the package.

    FORCE_CPU=1     make the CPU build
    FORCE_CUDA=1    make the CUDA build, or fail
    CUDA_HOME=dir   use this CUDA toolkit, if it is of torch's major version and 12.5 or newer;
                    otherwise the first such one with an nvcc on the PATH, in PyPI's packages
                    beside torch, in the environment (conda), or in /usr/local/cuda. CUDA_PATH
                    means the same
    CXX=program     the C++ compiler, also for nvcc
    CUDAHOSTCXX=program
                    the C++ compiler for nvcc, if nvcc refuses CXX as too new
    FSDP_WERROR=1   treat compiler warnings of the CPU build as errors
    MAX_JOBS=n      compile at most n files at a time
    TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX"
                    build for these GPUs, as torch's own extensions do, but for none older than
                    8.0; the default is 8.0, 9.0 and 10.0+PTX, without those that nvcc does not know
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 11)
OLDEST_CUDA = (12, 5)  # it has cudaGetDriverEntryPointByVersion
OLDEST_ARCHITECTURE = 80  # bf16 conversions in hardware
DEFAULT_ARCHITECTURES = (80, 90, 100)
# What torch's own extensions mean by these names, from Volta on. torch's Blackwell has 10.3 and
# 12.1, too, where code for 10.0 and 12.0 runs, and which older compilers do not know.
NAMED_ARCHITECTURES = {
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ampere+Tegra": "8.7",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;12.0+PTX",
    "Blackwell+Tegra": "11.0",
}
DEFAULT_CUDA = "/usr/local/cuda/bin"
# PyPI's packages beside nvidia-cuda-nvcc, which requires only some of them, in any version.
PARTS_OF_ONE_RELEASE = ("nvidia-cuda-crt", "nvidia-nvvm")
PARTS_OF_NVCC = (*PARTS_OF_ONE_RELEASE, "nvidia-cuda-cccl", "nvidia-cuda-runtime")
EXTRAS = "nvcc,crt,nvvm,cudart,cccl"  # of the package cuda-toolkit
# Variables that name compilers. CC has no effect, as there is no C code.
COMPILERS = ("CXX", "CUDAHOSTCXX", "NVCC_CCBIN")
LAUNCHERS = ("ccache", "distcc", "sccache")
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

    @property
    def cuda_major(self) -> str:
        """The major version of its CUDA; empty if it has none."""
        return (self.cuda or "").split(".")[0]


@dataclass(frozen=True)
class Nvcc:
    """A compiler for CUDA, and its release, such as "13.0"."""

    path: Path
    release: str

    @property
    def major(self) -> str:
        """The major version of its CUDA."""
        return self.release.split(".")[0]

    @property
    def toolkit(self) -> Path:
        """The directory with the compiler's headers and libraries."""
        return self.path.resolve().parents[1]

    def fits(self, torch: Torch) -> bool:
        """Return whether its CUDA is new enough and has the major version of torch's."""
        is_new = tuple(map(int, self.release.split("."))) >= OLDEST_CUDA
        return is_new and self.major == torch.cuda_major


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


def choose_kind(torch: Torch, nvcc: Nvcc | None) -> tuple[str, str]:
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
    missing = why_no_cuda(torch, nvcc)
    if missing is None:
        assert nvcc is not None
        why = f"with nvcc {nvcc.release}, {nvcc.path}"
        home = cuda_home()
        if home and nvcc.path.parent != Path(home, "bin"):
            why += f", because CUDA_HOME={home} has none that fits"
        return "CUDA", why
    if force_cuda:
        raise SystemExit(
            f"FORCE_CUDA=1 asks for the CUDA build of fsdp_ext, but {missing}. "
            f"{how_to_get_cuda(torch)}, or unset FORCE_CUDA to make the CPU build."
        )
    if torch.cuda is not None and has_driver():
        raise SystemExit(
            f"This machine has NVIDIA's driver and torch {torch.version} has CUDA, but {missing}. "
            f"{how_to_get_cuda(torch)}, or set FORCE_CPU=1 for a build of fsdp_ext without CUDA."
        )
    return "CPU", missing


def why_no_cuda(torch: Torch, nvcc: Nvcc | None) -> str | None:
    """Return why a CUDA build is impossible, or None if it is possible."""
    if torch.cuda is None:
        return f"torch {torch.version} is built without CUDA"
    if nvcc is None:
        home = cuda_home()
        return f"CUDA_HOME={home} has no bin/nvcc" if home else "there is no nvcc"
    if nvcc.major != torch.cuda_major:
        return f"{nvcc.path} belongs to CUDA {nvcc.release} and torch to CUDA {torch.cuda}"
    if not nvcc.fits(torch):
        return f"{nvcc.path} belongs to CUDA {nvcc.release}, which is older than {oldest_cuda()}"
    return why_incomplete(nvcc)


def why_incomplete(nvcc: Nvcc) -> str | None:
    """Return which package an nvcc from PyPI lacks or has of another release, or None."""
    if not is_from_pypi(nvcc):
        return None
    site_packages = str(nvcc.toolkit.parents[1])
    installed = {
        found.metadata["Name"]: found.version for found in distributions(path=[site_packages])
    }
    for package in PARTS_OF_NVCC:
        if package not in installed:
            return f"{nvcc.path} lacks the package {package}"
    for package in PARTS_OF_ONE_RELEASE:  # a newer nvvm writes PTX that an older ptxas refuses
        if not installed[package].startswith(f"{nvcc.release}."):
            return (
                f"{nvcc.path} is of CUDA {nvcc.release} and its package {package} is "
                f"{installed[package]}"
            )
    return None


def how_to_get_cuda(torch: Torch) -> str:
    """Return the beginning of a sentence that says what to install for a CUDA build."""
    if torch.cuda is None:
        return "Install a torch with CUDA"
    toolkit = f"the CUDA toolkit {torch.cuda_major}"
    home = "and set CUDA_HOME to it"
    if int(torch.cuda_major) < 13:  # PyPI's nvidia-cuda-nvcc-cu12 has no nvcc in it
        return f"Install {toolkit} ({oldest_cuda()} or newer) {home}"
    package = f"cuda-toolkit[{EXTRAS}]=={torch.cuda}.*"
    return f'Run `pip install "{package}"`, or install {toolkit} {home}'


def oldest_cuda() -> str:
    """Return the oldest release of CUDA that can build the extension."""
    return ".".join(map(str, OLDEST_CUDA))


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


def find_nvcc(torch: Torch) -> Nvcc | None:
    """Return the nvcc to build with: the first that fits torch, or else the first, or None."""
    found = []
    for place in places_of_nvcc(torch):
        path = shutil.which("nvcc", path=str(place))
        release = release_of(Path(path)) if path else None
        if path and release:
            found.append(Nvcc(Path(path), release))
    fitting = (nvcc for nvcc in found if nvcc.fits(torch))
    return next(fitting, found[0] if found else None)


def places_of_nvcc(torch: Torch) -> list[Path]:
    """Return the directories that may have nvcc, in the order in which they are tried."""
    home = cuda_home()
    named = [Path(home, "bin")] if home else []
    on_the_path = [Path(place) for place in os.get_exec_path()]
    packages = importlib.util.find_spec("nvidia")  # a namespace package of PyPI's wheels
    found = [*packages.submodule_search_locations] if packages is not None else []
    found += [torch.directory.parent / "nvidia"]  # the only one that an isolated build can see
    from_pypi = [Path(place) / f"cu{torch.cuda_major}" / "bin" for place in found]
    return [*named, *on_the_path, *from_pypi, Path(sys.prefix) / "bin", Path(DEFAULT_CUDA)]


def release_of(program: Path) -> str | None:
    """Return the release of a program of the CUDA toolkit, such as "13.0", or None."""
    result = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"release (\d+\.\d+)", result.stdout)
    return match.group(1) if match else None


def is_from_pypi(nvcc: Nvcc) -> bool:
    """Return whether an nvcc comes from PyPI."""
    return any(nvcc.toolkit.parent.parent.glob("nvidia_cuda_nvcc-*.dist-info"))


def settings_of(nvcc: Nvcc, directory: Path) -> dict[str, object]:
    """Return CMake's settings for an nvcc. Links that they name are made in `directory`."""
    settings: dict[str, object] = {
        "CMAKE_CUDA_COMPILER": nvcc.path.as_posix(),
        "CMAKE_CUDA_ARCHITECTURES": ";".join(cuda_architectures(nvcc)),
    }
    if compiler := host_compiler():
        settings["CMAKE_CUDA_HOST_COMPILER"] = compiler
    if not is_from_pypi(nvcc):
        return settings
    # PyPI's libraries are in lib, but nvcc links from lib64. There is libcudart.so.13, but linkers
    # look for libcudart.so.
    libraries = nvcc.toolkit / "lib"
    links = directory / "cuda_libraries"
    links.mkdir(parents=True, exist_ok=True)
    link = links / "libcudart.so"
    link.unlink(missing_ok=True)
    link.symlink_to(next(libraries.glob("libcudart.so.*")))
    return settings | {
        "CMAKE_CUDA_FLAGS": shlex.join([f"-L{links}", f"-L{libraries}"]),
        "CUDA_CUDART": link.as_posix(),
    }


def host_compiler() -> str | None:
    """Return the C++ compiler that nvcc is to use, or None for the one that it finds itself."""
    named = os.environ.get("CUDAHOSTCXX", "")
    if not named and not os.environ.get("NVCC_CCBIN"):  # nvcc reads NVCC_CCBIN itself
        named = os.environ.get("CXX", "")
    # A launcher may come before the compiler, and options after it.
    words = [named] if shutil.which(named) else shlex.split(named)
    if len(words) > 1 and Path(words[0]).name in LAUNCHERS:
        del words[0]
    return shutil.which(words[0]) or words[0] if words else None


def cuda_architectures(nvcc: Nvcc) -> list[str]:
    """Return the GPUs to build for, by their names in CMake.

    Raises:
        SystemExit: if TORCH_CUDA_ARCH_LIST is malformed or has only GPUs that are too old, or nvcc
            does not know its GPUs.
    """
    command = [nvcc.path, "--list-gpu-arch"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    known = {int(number) for number in re.findall(r"compute_(\d+)", said)}
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    names = [name for name in re.split(r"[;, ]+", listed) if name]
    items = [item for name in names for item in NAMED_ARCHITECTURES.get(name, name).split(";")]
    if not items:
        return default_architectures(known)
    result, too_old = [], []
    for item in items:
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
        if match is None:
            raise SystemExit(
                f"TORCH_CUDA_ARCH_LIST has {item!r}. Use numbers such as 9.0 or 9.0+PTX, or unset "
                "it."
            )
        major, minor, suffix, ptx = match.groups()
        number = int(major + minor)
        if number < OLDEST_ARCHITECTURE:
            too_old.append(item)
            continue
        if number not in known:
            raise SystemExit(
                f"TORCH_CUDA_ARCH_LIST has {item!r}. Use only GPUs that this nvcc knows "
                f"({sorted(known)}), or unset it."
            )
        result.append(f"{number}{suffix}-real")
        if ptx:
            result.append(f"{number}{suffix}-virtual")
    oldest = OLDEST_ARCHITECTURE / 10
    if not result:
        raise SystemExit(
            f"TORCH_CUDA_ARCH_LIST is {listed!r}, and fsdp_ext needs {oldest} or newer. Add such a "
            "GPU, or unset it."
        )
    if too_old:
        left_out = ", ".join(too_old)
        print(f"fsdp_ext: left {left_out} of TORCH_CUDA_ARCH_LIST out; it needs {oldest} or newer")
    return list(dict.fromkeys(result))


def default_architectures(known: set[int]) -> list[str]:
    """Return the GPUs to build for by default with an nvcc that knows these.

    Raises:
        SystemExit: if nvcc knows none of them.
    """
    chosen = [number for number in DEFAULT_ARCHITECTURES if number in known]
    if not chosen:
        raise SystemExit(
            f"The CUDA build of fsdp_ext needs an nvcc that knows one of {DEFAULT_ARCHITECTURES}. "
            f"This one knows {sorted(known)}. Upgrade it."
        )
    return [f"{number}-real" for number in chosen] + [f"{chosen[-1]}-virtual"]


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


def build_directory(torch: Torch, kind: str, nvcc: Nvcc | None) -> Path:
    """Return the directory that keeps objects between builds of the same kind."""
    # Each of pip's isolated environments has torch in another directory.
    isolated = "" if torch.directory.is_relative_to(sys.prefix) else "-isolated"
    # If the compiler of a build directory changes, CMake drops all settings of that directory.
    if kind == "CUDA" and nvcc is not None:
        kind += f"-nvcc{nvcc.release}-{zlib.crc32(str(nvcc.path).encode()):08x}"
    compilers = [os.environ.get(name, "") for name in COMPILERS]
    if any(compilers):
        kind += f"-cxx{zlib.crc32(repr(compilers).encode()):08x}"
    tag = f"{kind.lower()}-torch{torch.version}-{sys.implementation.cache_tag}{isolated}"
    return ROOT / "build" / tag


def run_cmake(version: str) -> Path:
    """Configure and build the extension; return the directory of it and its build info."""
    torch = find_torch()
    nvcc = find_nvcc(torch)
    kind, why = choose_kind(torch, nvcc)
    print(f"fsdp_ext: {kind} build against torch {torch.version} ({why})", flush=True)
    directory = build_directory(torch, kind, nvcc)
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
    if kind == "CUDA" and nvcc is not None:
        settings |= settings_of(nvcc, directory)
    elif os.environ.get("FSDP_WERROR"):
        settings["FSDP_WERROR"] = "ON"
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
        self.built = built

    def copy_extensions_to_source(self) -> None:
        """Copy the build info, too, for builds in place and editable ones."""
        super().copy_extensions_to_source()
        info = Path(self.build_lib) / "fsdp_ext" / BUILD_INFO
        self.copy_file(str(info), str(ROOT / "fsdp_ext" / BUILD_INFO))
        # The Makefile builds the C++ tests in the directory of a CPU build, with the same core.
        tests = ROOT / "build" / "cpp"
        if self.built.name.startswith("cpu-") and (tests.is_symlink() or not tests.exists()):
            tests.unlink(missing_ok=True)
            tests.symlink_to(self.built.name)


setup(ext_modules=[Extension(EXTENSION, sources=[])], cmdclass={"build_ext": CMakeBuild})
