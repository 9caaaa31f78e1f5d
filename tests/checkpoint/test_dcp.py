"""Conversions from and to torch.distributed.checkpoint keep what was saved."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.checkpoints import assert_equal, assert_same
from support.models import Versioned
from torch import nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.optim.lr_scheduler import MultiStepLR

from fsdp_ext import checkpoint
from fsdp_ext.checkpoint import cli
from fsdp_ext.checkpoint.reading import Checkpoint
from fsdp_ext.checkpoint.tensor_files import TensorFile


class Stateful(nn.Linear):
    """It has tensors where DCP looks for none."""

    def get_extra_state(self) -> Any:
        return {"pair": (torch.ones(3), 2), "array": np.arange(4)}

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def read(path: Path) -> dict[str, Any]:
    """Return what was passed to ``dcp.save``."""
    saved: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    reader = dcp.FileSystemReader(path)
    _load_state_dict(saved, storage_reader=reader, planner=planner, no_dist=True)
    return saved


def test_tensors_inside_of_other_values_are_converted(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "saved", Stateful(2, 2), extra={"pair": (torch.ones(2), 3)})
    assert cli.run("convert", [str(path), str(tmp_path / "dcp")]) == 0
    converted = read(tmp_path / "dcp")
    pair, array = (converted["model"]["_extra_state"][key] for key in ("pair", "array"))
    assert torch.equal(pair[0], torch.ones(3))
    assert pair[1] == 2
    assert np.array_equal(array, np.arange(4))
    assert torch.equal(converted["extra"]["pair"][0], torch.ones(2))


class WithKeys(torch.optim.SGD):
    """Its states have keys that are no strings."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param] = {1: torch.ones_like(param), "empty": {}}


def test_a_checkpoint_survives_conversion_to_dcp_and_back(tmp_path: Path) -> None:
    saved, dcp_path, back = (str(tmp_path / name) for name in ("saved", "dcp", "back"))
    model = nn.Sequential(Stateful(2, 2), Versioned(2, 2))
    model[1].bias = model[0].bias
    model[1]._version = 1
    optimizer = WithKeys(model.parameters(), lr=0.5)
    optimizer.step()
    extra = {
        "schedule": MultiStepLR(optimizer, [3, 5]).state_dict(),
        "random": (torch.get_rng_state(), np.random.get_state()),
        "a/b": torch.ones(2),
        "a": {"b": torch.zeros(3), ("c", 1): [torch.ones(1), {}]},
        "empty": {},
    }
    checkpoint.save(saved, model, optimizer, extra)
    assert cli.run("convert", [saved, dcp_path]) == 0
    assert cli.run("convert", [dcp_path, back]) == 0
    states = []
    for path in (saved, back):
        other = nn.Sequential(Stateful(2, 2), Versioned(2, 2))
        other[1].bias = other[0].bias
        its_optimizer = WithKeys(other.parameters(), lr=0.1)
        states.append(checkpoint.load(path, other, its_optimizer))
        assert_same(states[-1], extra)
        assert_same(dict(its_optimizer.state_dict()), optimizer.state_dict())
        assert torch.equal(other[0].weight, model[0].weight)
        assert torch.equal(other[1].weight, model[1].weight * 2)
        assert_same(other[0].state, model[0].get_extra_state())
    names = [sorted(Checkpoint(checkpoint.latest(path)).parts("weights")) for path in (saved, back)]
    assert names[0] == names[1]  # a tied weight is stored once


def test_an_extra_like_an_optimizer_survives_conversion_to_dcp_and_back(tmp_path: Path) -> None:
    saved, dcp_path, back = (tmp_path / name for name in ("saved", "dcp", "back"))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adagrad(model.parameters())  # it has states before its first step
    extra = dict(optimizer.state_dict())
    checkpoint.save(saved, model, extra=extra)
    assert cli.run("convert", [str(saved), str(dcp_path)]) == 0
    assert cli.run("convert", [str(dcp_path), str(back)]) == 0
    assert_same(checkpoint.load(back, model), extra)


def test_changes_of_a_converted_checkpoint_survive_the_way_back(tmp_path: Path) -> None:
    def tied() -> tuple[nn.Sequential, torch.optim.SGD]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    path = checkpoint.save(tmp_path / "saved", *tied(), {"step": 1})
    assert cli.run("convert", [str(path), str(tmp_path / "dcp")]) == 0
    changed = read(tmp_path / "dcp")

    def convert_changed(name: str) -> str:
        dcp.save(changed, checkpoint_id=tmp_path / name, no_dist=True)
        assert cli.run("convert", [str(tmp_path / name), str(tmp_path / "back" / name)]) == 0
        return str(tmp_path / "back" / name)

    changed["model"]["1.weight"] = torch.full((2, 2), 7.0)
    untied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    checkpoint.load(convert_changed("tensors"), untied)
    assert_equal(untied.state_dict(), changed["model"])
    changed["optimizer"]["param_groups"][0]["lr"] = 0.25
    changed["extra"] = {"step": 2}
    model, optimizer = tied()
    with pytest.warns(UserWarning, match="has changed since it was converted"):
        path = convert_changed("values")
    assert checkpoint.load(path, model, optimizer) == {"step": 2}
    assert optimizer.param_groups[0]["lr"] == 0.25
    del changed["optimizer"], changed["extra"]
    with pytest.warns(UserWarning, match="has changed since it was converted"):
        path = convert_changed("entries")
    assert checkpoint.load(path, model) is None


def test_an_export_has_no_tensors_of_other_values(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "saved", Stateful(2, 2))
    assert cli.run("export", [str(path), str(tmp_path / "exported")]) == 0
    parts = TensorFile(tmp_path / "exported" / "model.safetensors").parts
    assert parts.keys() == {"weight", "bias"}


def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"model": {"weight": torch.ones(3), "bias": torch.ones(3)}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for data in (tmp_path / "dcp").glob("*.distcp"):
        data.unlink()
    assert cli.run("convert", [str(tmp_path / "dcp"), str(tmp_path / "ours")]) == 1
    assert ".distcp" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "ours").iterdir()] == [".lock"]
    path = checkpoint.save(tmp_path / "ours", nn.Linear(2, 2))
    part = TensorFile(path / "weights-00000.safetensors").parts["weight"]
    with (path / "weights-00000.safetensors").open("r+b") as file:
        file.seek(part.begin)
        file.write(b"\x55")
    assert cli.run("convert", [str(path), str(tmp_path / "new")]) == 1
    assert "has damaged data in tensor 'weight'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_conversion_to_a_full_disk_names_the_target(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "saved", nn.Linear(512, 512))
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_ext", "convert", str(path), str(tmp_path / "dcp")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 1
    assert f"{tmp_path / 'dcp'} cannot be written; is the disk full?" in done.stderr
    assert not (tmp_path / "dcp").exists()
