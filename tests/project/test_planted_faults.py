"""The faults that two tools plant fit the sources, and their tables have each of them."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import ModuleType

import pytest
from support.tools import TOOLS, load_tool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)
        return load_tool(TOOLS / "plant_faults.py")


def test_each_fault_replaces_text_that_its_file_has_once(tool: ModuleType) -> None:
    for file in {fault.file for fault in tool.FAULTS}:
        of_file = [fault for fault in tool.FAULTS if fault.file == file]
        before = (ROOT / file).read_text()
        after = tool.planted(of_file, before)
        assert after.count("planted_fault(") == len(of_file)
        if file.endswith(".py"):
            ast.parse(after)


def test_a_fault_that_does_not_fit_is_named(tool: ModuleType) -> None:
    fault = tool.Fault("nothing fits", "a.cpp", "x = 1;")
    with pytest.raises(SystemExit, match=r"'nothing fits' replaces text that a\.cpp has 2"):
        tool.planted([fault], "x = 1;\nx = 1;\n")


def test_a_switch_does_what_is_wrong_only_if_it_is_on(tool: ModuleType) -> None:
    text = "from __future__ import annotations\n\nx = [1 + 2]\nx.append(0)\n"
    faults = [
        tool.Fault("sum", "a.py", "1 + 2", "1 - 2"),
        tool.Fault("append", "a.py", "x.append(0)"),
    ]
    code = tool.planted(faults, text).replace(f"{tool.IMPORT}\n", "")

    def result(on: str) -> object:
        names: dict[str, object] = {"planted_fault": lambda name: name == on}
        exec(compile(code, "a.py", "exec"), names)
        return names["x"]

    assert [result(on) for on in ("", "sum", "append")] == [[3, 0], [-1, 0], [3]]
    statement = tool.switched(tool.Fault("drop", "a.cpp", "x.clear();"))
    assert statement == 'if (planted_fault("drop")) {  } else { x.clear(); }'


def test_each_fault_has_tests_and_a_row_of_the_table(tool: ModuleType) -> None:
    names = [fault.name for fault in tool.FAULTS]
    assert len(set(names)) == len(names)
    for fault in tool.FAULTS:
        assert fault.cpp or fault.python, fault.name
        assert all((ROOT / tool.file_of_test(name)).exists() for name in fault.python), fault.name
    assert sorted(json.loads(tool.RESULTS.read_text())) == sorted(names)


def test_the_table_of_planted_races_has_every_wait_and_edit() -> None:
    directory = ROOT / "tests" / "emulated_gpu"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        races = load_tool(directory / "planted_faults.py")
    rows = json.loads(races.RESULTS.read_text())
    assert races.statements(ROOT) - rows.keys() == set()
    assert {edit.name for edit in races.EDITS} - rows.keys() == set()
    assert races.NOT_SEEN.keys() - rows.keys() == set()
    for edit in races.EDITS:
        assert (ROOT / edit.file).read_text().count(edit.old) == 1, edit.name
