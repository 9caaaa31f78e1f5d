"""The example trains on a GPU as it does on the host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from project.test_train_gpt import TINY, run_script, steps, write_text
from support.launcher import run_ranks

SYSTEMS = ("ours", "fsdp2", "fsdp1", "ddp")
STEPS = 4


def _assert_close(losses: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.timeout(120)
def test_one_rank_trains_as_on_the_host_and_saves(tmp_path: Path) -> None:
    path, saved = tmp_path / "figures.json", tmp_path / "run"
    arguments = [*TINY, "--data", str(write_text(tmp_path / "text")), "--steps", str(STEPS)]
    options = ["--checkpoint", str(saved), "--json", str(path), "--sample", "4", "--profile"]
    printed = run_script([*arguments, "--device", "cuda", *options], ranks=1)
    assert "ours on 1 cuda ranks" in printed
    assert "8 steps on rank 0 of 1" in printed  # what --profile prints
    assert "--- sample ---" in printed
    assert (saved / "latest").read_text() == f"step-{STEPS:08d}"

    figures = json.loads(path.read_text())
    assert figures["memory_per_rank"][0]["peak"] > 0
    first, last = figures["curve"]  # the device is asked for few losses
    on_host = run_ranks(steps, 1, arguments, None)[0]
    rest = sum(on_host[1:STEPS]) / (STEPS - 1)
    _assert_close([first[1], last[1], figures["validation_loss"]], [on_host[0], rest, on_host[-1]])


def _losses(arguments: list[str], directory: str) -> dict[str, list[float]]:
    """Return the losses of each system, and those of a run that resumes another one."""
    losses = {system: steps([*arguments, "--system", system], None) for system in SYSTEMS}
    saves = [*arguments, "--checkpoint", directory]
    steps(saves, STEPS // 2)
    return losses | {"resumed": steps([*saves, "--resume"], None)}


@pytest.mark.timeout(120)
def test_two_ranks_train_alike_under_all_systems_and_resume(tmp_path: Path) -> None:
    arguments = [*TINY, "--data", str(write_text(tmp_path / "text")), "--steps", str(STEPS)]
    losses = run_ranks(_losses, 2, arguments, str(tmp_path / "run"), device="cuda")[0]
    on_host = run_ranks(steps, 2, arguments, None)[0]
    for system in SYSTEMS:
        _assert_close(losses[system], on_host)
    _assert_close(losses["resumed"], on_host[STEPS // 2 :])
