"""Checkpoints can be looked into and converted without a model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.launcher import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import fsdp_ext
from fsdp_ext import checkpoint
from fsdp_ext.checkpoint import cli
from fsdp_ext.checkpoint.tensor_files import TensorFile


def main(arguments: list[str]) -> int:
    return cli.run(arguments[0], arguments[1:])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embed(tokens)))
        return out


def made(seed: int = 0, shard: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = Tied()
    if shard:
        fsdp_ext.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _save(place: Path) -> None:
    made_ = made(shard=True)
    checkpoint.save(place / "ours", *made_, {"step": 5, "seed": torch.tensor(3)})
    checkpoint.export(str(place / "ours"), place / "exported", 100)
    checkpoint.export(place / "ours", place / "cast", 100, torch.bfloat16)
    weights, states = get_state_dict(*made_)
    dcp.save({"model": weights, "optimizer": states, "step": 5}, checkpoint_id=place / "dcp")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("offline")
    run_ranks(_save, 2, place)
    return place


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    return [*model.state_dict().values(), *states, torch.tensor(optimizer.param_groups[0]["lr"])]


def assert_loaded(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compare with what `load` makes of the checkpoint."""
    expected = made(2)
    checkpoint.load(place / "ours", *expected)
    pairs = zip(states_of(model, optimizer), states_of(*expected), strict=True)
    assert all(torch.equal(got, value) for got, value in pairs)


def test_inspect_shows_and_verifies(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(place / "ours"), "--tensors", "--verify"]) == 0
    out = capsys.readouterr().out
    assert "checkpoint-000001: 2 ranks (mesh of 2), fsdp_ext" in out
    assert "weights: 7 tensors" in out
    assert "  embed.weight  float32[7, 4]  in 2 parts" in out
    assert "are as they were written" in out


def _save_on_mesh(place: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
    model = fsdp_ext.fully_shard(nn.Linear(4, 2), mesh=mesh)
    checkpoint.save(place / "named", model)
    checkpoint.save(place / "whole", nn.Linear(4, 2))


def test_inspect_names_the_dimensions_of_a_mesh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(_save_on_mesh, 2, tmp_path)
    assert main(["inspect", str(tmp_path / "named")]) == 0
    assert "2 ranks (mesh of replicas=1 x shards=2), fsdp_ext" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "whole")]) == 0
    assert "2 ranks (no mesh), fsdp_ext" in capsys.readouterr().out


def test_inspect_names_damage(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "ours", tmp_path / "ours")
    path = tmp_path / "ours/checkpoint-000001/weights-00001.safetensors"
    part = TensorFile(path).parts["embed.weight"]
    with path.open("r+b") as file:
        file.seek(part.begin)
        file.write(b"\x55")
    assert main(["inspect", str(tmp_path / "ours"), "--verify"]) == 1
    assert "damaged data in tensor 'embed.weight'" in capsys.readouterr().err


def test_inspect_of_a_directory_without_checkpoints(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(place / "nothing")]) == 1
    assert "has no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["convert", "export"])
def test_a_target_that_is_a_file_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    target = tmp_path / "file"
    target.write_text("kept")
    assert main([command, str(place / "ours"), str(target)]) == 1
    assert f"{target} is a file. Pass a directory." in capsys.readouterr().err
    assert target.read_text() == "kept"


def test_each_command_shows_its_progress(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, dcp_path, files = (str(tmp_path / name) for name in ("ours", "dcp", "files"))
    for command, totals in (
        (["convert", str(place / "dcp"), ours], ["8", "12"]),  # the weights, and then the states
        (["convert", ours, dcp_path], ["20"]),
        (["inspect", ours, "--verify"], ["684"]),  # bytes
        (["export", ours, files], ["8"]),
        (["import", files, ours], ["8"]),
    ):
        assert main(command) == 0
        ends = re.findall(r"100%\S+ (\S+)/\1 .*\n", capsys.readouterr().err)
        assert ends == totals, command


def test_files_without_tensors_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert main(["import", str(tmp_path), str(tmp_path / "made")]) == 1
    assert f"the files in {tmp_path} have no tensors." in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_a_damaged_checkpoint_of_dcp_is_named(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    damaged = tmp_path / "dcp"
    shutil.copytree(place / "dcp", damaged)
    with (damaged / file).open("r+b") as opened:
        opened.truncate(100)
    assert main(["convert", str(damaged), str(tmp_path / "ours")]) == 1
    assert f"{damaged} cannot be read as a checkpoint of torch" in capsys.readouterr().err
    assert not [path for path in (tmp_path / "ours").glob("*") if path.name != ".lock"]


def test_from_dcp_and_back(place: Path, tmp_path: Path) -> None:
    assert main(["convert", str(place / "dcp"), str(tmp_path / "ours")]) == 0
    model, optimizer = made(1)
    assert checkpoint.load(tmp_path / "ours", model, optimizer) == {"step": 5}
    assert_loaded(place, model, optimizer)


def test_to_dcp(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(place / "ours"), str(tmp_path / "dcp")]) == 0
    model, optimizer = made(1)
    weights, states = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": states}
    dcp.load(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    assert_loaded(place, model, optimizer)
    assert main(["convert", str(place / "ours"), str(tmp_path / "dcp")]) == 1
    assert "is not empty. Choose a new directory" in capsys.readouterr().err


def test_export_and_import(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--max-shard-size", "100"]
    assert main(["export", str(place / "ours"), str(tmp_path / "files"), *sizes]) == 0
    names = sorted(path.name for path in (tmp_path / "files").iterdir())
    assert names[0] == "model-00001-of-00003.safetensors"
    assert names[-1] == "model.safetensors.index.json"
    for name in names:
        assert (tmp_path / "files" / name).read_bytes() == (place / "exported" / name).read_bytes()
    assert main(["import", str(tmp_path / "files"), str(tmp_path / "imported")]) == 0
    assert capsys.readouterr().out.split()[-1] == str(tmp_path / "imported/checkpoint-000001")
    expected, _ = made(2)
    checkpoint.load(place / "ours", expected)
    pretrained, _ = made(1)
    checkpoint.load_pretrained(pretrained, tmp_path / "files")
    imported, _ = made(1)
    checkpoint.load(tmp_path / "imported", imported)
    cast, _ = made(1)
    checkpoint.load_pretrained(cast, place / "cast")
    for name, value in expected.state_dict().items():
        assert torch.equal(pretrained.state_dict()[name], value), name
        assert torch.equal(imported.state_dict()[name], value), name
        rounded = value.bfloat16().to(value.dtype)
        assert torch.equal(cast.state_dict()[name], rounded), name
