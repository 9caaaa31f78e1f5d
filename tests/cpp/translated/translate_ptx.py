"""Translates the PTX of nvcc into C++, so that tests run the compiled kernels on a host.

    python translate_ptx.py OUT.cpp IN.ptx...

Each kernel becomes a function that one thread of a grid runs from its first to its last
instruction. That suits kernels without shared memory, barriers and atomics. Every instruction,
modifier and operand that is not known here is an error, so nothing is ignored. ptx.h has what the
functions call.

The semantics are those of "Parallel Thread Execution ISA", NVIDIA, version 9.0.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# The C++ type that an instruction's type suffix stands for. Registers hold unsigned integers.
SUFFIXES = {
    **{f"{kind}{bits}": f"uint{bits}_t" for kind in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
    "f32": "float",
    "f64": "double",
    "pred": "bool",
}
WORDS = {"f32": "uint32_t", "f64": "uint64_t", "pred": "bool"}
REGISTERS = {"pred": "bool", "b16": "uint16_t", "b32": "uint32_t", "b64": "uint64_t",
             "f32": "uint32_t", "f64": "uint64_t"}  # fmt: skip
SPECIAL = {"%tid.x": "thread.index", "%ntid.x": "thread.threads", "%ctaid.x": "thread.block",
           "%nctaid.x": "thread.blocks", "%globaltimer": "thread.clock->read()"}  # fmt: skip

INFIX = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
# Of floats, where a NaN makes ordered comparisons false and unordered ones true.
FLOAT_COMPARISONS = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neu": "!="}


class UntranslatableError(Exception):
    """PTX that this translator does not know."""


def is_float(suffix: str) -> bool:
    """Tell whether a type suffix is that of a floating type."""
    return suffix in ("f32", "f64")


def word(suffix: str) -> str:
    """Return the type of a register that holds a value of the suffix."""
    return WORDS.get(suffix) or f"uint{suffix[1:]}_t"


@dataclass
class Parameter:
    """A parameter of a kernel: its place in the launch's arguments, and its size in bytes."""

    number: int
    size: int
    alignment: int


@dataclass
class Kernel:
    """A kernel's parameters and the lines of its body."""

    name: str
    parameters: dict[str, Parameter] = field(default_factory=dict)
    body: list[str] = field(default_factory=list)


class Instruction:
    """One instruction, whose operands it turns into C++ expressions."""

    def __init__(
        self, text: str, parameters: dict[str, Parameter], registers: dict[str, str]
    ) -> None:
        self.registers = registers
        self.parameters = parameters
        match = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text)
        if match is None:
            raise UntranslatableError(f"not an instruction: {text}")
        negated, guard, self.opcode, operands = match.groups()
        self.guard = f"if ({negated}{self.register(guard)}) " if guard else ""
        self.name, *self.modifiers = self.opcode.split(".")
        # Commas within braces belong to a vector.
        self.operands = [o.strip() for o in re.split(r",(?![^{]*})", operands) if o.strip()]

    def register(self, text: str) -> str:
        """Return the variable of a register."""
        match = re.fullmatch(r"%([a-z]+)\d+", text)
        if match is None or match.group(1) not in self.registers:
            raise UntranslatableError(f"not a register: {text}")
        return text[1:] + "_"

    def type_of(self, text: str) -> str:
        """Return the type of a register's variable."""
        return self.registers[text.strip("%0123456789")]

    def vector(self, number: int) -> list[str]:
        """Return the operands of a vector, or the one operand."""
        return [part.strip() for part in self.operands[number].strip("{}").split(",")]

    def take(self, *modifiers: str) -> None:
        """Check that the instruction has exactly these modifiers."""
        if tuple(self.modifiers) != modifiers:
            raise UntranslatableError(f"unknown modifiers: {self.opcode}")

    def count(self, operands: int) -> None:
        """Check the number of operands."""
        if len(self.operands) != operands:
            raise UntranslatableError(f"{self.opcode} has {len(self.operands)} operands")

    def value(self, number: int, suffix: str) -> str:
        """Return operand `number` as an expression of the suffix's type."""
        return self.value_of(self.operands[number], suffix)

    def value_of(self, text: str, suffix: str) -> str:
        if suffix not in SUFFIXES:
            raise UntranslatableError(f"unknown type: {self.opcode}")
        if match := re.fullmatch(r"0[fd]([0-9A-F]+)", text):
            bits = int(match.group(1), 16)
            return f"from_bits<{SUFFIXES[suffix]}>({word(suffix)}({bits}u))"
        if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", text):
            if is_float(suffix):
                raise UntranslatableError(f"an integer as a float: {self.opcode} {text}")
            if suffix == "pred":
                return "false" if text == "0" else "true"
            bits = int(text, 0) % (1 << int(suffix[1:]))
            return f"{SUFFIXES[suffix]}({bits}u{'ll' if suffix[1:] == '64' else ''})"
        if text in SPECIAL:
            return SPECIAL[text]
        if text in self.parameters:
            return f"thread.parameter({self.parameters[text].number})"
        name = self.register(text)
        if is_float(suffix):
            return f"from_bits<{SUFFIXES[suffix]}>({name})"
        return f"{SUFFIXES[suffix]}({name})"

    def address(self, number: int) -> str:
        """Return operand `number`, such as [%rd1+8], as an address."""
        match = re.fullmatch(r"\[([%$\w]+)(?:\+(-?\d+))?\]", self.operands[number])
        if match is None:
            raise UntranslatableError(f"unknown address: {self.operands[number]}")
        base = self.value_of(match.group(1), "u64")
        return f"{base} + uint64_t({int(match.group(2) or 0)}ll)"

    def set(self, suffix: str, expression: str, operand: int = 0) -> str:
        """Return the statement that stores a value of the suffix's type in an operand."""
        text = self.operands[operand]
        name = self.register(text)
        # A wider register would be extended, which no instruction here needs.
        if self.type_of(text) != word(suffix):
            raise UntranslatableError(f"{self.opcode} writes a {self.type_of(text)}")
        if is_float(suffix):
            return f"{name} = to_bits({expression});"
        return f"{name} = {word(suffix)}({expression});"


def binary(function: str) -> Callable[[Instruction], str]:
    """Translate an instruction of two integers to a call of a function of ptx.h."""

    def translate(i: Instruction) -> str:
        i.count(3)
        (suffix,) = i.modifiers
        if suffix not in SUFFIXES or is_float(suffix):
            raise UntranslatableError(f"unknown type: {i.opcode}")
        return i.set(suffix, f"{function}({i.value(1, suffix)}, {i.value(2, suffix)})")

    return translate


def infix(i: Instruction) -> str:
    i.count(3)
    *rounding, suffix = i.modifiers
    if rounding != (["rn"] if is_float(suffix) else []):
        raise UntranslatableError(f"unknown modifiers: {i.opcode}")
    # Integers wrap around, which only unsigned ones do in C++.
    kind = suffix if is_float(suffix) or suffix == "pred" else "u" + suffix[1:]
    if is_float(suffix) and i.name not in ("add", "sub"):
        raise UntranslatableError(i.opcode)
    result = f"{i.value(1, kind)} {INFIX[i.name]} {i.value(2, kind)}"
    return i.set(suffix, f"arithmetic({result})" if is_float(suffix) else result)


def mul(i: Instruction) -> str:
    i.count(3)
    how, suffix = i.modifiers
    if is_float(suffix) and how == "rn":
        return i.set(suffix, f"arithmetic({i.value(1, suffix)} * {i.value(2, suffix)})")
    if how == "lo" and suffix[1:] in ("32", "64"):
        kind = "u" + suffix[1:]
        return i.set(kind, f"{i.value(1, kind)} * {i.value(2, kind)}")
    if how == "wide" and suffix in ("u32", "s32"):
        wide = f"{suffix[0]}64"
        one, other = i.value(1, suffix), i.value(2, suffix)
        return i.set(wide, f"{SUFFIXES[wide]}({one}) * {SUFFIXES[wide]}({other})")
    raise UntranslatableError(i.opcode)


def mad(i: Instruction) -> str:
    i.count(4)
    how, suffix = i.modifiers
    if how != "lo" or suffix[1:] not in ("32", "64"):
        raise UntranslatableError(i.opcode)
    kind = "u" + suffix[1:]
    return i.set(kind, f"{i.value(1, kind)} * {i.value(2, kind)} + {i.value(3, kind)}")


def div(i: Instruction) -> str:
    if i.modifiers == ["rn", "f64"]:
        i.count(3)
        return i.set("f64", f"{i.value(1, 'f64')} / {i.value(2, 'f64')}")
    return binary("divide")(i)


def shift(i: Instruction) -> str:
    i.count(3)
    (suffix,) = i.modifiers
    function = {"shl": "shift_left", "shr": "shift_right"}[i.name]
    return i.set(suffix, f"{function}({i.value(1, suffix)}, {i.value(2, 'u32')})")


def funnel(i: Instruction) -> str:
    i.count(4)
    i.take("r", "wrap", "b32")
    low, high, bits = (i.value(n, "b32") for n in (1, 2, 3))
    return i.set("b32", f"funnel_right({low}, {high}, {bits})")


def unary(operator: str) -> Callable[[Instruction], str]:
    def translate(i: Instruction) -> str:
        i.count(2)
        (suffix,) = i.modifiers
        if is_float(suffix):
            raise UntranslatableError(i.opcode)
        return i.set(suffix, f"{'!' if suffix == 'pred' else operator}{i.value(1, suffix)}")

    return translate


def convert(i: Instruction) -> str:
    i.count(2)
    how = ".".join(i.modifiers)
    if match := re.fullmatch(r"([us])(16|32|64)\.([us])(8|16|32|64)", how):
        to, to_bits, of, of_bits = match.groups()
        # An 8-bit source is the low byte of its register. Integers are extended by their own sign.
        return i.set(to + to_bits, f"{SUFFIXES[to + to_bits]}({i.value(1, of + of_bits)})")
    conversions = {
        "f32.f16": ("f32", "half_to_float", "b16"),
        "f64.f32": ("f64", "double", "f32"),
        "rn.f32.f64": ("f32", "float", "f64"),
        "rn.f16.f32": ("b16", "float_to_half", "f32"),
        "rn.bf16.f32": ("b16", "float_to_bfloat16", "f32"),
        "rn.f64.u64": ("f64", "double", "u64"),
        "rzi.u64.f64": ("u64", "truncate_to_u64", "f64"),
    }
    if how not in conversions:
        raise UntranslatableError(f"unknown conversion: {i.opcode}")
    to, function, of = conversions[how]
    return i.set(to, f"{function}({i.value(1, of)})")


def move(i: Instruction) -> str:
    i.count(2)
    (suffix,) = i.modifiers
    if i.operands[0].startswith("{"):
        parts = [i.register(part) for part in i.vector(0)]
        bits = int(suffix[1:]) // len(parts)
        source = i.value(1, suffix)
        return "".join(
            f"{name} = uint{bits}_t({source} >> {n * bits}); " for n, name in enumerate(parts)
        )
    if i.operands[1].startswith("{"):
        parts = i.vector(1)
        bits = int(suffix[1:]) // len(parts)
        joined = " | ".join(
            f"{word(suffix)}({i.value_of(part, f'b{bits}')}) << {n * bits}"
            for n, part in enumerate(parts)
        )
        return i.set(suffix, joined)
    if suffix == "pred":
        return i.set("pred", i.value(1, "pred"))
    return i.set(suffix, i.value(1, suffix))


def compare(i: Instruction) -> str:
    i.count(3)
    how, suffix = i.modifiers
    known = FLOAT_COMPARISONS if is_float(suffix) else COMPARISONS
    if how not in known:
        raise UntranslatableError(f"unknown comparison: {i.opcode}")
    return i.set("pred", f"{i.value(1, suffix)} {known[how]} {i.value(2, suffix)}")


def select(i: Instruction) -> str:
    i.count(4)
    (suffix,) = i.modifiers
    return i.set(suffix, f"{i.value(3, 'pred')} ? {i.value(1, suffix)} : {i.value(2, suffix)}")


def access(i: Instruction) -> tuple[str, str, int]:
    """Return the space, the type and the number of elements of a load or a store."""
    space, *vector, suffix = i.modifiers
    if vector not in ([], ["v2"], ["v4"]) or suffix not in SUFFIXES:
        raise UntranslatableError(f"unknown modifiers: {i.opcode}")
    return space, suffix, int(vector[0][1:]) if vector else 1


def load(i: Instruction) -> str:
    i.count(2)
    space, suffix, elements = access(i)
    if space not in ("global", "param"):
        raise UntranslatableError(f"unknown memory: {i.opcode}")
    names = [i.register(name) for name in i.vector(0)]
    if len(names) != elements:
        raise UntranslatableError(f"{i.opcode} loads {len(names)} elements")
    # A narrow integer is extended by its sign to the width of its register.
    size = f"{word(suffix) if is_float(suffix) else SUFFIXES[suffix]}, {elements}"
    reads = " ".join(f"{name} = loaded.part[{n}];" for n, name in enumerate(names))
    return f"{{ const auto loaded = load_{space}<{size}>(thread, {i.address(1)}); {reads} }}"


def store(i: Instruction) -> str:
    i.count(2)
    space, suffix, elements = access(i)
    if space != "global":
        raise UntranslatableError(f"unknown memory: {i.opcode}")
    kind = "b" + suffix[1:]
    values = ", ".join(i.value_of(name, kind) for name in i.vector(1))
    return (
        f"store_global(thread, {i.address(0)}, Vector<{word(suffix)}, {elements}>{{{{{values}}}}});"
    )


def branch(i: Instruction) -> str:
    i.count(1)
    if i.modifiers not in ([], ["uni"]):
        raise UntranslatableError(i.opcode)
    return f"goto {label(i.operands[0])};"


def to_global(i: Instruction) -> str:
    i.count(2)
    i.take("to", "global", "u64")
    return i.set("u64", i.value(1, "u64"))


def finish(i: Instruction) -> str:
    i.count(0)
    i.take()
    return "return;"


def sleep(i: Instruction) -> str:
    i.count(1)
    i.take("u32")
    return f"thread.clock->sleep({i.value(0, 'u32')});"


INSTRUCTIONS: dict[str, Callable[[Instruction], str]] = {
    **dict.fromkeys(INFIX, infix),
    "mul": mul,
    "mad": mad,
    "div": div,
    "rem": binary("remainder"),
    "min": binary("minimum"),
    "max": binary("maximum"),
    "shl": shift,
    "shr": shift,
    "shf": funnel,
    "not": unary("~"),
    "neg": unary("-"),
    "cvt": convert,
    "mov": move,
    "setp": compare,
    "selp": select,
    "ld": load,
    "st": store,
    "bra": branch,
    "cvta": to_global,
    "ret": finish,
    "nanosleep": sleep,
}


def label(text: str) -> str:
    """Return the C++ label of a PTX one."""
    if not re.fullmatch(r"\$L\w+", text):
        raise UntranslatableError(f"not a label: {text}")
    return text[1:]


def parameter(text: str, number: int) -> tuple[str, Parameter]:
    """Return the name of a declared parameter, and the parameter."""
    match = re.fullmatch(
        r"\.param (?:\.align (\d+) \.b8 (\w+)\[(\d+)\]|\.([usbf]\d+)(?: \.ptr \.align \d+)? (\w+))",
        text,
    )
    if match is None:
        raise UntranslatableError(f"unknown parameter: {text}")
    alignment, name, size, suffix, scalar = match.groups()
    if scalar:
        return scalar, Parameter(number, int(suffix[1:]) // 8, int(suffix[1:]) // 8)
    return name, Parameter(number, int(size), int(alignment))


def read_kernels(ptx: str) -> list[Kernel]:
    """Return the kernels of a file."""
    ptx = re.sub(r"/\*.*?\*/|//[^\n]*", "", ptx, flags=re.S)
    header, *entries = re.split(r"^(?=(?:\.visible )?\.entry )", ptx, flags=re.M)
    if unknown := re.sub(r"\.(version|target|address_size) \S+", "", header).strip():
        raise UntranslatableError(f"declarations before the kernels: {unknown[:80]}")
    kernels = []
    for entry in entries:
        match = re.match(
            r"(?:\.visible )?\.entry (\w+)\((.*?)\)((?:\s*\.\w+ [\d, ]+)*)\s*\{(.*)\}\s*$",
            entry,
            re.S,
        )
        if match is None:
            raise UntranslatableError(f"not a kernel: {entry[:80]}")
        kernel = Kernel(match.group(1))
        if unknown := re.sub(r"\.(maxntid|minnctapersm)\s+[\d, ]+", "", match.group(3)).strip():
            raise UntranslatableError(f"unknown directive: {unknown}")
        declared = [text.strip() for text in match.group(2).split(",") if text.strip()]
        kernel.parameters = dict(parameter(text, n) for n, text in enumerate(declared))
        kernel.body = [line.strip() for line in match.group(4).splitlines() if line.strip()]
        kernels.append(kernel)
    return kernels


def translate_line(line: str, parameters: dict[str, Parameter], registers: dict[str, str]) -> str:
    """Return the C++ of one line of a kernel's body."""
    if match := re.fullmatch(r"\{ \.reg \.(\w+) (\w+); (.*;) \}", line):
        kind, name, rest = match.groups()  # a register of one instruction
        line = re.sub(rf"\b{name}\b", f"%{name}0", rest)
        inner = translate_line(line, parameters, {**registers, name: REGISTERS[kind]})
        return f"{{ {REGISTERS[kind]} {name}0_; {inner} }}"
    if line in ("{", "}"):
        return line
    if line.endswith(":"):
        return f"{label(line[:-1])}:;"
    if not line.endswith(";"):
        raise UntranslatableError(f"an instruction over several lines: {line}")
    instruction = Instruction(line[:-1].strip(), parameters, registers)
    if instruction.name not in INSTRUCTIONS:
        raise UntranslatableError(f"unknown instruction: {instruction.opcode}")
    try:
        statement = INSTRUCTIONS[instruction.name](instruction)
    except ValueError as error:  # another number of modifiers
        raise UntranslatableError(f"unknown modifiers: {instruction.opcode}") from error
    return f"{instruction.guard}{{ {statement} }}" if instruction.guard else statement


def translate_kernel(kernel: Kernel, function: str) -> list[str]:
    """Return the C++ function of a kernel."""
    declarations: list[str] = []
    body: list[str] = []
    registers: dict[str, str] = {}
    for line in kernel.body:
        if match := re.fullmatch(r"\.reg \.(\w+)\s+%([a-z]+)<(\d+)>;", line):
            kind, prefix, count = match.groups()
            if kind not in REGISTERS:
                raise UntranslatableError(f"unknown registers: {line}")
            registers[prefix] = REGISTERS[kind]
            names = (f"{prefix}{n}_ = kUnset<{REGISTERS[kind]}>" for n in range(int(count)))
            declarations.append(f"{REGISTERS[kind]} {', '.join(names)};")
        else:
            try:
                body.append(translate_line(line, kernel.parameters, registers))
            except UntranslatableError as error:
                raise UntranslatableError(f"{kernel.name}: {error}") from error
    return [f"void {function}(const Thread& thread) {{", *declarations, *body, "}"]


def translate(sources: list[str]) -> str:
    """Return a C++ file with the kernels of some PTX files."""
    lines = ['#include "ptx.h"', "namespace fsdp::ptx {", "namespace {"]
    rows = []
    for kernel in (kernel for source in sources for kernel in read_kernels(source)):
        function = f"kernel_{len(rows)}"
        lines += translate_kernel(kernel, function)
        sizes = ", ".join(f"{{{p.size}, {p.alignment}}}" for p in kernel.parameters.values())
        rows.append(f'{{"{kernel.name}", {function}, {{{sizes}}}}},')
    lines += ["}  // namespace", "const std::vector<Kernel>& kernels() {"]
    lines += ["static const std::vector<Kernel> all = {", *rows, "};", "return all;", "}"]
    return "\n".join([*lines, "}  // namespace fsdp::ptx", ""])


def main(arguments: list[str]) -> int:
    """Translate files; return the exit code."""
    if len(arguments) < 2:
        raise SystemExit("usage: translate_ptx.py OUT.cpp IN.ptx...")
    try:
        text = translate([Path(name).read_text(encoding="utf-8") for name in arguments[1:]])
    except UntranslatableError as error:
        print(f"translate_ptx: {error}", file=sys.stderr)
        return 1
    Path(arguments[0]).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
