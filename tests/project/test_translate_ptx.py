"""The translator of PTX refuses everything that it does not know (tests/cpp/translated)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from support.tools import load_tool

PATH = Path(__file__).parents[1] / "cpp" / "translated" / "translate_ptx.py"

KERNEL = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry kernel(
	.param .u64 kernel_param_0
)
{
	.reg .pred 	%%p<2>;
	.reg .b16 	%%rs<3>;
	.reg .b32 	%%r<4>;
	.reg .b64 	%%rd<2>;
	%s
	ret;
}
"""


@pytest.fixture(scope="module")
def translator() -> ModuleType:
    return load_tool(PATH)


def test_an_instruction_becomes_a_statement(translator):
    text = translator.translate([KERNEL % "@!%p1 add.s32 %r1, %r2, -1;"])
    assert "if (!p1_) { r1_ = uint32_t(uint32_t(r2_) + uint32_t(4294967295u)); }" in text
    assert '{"kernel", kernel_0, {{8, 8}}},' in text


@pytest.mark.parametrize(
    "line",
    [
        "bar.sync 0;",
        "atom.global.add.u32 %r1, [%rd1], 1;",
        "ld.shared.u32 %r1, [%rd1];",
        "ld.volatile.global.u32 %r1, [%rd1];",
        "add.sat.s32 %r1, %r2, %r3;",
        "mul.rn.ftz.f32 %r1, %r2, %r3;",
        "mul.hi.u32 %r1, %r2, %r3;",
        "fma.rn.f32 %r1, %r2, %r3, %r3;",
        "cvt.rz.f16.f32 %rs1, %r1;",
        "setp.lt.and.s32 %p1, %r1, %r2, %p1;",
        "setp.ltu.f32 %p1, %r1, %r2;",
        "mov.u32 %r1, %laneid;",
        "add.s32 %r1, %r2;",
        "add.s32 %rd1, %r2, %r3;",  # writes a register of another width
        "add.s32 %q1, %r2, %r3;",
        "bra.uni target;",
        ".shared .b8 memory[16];",
    ],
)
def test_what_is_unknown_is_an_error(translator, line):
    with pytest.raises(translator.UntranslatableError):
        translator.translate([KERNEL % line])


def test_a_declaration_outside_of_kernels_is_an_error(translator):
    with pytest.raises(translator.UntranslatableError, match="before the kernels"):
        translator.translate([".global .b8 table[16];\n" + KERNEL % ""])


def test_an_error_ends_the_build(translator, tmp_path, capsys):
    source = tmp_path / "kernel.ptx"
    source.write_text(KERNEL % "bar.sync 0;", encoding="utf-8")
    assert translator.main([str(tmp_path / "kernel.cpp"), str(source)]) == 1
    assert "kernel: unknown instruction: bar.sync" in capsys.readouterr().err
    assert not (tmp_path / "kernel.cpp").exists()
