"""Loads and conversions need little memory beside what they return."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from support.checkpoints import assert_equal
from torch import nn

from fsdp_ext import checkpoint

MEASURE = """
import contextlib
import io
import sys
from pathlib import Path

import torch
from torch import nn

from fsdp_ext import checkpoint
from fsdp_ext.checkpoint import cli

def memory(name):
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if name in x]
    return int(line.split()[1]) * 1024

def growth(call):
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    with contextlib.redirect_stdout(io.StringIO()):
        code = call()
    assert not code, code
    return memory("VmHWM") - before

place = Path(sys.argv[-1])
if sys.argv[1] == "load":
    model = nn.ParameterList(torch.ones(512, 512, dtype=torch.bfloat16) for _ in range(60))
    print(growth(lambda: checkpoint.load(place, model)))
else:
    for size in ("small", "large"):  # first the imports, and then the tensors
        paths = {
            name: str(place / size / name) for name in ("saved", "files", "imported", "dcp", "back")
        }
        for command, source, target in (
            ("export", "saved", "files"),
            ("import", "files", "imported"),
            ("convert", "saved", "dcp"),
            ("convert", "dcp", "back"),
            ("inspect", "saved", "--verify"),
        ):
            arguments = [paths[source], paths.get(target, target)]
            grown = growth(lambda: cli.run(command, arguments))
            if size == "large":
                print(grown)
"""


def growths(*arguments: str | Path) -> list[int]:
    """Return by how many bytes memory grew in each call, in a process of its own."""
    command = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def test_conversions_need_the_memory_of_two_tensors(tmp_path: Path) -> None:
    def model(size: int) -> nn.ParameterList:
        return nn.ParameterList(torch.randn(size, 1024) for _ in range(4))

    small, large = model(1), model(8192)  # 32 MiB each
    for name, each in (("small", small), ("large", large)):
        checkpoint.save(tmp_path / name / "saved", each)
    grown = growths("commands", tmp_path)
    assert len(grown) == 5
    assert max(grown) < 2.5 * large[0].nbytes
    other = model(8192)
    checkpoint.load(tmp_path / "large" / "back", other)
    assert_equal(other.state_dict(), large.state_dict())


def test_a_load_that_casts_needs_one_piece_a_thread_beside_the_result(tmp_path: Path) -> None:
    saved = nn.ParameterList(torch.ones(512, 512, dtype=torch.float64) for _ in range(60))
    checkpoint.save(tmp_path, saved)
    piece, result = saved[0].nbytes, sum(param.numel() * 2 for param in saved)
    [grown] = growths("load", tmp_path)
    assert grown < result + 12 * piece  # at most 8 threads, and imported modules
