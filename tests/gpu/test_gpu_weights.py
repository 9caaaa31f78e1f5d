"""Weights are streamed from GPUs, exported and loaded as on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints import WAYS, assert_equal
from support.launcher import run_ranks
from torch import Tensor, nn

from fsdp_ext.checkpoint import export, load_pretrained, stream_weights

pytest.importorskip("xxhash", reason="the machine has no network to install it")

SOME = ["several units", "a tied head", "few rows", "mixed precision", "offloaded", "FSDP1, flat"]


def on_host(model: nn.Module, device: str) -> dict[str, Tensor]:
    """Return the streamed weights. Parameters lie where their shards do."""
    weights = dict(stream_weights(model))
    assert {weights[name].device.type for name in weights if name.endswith("weight")} == {device}
    return {name: tensor.cpu() for name, tensor in weights.items()}


def _has_the_state_dict(directory: Path) -> None:
    for name in SOME:
        subject, way = WAYS[name]
        torch.manual_seed(0)
        model = subject()
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        device = "cpu" if name == "offloaded" else "cuda"
        sharded = way(model.to(device))
        assert_equal(on_host(sharded, device), expected)
        cast = {n: t.bfloat16() if t.is_floating_point() else t for n, t in expected.items()}
        assert_equal(dict(stream_weights(sharded, torch.bfloat16, "cpu")), cast)
        export(sharded, directory / name)
        with torch.no_grad():
            for param in sharded.parameters():
                param.zero_()
        load_pretrained(sharded, directory / name)
        assert_equal(on_host(sharded, device), expected)


def test_weights_of_gpus_are_streamed_exported_and_loaded(tmp_path: Path) -> None:
    run_ranks(_has_the_state_dict, 2, tmp_path, device="cuda")
