"""What the host does with pinned memory before it has waited for the copies that use it."""

from __future__ import annotations

import re

import pytest
import torch
from support.devices import IS_EMULATED
from support.emulated import run_program

pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="tests the emulated GPU: make rehearsal")

EXCHANGE = """
def exchange(values):
    host = torch.zeros(4).pin_memory()
    host.copy_(values, non_blocking=True)
    if globals().get("waits", True):
        torch.cuda.current_stream().synchronize()
    return bool((host == 1).all())
"""
WRITES_EARLY = "the host has written the 4096 bytes .* had not waited for a copy on stream"


def _pinned(numel: int = 1024) -> torch.Tensor:
    return torch.zeros(numel).pin_memory()


def test_a_copy_to_the_host_shows_after_the_wait_alone() -> None:
    values = torch.arange(1024.0, device="cuda")
    host = _pinned()
    for _ in range(3):
        host.copy_(values, non_blocking=True)
        bits = host.view(torch.int16)
        assert bool(host.isnan().all())
        assert len(bits.unique()) > 8  # no constant, on which flags and hashes would agree
        torch.cuda.synchronize()
        assert torch.equal(host, torch.arange(1024.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_what_is_read_early_is_nan_in_every_format(dtype: torch.dtype) -> None:
    host = torch.zeros(512, dtype=dtype).pin_memory()
    host.copy_(torch.ones(512, dtype=dtype, device="cuda"), non_blocking=True)
    assert bool(host.isnan().all())
    torch.cuda.synchronize()
    assert bool((host == 1).all())


def test_the_device_sees_its_own_copies() -> None:
    host = _pinned()
    host.copy_(torch.ones(1024, device="cuda"), non_blocking=True)
    back = host.to("cuda", non_blocking=True)
    host.copy_(back + 1, non_blocking=True)
    torch.cuda.synchronize()
    assert bool((back == 1).all())
    assert bool((host == 2).all())


def test_memory_may_be_used_again_after_the_wait() -> None:
    host = _pinned()
    for value in range(3):
        host.fill_(value)
        on_device = host.to("cuda", non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        copied.synchronize()
        host.fill_(7)
        assert bool((on_device == value).all())


@pytest.mark.parametrize(
    "copy", ["on_device = host.to('cuda', non_blocking=True)", "host.copy_(on_device, True)"]
)
def test_memory_that_is_written_before_the_wait_is_an_error(copy: str) -> None:
    result = run_program(f"""
host = torch.zeros(1024).pin_memory()
on_device = torch.zeros(1024, device="cuda")
torch.cuda.synchronize()
{copy}
host[3] = 7
torch.cuda.synchronize()
""")
    assert result.returncode != 0
    assert re.search(WRITES_EARLY, result.stderr), result.stderr
    assert "it was submitted by\n    <string>:6" in result.stderr


def test_a_wait_that_is_left_out_shows_nothing() -> None:
    code = f"{EXCHANGE}print(exchange(torch.ones(4, device='cuda')))"
    assert run_program(code).stdout == "True\n"
    assert run_program(f"waits = False\n{code}").stdout == "False\n"
