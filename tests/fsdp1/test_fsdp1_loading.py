"""A wrapper loads what users' hooks have changed, and stays as it was if it refuses to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fsdp1_parity import FSDP
from support.launcher import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate


class Joined(nn.Module):
    """One weight, of which older checkpoints have two."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(4, 6, bias=False)
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _join(module: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        if f"{prefix}q.weight" in state:
            parts = [state.pop(f"{prefix}{name}.weight") for name in ("q", "k")]
            state[f"{prefix}qk.weight"] = torch.cat(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.qk(x)


def joined() -> None:
    torch.manual_seed(0)
    old = {"0.q.weight": torch.randn(3, 4), "0.k.weight": torch.randn(3, 4)}
    model = FSDP(nn.Sequential(Joined()), auto_wrap_policy=ModuleWrapPolicy({Joined}))
    found = model.load_state_dict(dict(old))
    assert not found.missing_keys
    assert not found.unexpected_keys
    expected = torch.cat(list(old.values()))
    torch.testing.assert_close(model.state_dict()["0.qk.weight"], expected, rtol=0, atol=0)


def test_whole_tensors_that_a_modules_hook_has_joined_are_sharded() -> None:
    run_ranks(joined, 2)


def refused() -> None:
    torch.manual_seed(0)
    model = FSDP(nn.Linear(4, 4))
    before = model.state_dict()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded = model.state_dict()
        other = {
            name: value.redistribute(placements=[Replicate()]) for name, value in sharded.items()
        }
        with pytest.raises(ValueError, match="or load it without assign=True"):
            model.load_state_dict(other, assign=True)
        model.load_state_dict(sharded)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    model(torch.ones(1, 4)).sum().backward()


def test_a_refused_assignment_leaves_the_model_as_it_was() -> None:
    run_ranks(refused, 2)


def in_inference_mode() -> None:
    model = FSDP(nn.Linear(4, 4))
    expected = model.state_dict()
    with torch.inference_mode():
        model(torch.ones(1, 4))
        found = model.state_dict()
    for name, value in expected.items():
        assert not found[name].is_inference()
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_a_state_dict_can_be_taken_in_inference_mode() -> None:
    run_ranks(in_inference_mode, 2)


def around_torchs() -> None:
    inner = torch.distributed.fsdp.FullyShardedDataParallel(
        nn.Linear(4, 4), device_id=torch.device("cpu")
    )
    with pytest.raises(ValueError, match=r"'0' is wrapped by PyTorch's FullyShardedDataParallel"):
        FSDP(nn.Sequential(inner))


def test_a_module_with_torchs_wrapper_inside_is_refused() -> None:
    run_ranks(around_torchs, 2)


class Lazy:
    """A tensor that is read when it is used, as Lightning has them. It is none of PyTorch's."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.shape = value, value.shape

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [arg.value if isinstance(arg, Lazy) else arg for arg in args]
        return func(*read, **(kwargs or {}))


def lazy() -> None:
    torch.manual_seed(0)
    values = {"0.weight": torch.randn(5, 4), "0.bias": torch.randn(5)}
    for use_orig_params in (True, False):
        model = FSDP(nn.Sequential(nn.Linear(4, 5)), use_orig_params=use_orig_params)
        model.load_state_dict({name: Lazy(value) for name, value in values.items()})
        loaded = model.state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in values.items())


def test_tensors_that_are_read_when_they_are_used_are_loaded() -> None:
    run_ranks(lazy, 2)
