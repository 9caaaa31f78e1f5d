"""Benchmarks run, count no wrong elements, and keep their rows; how fast they are is no test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _run(command: list[str], json_file: Path) -> tuple[str, list[dict[str, Any]]]:
    result = subprocess.run(
        [sys.executable, *command, "--quick", "--json", str(json_file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, json.loads(json_file.read_text())["rows"]


def _torchrun(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def test_packing_beside_torchs_operators(tmp_path: Path) -> None:
    printed, rows = _run(["bench/pack.py", "--device", "cpu"], tmp_path / "pack.json")
    assert "#wrong" in printed
    assert {row["operation"].split()[0] for row in rows} == {"pack", "unpack", "cast"}
    assert all(row["wrong"] == 0 and row["of_copy"] > 0 for row in rows)


def test_a_step_of_each_system(tmp_path: Path) -> None:
    _, rows = _run(["bench/step.py"], tmp_path / "step.json")
    assert [row["system"] for row in rows] == ["unsharded", "ours", "FSDP2", "FSDP1"]
    assert not [row["error"] for row in rows if "error" in row]
    assert len({round(row["loss"], 5) for row in rows}) == 1


def test_a_step_of_each_system_on_two_ranks(tmp_path: Path) -> None:
    _, rows = _run([*_torchrun(2), "bench/step.py"], tmp_path / "step.json")
    assert {"unsharded", "ours", "FSDP2", "FSDP2, kept gathered", "DDP"} <= {
        row["system"] for row in rows
    }
    assert not [row["error"] for row in rows if "error" in row]
    assert all(row["ranks"] == 2 and row["of_unsharded"] > 0 for row in rows)
    assert len({round(row["loss"], 5) for row in rows}) == 1  # all ranks have the same tokens


def test_every_figure_of_the_simulated_overlap_says_so(tmp_path: Path) -> None:
    printed, (row,) = _run(["bench/overlap.py", "--device", "cpu"], tmp_path / "overlap.json")
    assert "1024 simulated ranks" in printed
    assert row["transport"] == "simulated"
    assert "simulated" in row["link"]
    # All that depends on the link has the word in its name or its value.
    real = {"simulated_ranks", "collectives", "compute_us", "transport", "link"}
    assert {name for name in row if "simulated" not in name} == real - {"simulated_ranks"}
    assert row["collectives"] == 3 * 32 - 2


def test_buckets_beside_the_cost_model(tmp_path: Path) -> None:
    printed, rows = _run(["bench/buckets.py"], tmp_path / "buckets.json")
    assert "64 ranks (simulated)" in printed
    stacks = [row for row in rows if "shape" in row]
    for row in stacks:
        gathers_and_reductions = row["collectives"]
        assert gathers_and_reductions == 3 * row["buckets"] - 2
        wire = row["simulated_communication_ms"] / row["predicted_communication_ms"]
        assert wire > 0.9  # it takes at least what it is to take
    alone, _, default = [row for row in stacks if row["shape"].startswith("200 x")]
    assert (alone["buckets"], default["buckets"]) == (200, 7)
    whole, cut = [row for row in rows if "unit_mb" in row]
    assert whole["message_mb"] is None
    assert cut["buffers_mb"] < whole["buffers_mb"]


@pytest.mark.parametrize("ranks", [2])
def test_collectives_beside_gloo(tmp_path: Path, ranks: int) -> None:
    _, rows = _run(
        [*_torchrun(ranks), "bench/collectives.py", "--device", "cpu"],
        tmp_path / "collectives.json",
    )
    assert {row["operation"] for row in rows} == {"all_gather", "reduce_scatter"}
    systems = {"ours (shared_memory)", "ours, other inputs", "torch gloo"}
    assert {row["system"] for row in rows} == systems | {"memcpy"}
    assert all(row["wrong"] == 0 for row in rows if row["system"] in systems)
    assert all(row["ranks"] == ranks and row["of_memcpy"] > 0 for row in rows)


def test_collectives_say_how_they_are_started() -> None:
    result = subprocess.run(
        [sys.executable, "bench/collectives.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "RANK"},
    )
    assert result.returncode == 2
    assert "expects to be started by torchrun" in result.stderr
