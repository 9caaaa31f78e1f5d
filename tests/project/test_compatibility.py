"""docs/compatibility.md has a row for everything that the installed FSDP2 has, and its test."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed import fsdp as torch_fsdp

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "compatibility.md"
STATUSES = {"same", "nothing to do", "partly", "refused"}
SHOWN = re.compile(r"^\[`(test_\w+)`\]\(\.\./tests/(\w+/test_\w+\.py)\)$")


class Row(NamedTuple):
    names: tuple[str, ...]
    status: str
    test: str


def rows(heading: str) -> list[Row]:
    """Return the rows of the table under the heading that begins with `heading`."""
    text = PAGE.read_text(encoding="utf-8")
    section = next(part for part in text.split("\n## ")[1:] if part.startswith(heading))
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]  # below its head
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [Row(tuple(re.findall(r"`([^`]+)`", row[0])), row[1], row[-1]) for row in table]


def names_of(heading: str) -> list[str]:
    return [name for row in rows(heading) for name in row.names]


def test_each_name_of_torch_has_a_row() -> None:
    names = names_of("Names")
    assert set(torch_fsdp.__all__) - set(names) == set()
    assert len(names) == len(set(names))


def test_each_argument_of_fully_shard_has_a_row() -> None:
    arguments = set(inspect.signature(torch_fsdp.fully_shard).parameters)
    assert "mesh" in arguments
    assert arguments - set(names_of("Arguments")) == set()


def test_each_method_of_torch_has_a_row() -> None:
    methods = {
        name
        for name, value in vars(torch_fsdp.FSDPModule).items()
        if callable(value) and not name.startswith("__")
    }
    names = names_of("Methods")
    assert methods - set(names) == set()
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "heading", ["Names", "Arguments", "Methods", "FSDP1", "What other code", "Libraries"]
)
def test_each_row_has_a_status_and_a_test_that_exists(heading: str) -> None:
    for row in rows(heading):
        assert row.status in STATUSES, row
        shown = SHOWN.match(row.test)
        assert shown is not None, row
        name, file = shown.groups()
        source = (TESTS / file).read_text(encoding="utf-8")
        assert f"\ndef {name}(" in source, row
