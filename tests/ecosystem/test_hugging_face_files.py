"""transformers loads what `export` has written, and `load_pretrained` what transformers has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from ecosystem.families import FAMILIES, subject
from safetensors import safe_open
from support.launcher import run_ranks
from support.parity import assert_same
from torch import Tensor

import fsdp_ext
from fsdp_ext.checkpoint import export, load_pretrained, stream_weights

# transformers saves these with names of older versions, unless save_original_format is False. It
# loads both.
RENAMED = ("qwen3_moe", "mixtral", "vit")


def sharded(model: Any) -> Any:
    for unit in model.units():
        fsdp_ext.fully_shard(unit)
    return fsdp_ext.fully_shard(model)


def wrapped(model: Any) -> Any:
    return fsdp_ext.FullyShardedDataParallel(model)


def logits(model: Any) -> Tensor:
    torch.manual_seed(0)
    model.eval()
    _, batch = model.batch(torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(**batch).logits


def names_in(directory: Path) -> set[str]:
    return {
        name
        for path in directory.glob("*.safetensors")
        for name in safe_open(path, "pt").keys()  # noqa: SIM118
    }


def _is_loaded_by_transformers(name: str, directory: Path) -> None:
    torch.manual_seed(0)
    reference = subject(name)
    expected = reference.state_dict()
    for i, (way, dtype) in enumerate(((sharded, None), (wrapped, None), (sharded, torch.bfloat16))):
        torch.manual_seed(0)
        model = way(subject(name))
        export(model, directory / str(i), max_shard_size="50KB", dtype=dtype)
        if dist.get_rank() == 0:
            cls = type(reference)
            loaded, told = cls.from_pretrained(directory / str(i), output_loading_info=True)
            assert not any(told.values()), told
            assert loaded.dtype == (dtype or torch.float32)
            cast = {key: tensor.to(dtype or tensor.dtype) for key, tensor in expected.items()}
            assert_same("export", cast, loaded.state_dict())
            if dtype is None:
                assert torch.equal(logits(loaded), logits(reference))
            config = transformers.AutoConfig.from_pretrained(directory / str(i))
            assert config.architectures == [FAMILIES[name].model]
        dist.barrier()


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_an_export(name: str, tmp_path: Path) -> None:
    run_ranks(_is_loaded_by_transformers, 2, name, tmp_path)


def _loads_transformers_files(name: str, directory: Path) -> None:
    torch.manual_seed(0)
    reference = subject(name)
    if dist.get_rank() == 0:
        reference.save_pretrained(directory / "renamed", max_shard_size="50KB")
        reference.save_pretrained(
            directory / "theirs", max_shard_size="50KB", save_original_format=False
        )
    dist.barrier()
    with torch.device("meta"):
        model = sharded(subject(name))
    model.to_empty(device="cpu")
    model.tie_weights()
    assert load_pretrained(model, directory / "theirs") == []
    assert_same("load_pretrained", reference.state_dict(), dict(stream_weights(model)))
    export(model, directory / "ours", max_shard_size="50KB")
    assert names_in(directory / "ours") == names_in(directory / "theirs")
    if name in RENAMED:
        with pytest.raises(ValueError, match=r"renamed lacks '.*, which the model lacks"):
            load_pretrained(model, directory / "renamed")
    else:
        load_pretrained(model, directory / "renamed")


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_files_are_loaded_and_have_the_same_names(name: str, tmp_path: Path) -> None:
    run_ranks(_loads_transformers_files, 2, name, tmp_path)
