"""Benchmarks that no other part of a GPU check runs do so on a GPU. No test asserts a speed."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_bench import run_bench


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
