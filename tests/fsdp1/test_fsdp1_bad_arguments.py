"""What `FullyShardedDataParallel` and its methods cannot use is refused, and changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from support.launcher import run_ranks
from support.refusals import (
    BAD_DTYPES,
    HUGE,
    NO_COUNTS,
    NO_FUNCTIONS,
    Row,
    check_refused,
    check_refused_on_twins,
    each_of,
    network,
    on,
    state_of_module,
    with_keyword,
)
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, OptimStateKeyType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_ext import FullyShardedDataParallel

BY_LINEAR = ModuleWrapPolicy({nn.Linear})


def wrap(name: str, **fixed: Any) -> Callable[..., object]:
    wrapper: Any = FullyShardedDataParallel
    return lambda model, value: wrapper(model, **fixed, **{name: value})


TYPED = (
    "process_group",
    "sharding_strategy",
    "cpu_offload",
    "backward_prefetch",
    "mixed_precision",
    "ignored_modules",
    "ignored_states",
    "device_mesh",
)


def of_wrapper() -> list[Row]:
    rows: list[Row] = []
    booleans = ("sync_module_states", "forward_prefetch", "limit_all_gathers", "use_orig_params")
    for policy in (None, BY_LINEAR):
        for name in booleans:
            call = wrap(name, auto_wrap_policy=policy)
            rows += each_of(TypeError, f"{name}=", ("x", None, 1.5), call)
        fixed = functools.partial(wrap, auto_wrap_policy=policy)
        for name in TYPED:
            rows += each_of(TypeError, name, (2, True), fixed(name))
        rows += [
            *each_of(ValueError, "check_every is", (*NO_COUNTS, 0), fixed("check_every")),
            *each_of(ValueError, "param_init_fn is", NO_FUNCTIONS, fixed("param_init_fn")),
            *each_of(TypeError, "device_id is", (1.5, [], True), fixed("device_id")),
            *each_of(ValueError, "device_id is", ("x", -1, HUGE), fixed("device_id")),
        ]  # fmt: skip
        for name in ("param_dtype", "reduce_dtype"):
            precisions = [MixedPrecision(**{name: dtype}) for dtype in BAD_DTYPES]  # type: ignore
            rows += each_of(ValueError, f"{name}=", precisions, fixed("mixed_precision"))
        for flag in ("keep_low_precision_grads", "cast_forward_inputs"):
            wrong: Any = MixedPrecision(**{flag: "x"})  # type: ignore
            rows += each_of(TypeError, f"{flag}='x'", (wrong,), fixed("mixed_precision"))
        wrong = MixedPrecision(buffer_dtype=torch.int32)
        rows += each_of(ValueError, "buffer_dtype=", (wrong,), fixed("mixed_precision"))
        wrong = CPUOffload("x")  # type: ignore
        rows += each_of(TypeError, "offload_params='x'", (wrong,), fixed("cpu_offload"))
    rows.append((ValueError, "got a NoneType", lambda _: FullyShardedDataParallel(cast(Any, None))))
    return rows + each_of(TypeError, "auto_wrap_policy", ("x", 2), wrap("auto_wrap_policy"))


def summoned(model: Any, **kwargs: Any) -> None:
    with FullyShardedDataParallel.summon_full_params(model, **kwargs):
        pass


def of_wrapper_methods() -> list[Row]:
    rows: list[Row] = []
    for name in ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads"):
        call = functools.partial(lambda n, model, value: summoned(model, **{n: value}), name)
        rows += each_of(TypeError, f"{name}=", ("x", None, 1.5), call)
    fsdp: Any = FullyShardedDataParallel
    rows += each_of(TypeError, "in place of a model", ("x", None), lambda _, value: summoned(value))
    rows += each_of(
        TypeError, "in place of a model", ("x", 2), lambda _, value: fsdp.fsdp_modules(value)
    )
    rows += [
        *each_of(TypeError, "max_norm=", ("x", None, []), on("clip_grad_norm_")),
        *each_of(TypeError, "norm_type=", ("x", None),
                 with_keyword("clip_grad_norm_", "norm_type", 1.0)),
        *each_of(ValueError, "got norm_type={}", (0, -1),
                 with_keyword("clip_grad_norm_", "norm_type", 1.0)),
        *each_of(ValueError, "register_comm_hook", (3,),
                 with_keyword("register_comm_hook", "hook", None)),
    ]  # fmt: skip
    return rows + of_optimizer_states()


def of_optimizer_states() -> list[Row]:
    """The static methods get another object in place of a model, an optimizer or a state."""
    fsdp: Any = FullyShardedDataParallel
    sgd = torch.optim.SGD(network().parameters(), lr=0.1)
    no_models = (None, "x", {}, sgd)
    no_optimizers = (None, "x", {}, network())
    no_states = ("x", [], {}, sgd, network(), {"state": None})
    ids = OptimStateKeyType.PARAM_ID
    rows: list[Row] = []
    for call in (fsdp.optim_state_dict, fsdp.full_optim_state_dict, fsdp.sharded_optim_state_dict):
        rows += each_of(TypeError, "place of a model", no_models, lambda _, v, f=call: f(v, sgd))
        rows += each_of(TypeError, "place of an optimizer", no_optimizers, call)
    for model, words in ((network(), "has no FullyShardedDataParallel"), (None, "of a model")):
        kind = ValueError if model is not None else TypeError
        optim = torch.optim.SGD(model.parameters(), lr=0.1) if model is not None else sgd
        state = optim.state_dict()
        rows += [
            (kind, words, lambda _, m=model, o=optim: fsdp.full_optim_state_dict(m, o)),
            (kind, words, lambda _, m=model, s=state: fsdp.scatter_full_optim_state_dict(s, m)),
        ]
    for call in (
        lambda model, v: fsdp.optim_state_dict_to_load(model, own(model), v),
        lambda model, v: fsdp.optim_state_dict(model, own(model), v),
        lambda model, v: fsdp.shard_full_optim_state_dict(v, model),
        lambda model, v: fsdp.shard_full_optim_state_dict(v, model, optim=own(model)),
        lambda model, v: fsdp.flatten_sharded_optim_state_dict(v, model, own(model)),
        lambda model, v: fsdp.rekey_optim_state_dict(v, ids, model),
    ):
        rows += each_of(TypeError, "in place of an optimizer's state", no_states, call)
        rows += each_of(TypeError, "state of 0 is of type NoneType", ({"state": {0: None}},), call)
    for call in (
        lambda model, v: fsdp.optim_state_dict_to_load(model, v, own(model).state_dict()),
        lambda model, v: fsdp.flatten_sharded_optim_state_dict(own(model).state_dict(), model, v),
    ):
        rows += each_of(TypeError, "in place of an optimizer", no_optimizers, call)
    rows += each_of(
        TypeError,
        "optim_state_key_type is",
        ("x", None),
        lambda model, v: fsdp.rekey_optim_state_dict(own(model).state_dict(), v, model),
    )
    return rows + each_of(
        TypeError, "state_dict_type is", ("x", None), lambda m, v: fsdp.set_state_dict_type(m, v)
    )


def own(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def refused_by_the_wrapper() -> None:
    for row in of_wrapper():
        model = network()
        before = state_of_module(model)
        check_refused(row, model)
        assert state_of_module(model) == before, row
    model, twin = (
        FullyShardedDataParallel(network(), auto_wrap_policy=BY_LINEAR, use_orig_params=True)
        for _ in range(2)
    )
    check_refused_on_twins(of_wrapper_methods(), model, twin)


def test_the_wrapper_refuses_arguments_and_changes_nothing() -> None:
    run_ranks(refused_by_the_wrapper, 2)
