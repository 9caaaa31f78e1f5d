"""NCCL orders the launches of all lanes where a GPU has few multiprocessors."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace

import pytest
import torch

from fsdp_ext.comm import lanes

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def variable_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lanes.LAUNCH_ORDER, "")  # recorded, and restored at the end
    del os.environ[lanes.LAUNCH_ORDER]


def order_launches(
    monkeypatch: pytest.MonkeyPatch, processors: int, *sizes: int, used: bool = False
) -> str | None:
    """Return the variable after a GPU of so many multiprocessors has been looked at."""
    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(lanes, "has_used_nccl", lambda group, device: used)
    lanes.order_launches(None, GPU, *sizes)
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


def test_an_order_that_may_come_too_late_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_lanes_of_gpus_and_groups_that_have_connected_have_used_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Nccl:
        connected = False

        def _is_initialized(self) -> bool:
            return self.connected

    class Group:
        def __init__(self, backend: object | None) -> None:
            self.backend = backend

        def _get_backend(self, device: torch.device) -> object:
            if self.backend is None:
                raise RuntimeError("no backend for the device")
            return self.backend

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    nccl = Nccl()
    assert not lanes.has_used_nccl(Group(None), GPU)
    assert not lanes.has_used_nccl(Group(object()), GPU)
    assert not lanes.has_used_nccl(Group(nccl), GPU)
    nccl.connected = True
    assert lanes.has_used_nccl(Group(nccl), GPU)
    other = Group(None)
    monkeypatch.setitem(lanes._lanes, other, {(torch.device("cpu"), None): None})
    assert not lanes.has_used_nccl(Group(None), GPU)
    monkeypatch.setitem(lanes._lanes, other, {(GPU, None): None})
    assert lanes.has_used_nccl(Group(None), GPU)
