"""`python -m bench faults` provokes faults and tells what happened, as it happened."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.launcher import run_ranks

from bench import faults
from bench.fault_cases.case import FSDP2, OURS, Case
from bench.fault_cases.launch import Outcome, provoke, summary

ROOT = Path(__file__).resolve().parents[2]


def _provoked(provocations: list[tuple[str, str]]) -> list[Outcome]:
    known = {fault.name: fault for fault in faults.FAULTS}
    return [
        provoke(known[name], Case(system, "shared_memory" if system == OURS else "gloo"))
        for name, system in provocations
    ]


def test_a_fault_says_what_happened_to_each_system() -> None:
    late, subclass = (
        "an optimizer made after an evaluation",
        "a parameter of a class with more than numbers",
    )
    for outcomes in run_ranks(_provoked, 2, [(late, OURS), (late, FSDP2), (subclass, OURS)]):
        assert [each.what for each in outcomes] == ["right", "wrong numbers", "raises"]
        right, wrong, raised = (each.message for each in outcomes)
        assert right == ""
        assert wrong.startswith("'head.weight' after step 0 is off by up to ")
        assert raised.startswith("NotImplementedError: parameter 'weight' is a Scaled, and ")


def test_the_worst_that_happened_to_a_rank_counts() -> None:
    right, late = Outcome("right", 1.0), Outcome("raises", 5.0, "of the other")
    early = Outcome("raises", 0.5, "the reason")
    assert summary({0: right})["what"] == "right"
    row = summary({0: late, 1: early})
    assert (row["what"], row["seconds"], row["message"]) == ("raises", 5.0, "the reason")
    assert row["ranks"]["0"]["message"] == "of the other"
    for bad in ("crashes", "hangs", "wrong numbers"):
        row = summary({0: early, 1: Outcome(bad, 2.0, "bad")}) | {"fault": "a fault"}
        assert (row["what"], row["message"]) == (bad, "bad")
        ours = row | {"system": OURS, "transport": "gloo", "open": ""}
        assert faults.fault([ours]) == f"ours: a fault (gloo): {bad}: bad"
        assert faults.fault([ours | {"system": FSDP2}]) is None
        assert faults.fault([ours | {"open": "known"}]) is None


def test_no_two_faults_share_a_name() -> None:
    names = [fault.name for fault in faults.FAULTS]
    assert len(set(names)) == len(names)


def test_the_page_quotes_messages_of_the_run_that_it_names() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"`(bench/results/faults-[\w-]+\.json)`", page)
    rows = json.loads((ROOT / name).read_text())["rows"]

    def shape(text: str) -> str:  # processes, ports and which rank speaks differ from run to run
        return re.sub(r"\d+", "#", text)

    messages = shape("\n".join(row["message"] for row in rows))
    tables = re.findall(r"^\| fault \| .*\n\|-.*\n((?:\| .*\n)+)", page, flags=re.MULTILINE)
    table_rows = "".join(tables).splitlines()
    quotes = [quote for line in table_rows for quote in re.findall(r'"([^"]+)"', line)]
    parts = [part.strip(" ,") for quote in quotes for part in quote.split("...")]
    assert len(parts) > 20
    assert not [part for part in parts if shape(part) not in messages]
    assert len(table_rows) == len({row["fault"] for row in rows}) == len(faults.FAULTS)


# - Whole runs


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", "faults", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.exhaustive
def test_faults_are_provoked_in_processes_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    result = _bench("--quick", "--json", str(path))
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(path.read_text())["rows"]
    assert {row["kind"] for row in rows} == {"wrong numbers", "breaks", "peers"}
    ours = {(row["fault"], row["transport"]): row for row in rows if row["system"] == OURS}
    assert not [name for name, row in ours.items() if row["what"] not in ("right", "raises")]
    for transport in ("shared_memory", "process_group"):
        killed = ours["a rank is killed before its first forward", transport]
        assert killed["ranks"].keys() == {"0"}
        assert "has ended before or during its first forward" in killed["message"]
    for row in rows:
        assert bool(row["message"]) == (row["what"] != "right")
        assert row["fault"] in result.stdout
    assert {row["system"] for row in rows} == {OURS, FSDP2}


@pytest.mark.exhaustive
def test_only_some_faults_can_be_provoked() -> None:
    result = _bench("--only", "freed parameter (64 elements)")
    assert result.returncode == 0, result.stderr  # a fault that is known to be open
    assert "the process ended with SIGSEGV" in result.stdout
    result = _bench("--only", "nothing")
    assert result.returncode != 0
    assert "--only 'nothing' is in no fault's name; there are: one rank" in result.stderr
