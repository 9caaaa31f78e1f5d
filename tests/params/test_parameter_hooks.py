"""Hooks that users register on sharded parameters run as with FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from support.parity import SYSTEM, load_system
from torch import Tensor, nn


class HookFailed(Exception):
    pass


def _calls(system: str) -> list[tuple[str, Tensor]]:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4)
    load_system(system).fully_shard(model)
    calls = []

    def hook(name: str, result: Any) -> Any:
        def called(parameter: nn.Parameter) -> Any:
            assert parameter.grad is not None
            calls.append((name, parameter.grad.to_local().clone()))
            return result

        return called

    model.weight.register_post_accumulate_grad_hook(hook("a number", 3))
    removed = model.weight.register_post_accumulate_grad_hook(hook("removed", None))
    model.weight.register_post_accumulate_grad_hook(hook("a tensor", torch.ones(1)))
    removed.remove()
    for scale in (1.0, 2.0):
        model(torch.full((2, 4), scale)).sum().backward()
    return calls


def _hooks() -> None:
    for (theirs, expected), (ours, got) in zip(_calls("fsdp2"), _calls(SYSTEM), strict=True):
        assert ours == theirs
        assert torch.equal(got, expected)
    model = nn.Linear(4, 4)
    load_system(SYSTEM).fully_shard(model)

    def fail(_: Any) -> None:
        raise HookFailed("by the user")

    handle = model.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(HookFailed, match="by the user"):
        model(torch.ones(2, 4)).sum().backward()
    handle.remove()
    model(torch.ones(2, 4)).sum().backward()


def test_values_that_post_accumulate_hooks_return_are_ignored() -> None:
    run_ranks(_hooks, 2)
