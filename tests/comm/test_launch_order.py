"""NCCL orders the launches of all lanes where a GPU has few multiprocessors."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fsdp_ext.comm import lanes

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def variable_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lanes.LAUNCH_ORDER, "")  # recorded, and restored at the end
    del os.environ[lanes.LAUNCH_ORDER]


def order_launches(
    monkeypatch: pytest.MonkeyPatch,
    processors: int,
    at_once: int = 2,
    blocks: int = lanes.MOST_BLOCKS,
    used: bool = False,
) -> str | None:
    """Call it for a GPU of so many multiprocessors; return the variable."""
    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(lanes, "has_used_nccl", lambda device: used)
    lanes.order_launches(GPU, at_once, blocks)
    return os.environ.get(lanes.LAUNCH_ORDER)


@pytest.mark.parametrize(
    ("processors", "before", "after"),
    [(132, None, None), (64, None, None), (63, None, "1"), (16, None, "1"), (16, "0", "0")],
)
def test_launches_are_ordered_on_few_multiprocessors(
    monkeypatch: pytest.MonkeyPatch, processors: int, before: str | None, after: str | None
) -> None:
    if before is not None:
        os.environ[lanes.LAUNCH_ORDER] = before
    assert order_launches(monkeypatch, processors) == after


@pytest.mark.parametrize(
    ("at_once", "blocks", "after"), [(2, 32, None), (4, 32, "1"), (2, 64, "1"), (2, 1, None)]
)
def test_more_lanes_and_larger_ones_need_more_multiprocessors(
    monkeypatch: pytest.MonkeyPatch, at_once: int, blocks: int, after: str | None
) -> None:
    assert order_launches(monkeypatch, 108, at_once, blocks) == after


def test_a_warning_says_if_the_order_may_come_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "cuda:0 has 16 multiprocessors, too few for 2 NCCL.*has used NCCL before.*Set NCCL_"
    with pytest.warns(UserWarning, match=message):
        assert order_launches(monkeypatch, 16, used=True) == "1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        order_launches(monkeypatch, 16, used=True)  # the user has set it
        del os.environ[lanes.LAUNCH_ORDER]
        order_launches(monkeypatch, 16, used=False)
        del os.environ[lanes.LAUNCH_ORDER]
        order_launches(monkeypatch, 132, used=True)


def test_nccl_is_used_by_lanes_of_gpus_and_groups_that_have_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected = SimpleNamespace(_is_initialized=lambda: True)
    unconnected = SimpleNamespace(_is_initialized=lambda: False)

    def used(*backends: object) -> bool:
        groups = [SomeGroup(backend) for backend in backends]
        monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=groups))
        return lanes.has_used_nccl(GPU)

    assert not used()
    assert not used(None, unconnected)
    assert used(None, unconnected, connected)
    assert used(object())  # a wrapper, such as that of TORCH_DISTRIBUTED_DEBUG=DETAIL
    group = SomeGroup(None)
    monkeypatch.setitem(lanes._lanes, group, {(torch.device("cpu"), None): None})
    assert not used()
    monkeypatch.setitem(lanes._lanes, group, {(GPU, None): None})
    assert used()


class SomeGroup:
    """A process group with one backend, or none for GPUs."""

    def __init__(self, backend: object | None) -> None:
        self.backend = backend

    def _get_backend(self, device: torch.device) -> object:
        if self.backend is None:
            raise RuntimeError("no backend for the device")
        return self.backend
