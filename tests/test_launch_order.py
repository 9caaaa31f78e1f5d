"""NCCL orders the launches of both lanes where a GPU has few multiprocessors."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from fsdp_ext.comm import lanes

VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"


@pytest.mark.parametrize(
    ("processors", "before", "after"),
    [(132, None, None), (64, None, None), (63, None, "1"), (16, None, "1"), (16, "0", "0")],
)
def test_launches_are_ordered_on_few_multiprocessors(
    monkeypatch: pytest.MonkeyPatch, processors: int, before: str | None, after: str | None
) -> None:
    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setenv(VARIABLE, before or "")  # restored at the end
    if before is None:
        monkeypatch.delenv(VARIABLE)
    lanes.order_launches(torch.device("cuda", 0))
    assert os.environ.get(VARIABLE) == after
    if before is None:
        monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("at_once", "blocks", "after"), [(2, 32, None), (4, 32, "1"), (2, 64, "1"), (2, 1, None)]
)
def test_more_lanes_and_larger_ones_need_more_multiprocessors(
    monkeypatch: pytest.MonkeyPatch, at_once: int, blocks: int, after: str | None
) -> None:
    properties = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setenv(VARIABLE, "")  # restored at the end
    monkeypatch.delenv(VARIABLE)
    lanes.order_launches(torch.device("cuda", 0), at_once, blocks)
    assert os.environ.get(VARIABLE) == after
    monkeypatch.delenv(VARIABLE, raising=False)
