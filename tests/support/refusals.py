"""Calls that have to be refused, in tables, and the model that they may not change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ext import fully_shard
from fsdp_ext.verifier.steps import rows_of
from support import parity
from support.messages import check_message

HUGE = 2**70
NO_BOOLS = ("x", None, 1.5, [], torch.ones(2))
NO_COUNTS = ("x", -1, 1.5, [], True, HUGE)
NO_FUNCTIONS = ("x", 2, [])
BAD_DTYPES = (torch.int32, torch.bool, torch.float8_e4m3fn, torch.complex64)
# A message ends with advice.
ADVICE = re.compile(
    r"\b(Pass|Leave|Call|Make|Choose|Keep|Shard|Run|Take|Replace|Return|Put|Use|Did you)\b"
)

Call = Callable[[Any], object]


# The type of the error, words of its message, and the call.
Row = tuple[type[Exception], str, Call]


def check_refused(row: Row, target: Any) -> None:
    """Make the call, and check its error."""
    kind, words, call = row
    error = check_message(kind, words, lambda: call(target))
    message = str(error)
    assert type(error).__module__ == "builtins" or isinstance(error, ValueError)
    assert ADVICE.search(message), message
    for noise in ("incompatible", "Traceback", "_C.", "Invoked with", "std::", ".cpp"):
        assert noise not in message, message


def each_of(
    kind: type[Exception], words: str, values: Iterable[object], call: Callable[..., object]
) -> list[Row]:
    """Return a row for each value, with which ``call`` is called after its target.

    In the words, ``{}`` stands for the value.
    """

    def row(value: object) -> Row:
        return kind, words.replace("{}", re.escape(repr(value))), lambda target: call(target, value)

    return [row(value) for value in values]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def step(model: Any) -> None:
    """Train one step."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    model(torch.randn(3, 4, generator=generator)).square().mean().backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
            param.grad = None


def sharded(**kwargs: Any) -> Any:
    model = network()
    fully_shard(model[0])
    fully_shard(model, **kwargs)
    return model


def assert_same(model: nn.Module, twin: nn.Module) -> None:
    ours, theirs = ([rows_of(p.detach()) for p in m.parameters()] for m in (model, twin))
    parity.assert_same("the twin", theirs, ours)


def check_refused_on_twins(rows: Iterable[Row], model: Any, twin: Any) -> None:
    """Make the calls, and check that the model trains on as its twin, which gets none of them."""
    for row in rows:
        check_refused(row, model)
        step(model)
        step(twin)
        assert_same(model, twin)


def state_of_module(model: nn.Module) -> list[object]:
    """Return the attributes of a module that ``fully_shard`` changes."""
    return [
        (
            module,
            type(module),
            {**vars(module)}.keys(),
            {**module._parameters},
            {**module._forward_hooks},
            {**module._forward_pre_hooks},
            {**module._state_dict_hooks},
            [{**vars(param)} for param in module._parameters.values() if param is not None],
        )
        for module in model.modules()
    ]


def on(method: str, **fixed: Any) -> Callable[..., object]:
    """Return a function that calls a method with its last argument as the first one."""
    return lambda model, value: getattr(model, method)(value, **fixed)


def with_keyword(method: str, keyword: str, *args: Any) -> Callable[..., object]:
    return lambda model, value: getattr(model, method)(*args, **{keyword: value})
