"""The interpreter may end while other threads still hold Python objects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, ctypes, hashlib, os, sys, threading

# It runs last, and holds the GIL until the interpreter ends. A thread that then waits is too late.
atexit.register(ctypes.PyDLL(None).usleep, 200_000)

import torch
import torch.distributed as dist
from fsdp_ext import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if "sharded" in sys.argv:
    fully_shard(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
name = ctypes.CDLL(None).prctl
computes = threading.Event()


def worker():
    name(15, b"pt_gloo_runloop")
    computes.set()
    hashlib.pbkdf2_hmac("sha256", b"as a worker that runs", b"without the GIL", 200_000)
    os.write(1, b"dropped its tensors")


threading.Thread(target=worker, daemon=True).start()
computes.wait()
"""


def output_of(directory: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *args],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_workers_of_gloo_finish_before_the_interpreter_ends(tmp_path: Path) -> None:
    assert output_of(tmp_path, "sharded") == "dropped its tensors"


@pytest.mark.exhaustive
def test_without_a_sharded_model_the_worker_would_be_too_late(tmp_path: Path) -> None:
    assert output_of(tmp_path) == ""
