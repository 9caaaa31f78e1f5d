"""Checkpoints do not depend on the default device, under which a program makes its tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from fsdp_ext import checkpoint
from fsdp_ext.checkpoint import export, load_pretrained


def _trained() -> tuple[nn.Linear, torch.optim.AdamW]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_values_are_read_and_copied_on_the_host(tmp_path: Path) -> None:
    saved, of_saved = _trained()
    loaded, of_loaded = _trained()
    exported, _ = _trained()
    with torch.device("meta"):
        extra = {"tensor": torch.arange(3, device="cpu")}
        checkpoint.async_save(tmp_path / "runs", saved, of_saved, extra).result()
        got = checkpoint.load(tmp_path / "runs", loaded, of_loaded)
        export(saved, tmp_path / "exported", dtype=torch.bfloat16)
        load_pretrained(exported, tmp_path / "exported")
    assert torch.equal(got["tensor"], torch.arange(3))
    for name, weight in saved.named_parameters():
        other = loaded.get_parameter(name)
        assert torch.equal(other, weight)
        assert torch.equal(exported.get_parameter(name), weight.bfloat16().float())
        for key, value in of_saved.state[weight].items():
            assert torch.equal(of_loaded.state[other][key], value)
