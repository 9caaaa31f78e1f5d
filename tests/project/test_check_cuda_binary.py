"""`tools/check_cuda_binary.py` finds machine code that is worse than its table."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.tools import TOOLS, load_tool

NVCC = "1.2.3"
KEY = ("90", "pack_kernel<float>")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    module = load_tool(TOOLS / "check_cuda_binary.py")
    monkeypatch.setattr(module, "TABLE", tmp_path / "table.tsv")
    return module


def _code(tool: ModuleType, **changed: int) -> Any:
    before = tool.MachineCode(
        registers=64, threads=1024, instructions=1000, loads=8, stores=4, in_flight=64, per_16=40
    )
    return dataclasses.replace(before, **changed)


def _compared(tool: ModuleType, **changed: int) -> list[str]:
    tool.write_table(NVCC, {KEY: _code(tool)})
    wrong: list[str] = tool.compare(NVCC, {KEY: _code(tool, **changed)})
    return wrong


@pytest.mark.parametrize(
    ("column", "allowed", "worse"),
    [
        ("registers", 72, 73),
        ("threads", 1024, 1023),
        ("instructions", 1050, 1051),
        ("in_flight", 64, 48),
        ("per_16", 40, 41),
    ],
)
def test_a_column_that_is_worse_is_named(
    tool: ModuleType, column: str, allowed: int, worse: int
) -> None:
    assert _compared(tool, **{column: allowed}) == []
    (wrong,) = _compared(tool, **{column: worse})
    assert f"sm_90: pack_kernel<float> has {column} {worse}, and had" in wrong


def test_better_code_is_not_wrong(tool: ModuleType) -> None:
    better = {"registers": 32, "threads": 2048, "instructions": 10, "in_flight": 99, "per_16": 1}
    assert _compared(tool, **better) == []


def test_a_kernel_that_the_table_lacks_is_named(tool: ModuleType) -> None:
    assert _compared(tool) == []
    (wrong,) = tool.compare(NVCC, {("100", KEY[1]): _code(tool)})
    assert "sm_100: pack_kernel<float> is not in table.tsv" in wrong


def test_a_build_by_another_nvcc_fails_and_says_what_to_do(tool: ModuleType) -> None:
    tool.write_table(NVCC, {KEY: _code(tool)})
    (wrong,) = tool.compare("1.2.4", {KEY: _code(tool)})
    assert "is of nvcc 1.2.3, and this build of 1.2.4" in wrong
    assert "--write" in wrong
    tool.write_table("1.2.4", {KEY: _code(tool)})
    assert tool.compare("1.2.4", {KEY: _code(tool)}) == []


def test_the_table_can_be_read() -> None:
    nvcc, rows = load_tool(TOOLS / "check_cuda_binary.py").read_table()
    assert nvcc
    assert {arch for arch, _ in rows} == {"80", "90", "100"}
