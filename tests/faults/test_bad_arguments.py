"""Each argument of `fully_shard` and its methods that cannot be used raises one clear message.

The tables have wrong types, values out of range, and calls at a wrong time. After refused calls a
model trains bit for bit as its twin, for which nothing was refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import parity
from support.launcher import run_ranks
from support.refusals import (
    BAD_DTYPES,
    HUGE,
    NO_BOOLS,
    NO_COUNTS,
    NO_FUNCTIONS,
    Call,
    Row,
    assert_same,
    check_refused,
    each_of,
    network,
    on,
    sharded,
    state_of_module,
    step,
    with_keyword,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp_ext import fully_shard


@dataclasses.dataclass(frozen=True)
class LaterPolicy(MixedPrecisionPolicy):
    """The policy with a field that PyTorch may get after 2.15."""

    grad_dtype: torch.dtype = torch.float32


# - fully_shard


def with_argument(name: str) -> Callable[[nn.Module, object], object]:
    return lambda model, value: fully_shard(model, **{name: value})


def with_policy(name: str) -> Callable[[nn.Module, object], object]:
    policy: Any = MixedPrecisionPolicy
    return lambda model, value: fully_shard(model, mp_policy=policy(**{name: value}))


def placed(result: object) -> Call:
    return lambda model: fully_shard(model, shard_placement_fn=lambda param: result)  # type: ignore


def of_fully_shard() -> list[Row]:
    arguments: list[tuple[str, type[Exception], str, tuple[object, ...]]] = [
        ("mesh", TypeError, "mesh is {} but must be a DeviceMesh .*init_device_mesh",
         ("x", 2, [], True, "cpu", torch.device("cpu"))),
        ("mp_policy", TypeError, "mp_policy is {} but must be a MixedPrecisionPolicy",
         ("x", None, torch.bfloat16)),
        ("ignored_params", TypeError, "ignored_params is {} but must be a set of parameters",
         (2, 3)),
        ("ignored_params", TypeError, "ignored_params contains a str", ("x", {"weight"})),
        ("ignored_params", TypeError, "ignored_params contains a int", ([3],)),
        ("offload_policy", TypeError, r"offload_policy is {} .*OffloadPolicy\(\)", ("x", 2, True)),
        ("dp_mesh_dims", TypeError, r"dp_mesh_dims is {} .*DataParallelMeshDims\(shard=",
         ("x", 2, True, "dp")),
        ("transport", TypeError, r"transport is {}\. Pass a name", (2, 3, [], True)),
        ("transport", ValueError, "transport is {}, but .*'shared_memory' or 'process_group'",
         ("x", "nccl")),
        ("bucket_bytes", ValueError, "bucket_bytes is {}", NO_COUNTS),
        ("max_message_bytes", ValueError, "max_message_bytes is {}",
         (*NO_COUNTS, (), (8,), (8, 8, 8), (8, -1), [8, 8])),
        ("max_message_bytes", ValueError, "max_message_bytes=1 ", (1,)),
        ("prefetch", ValueError, "prefetch is {}", (*NO_COUNTS, 10**9)),
        ("check_every", ValueError, "check_every is {}", (*NO_COUNTS, 0)),
        ("reshard_after_forward", ValueError, "reshard_after_forward is {}", ("x", "yes", 1.5, [])),
        ("reshard_after_forward", ValueError,
         "reshard_after_forward={} is not a factor of 2, the number of ranks",
         (-2, -1, 0, 3, 8, HUGE)),
        ("shard_placement_fn", TypeError, "placement_fn is {}", NO_FUNCTIONS),
    ]  # fmt: skip
    policies: list[tuple[str, type[Exception], str, tuple[object, ...]]] = [
        ("cast_forward_inputs", TypeError, "cast_forward_inputs=", NO_BOOLS),
        ("output_dtype", ValueError, "output_dtype=", (torch.int32,)),
    ]
    for name in ("param_dtype", "reduce_dtype"):
        no_dtype = f"{name}={{}}, which must be a torch.dtype"
        policies.append((name, ValueError, f"{name}={{}}", BAD_DTYPES))
        policies.append((name, TypeError, no_dtype, ("bf16", 2, float)))
    rows: list[Row] = [
        (ValueError, "shard_placement_fn returned 'x'", placed("x")),
        (ValueError, "shard_placement_fn returned", placed(Shard(1))),
        (ValueError, "shard_placement_fn returned", placed(Shard(-3))),
        (ValueError, "fully_shard got None", lambda model: fully_shard(None)),  # type: ignore
        (ValueError, "got a RecursiveScriptModule, which has no hooks",
         lambda model: fully_shard(torch.jit.script(nn.Linear(2, 2)))),
        (ValueError, r"fully_shard got \[\].* a module or a non-empty list",
         lambda model: fully_shard([])),
        (ValueError, "got a set, whose order differs between ranks. Pass a list",
         lambda model: fully_shard({model[0], model[1]})),  # type: ignore
        (ValueError, r"got a int\. Pass a module or a list of modules",
         lambda model: fully_shard([model, 3])),  # type: ignore
        (ValueError, r"got a int\. Pass a module or a list of modules",
         lambda model: fully_shard([3])),  # type: ignore
        (TypeError, "pin_memory='x'",
         lambda model: fully_shard(model, offload_policy=CPUOffloadPolicy("x"))),  # type: ignore
        (NotImplementedError, "grad_dtype=torch.float32, which is supported for parameters only",
         lambda model: fully_shard(model, mp_policy=LaterPolicy())),
    ]  # fmt: skip
    for table, call in ((arguments, with_argument), (policies, with_policy)):
        for name, kind, words, values in table:
            rows += each_of(kind, words, values, call(name))
    return rows


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

    plain, slotted = nn.Linear(4, 4), Slotted(4, 4)
    before = state_of_module(nn.ModuleList([plain, slotted]))
    with pytest.raises(TypeError, match="Put the module into a plain"):
        fully_shard([plain, slotted])
    assert state_of_module(nn.ModuleList([plain, slotted]))[1:] == before[1:]
    step(fully_shard(plain))


def test_errors_of_sharding_leave_the_modules_as_they_were() -> None:
    run_ranks(errors_after_the_parameters_were_sharded, 2)


# - FSDPModule


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
        rows += each_of(ValueError, f"^{method} got", ("x", [3]), on(method))
        unsharded = f"^{method} got a Sequential that is not sharded"
        rows += each_of(ValueError, unsharded, ([network()],), on(method))
    for method in ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"):
        wrong = ("x", "two", 0, -1, [], float("nan"), float("inf"), 2**2000, True)
        rows += each_of(
            ValueError, r"_divide_factor got {}\. Pass a positive number", wrong, on(method)
        )
    for method in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        rows += each_of(TypeError, f"^{method} got", ("x", None, len), on(method))
    hook = "set_all_reduce_hook"
    buffers = "set_reduce_scatter_max_input_buffers"
    rows += [
        *each_of(ValueError, r"set_reshard_after_forward got {}\. Pass True or False",
                 (None, 2, 1, "x"), on("set_reshard_after_forward")),
        *each_of(TypeError, "got async_op=", NO_BOOLS,
                 with_keyword("finalize_backward", "async_op")),
        *each_of(TypeError, "got", ("x", 2, torch.ones(2, dtype=torch.int32)), on("join_empty")),
        *each_of(TypeError, f"{hook} got {{}}", (*NO_FUNCTIONS, 3), on(hook)),
        *each_of(TypeError, "got stream=", ("x", 2), with_keyword(hook, "stream", print)),
        *each_of(ValueError, "no hook", (torch.cpu.Stream(),), with_keyword(hook, "stream", None)),
        *each_of(TypeError, r"got {}\. Pass a torch.Event", ("x", 1), on("set_post_optim_event")),
        *each_of(TypeError, "got", (torch.ones(1),), on("set_post_optim_event")),
        *each_of(ValueError, r"backend={}\. Pass 'NCCL'", ("x", "NVSHMEM", None, 2),
                 on("set_symm_mem_for_comm")),
        *each_of(TypeError, r"max_input_buffers got {}\. Pass an integer",
                 ("x", None, 1.5, 2.0, True), on(buffers)),
        *each_of(ValueError, r"max_input_buffers got {}\. Pass an integer of 1 or more", (0, -1),
                 on(buffers)),
    ]  # fmt: skip
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
        (
            RuntimeError,
            r"^finalize_backward was called.*Call set_manual_backward_finalization\(True\)",
            lambda model: model.finalize_backward(),
        ),
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
    for false, true in ((0, 1), (0, 2), (numpy.bool_(False), numpy.bool_(True)),
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


def test_results_of_remainders_and_comparisons_are_booleans() -> None:
    run_ranks(booleans_of_other_libraries, 2)


def factors_of_both_systems() -> None:
    gradients: list[list[Tensor]] = []
    for shard in (torch_fully_shard, fully_shard):
        torch.manual_seed(0)
        model: Any = nn.Linear(4, 4)
        shard(model)
        model.set_force_sum_reduction_for_comms(True)
        for factor in (torch.tensor(4.0), None):
            model.set_gradient_divide_factor(factor)
            model(torch.ones(1, 4)).sum().backward()
            gradients.append([param.grad.to_local().clone() for param in model.parameters()])
    for theirs, ours in zip(gradients[:2], gradients[2:], strict=True):
        parity.assert_same("FSDP2", theirs, ours)


def test_a_divide_factor_may_be_a_tensor_or_none_as_in_fsdp2() -> None:
    run_ranks(factors_of_both_systems, 2)


def collections_of_modules() -> None:
    for shard in (torch_fully_shard, fully_shard):
        layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
        for given in (layers.values(), (nn.Linear(4, 4), nn.Linear(4, 4))):
            assert shard(given) is given
            assert all(isinstance(module.weight, DTensor) for module in given)


def test_any_collection_of_modules_is_a_unit_as_in_fsdp2() -> None:
    run_ranks(collections_of_modules, 2)


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
