"""stream_weights yields whole weights by the names of the state dict, a unit ahead."""

from __future__ import annotations

import itertools
import mmap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import models
from support.checkpoints import (
    BF16,
    WAYS,
    WAYS_ON_MESHES,
    Way,
    WithBuffers,
    assert_equal,
    made,
    sharded,
    step,
    wrapped,
)
from support.launcher import run_ranks
from support.models import Stack, Subject
from support.parity import whole
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_ext import checkpoint
from fsdp_ext.checkpoint import export, stream, stream_weights
from fsdp_ext.checkpoint.transfers import new_tensor
from fsdp_ext.comm.meeting import waiting


def _has_the_state_dict(ways: dict[str, tuple[type[Subject], Way]]) -> None:
    for subject, way in ways.values():
        model, expected = made(subject, way)
        assert_equal(dict(stream_weights(model)), expected)
        cast = {n: t.bfloat16() if t.is_floating_point() else t for n, t in expected.items()}
        assert_equal(dict(stream_weights(model, torch.bfloat16, "cpu")), cast)


@pytest.mark.parametrize("world_size", [1, 3])
def test_it_has_the_names_and_values_of_the_unsharded_models_state_dict(world_size: int) -> None:
    run_ranks(_has_the_state_dict, world_size, WAYS)


def test_it_gathers_on_meshes() -> None:
    run_ranks(_has_the_state_dict, 4, WAYS_ON_MESHES)


def _half(name: str, shape: torch.Size) -> Any:
    """Return every second row of a matrix, other ones on each rank; None for the whole tensor."""
    return (slice(dist.get_rank(), None, 2), slice(None)) if len(shape) == 2 else None


def _has_the_wanted_parts() -> None:
    model, expected = made(WithBuffers, sharded)
    parts = {name: _half(name, tensor.shape) for name, tensor in expected.items()}
    assert None in parts.values()
    wanted = {n: t if parts[n] is None else t[parts[n]] for n, t in expected.items()}
    got = dict(stream_weights(model, shard=_half))
    assert_equal(got, wanted)
    for name, tensor in got.items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes or parts[name] is None

    def fail(name: str, shape: torch.Size) -> Any:
        if dist.get_rank() == 0:
            raise KeyError(name)

    if dist.get_rank() == 0:
        with pytest.raises(KeyError):
            dict(stream_weights(model, shard=fail))
    else:
        assert_equal(dict(stream_weights(model, shard=fail)), expected)
    with torch.inference_mode():
        parts_inside = dict(stream_weights(model, shard=_half))
    assert not any(tensor.is_inference() for tensor in parts_inside.values())
    with pytest.raises(TypeError, match="shard=5"):
        stream_weights(model, shard=5)  # type: ignore[arg-type]


def _refuses_fsdp1_of_torch(use_orig_params: bool, directory: Path) -> None:
    device = torch.device("cpu")
    model = TorchFSDP(Stack(), device_id=device, use_orig_params=use_orig_params)
    for call in (stream_weights, partial(export, directory=directory)):
        with pytest.raises(NotImplementedError, match="Wrap it with fsdp_ext"):
            list(call(model) or ())
    path = checkpoint.save(directory, Stack())
    for save_or_load in (partial(checkpoint.save, directory), partial(checkpoint.load, path)):
        with pytest.raises(TypeError, match=r"device_mesh: 'stem\.weight' is a ShardedTensor"):
            save_or_load(model)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_it_refuses_the_shards_of_pytorchs_fsdp1(use_orig_params: bool, tmp_path: Path) -> None:
    run_ranks(_refuses_fsdp1_of_torch, 2, use_orig_params, tmp_path)


def test_each_rank_may_take_a_part_of_each_tensor() -> None:
    run_ranks(_has_the_wanted_parts, 2)


# - Between steps


def _follows_training() -> None:
    for way in (
        partial(sharded, mp_policy=BF16, reshard_after_forward=False),
        partial(wrapped, use_orig_params=False),
    ):
        model, before = made(WithBuffers, way)
        for _ in range(2):
            step(model)
            with torch.no_grad():
                model(torch.randn(4, models.DIM))  # leaves parameters unsharded
            got = dict(stream_weights(model))
            expected = {name: whole(tensor) for name, tensor in model.state_dict().items()}
            assert_equal(got, expected)
            assert not torch.equal(got["head.weight"], before["head.weight"])


def test_it_follows_training() -> None:
    run_ranks(_follows_training, 2)


# - Collectives and memory


class Gathers(TorchDispatchMode):
    """The bytes that this rank sends in each gather, and the memory of what has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []
        self._arrived: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if "_allgather_base_" in str(func):
            output, sent, *_ = args
            self.sent.append(sent.nbytes)
            storage = output.untyped_storage()
            self._arrived.append((StorageWeakRef(storage), storage.nbytes()))
        return result

    def held(self, limit: int) -> int:
        """Return how many bytes of what was gathered are still in memory.

        Gloo's threads may let go of a tensor some time after its gather has ended. So this waits
        until there are no more bytes than the limit, but not for ever.
        """
        for waited in waiting():
            held = sum(nbytes for storage, nbytes in self._arrived if not storage.expired())
            if held <= limit or waited > 2:
                return held
        raise AssertionError("waiting() has no end")


def _is_a_unit_ahead(dtype: torch.dtype | None) -> list[int]:
    model, expected = made(Stack, sharded)
    with Gathers() as gathers:
        dict(stream_weights(model, dtype))
    root = len([*model.stem.parameters(), *model.head.parameters()])
    block = len(list(model.blocks[0].parameters()))
    ends = [root + block * blocks for blocks in range(4)]
    assert len(gathers.sent) == ends[-1]
    unit = 2 * max(sum(gathers.sent[:root]), sum(gathers.sent[root : ends[1]]))
    issued, held = [], []
    with Gathers() as gathers:
        for name, tensor in stream_weights(model, dtype):
            if name in ("stem.weight", *(f"blocks.{i}.norm.weight" for i in range(3))):
                issued.append(len(gathers.sent))
            held.append(gathers.held(2 * unit))
            assert tensor.dtype == (dtype or expected[name].dtype)
            del tensor
    assert issued == [ends[1], ends[2], ends[3], ends[3]]
    assert unit < max(held) <= 2 * unit
    return gathers.sent


def test_the_gathers_of_a_unit_are_in_flight_while_the_unit_before_is_used() -> None:
    [sent, _] = run_ranks(_is_a_unit_ahead, 2, None)
    [sent_in_bf16, _] = run_ranks(_is_a_unit_ahead, 2, torch.bfloat16)
    assert sent_in_bf16 == [nbytes // 2 for nbytes in sent]


# - A rank that stops


def flags_of(tensor: Tensor) -> list[str]:
    """Return how the system maps a tensor's memory."""
    is_mapped_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            low, high = (int(address, 16) for address in key.split("-"))
            is_mapped_here = low <= tensor.data_ptr() < high
        elif key == "VmFlags:" and is_mapped_here:
            return values
    raise AssertionError("the tensor is not in the process's memory")


@pytest.mark.parametrize("has_huge_pages", [True, False])
def test_a_large_tensor_has_new_memory_in_huge_pages(
    has_huge_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_huge_pages and not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip("this kernel has no huge pages")
    if not has_huge_pages:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)  # the system refuses it
    for nbytes in (1 << 20, 5 << 20):
        tensor = new_tensor((nbytes // 2,), torch.bfloat16).fill_(1)
        assert tensor.untyped_storage().nbytes() == nbytes
        assert tensor.data_ptr() % (2 << 20) == 0
        assert ("hg" in flags_of(tensor)) == (has_huge_pages and nbytes > 2 << 20)
        assert tensor.sum() == nbytes // 2


def _stops_early() -> None:
    model, expected = made(WithBuffers, sharded)
    got = {}
    for name, tensor in stream_weights(model):
        if dist.get_rank() == 0 and name.startswith("blocks.0"):
            break
        got[name] = tensor
    assert (got.keys() == expected.keys()) is (dist.get_rank() > 0)
    assert_equal(dict(stream_weights(model)), expected)
    step(model)


def test_a_rank_that_stops_early_leaves_the_others_their_weights() -> None:
    run_ranks(_stops_early, 2)


def _cannot_place_one() -> None:
    """Let one rank have no memory for a tensor on the device that it asks for."""
    model, expected = made(Stack, sharded)
    calls = itertools.count()
    placed = stream._placed

    def failing(*args: Any) -> Tensor:
        if dist.get_rank() == 1 and next(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return placed(*args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stream, "_placed", failing)
        if dist.get_rank() == 1:
            with pytest.raises(torch.OutOfMemoryError, match="no memory"):
                dict(stream_weights(model))
        else:
            assert_equal(dict(stream_weights(model)), expected)
    assert_equal(dict(stream_weights(model)), expected)


def test_a_rank_that_fails_leaves_the_others_their_weights() -> None:
    run_ranks(_cannot_place_one, 3, timeout=60)


# - Errors


class _AsksInForward(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="stream_weights was called while forward runs"):
            next(stream_weights(self))
        return super().forward(x)


def _is_refused() -> None:
    model, _ = made(_AsksInForward, sharded)
    step(model)
    with pytest.raises(TypeError, match=r"got dtype=torch\.int8\. Pass a floating-point dtype"):
        stream_weights(model, torch.int8)
    with pytest.raises(TypeError, match="got dtype='bf16'"):
        stream_weights(model, "bf16")  # type: ignore[arg-type]
    with torch.device("meta"):
        on_meta = sharded(Stack())
    with pytest.raises(RuntimeError, match=r"whose 'stem\.weight' is on the meta device"):
        next(stream_weights(on_meta))


def test_wrong_calls_are_refused() -> None:
    run_ranks(_is_refused, 2)


def _other_call() -> None:
    wrapped_one = wrapped(Stack())
    if dist.get_rank() == 0:
        next(stream_weights(wrapped_one))
    else:
        wrapped_one.state_dict()


def test_a_rank_that_makes_another_call_is_named() -> None:
    called = "called (stream_weights|state_dict), and rank . called (stream_weights|state_dict)"
    with pytest.raises(AssertionError, match=called):
        run_ranks(_other_call, 2)
