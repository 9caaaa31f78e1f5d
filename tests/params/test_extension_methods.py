"""When the methods of tensor extensions run, and what happens if they fail."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.extensions import HalfWeight, checkpointed, linear_of
from support.launcher import run_ranks
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import Shard

import fsdp_ext

SYSTEMS = (fsdp_ext.fully_shard, torch.distributed.fsdp.fully_shard)


# - When the methods run


def _calls() -> None:
    calls: list[str] = []
    pre, post = HalfWeight.fsdp_pre_all_gather, HalfWeight.fsdp_post_all_gather

    def logged_pre(
        self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        calls.append("pre")
        return pre(self, mesh, outer_size, outer_stride, module, mp_policy)

    def logged_post(self: Any, *args: Any, out: Any = None) -> Any:
        calls.append("post" if out is None else "post with out")
        return post(self, *args, out=out)

    HalfWeight.fsdp_pre_all_gather = logged_pre  # type: ignore[method-assign]
    HalfWeight.fsdp_post_all_gather = logged_post  # type: ignore[method-assign]
    try:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        for layer in model:
            layer.weight = nn.Parameter(HalfWeight(layer.weight.detach()))
            fsdp_ext.fully_shard(layer, bucket_bytes=0)
        fsdp_ext.fully_shard(model, prefetch=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            seen.append(calls.copy())
            calls.clear()
    finally:
        HalfWeight.fsdp_pre_all_gather = pre  # type: ignore[method-assign]
        HalfWeight.fsdp_post_all_gather = post  # type: ignore[method-assign]
    # The first forward also asks each parameter what it gathers.
    assert seen[0] == ["pre", "pre", "pre", "post", "pre", "post", *["post with out"] * 2]
    assert seen[1] == ["pre", "post with out"] * 2 + ["post with out"] * 2


def test_inputs_are_computed_once_an_iteration_and_out_is_passed_from_the_second_time_on() -> None:
    run_ranks(_calls, 2)


def _memory() -> None:
    model = nn.Linear(64, 64, bias=False)
    model.weight = nn.Parameter(HalfWeight(model.weight.detach()))
    fsdp_ext.fully_shard(model, reshard_after_forward=True)
    model(torch.ones(1, 64))
    model.unshard()
    own = model.weight._data
    assert own.untyped_storage().size() == 64 * 64 * 4
    model.reshard()
    assert own.untyped_storage().size() == 0


def test_memory_of_an_unsharded_extension_is_freed_when_its_unit_is_resharded() -> None:
    run_ranks(_memory, 2)


def _written_before_a_reshard() -> None:
    model = linear_of(HalfWeight(torch.ones(4, 4)))
    fsdp_ext.fully_shard(model, reshard_after_forward=True)
    x = torch.ones(1, 4, requires_grad=True)
    output = model(x)
    model.weight._local_tensor._data.data.fill_(2.0)  # no version tells
    model.reshard()
    output.sum().backward()
    assert torch.equal(x.grad, torch.full((1, 4), 8.0))


def test_after_a_reshard_of_the_user_backward_reads_what_was_written_before() -> None:
    run_ranks(_written_before_a_reshard, 2)


class WithModule(HalfWeight):
    """Passes the module on, and the shard itself."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        inputs, metadata = super().fsdp_pre_all_gather(
            mesh, outer_size, outer_stride, module, mp_policy
        )
        return inputs, (metadata, module, self)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        metadata, module, _ = metadata
        assert isinstance(module, nn.Linear)
        return super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)


def _freed() -> None:
    model = nn.Sequential(
        linear_of(WithModule(torch.ones(4, 4))), linear_of(WithModule(torch.ones(4, 4)))
    )
    for layer in model:
        fsdp_ext.fully_shard(layer)
    fsdp_ext.fully_shard(model)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    alive = [weakref.ref(layer) for layer in model]
    del model, layer
    gc.collect()
    assert [layer() for layer in alive] == [None, None]


def test_metadata_that_refers_to_the_module_does_not_keep_the_model_alive() -> None:
    run_ranks(_freed, 2)


# - Errors


class OnlyPre(HalfWeight):
    fsdp_post_all_gather = property()  # type: ignore[assignment]


class Faulty(HalfWeight):
    """Its methods do what `fault` says."""

    fault = ""


def _faulty_pre(
    self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> Any:
    if Faulty.fault == "pre raises":
        raise KeyError("no key")
    if Faulty.fault == "no padding":
        return (self._data,), {"scale": 1.0}
    inputs, metadata = HalfWeight.fsdp_pre_all_gather(
        self, mesh, outer_size, outer_stride, module, mp_policy
    )
    return (inputs[0][:, :1] if Faulty.fault == "other shape" else inputs[0],), metadata


def _faulty_post(
    self: Any, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
) -> Any:
    if Faulty.fault == "post raises":
        raise KeyError("no key")
    if Faulty.fault == "in place":
        outputs[0].mul_(2)
    if Faulty.fault == "dtype":
        return HalfWeight(outputs[0]), outputs
    return HalfWeight.fsdp_post_all_gather(self, outputs, metadata, param_dtype, out=out)


Faulty.fsdp_pre_all_gather = _faulty_pre  # type: ignore[method-assign]
Faulty.fsdp_post_all_gather = _faulty_post  # type: ignore[method-assign]


class AsksForThePass(HalfWeight):
    """Chooses what is gathered as TransformerEngine's weights do."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        group: Any = _get_module_fsdp_state(module)._fsdp_param_group
        if group._reshard_after_forward:
            assert group._training_state == TrainingState.FORWARD
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)


def _asks_for_the_pass() -> None:
    for shard in SYSTEMS:
        model = linear_of(AsksForThePass(torch.ones(4, 4)))
        shard(model, reshard_after_forward=False)
        model(torch.ones(1, 4)).sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.ones(4, 4))
    model = linear_of(AsksForThePass(torch.ones(4, 4)))
    fsdp_ext.fully_shard(model, reshard_after_forward=True)
    with pytest.raises(AttributeError, match=r"'_training_state'.*reshard_after_forward=False"):
        model(torch.ones(1, 4))


def test_an_extension_cannot_choose_what_is_gathered_by_the_pass() -> None:
    run_ranks(_asks_for_the_pass, 2)


def _errors() -> None:
    half = HalfWeight(torch.ones(4, 4))
    only = OnlyPre(torch.ones(4, 4))
    for fully_shard in SYSTEMS:
        with pytest.raises(AssertionError, match="fsdp_post_all_gather"):
            fully_shard(linear_of(only))
    with pytest.raises(NotImplementedError, match=r"'weight', a HalfWeight.*return Shard\(0\)"):
        fsdp_ext.fully_shard(linear_of(half), shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(NotImplementedError, match=r"'weight' is a HalfWeight\. Its .* so plan"):
        fsdp_ext.plan(linear_of(half), 2)
    with pytest.raises(NotImplementedError, match=r"'weight' is a HalfWeight.*Use fully_shard"):
        fsdp_ext.FullyShardedDataParallel(linear_of(half))
    model = fsdp_ext.fully_shard(linear_of(half))
    with pytest.raises(ValueError, match=r"flat_shard .*\['weight'\] have memory of their own"):
        model.flat_shard()
    with pytest.raises(NotImplementedError, match="so plan cannot know"):
        fsdp_ext.plan(model, 2)
    model(torch.ones(1, 4)).sum().backward()
    model.zero_grad()
    with pytest.raises(NotImplementedError, match="so plan cannot know"):
        fsdp_ext.tune(model, torch.ones(1, 4), steps=2)
    model(torch.ones(1, 4)).sum().backward()


def test_what_extensions_cannot_do_is_refused() -> None:
    run_ranks(_errors, 2)


FAULTS: dict[str, tuple[type[Exception], str]] = {
    "pre raises": (KeyError, "no key"),
    "post raises": (KeyError, "no key"),
    "other shape": (ValueError, r"'0\.weight' returned tensors of .*\(2, 1\).* at first of"),
    "in place": (NotImplementedError, r"'0\.weight' changed a gathered tensor in place"),
}


def _faults(fault: str, checkpoints: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(linear_of(Faulty(torch.randn(4, 4))) for _ in range(2)))
    for layer in model:
        if checkpoints:
            layer.forward = checkpointed(layer.forward)
        fsdp_ext.fully_shard(layer)
    fsdp_ext.fully_shard(model)
    x = torch.ones(2, 4, requires_grad=True)
    expected = model(x).detach()
    kind, message = FAULTS[fault]
    try:
        Faulty.fault = fault
        with pytest.raises(kind, match=message):
            model(x)
        Faulty.fault = ""
        loss = model(x).sum()
        assert torch.equal(model(x), expected)
        if fault == "post raises":
            Faulty.fault = fault
            with pytest.raises(kind, match=message):
                loss.backward()
    finally:
        Faulty.fault = ""
    assert torch.equal(model(x), expected)
    model(x).sum().backward()


@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpoints"])
@pytest.mark.parametrize("fault", FAULTS)
def test_training_goes_on_after_an_error_of_a_method(fault: str, checkpoints: bool) -> None:
    run_ranks(_faults, 2, fault, checkpoints)


def _first_faults() -> None:
    layer = fsdp_ext.fully_shard(linear_of(Faulty(torch.ones(4, 4))))
    try:
        Faulty.fault = "dtype"
        message = r"'weight' returned a torch\.bfloat16 tensor, but .* param_dtype=torch\.float32"
        with pytest.raises(NotImplementedError, match=message):
            layer(torch.ones(1, 4))
        Faulty.fault = "no padding"
        uneven = fsdp_ext.fully_shard(linear_of(Faulty(torch.ones(3, 4))))
        if dist.get_rank() == 1:  # the other rank has as many rows as the largest
            with pytest.raises(AssertionError, match=r"sizes \[\(1, 4\)\].*size, \(2, 4\)"):
                uneven._fsdp_ext_unit._find_extensions()
    finally:
        Faulty.fault = ""
    wrong = fsdp_ext.fully_shard(linear_of(TwoArguments(torch.ones(4, 4))))
    with pytest.raises(AssertionError, match=r"'weight' has the parameters \['mesh', 'size'\]"):
        wrong(torch.ones(1, 4))


class TwoArguments(HalfWeight):
    def fsdp_pre_all_gather(self, mesh: Any, size: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


def test_what_methods_must_not_return_is_refused() -> None:
    run_ranks(_first_faults, 2)


def _second_faults_at_first() -> None:
    """The first method to run has made its parameter when the second one fails."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    model = nn.Sequential(first, second)
    expected = model(torch.ones(1, 4)).detach()
    first.weight = nn.Parameter(HalfWeight(first.weight.detach()), requires_grad=False)
    second.weight = nn.Parameter(Faulty(second.weight.detach()))
    fsdp_ext.fully_shard(model)
    Faulty.fault = "post raises"
    try:
        with pytest.raises(KeyError, match="no key"):
            model(torch.ones(1, 4))
    finally:
        Faulty.fault = ""
    torch.testing.assert_close(model(torch.ones(1, 4)), expected, rtol=1e-2, atol=1e-2)
    assert first.weight is not None
    model(torch.ones(1, 4)).sum().backward()
    assert second.weight.grad is not None


def test_a_parameter_made_before_another_one_failed_is_made_again() -> None:
    run_ranks(_second_faults_at_first, 2)
