"""Checkpoints depend neither on modes of torch nor on whether units are unsharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from torch import nn

from fsdp_ext import checkpoint, fully_shard
from fsdp_ext.checkpoint import export, load_pretrained


def _trained(is_sharded: bool) -> tuple[nn.Linear, torch.optim.AdamW]:
    model = nn.Linear(3, 2)
    if is_sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def _come_back(place: Path, is_sharded: bool, mode: Any) -> None:
    saved, of_saved = _trained(is_sharded)
    loaded, of_loaded = _trained(is_sharded)
    exported, _ = _trained(is_sharded)
    with mode:
        extra = {"tensor": torch.arange(3, device="cpu")}
        checkpoint.async_save(place / "runs", saved, of_saved, extra).result()
        got = checkpoint.load(place / "runs", loaded, of_loaded)
        export(saved, place / "exported", dtype=torch.bfloat16)
        load_pretrained(exported, place / "exported")
    assert torch.equal(got["tensor"], torch.arange(3))
    for name, weight in saved.named_parameters():
        other = loaded.get_parameter(name)
        assert torch.equal(other, weight)
        assert torch.equal(exported.get_parameter(name), weight.bfloat16().float())
        for key, value in of_saved.state[weight].items():
            assert torch.equal(of_loaded.state[other][key], value)

    of_loaded.step()


@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize(
    "mode", [torch.device("meta"), torch.inference_mode()], ids=["default device", "inference mode"]
)
def test_checkpoints_come_back(tmp_path: Path, is_sharded: bool, mode: Any) -> None:
    run_ranks(_come_back, 1, tmp_path, is_sharded, mode)


def _come_back_unsharded(place: Path) -> None:
    saved, of_saved = _trained(True)
    saved.unshard()  # type: ignore[operator]
    checkpoint.save(place, saved, of_saved)
    loaded, of_loaded = _trained(True)
    checkpoint.load(place, loaded, of_loaded)
    for name, weight in saved.named_parameters():
        other = loaded.get_parameter(name)
        assert torch.equal(other, weight)
        for key, value in of_saved.state[weight].items():
            assert torch.equal(of_loaded.state[other][key], value)


def test_units_may_be_unsharded_when_a_checkpoint_is_saved(tmp_path: Path) -> None:
    run_ranks(_come_back_unsharded, 1, tmp_path)
