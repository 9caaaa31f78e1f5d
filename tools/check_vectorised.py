"""Fails unless the compiler vectorised every loop that the packer's speed depends on.

    check_vectorised.py csrc/pack pack_host.vectorised.txt

In the sources such a loop stands right below a comment `// vectorised: <name>`. The report is what
GCC's -fopt-info-vec-optimized wrote while it compiled them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# A loop and what is inlined into it start within so many lines below the comment.
REACH = 4
MARK = re.compile(r"//\s*vectorised:\s*(\S.*?)\s*$")
LOOP = re.compile(r"([^/\s]+):(\d+):\d+: optimized:\s+loop vectorized")


def marked_loops(directory: Path) -> list[tuple[str, int, str]]:
    """Return (file, line of the comment, name) of every marked loop."""
    return [
        (path.name, number, match.group(1))
        for path in sorted(directory.iterdir())
        if path.suffix in (".h", ".cpp")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := MARK.search(line))
    ]


def main(directory: Path, report: Path) -> int:
    """Print a line for each marked loop and return 1 if any was not vectorised, else 0."""
    marked = marked_loops(directory)
    if not marked:
        print(f"{directory} expects loops marked `// vectorised: <name>` but has none")
        return 1
    vectorised: dict[tuple[str, int], int] = {}
    for match in LOOP.finditer(report.read_text(encoding="utf-8")):
        place = (match.group(1), int(match.group(2)))
        vectorised[place] = vectorised.get(place, 0) + 1
    failed = 0
    for file, line, name in marked:
        copies = sum(vectorised.get((file, line + below), 0) for below in range(1, REACH + 1))
        failed += copies == 0
        outcome = f"vectorised, {copies} copies" if copies else "NOT vectorised"
        print(f"{file}:{line}: {name}: {outcome}")
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"expects a source directory and a report but got {sys.argv[1:]}")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
