"""Weights are streamed from GPUs, exported and loaded as on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from support.checkpoints import WAYS, assert_equal
from support.launcher import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_ext.checkpoint import export, hugging_face, load_pretrained, stream_weights

pytest.importorskip("xxhash", reason="the machine has no network to install it")

SOME = ["several units", "a tied head", "few rows", "mixed precision", "offloaded", "FSDP1, flat"]
SQUARE = [Shard(0), Shard(1)]


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


def _is_exported(directory: Path) -> None:
    whole = torch.arange(30.0).view(5, 6)
    mesh = init_device_mesh("cuda", (2, 2))
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(whole.cuda(), mesh, SQUARE))
    export(model, directory, process_group=dist.new_group(backend="gloo"))
    with safe_open(directory / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("weight"), whole)


def test_ranks_may_agree_over_a_group_that_serves_the_host_alone(tmp_path: Path) -> None:
    run_ranks(_is_exported, 4, tmp_path, device="cuda")


def _are_gathered(directory: Path) -> None:
    line = init_device_mesh("cuda", (4,), backend_override={0: "gloo"})
    square = init_device_mesh("cuda", (2, 2), backend_override={0: "gloo", 1: "gloo"})
    for number in range(10):  # what reads a GPU's memory too early may find it ready
        whole = torch.arange(2400.0).view(40, 60) + number
        model = nn.Module()
        for name, mesh, shards in [("line", line, [Shard(0)]), ("square", square, SQUARE)]:
            weight = distribute_tensor(whole.cuda(), mesh, shards, src_data_rank=None)
            model.register_parameter(f"{name}_weight", nn.Parameter(weight))
        expected = {name: whole for name, _ in model.named_parameters()}
        assert_equal(on_host(model, "cuda"), expected)
        with pytest.MonkeyPatch.context() as patched:  # as on several hosts, which gather all
            patched.setattr(hugging_face, "machine", lambda: str(dist.get_rank()))
            export(model, directory / str(number))
        with safe_open(directory / str(number) / "model.safetensors", "pt") as file:
            assert_equal({name: file.get_tensor(name) for name in expected}, expected)


def test_weights_of_gpus_whose_groups_are_gloo_are_gathered(tmp_path: Path) -> None:
    run_ranks(_are_gathered, 4, tmp_path, device="cuda")
