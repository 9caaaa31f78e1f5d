"""Helpers of the tools that plant faults in a copy of the project.

tools/plant_faults.py plants faults of logic, and tests/emulated_gpu/planted_faults.py those of
ordering.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def write_copies(
    names: Iterable[str], source: Path, target: Path, edited: Mapping[str, str]
) -> None:
    """Bring a copy of some files up to date. Files that have not changed keep their objects.

    Args:
        names: the files, relative to both directories.
        source: the directory to copy from.
        target: the directory of the copy.
        edited: the text of files that differ in the copy.
    """
    for name in names:
        text = edited.get(name)
        content = (source / name).read_bytes() if text is None else text.encode()
        path = target / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def write_table(path: Path, rows: Mapping[str, object]) -> None:
    """Write a table of faults, by name."""
    path.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")


def place_of(text: str, old: str, fault: str, file: str) -> int:
    """Return the position of the text that a fault replaces.

    Raises:
        SystemExit: unless it is there exactly once.
    """
    if text.count(old) != 1:
        raise SystemExit(
            f"The fault '{fault}' replaces text that {file} has {text.count(old)} times. Adapt the "
            "fault to the file."
        )
    return text.index(old)


def run_limited(
    command: Sequence[str | Path], cwd: Path, environment: Mapping[str, str], limit_s: float
) -> tuple[int | None, str, float]:
    """Run a command; return its exit status, its output and the seconds that it took.

    The status is None if the command has not ended within ``limit_s`` seconds. It gets a session of
    its own, so that it ends with all processes that it has started.
    """
    start = time.monotonic()
    with subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            status = None
    return status, output, time.monotonic() - start


def what_failed(output: str, status: int | None) -> tuple[str, str]:
    """Return what detected a fault in a run of pytest, and the line that says so."""
    if match := re.search(r"(nothing orders|the host has written) .*", output):
        return "the checker", shortened(match[0])
    if status is None:
        return "a hang", "the test does not end"
    errors = re.findall(r"^E.*?\b(\w*(?:Error|Exception)\b.*)", output, re.MULTILINE)
    if "had not finished" in output and not errors:
        return "a hang", "a rank does not end"
    line = errors[0] if errors else (output.strip().splitlines() or ["no output"])[-1]
    wrong_numbers = line.startswith("AssertionError") or "Mismatched elements" in output
    return "numbers" if wrong_numbers else "an error", shortened(line)


def shortened(line: str) -> str:
    """Return a line without the parts that differ between runs, for a table."""
    line = re.sub(r"_ZN\w*?([a-z]+_kernel)\w*", r"\1", line)
    return re.sub(r" at 0x\w+| \(cudaError\w+\)", "", line).strip()[:240]
