"""Checks the kernels in the installed CUDA build of fsdp_ext, for each architecture. Needs no GPU.

It reads the binary with cuobjdump and fails unless every kernel is there, kernels that move memory
load and store 16 bytes at a time, and no kernel spills registers. It prints the numbers of
registers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# The number of instances. pack and cast have one for each pair of the four floating dtypes. pack
# has each of them for few and for many addresses, and cast has one more for bytes.
KERNELS = {
    "pack_kernel": 32,
    "cast_kernel": 17,
    "unpack_kernel": 1,
    # Kernels of simulated collectives.
    "transfer_kernel": 1,
    "stamp_kernel": 1,
    "wait_kernel": 1,
}
MOVES_MEMORY = ("pack_kernel", "cast_kernel", "unpack_kernel", "transfer_kernel")


def find_tools() -> tuple[str, dict[str, str]]:
    """Return cuobjdump and an environment in which it finds nvdisasm.

    Raises:
        SystemExit: if cuobjdump is missing.
    """
    places = [
        str(place / "nvidia" / "cu13" / "bin") for place in map(Path, sys.path) if place.is_dir()
    ]
    path = os.pathsep.join([*places, os.environ.get("PATH", "")])
    tool = shutil.which("cuobjdump", path=path)
    if tool is None:
        raise SystemExit(
            "cuobjdump is missing; pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm, or put "
            "CUDA's bin directory on the PATH"
        )
    return tool, {**os.environ, "PATH": path}


def dump(binary: str, *options: str) -> str:
    """Run cuobjdump; return its output."""
    tool, environment = find_tools()
    result = subprocess.run(
        [tool, *options, binary], capture_output=True, text=True, check=False, env=environment
    )
    if result.returncode != 0:
        raise SystemExit(f"cuobjdump failed: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


def kernel_of(symbol: str) -> str | None:
    """Return the kernel of which a mangled name is an instance, or None."""
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
    """Return the numbers of 16-byte loads and stores in each instance's machine code."""
    counts = {}
    text = dump(binary, "--dump-sass", "--gpu-architecture", f"sm_{arch}")
    for function in text.split("Function :")[1:]:
        symbol = function.split()[0]
        loads = len(re.findall(r"LDG\.E\S*\.128", function))
        stores = len(re.findall(r"STG\.E\S*\.128", function))
        counts[symbol] = (loads, stores)
    return counts


def check(binary: str, architectures: list[str]) -> list[str]:
    """Print what was found; return what is wrong with it."""
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
                wrong.append(f"sm_{arch}: {symbol} is not a kernel that this check knows")
                continue
            counted[kernel] += 1
            registers[kernel].append(used["REG"])
            if used["STACK"] or used["LOCAL"]:
                wrong.append(f"sm_{arch}: {symbol} spills: {used}")
            if kernel in MOVES_MEMORY and 0 in wide.get(symbol, (0, 0)):
                wrong.append(f"sm_{arch}: {symbol} has no 16-byte loads or stores")
        for name, expected in KERNELS.items():
            if counted[name] != expected:
                wrong.append(f"sm_{arch}: has {counted[name]} instances of {name}, not {expected}")
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
            wrong.append(f"has no PTX of compute_{arch}, which newer GPUs need")
        else:
            print(f"compute_{arch}: PTX")
    return wrong


def main() -> int:
    """Check, print, and return the exit code."""
    from fsdp_ext import _C, _build_info

    if _build_info.BUILD_KIND != "CUDA":
        raise SystemExit(f"this is a {_build_info.BUILD_KIND} build; install a CUDA build")
    wrong = check(_C.__file__, list(_build_info.CUDA_ARCHITECTURES))
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
