"""Build, test and measure on a machine with one GPU, in three parts of less than nine minutes.

    python tools/gpu_check.py --part build|parity|bench [--out DIR] [--only STEP ...]

build   describes the machine, tries torch and NCCL without fsdp_ext, and runs kernels and tests
parity  trains beside PyTorch's FSDP with two ranks on one card, delays streams, and runs sanitizers
bench   measures

It uses the installed Python, torch, CuPy and nvcc, and no network. Every part begins with the
build, since each may run on a new machine. A wheel for this Python replaces it: $FSDP_WHEEL, or the
one in dist/. Each step has a time limit, the limits of a part add up to less than nine minutes, and
no step begins that cannot end in time. After every step the results so far are written to
<out>/<device>-<part>-<date>.json, and all output to a .log file beside it. The folder is $OUT if it
is set. A table comes last. The exit code is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# pyproject.toml configures extensions of pytest that may be missing on this machine.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-ra"]
PYTEST += ["--disable-warnings", "--tb=short"]
PARTS = ("build", "parity", "bench")
# One call on a machine that is lent ends after ten minutes.
MINUTES = 9.0
# Seconds between asking a late step to end, so that it reports its results, and killing it.
GRACE_S = 20


@dataclass(frozen=True)
class Step:
    """One command and the most seconds that it may take."""

    name: str
    command: list[str]
    limit: int
    environment: dict[str, str]
    part: str = "build"
    json: bool = False  # whether it is a benchmark, which writes its rows with --json


def steps(capability: str, part: str) -> list[Step]:
    """Return the steps of a part, in order."""
    sanitizer = shutil.which("compute-sanitizer") or "compute-sanitizer"
    kernels = ["tests/gpu/test_gpu_kernels.py", "tests/test_packer.py"]
    parity = "tests/gpu/test_gpu_parity.py"
    ordering = "tests/gpu/test_gpu_ordering.py"
    ignored = ["--ignore", kernels[0], "--ignore", parity, "--ignore", ordering]
    # Most tests start processes of their own, which take seconds.
    at_once = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    # Sanitizers make kernels slow, so they run few and small cases.
    few = ["-k", "(independent and False) or current_stream or (entries and not 2000 and not 9000)"]
    # With an allocation of its own for each tensor, memcheck sees where a tensor ends.
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

    def sanitize(tool: str) -> list[str]:
        options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
        options += ["--report-api-errors", "no"] if tool == "memcheck" else []
        return [sanitizer, *options, *PYTEST, "-p", "no:cacheprovider", *kernels[:1], *few]

    def bench(name: str, limit: int, *options: str) -> Step:
        command = [sys.executable, "-m", "bench", name, "--device", "cuda", *options]
        return Step(name, command, limit, {}, "bench", json=True)

    planned = [
        Step(
            "environment", [sys.executable, "tools/gpu_environment.py"], 40, {}, "build"
        ),  # before ours, so that a fault of the machine is seen as one
        Step("describe", [sys.executable, "-m", "fsdp_ext"], 30, {}, "build"),
        Step("kernels", [*PYTEST, *kernels], 80, {}, "build"),
        Step(
            "tests", [*PYTEST, *at_once, "--durations=8", "tests/gpu", *ignored], 170, {}, "build"
        ),
        Step("parity", [*PYTEST, parity], 150, deterministic, "parity"),
        Step("late streams", [*PYTEST, ordering], 60, {}, "parity"),
        Step("memcheck", sanitize("memcheck"), 65, uncached, "parity"),
        Step("initcheck", sanitize("initcheck"), 50, uncached, "parity"),
        bench("pack", 50),
        bench("step", 70),
        bench("host_overhead", 50, "--quick"),
        bench("collectives", 40, "--quick"),
        bench("overlap", 50, "--quick"),
        bench("memory", 50),
        bench("scaling", 20),
    ]
    return [build_step(capability), *(step for step in planned if step.part == part)]


def build_step(capability: str) -> Step:
    """Return the step that builds the extension in place, or takes it from a wheel."""
    if wheel := find_wheel():
        return Step("build", [sys.executable, __file__, "--unpack", str(wheel)], 20, {})
    environment = {"FORCE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": capability}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    return Step("build", command, 180, environment)


def find_wheel() -> Path | None:
    """Return a wheel of a CUDA build for this Python and the installed torch, or None."""
    if named := os.environ.get("FSDP_WHEEL"):
        return Path(named)
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    torch = "".join(importlib.metadata.version("torch").split(".")[:2])
    found = sorted((ROOT / "dist").glob(f"fsdp_ext-*-{torch}cu*-{tag}-*.whl"))
    return found[-1] if found else None


def unpack(wheel: Path) -> None:
    """Put what a wheel has compiled beside the sources, as a build in place does."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"fsdp_ext/(_C\..*\.so|_build_info\.py)", name):
                archive.extract(name, ROOT)
                print(f"{name} of {wheel.name}")


def run_step(step: Step, limit: float, log: Path, rows: Path, all_output: Path) -> dict[str, Any]:
    """Run one step in a process group of its own; return its result."""
    command = [*step.command, "--json", str(rows)] if step.json else step.command
    environment = {
        **os.environ,
        **step.environment,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PYTHONUNBUFFERED": "1",
    }
    start = time.monotonic()
    with log.open("w+", encoding="utf-8", errors="replace") as output:
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return {"outcome": f"could not start: {error}", "seconds": 0.0}
        try:
            code = process.wait(timeout=limit)
            outcome = "ok" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            end(process)
            outcome = f"did not end within {limit:.0f} s"
        output.seek(0)
        text = output.read()
    result: dict[str, Any] = {
        "outcome": outcome,
        "seconds": round(time.monotonic() - start, 1),
        "summary": summary_of(text),
    }
    if outcome != "ok":
        result["output"] = text[-6000:]
    if step.json and rows.exists():
        result["rows"] = json.loads(rows.read_text(encoding="utf-8"))["rows"]
    print(text if len(text) < 8000 else f"{text[:2000]}\n...\n{text[-6000:]}")
    with all_output.open("a", encoding="utf-8") as file:
        file.write(f"\n=== {step.name}: {outcome}\n{text}")
    return result


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, so that pytest reports and torchrun ends its workers; then kill it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)  # a sanitizer does not pass it on
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def summary_of(text: str) -> str:
    """Return the line with the count of pytest or of the sanitizer, or else the last line."""
    found = re.findall(r"^.*(?:\d+ (?:passed|failed|error)|ERROR SUMMARY|RACECHECK).*$", text, re.M)
    lines = [line.strip(" =") for line in found or text.strip().splitlines()]
    return lines[-1] if lines else ""


def describe_machine() -> dict[str, Any]:
    """Return the machine and the versions, on which the results depend.

    Raises:
        SystemExit: if there is no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            "gpu-check needs a GPU and torch finds none; check the driver with nvidia-smi, and "
            "that torch.version.cuda is not None"
        )
    major, minor = torch.cuda.get_device_capability()
    commit = ""
    with contextlib.suppress(OSError):  # git may be missing
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(),
        "capability": f"{major}.{minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": platform.python_version(),
        "commit": os.environ.get("COMMIT") or commit or "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def write(path: Path, document: dict[str, Any]) -> None:
    """Write the results so far, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def main() -> int:
    """Run the steps and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, default="build")
    results = Path(os.environ.get("OUT") or ROOT / "bench" / "results")
    parser.add_argument("--out", type=Path, default=results, metavar="DIR")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run only these steps")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="limit for the part")
    parser.add_argument("--unpack", type=Path, metavar="WHEEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.unpack is not None:
        unpack(args.unpack)
        return 0
    deadline = time.monotonic() + 60 * args.minutes - GRACE_S  # before the first import of torch
    machine = describe_machine()
    planned = steps(machine["capability"], args.part)
    unknown = set(args.only or ()) - {step.name for step in planned}
    if unknown:
        parser.error(f"--only got {sorted(unknown)}; choose of {[s.name for s in planned]}")
    name = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{name}-{args.part}-{machine['date']}.json"
    document: dict[str, Any] = {
        "benchmark": "gpu-check",
        "part": args.part,
        "machine": machine,
        "steps": {},
    }
    path.with_suffix(".log").write_text("", encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        for step in planned:
            if args.only and step.name not in args.only:
                continue
            left = deadline - time.monotonic()
            print(f"\n=== {step.name}: {' '.join(step.command)}", flush=True)
            if left < min(step.limit, 20):
                result: dict[str, Any] = {"outcome": "not run: no time was left", "seconds": 0.0}
            else:
                log = Path(directory) / f"{step.name}.log"
                rows = Path(directory) / f"{step.name}.json"
                result = run_step(step, min(step.limit, left), log, rows, path.with_suffix(".log"))
            document["steps"][step.name] = result
            write(path, document)
            if step.name == "build" and result["outcome"] != "ok":
                break
    versions = f"torch {machine['torch']}, NCCL {machine['nccl']}"
    print(f"\n=== {args.part}: {machine['device']}, {versions}, {path}")
    for step_name, result in document["steps"].items():
        print(
            f"{step_name:<14} {result['outcome']:<28} {result['seconds']:6.1f} s  "
            f"{result.get('summary', '')[:90]}"
        )
    return 0 if all(r["outcome"] == "ok" for r in document["steps"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
