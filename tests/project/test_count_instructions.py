"""`tools/count_instructions.py` reads what callgrind found, and says what is missing."""

from __future__ import annotations

from types import ModuleType

import pytest
from support.tools import TOOLS, load_tool

OF_UNSHARDED = """
1,000 (100.0%)  PROGRAM TOTALS
  700 (70.00%)  ???:at::native::addmm(at::Tensor const&) [/lib/libtorch_cpu.so]
"""
OF_SHARDED = """
97,000 (100.0%)  PROGRAM TOTALS
 9,600 (9.90%)  csrc/core/schedule/pipeline.cpp:fsdp::Pipeline::pre_forward(int) [/lib/_C.so]
 9,000 (9.28%)  ???:fsdp::Pipeline::pre_forward(int) [/lib/_C.so]
 1,920 (1.98%)  ???:fsdp::Pipeline::post_forward(int, bool)
"""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    tool = load_tool(TOOLS / "count_instructions.py")
    texts = (OF_UNSHARDED, OF_SHARDED)
    monkeypatch.setattr(tool, "count", lambda directory: [*map(tool.parse_counts, texts)])
    monkeypatch.setattr(tool.shutil, "which", lambda name: f"/bin/{name}")
    return tool


def test_shares_are_of_what_sharding_adds(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["count", "--function", "pre_forward", "--function", "_forw"])
    tool.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].strip() == (
        "10 instructions a unit  10.00% of what is added, 9.90% of all: pre_forward"
    )
    assert lines[-1].strip() == (
        "12 instructions a unit  12.00% of what is added, 11.88% of all: _forw"
    )


def test_a_function_that_did_not_run_is_named(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["count", "--function", "no_such_function"])
    with pytest.raises(SystemExit, match="'no_such_function'"):
        tool.main()


def test_it_says_that_valgrind_is_missing(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    monkeypatch.setattr("sys.argv", ["count"])
    with pytest.raises(SystemExit, match="valgrind"):
        tool.main()
