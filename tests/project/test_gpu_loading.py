"""The GPU check compares how CUDA loads kernels, each way in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.tools import TOOLS, load_tool


@pytest.fixture
def gpu_loading() -> ModuleType:
    return load_tool(TOOLS / "gpu_loading.py")


def test_each_setting_has_a_process_and_a_row(
    gpu_loading: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "measures.py"
    program.write_text(
        "import json, os, sys\n"
        "print('NCCL says something')\n"
        "assert sys.argv[1:] == ['--here', '--quick']\n"
        f"print(json.dumps({{'loading': os.environ['{gpu_loading.VARIABLE}'], 'shard_s': 1}}))\n"
    )
    monkeypatch.setattr(gpu_loading, "__file__", str(program))
    rows = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["gpu_loading.py", "--quick", "--json", str(rows)])
    assert gpu_loading.main() == 0
    expected: list[dict[str, Any]] = [{"loading": name, "shard_s": 1} for name in ("LAZY", "EAGER")]
    assert json.loads(rows.read_text())["rows"] == expected


def test_a_setting_that_fails_is_a_row_too(
    gpu_loading: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "fails.py"
    program.write_text("raise SystemExit(3)")
    monkeypatch.setattr(gpu_loading, "__file__", str(program))
    rows = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["gpu_loading.py", "--json", str(rows)])
    assert gpu_loading.main() == 1
    assert json.loads(rows.read_text())["rows"] == [
        {"loading": name, "error": "exit code 3"} for name in ("LAZY", "EAGER")
    ]
