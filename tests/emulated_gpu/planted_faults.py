"""Plants faults of ordering in a copy of the project, and shows what sees each of them.

The copy lies in build/planted and is built for CUDA. Each wait of the extension is left out by
itself, where the emulated GPU knows the place it is called from (cudart/wait_sites.h). Other faults
are edits of the copy. Tests that use the place then run over the emulated GPU, at most eight, until
one fails. The table of all faults goes to planted_faults.json.

    PYTHONPATH=tests python tests/emulated_gpu/planted_faults.py [--only WORDS] [--missing]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from faults_to_plant import EDITS, NOT_SEEN, TESTS, Edit
from support.planting import place_of, run_limited, what_failed, write_copies, write_table

ROOT = Path(__file__).resolve().parents[2]
PLANTED = ROOT / "build" / "planted"
COPY = PLANTED / "source"
SURVEY = PLANTED / "survey.json"
RESULTS = Path(__file__).with_suffix(".json")
PYTHON = ROOT / ".venv-rehearsal" / "bin" / "python"
CUDA_PYTHON = ROOT / ".venv-cuda" / "bin" / "python"
AUDIT = ROOT / "build/emulated_gpu/tests/emulated_gpu/lib/libredirect_libraries.so"
COPIED = ("csrc", "fsdp_ext", "CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml",
          "setup.py")  # fmt: skip
# With these, return addresses tell the line of each call, and every call has a frame.
COMPILER_FLAGS = "-g1 -fno-optimize-sibling-calls"
# A fault may make a test hang. The time limit is LEAST_LIMIT_S plus TIMES_AS_LONG times the seconds
# that the test takes without a fault.
LEAST_LIMIT_S, TIMES_AS_LONG = 60.0, 10.0
MOST_TESTS = 8  # for each fault

# Statements that wait.
STATEMENT = re.compile(
    r"(\.|->)(wait|synchronize|wait_for_half|wait_for_both|order_after|"
    r"order_after_compute|follow_compute|drain|query|synchronizer\(\))\("
)
LONGEST_STATEMENT = 4  # lines
FUNCTION = re.compile(
    r"[A-Za-z][\w:<>&*~ ,]*?(?P<at_start>~?[A-Za-z]\w*)\([^;]*$|"
    r"  (?! |if|for|while|switch|return|else)[\w:<>&*~ ,]*?(?P<in_class>~?[A-Za-z]\w*)\(.*[{]$"
)
# Of these, what waits only on the host, what is called by statements that wait, and what only
# benchmarks and users call.
NO_PLACES = re.compile(
    r"torch/bindings/|"
    r"(comm/messages/composed|device/host_stream|torch/process_group|torch/backend_messages)[.]|"
    r"core/(lanes.(cpp|h)|record/ledger.cpp|memory/pieces.(cpp|h)) |"
    r"device/cuda_stream.cpp (synchronize|query)|"
    r"\breducer_?[.]wait\(|this->synchronize|call_apart"
)
FOLDERS = ("core", "device", "torch", "comm")


@dataclass(frozen=True)
class Outcome:
    """What a test run says. `seen_by` is empty if the test passes."""

    seen_by: str
    message: str
    seconds: float


@dataclass
class Wait:
    """A statement that waits, and how the emulated GPU knows it."""

    name: str
    places: set[str] = field(default_factory=set)  # for EMULATED_GPU_DROP_WAITS
    tests: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Row:
    """One fault of the table."""

    seen_by: str
    test: str
    message: str
    reason: str  # why nothing sees it


# - The copy


def copy_sources() -> None:
    """Bring the copy up to date. It keeps files that have not changed, and so their objects."""
    tracked = subprocess.run(
        ["git", "ls-files", *COPIED], cwd=ROOT, check=True, capture_output=True, text=True
    )
    write_copies(tracked.stdout.split(), ROOT, COPY, {})


def build() -> None:
    """Build the copy's extension in place, for the emulated GPU only.

    Raises:
        SystemExit: if it does not compile.
    """
    result = subprocess.run(
        [CUDA_PYTHON, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=COPY,
        env={
            **os.environ,
            "CXXFLAGS": COMPILER_FLAGS,
            "FORCE_CUDA": "1",
            "TORCH_CUDA_ARCH_LIST": "8.0",
            "CCACHE_DISABLE": "1",  # an object of another directory names that one's files
        },
        check=False,
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        raise SystemExit(f"{result.stdout}{result.stderr}\nThe copy in {COPY} does not compile.")


def apply(edit: Edit) -> None:
    """Plant the fault.

    Raises:
        SystemExit: unless the text to replace is there exactly once.
    """
    path = COPY / edit.file
    text = path.read_text()
    place_of(text, edit.old, edit.name, edit.file)
    path.write_text(text.replace(edit.old, edit.new))


# - Runs


def run(test: str, limit_s: float, **variables: str) -> Outcome:
    """Run one test over the emulated GPU with the copy.

    Raises:
        SystemExit: if pytest could not run it.
    """
    command = [PYTHON, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
    environment = {
        "LD_AUDIT": str(AUDIT),
        "EMULATED_GPU_DEVICES": "2",
        "FSDP_EXT_TEST_NEEDS_GPU": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{COPY}{os.pathsep}{ROOT / 'tests'}",
        **variables,
    }
    status, output, seconds = run_limited(command, ROOT, environment, limit_s)
    if status == 0:
        return Outcome("", "", seconds)
    if status is not None and not re.search(r"\b\d+ failed\b", output):
        raise SystemExit(f"{output[-3000:]}\n{test} did not run.")
    return Outcome(*what_failed(output, status), seconds)


# - Waits


Survey = dict[str, tuple[float, list[str]]]


def survey(known: Survey) -> Survey:
    """Run each test without a fault; return its seconds and the waits that it meets.

    Args:
        known: what this has returned before, for tests that need not run again.

    Raises:
        SystemExit: if a test fails.
    """
    found = {test: known[test] for test in TESTS if test in known}
    for test in [test for test in TESTS if test not in known]:
        listing = PLANTED / "waits.txt"
        listing.unlink(missing_ok=True)
        outcome = run(test, 300.0, EMULATED_GPU_LIST_WAITS=str(listing))
        if outcome.seen_by:
            raise SystemExit(f"{test} fails without a fault: {outcome.message}")
        lines = sorted(set(listing.read_text().splitlines())) if listing.exists() else []
        found[test] = (outcome.seconds, lines)
        print(f"{outcome.seconds:6.1f} s, {len(lines):4} places  {test}", flush=True)
    return found


Frame = tuple[str, str, int]  # function, file, line


def frames_of(offsets: Sequence[str]) -> dict[str, list[Frame]]:
    """Return the functions around each place that calls return to, innermost first."""
    (library,) = (COPY / "fsdp_ext").glob("_C.*.so")
    # The line of a call is that of the instruction before the one it returns to.
    addresses = [hex(int(offset, 16) - 1) for offset in offsets]
    result = subprocess.run(
        ["addr2line", "-a", "-i", "-f", "-C", "-e", library, *addresses],
        check=True,
        capture_output=True,
        text=True,
    )
    chains: list[list[Frame]] = []
    lines = iter(result.stdout.splitlines())
    for line in lines:
        if line.startswith("0x"):
            chains.append([])
            continue
        file, _, number = next(lines).partition(":")
        match = re.match(r"\d+", number)
        chains[-1].append((line, file, int(match[0]) if match else 0))
    return dict(zip(offsets, chains, strict=True))


def waits_of(surveyed: Survey) -> dict[str, Wait]:
    """Return the waits by name."""
    stacks = {line.split()[1] for _, lines in surveyed.values() for line in lines}
    frames = frames_of(sorted({offset for stack in stacks for offset in stack.split("+")}))
    statements_that_wait = statements()
    waits: dict[str, Wait] = {}
    for test, (_, lines) in surveyed.items():
        for stack in (line.split()[1] for line in lines):
            offsets = stack.split("+")
            found = [
                (name, "+".join(offsets[: depth + 1]))
                for depth, offset in enumerate(offsets)
                for name in map(_name_of, frames[offset])
                if name is not None
            ]
            known = [each for each in found if each[0] in statements_that_wait] or found
            name, place = known[0]
            wait = waits.setdefault(name, Wait(name))
            wait.places.add(place)
            wait.tests.add(test)
    return waits


@functools.cache
def _name_of(frame: Frame) -> str | None:
    """Return a name for the line, or None if it is not one of the sources."""
    _, file, line = frame
    path = Path(os.path.realpath(file))
    if not path.is_relative_to(COPY / "csrc"):
        return None
    lines = path.read_text().splitlines()
    # Debug information may name any line of a statement.
    for number in range(line, max(line - LONGEST_STATEMENT, 0), -1):
        if _waits(lines[number - 1]):
            return name_of_line(path, lines, number)
    return name_of_line(path, lines, line)


def _waits(line: str) -> bool:
    return STATEMENT.search(line.partition("//")[0]) is not None


def name_of_line(path: Path, lines: Sequence[str], number: int) -> str:
    """Return a name of the line that outlives changes of the lines around it."""
    inside = "?"
    earlier: list[str] = []
    for line in lines[:number]:
        if match := FUNCTION.match(line):
            inside, earlier = match["at_start"] or match["in_class"], []
        earlier.append(line.strip())
    text = lines[number - 1].partition("//")[0].strip()
    again = sum(line.partition("//")[0].strip() == text for line in earlier[:-1])
    name = f"{str(path).rpartition('/csrc/')[2]} {inside}: {text}"
    return f"{name} ({again + 1})" if again else name


def statements(source: Path = COPY) -> set[str]:
    """Return the names of all lines of the sources that wait."""
    found = set()
    for folder in FOLDERS:
        for path in sorted((source / "csrc" / folder).rglob("*.[ch]*")):
            lines = path.read_text().splitlines()
            numbers = [number for number, line in enumerate(lines, start=1) if _waits(line)]
            found |= {name_of_line(path, lines, number) for number in numbers}
    return {name for name in found if not NO_PLACES.search(name)}


# - The table of faults, and what sees each


def row_of(fault: str, tests: Sequence[str], seconds: dict[str, float], **variables: str) -> Row:
    """Run the tests until one fails."""
    for test in [each for each in TESTS if each in tests][:MOST_TESTS]:
        limit_s = LEAST_LIMIT_S + TIMES_AS_LONG * seconds[test]
        outcome = run(test, limit_s, **variables)
        if outcome.seen_by:
            row = Row(outcome.seen_by, test, outcome.message, "")
            break
    else:
        row = Row("", "", "", NOT_SEEN.get(fault, "no reason is known"))
    print(f"{row.seen_by or 'NOT SEEN':12} {fault}\n{'':13}{row.message or row.reason}", flush=True)
    return row


def drop(wait: Wait, seconds: dict[str, float]) -> Row:
    """Leave out one wait."""
    places = ",".join(sorted(wait.places))
    return row_of(wait.name, sorted(wait.tests), seconds, EMULATED_GPU_DROP_WAITS=places)


def plant(edit: Edit, seconds: dict[str, float]) -> Row:
    """Edit the copy, and mend it afterwards."""
    is_compiled = edit.file.startswith("csrc/")
    apply(edit)
    try:
        if is_compiled:
            build()
        return row_of(edit.name, edit.tests or list(TESTS), seconds)
    finally:
        copy_sources()
        if is_compiled:
            build()


def not_met(name: str) -> Row:
    """Return the row of a wait that no test meets."""
    row = Row("", "", "", NOT_SEEN.get(name, "no test meets it"))
    print(f"{'NOT MET':12} {name}\n{'':13}{row.reason}", flush=True)
    return row


def main() -> int:
    arguments = parse()
    copy_sources()
    build()
    keeps = arguments.missing and SURVEY.exists()
    surveyed = survey(json.loads(SURVEY.read_text()) if keeps else {})
    SURVEY.write_text(json.dumps(surveyed))
    seconds = {test: time_of for test, (time_of, _) in surveyed.items()}
    waits = waits_of(surveyed)
    faults: dict[str, Callable[[], Row]] = {
        name: functools.partial(drop, wait, seconds) for name, wait in sorted(waits.items())
    }
    faults |= {edit.name: functools.partial(plant, edit, seconds) for edit in EDITS}
    faults |= {
        name: functools.partial(not_met, name) for name in sorted(statements() - waits.keys())
    }
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = {name: row for name, row in rows.items() if name in faults}
    for name, row in rows.items():
        row["reason"] = "" if row["seen_by"] else NOT_SEEN.get(name, row["reason"])
    for name, make_row in faults.items():
        if arguments.only in name and not (arguments.missing and name in rows):
            rows[name] = asdict(make_row())
            write_table(RESULTS, rows)
    missed = [name for name, row in rows.items() if not row["seen_by"] and name not in NOT_SEEN]
    print(f"{len(rows)} faults, {sum(bool(row['seen_by']) for row in rows.values())} seen")
    if missed:
        print("Not seen, though nothing says why:", *missed, sep="\n  ")
    return 1 if missed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="plant faults whose names contain this")
    parser.add_argument(
        "--missing", action="store_true", help="plant faults that the table does not have yet"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
