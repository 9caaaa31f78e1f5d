"""Errors and warnings contain the words of FSDP1's that PyTorch's tests and scripts match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.fsdp1_parity import FSDP
from support.launcher import run_ranks
from support.messages import check_message
from torch import nn
from torch.distributed.fsdp import LocalStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import _apply_optimizer_in_backward

from fsdp_ext.fsdp1.setup import check_single_device


def layer() -> nn.Module:
    return nn.Linear(2, 2)


def hook(state: object, *gradients: torch.Tensor) -> None:
    pass


class Summons(nn.Module):
    """Summons its own wrapper in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, wrapped: Any) -> None:
        with wrapped.summon_full_params(wrapped):
            pass


def summon_in_forward() -> None:
    model = FSDP(Summons())
    model(model)


def summon_in_backward() -> None:
    model = FSDP(nn.Sequential(layer(), layer()))

    def summon(gradient: torch.Tensor) -> None:
        with FSDP.summon_full_params(model):
            pass

    def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(summon)

    model.module[0].register_forward_hook(watch)
    model(torch.ones(1, 2)).sum().backward()


def hook_twice() -> None:
    model = FSDP(layer())
    model.register_comm_hook(None, hook)
    model.register_comm_hook(None, hook)


def hook_inside() -> None:
    inner = FSDP(layer())
    FSDP(nn.Sequential(inner))
    inner.register_comm_hook(None, hook)


def clip_inside() -> None:
    inner = FSDP(layer())
    FSDP(nn.Sequential(inner))
    inner.clip_grad_norm_(1.0)


def policy_for_wrapped() -> None:
    FSDP(nn.Sequential(FSDP(layer())), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def wrong_config() -> None:
    FSDP.set_state_dict_type(FSDP(layer()), StateDictType.FULL_STATE_DICT, LocalStateDictConfig())


def summon_in_apply() -> None:
    model = FSDP(layer())
    with FSDP.summon_full_params(model):
        model.apply(lambda module: None)


def assert_state() -> None:
    FSDP(layer())._assert_state([TrainingState.FORWARD_BACKWARD])


def optimizer_in_backward() -> None:
    model = FSDP(layer(), use_orig_params=False)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    model(torch.ones(1, 2))


def summon_on_one_rank() -> None:
    with FSDP.summon_full_params(FSDP(layer()), rank0_only=True, writeback=True):
        pass


def init_with_42() -> None:
    with torch.device("meta"):
        module = layer()
    FSDP(module, param_init_fn=42)


def ignore(**options: Any) -> None:
    FSDP(layer(), **options)


def ignore_wrapper() -> None:
    inner = FSDP(layer())
    FSDP(nn.Sequential(inner), ignored_modules=[inner])


def hybrid(**options: Any) -> Any:
    return FSDP(layer(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, **options)


PARAMETER = r"\[<class 'torch.nn.parameter.Parameter'>\]"
DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]
FORWARD_BACKWARD = "Cannot manually unshard parameters during forward/backward"

MESSAGES: list[tuple[type[Exception], str, Callable[[], object]]] = [
    (AssertionError, FORWARD_BACKWARD, summon_in_forward),
    (AssertionError, FORWARD_BACKWARD, summon_in_backward),
    (AssertionError, "Communication hook is not supported for hybrid strategies",
     lambda: hybrid().register_comm_hook(None, hook)),
    (ValueError, "Expected process_group to be passed in",
     lambda: hybrid(process_group=dist.group.WORLD)),
    (RuntimeError, "FSDP only supports single device modules",
     lambda: check_single_device(DEVICES, None)),
    (AssertionError, "^A communication hook is already registered$", hook_twice),
    (AssertionError, "^register_comm_hook can only be called on a root instance.$", hook_inside),
    (ValueError, "expected to be in states", summon_in_apply),
    (ValueError, "expected to be in states .* but current state is", assert_state),
    (ValueError, f"ignored_modules expects nn.Module list elements but got types {PARAMETER}",
     lambda: ignore(ignored_modules=[nn.Parameter(torch.ones(1))])),
    (ValueError, r"ignored_states expects .* list elements but got types \[<class 'int'>\]",
     lambda: ignore(ignored_states=[1])),
    (ValueError, "should not include FSDP modules", ignore_wrapper),
    (NotImplementedError, "is not supported", summon_on_one_rank),
    (RuntimeError, "only supported with use_orig_params=True", optimizer_in_backward),
    (ValueError, "to be callable", init_with_42),
    (RuntimeError, "should only be called on the root FSDP instance", clip_inside),
    (ValueError, "requires modules to not already have FSDP applied but found 0 in",
     policy_for_wrapped),
    (RuntimeError, "Expected state_dict_config of type", wrong_config),
    (UserWarning,
     "FSDP will not all-gather parameters for containers that do not implement forward",
     lambda: FSDP(nn.ModuleList([FSDP(layer())]))),
]  # fmt: skip


def all_messages() -> None:
    for row in MESSAGES:
        check_message(*row)


def test_messages_contain_what_scripts_match_of_fsdp1() -> None:
    run_ranks(all_messages, 2)


def test_modules_on_the_host_and_on_meta_are_on_one_device() -> None:
    check_single_device([torch.device("cpu"), torch.device("meta"), DEVICES[0]], None)
    check_single_device(DEVICES, torch.device("cuda", 0))
