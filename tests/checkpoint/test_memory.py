"""Loads and conversions need little memory beside what they return."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from fsdp_ext import checkpoint

MEASURE = """
import sys
from pathlib import Path

import torch
from torch import nn

from fsdp_ext import checkpoint
from fsdp_ext.checkpoint import cli

def memory(name):
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if name in x]
    return int(line.split()[1]) * 1024

command, *paths = sys.argv[1:]
if command == "load":
    model = nn.ParameterList(torch.ones(512, 512, dtype=torch.bfloat16) for _ in range(60))
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
if command == "load":
    checkpoint.load(*paths, model)
else:
    assert cli.run(command, paths) == 0
print(memory("VmHWM") - before)
"""


def peak(*arguments: str | Path) -> int:
    """Run a command in a process of its own, and return by how many bytes its memory has grown."""
    command = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.split()[-1])


def test_conversions_need_the_memory_of_few_tensors(tmp_path: Path) -> None:
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(40)]  # 4 MiB each
    model = nn.Sequential(*layers)
    path = checkpoint.save(tmp_path / "saved", model)
    nbytes = sum(param.nbytes for param in model.parameters())
    # An eighth is room for two tensors, and for modules that the commands import.
    assert peak("export", path, tmp_path / "files") < nbytes / 8
    assert peak("import", tmp_path / "files", tmp_path / "imported") < nbytes / 8
    assert peak("convert", path, tmp_path / "dcp") < nbytes / 2
    assert peak("convert", tmp_path / "dcp", tmp_path / "back") < nbytes / 2
    other = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(40)])
    checkpoint.load(tmp_path / "back", other)
    for got, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(got, expected)


def test_a_load_that_casts_needs_one_piece_a_thread_beside_the_result(tmp_path: Path) -> None:
    saved = nn.ParameterList(torch.ones(512, 512, dtype=torch.float64) for _ in range(60))
    checkpoint.save(tmp_path, saved)
    piece, result = saved[0].nbytes, sum(param.numel() * 2 for param in saved)
    assert peak("load", tmp_path) < result + 12 * piece  # at most 8 threads, and imported modules
