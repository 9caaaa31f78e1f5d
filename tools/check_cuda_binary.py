"""Fails unless the CUDA build has its kernels for every GPU it was made for, as they should be.

By what cuobjdump says of the fsdp_ext that is installed, for each architecture: every kernel is
there, those that move memory load and store 16 bytes at a time, and no kernel spills registers.
Prints how many registers they take. Needs no GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# How many of each there are: one for each pair of the four floating dtypes, of pack with room for
# few and for many addresses; and one for bytes.
KERNELS = {
    "pack_kernel": 32,
    "cast_kernel": 17,
    "unpack_kernel": 1,
    # Of simulated collectives.
    "transfer_kernel": 1,
    "stamp_kernel": 1,
    "wait_kernel": 1,
}
MOVES_MEMORY = ("pack_kernel", "cast_kernel", "unpack_kernel", "transfer_kernel")


def find_tools() -> tuple[str, dict[str, str]]:
    """Return cuobjdump and an environment in which it finds nvdisasm.

    Raises:
        SystemExit: if there is none.
    """
    places = [
        str(place / "nvidia" / "cu13" / "bin") for place in map(Path, sys.path) if place.is_dir()
    ]
    path = os.pathsep.join([*places, os.environ.get("PATH", "")])
    tool = shutil.which("cuobjdump", path=path)
    if tool is None:
        raise SystemExit(
            "expects cuobjdump but found none; pip install nvidia-cuda-cuobjdump "
            "nvidia-cuda-nvdisasm, or put CUDA's bin directory on the PATH"
        )
    return tool, {**os.environ, "PATH": path}


def dump(binary: str, *options: str) -> str:
    """Return what cuobjdump prints."""
    tool, environment = find_tools()
    result = subprocess.run(
        [tool, *options, binary], capture_output=True, text=True, check=False, env=environment
    )
    if result.returncode != 0:
        raise SystemExit(f"cuobjdump failed: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


def kernel_of(symbol: str) -> str | None:
    """Return which of the kernels a mangled name is an instance of."""
    matches = [name for name in KERNELS if re.search(rf"\d{name}(I|E)", symbol)]
    return matches[0] if matches else None


def resources(binary: str) -> dict[str, dict[str, dict[str, int]]]:
    """Return registers, stack and local memory by architecture and kernel instance."""
    found: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)
    arch = symbol = ""
    for line in dump(binary, "--dump-resource-usage").splitlines():
        if match := re.match(r"arch = sm_(\w+)", line):
            arch = match.group(1)
        elif match := re.match(r"\s*Function (\S+):", line):
            symbol = match.group(1)
        elif symbol and "REG:" in line:
            found[arch][symbol] = {
                k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", line)
            }
            symbol = ""
    return found


def wide_accesses(binary: str, arch: str) -> dict[str, tuple[int, int]]:
    """Return how many 16-byte loads and stores each kernel instance has in its machine code."""
    counts = {}
    text = dump(binary, "--dump-sass", "--gpu-architecture", f"sm_{arch}")
    for function in text.split("Function :")[1:]:
        symbol = function.split()[0]
        loads = len(re.findall(r"LDG\.E\S*\.128", function))
        stores = len(re.findall(r"STG\.E\S*\.128", function))
        counts[symbol] = (loads, stores)
    return counts


def check(binary: str, architectures: list[str]) -> list[str]:
    """Return what is wrong, and print what there is."""
    wrong = []
    usage = resources(binary)
    for arch in (name.removesuffix("-real") for name in architectures if name.endswith("-real")):
        instances = usage.get(arch, {})
        counted = dict.fromkeys(KERNELS, 0)
        wide = wide_accesses(binary, arch)
        registers = defaultdict(list)
        for symbol, used in instances.items():
            kernel = kernel_of(symbol)
            if kernel is None:
                wrong.append(f"sm_{arch}: a kernel that this check does not know: {symbol}")
                continue
            counted[kernel] += 1
            registers[kernel].append(used["REG"])
            if used["STACK"] or used["LOCAL"]:
                wrong.append(f"sm_{arch}: {symbol} spills: {used}")
            if kernel in MOVES_MEMORY and 0 in wide.get(symbol, (0, 0)):
                wrong.append(f"sm_{arch}: {symbol} has no 16-byte loads or stores")
        for name, expected in KERNELS.items():
            if counted[name] != expected:
                wrong.append(f"sm_{arch}: expects {expected} of {name} but has {counted[name]}")
        listed = ", ".join(
            f"{name} {counted[name]} x {min(used)} to {max(used)} registers"
            for name, used in sorted(registers.items())
        )
        loads = sum(count for count, _ in wide.values())
        stores = sum(count for _, count in wide.values())
        spilling = sum(1 for used in instances.values() if used["STACK"] or used["LOCAL"])
        print(
            f"sm_{arch}: {listed}; {loads} loads and {stores} stores of 16 bytes; "
            f"{spilling} kernels spill"
        )
    ptx = dump(binary, "--list-ptx")
    for arch in (a.removesuffix("-virtual") for a in architectures if a.endswith("-virtual")):
        if f"sm_{arch}.ptx" not in ptx:
            wrong.append(f"expects PTX for newer GPUs, of compute_{arch}, but has none")
        else:
            print(f"compute_{arch}: PTX")
    return wrong


def main() -> int:
    """Check, print, and return the exit code."""
    from fsdp_ext import _C, _build_info

    if _build_info.BUILD_KIND != "CUDA":
        raise SystemExit(f"expects a CUDA build but got a {_build_info.BUILD_KIND} build")
    wrong = check(_C.__file__, list(_build_info.CUDA_ARCHITECTURES))
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
