"""Each public argument that cannot be used raises one clear message, and changes nothing.

The tables have wrong types, values out of range, and calls at a wrong time. After refused calls a
model trains bit for bit as its twin, for which nothing was refused.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.messages import check_message
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OptimStateKeyType,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard

import fsdp_ext
from fsdp_ext import FullyShardedDataParallel, Link, Simulated, fully_shard
from fsdp_ext.comm.link import H100_NODE

HUGE = 2**70
NO_BOOLS = ("x", None, 2, -1, 1.5, [], torch.ones(2))
NO_COUNTS = ("x", -1, 1.5, [], True, HUGE)
NO_FUNCTIONS = ("x", 2, [])
BAD_DTYPES = (torch.int32, torch.bool, torch.float8_e4m3fn, torch.complex64)
# A message ends by saying what to do.
ADVICE = re.compile(
    r"\b(Pass|Leave|Call|Make|Choose|Keep|Shard|Run|Take|Replace|Return|Put|Use|Did you)\b"
)

Call = Callable[[Any], object]


@dataclasses.dataclass(frozen=True)
class LaterPolicy(MixedPrecisionPolicy):
    """The policy with a field that PyTorch may get after 2.15."""

    grad_dtype: torch.dtype = torch.float32


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
    """Return a row for each value, with which ``call`` is called after its target."""

    def row(value: object) -> Row:
        return kind, words, lambda target: call(target, value)

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


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def assert_same(model: nn.Module, twin: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(local(ours.detach()), local(theirs.detach()))


# - fully_shard


def with_argument(name: str) -> Callable[[nn.Module, object], object]:
    return lambda model, value: fully_shard(model, **{name: value})


def with_policy(name: str) -> Callable[[nn.Module, object], object]:
    policy: Any = MixedPrecisionPolicy
    return lambda model, value: fully_shard(model, mp_policy=policy(**{name: value}))


def placed(result: object) -> Call:
    return lambda model: fully_shard(model, shard_placement_fn=lambda param: result)  # type: ignore


def of_fully_shard() -> list[Row]:
    row = [
        each_of(TypeError, "mesh is", ("x", 2, [], True), with_argument("mesh")),
        each_of(TypeError, "mp_policy is", ("x", None, torch.bfloat16), with_argument("mp_policy")),
        each_of(TypeError, "ignored_params", ("x", 2, [3]), with_argument("ignored_params")),
        each_of(TypeError, "offload_policy is", ("x", 2, True), with_argument("offload_policy")),
        each_of(TypeError, "dp_mesh_dims is", ("x", 2, True), with_argument("dp_mesh_dims")),
        each_of(TypeError, "transport is", (2, [], True), with_argument("transport")),
        each_of(ValueError, "transport is", ("x", "nccl"), with_argument("transport")),
        each_of(ValueError, "bucket_bytes is", NO_COUNTS, with_argument("bucket_bytes")),
        each_of(ValueError, "max_message_bytes is", NO_COUNTS, with_argument("max_message_bytes")),
        each_of(ValueError, "max_message_bytes=1 ", (1,), with_argument("max_message_bytes")),
        each_of(ValueError, "prefetch is", (*NO_COUNTS, 10**9), with_argument("prefetch")),
        each_of(ValueError, "check_every is", (*NO_COUNTS, 0), with_argument("check_every")),
        each_of(
            ValueError,
            "reshard_after_forward",
            ("x", 1.5, [], -1, 3, HUGE),
            with_argument("reshard_after_forward"),
        ),
        each_of(TypeError, "placement_fn is", NO_FUNCTIONS, with_argument("shard_placement_fn")),
        each_of(TypeError, "cast_forward_inputs=", NO_BOOLS, with_policy("cast_forward_inputs")),
        each_of(ValueError, "output_dtype=", (torch.int32,), with_policy("output_dtype")),
        [
            (ValueError, "shard_placement_fn returned 'x'", placed("x")),
            (ValueError, "shard_placement_fn returned", placed(Shard(1))),
            (ValueError, "shard_placement_fn returned", placed(Shard(-3))),
            (ValueError, r"fully_shard got None", lambda model: fully_shard(None)),  # type: ignore
            (ValueError, r"fully_shard got \[\]", lambda model: fully_shard([])),
            (ValueError, r"got a int", lambda model: fully_shard([model, 3])),  # type: ignore
            (
                TypeError,
                "pin_memory='x'",
                lambda model: fully_shard(model, offload_policy=CPUOffloadPolicy("x")),  # type: ignore
            ),
            (
                NotImplementedError,
                "grad_dtype=torch.float32, which is supported for parameters only",
                lambda model: fully_shard(model, mp_policy=LaterPolicy()),
            ),
        ],
    ]
    for name in ("param_dtype", "reduce_dtype"):
        row += [
            each_of(ValueError, f"{name}=torch", BAD_DTYPES, with_policy(name)),
            each_of(TypeError, f"{name}=", ("bf16", 2, float), with_policy(name)),
        ]
    return [r for rows in row for r in rows]


def state_of_module(model: nn.Module) -> list[object]:
    """Return what ``fully_shard`` changes in a module."""
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


def refused_by_fully_shard() -> None:
    twin = sharded()
    step(twin)
    rows = of_fully_shard()
    model = network()
    for number, row in enumerate(rows):
        before = state_of_module(model)
        check_refused(row, model)
        assert state_of_module(model) == before, row
        if number % 12 == 11 or number == len(rows) - 1:  # a first step takes a while
            fully_shard(model[0])
            fully_shard(model)
            step(model)
            assert_same(model, twin)
            model = network()


def test_fully_shard_refuses_arguments_and_leaves_the_module_as_it_was() -> None:
    run_ranks(refused_by_fully_shard, 2)


class Slotted(nn.Linear):
    """Python cannot change the class of its objects to one without these slots."""

    __slots__ = ("extra",)

    @property
    def __class__(self) -> Any:
        return Slotted

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("the class of a Slotted is fixed")


def errors_after_the_parameters_were_sharded() -> None:
    """Errors after shards were made leave the modules as they were, too."""

    def check(error: type[Exception], words: str, model: Any, *args: Any) -> None:
        before = state_of_module(nn.ModuleList([model] if not args else list(args)))
        with pytest.raises(error, match=words):
            fully_shard(list(args) or model)
        assert state_of_module(nn.ModuleList([model] if not args else list(args)))[1:] == before[1:]

    half = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    check(RuntimeError, "to_empty", half)
    half[1].to_empty(device="cpu")
    nn.init.ones_(half[1].weight)
    nn.init.ones_(half[1].bias)
    fully_shard(half)
    step(half)
    plain = nn.Linear(4, 4)
    check(TypeError, "Put the module into a plain", plain, plain, Slotted(4, 4))
    step(fully_shard(plain))


def test_errors_of_sharding_leave_the_modules_as_they_were() -> None:
    run_ranks(errors_after_the_parameters_were_sharded, 2)


# - FSDPModule


def on(method: str, **fixed: Any) -> Callable[..., object]:
    """Return a function that calls a method with its last argument as the first one."""
    return lambda model, value: getattr(model, method)(value, **fixed)


def with_keyword(method: str, keyword: str, *args: Any) -> Callable[..., object]:
    return lambda model, value: getattr(model, method)(*args, **{keyword: value})


class OwnCollective:
    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.empty(*args, **kwargs)

    def __call__(self, **kwargs: Any) -> None:
        raise AssertionError("the call should have been refused")


def of_methods() -> list[Row]:
    rows: list[Row] = []
    for method in (
        "unshard",
        "set_is_last_backward",
        "set_manual_backward_finalization",
        "set_requires_gradient_sync",
        "set_requires_all_reduce",
        "set_reduce_scatter_unused_params",
        "set_reshard_after_backward",
        "set_unshard_in_backward",
        "set_force_sum_reduction_for_comms",
        "set_separate_reduce_scatter_group",
        "set_allocate_memory_from_process_group_for_comm",
    ):
        rows += each_of(TypeError, f"^{method} got", NO_BOOLS, on(method))
    for method, valid in (
        ("set_requires_gradient_sync", True),
        ("set_requires_all_reduce", True),
        ("set_reduce_scatter_unused_params", False),
        ("set_reshard_after_backward", True),
        ("set_reshard_after_forward", True),
        ("set_separate_reduce_scatter_group", True),
        ("set_reduce_scatter_max_input_buffers", 1),
    ):
        call = with_keyword(method, "recurse", valid)
        rows += each_of(TypeError, f"^{method} got recurse=", NO_BOOLS, call)
    prefetches = ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch")
    for method in prefetches:
        rows += each_of(TypeError, f"^{method} got", (None, 2, 1.5, network()), on(method))
        rows += each_of(ValueError, f"^{method} got", ("x", [3], [network()]), on(method))
    for method in ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"):
        wrong = ("x", None, 0, -1, [], float("nan"), float("inf"), 2**2000, True)
        rows += each_of(ValueError, "_divide_factor got", wrong, on(method))
    for method in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        rows += each_of(TypeError, f"^{method} got", ("x", None, len), on(method))
    hook = "set_all_reduce_hook"
    buffers = "set_reduce_scatter_max_input_buffers"
    rows += [
        *each_of(ValueError, "got", (None, 2, 1, "x"), on("set_reshard_after_forward")),
        *each_of(
            TypeError, "got async_op=", NO_BOOLS, with_keyword("finalize_backward", "async_op")
        ),
        *each_of(TypeError, "got", ("x", 2, torch.ones(2, dtype=torch.int32)), on("join_empty")),
        *each_of(TypeError, "got", NO_FUNCTIONS, on(hook)),
        *each_of(TypeError, "got stream=", ("x", 2), with_keyword(hook, "stream", print)),
        *each_of(ValueError, "no hook", (torch.cpu.Stream(),), with_keyword(hook, "stream", None)),
        *each_of(TypeError, "got", ("x", 1, torch.ones(1)), on("set_post_optim_event")),
        *each_of(ValueError, "backend=", ("x", None, 2), on("set_symm_mem_for_comm")),
        *each_of(TypeError, "got", ("x", None, 1.5, True), on(buffers)),
        *each_of(ValueError, "got", (0, -1), on(buffers)),
        # At a wrong time.
        (RuntimeError, "^finalize_backward was called", lambda model: model.finalize_backward()),
    ]
    return rows


def of_running_models() -> list[Row]:
    other = sharded()
    return [
        *[
            (
                ValueError,
                "is not in FSDPSequential",
                lambda model, m=method: getattr(model, m)([other]),
            )
            for method in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch")
        ],
        (RuntimeError, "^reset_iter_state was called", lambda model: model[0].reset_iter_state()),
        (RuntimeError, "join_empty", lambda model: model[0].join_empty(torch.ones(1))),
    ]


def refused_by_methods() -> None:
    for has_run in (False, True):
        model, twin = sharded(), sharded()
        rows = of_methods()
        if has_run:
            step(model)
            step(twin)
            rows += of_running_models()
        for number, row in enumerate(rows):
            check_refused(row, model)
            if has_run and (number % 3 == 0 or number == len(rows) - 1):
                step(model)
                step(twin)
                assert_same(model, twin)
        for _ in range(2):
            step(model)
            step(twin)
        assert_same(model, twin)


def test_methods_refuse_arguments_before_and_after_the_first_forward() -> None:
    run_ranks(refused_by_methods, 2)


def booleans_of_other_libraries() -> None:
    numpy = pytest.importorskip("numpy")
    model, twin = sharded(), sharded()
    step(model)
    step(twin)
    for false, true in ((0, 1), (numpy.bool_(False), numpy.bool_(True)),
                        (torch.tensor(False), torch.tensor(True))):  # fmt: skip
        model.set_requires_gradient_sync(false)
        model(torch.ones(1, 4)).sum().backward()
        assert all(param.grad is None for param in model.parameters())
        model.set_requires_gradient_sync(true)
        twin.set_requires_gradient_sync(False)
        twin(torch.ones(1, 4)).sum().backward()
        twin.set_requires_gradient_sync(True)
        step(model)
        step(twin)
        assert_same(model, twin)


def test_results_of_comparisons_are_booleans() -> None:
    run_ranks(booleans_of_other_libraries, 2)


def beside_fsdp2() -> None:
    """Calls that FSDP2 refuses, too: by the same type, with its words."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    for shard in (torch_fully_shard, fully_shard):
        model: Any = network()
        shard(model)
        model.set_custom_all_gather(OwnCollective())
        for enable in (True, False):
            with pytest.raises(AssertionError, match="when all gather comm is custom: "):
                model.set_allocate_memory_from_process_group_for_comm(enable)
        if hasattr(model, "set_symm_mem_for_comm"):  # torch 2.11's FSDP2 has none
            with pytest.raises(AssertionError, match="when all gather comm is custom: "):
                model.set_symm_mem_for_comm()
        model = network()
        shard(model)
        model.set_custom_reduce_scatter(OwnCollective())
        with pytest.raises(AssertionError, match="when reduce scatter comm is custom: "):
            model.set_allocate_memory_from_process_group_for_comm(True)
        hybrid: Any = network()
        shard(hybrid, mesh=mesh)
        with pytest.raises(ValueError, match="stream"):
            hybrid.set_all_reduce_hook(print, stream=torch.cpu.Stream())


def test_calls_that_fsdp2_refuses_are_refused() -> None:
    run_ranks(beside_fsdp2, 2)


# - FullyShardedDataParallel

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
            rows += each_of(TypeError, f"{name}=", ("x", None, 2), call)
        fixed = functools.partial(wrap, auto_wrap_policy=policy)
        for name in TYPED:
            rows += each_of(TypeError, name, (2, True), fixed(name))
        rows += [
            *each_of(ValueError, "check_every is", (*NO_COUNTS, 0), fixed("check_every")),
            *each_of(ValueError, "param_init_fn is", NO_FUNCTIONS, fixed("param_init_fn")),
            *each_of(TypeError, "device_id is", (1.5, [], True), fixed("device_id")),
            *each_of(ValueError, "device_id is", ("x", -1, HUGE), fixed("device_id")),
        ]
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
    return rows + each_of(TypeError, "auto_wrap_policy", ("x", 2), wrap("auto_wrap_policy"))


def summoned(model: Any, **kwargs: Any) -> None:
    with FullyShardedDataParallel.summon_full_params(model, **kwargs):
        pass


def of_wrapper_methods() -> list[Row]:
    rows: list[Row] = []
    for name in ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads"):
        call = functools.partial(lambda n, model, value: summoned(model, **{n: value}), name)
        rows += each_of(TypeError, f"{name}=", ("x", None, 2), call)
    fsdp: Any = FullyShardedDataParallel
    rows += each_of(TypeError, "in place of a model", ("x", None), lambda _, value: summoned(value))
    rows += each_of(
        TypeError, "in place of a model", ("x", 2), lambda _, value: fsdp.fsdp_modules(value)
    )
    rows += [
        *each_of(TypeError, "max_norm=", ("x", None, []), on("clip_grad_norm_")),
        *each_of(
            TypeError, "norm_type=", ("x", None), with_keyword("clip_grad_norm_", "norm_type", 1.0)
        ),
        *each_of(
            ValueError, "norm_type=", (0, -1), with_keyword("clip_grad_norm_", "norm_type", 1.0)
        ),
        *each_of(
            ValueError, "register_comm_hook", (3,), with_keyword("register_comm_hook", "hook", None)
        ),
    ]
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
    for row in of_wrapper_methods():
        check_refused(row, model)
        step(model)
        step(twin)
        assert_same(model, twin)


def test_the_wrapper_refuses_arguments_and_changes_nothing() -> None:
    run_ranks(refused_by_the_wrapper, 2)


# - What plans, measures and checks


def link(name: str) -> Callable[..., object]:
    figures: dict[str, Any] = {"name": "l", "alpha": 1e-6, "beta": 1e9}
    return lambda _, value: Link(**(figures | {name: value}))


def simulated(name: str) -> Callable[..., object]:
    arguments: dict[str, Any] = {"world_size": 8, "link": H100_NODE}
    return lambda _, value: Simulated(**(arguments | {name: value}))


def plan(name: str, **fixed: Any) -> Callable[..., object]:
    arguments: dict[str, Any] = {"world_size": 8, "units": nn.Linear} | fixed
    return lambda _, value: fsdp_ext.plan(
        network() if name != "model" else value,
        **(arguments | ({} if name == "model" else {name: value})),
    )


def of_plans() -> list[Row]:
    figures = ("x", -1, float("nan"), [], True, 2**2000)
    timed = functools.partial(plan, batch=torch.ones(2, 4), flops_per_second=1e9)
    rows: list[Row] = [
        *each_of(TypeError, "name=", (3, None), link("name")),
        *each_of(TypeError, "across=", ("x", 2), link("across")),
        *each_of(TypeError, "one_wire=", NO_BOOLS, link("one_wire")),
        *each_of(ValueError, "ranks=", NO_COUNTS, link("ranks")),
        *each_of(TypeError, "link=", ("x", None, 2), simulated("link")),
        *each_of(TypeError, "replica_link=", ("x", 2), simulated("replica_link")),
        *each_of(TypeError, "moves_memory=", NO_BOOLS, simulated("moves_memory")),
        *each_of(ValueError, "replicas", (*NO_COUNTS, 3), simulated("replicas")),
        *each_of(TypeError, "plan got", ("x", None), plan("model")),
        *each_of(TypeError, "mp_policy is", ("x", []), plan("mp_policy")),
        *each_of(TypeError, "units=", ("x", 2), plan("units")),
        *each_of(TypeError, "transport is", (2, []), plan("transport")),
        *each_of(ValueError, "device_type=", ("x", [], 2), plan("device_type")),
        *each_of(ValueError, "link=", ("x", 2), plan("link")),
        *each_of(ValueError, "replicas", (*NO_COUNTS, 3), plan("replicas")),
        *each_of(ValueError, "reshard_after_forward", ("x", 3), plan("reshard_after_forward")),
        *each_of(TypeError, "offload_policy is", ("x", True), plan("offload_policy")),
        *each_of(ValueError, "flops_per_second=", figures, timed("flops_per_second")),
        *each_of(ValueError, "contention=", (*figures, None), timed("contention")),
        *each_of(ValueError, "copies=", (*figures, None, (1.0,), (-1, 0)), timed("copies")),
        *each_of(TypeError, "compute=", ("x", 2, []), plan("compute")),
        *each_of(ValueError, "compute", ({"0": 1.0}, {"0": (1, "x")}), plan("compute")),
    ]
    for name in ("alpha", "beta", "reduce_alpha", "reduce_beta", "jitter"):
        rows += each_of(ValueError, f"{name}=", figures, link(name))
    for name in ("world_size", "rank", "multiprocessors", "seed"):
        rows += each_of(ValueError, f"{name}=", NO_COUNTS, simulated(name))
    for name in ("bucket_bytes", "max_message_bytes", "prefetch"):
        rows += each_of(ValueError, f"{name} is", NO_COUNTS, plan(name))
    for name in ("world_size", "optimizer_states", "memory_limit"):
        rows += each_of(ValueError, f"{name}=", NO_COUNTS, plan(name))
    return rows


def test_plans_and_links_refuse_arguments() -> None:
    for row in of_plans():
        check_refused(row, None)


def of_tools() -> list[Row]:
    """Return calls on a model that has run forward."""
    batch = torch.ones(2, 4)

    def tune(name: str) -> Callable[..., object]:
        return lambda model, value: fsdp_ext.tune(model, batch, **{name: value})

    def verify(name: str) -> Callable[..., object]:
        tool: Any = fsdp_ext.verify
        return lambda _, value: tool(network(), batch, **({"verbose": False} | {name: value}))

    def offload(model: Any, optimizer: Any, **kwargs: Any) -> None:
        fsdp_ext.offload_optimizer(optimizer, model, **kwargs)

    def sgd(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def profiled(model: Any, value: object) -> None:
        with fsdp_ext.profile(model, value):  # type: ignore
            pass

    others = (None, 3, nn.Linear(2, 2))
    any_tool: Any = fsdp_ext
    rows: list[Row] = [
        *each_of(ValueError, "steps=", (*NO_COUNTS, 1), tune("steps")),
        *each_of(ValueError, "memory_limit=", NO_COUNTS, tune("memory_limit")),
        *each_of(ValueError, "optimizer_states=", NO_COUNTS, tune("optimizer_states")),
        *each_of(TypeError, "loss=", NO_FUNCTIONS, tune("loss")),
        *each_of(TypeError, "verbose=", NO_BOOLS, tune("verbose")),
        *each_of(TypeError, "tune got", others, lambda _, value: any_tool.tune(value, batch)),
        *each_of(ValueError, "iterations=", (*NO_COUNTS, 0), profiled),
        *each_of(TypeError, "profile got", others, lambda _, value: any_tool.profile(value)),
        *each_of(TypeError, "got", others, lambda _, value: any_tool.describe_buckets(value)),
        *each_of(TypeError, "got", others, lambda _, value: any_tool.health(value)),
        *each_of(TypeError, "got", others, lambda _, value: any_tool.write_flight_record(value)),
        *each_of(TypeError, "path=", (3, []), any_tool.write_flight_record),
        *each_of(TypeError, "loss=", NO_FUNCTIONS, verify("loss")),
        *each_of(TypeError, "units=", ("x", 2), verify("units")),
        *each_of(TypeError, "mp_policy is", ("x", None), verify("mp_policy")),
        *each_of(TypeError, "transport is", (2, []), verify("transport")),
        *each_of(ValueError, "transport is", ("x",), verify("transport")),
        *each_of(ValueError, "reshard_after_forward", ("x", 3), verify("reshard_after_forward")),
        *each_of(ValueError, "ranks=", NO_COUNTS, verify("ranks")),
        *each_of(TypeError, "verbose=", NO_BOOLS, verify("verbose")),
        *each_of(TypeError, "offload_optimizer got", ("x", None, []), offload),
        *each_of(
            TypeError,
            "is_separable=",
            ("x", 2),
            lambda model, value: offload(model, sgd(model), is_separable=value),
        ),
        (TypeError, "without units", lambda _: offload(nn.Linear(2, 2), sgd(nn.Linear(2, 2)))),
        *each_of(
            TypeError, "share_comm_ctx got", (None, 3), lambda _, v: any_tool.share_comm_ctx(v)
        ),
        *each_of(
            ValueError, "share_comm_ctx got", ("x", [3]), lambda _, v: any_tool.share_comm_ctx(v)
        ),
        *each_of(TypeError, "method_name=", (None, 3), any_tool.register_fsdp_forward_method),
        *each_of(ValueError, "no method", ("x", "training"), any_tool.register_fsdp_forward_method),
        *each_of(
            TypeError,
            "register_fsdp_forward_method got",
            (None, 3),
            lambda _, value: any_tool.register_fsdp_forward_method(value, "forward"),
        ),
    ]
    for name in ("bucket_bytes", "max_message_bytes", "prefetch"):
        rows += each_of(ValueError, f"{name} is", NO_COUNTS, verify(name))
    return rows


def refused_by_tools() -> None:
    model, twin = sharded(), sharded()
    step(model)
    step(twin)
    for row in of_tools():
        check_refused(row, model)
        step(model)
        step(twin)
        assert_same(model, twin)


def test_tools_refuse_arguments_and_leave_the_model_as_it_was() -> None:
    run_ranks(refused_by_tools, 2)
