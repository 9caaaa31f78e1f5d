"""Checkpoints of models on meshes of several dimensions, and parts of tensors of any place."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.launcher import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp_ext
from fsdp_ext import checkpoint
from fsdp_ext.checkpoint.boxes import own_boxes, without_others
from fsdp_ext.checkpoint.reading import Reader
from fsdp_ext.checkpoint.tensor_files import Part, TensorFile, Writer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


def one_dimension() -> nn.Module:
    model: nn.Module = fsdp_ext.fully_shard(Net())
    return model


def replicas() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: nn.Module = fsdp_ext.fully_shard(Net(), mesh=mesh)
    return model


def smaller_groups() -> nn.Module:
    model: nn.Module = fsdp_ext.fully_shard(Net(), reshard_after_forward=2)
    return model


def tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model: nn.Module = parallelize_module(Net(), mesh["tp"], plan)
    return fsdp_ext.fully_shard(model, mesh=mesh["shard"])


def tensor_parallel_in_part() -> nn.Module:
    """Return a model whose second layer tensor parallelism leaves whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model: nn.Module = parallelize_module(Net(), mesh["tp"], {"up": ColwiseParallel()})
    return fsdp_ext.fully_shard(model, mesh=mesh["shard"])


def own_mesh_for_experts() -> nn.Module:
    """Return a model whose first layer is spread over pairs of ranks, and then sharded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "experts"))
    model = Net()
    for name, param in list(model.up.named_parameters()):
        spread = distribute_tensor(param.detach(), mesh["experts"], [Shard(0)])
        model.up.register_parameter(name, nn.Parameter(spread))
    fsdp_ext.fully_shard(model.up, mesh=mesh["pairs"])
    whole: nn.Module = fsdp_ext.fully_shard(model.down)
    assert whole is model.down
    return model


def whole() -> nn.Module:
    return Net()


def in_bfloat16() -> nn.Module:
    model: nn.Module = fsdp_ext.fully_shard(Net().bfloat16())
    return model


KINDS: dict[str, Callable[[], nn.Module]] = {
    made.__name__: made
    for made in (
        one_dimension,
        replicas,
        smaller_groups,
        tensor_parallel,
        tensor_parallel_in_part,
        own_mesh_for_experts,
        whole,
    )
}


def with_states(make: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Any]:
    """Return a model, and an optimizer whose states are of the parameters' values."""
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = param.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found: dict[str, Any] = dict(model.state_dict())
    for key, state in optimizer.state_dict()["state"].items():
        found |= {f"{key}/{name}": value for name, value in state.items()}
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in found.items()
    }


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def _exchange(place: Path) -> None:
    states = {}
    for seed, (saver, make) in enumerate(KINDS.items()):
        made = with_states(make, seed)
        states[saver] = state_of(*made)
        path = checkpoint.save(place / saver, *made)
        if dist.get_rank() == 0:
            files = map(TensorFile, path.glob("weights-*.safetensors"))
            of_ranks = [sum(part.nbytes for part in file.parts.values()) for file in files]
            written = sum(of_ranks)
            twice = Net().down if saver == "tensor_parallel_in_part" else nn.Module()
            expected = [*Net().parameters(), *twice.parameters()]
            assert written == 4 * sum(param.numel() for param in expected)
            if saver == "replicas":
                assert max(of_ranks) - min(of_ranks) <= max(param.nbytes for param in expected) // 2
    loads = list(itertools.product(states, KINDS.values()))
    for saver, make in loads:
        made = with_states(make, 100)
        checkpoint.load(place / saver, *made)
        assert_equal(state_of(*made), states[saver])
    narrow, its_optimizer = with_states(in_bfloat16, 100)
    checkpoint.load(place / "whole", narrow, its_optimizer)
    for state in its_optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].dtype == state[key].to_local().dtype == torch.bfloat16
    its_optimizer.step()
    for name, value in narrow.state_dict().items():
        assert torch.equal(value.full_tensor(), states["whole"][name].bfloat16()), name


def test_models_on_any_meshes_exchange_checkpoints(tmp_path: Path) -> None:
    run_ranks(_exchange, 4, tmp_path)


def _reads_its_own_parts(place: Path) -> int:
    """Return how many bytes this rank reads for its shards."""
    model = one_dimension()
    checkpoint.save(place, model)
    counts: list[int] = []
    read = TensorFile.read

    def noted(self: TensorFile, name: str, begin: int, into: memoryview) -> None:
        counts.append(len(into))
        read(self, name, begin, into)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TensorFile, "read", noted)
        checkpoint.load(place, model)
    return sum(counts)


def test_each_rank_reads_its_own_parts(tmp_path: Path) -> None:
    half = sum(param.nbytes for param in Net().parameters()) // 2
    assert run_ranks(_reads_its_own_parts, 2, tmp_path) == [half, half]


def _without_the_other_half(place: Path) -> None:
    """Save with half of the ranks that share the model."""
    model = one_dimension()
    half = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        with pytest.raises((ValueError, checkpoint.OtherRanksError), match=r"of .* elements"):
            checkpoint.save(place, model, process_group=half)
    assert checkpoint.latest(place) is None


def test_ranks_that_lack_a_part_of_the_model_are_told(tmp_path: Path) -> None:
    run_ranks(_without_the_other_half, 4, tmp_path)


def _of_own_experts(place: Path) -> None:
    """Save and export a layer that has other values on each pair of ranks, under the same name."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "pairs"))
    torch.manual_seed(mesh.get_local_rank("experts"))
    model = Net()
    fsdp_ext.fully_shard(model.up, mesh=mesh["pairs"])
    fsdp_ext.fully_shard(model.down)
    with pytest.raises((ValueError, checkpoint.OtherRanksError), match="tensors of one name"):
        checkpoint.save(place, model)
    assert checkpoint.latest(place) is None
    with pytest.raises(ValueError, match=r"ranks 0 and 2 .* tensors of one name, 'up\.weight'"):
        checkpoint.export(model, place / "export")
    assert not (place / "export").exists()


def test_ranks_with_different_tensors_of_one_name_are_told(tmp_path: Path) -> None:
    run_ranks(_of_own_experts, 4, tmp_path)


def _of_other_dtypes(place: Path) -> None:
    """By these sizes alone, no rank would write 'c', and both would write 'd'."""
    dtype = torch.bfloat16 if dist.get_rank() else torch.float32
    sizes = {"a": 1 << 20, "b": 3 << 18, "c": 1 << 20, "d": 1 << 20}
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    model = nn.ParameterDict(tensors | {"a": tensors["a"].to(dtype)})
    with pytest.raises((ValueError, checkpoint.OtherRanksError), match="tensors of one name, 'a'"):
        checkpoint.save(place, model)
    assert checkpoint.latest(place) is None


def test_ranks_with_tensors_of_other_dtypes_are_told(tmp_path: Path) -> None:
    run_ranks(_of_other_dtypes, 2, tmp_path)


def _beside_uneven_experts(place: Path) -> None:
    """One of two replicas has another tensor in front of those that they share."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = nn.ModuleDict({"shared": Net(), f"expert{rank}": nn.Linear(2, 2)})
    if rank == 0:
        model["a"] = nn.Linear(2, 2)
    fsdp_ext.fully_shard(model["shared"], mesh=mesh)
    with torch.no_grad():
        expected = [param.full_tensor().clone() for param in model["shared"].parameters()]
    checkpoint.save(place, model)
    with torch.no_grad():
        for param in model["shared"].parameters():
            param.zero_()
    checkpoint.load(place, model, strict=False)
    assert all(map(torch.equal, map(whole_of, model["shared"].parameters()), expected))


def whole_of(param: Any) -> Tensor:
    whole: Tensor = param.full_tensor()
    return whole


def test_replicas_may_have_other_tensors_beside_shared_ones(tmp_path: Path) -> None:
    run_ranks(_beside_uneven_experts, 2, tmp_path)


def _of_other_shapes(place: Path, name: str) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("experts", "shard"))["shard"]
    model = nn.Module()
    model.layer = fsdp_ext.fully_shard(nn.Linear(2, 2), mesh=mesh)
    if name == "queue":
        model.register_buffer("queue", torch.zeros(3 + rank))
    elif rank == 0:
        model.more = nn.Linear(2, 2)
    with torch.no_grad():
        model.layer.weight.fill_(0.0 if name == "queue" else 1.0 + rank)
        model.layer.bias.zero_()
    with pytest.raises((ValueError, checkpoint.OtherRanksError), match=f"one name, '{name}'"):
        checkpoint.save(place, model)
    assert checkpoint.latest(place) is None


@pytest.mark.parametrize("name", ["queue", "layer.weight"])
def test_other_names_hide_no_difference(tmp_path: Path, name: str) -> None:
    run_ranks(_of_other_shapes, 2, tmp_path, name)


def _without_elements(place: Path) -> None:
    model = nn.Module()
    for name in ("a", "b", "c", "d"):
        rows = 0 if name in "bd" else 3
        model.register_parameter(name, nn.Parameter(torch.ones(rows, 2)))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fsdp_ext.fully_shard(model, mesh=mesh)
    checkpoint.save(place, model)
    checkpoint.load(place, model)


def test_replicas_keep_every_parameter_without_elements(tmp_path: Path) -> None:
    run_ranks(_without_elements, 2, tmp_path)


def test_ranks_share_whole_tensors_by_their_bytes() -> None:
    large = 1 << 18
    sizes = {f"{layer}.{size}": size for layer in range(4) for size in (4, large)}
    tensors = {name: torch.empty(size) for name, size in sizes.items()}
    of_ranks = [without_others(own_boxes(tensors, rank, 2)) for rank in range(2)]
    assert {**of_ranks[0], **of_ranks[1]}.keys() == sizes.keys()
    assert [sum(sizes[name] == large for name in boxes) for boxes in of_ranks] == [2, 2]


# - Boxes


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Return a shape, and where each of its dimensions is cut."""
    shape = draw(st.lists(st.integers(0, 7), min_size=0, max_size=3))
    return shape, [sorted({0, size, *draw(st.sets(st.integers(0, size)))}) for size in shape]


def boxes_of(edges: list[list[int]]) -> list[list[tuple[int, int]]]:
    return [list(box) for box in itertools.product(*(itertools.pairwise(e) for e in edges))]


@settings(max_examples=60, deadline=None)
@given(saved=cuts(), data=st.data(), dtype=st.sampled_from([torch.float32, torch.int8]))
def test_any_box_is_read_from_any_parts(
    tmp_path_factory: pytest.TempPathFactory,
    saved: tuple[list[int], list[list[int]]],
    data: st.DataObject,
    dtype: torch.dtype,
) -> None:
    shape, edges = saved
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    place = tmp_path_factory.mktemp("parts")
    parts = []
    for number, box in enumerate(boxes_of(edges)):
        tensor = whole[tuple(slice(*each) for each in box)].contiguous()
        part = Part(dtype, tuple(tensor.shape), tuple(shape), tuple(begin for begin, _ in box))
        path = place / str(number)
        with contextlib.closing(Writer(path, {"x": part})) as writer:
            writer.write([("x", tensor)])
        file = TensorFile(path)
        parts.append((file, file.parts["x"]))
    wanted = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    into = torch.empty([end - begin for begin, end in wanted], dtype=dtype)
    with Reader() as reader:
        if into.numel():
            reader.add("x", parts, tuple(begin for begin, _ in wanted), into)
    assert torch.equal(into, whole[tuple(slice(*each) for each in wanted)])


def _stages_with_options_of_their_own(place: Path) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "shard"))["shard"]
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(4, 4)})
    fsdp_ext.fully_shard(model[f"stage{rank}"], mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank)
    checkpoint.save(place, model, optimizer)
    optimizer.param_groups[0]["lr"] = 5.0
    checkpoint.load(place, model, optimizer, strict=False)
    assert optimizer.param_groups[0]["lr"] == 0.1 + rank


def _stages_with_rates_that_are_tensors(place: Path) -> None:
    rank = dist.get_rank()
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(4, 4)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5 + rank))
    checkpoint.save(place, model, optimizer)
    params = list(model.parameters())
    rates = [torch.tensor(5.0) for _ in params]
    optimizer = torch.optim.AdamW(
        [{"params": [param], "lr": rate} for param, rate in zip(params, rates, strict=True)]
    )
    checkpoint.load(place, model, optimizer, strict=False)
    for number, group in enumerate(optimizer.param_groups):
        assert group["lr"] == (0.5 + rank) / 2**number
        for other in optimizer.param_groups[number + 1 :]:
            other["lr"].mul_(0.5)  # as schedulers do


def test_each_group_gets_a_rate_of_its_own(tmp_path: Path) -> None:
    run_ranks(_stages_with_rates_that_are_tensors, 2, tmp_path)


def test_pipeline_stages_may_have_options_of_their_own(tmp_path: Path) -> None:
    run_ranks(_stages_with_options_of_their_own, 2, tmp_path)
