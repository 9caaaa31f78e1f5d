"""Counts the instructions that sharding adds to a step, and which share of them functions have.

    count_instructions.py [--function PATTERN ...]

The model and the step are those of `python -m bench host_overhead` with two parameters a unit. They
run under valgrind's callgrind, which counts the same on a busy machine as on an idle one. A share
is that of a function and all that it calls, of the instructions of a sharded step minus those of
an unsharded one. By default these are the functions that compare what ranks issue. They tag each
collective and prepare the message at the end of backward. The process group is a fake one, so the
message itself is not sent and not counted.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 10
WARM_STEPS = 5
LAYERS, UNITS = 1, 96
PARTS = ("unsharded", "sharded")
ORDER_CHECK = {
    "Announcer::announce": r"^fsdp::Announcer::announce\(",
    "RankExchange": r"^fsdp::RankExchange::(begin|end)\(",
}
LINE = re.compile(r"\s*([\d,]+) \([^)]*\)\s+[^:]*:(.+?)(?: \[.*\])?$")


def run_steps() -> None:
    """Run steps of an unsharded and of a sharded model; callgrind writes a file after each."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from bench.host_overhead import BATCH, WIDTH, WORLD_SIZE, make_model, shard_ours, timed

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    batch = torch.randn(BATCH, WIDTH)

    def tell(*what: str) -> None:
        subprocess.run(["callgrind_control", *what, str(os.getpid())], check=True,
                       capture_output=True)  # fmt: skip

    for part in PARTS:
        model = make_model(LAYERS, UNITS)
        if part == "sharded":
            model = shard_ours(model)
        for _ in range(WARM_STEPS):
            timed(model, batch)
        gc.collect()
        gc.disable()  # or it runs in some counts and not in others
        tell("-i", "on")
        for _ in range(STEPS):
            timed(model, batch)
        tell("-i", "off")
        tell("-d", part)
        gc.enable()
    dist.destroy_process_group()


def parse_counts(text: str) -> dict[str, int]:
    """Return instructions by function from callgrind_annotate's text, and the sum as ""."""
    counts: dict[str, int] = {}
    for line in text.splitlines():
        if "PROGRAM TOTALS" in line:
            counts[""] = int(line.split("(")[0].replace(",", ""))
        elif match := LINE.match(line):
            counts[match[2]] = max(int(match[1].replace(",", "")), counts.get(match[2], 0))
    return counts


def count(directory: Path) -> list[dict[str, int]]:
    """Run the steps under callgrind; return the counts of both parts."""
    profile = directory / "counts"
    subprocess.run(
        ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes",
         f"--callgrind-out-file={profile}", sys.executable, __file__, "--steps"],
        check=True,
    )  # fmt: skip
    annotate = ["callgrind_annotate", "--inclusive=yes", "--threshold=100"]
    parts = []
    for number in range(1, len(PARTS) + 1):
        done = subprocess.run(
            [*annotate, f"{profile}.{number}-01"], check=True, capture_output=True, text=True
        )
        parts.append(parse_counts(done.stdout))
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--function", action="append", metavar="PATTERN",
                        help="a regular expression for a function's name")  # fmt: skip
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for bench
        run_steps()
        return
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is not on the PATH, and it counts the instructions. Install it.")
    with tempfile.TemporaryDirectory() as directory:
        unsharded, sharded = count(Path(directory))
    added = sharded[""] - unsharded[""]
    print(f"a step of {UNITS} units of {2 * LAYERS} parameters, fake process group")
    for name, total in (("unsharded", unsharded[""]), ("sharded", sharded[""]), ("added", added)):
        print(f"{total / STEPS / UNITS:12,.0f} instructions a unit  {name}")
    asked = {pattern: pattern for pattern in args.function} if args.function else ORDER_CHECK
    for name, pattern in asked.items():
        found = [n for function, n in sharded.items() if re.search(pattern, function)]
        if not found:
            sys.exit(f"No function that ran matches {pattern!r}.")
        total = sum(found)
        print(
            f"{total / STEPS / UNITS:12,.0f} instructions a unit  "
            f"{total / added:.2%} of what is added, {total / sharded['']:.2%} of all: {name}"
        )


if __name__ == "__main__":
    main()
