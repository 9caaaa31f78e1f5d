"""Fails unless GCC for x86-64 vectorised every loop that the speed of host code depends on.

    check_vectorised.py build/cpp csrc/pack/pack_host.cpp csrc/comm/shared_memory/rank_order_sum.cpp

Such a loop stands right below a comment that names it, with the number of its instances for each
instruction set (csrc/base/instruction_set.h):

    // vectorised (baseline, AVX2, AVX-512): convert 16, 9, 9

The sources are compiled once more, with the commands of the build directory's
compile_commands.json, and GCC reports the loops that it vectorised and the size of their vectors.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

MARK = re.compile(r"// vectorised \(baseline, AVX2, AVX-512\): (.+?) (\d+), (\d+), (\d+)$")
REPORT = re.compile(r":(\d+):\d+: optimized: loop vectorized using (\d+) byte vectors")
# Bytes of a vector by instruction set.
VECTOR_BYTES = {"baseline": 16, "AVX2": 32, "AVX-512": 64}
# The loop for the last few elements is not reported, which leaves one report an instance.
FLAGS = ["-fopt-info-vec-optimized", "--param=vect-epilogues-nomask=0", "-o", "/dev/null"]


@dataclass(frozen=True)
class Loop:
    """A marked loop and the number of its instances, by instruction set."""

    name: str
    line: int
    instances: dict[str, int]


def marked_loops(source: Path) -> list[Loop]:
    """Return the marked loops of a source file."""
    lines = source.read_text(encoding="utf-8").splitlines()
    return [
        Loop(
            match[1], number + 1, dict(zip(VECTOR_BYTES, map(int, match.groups()[1:]), strict=True))
        )
        for number, line in enumerate(lines, 1)
        if (match := MARK.search(line))
    ]


def vectorised_loops(build: Path, source: Path) -> Counter[tuple[int, int]]:
    """Compile `source` and return the numbers of vectorised loops by line and bytes of a vector."""
    commands = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
    found = [one for one in commands if Path(one["file"]) == source.resolve()]
    if not found:
        sys.exit(f"{build}/compile_commands.json does not have {source}. Build it there first.")
    result = subprocess.run(
        shlex.split(found[0]["command"]) + FLAGS,
        cwd=found[0]["directory"],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        sys.exit(f"{source} does not compile:\n{result.stderr}")
    reports = [line for line in result.stderr.splitlines() if source.name in line]
    return Counter(
        (int(match[1]), int(match[2])) for line in reports if (match := REPORT.search(line))
    )


def check(build: Path, source: Path) -> bool:
    """Print a line for each marked loop. Return whether all its instances are vectorised."""
    loops = marked_loops(source)
    if not loops:
        sys.exit(f"{source} has no loop marked as vectorised. Mark those that have to be.")
    found = vectorised_loops(build, source)
    passed = True
    for loop in loops:
        counts = {name: found[loop.line, VECTOR_BYTES[name]] for name in loop.instances}
        passed = passed and all(counts[name] >= loop.instances[name] for name in counts)
        text = ", ".join(
            f"{name} {counts[name]} of {expected}" for name, expected in loop.instances.items()
        )
        print(f"{source.name}:{loop.line}: {loop.name}: instances vectorised: {text}")
    return passed


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"Pass a build directory and source files, not {sys.argv[1:]}.")
    build_directory, *sources = map(Path, sys.argv[1:])
    results = [check(build_directory, source) for source in sources]
    sys.exit(0 if all(results) else 1)
