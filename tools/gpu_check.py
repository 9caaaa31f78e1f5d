"""Build, test and measure on a machine with one GPU, in calls of less than nine minutes.

    python tools/gpu_check.py [--part all|tests|bench|more] [--after RESULTS ...] [--out DIR]
                              [--only STEP ...]

all     all steps, in the order of the parts below, as far as the time goes. A second call gets the
        results of the first with --after, and runs what has not begun
tests   tries torch and NCCL without fsdp_ext, runs all of tests/gpu, and the sanitizers
bench   packing beside a plain copy, a step beside FSDP2 (also with packing on 66 multiprocessors),
        host overhead, clipping and AdamW, memory, checkpoints
more    overlap, a compiled step, a step with shards on the host, a trace of a step over 8 simulated
        ranks, collectives

All parts begin with the build. Steps that try the machine are in each part that needs them, and
every other step belongs to one part.

It uses the installed Python, torch, CuPy and nvcc, and no network. CUDA's tools may also lie in
$CUDA_HOME/bin or /usr/local/cuda/bin. Every call begins with the build, since each may run on a new
machine. A wheel for this Python replaces the build: $FSDP_WHEEL, or the one in dist/. Each step has
a time limit. The limits of a part add up to less than nine minutes with a wheel, and no step begins
that cannot end in time. Time that earlier steps leave goes to the steps that may need it. After
every step the results so far are written to <out>/<device>-<part>-<date>.json, and all output to a
.log file beside it. If an earlier call has left one of them, -2 or a higher number follows the
date. The folder is $OUT if it is set. A table comes last. On the emulated GPU (tests/emulated_gpu),
the folder is build/emulated_gpu_check, because its results are no device's. The emulated GPU is
slow: pass --quick to run smaller benchmarks, and --patience N to multiply all time limits by N.

Some steps have several ranks that share the card. They run under CUDA's Multi-Process Service
(nvidia-cuda-mps-control), if the machine has it. The card then runs kernels of several processes at
the same time, and a collective of two ranks takes 0.1 ms on an H100. Otherwise the card changes
between the processes, the same collective takes 2.5 ms, and these steps may not end in time. The
service ends with the step.

Some steps try the machine without fsdp_ext. If such a step fails, that is the machine's failure,
and the steps that need it are not run. The exit code is 1 if a step of fsdp_ext failed or was late,
3 if only the machine failed, 4 if only time was missing for some steps, and otherwise 0.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import itertools
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# pyproject.toml configures extensions of pytest that may be missing on this machine.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-ra"]
PYTEST += ["--disable-warnings", "--tb=short"]
PARTS = ("tests", "bench", "more")
ALL = "all"
NOT_RUN = "not run"  # how the outcome of a step begins that has not begun
# A sanitizer that cannot do its work says so. It may run the program all the same.
SANITIZER_ERROR = re.compile(r"^=+ (?:Error|Internal Sanitizer Error): .*$", re.M)
# Why the emulated GPU does not run the benchmarks of large models.
LARGE = "its sizes would take too long; tests/gpu has small ones"
# These tests compare times of microseconds, so nothing else may run on the machine meanwhile.
TIMED = ("tests/gpu/test_gpu_profile.py", "tests/gpu/test_gpu_simulated.py")
# These tests kill processes while their kernels run. Under the Multi-Process Service, that may
# kill the processes of other tests, too.
ENDING = tuple(f"tests/gpu/test_gpu_{name}.py" for name in ("nccl", "watchdog", "health"))
# One call on a machine that is lent ends after ten minutes.
MINUTES = 9.0
EXIT_OF_MACHINE = 3
EXIT_OF_REST = 4
# Seconds between asking a late step to end, so that it reports its results, and killing it.
GRACE_S = 20
# A step that is left a smaller share of its limit does not begin.
LEAST_SHARE = 0.8
TRIAL = "two ranks"
# tools/gpu_environment.py prints this line.
MEASURED = re.compile(r"^a collective takes ([\d.]+) s$", re.M)


@dataclass(frozen=True)
class Step:
    """One command and the most seconds that it may take."""

    name: str
    command: list[str]
    limit: int
    environment: dict[str, str]
    json: bool = False  # whether it is a benchmark, which writes its rows with --json
    quick: bool = False  # whether it has --quick, as benchmarks have
    takes_spare: bool = False  # whether it may also take the time that earlier steps have left
    of_machine: bool = False  # whether it tries the machine without fsdp_ext
    needs: str = ""  # the step of the machine that has to have worked
    shares: bool = False  # whether several processes share the card
    not_emulated: str = ""  # why the emulated GPU does not run it
    note: str = ""  # for the table


def steps(capability: str, part: str) -> list[Step]:
    """Return the steps of a part or of all, in order."""
    planned = {"tests": tests_part, "bench": bench_part, "more": more_part}
    parts = PARTS if part == ALL else (part,)
    found = {"build": build_step(capability)}
    for step in (step for one in parts for step in planned[one]()):
        found.setdefault(step.name, step)
    return list(found.values())


def left_after(planned: list[Step], earlier: list[Path]) -> list[Step]:
    """Return the steps that have not begun by these results, with what they need and the build."""
    begun = {
        name
        for path in earlier
        for name, result in json.loads(path.read_text(encoding="utf-8"))["steps"].items()
        if not result["outcome"].startswith(NOT_RUN) or result.get("left_out")
    }
    return chosen(planned, {"build", *(step.name for step in planned if step.name not in begun)})


def chosen(planned: list[Step], names: set[str]) -> list[Step]:
    """Return these steps and those that they need, in order."""
    needed = {step.needs for step in planned if step.name in names}
    return [step for step in planned if step.name in names | needed]


def tests_part() -> list[Step]:
    """Return steps that try the machine, run the tests, and run some under sanitizers."""
    # Most tests start processes of their own, which take seconds.
    has_xdist = importlib.util.find_spec("xdist") is not None
    workers = str(max(1, min(6, (os.cpu_count() or 1) // 2)))
    at_once = ["-n", workers, "--dist", "worksteal"] if has_xdist else []
    note = "" if has_xdist else "one test at a time, because pytest-xdist is missing"
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    others = [option for test in (*TIMED, *ENDING) for option in ("--ignore", test)]
    all_tests = [*PYTEST, "-v", "--durations=8"]
    sanitizer = shutil.which("compute-sanitizer", path=search_path()) or "compute-sanitizer"
    # On some virtual machines the sanitizer supports no GPU.
    a_sum = "import torch; assert torch.ones(3, device='cuda').sum().item() == 3"
    return [
        of_machine("environment", 20),
        two_ranks(),
        Step("describe", [sys.executable, "-m", "fsdp_ext"], 15, {}),
        Step(
            "tests",
            [*all_tests, *at_once, "tests/comm/test_packer.py", "tests/gpu", *others],
            180,
            deterministic,
            takes_spare=True,
            shares=True,
            needs=TRIAL,
            note=note,
        ),
        Step("tests that end processes", [*all_tests, *at_once[:2], *ENDING], 80, {}, needs=TRIAL),
        Step("timed tests", [*PYTEST, *TIMED], 50, {}, takes_spare=True),
        Step(
            "compute-sanitizer", [sanitizer, sys.executable, "-c", a_sum], 15, {}, of_machine=True
        ),
        *(sanitize(sanitizer, tool) for tool in ("memcheck", "initcheck", "racecheck")),
    ]


def sanitize(sanitizer: str, tool: str) -> Step:
    """Return a step that runs a few small tests of kernels under a tool of the sanitizer."""
    # Only a few tests, because sanitizers make kernels many times slower.
    few = ["-k", "(independent and False) or current_stream or (entries and not 2000 and not 9000)"]
    # With an allocation of its own for each tensor, memcheck sees where a tensor ends.
    sanitized = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "FSDP_EXT_TEST_SEEDS": "2"}
    options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    tests = [*PYTEST, "-p", "no:cacheprovider", "tests/gpu/test_gpu_kernels.py", *few]
    return Step(tool, [sanitizer, *options, *tests], 36, sanitized, needs="compute-sanitizer")


def bench_part() -> list[Step]:
    """Return the benchmarks that say the most on one GPU."""
    return [
        bench("pack", 20),
        bench("step", 50),
        bench(
            "step",
            50,
            name="step, packing on 66 multiprocessors",
            environment={"FSDP_EXT_PACK_MULTIPROCESSORS": "66"},
        ),
        bench("host_overhead", 150, "--quick", not_emulated=LARGE),
        bench("optimizer", 30, "--quick", not_emulated=LARGE),
        bench("memory", 90),
        bench("checkpoint", 60, "--ranks", "1", "--quick", not_emulated=LARGE),
    ]


def more_part() -> list[Step]:
    """Return the steps of the part "more"."""
    import torch

    devices = torch.cuda.device_count()
    shared = {} if devices > 1 else {"shares": True, "needs": TRIAL}
    return [
        bench("overlap", 60, "--quick", not_emulated=LARGE),
        bench("step", 100, "--compile", name="compiled step"),
        bench("step", 100, "--offload", name="offloaded step"),
        Step("trace", [sys.executable, "tools/gpu_trace.py"], 25, {}, quick=True),
        two_ranks(),
        # Last: ranks that share a GPU show that collectives work, but give no meaningful times.
        bench("collectives", 60, "--quick", "--ranks", str(max(2, devices)), **shared),
    ]


def bench(benchmark: str, limit: int, *options: str, name: str = "", **more: Any) -> Step:
    """Return the step of a benchmark."""
    command = [sys.executable, "-m", "bench", benchmark, "--device", "cuda", *options]
    more = {"environment": {}, "json": True, "takes_spare": True, **more}
    return Step(name or benchmark, command, limit, **more)


def of_machine(name: str, limit: int, *options: str, shares: bool = False) -> Step:
    """Return a step that tries torch and NCCL without fsdp_ext."""
    command = [sys.executable, "tools/gpu_environment.py", *options]
    return Step(name, command, limit, {}, of_machine=True, shares=shares)


def two_ranks() -> Step:
    """Return the step that tries two ranks that share the card."""
    return of_machine(TRIAL, 30, "--ranks", "2", shares=True)


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


def search_path() -> str:
    """Return the PATH, with the usual places of CUDA's tools at its end."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    return os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)])


def limit_of(step: Step, later: list[Step], left: float) -> float:
    """Return the most seconds that a step may take now.

    Args:
        step: the step.
        later: those after it.
        left: seconds until the part has to end.
    """
    spare = left - GRACE_S - sum(step.limit for step in later)
    return min(left, max(step.limit, spare)) if step.takes_spare else min(left, step.limit)


@contextlib.contextmanager
def shared_card() -> Iterator[dict[str, str]]:
    """Start CUDA's Multi-Process Service, if there is one; yield the variables of its users."""
    control = shutil.which("nvidia-cuda-mps-control", path=search_path())
    with tempfile.TemporaryDirectory(prefix="mps-") as directory:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}
        environment = {**os.environ, **variables}
        if control is None or subprocess.run([control, "-d"], env=environment).returncode != 0:
            yield {}
            return
        try:
            yield variables
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                end = b"quit -t 5\n"  # ends users that are left after five seconds
                subprocess.run([control], input=end, env=environment, timeout=GRACE_S)


def run_step(step: Step, limit: float, log: Path, rows: Path, all_output: Path) -> dict[str, Any]:
    """Run one step in a process group of its own; return its result."""
    with shared_card() if step.shares else contextlib.nullcontext({}) as variables:
        result, text = run_command(step, limit, log, rows, variables)
    if step.json and rows.exists():
        result["rows"] = json.loads(rows.read_text(encoding="utf-8"))["rows"]
        result["summary"] = summary_of_rows(result["rows"])
    print(text if len(text) < 8000 else f"{text[:2000]}\n...\n{text[-6000:]}")
    with all_output.open("a", encoding="utf-8") as file:
        file.write(f"\n=== {step.name}: {result['outcome']}\n{text}")
    return result


def run_command(
    step: Step, limit: float, log: Path, rows: Path, variables: dict[str, str]
) -> tuple[dict[str, Any], str]:
    """Run the command of a step with more variables; return its result and what it printed."""
    command = [*step.command, "--json", str(rows)] if step.json else step.command
    environment = {
        **os.environ,
        **step.environment,
        **variables,
        "PATH": search_path(),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "FSDP_EXT_TEST_NEEDS_GPU": "1",  # so that tests without one fail, instead of being skipped
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
            return {"outcome": f"could not start: {error}", "seconds": 0.0}, ""
        try:
            code = process.wait(timeout=limit)
            outcome = "ok" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            end(process)
            outcome = f"did not end within {limit:.0f} s"
        output.seek(0)
        text = output.read()
    if outcome == "ok" and SANITIZER_ERROR.search(text):
        outcome = "failed, with exit code 0"
    result: dict[str, Any] = {
        "outcome": outcome,
        "seconds": round(time.monotonic() - start, 1),
        "summary": summary_of(text),
    }
    if outcome != "ok":
        result["output"] = text[-6000:]
    if step.name == TRIAL and (times := MEASURED.findall(text)):
        result["collective_s"] = float(times[-1])
    return result, text


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
    """Return the error of the sanitizer itself, or the line with a count, or the last line."""
    found = SANITIZER_ERROR.findall(text)[:1]
    counts = r"^.*(?:\d+ (?:passed|failed|skipped|error)|ERROR SUMMARY|RACECHECK).*$"
    found = found or re.findall(counts, text, re.M)
    lines = [line.strip(" =") for line in found or text.strip().splitlines()]
    return lines[-1] if lines else ""


def summary_of_rows(rows: list[dict[str, Any]]) -> str:
    """Return how many rows a benchmark has, and which of them are errors or wrong."""
    counted = f"{len(rows)} row{'' if len(rows) == 1 else 's'}"
    bad = [row for row in rows if row.get("error") or row.get("wrong")]
    names = [str(row.get("system") or row.get("operation")) for row in bad]
    return f"{counted}, errors in {', '.join(names)}" if bad else counted


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


def unused(folder: Path, name: str) -> Path:
    """Return the first of name.json, name-2.json, ... whose call has left no results and no log."""
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    paths = (folder / f"{one}.json" for one in itertools.chain([name], numbered))
    return next(
        path for path in paths if not path.exists() and not path.with_suffix(".log").exists()
    )


def write(path: Path, document: dict[str, Any]) -> None:
    """Write the results so far, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def main() -> int:
    """Run the steps and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=(ALL, *PARTS), default=ALL)
    parser.add_argument("--after", nargs="+", action="extend", type=Path, default=[])
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument(
        "--only", nargs="+", metavar="STEP", help="run only these steps, and what they need"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="limit for the part")
    parser.add_argument("--patience", type=int, default=1, help="multiplies all limits")
    parser.add_argument("--quick", action="store_true", help="benchmarks measure little")
    parser.add_argument("--unpack", type=Path, metavar="WHEEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.unpack is not None:
        unpack(args.unpack)
        return 0
    minutes = args.minutes * args.patience
    deadline = time.monotonic() + 60 * minutes - GRACE_S  # before the first import of torch
    machine = describe_machine()
    planned = [
        changed(step, args.patience, quick=args.quick)
        for step in left_after(steps(machine["capability"], args.part), args.after)
    ]
    unknown = set(args.only or ()) - {step.name for step in planned}
    if unknown:
        parser.error(f"--only got {sorted(unknown)}; choose of {[s.name for s in planned]}")
    name = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
    out = args.out or default_folder(machine["device"])
    out.mkdir(parents=True, exist_ok=True)
    os.environ["OUT"] = str(out)  # for steps that write files of their own
    path = unused(out, f"{name}-{args.part}-{machine['date']}")
    document: dict[str, Any] = {
        "benchmark": "gpu-check",
        "part": args.part,
        "machine": machine,
        "steps": {},
    }
    if args.only:
        planned = chosen(planned, set(args.only))
    path.with_suffix(".log").write_text("", encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        while planned:
            step = planned.pop(0)
            print(f"\n=== {step.name}: {' '.join(step.command)}", flush=True)
            limit = limit_of(step, planned, deadline - time.monotonic())
            result = why_not(step, limit, document["steps"], machine["device"])
            if result is None:
                log = Path(directory) / f"{step.name}.log"
                rows = Path(directory) / f"{step.name}.json"
                result = run_step(step, limit, log, rows, path.with_suffix(".log"))
                if step.of_machine and result["outcome"] != "ok":
                    result["machine_failed"] = True
            if step.note:
                result["note"] = step.note
            document["steps"][step.name] = result
            write(path, document)
            if step.name == "build" and result["outcome"] != "ok":
                break
    versions = f"torch {machine['torch']}, NCCL {machine['nccl']}"
    print(f"\n=== {args.part}: {machine['device']}, {versions}, {path}")
    return show(document["steps"])


def changed(step: Step, patience: int, *, quick: bool) -> Step:
    """Return the step with another limit, and a benchmark with --quick if that is asked for."""
    has_quick = step.json or step.quick
    more = ["--quick"] if quick and has_quick and "--quick" not in step.command else []
    return dataclasses.replace(step, limit=step.limit * patience, command=[*step.command, *more])


def default_folder(device: str) -> Path:
    """Return the folder of the results. Those of the emulated GPU are kept from real ones."""
    if named := os.environ.get("OUT"):
        return Path(named)
    if is_emulated(device):
        return ROOT / "build" / "emulated_gpu_check"
    return ROOT / "bench" / "results"


def is_emulated(device: str) -> bool:
    """Return whether the device is the emulated GPU (tests/emulated_gpu)."""
    return device.startswith("Emulated")


def why_not(
    step: Step, limit: float, results: dict[str, Any], device: str
) -> dict[str, Any] | None:
    """Return the result of a step that cannot be run, or None if it can.

    Args:
        step: the step.
        limit: the most seconds that it may take now.
        results: of the steps before it.
        device: the name of the device.
    """
    if step.not_emulated and is_emulated(device):
        outcome = f"{NOT_RUN} on the emulated GPU: {step.not_emulated}"
        return {"outcome": outcome, "seconds": 0.0, "left_out": True}
    if results.get(step.needs, {}).get("machine_failed"):
        found = results[step.needs]
        reason = found.get("summary") or found["outcome"]
        outcome = f"{NOT_RUN}: {step.needs} does not work on this machine: {reason}"
        return {"outcome": outcome, "seconds": 0.0, "machine_failed": True}
    if limit < LEAST_SHARE * step.limit:
        return {"outcome": f"{NOT_RUN}: no time was left", "seconds": 0.0, "waits": True}
    return None


def show(results: dict[str, Any]) -> int:
    """Print the table and what it amounts to; return the exit code."""
    for name, result in results.items():
        about = result.get("summary", "")
        if not result.get("machine_failed"):
            about = about[:90]
        if note := result.get("note"):
            about += f" ({note})"
        print(f"{name:<20} {result['outcome']:<28} {result['seconds']:6.1f} s  {about}")
    bad = {
        name: result
        for name, result in results.items()
        if result["outcome"] != "ok" and not result.get("left_out")
    }
    of_machine = [name for name, result in bad.items() if result.get("machine_failed")]
    if of_machine:
        print(f"failures of this machine, not of fsdp_ext: {', '.join(of_machine)}")
    waiting = [name for name, result in bad.items() if result.get("waits")]
    if waiting:
        print(f"for another call, with --after these results: {', '.join(waiting)}")
    if ours := [name for name in bad if name not in {*of_machine, *waiting}]:
        print(f"failed: {', '.join(ours)}")
    return 1 if ours else EXIT_OF_MACHINE if of_machine else EXIT_OF_REST if waiting else 0


if __name__ == "__main__":
    sys.exit(main())
