"""Arguments of plans, links and tools that cannot be used raise one clear message."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.refusals import (
    NO_BOOLS,
    NO_COUNTS,
    NO_FUNCTIONS,
    Row,
    check_refused,
    check_refused_on_twins,
    each_of,
    network,
    sharded,
    step,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_ext
from fsdp_ext import Link, Simulated
from fsdp_ext.comm.link import H100_NODE


def link(name: str) -> Callable[..., object]:
    figures: dict[str, Any] = {"name": "l", "alpha": 1e-6, "beta": 1e9}
    return lambda _, value: Link(**(figures | {name: value}))


def simulated(name: str, **fixed: Any) -> Callable[..., object]:
    arguments: dict[str, Any] = {"world_size": 8, "link": H100_NODE} | fixed
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
        *each_of(ValueError, "Pass how many ranks it connects", (H100_NODE,), link("across")),
        *each_of(TypeError, "one_wire=", NO_BOOLS, link("one_wire")),
        *each_of(ValueError, "ranks=", NO_COUNTS, link("ranks")),
        *each_of(TypeError, "got link={}.*PRESETS", ("x", "100G", None, 2), simulated("link")),
        *each_of(ValueError, "one_wire=True, but simulated .* have a wire each",
                 (dataclasses.replace(H100_NODE, one_wire=True),), simulated("link")),
        *each_of(TypeError, "got replica_link={}", ("x", 2), simulated("replica_link", replicas=2)),
        *each_of(ValueError, "replica_link for a model without replicas", (H100_NODE,),
                 simulated("replica_link")),
        *each_of(ValueError, "at most 8 ranks, and 8 replicas of 8 .* replica_link=", (8,),
                 simulated("replicas", world_size=64)),
        *each_of(ValueError, r"multiprocessors={}\. Pass a number from 0", (-1,),
                 simulated("multiprocessors")),
        *each_of(ValueError, r"got {} replicas of a model on 8 ranks\. Pass a number", (3,),
                 simulated("replicas")),
        *each_of(TypeError, "moves_memory=", NO_BOOLS, simulated("moves_memory")),
        *each_of(ValueError, "replicas", NO_COUNTS, simulated("replicas")),
        *each_of(TypeError, r"plan got {}\. Pass the model", ("x", None, 3), plan("model")),
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
        *each_of(TypeError, "compute with seconds of 0", ({0: (1, 2)},), plan("compute")),
        *each_of(ValueError, "compute", ({"0": 1.0}, {"0": (1, "x")}), plan("compute")),
    ]  # fmt: skip
    for name in ("alpha", "reduce_alpha"):
        words = f"{name}=.*Pass latencies in seconds, 0 or more"
        rows += each_of(ValueError, words, figures, link(name))
    for name in ("beta", "reduce_beta"):
        words = f"{name}=.*Pass positive bandwidths"
        rows += each_of(ValueError, words, (*figures, 0.0, float("inf")), link(name))
    for name in ("world_size", "rank", "multiprocessors"):
        rows += each_of(ValueError, f"{name}={{}}", NO_COUNTS, simulated(name))
    rows += each_of(ValueError, "world_size={}", (0,), simulated("world_size"))
    rows += each_of(ValueError, "rank={}", (8,), simulated("rank"))
    for name in ("bucket_bytes", "max_message_bytes", "prefetch"):
        rows += each_of(ValueError, f"{name} is {{}}", NO_COUNTS, plan(name))
    for name in ("world_size", "optimizer_states"):
        rows += each_of(ValueError, f"got {name}={{}}", NO_COUNTS, plan(name))
    words = r"got memory_limit={}\. Pass a positive"
    rows += each_of(ValueError, words, (*NO_COUNTS, "80GB"), plan("memory_limit"))
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

    any_tool: Any = fsdp_ext
    rows: list[Row] = [
        *each_of(ValueError, r"got steps={}\. Pass from 2 to", (*NO_COUNTS, 1), tune("steps")),
        *each_of(ValueError, "got memory_limit={}", (*NO_COUNTS, 0), tune("memory_limit")),
        *each_of(ValueError, "got optimizer_states={}", NO_COUNTS, tune("optimizer_states")),
        *each_of(TypeError, "got loss={}", (*NO_FUNCTIONS, "mean"), tune("loss")),
        *each_of(TypeError, "verbose=", NO_BOOLS, tune("verbose")),
        *each_of(ValueError, r"got iterations={}\. Keep from 1 to", (*NO_COUNTS, 0), profiled),
        *each_of(TypeError, "path=", (3, []), any_tool.write_flight_record),
        *each_of(TypeError, "got loss={}", (*NO_FUNCTIONS, 3), verify("loss")),
        *each_of(TypeError, "units=", ("x", 2), verify("units")),
        *each_of(TypeError, "mp_policy is", ("x", None), verify("mp_policy")),
        *each_of(TypeError, "transport is", (2, []), verify("transport")),
        *each_of(ValueError, "transport is", ("x",), verify("transport")),
        *each_of(ValueError, "reshard_after_forward", ("x", 3), verify("reshard_after_forward")),
        *each_of(TypeError, "verbose=", NO_BOOLS, verify("verbose")),
        *each_of(TypeError, "offload_optimizer got", ("x", None, []), offload),
        *each_of(TypeError, "is_separable=", ("x", 1.5),
                 lambda model, value: offload(model, sgd(model), is_separable=value)),
        (TypeError, "got a Linear without units",
         lambda _: offload(nn.Linear(2, 2), sgd(nn.Linear(2, 2)))),
        *each_of(TypeError, "share_comm_ctx got", (None, 3),
                 lambda _, value: any_tool.share_comm_ctx(value)),
        *each_of(ValueError, "share_comm_ctx got", ("x", [3]),
                 lambda _, value: any_tool.share_comm_ctx(value)),
        *each_of(TypeError, "method_name=", (None, 3), any_tool.register_fsdp_forward_method),
        *each_of(ValueError, "no method", ("x", "training"), any_tool.register_fsdp_forward_method),
        *each_of(TypeError, "register_fsdp_forward_method got", (None, 3),
                 lambda _, value: any_tool.register_fsdp_forward_method(value, "forward")),
    ]  # fmt: skip
    for name in ("bucket_bytes", "max_message_bytes", "prefetch"):
        rows += each_of(ValueError, f"{name} is {{}}", NO_COUNTS, verify(name))
    for name in ("tune", "profile", "describe_buckets", "health", "write_flight_record"):
        given = (batch,) if name == "tune" else ()
        for other in (None, 3, nn.Linear(2, 2)):
            words = f"{name} got a {type(other).__name__} that fully_shard was not applied to"
            tool = functools.partial(getattr(any_tool, name), other, *given)
            rows.append((TypeError, words, lambda _, tool=tool: tool()))
    return rows


def called_by_rank_0() -> None:
    mesh = DeviceMesh.from_group(dist.new_group(timeout=datetime.timedelta(seconds=1)), "cpu")
    model: Any = fsdp_ext.fully_shard(nn.Linear(8, 8), mesh=mesh)
    model(torch.ones(2, 8)).sum().backward()
    with fsdp_ext.profile(model) as profiled:
        model(torch.ones(2, 8)).sum().backward()
    model.zero_grad()
    if dist.get_rank() == 0:
        for name, call in {
            "tune": lambda: fsdp_ext.tune(model, torch.ones(2, 8)),
            "merge": profiled.merge,
        }.items():
            with pytest.raises(RuntimeError, match=rf"waited 1 s in {name} for ranks \[1\], which"):
                call()
    dist.barrier()
    profiled.merge()


def test_tools_that_only_rank_0_calls_name_the_ranks_that_have_to_call_them() -> None:
    run_ranks(called_by_rank_0, 2, timeout=60.0)


def refused_by_tools() -> None:
    model, twin = sharded(), sharded()
    step(model)
    step(twin)
    check_refused_on_twins(of_tools(), model, twin)


def test_tools_refuse_arguments_and_leave_the_model_as_it_was() -> None:
    run_ranks(refused_by_tools, 2)
