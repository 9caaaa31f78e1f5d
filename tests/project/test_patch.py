"""`fsdp_ext.patch()` puts fsdp_ext in the place of PyTorch's FSDP, and takes it out again."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import pickle
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.parity import whole
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint import state_dict as torchs_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import OptimStateKeyType, StateDictType
from torch.distributed.fsdp import _traversal_utils as traversal
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

import fsdp_ext
from fsdp_ext.patching import api as patching_api
from fsdp_ext.patching import namespaces
from fsdp_ext.patching.command import run_command

NAMESPACES = {
    "torch.distributed.fsdp": {"fully_shard", "FullyShardedDataParallel"},
    "torch.distributed.fsdp._fully_shard": {"fully_shard"},
    "torch.distributed.fsdp._fully_shard._fully_shard": {"fully_shard"},
    "torch.distributed.fsdp._traversal_utils": {
        "_get_fsdp_handles",
        "_get_fsdp_states",
        "_get_fsdp_states_with_modules",
    },
    "torch.distributed.fsdp.fully_sharded_data_parallel": {"FullyShardedDataParallel"},
    "torch.distributed._composable.fsdp": {"fully_shard"},
    "torch.distributed._composable.fsdp.fully_shard": {"fully_shard"},
}
# As libraries hold them that were imported before the patch.
TORCHS = types.SimpleNamespace(
    fully_shard=torch_fsdp.fully_shard,
    FullyShardedDataParallel=torch_fsdp.FullyShardedDataParallel,
    _get_fsdp_handles=traversal._get_fsdp_handles,
    _get_fsdp_states=traversal._get_fsdp_states,
    _get_fsdp_states_with_modules=traversal._get_fsdp_states_with_modules,
)
TORCHS_CLIP = nn.utils.clip_grad_norm_


def given() -> dict[str, Any]:
    """Return what imports from PyTorch get."""
    found = {}
    for namespace, names in NAMESPACES.items():
        for name in names:
            taken: dict[str, Any] = {}
            exec(f"from {namespace} import {name}", taken)
            assert getattr(importlib.import_module(namespace), name) is taken[name]
            found[f"{namespace}.{name}"] = taken[name]
    return found


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Patch without the warning about this file, which holds PyTorch's names on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fsdp_ext.patch")
        with fsdp_ext.patch():
            yield


def are_ours(found: dict[str, Any]) -> bool:
    """Return whether all names are ours; fail if only some are."""
    torchs = [value is vars(TORCHS)[name.rpartition(".")[2]] for name, value in found.items()]
    ours = [value.__module__.startswith("fsdp_ext.") for value in found.values()]
    assert all(ours) or all(torchs)
    return all(ours)


def state_of_torch() -> dict[str, Any]:
    """Return everything that a patch could leave changed."""
    state: dict[str, Any] = {}
    state["set_model_state_dict"] = torchs_checkpointing.set_model_state_dict
    state["clip_grad_norm_"] = nn.utils.clip_grad_norm_, clip_grad.clip_grad_norm_
    for name in NAMESPACES:
        module = importlib.import_module(name)
        state |= {name: type(module)} | {f"{name}.{k}": v for k, v in vars(module).items()}
    methods = fsdp_ext.FullyShardedDataParallel
    return state | {f"ours.{name}": value for name, value in vars(methods).items()}


def test_all_namespaces_of_torch_that_have_a_name_are_known() -> None:
    importlib.import_module("torch.distributed.tensor.parallel.fsdp")
    users = set(namespaces._USERS_OF_BOTH)
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.") and name not in users and isinstance(module, types.ModuleType):
            of_it = {k for k, v in vars(TORCHS).items() if module.__dict__.get(k) is v}
            assert of_it == NAMESPACES.get(name, set()), name
    assert set(namespaces.NAMESPACES) == NAMESPACES.keys()


def test_imports_from_torch_give_ours_until_the_block_ends() -> None:
    before = state_of_torch()
    assert not are_ours(given())
    with patched():
        assert are_ours(given())
    assert not are_ours(given())
    assert state_of_torch() == before


def test_classes_of_torch_are_pickled_while_patched() -> None:
    with patched():
        theirs = namespaces.TorchFullyShardedDataParallel
        saved = io.BytesIO()
        torch.save([theirs], saved)
        saved.seek(0)
        assert torch.load(saved, weights_only=False) == [theirs]
        assert pickle._loads(pickle._dumps(theirs)) is theirs
    saved.seek(0)
    assert torch.load(saved, weights_only=False) == [theirs]


def test_an_exception_ends_the_patch_and_passes() -> None:
    before = state_of_torch()
    with pytest.raises(KeyError, match="mine"), patched():
        raise KeyError("mine")
    assert state_of_torch() == before


def test_the_last_of_nested_patches_undoes_them_in_whichever_order_they_end() -> None:
    before = state_of_torch()
    with patched(), patched():
        assert are_ours(given())
    assert state_of_torch() == before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = fsdp_ext.patch(), fsdp_ext.patch()
    with second:
        with first:
            pass
        first.__exit__(None, None, None)  # has no effect a second time
        assert are_ours(given())
    assert state_of_torch() == before


def test_names_that_others_assign_hold_until_the_patch_ends() -> None:
    before = state_of_torch()
    with patched():
        with pytest.MonkeyPatch.context() as context:
            context.setattr(torch_fsdp, "fully_shard", print)
            assert torch_fsdp.fully_shard is print
        assert torch_fsdp.fully_shard is fsdp_ext.fully_shard
        torch_fsdp.fully_shard = print
    assert state_of_torch() == before


def test_torchs_own_modules_keep_torchs_names() -> None:
    with patched():
        for name, key in (
            ("torch.distributed.checkpoint.state_dict", "FSDP"),
            ("torch.distributed.optim.named_optimizer", "FSDP"),
        ):
            assert vars(sys.modules[name])[key] is TORCHS.FullyShardedDataParallel
        stage = sys.modules["torch.distributed.pipelining.stage"]
        # torch 2.15 does not have it there any more.
        assert getattr(stage, "fully_shard", TORCHS.fully_shard) is TORCHS.fully_shard


def test_a_warning_names_the_modules_that_have_torchs_names() -> None:
    library: Any = types.ModuleType("some_library.models")
    library.FSDP = TORCHS.FullyShardedDataParallel
    library.shard = TORCHS.fully_shard
    library.other = torch_fsdp.FSDPModule  # serves modules of both
    with pytest.MonkeyPatch.context() as context:
        context.setitem(sys.modules, "some_library.models", library)
        # Test files that this process has imported hold PyTorch's names, too.
        context.setattr(patching_api, "_SHOWN", 1000)
        with pytest.warns(UserWarning, match="came too late for") as caught, fsdp_ext.patch():
            pass
    (warning,) = caught
    assert warning.filename == __file__
    message = str(warning.message)
    assert "some_library.models.FSDP" in message
    assert "some_library.models.shard" in message
    assert "some_library.models.other" not in message
    assert "torch." not in message
    assert "Call fsdp_ext.patch() before the imports" in message


def _steps(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def _shard_all(shard: Any) -> nn.Module:
    model = _model()
    for layer in (model[0], model[2]):
        shard(layer)
    module: nn.Module = shard(model)
    return module


# What a library has that takes the names where it needs them.
LIBRARY = """
def by_function(model):
    from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed.fsdp import register_fsdp_forward_method
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    register_fsdp_forward_method(model, "extra_repr")
    return model

def by_wrapper(model, policy):
    from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
    return FSDP(model, auto_wrap_policy=policy, device_id="cpu")
"""


def _trains() -> None:
    library: dict[str, Any] = {}
    exec(LIBRARY, library)
    policy = ModuleWrapPolicy({nn.Linear})
    with patched():
        models = [library["by_function"](_model()), library["by_wrapper"](_model(), policy)]
        # Code that took PyTorch's names before the patch.
        own = _shard_all(TORCHS.fully_shard)
        wrapped = TORCHS.FullyShardedDataParallel(
            _model(), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
        )
        assert all(isinstance(model, torch_fsdp.FSDPModule) for model in (models[0], own))
        torch_fsdp.register_fsdp_forward_method(own, "extra_repr")
        assert isinstance(models[1], torch_fsdp.FullyShardedDataParallel)
        losses = [_steps(model) for model in (*models, own, wrapped)]
    assert isinstance(models[0], fsdp_ext.FSDPModule)
    assert isinstance(models[1], fsdp_ext.FullyShardedDataParallel)
    assert not isinstance(own, fsdp_ext.FSDPModule)
    kinds = {type(module) for module in wrapped.modules()}
    assert TORCHS.FullyShardedDataParallel in kinds
    assert fsdp_ext.FullyShardedDataParallel not in kinds
    for other in losses[1:]:
        assert other == losses[0]


def test_code_that_imports_from_torch_trains_with_ours_and_holders_with_torchs() -> None:
    run_ranks(_trains, 2)


def _static_methods() -> None:
    settings = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "device_id": torch.device("cpu")}
    make = TORCHS.FullyShardedDataParallel
    theirs = make(_model(), use_orig_params=True, **settings)
    plain = _model()
    with patched():
        fsdp = torch_fsdp.FullyShardedDataParallel
        ours = fsdp(_model(), **settings)
        full: list[dict[str, Any]] = []
        for model in (ours, theirs):
            _steps(model)
            assert len(fsdp.fsdp_modules(model)) == 3
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            with fsdp.state_dict_type(model, StateDictType.FULL_STATE_DICT):
                kind = fsdp.get_state_dict_type(model).state_dict_type
                assert kind is StateDictType.FULL_STATE_DICT
                full += [model.state_dict(), fsdp.optim_state_dict(model, optimizer)["state"]]
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        _steps(plain)
        plain(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        state = fsdp.rekey_optim_state_dict(
            optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, plain
        )
        assert state["state"].keys() == dict(plain.named_parameters()).keys()
        # DCP takes its way for DTensors with ours, and its way for wrappers with PyTorch's.
        options = StateDictOptions(full_state_dict=True)
        full += [get_model_state_dict(model, options=options) for model in (ours, theirs)]
    weights, moments, their_weights, their_moments, by_dcp, theirs_by_dcp = full
    for one in (their_weights, by_dcp, theirs_by_dcp):
        assert one.keys() == weights.keys()
        assert all(torch.equal(one[name], value) for name, value in weights.items())
    assert moments.keys() == their_moments.keys()
    for name, values in moments.items():
        assert torch.equal(values["momentum_buffer"], their_moments[name]["momentum_buffer"])


def test_static_methods_of_fsdp1_serve_models_of_both() -> None:
    run_ranks(_static_methods, 2)


@torch.no_grad()
def _average(averaged: nn.Module, model: nn.Module, decay: float) -> None:
    """Do what Bagel's `fsdp_ema_update` does."""
    pairs = [
        (one.flat_param.data, other.flat_param.data)
        for one, other in zip(
            traversal._get_fsdp_handles(averaged), traversal._get_fsdp_handles(model), strict=True
        )
        if other.flat_param.requires_grad
    ]
    assert len(pairs) == 3
    torch._foreach_mul_([one for one, _ in pairs], decay)
    torch._foreach_add_([one for one, _ in pairs], [other for _, other in pairs], alpha=1 - decay)


def _handles(use_orig_params: bool) -> None:
    states, outputs = [], []
    with patched():
        for make in (TORCHS.FullyShardedDataParallel, torch_fsdp.FullyShardedDataParallel):
            model, averaged = (
                make(
                    nn.Sequential(*_model(), nn.Linear(8, 3)).requires_grad_(trains),
                    auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                    device_id=torch.device("cpu"),
                    use_orig_params=use_orig_params,
                )
                for trains in (True, False)
            )
            found = traversal._get_fsdp_states(model)
            assert found == make.fsdp_modules(model)
            assert traversal._get_fsdp_states_with_modules(model) == (found, found)
            assert traversal._get_fsdp_states(nn.Linear(2, 2)) == []
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                torch.manual_seed(10 * step + dist.get_rank())
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                _average(averaged, model, 0.5)
                with torch.no_grad():
                    outputs.append(averaged(torch.ones(2, 8)))
            with make.state_dict_type(averaged, StateDictType.FULL_STATE_DICT):
                states.append(averaged.state_dict())
    theirs, ours = states
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert not torch.equal(outputs[0], outputs[1])
    assert all(map(torch.equal, outputs[:2], outputs[2:]))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_handles_of_fsdp1_average_weights(use_orig_params: bool) -> None:
    run_ranks(_handles, 2, use_orig_params)


class Lazy:
    """A tensor that is read when it is used, as Lightning has them. It cannot be pickled."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.file = value, open(os.devnull)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.value if isinstance(arg, Lazy) else arg for arg in args))


def _lazy() -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    value = torch.arange(12.0).view(3, 4)
    with patched():
        model = fsdp_ext.FullyShardedDataParallel(nn.Linear(4, 3, bias=False), use_orig_params=True)
        lazy = {"weight": Lazy(value)}
        torchs_checkpointing.set_model_state_dict(model, lazy, options=options)
    assert torch.equal(model.state_dict()["weight"], value)
    assert isinstance(lazy["weight"], Lazy)  # the caller's dict is unchanged


def test_checkpoints_that_are_read_when_they_are_used_are_loaded_by_set_model_state_dict() -> None:
    run_ranks(_lazy, 2)


def _written_to() -> None:
    options = StateDictOptions(full_state_dict=True)
    with patched():
        model = fsdp_ext.fully_shard(nn.Linear(4, 2))
        whole = nn.Linear(4, 2).state_dict()
        torchs_checkpointing.set_model_state_dict(model, whole, options=options)
        assert all(isinstance(value, DTensor) for value in whole.values())
        ddp = DistributedDataParallel(nn.Linear(4, 2))
        state = get_model_state_dict(ddp)
        torchs_checkpointing.set_model_state_dict(ddp, state)
        assert list(state) == ["module.weight", "module.bias"]


def test_set_model_state_dict_writes_into_its_argument_as_without_the_patch() -> None:
    run_ranks(_written_to, 2)


class Versioned(nn.Linear):
    _version = 3

    def _load_from_state_dict(self, state: Any, prefix: str, meta: Any, *rest: Any) -> None:
        self.loaded = meta.get("version")
        super()._load_from_state_dict(state, prefix, meta, *rest)


def _versions() -> None:
    model = Versioned(4, 2)
    with patched():
        for read in (lambda value: value, Lazy):
            state, model.loaded = model.state_dict(), None
            state.update({name: read(value) for name, value in state.items()})
            torchs_checkpointing.set_model_state_dict(model, state)
            assert model.loaded == 3


def test_set_model_state_dict_passes_on_the_versions_of_modules() -> None:
    run_ranks(_versions, 1)


# - Clipping


def _sharded() -> nn.Module:
    return _shard_all(fsdp_ext.fully_shard)


def _clipped(
    clip: Any, make: Any, *args: Any, given: Any = list, **options: Any
) -> tuple[Any, list[Any]]:
    """Return the norm, or the error, and the gradients after a backward."""
    model = make()
    torch.manual_seed(1 + dist.get_rank())
    model(torch.randn(4, 8)).square().sum().backward()
    try:
        norm = clip(given(model.parameters()), *args, **options)
    except Exception as error:
        norm = error
    return norm, [whole(param.grad) for param in model.parameters()]


def _clips_as_torchs() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    in_parts = lambda: fsdp_ext.fully_shard(  # noqa: E731
        parallelize_module(_model(), mesh["tp"], plan), mesh=mesh["dp"]
    )
    with patched():
        for make in (_sharded, in_parts):
            for norm_type in (1, 2.0, "inf"):
                theirs, expected = _clipped(TORCHS_CLIP, make, 0.1, norm_type)
                assert whole(theirs) > 0.2, "nothing is clipped"
                for clip in (nn.utils.clip_grad_norm_, clip_grad.clip_grad_norm_):
                    norm, grads = _clipped(clip, make, 0.1, norm_type, given=iter)
                    assert norm.device_mesh == theirs.device_mesh
                    assert all(each.is_replicate() for each in norm.placements)
                    torch.testing.assert_close([whole(norm), *grads], [whole(theirs), *expected])


def _attached() -> nn.Module:
    model = _sharded()
    fsdp_ext.optim.SGD(model.parameters(), lr=0.1).attach(model)
    return model


def _beside_a_plain_parameter() -> nn.Module:
    model = _model()
    fsdp_ext.fully_shard(model, ignored_params={next(model.parameters())})
    return model


def _infinite(params: Iterator[Any]) -> list[Any]:
    given = list(params)
    given[0].grad.mul_(math.inf)
    return given


def _redistributed(params: Iterator[Any]) -> list[Any]:
    given = list(params)
    given[0].grad = given[0].grad.redistribute(placements=[Replicate()])
    return given


def _is_torchs() -> None:
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (_model, (0.1,), {}),
        (lambda: _shard_all(TORCHS.fully_shard), (0.1,), {}),
        (lambda: fsdp_ext.FullyShardedDataParallel(_model()), (0.1,), {}),  # a flat parameter
        (_attached, (0.1,), {}),
        (_beside_a_plain_parameter, (0.1,), {}),
        (_sharded, (0.1, -1.0), {}),
        (_sharded, (0.1,), {"given": lambda params: [*params] * 2}),
        (_sharded, (0.1,), {"given": _redistributed}),
        (_sharded, (0.1,), {"given": lambda _: []}),
        (_sharded, ("x",), {}),
        (_sharded, (0.1, "x"), {}),
        (_sharded, (0.1,), {"given": _infinite, "error_if_nonfinite": True}),
    ]
    with patched():
        for number, (make, args, options) in enumerate(cases):
            (theirs, expected), (ours, grads) = (
                _clipped(clip, make, *args, **options)
                for clip in (TORCHS_CLIP, nn.utils.clip_grad_norm_)
            )
            assert type(ours) is type(theirs), number
            assert str(ours) == str(theirs), number
            assert all(
                one is other or torch.equal(one, other)
                for one, other in zip(grads, expected, strict=True)
            ), number
        with pytest.warns(UserWarning, match="empty generator"):
            assert nn.utils.clip_grad_norm_((param for param in ()), 1.0) == 0


def test_a_function_that_replaced_ours_stays() -> None:
    other: Any = object()
    try:
        with patched():
            nn.utils.clip_grad_norm_ = other
        assert nn.utils.clip_grad_norm_ is other
        assert clip_grad.clip_grad_norm_ is TORCHS_CLIP
    finally:
        nn.utils.clip_grad_norm_ = TORCHS_CLIP


def _compiled() -> None:
    with patched():
        for make in (_model, _sharded):
            compiled = torch.compile(nn.utils.clip_grad_norm_, backend="eager", fullgraph=True)
            (theirs, expected), (ours, grads) = (
                _clipped(clip, make, 0.1) for clip in (TORCHS_CLIP, compiled)
            )
            assert torch.equal(whole(ours), whole(theirs))
            assert all(map(torch.equal, grads, expected))


def test_clip_grad_norm_clips_sharded_gradients_as_torchs() -> None:
    run_ranks(_clips_as_torchs, 4)


@pytest.mark.parametrize("work", [_is_torchs, _compiled])
def test_clip_grad_norm_is_torchs_where_ours_would_differ(work: Callable[[], None]) -> None:
    run_ranks(work, 2, fresh=work is _compiled)


# - The command

SCRIPT = """
import multiprocessing, os, sys
import neighbour
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

def show(where):
    print(where, fully_shard.__module__.split(".")[0],
          FullyShardedDataParallel.__module__.split(".")[0], neighbour.VALUE, flush=True)

if __name__ == "__main__":
    show("main")
    print(sys.argv[1:], os.path.basename(__file__), os.path.basename(sys.argv[0]), __package__)
    for method in sys.argv[2:]:
        process = multiprocessing.get_context(method).Process(target=show, args=(method,))
        process.start()
        process.join()
        assert process.exitcode == 0
    sys.exit(3)
"""


@pytest.mark.parametrize("method", ["spawn", *exhaustive("forkserver")])
def test_the_command_runs_a_script_and_the_processes_that_it_starts(
    tmp_path: Path, method: str
) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 7")
    (tmp_path / "script.py").write_text(SCRIPT)
    script = f"{tmp_path.name}/script.py"
    # PyTorch's own imports warn, which does not concern users of the command.
    strict = ["-W", "error::DeprecationWarning", "-W", "error::FutureWarning"]
    done = subprocess.run(
        [sys.executable, *strict, "-m", "fsdp_ext.patch", script, "-m", method],
        cwd=tmp_path.parent,
        env={**os.environ, "PYTHONPATH": str(Path(fsdp_ext.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 3, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "main fsdp_ext fsdp_ext 7",
        f"['-m', '{method}'] script.py script.py ",
        f"{method} fsdp_ext fsdp_ext 7",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "got no script"), (["-x"], "got -x"), (["not_there.py"], "there is no file not_there")],
)
def test_the_command_explains_wrong_arguments(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["patch.py", *arguments])
    with pytest.raises(SystemExit) as raised:
        run_command({})
    assert raised.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "usage: python -m fsdp_ext.patch script.py" in printed
