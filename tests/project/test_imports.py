"""Imports and includes point down only: between packages, modules, tests and in csrc."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

import fsdp_ext

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
# From the bottom up. A package may import from those of lower rows and from itself.
PACKAGES = [
    ["_util"],
    ["comm"],
    ["sharding"],
    ["optim"],
    ["fsdp1", "profiler", "planner", "offloading"],
    ["checkpoint", "tuner", "patching", "verifier"],
]
SHARDING = [["params"], ["root"], ["torch_compat"], ["api"]]
FOLDERS = [["base"], ["device"], ["pack", "comm"], ["core"], ["torch"]]
# What has no package: the extension, what the build says about itself, and the torch it needs.
BELOW_ALL = {"fsdp_ext._C", "fsdp_ext._build_info", "fsdp_ext._installed_torch"}

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Return the file of each module of the package, by the module's name."""
    found = {}
    for path in sorted((ROOT / "fsdp_ext").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports_of(source: str, name: str, is_package: bool, known: Iterable[str]) -> set[str]:
    """Return the modules in `known` that a module imports anywhere, also in functions.

    Args:
        source: of the module.
        name: the module's own, in full.
        is_package: whether the module is a package's `__init__.py`.
        known: names of modules.
    """
    package = name if is_package else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            # `from package import x` imports the module package.x if there is one.
            full = [f"{base}.{alias.name}" for alias in node.names]
            found |= {one if one in known else base for one in full}
    return found & set(known)


def import_graph() -> Graph:
    files = modules()
    known = files.keys() | BELOW_ALL
    return {
        name: imports_of(path.read_text(encoding="utf-8"), name, path.stem == "__init__", known)
        for name, path in files.items()
    }


def include_graph() -> Graph:
    """Return which files of csrc each one of them includes."""
    files = [path for path in CSRC.rglob("*.*") if path.suffix in (".h", ".cpp", ".cu")]
    graph: Graph = {}
    for path in files:
        included = re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.M)
        places = [next(p for p in (path.parent / i, CSRC / i) if p.exists()) for i in included]
        graph[path.relative_to(CSRC).as_posix()] = {
            place.resolve().relative_to(CSRC).as_posix() for place in places
        }
    return graph


def upward(graph: Graph, layer_of: Mapping[str, int], place: int, separator: str) -> list[str]:
    """Return the edges that do not go down to a lower layer or stay in their folder."""

    def folder(name: str) -> str:
        return name.split(separator)[place]

    return [
        f"{name} -> {target}"
        for name, targets in sorted(graph.items())
        for target in sorted(targets)
        if folder(name) != folder(target) and layer_of[folder(name)] <= layer_of[folder(target)]
    ]


def layers(rows: list[list[str]]) -> dict[str, int]:
    return {name: height for height, row in enumerate(rows) for name in row}


def cycle_in(graph: Graph) -> list[str]:
    """Return modules each of which imports the next, from one back to itself; empty if none."""
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for target in sorted(graph.get(path[-1], ())):
            if target in path:
                return [*path[path.index(target) :], target]
            if target not in done and (found := search([*path, target])):
                return found
        done.add(path[-1])
        return []

    starts: Iterator[list[str]] = (search([name]) for name in sorted(graph))
    return next(filter(None, starts), [])


def test_every_package_and_folder_has_its_layer() -> None:
    for package, rows in (("fsdp_ext", PACKAGES), ("fsdp_ext/sharding", SHARDING)):
        python = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
        assert python == layers(rows).keys()
    assert {path.name for path in CSRC.iterdir()} == layers(FOLDERS).keys()


def test_packages_import_lower_packages_only() -> None:
    graph = import_graph()
    # The package's own __init__ and its commands are above all others.
    inside = {name: targets for name, targets in graph.items() if name.count(".") > 0}
    del inside["fsdp_ext.__main__"]
    del inside["fsdp_ext.patch"]
    inside = {name: targets - BELOW_ALL for name, targets in inside.items()}
    del inside["fsdp_ext._build_info"]
    from_the_top = [name for name, targets in inside.items() if "fsdp_ext" in targets]
    assert not from_the_top
    assert upward(inside, layers(PACKAGES), 1, ".") == []
    sharding = {
        name: {target for target in targets if target.startswith("fsdp_ext.sharding.")}
        for name, targets in inside.items()
        if name.startswith("fsdp_ext.sharding.")
    }
    assert len(sharding) > 30
    assert upward(sharding, layers(SHARDING), 2, ".") == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert cycle_in(import_graph()) == []


def test_no_module_hides_a_public_function_of_its_name() -> None:
    public = {name for name in fsdp_ext.__all__ if inspect.isfunction(getattr(fsdp_ext, name))}
    assert "fully_shard" in public
    last = {name.rpartition(".")[2] for name in modules()}
    assert last & public == {"patch"}  # for the command python -m fsdp_ext.patch
    patch = fsdp_ext.patch
    assert importlib.import_module("fsdp_ext.patch") is patch
    assert fsdp_ext.patch is patch


def test_csrc_includes_lower_folders_only() -> None:
    graph = include_graph()
    assert len(graph) > 50
    assert upward(graph, layers(FOLDERS), 0, "/") == []


def test_no_header_includes_itself_by_way_of_others() -> None:
    assert cycle_in(include_graph()) == []


def test_no_test_file_imports_another_one() -> None:
    """What several files need is in tests/support. Only tests of GPUs run other tests again."""
    files = {path.stem: path for path in (ROOT / "tests").glob("*/test_*.py")}
    assert len(files) == len(list((ROOT / "tests").rglob("test_*.py"))) > 100
    again = [path for path in files.values() if path.parent.name == "gpu"]
    for path in set(files.values()) - {*again, files["test_on_a_gpu"]}:
        known = {f"{other.parent.name}.{name}" for name, other in files.items()} | files.keys()
        assert not imports_of(path.read_text(encoding="utf-8"), path.stem, False, known), path


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import p.a", {"p.a"}),
        ("from p import a, b", {"p.a", "p.b"}),
        ("from p.a import f", {"p.a"}),
        ("from p import f", {"p"}),
        ("from . import a", {"p.a"}),
        ("from .q import c", {"p.q.c"}),
        ("if TYPE_CHECKING:\n    from p import a", {"p.a"}),
        ("def f():\n    from p import a", {"p.a"}),
        ("import os\nfrom os import path", set()),
    ],
)
def test_imports_are_found_wherever_they_are(source: str, expected: set[str]) -> None:
    assert imports_of(source, "p.b", False, {"p", "p.a", "p.b", "p.q", "p.q.c"}) == expected


def test_a_cycle_is_found_and_shown() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_an_import_leaves_the_default_device_alone() -> None:
    # There is no GPU here, so an import that makes a tensor on the default device would raise.
    script = """
import torch
torch.set_default_device("cuda")
import fsdp_ext
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
