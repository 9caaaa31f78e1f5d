"""Checks the kernels in the installed CUDA build of fsdp_ext, for each architecture. Needs no GPU.

It reads the binary with cuobjdump and fails unless every kernel is there, kernels that move memory
load and store 16 bytes at a time, and no kernel spills registers. It compares the machine code with
the table in tools/cuda_kernels.tsv, and fails if a kernel has become worse. After a change that is
worth it, `--write` writes the table anew. Each release of nvcc writes other machine code, so the
table is of one release, and a build by another one fails, too. The columns are:

    registers     of a thread. Up to REGISTERS_ALLOWED more are not worse, since `threads` says
                  whether they cost occupancy.
    threads       threads that fit on a multiprocessor at once, given the registers
    instructions  of the whole kernel. Up to INSTRUCTIONS_ALLOWED times as many are not worse.
    loads         of 16 bytes; not compared
    stores        of 16 bytes; not compared
    in_flight     bytes that a thread loads with 16-byte loads before it stores any
    per_16        instructions of the loop that moves memory, for each 16 bytes that it stores.
                  Paths that run rarely are among them, so it is an upper bound.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import astuple, dataclass, fields
from pathlib import Path

# The number of instances. pack and cast have one for each pair of the four floating dtypes, and
# cast has one more for bytes.
KERNELS = {
    "pack_kernel": 16,
    "cast_kernel": 17,
    "unpack_kernel": 1,
    # Kernels of simulated collectives.
    "transfer_kernel": 1,
    "stamp_kernel": 1,
    "wait_kernel": 1,
}
REGISTERS_ALLOWED = 8  # the unit in which registers are allocated
INSTRUCTIONS_ALLOWED = 1.05
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


@dataclass(frozen=True)
class MachineCode:
    """What the machine code of one kernel instance is like."""

    registers: int
    threads: int  # on a multiprocessor at once
    instructions: int
    loads: int  # of 16 bytes
    stores: int
    in_flight: int
    per_16: int

    def worse_than(self, other: MachineCode) -> list[str]:
        """Return the columns in which this is worse than `other`."""
        is_worse = {
            "registers": self.registers > other.registers + REGISTERS_ALLOWED,
            "instructions": self.instructions > other.instructions * INSTRUCTIONS_ALLOWED,
            "threads": self.threads < other.threads,
            "in_flight": self.in_flight < other.in_flight,
            "per_16": self.per_16 > other.per_16,
        }
        return [name for name, worse in is_worse.items() if worse]


def threads_at_once(kernel: str, registers: int) -> int:
    """Return how many threads of a kernel fit on a multiprocessor of 8.0, 9.0 or 10.0.

    A multiprocessor has 65,536 registers and 64 warps (CUDA C++ Programming Guide, "compute
    capabilities"). A warp gets registers in units of 256, and each quarter has as many warps.
    """
    block = 512 if kernel == "transfer_kernel" else 1 if kernel not in MOVES_MEMORY else 256
    warps_of_block = (block + 31) // 32
    of_warp = (registers * 32 + 255) // 256 * 256
    warps = min(64, 65536 // 4 // of_warp * 4)
    return min(32, warps // warps_of_block) * block


def hot_loop(lines: list[tuple[int, str]]) -> list[str]:
    """Return the innermost loop that has all the 16-byte loads that any loop has."""
    loops = []
    for address, text in lines:
        jump = re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text)
        if jump and int(jump.group(1), 16) < address:
            begin = int(jump.group(1), 16)
            loops.append([line for at, line in lines if begin <= at <= address])
    wide = [sum(is_wide(line, "LDG") for line in loop) for loop in loops]
    return min((loop for loop, n in zip(loops, wide, strict=True) if n == max(wide)), key=len)


def is_wide(line: str, name: str) -> bool:
    """Tell whether an instruction is a 16-byte load (LDG) or store (STG) of global memory."""
    return re.search(rf"\b{name}\.E\S*\.128", line) is not None


def bytes_in_flight(lines: list[str]) -> int:
    """Return the most bytes that 16-byte loads have asked for before the next store."""
    most = loads = 0
    for line in lines:
        if is_wide(line, "LDG"):
            loads += 1
            most = max(most, loads)
        elif re.search(r"\bSTG\b", line):
            loads = 0
    return most * 16


def machine_code(
    binary: str, arch: str, usage: dict[str, dict[str, int]]
) -> dict[str, MachineCode]:
    """Return the machine code of each kernel instance by its mangled name."""
    found = {}
    text = dump(binary, "--dump-sass", "--gpu-architecture", f"sm_{arch}")
    for function in text.split("Function :")[1:]:
        symbol = function.split()[0]
        kernel = kernel_of(symbol)
        if kernel is None or symbol not in usage:
            continue
        lines = [
            (int(at, 16), line)
            for at, line in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", function, re.M)
            if not line.startswith("NOP")
        ]
        code = [line for _, line in lines]
        stores = sum(is_wide(line, "STG") for line in code)
        loop = hot_loop(lines) if stores else []
        moved = sum(is_wide(line, "STG") for line in loop)
        found[symbol] = MachineCode(
            registers=usage[symbol]["REG"],
            threads=threads_at_once(kernel, usage[symbol]["REG"]),
            instructions=len(code),
            loads=sum(is_wide(line, "LDG") for line in code),
            stores=stores,
            in_flight=bytes_in_flight(code),
            per_16=round(len(loop) / moved) if moved else 0,
        )
    return found


# ---- The table -----------------------------------------------------------------------------------

TABLE = Path(__file__).with_name("cuda_kernels.tsv")
Rows = dict[tuple[str, str], MachineCode]  # by compute capability and instance


def instance_names(symbols: list[str]) -> dict[str, str]:
    """Return a readable name of each mangled one, without arguments and namespaces."""
    result = subprocess.run(
        ["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True
    )
    names = {}
    for symbol, name in zip(symbols, result.stdout.splitlines(), strict=True):
        match = re.search(r"(\w+_kernel(?:<.*?>)?)\(", name)
        names[symbol] = re.sub(r"fsdp::\w+::|\s|\(int\)", "", match.group(1) if match else name)
    return names


def read_table() -> tuple[str, Rows]:
    """Return the release of nvcc that the table belongs to, and its rows."""
    first, _, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = {}
    for line in lines:
        arch, name, *numbers = line.split("\t")
        rows[arch, name] = MachineCode(*map(int, numbers))
    return first.removeprefix("# nvcc "), rows


def write_table(nvcc: str, rows: Rows) -> None:
    """Write the table anew."""
    header = "\t".join(["capability", "kernel", *(field.name for field in fields(MachineCode))])
    lines = ["\t".join([*key, *map(str, astuple(rows[key]))]) for key in sorted(rows)]
    TABLE.write_text("\n".join([f"# nvcc {nvcc}", header, *lines, ""]), encoding="utf-8")


def compare(nvcc: str, rows: Rows) -> list[str]:
    """Return what is worse than in the table."""
    of_table, before = read_table()
    if nvcc != of_table:
        return [
            f"{TABLE.name} is of nvcc {of_table}, and this build of {nvcc}, so nothing could be "
            f"compared. Build with {of_table}, or make the table of {nvcc}: check out the commit "
            "that wrote the table last, make its CUDA build with this nvcc, and run with --write."
        ]
    wrong = []
    better = 0
    for key, code in rows.items():
        if key not in before:
            wrong.append(f"sm_{key[0]}: {key[1]} is not in {TABLE.name}. Run with --write.")
            continue
        better += bool(before[key].worse_than(code))
        wrong += [
            f"sm_{key[0]}: {key[1]} has {name} {getattr(code, name)}, and had "
            f"{getattr(before[key], name)}. If that is worth it, run with --write."
            for name in code.worse_than(before[key])
        ]
    print(f"{TABLE.name}: {len(rows)} rows compared, {better} better, {len(wrong)} worse")
    return wrong


def check(binary: str, architectures: list[str]) -> tuple[list[str], Rows]:
    """Print what was found; return what is wrong with it, and the rows of the table."""
    wrong = []
    rows: Rows = {}
    usage = resources(binary)
    for arch in (name.removesuffix("-real") for name in architectures if name.endswith("-real")):
        instances = usage.get(arch, {})
        counted = dict.fromkeys(KERNELS, 0)
        codes = machine_code(binary, arch, instances)
        names = instance_names(list(codes))
        rows.update({(arch, names[symbol]): code for symbol, code in codes.items()})
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
            if kernel in MOVES_MEMORY and not (codes[symbol].loads and codes[symbol].stores):
                wrong.append(f"sm_{arch}: {symbol} has no 16-byte loads or stores")
        for name, expected in KERNELS.items():
            if counted[name] != expected:
                wrong.append(f"sm_{arch}: has {counted[name]} instances of {name}, not {expected}")
        listed = ", ".join(
            f"{name} {counted[name]} x {min(used)} to {max(used)} registers"
            for name, used in sorted(registers.items())
        )
        loads = sum(code.loads for code in codes.values())
        stores = sum(code.stores for code in codes.values())
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
    return wrong, rows


def main() -> int:
    """Check, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table of machine code anew")
    write = parser.parse_args().write
    from fsdp_ext import _C, _build_info

    if _build_info.BUILD_KIND != "CUDA":
        raise SystemExit(f"this is a {_build_info.BUILD_KIND} build; install a CUDA build")
    wrong, rows = check(_C.__file__, list(_build_info.CUDA_ARCHITECTURES))
    if write:
        write_table(_build_info.CUDA_VERSION, rows)
    else:
        wrong += compare(_build_info.CUDA_VERSION, rows)
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
