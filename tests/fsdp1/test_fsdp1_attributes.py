"""What other libraries read of FSDP1's wrapper is there, and is what FSDP1 has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fsdp1_flat import WRAPPERS
from support.fsdp1_parity import (
    BF16,
    BY_BLOCK,
    CPU,
    FSDP,
    assert_equal,
    make,
    run,
    torch_fsdp,
    whole,
)
from support.launcher import run_ranks
from support.models import Stack, Transformer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    ShardingStrategy,
    StateDictType,
    _runtime_utils,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._common_utils import FSDP_FLATTENED, TrainingState
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import fsdp_ext
from fsdp_ext.fsdp1.views import FlatParamView

SAME = """
    rank world_size compute_device cpu_offload limit_all_gathers forward_prefetch backward_prefetch
    sharding_strategy training_state _use_orig_params _has_params _fsdp_extension _comm_hook
    _sync_gradients _state_dict_type _is_fsdp_managed_module
"""


def _same() -> None:
    for options in (
        {},
        {"sharding_strategy": ShardingStrategy.NO_SHARD, "limit_all_gathers": False},
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "forward_prefetch": True},
        {"cpu_offload": CPUOffload(offload_params=True)},
    ):
        models = [
            wrap(make(Transformer), auto_wrap_policy=BY_BLOCK, **options)
            for wrap in (FSDP, torch_fsdp)
        ]
        wrappers = [type(model).fsdp_modules(model) for model in models]
        for ours, theirs in zip(*wrappers, strict=True):
            for name in SAME.split():
                assert getattr(ours, name) == getattr(theirs, name), name
            assert ours._flat_param._fqns == tuple(theirs._flat_param._fqns)
            assert ours._flat_param._shapes == tuple(theirs._flat_param._shapes)
            for name in ("dtype", "device", "requires_grad"):
                assert getattr(ours._flat_param, name) == getattr(theirs._flat_param, name)
            assert ours._handle.uses_sharded_strategy == theirs._handle.uses_sharded_strategy
            assert ours.process_group.size() == theirs.process_group.size()


def test_attributes_are_those_of_fsdp1() -> None:
    run_ranks(_same, 2)


def _of_groups() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for model in (
        FSDP(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh),
        torch_fsdp(
            nn.Linear(4, 4), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh
        ),
    ):
        assert (model.rank, model.world_size) == (mesh.get_local_rank(1), 2)
        assert model._inter_node_pg is mesh.get_group(0)
        assert model._device_mesh is mesh


def test_groups_of_hybrid_sharding_are_those_of_fsdp1() -> None:
    run_ranks(_of_groups, 4)


class Watched(Stack):
    states: Any = ()

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        x = self.stem(x)
        x.register_hook(self.note)
        return self.head(x)

    def note(self, *_: Any) -> None:
        self.states.append(self.wrapper[0].training_state)


def _states() -> None:
    for wrap in (FSDP, torch_fsdp):
        model = make(Watched)
        wrapped = wrap(model, auto_wrap_policy=BY_BLOCK)
        model.wrapper, model.states = (wrapped,), []  # type: ignore[assignment]
        assert wrapped.training_state is TrainingState.IDLE
        run(wrapped, model, 0).backward()
        assert model.states == [TrainingState.FORWARD_BACKWARD] * 2
        assert wrapped.training_state is TrainingState.IDLE
        with type(wrapped).summon_full_params(wrapped):
            assert wrapped.training_state is TrainingState.SUMMON_FULL_PARAMS
            wrapped._assert_state(TrainingState.SUMMON_FULL_PARAMS)
            with pytest.raises(ValueError, match="state"):
                wrapped._assert_state([TrainingState.IDLE])
        assert wrapped.training_state is TrainingState.IDLE


def test_the_training_state_follows_the_model() -> None:
    run_ranks(_states, 2)


def _marked() -> None:
    model = FSDP(make(Stack), auto_wrap_policy=BY_BLOCK)

    def marked() -> bool:
        return all(getattr(param, FSDP_FLATTENED, False) for param in model.parameters())

    assert marked()
    model.to(BF16)
    assert marked()
    model.load_state_dict(
        {name: value.clone() for name, value in sharded(model).items()}, assign=True
    )
    assert marked()


def sharded(model: Any) -> dict[str, Tensor]:
    return {
        name.replace("_fsdp_wrapped_module.", ""): param.detach()
        for name, param in model.named_parameters()
    }


def test_parameters_are_marked_for_trainers() -> None:
    run_ranks(_marked, 2)


def _for_users() -> None:
    """Compare what code finds that groups the parameters of an optimizer."""
    found = []
    for wrap in (FSDP, torch_fsdp):
        model = make(Stack)
        for name, param in model.named_parameters():
            param.tensor_model_parallel = name  # type: ignore[attr-defined]
        model.stem.bias._no_weight_decay = True  # type: ignore[attr-defined]
        wrapped = wrap(model, auto_wrap_policy=BY_BLOCK)
        seen = [set_by_users(wrapped)]
        run(wrapped, model, 0).backward()
        wrapped.zero_grad()
        seen.append(set_by_users(wrapped))
        with type(wrapped).summon_full_params(wrapped):
            seen.append(set_by_users(wrapped))
            model.head.bias._no_weight_decay = True  # type: ignore[attr-defined]
        seen.append(set_by_users(wrapped))
        wrapped.to(torch.float64)
        seen.append(set_by_users(wrapped))
        found.append(seen)
    assert found[0] == found[1]
    assert found[0][-1]["head.bias"] == {
        "tensor_model_parallel": "head.bias",
        "_no_weight_decay": True,
    }


def set_by_users(module: nn.Module) -> dict[str, dict[str, Any]]:
    names = ("tensor_model_parallel", "_no_weight_decay")
    return {
        name.replace("_fsdp_wrapped_module.", ""): {
            key: value for key, value in vars(param).items() if key in names
        }
        for name, param in module.named_parameters()
    }


def test_parameters_keep_the_attributes_that_users_set_as_in_fsdp1() -> None:
    run_ranks(_for_users, 2)


def _of_fsdp2() -> None:
    for shard in (fsdp_ext.fully_shard, torch_fully_shard):
        module = nn.Linear(4, 4)
        module.weight._no_weight_decay = True  # type: ignore[assignment]
        shard(module)
        assert not hasattr(module.weight, "_no_weight_decay")
    # What is set afterwards stays, as on unsharded modules.
    module = fsdp_ext.fully_shard(nn.Linear(4, 4))
    module.weight._no_weight_decay = True
    module.to(torch.float64)
    assert module.weight._no_weight_decay


def test_fully_shard_gives_new_parameters_no_attributes_as_fsdp2() -> None:
    run_ranks(_of_fsdp2, 1)


def _upcast() -> None:
    """What accelerate does to models in a lower precision."""
    model = FSDP(make(Stack).to(BF16), auto_wrap_policy=BY_BLOCK)
    before = {name: whole(param) for name, param in sharded(model).items()}
    params = dict(model.named_parameters())
    model.stem.weight._no_weight_decay = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for module in FSDP.fsdp_modules(model):
        if not module._has_params:
            continue
        param = module._flat_param
        if param.dtype != torch.float32 and param.device != torch.device("meta"):
            assert ", ".join(param._fqns)
            param.data = param.data.to(torch.float32)
            module._handle._orig_param_dtype = torch.float32
    assert dict(model.named_parameters()).keys() == params.keys()
    assert all(params[name] is param for name, param in model.named_parameters())
    assert model.stem.weight._no_weight_decay
    plain = make(Stack)
    plain.load_state_dict({name: value.float() for name, value in before.items()})
    assert_equal(model.state_dict(), plain.state_dict())
    run(model, model, 0).backward()
    optimizer.step()
    assert not torch.equal(whole(model.stem.weight), plain.stem.weight)
    with pytest.raises(ValueError, match=r"has shape .* was set to a tensor of shape \(3,\)"):
        model._flat_param.data = torch.ones(3)
    with pytest.raises(ValueError, match=r"_orig_param_dtype was set to torch\.bfloat16"):
        model._handle._orig_param_dtype = BF16


def test_a_flat_parameter_can_be_cast_as_accelerate_does() -> None:
    run_ranks(_upcast, 2)


PRIVATE = (
    "_unshard_stream",
    "_wait_unshard_streams_on_current_stream",
    "_deregister_orig_params_ctx",
    "_use_training_state",
    "_lazy_init",
    "_exec_order_data",
    "_fully_sharded_module_to_handle",
)


def _no_private_names() -> None:
    wrapped = FSDP(make(Stack), auto_wrap_policy=BY_BLOCK)
    for name in PRIVATE:
        with pytest.raises(AttributeError, match=name):
            getattr(wrapped, name)
    flat: Any = FSDP(make(Stack), use_orig_params=False)
    assert flat._flat_param._is_flat_param
    for name in ("_param_infos", "_shard_param_infos"):
        assert not hasattr(flat._flat_param, name)
    for name in ("_use_sharded_views", "_setattr_tensor"):
        with pytest.raises(AttributeError, match=name):
            getattr(flat._handle, name)


def test_private_names_of_streams_and_handles_do_not_exist() -> None:
    run_ranks(_no_private_names, 1)


def _torchs_runtime() -> None:
    model = make(Stack)
    wrapped: Any = FSDP(model, auto_wrap_policy=BY_BLOCK)
    handle = wrapped._handle
    assert not isinstance(handle, FlatParamHandle)
    _runtime_utils._lazy_init(wrapped, wrapped)  # verl calls it
    calls: list[Callable[[], object]] = [
        lambda: _runtime_utils._unshard(wrapped, handle, None, None),
        lambda: _runtime_utils._reshard(wrapped, handle, True),
        lambda: _runtime_utils._root_pre_forward(wrapped, wrapped, (), {}),
        lambda: _runtime_utils._post_backward_final_callback(wrapped, wrapped),
    ]
    for call in calls:
        with pytest.raises(AttributeError):
            call()
    run(wrapped, model, 0).backward()
    assert all(param.grad is not None for param in wrapped.parameters())


def test_functions_of_torchs_runtime_find_no_handles() -> None:
    run_ranks(_torchs_runtime, 2)


def _small() -> None:
    model = FSDP(make(Stack), auto_wrap_policy=BY_BLOCK)
    run(model, model, 0)
    assert not isinstance(model.stem.weight, DTensor)
    model._handle.reshard(True)
    assert isinstance(model.stem.weight, DTensor)
    model._unshard()
    assert not isinstance(model.stem.weight, DTensor)
    model._handle.reshard(True)
    assert len(model._all_handles) == 4
    with model.no_sync():
        assert not model._sync_gradients
        assert not model.blocks[0]._sync_gradients
    assert model.blocks[0]._sync_gradients
    model._sync_gradients = False
    assert (model._sync_gradients, model.blocks[0]._sync_gradients) == (False, True)
    empty = FSDP(nn.ReLU(), device_id=CPU)
    assert not empty._has_params
    assert empty._flat_param is None
    with pytest.raises(
        AttributeError, match=r"only a view with .*_fqns.* there is no '_full_param_padded'"
    ):
        model._flat_param._full_param_padded  # noqa: B018
    assert dist.get_rank() == model.rank


def test_small_methods_do_what_they_do_in_fsdp1() -> None:
    run_ranks(_small, 2)


def move_handles(model: Any, *to: Any) -> None:
    """Move the shards of a model, as verl does before and after an engine generates."""
    _runtime_utils._lazy_init(model, model)
    assert model._is_root
    for handle in model._all_handles:
        if handle._offload_params:
            continue
        flat = handle.flat_param
        assert flat.data.data_ptr() == flat._local_shard.data_ptr()
        assert id(flat.data) != id(flat._local_shard)
        assert flat.data.size() == flat._local_shard.size()
        handle.flat_param_to(*to, non_blocking=True)
        flat._local_shard = flat.data
        assert id(flat._local_shard) != id(flat.data)


def _moved_by_handles() -> None:
    for is_kept in (True, False):
        losses: list[list[Tensor]] = []
        for wrap in WRAPPERS:
            model = make(Stack)
            wrapped = wrap(model, auto_wrap_policy=BY_BLOCK, use_orig_params=is_kept)
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
            losses.append([])
            for step in range(3):
                loss = run(wrapped, model, step)
                loss.backward()
                move_handles(wrapped, CPU)
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(loss.detach())
                move_handles(wrapped, CPU)
        assert all(map(torch.equal, *losses))


def test_shards_can_be_moved_by_their_handles_as_under_fsdp1() -> None:
    run_ranks(_moved_by_handles, 2)


def _converted_by_handles() -> None:
    """On the host, another dtype stands for another device."""
    for is_kept in (True, False):
        plain, model = make(Stack), make(Stack)
        model.stem.register_buffer("note", torch.ones(2))
        wrapped: Any = FSDP(model, auto_wrap_policy=BY_BLOCK, use_orig_params=is_kept)
        run(wrapped, model, 0).backward()
        run(plain, plain, 0).backward()
        units = [wrapper._fsdp_ext_unit for wrapper in FSDP.fsdp_modules(wrapped)]
        before = [StorageWeakRef(unit.flat_shard.untyped_storage()) for unit in units]
        move_handles(wrapped, torch.float64)
        plain.double()
        assert all(storage.expired() for storage in before)
        assert model.stem.note.dtype == torch.float32
        for param in wrapped.parameters():
            assert param.dtype == param.grad.dtype == torch.float64
        with FSDP.summon_full_params(wrapped):
            assert_equal(dict(wrapped.named_parameters()), dict(plain.named_parameters()))
        with pytest.raises(ValueError, match=r"_local_shard of unit .* in other memory"):
            FlatParamView(units[0])._local_shard = torch.ones(3)


def test_handles_move_shards_and_gradients_and_free_their_memory() -> None:
    run_ranks(_converted_by_handles, 2)


def set_views() -> None:
    model = FSDP(nn.Linear(4, 4))
    for view, name in (
        (model._handle, "anything"),
        (model._flat_param, "_post_backward_hook_state"),
        (model, "_flat_param"),
        (model, "_handle"),
    ):
        with pytest.raises(AttributeError, match=name):
            setattr(view, name, nn.Parameter(torch.zeros(3)))
    assert len(list(model.parameters())) == 2


def test_attributes_that_a_view_would_forget_cannot_be_set() -> None:
    run_ranks(set_views, 2)


def torchs_methods() -> None:
    model = FSDP(make(Transformer), auto_wrap_policy=BY_BLOCK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kind = StateDictType.FULL_STATE_DICT
    outer = nn.Sequential(model)
    for name, arguments in (
        ("set_state_dict_type", (outer, kind)),
        ("get_state_dict_type", (outer,)),
        ("optim_state_dict", (model, optimizer)),
        ("optim_state_dict_to_load", (model, optimizer, {})),
    ):
        with pytest.raises(AssertionError, match=rf"fsdp_ext.FullyShardedDataParallel.{name}"):
            getattr(TorchFSDP, name)(*arguments)
    for context in (TorchFSDP.state_dict_type(outer, kind), TorchFSDP.summon_full_params(outer)):
        with pytest.raises(AssertionError, match=r"fsdp_ext\.patch\(\)"), context:
            pass
    assert TorchFSDP.fsdp_modules(outer) == []
    # torch.distributed.checkpoint asks PyTorch's class, too.
    assert sorted(get_model_state_dict(model)) == sorted(model.state_dict())
    theirs = torch_fsdp(make(Transformer))
    assert TorchFSDP.fsdp_modules(theirs) == [theirs]


def test_static_methods_of_torchs_class_say_that_they_do_not_serve_ours() -> None:
    run_ranks(torchs_methods, 2)
