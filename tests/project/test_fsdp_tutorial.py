"""The tutorial learns as under PyTorch's FSDP1, with half of DDP's memory on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.examples import run_example

TUTORIAL = "fsdp_tutorial.py"
ROW = re.compile(r"^(\w+) +([\d.]+) +([\d.]+) % +([\d.]+) MB +(-?[\d.]+) MB$", re.MULTILINE)


@pytest.mark.exhaustive
def test_it_learns_as_with_fsdp1_and_saves_what_a_plain_network_loads(tmp_path: Path) -> None:
    sizes = ["--epochs", "2", "--images", "768", "--width", "128", "--save", str(tmp_path)]
    printed = run_example(TUTORIAL, *sizes, "--systems", "fsdp_ext", "fsdp1", "ddp")
    rows = {name: values for name, *values in ROW.findall(printed)}
    assert list(rows) == ["fsdp_ext", "fsdp1", "ddp"], printed
    ours, theirs, ddp = rows.values()
    assert ours[:2] == theirs[:2]  # test loss and accuracy
    assert float(ours[1]) > 80
    assert abs(float(ours[0]) - float(ddp[0])) < 1e-4
    assert 0.45 < float(ours[2]) / float(ddp[2]) < 0.55
    saved = [torch.load(tmp_path / f"network-{name}.pt") for name in ("fsdp_ext", "fsdp1")]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


@pytest.mark.exhaustive
def test_it_runs_on_ranks_that_do_not_divide_its_images_and_makes_its_folder(
    tmp_path: Path,
) -> None:
    sizes = ["--epochs", "1", "--images", "200", "--width", "32"]
    saved = tmp_path / "new" / "folder"
    run_example(TUTORIAL, *sizes, "--systems", "fsdp_ext", "--save", str(saved), ranks=3)
    assert (saved / "network-fsdp_ext.pt").is_file()
