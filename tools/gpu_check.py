"""Build, test and measure on a machine with one GPU, in under eight minutes.

    python tools/gpu_check.py [--out DIR] [--only STEP ...] [--minutes 8]

It uses the installed Python, torch, CuPy and nvcc, and no network. Each step has a time limit, and
no step begins that cannot end in time. After every step the results so far are written to
<out>/<device>-<date>.json, and all output to a .log file beside it. A table comes last. The exit
code is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# pyproject.toml configures extensions of pytest that may be missing on this machine.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-ra"]
PYTEST += ["--disable-warnings", "--tb=short"]
# Seconds between asking a late step to end, so that it reports its results, and killing it.
GRACE_S = 20


@dataclass(frozen=True)
class Step:
    """One command and the most seconds that it may take."""

    name: str
    command: list[str]
    limit: int
    environment: dict[str, str]
    json: bool = False  # whether it is a benchmark, which writes its rows with --json


def steps(capability: str) -> list[Step]:
    """Return the steps, in order."""
    sanitizer = shutil.which("compute-sanitizer") or "compute-sanitizer"
    kernels = ["tests/gpu/test_gpu_kernels.py", "tests/test_packer.py"]
    parity = "tests/gpu/test_gpu_parity.py"
    ignored = ["--ignore", kernels[0], "--ignore", parity]
    # Sanitizers make kernels slow, so they run few and small cases.
    few = ["-k", "(independent and False) or current_stream or entries"]
    # With an allocation of its own for each tensor, memcheck sees where a tensor ends.
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    build = {"FORCE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": capability}

    def sanitize(tool: str) -> list[str]:
        options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
        options += ["--report-api-errors", "no"] if tool == "memcheck" else []
        return [sanitizer, *options, *PYTEST, "-p", "no:cacheprovider", *kernels[:1], *few]

    def bench(name: str, limit: int, *options: str) -> Step:
        command = [sys.executable, "-m", "bench", name, "--device", "cuda", *options]
        return Step(name, command, limit, {}, json=True)

    return [
        Step(
            "build",
            [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
            180,
            build,
        ),
        Step("describe", [sys.executable, "-m", "fsdp_ext"], 60, {}),
        Step("kernels", [*PYTEST, *kernels], 90, {}),
        Step("memcheck", sanitize("memcheck"), 90, uncached),
        Step("tests", [*PYTEST, "--durations=8", "tests/gpu", *ignored], 150, {}),
        Step("parity", [*PYTEST, parity], 150, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        bench("pack", 60),
        bench("step", 90),
        bench("host_overhead", 90, "--quick"),
        bench("collectives", 60, "--quick"),
        bench("overlap", 60, "--quick"),
        bench("memory", 90),
        bench("scaling", 30),
        # It looks for races in shared memory. The kernels use none, so it should find nothing.
        Step("racecheck", sanitize("racecheck"), 90, {}),
    ]


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
    process.send_signal(signal.SIGINT)
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
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", metavar="DIR")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run only these steps")
    parser.add_argument("--minutes", type=float, default=8.0, help="limit for all steps together")
    args = parser.parse_args()
    machine = describe_machine()
    planned = steps(machine["capability"])
    unknown = set(args.only or ()) - {step.name for step in planned}
    if unknown:
        parser.error(f"--only got {sorted(unknown)}; choose of {[s.name for s in planned]}")
    name = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{name}-{machine['date']}.json"
    document: dict[str, Any] = {"benchmark": "gpu-check", "machine": machine, "steps": {}}
    path.with_suffix(".log").write_text("", encoding="utf-8")
    deadline = time.monotonic() + 60 * args.minutes
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
    print(f"\n=== {machine['device']}, torch {machine['torch']}, NCCL {machine['nccl']}, {path}")
    for step_name, result in document["steps"].items():
        print(
            f"{step_name:<14} {result['outcome']:<28} {result['seconds']:6.1f} s  "
            f"{result.get('summary', '')[:90]}"
        )
    return 0 if all(r["outcome"] == "ok" for r in document["steps"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
