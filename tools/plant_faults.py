"""Plants faults of logic in a copy of the project, and shows which test sees each of them.

The copy lies in build/faulty. All faults of faults_of_logic.py are planted in it, each behind a
switch, and it is built once. Then the C++ and the Python tests of each fault run with this fault
switched on, until one fails. That test has to pass without the fault. The table of all faults goes
to planted_faults.json.

    PYTHONPATH=tests python tools/plant_faults.py [--only WORDS] [--jobs N]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from faults_of_logic import FAULTS, Fault
from support.planting import (
    place_of,
    run_limited,
    shortened,
    what_failed,
    write_copies,
    write_table,
)

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "faulty" / "source"
CPP_TESTS = COPY / "build" / "cpp" / "tests" / "cpp" / "fsdp_core_tests"
RESULTS = Path(__file__).with_name("planted_faults.json")
SWITCH = "FSDP_EXT_FAULT"  # the name of the fault that is on
# A fault may make a test hang.
CPP_LIMIT_S, PYTHON_LIMIT_S = 120.0, 600.0

HEADER = "csrc/base/planted_fault.h"
HEADER_TEXT = f"""#pragma once

#include <cstdlib>
#include <cstring>

inline bool planted_fault(const char* name) {{
  static const char* const chosen = std::getenv("{SWITCH}");
  return chosen != nullptr && std::strcmp(chosen, name) == 0;
}}
"""
MODULE = "fsdp_ext/_planted_fault.py"
MODULE_TEXT = f"""import os


def planted_fault(name: str) -> bool:
    return os.environ.get("{SWITCH}") == name
"""
IMPORT = "from fsdp_ext._planted_fault import planted_fault"
FUTURE = "from __future__ import annotations\n"


@dataclass(frozen=True)
class Row:
    """One fault of the table.

    Args:
        file: where it is.
        seen_by: the test that fails; empty if no test does.
        how: "numbers", "an error", "a crash" or "a hang".
        message: what the test says.
    """

    file: str
    seen_by: str
    how: str
    message: str


# - The copy


def planted(faults: Sequence[Fault], text: str) -> str:
    """Return the text of a source file with all its faults, each behind a switch.

    Raises:
        SystemExit: if a fault does not fit the text.
    """
    switches = []
    for fault in faults:
        around = fault.within or fault.old
        begin = place_of(text, around, fault.name, fault.file)
        begin += place_of(around, fault.old, fault.name, fault.file)
        switches.append((begin, begin + len(fault.old), switched(fault)))
    switches.sort(reverse=True)
    for begin, end, switch in switches:
        text = text[:begin] + switch + text[end:]
    if faults[0].file.endswith(".py"):
        place = place_of(text, FUTURE, faults[0].name, faults[0].file) + len(FUTURE)
        return f"{text[:place]}{IMPORT}\n{text[place:]}"
    return f'#include "base/planted_fault.h"\n{text}'


def switched(fault: Fault) -> str:
    """Return code that does what is right, or what is wrong if the fault is switched on."""
    is_on = f'planted_fault("{fault.name}")'
    old, new = fault.old, fault.new
    if fault.file.endswith(".py"):
        return f"({new} if {is_on} else {old})" if new else f"if not {is_on}: {old}"
    if not old.endswith((";", "}")):
        return f"({is_on} ? ({new}) : ({old}))"
    return f"if ({is_on}) {{ {new} }} else {{ {old} }}"


def make_copy() -> None:
    """Bring the copy up to date, with all faults."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    by_file: dict[str, list[Fault]] = {}
    for fault in FAULTS:
        by_file.setdefault(fault.file, []).append(fault)
    edited = {file: planted(faults, (ROOT / file).read_text()) for file, faults in by_file.items()}
    edited |= {HEADER: HEADER_TEXT, MODULE: MODULE_TEXT}
    there = [name for name in names if (ROOT / name).is_file()]
    write_copies([*there, HEADER, MODULE], ROOT, COPY, edited)


def build() -> None:
    """Build the copy's extension in place, and its C++ tests.

    Raises:
        SystemExit: if they do not compile.
    """
    tools = Path(sys.executable).parent
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count())
    for command in (
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        [tools / "cmake", "-S", ".", "-B", "build/cpp", "-G", "Ninja", "--log-level=NOTICE",
         f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}",
         "-DFSDP_BUILD_TESTS=ON"],
        [tools / "cmake", "--build", "build/cpp", "--parallel", jobs],
    ):  # fmt: skip
        if subprocess.run(command, cwd=COPY, check=False).returncode != 0:
            raise SystemExit(f"The copy in {COPY} does not compile.")


# - Runs


def run_cpp(tests: str, fault: str) -> Row | None:
    """Run the C++ tests of a filter. Return what sees the fault, or None."""
    command = [CPP_TESTS, f"--gtest_filter={tests}", "--gtest_fail_fast"]
    status, output, _ = run_limited(command, COPY, {SWITCH: fault}, CPP_LIMIT_S)
    if status == 0 and "[  PASSED  ] 0 tests" not in output:
        return None
    begun = re.findall(r"^\[ RUN      \] (\S+)", output, re.MULTILINE)
    if not begun:
        raise SystemExit(f"{output[-3000:]}\nNo C++ test of {tests} ran.")
    failed = re.findall(r"^\[  FAILED  \] ([\w./]+)", output, re.MULTILINE)
    how = "a hang" if status is None else "an error" if failed else "a crash"
    failure = re.search(r"Failure\n(.*(?:\n  .*)?)", output)
    message = failure[1].replace("\n", "") if failure and failed else "the test does not end"
    if how == "a crash":
        message = f"the tests ended with status {status}"
    return Row("", (failed or begun[-1:])[0], how, shortened(message))


def run_python(test: str, fault: str) -> Row | None:
    """Run one file of Python tests, or one test. Return what sees the fault, or None."""
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
    environment = {
        SWITCH: fault,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{COPY}{os.pathsep}{COPY / 'tests'}",
    }
    status, output, _ = run_limited(command, COPY, environment, PYTHON_LIMIT_S)
    if status == 0:
        return None
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if status is not None and not failed:
        raise SystemExit(f"{output[-3000:]}\n{test} did not run.")
    how, message = what_failed(output, status)
    return Row("", (failed or [test])[0], how, message)


def file_of_test(name: str) -> str:
    """Return where the file `test_<name>.py` is in the project."""
    (path,) = ROOT.glob(f"tests/*/test_{name}.py")
    return path.relative_to(ROOT).as_posix()


def row_of(fault: Fault) -> Row:
    """Run the tests of a fault until one fails.

    Raises:
        SystemExit: if that one fails without the fault, too.
    """
    row = run_cpp(fault.cpp, fault.name) if fault.cpp else None
    if row is not None and run_cpp(row.seen_by, ""):
        raise SystemExit(f"{row.seen_by} fails without a fault.")
    for name in fault.python if row is None else ():
        row = run_python(file_of_test(name), fault.name)
        if row is not None:
            if run_python(row.seen_by, ""):
                raise SystemExit(f"{row.seen_by} fails without a fault.")
            break
    row = Row(fault.file, row.seen_by, row.how, row.message) if row else Row(fault.file, "", "", "")
    print(f"{row.how or 'NOT SEEN':10} {fault.name}", flush=True)
    print(f"{'':11}{fault.file} {row.seen_by} {row.message}", flush=True)
    return row


def main() -> int:
    arguments = parse()
    make_copy()
    build()
    asked = [fault for fault in FAULTS if arguments.only in fault.name]
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = {fault.name: known[fault.name] for fault in FAULTS if fault.name in known}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for fault, row in zip(asked, pool.map(row_of, asked), strict=True):
            rows[fault.name] = asdict(row)
            write_table(RESULTS, rows)
    missed = [name for name, row in rows.items() if not row["seen_by"]]
    print(f"{len(rows)} faults, {len(rows) - len(missed)} seen")
    if missed:
        print("Not seen:", *missed, sep="\n  ")
    return 1 if missed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="run the tests of faults with this in the name")
    parser.add_argument("--jobs", type=int, default=1, help="how many faults at a time")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
