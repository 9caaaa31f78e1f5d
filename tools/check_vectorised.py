"""Fails unless the compiler vectorised every loop that the packer's speed depends on.

    check_vectorised.py csrc/pack/pack_host.cpp build/cpp

In the source such a loop stands right below a comment `// vectorised: <name>`, in a template of the
types `Source` and `Destination`. What became of each instance is in the record that GCC's
-fsave-optimization-record left in the build directory.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

MARK = re.compile(r"//\s*vectorised:\s*(\S+)")
INSTANCE = re.compile(r"\[with Source = (.+?); Destination = (.+?)\]|<([^<>]+), ([^<>]+)>\(")
# Every cast between these has to be there; float64 may be, and then has to be vectorised, too.
TYPES = ("float", "BFloat16", "Float16")


def marked_loops(source: Path) -> dict[int, str]:
    """Return the names of the marked loops by the line that each starts on."""
    lines = source.read_text(encoding="utf-8").splitlines()
    return {
        number + 1: match.group(1)
        for number, line in enumerate(lines, 1)
        if (match := MARK.search(line))
    }


def read_records(build: Path, source: Path) -> Iterator[dict[str, Any]]:
    """Yield every record that the compiler wrote about `source`."""
    files = sorted(build.rglob(f"{source.stem}*.opt-record.json.gz"))
    if len(files) != 1:
        sys.exit(f"{build} expects one optimisation record of {source.name} but has {len(files)}")
    with gzip.open(files[0], "rt", encoding="utf-8") as file:
        pending = json.load(file)[2]
    while pending:
        record = pending.pop()
        pending += record.get("children", [])
        yield record


def instance(record: dict[str, Any]) -> str:
    """Return the instance of the template that a record speaks of, as "source -> destination"."""
    chain = record.get("inlining_chain")
    function = chain[0]["fndecl"] if chain else record["function"]
    if function.startswith("_Z"):
        function = subprocess.run(
            ["c++filt", function], capture_output=True, text=True, check=True
        ).stdout.strip()
    match = INSTANCE.search(function)
    if match is None:
        return str(function)
    return " -> ".join(name.split("::")[-1] for name in match.groups() if name)


def main(source: Path, build: Path) -> int:
    """Print a line for each marked loop and return 1 if an instance is not vectorised, else 0."""
    marked = marked_loops(source)
    if not marked:
        sys.exit(f"{source} expects loops marked `// vectorised: <name>` but has none")
    done: dict[int, set[str]] = {line: set() for line in marked}
    missing = {line: {f"{a} -> {b}" for a, b in product(TYPES, TYPES)} for line in marked}
    for record in read_records(build, source):
        line = record.get("location", {}).get("line")
        if line not in marked or not record["location"]["file"].endswith(source.name):
            continue
        message = "".join(part for part in record["message"] if isinstance(part, str))
        if "loop vectorized" in message:
            done[line].add(instance(record))
        elif "couldn't vectorize loop" in message:
            missing[line].add(instance(record))
    failed = False
    for line, name in marked.items():
        missing[line] -= done[line]
        failed = failed or bool(missing[line])
        print(f"{source.name}:{line}: {name}: {len(done[line])} instances vectorised")
        for absent in sorted(missing[line]):
            print(f"{source.name}:{line}: {name}: NOT vectorised: {absent}")
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"expects a source file and a build directory but got {sys.argv[1:]}")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
