"""Each mistake of a user gets a sentence: what was given, what is needed, what to do."""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import os
import re
import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.launcher import RanksFailed, run_ranks
from support.stacks import TRANSPORTS
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_ext import FullyShardedDataParallel, _build_info, fully_shard
from fsdp_ext.sharding.api.arguments import check_device_type
from fsdp_ext.sharding.root.agreement import _is_out_of_memory
from fsdp_ext.sharding.root.root import Root
from fsdp_ext.sharding.root.unit import Unit


def raises(error: type[Exception], *words: str) -> Any:
    """Expect `error` with all of `words` in its message, in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(words))


class WithParameter(nn.Module):
    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_sharding_needs_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for shard in (fully_shard, torch_fully_shard):
        with raises(ValueError, "RANK expected, but not set"):
            shard(nn.Linear(2, 2))
    with raises(ValueError, "could not make one", "RANK", "torchrun", "init_process_group"):
        fully_shard(nn.Linear(2, 2))
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    with raises(RuntimeError, "needs an initialised process group", "init_process_group"):
        fully_shard(nn.Linear(2, 2), mesh=mesh)


class Sum(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


@contextlib.contextmanager
def _room_for(more: int) -> Iterator[None]:
    """Let this process have only so many more bytes of memory."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _too_little_memory() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(Sum(1))(torch.ones(1)).sum().backward()  # makes the lanes and autograd's threads
    model: Any = fully_shard(Sum(1 << 25), mp_policy=policy)
    # There is room for a flat gradient of 128 MiB, but not for another slot of 64 MiB.
    with _room_for(160 << 20), raises(torch.OutOfMemoryError, "has too little memory to allocate"):
        model(torch.ones(1))
    with _room_for(16 << 20), pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 26)
    assert _is_out_of_memory(of_torch.value)
    model.set_requires_gradient_sync(False)
    loss = model(torch.ones(1)).sum()
    # There is room for a gradient of 64 MiB, but not for an accumulated one of 128 MiB.
    with _room_for(120 << 20), raises(torch.OutOfMemoryError, "has too little memory to allocate"):
        loss.backward()


def test_too_little_memory_is_pytorchs_error() -> None:
    run_ranks(_too_little_memory, 1, fresh=True)


def _default_group() -> None:
    dist.destroy_process_group()
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    model = nn.Linear(2, 2)
    fully_shard(model)
    model(torch.ones(1, 2)).sum().backward()
    assert dist.get_world_size() == 1
    assert model.weight.grad is not None


def test_without_a_process_group_the_environment_describes_one() -> None:
    run_ranks(_default_group, 1, fresh=True)


def reset_below_the_root() -> None:
    for shard in (torch_fully_shard, fully_shard):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        shard(model[0])
        shard(model)
        model(torch.ones(2, 4)).sum().backward()
        if shard is fully_shard or hasattr(FSDPModule, "reset_iter_state"):
            model.reset_iter_state()
            with pytest.raises(RuntimeError, match=r"reset_iter_state.* on the root"):
                model[0].reset_iter_state()


def test_only_roots_reset_their_iteration_as_under_fsdp2() -> None:
    run_ranks(reset_below_the_root, 2)


def _meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with raises(ValueError, r"FULL_SHARD got a 2-D mesh \(2, 2\)", "HYBRID_SHARD"):
        FullyShardedDataParallel(nn.Linear(2, 2), device_mesh=mesh)
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    with raises(ValueError, r"3-D mesh \(2, 2, 1\)", r'mesh\["a"\]'):
        fully_shard(nn.Linear(2, 2), mesh=cube)
    elsewhere = DeviceMesh("meta", torch.arange(4), _init_backend=False)
    with raises(ValueError, "device type 'meta'", "supports 'cuda' and 'cpu'", "init_device_mesh"):
        fully_shard(nn.Linear(2, 2), mesh=elsewhere)
    if dist.get_rank() == 0:
        others = DeviceMesh("cpu", [1], _init_backend=False)
        with raises(ValueError, r"rank 0 is not in the mesh of ranks \[1\]"):
            fully_shard(nn.Linear(2, 2), mesh=others)
    # One dimension of a mesh is fine.
    fully_shard(nn.Linear(4, 4), mesh=mesh["shard"])


def test_a_mesh_of_the_wrong_dimension_or_device_is_refused() -> None:
    run_ranks(_meshes, 4)


def modules() -> None:
    layer = nn.Linear(2, 2)
    fully_shard(layer)
    with raises(ValueError, "Linear that is sharded already", "module once. To shard it again"):
        fully_shard(layer)
    fully_shard(checkpoint_wrapper(layer))  # the wrapper itself is not sharded
    theirs = nn.Linear(2, 2)
    torch_fully_shard(theirs)
    with raises(ValueError, "PyTorch's own FSDP", "Use one of the two"):
        fully_shard(theirs)
    with raises(ValueError, "not implement forward, and got a ModuleList", "its elements"):
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]))


def _parameters() -> None:
    with raises(ValueError, "'scale' is a scalar", "1D tensor"):
        fully_shard(WithParameter(torch.tensor(1.0)))
    with raises(ValueError, "'scale' is torch.complex64", "view_as_complex"):
        fully_shard(WithParameter(torch.ones(3, dtype=torch.complex64)))
    for collection in (set, list, iter):  # PyTorch's takes iterators, too
        layer = nn.Linear(2, 2)
        fully_shard(layer, ignored_params=collection([layer.bias]))  # type: ignore[arg-type]
        assert type(layer.bias) is nn.Parameter
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    fully_shard(tied[0])
    with raises(ValueError, "'1.weight' is also 'weight' of Linear", "one unit"):
        fully_shard(tied)


def test_parameters_that_cannot_be_sharded_are_refused() -> None:
    run_ranks(_parameters, 2)


def one_parameter_in_two_units() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    fully_shard(model["embed"])
    with raises(ValueError, "'weight' is also 'weight' of Embedding", r"fully_shard\(\[a, b"):
        fully_shard(model["head"])


def _frozen_of_another_dtype() -> None:
    frozen = WithParameter(torch.ones(4))
    frozen.table = nn.Parameter(torch.arange(10, dtype=torch.int8), requires_grad=False)
    fully_shard(frozen)
    frozen(torch.ones(4)).sum().backward()
    frozen.unshard()
    assert torch.equal(frozen.table, torch.arange(10, dtype=torch.int8))


def test_frozen_parameters_of_another_dtype_keep_it() -> None:
    run_ranks(_frozen_of_another_dtype, 2)


def the_root_before_its_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model)
    with raises(ValueError, "'weight' is in the unit of Sequential", "on the layers first"):
        fully_shard(model[0])


def layers_that_share_a_submodule() -> None:
    shared = nn.Linear(4, 4)
    layers = [nn.Sequential(nn.Linear(4, 4), shared) for _ in range(2)]
    fully_shard(layers[0])
    with raises(ValueError, r"'1\.weight' is in the unit of Sequential", r"fully_shard\(\[a, b"):
        fully_shard(layers[1])


class WithOwnMethod(nn.Linear):
    def flat_shard(self) -> None: ...


def a_method_that_would_be_hidden() -> None:
    model = nn.Sequential(nn.Linear(4, 4), WithOwnMethod(4, 4))
    with raises(ValueError, r"a WithOwnMethod.*\['flat_shard'\] would be hidden", "Rename"):
        fully_shard([model[0], model[1]])
    fully_shard(model)(torch.ones(2, 4)).sum().backward()


def parameters_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    with raises(RuntimeError, "still on meta device", "1.weight", "to_empty"):
        model(torch.ones(2, 4))
    # Do what the message says.
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    model(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    fully_shard(mixed)
    with raises(RuntimeError, r"has parameters on \['cpu', 'meta'\]", "1.weight", "to_empty"):
        mixed(torch.ones(2, 4))


def an_optimizer_made_before() -> None:
    fully_shard(nn.Linear(4, 4))  # so that optimizers are checked from now on
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()  # which finds nothing wrong
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    with raises(RuntimeError, "has 'weight' of Linear as it was before", "after fully_shard"):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _changed_since_sharding() -> None:
    model = nn.Linear(4, 4)
    fully_shard(model)
    model.weight = nn.Parameter(torch.ones(6, 4))
    with raises(ValueError, "'weight' was replaced by a Parameter", "before fully_shard"):
        model(torch.ones(2, 4))
    trained = nn.Linear(4, 4)
    fully_shard(trained)
    trained(torch.ones(2, 4)).sum().backward()
    sharded = trained.weight
    trained.weight = nn.Parameter(torch.ones(4, 4))
    with raises(ValueError, "'weight' was replaced by a Parameter", "before fully_shard"):
        trained(torch.ones(2, 4))
    trained.weight = sharded
    trained(torch.ones(2, 4)).sum().backward()
    trained._parameters["weight"] = nn.Parameter(torch.ones(4, 4))  # torch does not tell us
    with raises(
        RuntimeError, "parameter 'weight' of unit", "was replaced", "Change parameters in place"
    ):
        trained(torch.ones(2, 4))


def test_parameters_replaced_after_sharding_are_refused() -> None:
    run_ranks(_changed_since_sharding, 2)


def a_shape_changed_since() -> None:
    model = nn.Linear(4, 4)
    fully_shard(model)
    other = nn.Linear(4, 6)
    fully_shard(other)
    model._parameters["weight"] = other.weight
    with raises(ValueError, r"'weight' had shape \(4, 4\)", r"now has \(6, 4\)"):
        model(torch.ones(2, 4))


def a_parameter_of_another_model() -> None:
    owner, model = (nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
    for each in (owner, model):
        fully_shard(each[0], reshard_after_forward=False)
        fully_shard(each)
        each(torch.ones(2, 4)).sum().backward()
    own = model[0].weight
    owner.reshard()
    with raises(
        ValueError, "'0.weight' was replaced by a parameter that another unit", "by a clone"
    ):
        model.load_state_dict(dict(owner.named_parameters()), assign=True)
    model[0].weight = owner[0].weight
    owner(torch.ones(2, 4))  # has the unsharded parameter since
    with raises(
        ValueError, "'0.weight' was replaced by a parameter that another unit", "by a clone"
    ):
        model(torch.ones(2, 4))
    assert model[0].weight is own
    # Do what the message says.
    owner[0].reshard()
    model[0].weight = nn.Parameter(owner[0].weight.detach().clone())
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is not None


class TwoUnits(nn.Module):
    def __init__(self, reverse: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.reverse = reverse

    def forward(self, x: Tensor) -> Tensor:
        if self.reverse:
            return self.second(x) + self.first(x)
        return self.first(x) + self.second(x)


def _shard_two(model: TwoUnits, **options: Any) -> TwoUnits:
    fully_shard(model.first, **options)
    fully_shard(model.second, **options)
    fully_shard(model, bucket_bytes=0, **options)
    return model


def _other_order() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    _shard_two(TwoUnits(reverse=dist.get_rank() == 3), mesh=mesh)(torch.ones(2, 4))


class Weights(nn.Module):
    """Weights with these names and shapes, in this order."""

    def __init__(self, **shapes: tuple[int, int]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return x * sum(weight.sum() for weight in self.parameters())


def _other_messages() -> None:
    most = 512 - 32 * dist.get_rank()  # as many bytes in as many messages
    model = fully_shard(Weights(a=(40, 4), b=(8, 4)), max_message_bytes=most)
    with mock.patch("fsdp_ext.sharding.root.root.compare_models"):  # it would raise before that
        model(torch.ones(2, 4))


def test_ranks_whose_messages_have_other_sizes_are_told() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_other_messages, 2, fresh=True)
    message = str(caught.value)  # of the rank that fails first, or of both
    for rank, first in ((0, 512), (1, 480)):
        assert re.search(rf"rank {rank} issues .* in 3 messages, the first of {first}\)", message)


def test_ranks_that_run_units_in_another_order_say_which_rank_and_unit() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_other_order, 4, fresh=True)
    # The message of either rank says what both do.
    message = str(caught.value)
    assert "rank 2 issues the all-gather of unit 'first'" in message
    assert "rank 3 issues the all-gather of unit 'second'" in message
    assert "the same on every rank" in message


def _freeze(model: Any, name: str) -> None:
    model.get_parameter(name).requires_grad_(False)


def _divide_by_four(model: Any, name: str) -> None:
    model.set_gradient_divide_factor(8.0 if name == "b" else None)


def _other_parameters(transport: str) -> None:
    other = dist.get_rank() == 3
    options: Any = {"mesh": init_device_mesh("cpu", (2, 2)), "transport": transport}
    equal = {"a": (8, 4), "b": (8, 4)}
    for shapes, change, here, there in (
        ({"b": (8, 4), "a": (8, 4)}, None, r"parameter '0\.a'", r"parameter '0\.b'"),
        ({**equal, "a": (4, 8)}, None, r"'0\.a' \(\S+ shape \[8, 4\]", r"'0\.a' .* \[4, 8\]"),
        ({**equal, "b": (12, 4)}, None, r"'0\.b' .* \[8, 4\]", r"'0\.b' .* \[12, 4\]"),
        ({"a": (8, 4)}, None, r"parameter '0\.b'", "unit '1'"),
        (equal, _freeze, r"'0\.a' .* frozen", r"'0\.a' .* trained"),
        (equal, _divide_by_four, "unit '0' .* 0.25 before", "unit '0' .* 0.125 before"),
    ):
        model: Any = nn.Sequential(*[Weights(**(shapes if other else equal)) for _ in range(2)])
        for block in model:
            fully_shard(block, **options)
        fully_shard(model, **options)
        if change is not None:
            change(model[0], "b" if other else "a")
        with raises(ValueError, "rank 0 has", here, "where rank 3 has", there, "Make the model"):
            model(torch.ones(2, 4))
    for wrap in (checkpoint_wrapper, nn.Sequential):  # they change names alone
        wrapped = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if other:
            wrapped[0] = wrap(wrapped[0])
        fully_shard(wrapped, **options)
        wrapped(torch.ones(2, 4)).sum().backward()
    fully_shard(model := Weights(a=(4, 4), b=(4, 4)), **options)
    model(torch.ones(2, 4)).sum().backward()
    _freeze(model, "b" if other else "a")
    with raises(RuntimeError, "ranks issued different collectives"):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_whose_units_differ_inside_say_in_which_parameter(transport: str) -> None:
    run_ranks(_other_parameters, 4, transport)


def _absent_peer() -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    mesh = DeviceMesh.from_group(group, "cpu")
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 4))
    dist.barrier()


def test_a_peer_that_never_comes_ends_in_an_error_not_a_hang() -> None:
    run_ranks(_absent_peer, 2, timeout=90.0, fresh=True)


def sparse_gradients() -> None:
    model = nn.Embedding(8, 4, sparse=True)
    fully_shard(model)
    with raises(RuntimeError, "'weight' got a sparse gradient", "sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


def a_forward_before_the_roots() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    model[0](torch.ones(2, 4))
    with raises(RuntimeError, "'0' ran forward before", "outermost"):
        model(torch.ones(2, 4))


@pytest.mark.parametrize(
    "mistake",
    [
        modules,
        one_parameter_in_two_units,
        the_root_before_its_layers,
        layers_that_share_a_submodule,
        a_method_that_would_be_hidden,
        parameters_without_memory,
        an_optimizer_made_before,
        a_shape_changed_since,
        a_parameter_of_another_model,
        sparse_gradients,
        a_forward_before_the_roots,
    ],
)
def test_an_error_says_what_to_do_about(mistake: Callable[[], None]) -> None:
    run_ranks(mistake, 2)


def test_the_error_says_why_a_gpu_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build_info, "BUILD_KIND", "CPU")
    with pytest.raises(ValueError, match=r"is a CPU build .*FORCE_CUDA=1 says what is missing"):
        check_device_type("cuda")
    monkeypatch.setattr(_build_info, "BUILD_KIND", "CUDA")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"torch finds no GPU.*update the NVIDIA driver"):
        check_device_type("cuda")
    with pytest.raises(ValueError, match="device type 'xpu'"):
        check_device_type("xpu")


def _no_mesh_where_torch_sees_a_gpu() -> None:
    config = "cpu:gloo,cuda:nccl"
    host = {"device_id": torch.device("cpu")}
    with FakeTensorMode():
        on_gpu = WithParameter(torch.empty(2, device="cuda"))
    on_host, wrapped = nn.Linear(2, 2), FullyShardedDataParallel
    by_host = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    advice = ("CPU build", "Pass a mesh of 'cpu', or reinstall", "FORCE_CUDA=1 says")
    with (
        mock.patch.object(_build_info, "BUILD_KIND", "CPU"),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
    ):
        for refuse in (fully_shard, wrapped, partial(wrapped, **by_host)):
            with raises(ValueError, "no mesh, and the model is on a GPU, but", *advice):
                refuse(on_gpu)
        with raises(ValueError, "no mesh, and the model is on a GPU, but", *advice):
            wrapped(on_host, device_id=torch.device("cuda", 0))
        with mock.patch.object(dist, "get_backend_config", return_value=config):
            for refuse in (fully_shard, wrapped, partial(wrapped, **by_host)):
                with raises(ValueError, rf"no mesh, and .* for GPUs \('{config}'\)", *advice):
                    refuse(on_host)
            for shard in (partial(wrapped, **host), partial(wrapped, **host, **by_host)):
                shard(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
            mesh = init_device_mesh("cpu", (1,))
            fully_shard(nn.Linear(2, 2), mesh=mesh)(torch.ones(1, 2)).sum().backward()
        # Over gloo it stays on the CPU, whether gloo is for all devices or for CPUs alone.
        fully_shard(on_host)(torch.ones(1, 2)).sum().backward()
        with mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo"):
            fully_shard(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()


def test_a_cpu_build_does_not_take_a_gpus_model_to_the_host() -> None:
    run_ranks(_no_mesh_where_torch_sees_a_gpu, 1)


def _first_forward_fails() -> None:
    other = fully_shard(nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layer = fully_shard(model[0])
    fully_shard(model)
    layer.set_modules_to_forward_prefetch([other])
    with raises(ValueError, "'Linear' is not in FSDPSequential"):
        model(torch.ones(1, 2))
    layer.set_modules_to_forward_prefetch([])
    gc.collect()  # the root of the forward that failed
    model(torch.ones(1, 2)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_the_forward_after_a_first_one_that_failed_starts_over() -> None:
    run_ranks(_first_forward_fails, 1)


def _units_cannot_be_built() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for transport in TRANSPORTS:
        for of_model, failing in ((mesh, [1]), (mesh["shard"], [1, 3])):
            rank = failing[-1] if dist.get_rank() > 1 else failing[0]
            model: Any = fully_shard(nn.Linear(4, 4), mesh=of_model, transport=transport)
            uses = {
                "unshard": model.unshard,
                "forward": lambda model=model: model(torch.ones(1, 4)),
            }
            for (name, use), error in itertools.product(
                uses.items(), (torch.OutOfMemoryError, ValueError)
            ):
                with contextlib.ExitStack() as stack:
                    if dist.get_rank() in failing:
                        broken = mock.patch.object(Unit, "_make_impl", side_effect=error("no room"))
                        stack.enter_context(broken)
                    said = (
                        rf"{name} failed on rank {rank}",
                        rf"no room\. Correct that, and call {name}",
                    )
                    stack.enter_context(raises(error, *said))
                    use()
            model.unshard()
            model(torch.ones(1, 4)).sum().backward()
            assert model.weight.grad is not None


def _in_different_comparisons() -> None:
    for transport in TRANSPORTS:
        model: Any = fully_shard(nn.Linear(4, 4), transport=transport)
        if dist.get_rank() == 1:  # after it has compared groups
            with mock.patch.object(Root, "resolve", side_effect=OSError), raises(OSError):
                model(torch.ones(1, 4))
        different = (
            "in different comparisons: .*of errors in the building of units and .*ranks' groups"
        )
        with raises(RuntimeError, different, "Call it on all"):
            model(torch.ones(1, 4))
        model(torch.ones(1, 4)).sum().backward()


def test_ranks_in_different_comparisons_are_told_and_can_try_again() -> None:
    run_ranks(_in_different_comparisons, 2)


def test_all_ranks_raise_if_one_cannot_build_its_units_and_can_try_again() -> None:
    run_ranks(_units_cannot_be_built, 4)
