"""What ``pip install`` builds: which torch, CPU or CUDA, and with which nvcc."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import setuptools
import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = ("CXX", "CUDAHOSTCXX", "NVCC_CCBIN")
VARIABLES = (
    *("FORCE_CPU", "FORCE_CUDA", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST"),
    *COMPILERS,
)


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
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    module: Any = _load(ROOT / "setup.py")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
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
            'echo "compute_75 compute_80 compute_86 compute_90 compute_100 compute_120"\n'
        )
        path.chmod(0o755)
        return str(path)

    return add


HOME = "opt/nvidia/cuda-13.0"


@pytest.fixture
def cuda_home(build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let CUDA_HOME be a folder of NVIDIA's, which add_nvcc makes as ``HOME``."""
    del build  # it has deleted the variable before
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / HOME))
    return tmp_path / HOME


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    """Where torch and PyPI's packages of CUDA lie."""
    return tmp_path / "site-packages"


@pytest.fixture
def torch_of(build: Any, site_packages: Path) -> Callable[[str | None], Any]:
    """Makes the description of a torch for a version of CUDA."""
    return lambda cuda: build.Torch(site_packages / "torch", "2.11.0", cuda, 17, True)


@pytest.fixture
def kind_of(build: Any) -> Callable[[Any], tuple[str, str]]:
    """Chooses what is built against a torch, as a build does."""
    return lambda torch: build.choose_kind(torch, build.find_nvcc(torch))


def test_nvcc_is_looked_for_where_torch_looks_and_beside_it(
    build: Any,
    torch_of: Any,
    add_nvcc: Callable[[str, str], str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    torch = torch_of("13.0")
    assert build.find_nvcc(torch) is None
    places = ["default/bin", "environment/bin", "site-packages/nvidia/cu13/bin", "on_the_path"]
    for number, place in enumerate(places):
        path = add_nvcc(place, f"13.{number}")
        assert build.find_nvcc(torch) == build.Nvcc(Path(path), f"13.{number}"), place
    home = add_nvcc("home/bin", "13.9")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "home"))
    assert build.find_nvcc(torch) == build.Nvcc(Path(home), "13.9")


def test_cuda_home_without_an_nvcc_that_fits_is_left_for_another_place(
    build: Any,
    torch_of: Any,
    kind_of: Any,
    add_nvcc: Callable[[str, str], str],
    cuda_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = torch_of("13.0")
    monkeypatch.setattr(build, "has_driver", lambda: True)
    with pytest.raises(SystemExit, match=rf"but CUDA_HOME={cuda_home} has no bin/nvcc\. Run `pip"):
        kind_of(torch)
    path = add_nvcc(f"{HOME}/bin", "12.8")
    with pytest.raises(SystemExit, match=rf"but {path} belongs to CUDA 12\.8 and .*\. Run `pip"):
        kind_of(torch)
    advised = add_nvcc("site-packages/nvidia/cu13/bin", "13.0")  # what the advice installs
    why = f"with nvcc 13.0, {advised}, because CUDA_HOME={cuda_home} has none that fits"
    assert kind_of(torch) == ("CUDA", why)


def test_an_nvcc_that_fits_torch_goes_before_one_on_the_path(
    build: Any, torch_of: Any, add_nvcc: Callable[[str, str], str]
) -> None:
    on_the_path = add_nvcc("on_the_path", "12.8")
    assert str(build.find_nvcc(torch_of("13.0")).path) == on_the_path
    default = add_nvcc("default/bin", "13.0")
    assert str(build.find_nvcc(torch_of("13.0")).path) == default
    assert str(build.find_nvcc(torch_of("12.6")).path) == on_the_path


@pytest.mark.parametrize("release", ["12.0", "12.4"])
def test_an_nvcc_that_is_too_old_is_left_for_a_newer_one(
    release: str, torch_of: Any, kind_of: Any, add_nvcc: Callable[[str, str], str]
) -> None:
    torch = torch_of("12.6")
    too_old = add_nvcc("on_the_path", release)
    why = f"{too_old} belongs to CUDA {release}, which is older than 12.5"
    assert kind_of(torch) == ("CPU", why)
    newer = add_nvcc("default/bin", "12.5")
    assert kind_of(torch) == ("CUDA", f"with nvcc 12.5, {newer}")


def test_each_nvcc_has_a_build_directory_of_its_own(build: Any, torch_of: Any) -> None:
    compilers = [build.Nvcc(Path(path), "13.0") for path in ("/conda/bin/nvcc", "/usr/bin/nvcc")]
    directories = {build.build_directory(torch_of("13.0"), "CUDA", nvcc) for nvcc in compilers}
    assert len(directories) == len(compilers)  # CMake drops its settings if the compiler changes


def test_each_compiler_has_a_build_directory_of_its_own(
    build: Any, torch_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def directory(kind: str) -> Path:
        nvcc = build.Nvcc(Path("/usr/bin/nvcc"), "13.0")
        return build.build_directory(torch_of("13.0"), kind, nvcc if kind == "CUDA" else None)

    assert directory("CPU").name.startswith("cpu-torch2.11.0-")
    directories = {directory("CPU"), directory("CUDA")}
    for variable in COMPILERS:
        monkeypatch.setenv(variable, "g++-13")
        directories |= {directory("CPU"), directory("CUDA")}
    assert len(directories) == 2 * (1 + len(COMPILERS))


def test_nvcc_gets_the_compiler_that_the_environment_names(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cuda_architectures", lambda nvcc: ["90-real"])
    nvcc = build.Nvcc(Path("/usr/bin/nvcc"), "13.0")
    assert "CMAKE_CUDA_HOST_COMPILER" not in build.settings_of(nvcc, tmp_path)
    found = tmp_path / "on_the_path" / "g++-13"
    spaced = tmp_path / "a folder" / "g++"
    for program in (found, spaced):
        program.parent.mkdir()
        program.touch(0o755)
    for variable, value, expected in [
        ("CXX", "g++-13", found),
        ("CXX", "ccache g++-13 -m64", found),
        ("CXX", str(spaced), spaced),
        ("CXX", "/opt/g++", "/opt/g++"),
        ("NVCC_CCBIN", "/opt/g++", None),  # nvcc reads it
        ("CUDAHOSTCXX", "g++-13", found),
    ]:
        monkeypatch.setenv(variable, value)
        chosen = build.settings_of(nvcc, tmp_path).get("CMAKE_CUDA_HOST_COMPILER")
        assert chosen == (expected and str(expected)), value


def test_torch_and_nvcc_decide_what_is_built(
    torch_of: Any, kind_of: Any, add_nvcc: Callable[[str, str], str]
) -> None:
    assert kind_of(torch_of("13.0")) == ("CPU", "there is no nvcc")
    path = add_nvcc("on_the_path", "13.2")
    assert kind_of(torch_of("13.0")) == ("CUDA", f"with nvcc 13.2, {path}")
    kind, why = kind_of(torch_of("12.8"))
    assert (kind, why) == ("CPU", f"{path} belongs to CUDA 13.2 and torch to CUDA 12.8")
    assert kind_of(torch_of(None))[0] == "CPU"


def test_a_machine_with_a_driver_gets_no_cpu_build_without_being_asked(
    build: Any, torch_of: Any, kind_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "has_driver", lambda: True)
    with pytest.raises(SystemExit) as error:
        kind_of(torch_of("13.0"))
    assert str(error.value) == (
        "This machine has NVIDIA's driver and torch 2.11.0 has CUDA, but there is no nvcc. Run "
        '`pip install "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*"`, or install the CUDA '
        "toolkit 13 and set CUDA_HOME to it, or set FORCE_CPU=1 for a build of fsdp_ext without "
        "CUDA."
    )
    with pytest.raises(SystemExit, match=r"no nvcc\. Install the CUDA toolkit 12 \(12\.5 or "):
        kind_of(torch_of("12.8"))  # PyPI's packages for CUDA 12 have no nvcc
    assert kind_of(torch_of(None))[0] == "CPU"
    monkeypatch.setenv("FORCE_CPU", "1")
    assert kind_of(torch_of("13.0")) == ("CPU", "FORCE_CPU=1")


@pytest.fixture
def install(site_packages: Path) -> Callable[[str, str], None]:
    """Installs the metadata of a package beside torch."""

    def install(name: str, version: str) -> None:
        for old in site_packages.glob(f"{name.replace('-', '_')}-*"):
            shutil.rmtree(old)
        info = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return install


def test_an_nvcc_of_pypi_needs_its_other_packages(
    build: Any,
    torch_of: Any,
    add_nvcc: Callable[[str, str], str],
    install: Callable[[str, str], None],
) -> None:
    torch = torch_of("13.0")
    install("nvidia-cuda-nvcc", "13.0.88")
    add_nvcc("site-packages/nvidia/cu13/bin", "13.0")
    nvcc = build.find_nvcc(torch)
    for package in build.PARTS_OF_NVCC:
        assert f"lacks the package {package}" in build.why_no_cuda(torch, nvcc)
        install(package, "13.5.37")
    assert "13.0 and its package nvidia-cuda-crt is 13.5.37" in build.why_no_cuda(torch, nvcc)
    install("nvidia-cuda-crt", "13.0.88")
    assert "13.0 and its package nvidia-nvvm is 13.5.37" in build.why_no_cuda(torch, nvcc)
    install("nvidia-nvvm", "13.0.88")
    assert build.why_no_cuda(torch, nvcc) is None


@pytest.mark.usefixtures("cuda_home")
def test_a_toolkit_in_a_folder_of_nvidias_needs_no_packages_of_pypi(
    build: Any, torch_of: Any, kind_of: Any, add_nvcc: Callable[[str, str], str]
) -> None:
    path = add_nvcc(f"{HOME}/bin", "13.0")
    assert kind_of(torch_of("13.0")) == ("CUDA", f"with nvcc 13.0, {path}")
    assert not build.is_from_pypi(build.Nvcc(Path("/usr/bin/nvcc"), "13.0"))


def test_the_libraries_of_pypis_nvcc_get_the_names_that_linkers_look_for(
    build: Any,
    torch_of: Any,
    add_nvcc: Callable[[str, str], str],
    install: Callable[[str, str], None],
    site_packages: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "cuda_architectures", lambda nvcc: ["90-real"])
    install("nvidia-cuda-nvcc", "13.0.88")
    add_nvcc("site-packages/nvidia/cu13/bin", "13.0")
    nvcc = build.find_nvcc(torch_of("13.0"))
    library = site_packages / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    library.parent.mkdir()
    library.touch()
    for _ in range(2):  # a second build finds the link
        settings = build.settings_of(nvcc, tmp_path / "a build")
        assert Path(settings["CUDA_CUDART"]).name == "libcudart.so"
        assert Path(settings["CUDA_CUDART"]).resolve() == library.resolve()
    links = tmp_path / "a build" / "cuda_libraries"
    assert shlex.split(settings["CMAKE_CUDA_FLAGS"]) == [f"-L{links}", f"-L{library.parent}"]
    other = build.Nvcc(Path(add_nvcc("default/bin", "13.0")), "13.0")
    assert "CUDA_CUDART" not in build.settings_of(other, tmp_path / "build")


@pytest.mark.parametrize(
    ("listed", "chosen", "said"),
    [
        (
            "7.5 8.0 8.6 9.0 10.0 12.0+PTX",  # of NVIDIA's image
            "80-real 86-real 90-real 100-real 120-real 120-virtual",
            "left 7.5 of TORCH_CUDA_ARCH_LIST out; it needs 8.0 or newer",
        ),
        ("Turing;Hopper", "90-real 90-virtual", "left 7.5+PTX of"),
        ("9.0a;9.0a, 8.0+PTX;", "90a-real 80-real 80-virtual", ""),
        ("Blackwell", "100-real 120-real 120-virtual", ""),
        (" ; ", "80-real 90-real 100-real 100-virtual", ""),
    ],
)
def test_torchs_list_of_gpus_is_taken_without_those_that_are_too_old(
    listed: str,
    chosen: str,
    said: str,
    build: Any,
    add_nvcc: Callable[[str, str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    nvcc = build.Nvcc(Path(add_nvcc("default/bin", "13.0")), "13.0")
    assert build.cuda_architectures(nvcc) == chosen.split()
    out = capsys.readouterr().out
    assert said in out
    assert bool(said) == bool(out)


@pytest.mark.parametrize(
    ("listed", "error"),
    [
        ("7.0;7.5+PTX", r"is '7\.0;7\.5\+PTX', and fsdp_ext needs 8\.0 or newer\. Add"),
        ("9.0;15.0", r"has '15\.0'\. Use only GPUs that this nvcc knows \(\[75, 80, "),
        ("hopper", r"has 'hopper'\. Use numbers such as 9\.0"),
    ],
)
def test_a_list_of_gpus_that_cannot_be_built_for_is_refused(
    listed: str,
    error: str,
    build: Any,
    add_nvcc: Callable[[str, str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    nvcc = build.Nvcc(Path(add_nvcc("default/bin", "13.0")), "13.0")
    with pytest.raises(SystemExit, match=error):
        build.cuda_architectures(nvcc)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="it compiles with nvcc")
def test_kernels_are_compiled_in_a_folder_whose_path_has_a_space(tmp_path: Path) -> None:
    find_tool = _load(ROOT / "setup.py").find_tool
    folder = tmp_path / "a clone"
    folder.mkdir()
    for name in ("CMakeLists.txt", "csrc"):
        (folder / name).symlink_to(ROOT / name)
    cmake = find_tool("cmake", "cmake", "CMAKE_BIN_DIR")
    ninja = find_tool("ninja", "ninja", "BIN_DIR")
    options = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DFSDP_KIND=CUDA"]
    target = "CMakeFiles/fsdp_core.dir/csrc/device/cuda_transfer.cu.o"
    subprocess.run([cmake, "-S", folder, "-B", folder / "build", *options], check=True)
    subprocess.run([cmake, "--build", folder / "build", "--target", target], check=True)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The build backend in an isolated environment without torch."""
    module: Any = _load(ROOT / "tools" / "build_backend.py")
    monkeypatch.setattr(sys, "path", [])
    return module


@pytest.fixture
def install_torch(tmp_path: Path) -> Callable[[str], str]:
    def install(version: str) -> str:
        info = tmp_path / "outside" / "torch.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        return str(info.parent)

    return install


def test_the_build_uses_the_torch_outside_of_pips_environment(
    backend: Any, install_torch: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = install_torch("2.11.0+cu126")
    monkeypatch.setattr(backend, "path_outside", lambda: [outside])
    seen: list[list[str]] = []
    monkeypatch.setattr(backend.build_meta, "build_wheel", lambda *_: seen.append([*sys.path]))
    assert backend.torch_requirements() == []
    backend.build_wheel("wheels")
    assert seen == [[outside]]
    install_torch("2.5.1+cu124")  # too old to build against, so pip gets a newer one
    monkeypatch.setenv("PIP_BUILD_TRACKER", "some/folder")
    assert backend.torch_requirements() == ["torch>=2.11.0.dev0"]


@pytest.mark.parametrize(
    ("version", "is_new_enough"),
    [
        ("2.11.0a0+eb65b36914.nv26.02", True),  # of NVIDIA's image
        ("2.11.0.dev20260101+cu130", True),
        ("2.11.0+cu126", True),
        ("2.10.1", False),
    ],
)
def test_the_package_requires_no_newer_torch_than_the_build_takes(
    version: str,
    is_new_enough: bool,
    backend: Any,
    install_torch: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (required,) = re.findall(r'^dependencies = \["(torch.*?)"', project, re.MULTILINE)
    assert Requirement(required).specifier.contains(version) is is_new_enough
    outside = install_torch(version)
    monkeypatch.setattr(backend, "path_outside", lambda: [outside])
    monkeypatch.setenv("PIP_BUILD_TRACKER", "some/folder")
    assert backend.torch_requirements() == ([] if is_new_enough else [required])
    monkeypatch.setattr(torch, "__version__", version)
    find_torch = _load(ROOT / "setup.py").find_torch
    if is_new_enough:
        assert find_torch().version == version
    else:
        with pytest.raises(SystemExit, match=rf"needs torch 2\.11 or newer and found {version}"):
            find_torch()


def test_the_environment_outside_is_found_with_what_it_links_to(backend: Any) -> None:
    places = [Path(place) for place in backend.path_outside()]
    assert Path(torch.__file__).parents[1] in places


def test_builders_that_hide_the_torch_are_told_how_to_build(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "path_outside", list)
    monkeypatch.delenv("PIP_BUILD_TRACKER", raising=False)
    with pytest.raises(SystemExit, match=r"sees no torch 2\.11 or newer in "):
        backend.torch_requirements()


@pytest.mark.parametrize(
    ("target", "names", "stamps"),
    [
        ("test-python", ("VENV", "TORCH"), (".tools", ".torch", ".train", ".test")),
        ("bench-peers", ("PEERS_VENV", "TORCH"), (".ready",)),
        ("cuda-install", ("CUDA_VENV", "CUDA_TORCH"), (".ready",)),
    ],
)
@pytest.mark.parametrize(
    "torch", ["torch==2.13.0", "https://server/torch-2.13.0%2Bcpu.whl", "torch @ file:///torch.whl"]
)
def test_make_installs_another_torch_over_the_one_that_is_there(
    target: str, names: tuple[str, str], stamps: Sequence[str], torch: str, tmp_path: Path
) -> None:
    environment, variable = names

    def would_install(torch: str) -> bool:
        command = ["make", "--dry-run", f"{environment}={tmp_path}", f"{variable}={torch}", target]
        said = subprocess.check_output(command, cwd=ROOT, text=True)
        return f'install --quiet "{torch}"' in said

    assert would_install(torch)
    for stamp in stamps:
        (tmp_path / stamp).write_text(f"{torch}\n")
    assert not would_install(torch)
    assert would_install("torch==2.11.0")
    assert would_install(torch[:-1])
