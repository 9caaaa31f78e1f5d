"""Models that override ``state_dict`` are saved as it returns them, and loaded."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import unchanged
from support.launcher import run_ranks
from support.models import Versioned
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_ext import FullyShardedDataParallel, checkpoint, fully_shard
from fsdp_ext.checkpoint import cli


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


class WithoutOneName(Tied):
    """Its state dict lacks the first name of a tied weight."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if name != "first.weight"}


class OfOtherNames(Tied):
    """Its state dict has names of its own, and it loads these."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {f"model.{name}": value for name, value in state.items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        own = {name.removeprefix("model."): value for name, value in state_dict.items()}
        return super().load_state_dict(own, strict, assign)


class NotLoadable(OfOtherNames):
    """It cannot load what its state dict returns."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return nn.Module.load_state_dict(self, state_dict, strict, assign)


def trained(kind: type[Tied], seed: int, way: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = way(kind())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def values(made: tuple[nn.Module, torch.optim.Optimizer]) -> list[Tensor]:
    """Return the whole weights and states."""
    model, optimizer = made
    states = [state["exp_avg"] for state in optimizer.state.values()]
    tensors = [*model.parameters(), *states]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in tensors]


def _come_back(place: Path) -> None:
    for kind in (WithoutOneName, OfOtherNames):
        for way in (fully_shard, unchanged):
            saved = trained(kind, 0, way)
            checkpoint.save(place, *saved)
            for other_way in (fully_shard, unchanged):
                other = trained(kind, 1, other_way)
                checkpoint.load(place, *other)
                for got, expected in zip(values(other), values(saved), strict=True):
                    assert torch.equal(got, expected)


def test_weights_and_states_come_back_under_names_that_parameters_do_not_have(
    tmp_path: Path,
) -> None:
    run_ranks(_come_back, 2, tmp_path)


def _convert(place: Path) -> None:
    def filled(version: int) -> nn.Linear:
        torch.manual_seed(0)
        layer = Versioned(2, 2)
        layer._version = version
        return layer

    ways = (unchanged, fully_shard, DistributedDataParallel, FullyShardedDataParallel)
    for version, factor in ((1, 2), (2, 1)):
        for way in ways:
            checkpoint.save(place, nn.Sequential(way(filled(version))))
            for other_way in ways:
                other = filled(2)
                checkpoint.load(place, nn.Sequential(other_way(other)))
                weights = dict(checkpoint.stream_weights(other))
                assert torch.equal(weights["weight"], filled(2).weight * factor)


def test_a_module_converts_the_weights_of_its_older_versions_only(tmp_path: Path) -> None:
    run_ranks(_convert, 2, tmp_path)


def test_weights_without_versions_are_those_of_the_present_version(tmp_path: Path) -> None:
    saved, other = Versioned(2, 2), Versioned(2, 2)
    checkpoint.export(saved, tmp_path / "exported")
    checkpoint.load_pretrained(other, tmp_path / "exported")
    assert torch.equal(other.weight, saved.weight)
    assert cli.run("import", [str(tmp_path / "exported"), str(tmp_path / "imported")]) == 0
    checkpoint.load(tmp_path / "imported", other)
    assert torch.equal(other.weight, saved.weight)


class WithExtra(nn.Linear):
    """It saves what it is given beside its weights."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("before", [torch.arange(0), None, {"steps": 3}])
def test_a_tensor_of_extra_state_replaces_whatever_there_was(tmp_path: Path, before: Any) -> None:
    checkpoint.save(tmp_path, WithExtra(torch.arange(5)))
    model = WithExtra(before)
    checkpoint.load(tmp_path, model)
    assert torch.equal(model.extra, torch.arange(5))


def _refuse_parts(place: Path) -> None:
    sharded = distribute_tensor(torch.arange(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    checkpoint.save(place, WithExtra(sharded))
    with pytest.raises(ValueError, match="as a tensor, and the model as a NoneType"):
        checkpoint.load(place, WithExtra(None))


def test_a_sharded_tensor_of_extra_state_needs_one_in_the_model(tmp_path: Path) -> None:
    run_ranks(_refuse_parts, 2, tmp_path)


def _in_two_places(place: Path) -> None:
    layer = nn.Linear(2, 2)
    checkpoint.save(place, nn.Sequential(layer, layer))
    other = nn.Linear(2, 2)
    checkpoint.load(place, DistributedDataParallel(nn.Sequential(other, other)))
    assert torch.equal(other.weight, layer.weight)


def test_a_module_may_be_in_two_places_of_a_wrapped_model(tmp_path: Path) -> None:
    run_ranks(_in_two_places, 1, tmp_path)


def test_a_model_with_a_scripted_module_is_saved(tmp_path: Path) -> None:
    models = [nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3))) for _ in range(2)]
    checkpoint.load(checkpoint.save(tmp_path, models[0]), models[1])
    for name, value in models[0].state_dict().items():
        assert torch.equal(models[1].state_dict()[name], value)


def test_a_model_that_cannot_load_its_own_state_dict_is_told(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, *trained(NotLoadable, 0, unchanged))
    with pytest.raises(ValueError, match=r"returns 'model\.first\.weight', which its .* Override"):
        checkpoint.load(tmp_path, *trained(NotLoadable, 1, unchanged))


class FailingOnRank1(Tied):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("not on rank 1")
        return super().load_state_dict(state_dict, strict, assign)


def _fail_on_rank_1(place: Path) -> None:
    saved = trained(Tied, 0, unchanged)
    checkpoint.save(place, *saved)
    other, before = (trained(FailingOnRank1, 1, unchanged) for _ in range(2))
    fails = dist.get_rank() == 1
    with pytest.raises(RuntimeError, match="not on rank 1") if fails else nullcontext():
        checkpoint.load(place, *other)
    for got, expected in zip(values(other), values(before if fails else saved), strict=True):
        assert torch.equal(got, expected)


def test_a_rank_whose_model_raises_keeps_its_optimizer_and_others_load(tmp_path: Path) -> None:
    run_ranks(_fail_on_rank_1, 2, tmp_path)


class WithSteps(nn.Linear):
    """Its state dict has an entry that is no tensor."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "steps": 3}


def test_a_tensor_is_not_loaded_into_something_else(tmp_path: Path) -> None:
    saved = nn.Linear(2, 2)
    saved.register_buffer("steps", torch.ones(2))
    checkpoint.save(tmp_path, saved)
    with pytest.raises(ValueError, match=r"'steps' as a tensor, and the model as a int"):
        checkpoint.load(tmp_path, WithSteps(2, 2))
