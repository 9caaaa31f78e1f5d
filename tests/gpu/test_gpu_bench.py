"""Benchmarks that no other part of a GPU check runs do so on a GPU. No test asserts a speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from project.test_bench import run_bench
from support.launcher import run_ranks
from support.tools import TOOLS, load_tool

from bench import collectives, host_overhead
from bench.harness.runner import Row
from bench.models.overlap_rows import link_for, row_of
from bench.models.overlap_systems import FSDP2, OURS, Case, Shape
from fsdp_ext.comm.nccl_settings import describe_lane

DEVICE = torch.device("cuda", 0)


@pytest.mark.timeout(120)
def test_checked_steps_and_health_run(tmp_path: Path) -> None:
    printed, rows = run_bench("health", tmp_path / "health.json", "--ranks", "1", device="cuda")
    assert [row["system"] for row in rows[:-1]] == ["no checks", "not checked", "checked", "health"]
    assert rows[-1]["seconds"] > 0
    assert "aim: 1%" in printed


# Inductor would need Triton, which the emulated GPU does not have.
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("options", "ending"),
    [(("--offload",), ", offloaded"), (("--compile", "aot_eager"), ", compiled blocks")],
    ids=["offload", "compile"],
)
def test_all_systems_reach_the_same_loss(
    options: tuple[str, ...], ending: str, tmp_path: Path
) -> None:
    _, rows = run_bench("step", tmp_path / "step.json", *options, device="cuda")
    assert not [row["error"] for row in rows if "error" in row]
    assert {"ours", "FSDP2"} <= {row["system"].removesuffix(ending) for row in rows}
    assert f"ours{ending}" in {row["system"] for row in rows}
    by_system = {row["system"]: row["loss"] for row in rows}
    of_sharded = {loss for system, loss in by_system.items() if not system.startswith("unsharded")}
    assert max(of_sharded) - min(of_sharded) < 1e-3
    assert abs(by_system["ours"] - by_system["unsharded"]) < 1e-2  # bfloat16 rounds elsewhere


def _measure_overheads() -> list[Row]:
    return host_overhead.measure_size(2, 3, 2, DEVICE)


@pytest.mark.timeout(120)
def test_every_system_has_a_host_overhead() -> None:
    [rows] = run_ranks(_measure_overheads, 1, timeout=100.0, device="cuda")
    assert [row["system"] for row in rows] == list(host_overhead.SYSTEMS)
    assert not [row["error"] for row in rows if "error" in row]
    assert all(row["iteration_us"]["median"] > 0 for row in rows)


def _measure_overlap() -> list[Row]:
    dist.destroy_process_group()
    case = Case(OURS, Shape(layers=4, dim=256, batch=64), world_size=8, ratio=1.0)
    link = link_for(case, 2, DEVICE)
    rows = [row_of(of, link, 2, DEVICE) for of in (case, replace(case, system=FSDP2))]
    # The launcher destroys a process group, and benchmarks leave none.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return rows


@pytest.mark.timeout(120)
def test_the_simulated_wire_of_a_step_is_measured() -> None:
    [[ours, peer]] = run_ranks(_measure_overlap, 1, timeout=100.0, device="cuda")
    assert ours["collectives"] > 0
    assert ours["simulated_wire_us"] > 0
    assert ours["simulated_hidden"] <= 1
    assert "cpu only" in peer["error"]


@pytest.mark.timeout(240)
def test_collectives_of_lanes_with_settings_have_no_wrong_element(tmp_path: Path) -> None:
    _, rows = run_bench("collectives", tmp_path / "collectives.json", device="cuda")
    measured = [row for row in rows if "error" not in row]
    assert {
        "ours (nccl)",
        *(f"ours (nccl, {describe_lane(one)})" for one in collectives.SETTINGS),
    } <= {row["system"] for row in measured}
    assert not any(row["wrong"] for row in measured)


def _write_a_trace(out: str) -> None:
    dist.destroy_process_group()
    load_tool(TOOLS / "gpu_trace.py").trace(DEVICE, Path(out), quick=True)
    # The group of the simulated ranks stays. The launcher destroys it after the test.


@pytest.mark.timeout(120)
def test_a_step_over_simulated_ranks_is_traced(tmp_path: Path) -> None:
    run_ranks(_write_a_trace, 1, str(tmp_path), timeout=100.0, device="cuda")
    events = json.loads((tmp_path / "step-trace.json").read_text())["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert any("gather" in name for name in names), sorted(names)[:20]
