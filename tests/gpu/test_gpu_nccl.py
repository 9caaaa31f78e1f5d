"""The NCCL transport works by itself, and its errors say what to do."""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import nccl_library
from support.devices import IS_EMULATED
from support.launcher import run_ranks
from support.rank_process import OWN_GPU
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ext import _C, fully_shard
from fsdp_ext.comm.lanes import LAUNCH_ORDER, lanes_of, nccl_libraries


def _forward() -> Any:
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(torch.randn(2, 64, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    return model


def _uses_torchs_library() -> None:
    version, path, *_ = _C.describe_nccl(nccl_libraries())
    assert version == ".".join(map(str, nccl_library.version()))
    with open("/proc/self/maps", encoding="utf-8") as maps:
        loaded = {line.split()[-1] for line in maps if "libnccl.so" in line}
    assert loaded == {os.path.realpath(path)} or loaded == {path}
    model = _forward()
    lanes = lanes_of(model._fsdp_ext_unit.ranks.shard_group, torch.device("cuda", 0))
    assert lanes.transport == "nccl"
    lanes.check()


@pytest.mark.timeout(90)
def test_nccl_is_the_one_that_torch_has_loaded() -> None:
    run_ranks(_uses_torchs_library, 1, timeout=80.0, device="cuda")


def _by_hand() -> None:
    group = dist.group.WORLD
    assert group is not None
    lanes = lanes_of(group, torch.device("cuda", 0))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = torch.full((1000,), float(rank + 1), device="cuda")
    lanes.all_reduce(data)
    assert bool((data == ranks * (ranks + 1) // 2).all())
    gathered = torch.zeros(1000 * ranks, device="cuda")
    lanes.all_gather(data, gathered)
    assert bool((gathered == ranks * (ranks + 1) // 2).all())


@pytest.mark.timeout(90)
@pytest.mark.parametrize("world_size", [1, 2])
def test_collectives_by_hand(world_size: int) -> None:
    run_ranks(_by_hand, world_size, timeout=80.0, device="cuda")


def _without_a_host_of_its_own() -> None:
    for name in ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"):
        os.environ.pop(name, None)
    with pytest.raises(RuntimeError, match=r"Give each rank a GPU of its own"):
        _forward()


@pytest.mark.timeout(90)
def test_two_ranks_on_one_gpu_raise() -> None:
    run_ranks(_without_a_host_of_its_own, 2, timeout=80.0, device="cuda")


def _a_peer_that_does_not_come() -> None:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=5))
    device = torch.device("cuda", 0)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"rank 0 waited 5 s for rank 1 to begin"):
            lanes_of(group, device)
    dist.barrier()


@pytest.mark.timeout(90)
def test_a_rank_that_never_joins_ends_in_an_error() -> None:
    run_ranks(_a_peer_that_does_not_come, 2, timeout=80.0, device="cuda")


def _registration(enabled: str) -> tuple[list[float], int]:
    os.environ["FSDP_EXT_NCCL_REGISTER"] = enabled
    torch.manual_seed(0)
    model = _forward()
    device = torch.device("cuda", torch.cuda.current_device())
    lanes = lanes_of(model._fsdp_ext_unit.ranks.shard_group, device)
    sums = [p.grad._local_tensor.sum().item() for p in model.parameters()]
    return sums, lanes.registered_buffers


@pytest.mark.timeout(150)
def test_registered_buffers_change_no_number() -> None:
    without, registered = (
        run_ranks(_registration, 2, enabled, timeout=70.0, device="cuda") for enabled in ("0", "1")
    )
    assert [count for _, count in without] == [0, 0]
    assert [sums for sums, _ in without] == [sums for sums, _ in registered]
    if not all(count for _, count in registered):
        pytest.skip("NCCL registered nothing over the transport that ranks sharing a GPU have")


# The reductions and the gathers do not fit at the same time.
NEWER = {
    "EMULATED_GPU_NCCL": "2.32.6",
    "EMULATED_GPU_SMS": "3",
    "FSDP_EXT_NCCL_GATHER": "cta_policy=zero",
}


def _in_symmetric_windows() -> tuple[list[float], int]:
    found = _registration("1")
    assert nccl_library.version() == (2, 32, 6)
    assert os.environ[LAUNCH_ORDER] == "1"
    return found


@pytest.mark.skipif(not IS_EMULATED, reason="the version of NCCL can be chosen there alone")
@pytest.mark.timeout(150)
def test_symmetric_windows_change_no_number() -> None:
    without = run_ranks(_registration, 2, "0", timeout=70.0, device="cuda")
    within = run_ranks(_in_symmetric_windows, 2, timeout=70.0, device="cuda", variables=NEWER)
    assert [sums for sums, _ in without] == [sums for sums, _ in within]
    assert all(count > 0 for _, count in within)


# Ranks of one host, with a device each.
ON_ONE_HOST = {
    "EMULATED_GPU_NCCL": "2.28.9",
    "EMULATED_GPU_DEVICES": "2",
    "NCCL_HOSTID": "one",
}


def _on_a_device_of_its_own(registered: str) -> tuple[list[float], int]:
    torch.cuda.set_device(dist.get_rank())
    assert nccl_library.version() == (2, 28, 9)
    return _registration(registered)


# The emulated NCCL refuses symmetric kernels of this version, so what runs in symmetric windows is
# copied.
@pytest.mark.skipif(not IS_EMULATED, reason="the version of NCCL can be chosen there alone")
@pytest.mark.timeout(150)
@pytest.mark.parametrize("policy", ["default", "zero", "auto"])
def test_registered_buffers_of_one_node_change_no_number(policy: str) -> None:
    run = partial(run_ranks, _on_a_device_of_its_own, 2, timeout=70.0, device="cuda")
    without = run("0", variables=ON_ONE_HOST)
    asking = ON_ONE_HOST | {"FSDP_EXT_NCCL_GATHER": f"cta_policy={policy}"}
    registered = run("1", variables=asking)
    assert [sums for sums, _ in without] == [sums for sums, _ in registered]
    assert all(count > 0 for _, count in registered)


def _of_two_nodes() -> list[float]:
    rank = dist.get_rank()
    os.environ["NCCL_HOSTID"] = f"node{rank // 2}"
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    fully_shard(model, mesh=mesh)
    x = torch.full((2, 64), float(rank), device="cuda")
    model(x).sum().backward()
    return [p.grad._local_tensor.sum().item() for p in model.parameters()]


@pytest.mark.skipif(not IS_EMULATED, reason="the version of NCCL can be chosen there alone")
@pytest.mark.timeout(150)
def test_copy_engines_gather_within_each_of_two_nodes_with_replicas() -> None:
    variables = ON_ONE_HOST | {"EMULATED_GPU_DEVICES": "4"}
    copying = variables | {"FSDP_EXT_NCCL_GATHER": "cta_policy=zero"}
    run = partial(run_ranks, _of_two_nodes, 4, timeout=70.0, device="cuda")
    assert run(variables=variables) == run(variables=copying)


def _refused() -> None:
    with pytest.raises(RuntimeError, match=r"NCCL 2\.28\.9 cannot do so between the 2 nodes"):
        _registration("1")


@pytest.mark.skipif(not IS_EMULATED, reason="the version of NCCL can be chosen there alone")
@pytest.mark.timeout(90)
def test_copy_engines_are_refused_between_nodes_before_nccl_2_32_6() -> None:
    variables = {"EMULATED_GPU_NCCL": "2.28.9", "FSDP_EXT_NCCL_GATHER": "cta_policy=zero"}
    run_ranks(_refused, 2, timeout=80.0, device="cuda", variables=variables)


def _with_blocks() -> str:
    os.environ["FSDP_EXT_NCCL_GATHER"] = "max_ctas=2"
    os.environ["FSDP_EXT_NCCL_REDUCE"] = "min_ctas=2"
    model = _forward()
    return str(lanes_of(model._fsdp_ext_unit.ranks.shard_group, torch.device("cuda", 0)).transport)


@pytest.mark.timeout(90)
def test_lanes_may_have_a_least_or_a_most_number_of_thread_blocks() -> None:
    assert run_ranks(_with_blocks, 1, timeout=80.0, device="cuda") == ["nccl"]


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


def _devices_with_access(tensor: torch.Tensor) -> list[int] | None:
    """Return the GPUs that may use the tensor's memory; None if it is not virtual memory."""
    function, status = ctypes.c_void_p(), ctypes.c_int()
    found = ctypes.CDLL("libcudart.so.13").cudaGetDriverEntryPointByVersion(
        b"cuMemGetAccess",
        ctypes.byref(function),
        12000,
        ctypes.c_ulonglong(0),
        ctypes.byref(status),
    )
    assert (found, status.value) == (0, 0)
    get_access = ctypes.CFUNCTYPE(ctypes.c_int, *3 * [ctypes.c_void_p])(function.value or 0)
    devices = []
    for device in range(torch.cuda.device_count()):
        flags, location = ctypes.c_ulonglong(), _Location(1, device)
        address = ctypes.c_void_p(tensor.data_ptr())
        if get_access(ctypes.addressof(flags), ctypes.addressof(location), address) != 0:
            return None
        if flags.value == 3:  # it may read and write
            devices.append(device)
    return devices


def _access_to_buffers(private: bool) -> None:
    model = _forward()
    mine, of_cudart = torch.cuda.current_device(), os.environ.get("NCCL_CUMEM_ENABLE") == "0"
    everywhere = None if of_cudart else list(range(torch.cuda.device_count()))
    assert _devices_with_access(model[0].weight.to_local()) == everywhere
    model[0].unshard()
    assert _devices_with_access(model[0].weight) == ([mine] if private else everywhere)
    model[0].reshard()


@pytest.mark.timeout(90)
@pytest.mark.skipif(torch.version.cuda is None or torch.version.cuda < "13", reason="for CUDA 13")
@pytest.mark.parametrize(
    ("version", "variables"),
    [("2.28.9", {}), ("2.28.9", {"NCCL_CUMEM_ENABLE": "0"}), ("2.32.6", {})],
)
def test_only_users_tensors_and_windows_are_for_all_gpus(
    version: str, variables: dict[str, str]
) -> None:
    if not IS_EMULATED:
        pytest.skip("chooses the version of the emulated NCCL")
    own_gpu = {**OWN_GPU, "EMULATED_GPU_DEVICES": "2", "EMULATED_GPU_NCCL": version}
    private = version == "2.28.9" and not variables
    run_ranks(_access_to_buffers, 2, private, device="cuda", variables={**own_gpu, **variables})
