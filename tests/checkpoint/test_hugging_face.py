"""Models are exported in the layout of Hugging Face, and loaded from it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from support import models
from support.checkpoints import (
    WAYS,
    WAYS_ON_MESHES,
    Configuration,
    Way,
    assert_equal,
    made,
    on_mesh,
    sharded,
    step,
    unchanged,
)
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.models import Stack, Subject, Transformer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ext.checkpoint import (
    async_save,
    disk,
    export,
    hugging_face,
    load_pretrained,
    stream_weights,
    tensor_files,
)
from fsdp_ext.checkpoint.ranks import OtherRanksError

INDEX = "model.safetensors.index.json"


def state_in(directory: Path) -> dict[str, Tensor]:
    """Return what other readers find in a directory: by the index, or in the single file."""
    if not (directory / INDEX).exists():
        return safetensors.torch.load_file(directory / "model.safetensors")
    places = json.loads((directory / INDEX).read_text())["weight_map"]
    files = {file: safetensors.torch.load_file(directory / file) for file in places.values()}
    assert {name: file for file, state in files.items() for name in state} == places
    return {name: files[file][name] for name, file in places.items()}


def contents_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in stream_weights(model)}


# - Export and load

SOME = [
    "several units",
    "a tied head",
    "few rows",
    "empty",
    "offloaded",
    "FSDP1, flat",
    "not sharded",
    "recomputed and compiled",
]


def _goes_there_and_back(directory: Path, ways: dict[str, tuple[type[Subject], Way]]) -> None:
    for name, (subject, way) in ways.items():
        model, expected = made(subject, way)
        export(model, directory / name, max_shard_size=10_000)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(hugging_face, "machine", lambda: str(dist.get_rank()))
            export(model, directory / "of several hosts", max_shard_size=10_000)
        assert contents_of(directory / "of several hosts") == contents_of(directory / name)
        stored = state_in(directory / name)
        tied = expected.keys() - stored.keys()
        assert tied == ({"head.weight"} if subject is Transformer else set())
        assert_equal(stored, {name: expected[name] for name in expected.keys() - tied})
        torch.manual_seed(1)
        other = way(subject())
        assert load_pretrained(other, directory / name) == []
        assert_equal(values_of(other), expected)
        dist.barrier()


@pytest.mark.parametrize("world_size", [3, *exhaustive(1, 2)])
def test_an_export_has_the_state_dict_and_can_be_loaded(world_size: int, tmp_path: Path) -> None:
    run_ranks(_goes_there_and_back, world_size, tmp_path, {name: WAYS[name] for name in SOME})


def test_they_do_so_on_meshes(tmp_path: Path) -> None:
    run_ranks(_goes_there_and_back, 4, tmp_path, WAYS_ON_MESHES)


def _a_replica_goes_alone(directory: Path) -> None:
    """Export on one replica of HSDP, and on ranks that lack shards though they have replicas."""
    model, expected = made(Stack, on_mesh)
    mesh = model.stem.weight.device_mesh
    replica = directory / f"replica {mesh.get_local_rank('r')}"
    export(model, replica, process_group=mesh["s"].get_group())
    assert_equal(state_in(replica), expected)
    model, _ = made(Stack, partial(sharded, mesh=mesh["r"]))
    for one_host in (True, False):
        with pytest.MonkeyPatch.context() as patched:
            if not one_host:
                patched.setattr(hugging_face, "machine", lambda: str(dist.get_rank()))
            with pytest.raises((ValueError, OtherRanksError), match=r"Pass a process_group="):
                export(model, directory, process_group=mesh["s"].get_group())
    assert all(path.is_dir() for path in directory.iterdir())


def test_one_replica_exports_alone_and_ranks_without_all_shards_raise(tmp_path: Path) -> None:
    run_ranks(_a_replica_goes_alone, 4, tmp_path)


def _goes_there_and_back_on_some_ranks(directory: Path) -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return
    mesh = DeviceMesh.from_group(group, "cpu")
    model, expected = made(Stack, partial(sharded, mesh=mesh))
    export(model, directory, process_group=group)
    assert_equal(state_in(directory), expected)
    other = sharded(Stack(), mesh=mesh)
    assert load_pretrained(other, directory, process_group=group) == []
    assert_equal(values_of(other), expected)


def test_some_ranks_may_export_and_load(tmp_path: Path) -> None:
    run_ranks(_goes_there_and_back_on_some_ranks, 3, tmp_path)


def _has_empty_columns(directory: Path) -> None:
    model = nn.Linear(3, 5)
    model.register_parameter("empty", nn.Parameter(torch.zeros(4, 0)))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for tensor in expected.values():
        dist.broadcast(tensor, 0)
    model.load_state_dict(expected)
    torch.distributed.fsdp.fully_shard(model)
    export(model, directory)
    assert_equal(state_in(directory), expected)


def test_a_model_of_fsdp2_may_have_a_parameter_without_elements(tmp_path: Path) -> None:
    run_ranks(_has_empty_columns, 2, tmp_path, timeout=60)


# - Files


def _is_cut_into_files(directory: Path) -> list[str]:
    """Export with a limit of three files; return the files that this rank wrote."""
    opened: list[str] = []
    create = disk.create

    def noted(path: Path) -> int:
        opened.append(path.name.rpartition(".safetensors")[0] + ".safetensors")
        return create(path)

    model, _ = made(Stack, sharded)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk, "create", noted)
        export(model, directory, max_shard_size="2.1KB")
    return opened


def test_files_are_no_larger_than_asked_for_and_ranks_write_them_in_turns(tmp_path: Path) -> None:
    [first, second] = run_ranks(_is_cut_into_files, 2, tmp_path)
    names = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert (first, second) == ([names[0], names[2]], [names[1]])
    assert {path.name for path in tmp_path.iterdir()} == {*names, INDEX}
    index = json.loads((tmp_path / INDEX).read_text())
    sizes = []
    for name in names:
        with safetensors.safe_open(tmp_path / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            sizes.append(sum(file.get_tensor(key).nbytes for key in file.keys()))  # noqa: SIM118
    assert max(sizes) <= 2100
    assert index["metadata"]["total_size"] == sum(sizes)


def _writes_its_own_rows(directory: Path) -> int:
    """Return how many bytes of one file this rank writes, all without a gather."""
    counted = []
    write = disk.write

    def noted(file: int, buffers: list[memoryview], position: int) -> None:
        counted.append(sum(map(len, buffers)) if position else 0)  # without the header
        write(file, buffers, position)

    model, expected = made(Stack, sharded)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk, "write", noted)
        for transfer in ("batch_isend_irecv", "all_gather_into_tensor"):
            patched.delattr(dist, transfer)
        export(model, directory)
    assert_equal(state_in(directory), expected)
    return sum(counted)


def test_ranks_of_one_host_write_their_own_rows(tmp_path: Path) -> None:
    counts = run_ranks(_writes_its_own_rows, 2, tmp_path)
    assert sum(counts) == sum(tensor.nbytes for tensor in Stack().state_dict().values())
    assert max(counts) < 0.6 * sum(counts)


def _flushes(directory: Path) -> int:
    """Return how many files of an export this rank flushes."""
    model, _ = made(Stack, sharded)
    flushed: list[Path] = []
    flush = disk.flush_path
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk, "flush_path", lambda path: flushed.append(path) or flush(path))
        export(model, directory, max_shard_size="2.1KB")
    return len([path for path in flushed if path.is_relative_to(directory) and path != directory])


def test_one_rank_flushes_each_file(tmp_path: Path) -> None:
    assert run_ranks(_flushes, 2, tmp_path) == [2, 1]


def _lacks_a_rank(directory: Path) -> None:
    model, _ = made(Stack, sharded)
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match=r"without ranks \[1\], .* Pass a process_group="):
            export(model, directory, process_group=group)
        assert not list(directory.iterdir())


def test_a_group_that_lacks_ranks_of_the_model_is_refused(tmp_path: Path) -> None:
    run_ranks(_lacks_a_rank, 2, tmp_path)


def _is_written_over(directory: Path) -> None:
    model, expected = made(Stack, sharded)
    for size, dtype in ((900, None), ("5GB", torch.bfloat16), ("2.1KB", torch.float64)):
        export(model, directory, size, dtype)
        cast = {name: tensor.to(dtype or tensor.dtype) for name, tensor in expected.items()}
        assert_equal(state_in(directory), cast)
        in_index = {INDEX} if size != "5GB" else set()
        kept = {path.name for path in directory.iterdir()} - in_index
        assert kept == ({"model.safetensors"} if size == "5GB" else kept - {"model.safetensors"})
        counts = {name.split("-of-")[-1] for name in kept}
        assert len(counts) == 1  # no file of the export before
        dist.barrier()


def test_an_export_replaces_another_one(tmp_path: Path) -> None:
    run_ranks(_is_written_over, 2, tmp_path)


@pytest.mark.parametrize("size", ["", "0GB", "GB", "1.2GBs", "-1GB", "5 apples", 0, -1, True, None])
def test_other_sizes_are_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=r"max_shard_size=.*Pass a number of bytes"):
        export(nn.Linear(2, 2), "nowhere", size)


class Stopped(Exception):
    """Raised in the place of a change of the disk."""


def assert_no_part_of(directory: Path, old: dict[str, Tensor]) -> None:
    """Check that every file is whole, and that only a whole export can be loaded: the old one."""
    for path in directory.glob("*.safetensors"):
        safetensors.torch.load_file(path)
    if (directory / INDEX).exists() or (directory / "model.safetensors").exists():
        assert_equal(state_in(directory), old)


def _fails_at_each_change(directory: Path, failing: int) -> int:
    """Let one rank fail at its first, second, ... change of the disk, until none is left."""
    model, old = made(Stack, sharded)
    export(model, directory, max_shard_size=2000)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    new = {name: tensor + 1 for name, tensor in old.items()}
    for count in range(1000):
        changes = iter(range(count))

        def change(changes: Any = changes) -> None:
            if dist.get_rank() == failing and next(changes, None) is None:
                raise Stopped("the disk is full")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(disk, "before_change", change)
            try:
                export(model, directory, max_shard_size=2000)
            except (Stopped, RuntimeError) as error:
                raised = str(error)
            else:
                assert_equal(state_in(directory), new)
                return count
        of_peer = f"rank {failing} failed: Stopped: "
        assert raised == (of_peer if dist.get_rank() != failing else "") + "the disk is full"
        assert_no_part_of(directory, old)
        dist.barrier()
        export(model, directory, max_shard_size=2000)  # also beside what the failed one left
        assert_equal(state_in(directory), new)
        old = new
        dist.barrier()
    raise AssertionError("it never succeeded")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_rank_fails_on_all_and_leaves_no_partial_file_under_a_final_name(
    failing: int, tmp_path: Path
) -> None:
    counts = run_ranks(_fails_at_each_change, 2, tmp_path, failing)
    assert counts[failing] >= 5


@pytest.mark.parametrize(
    ("size", "version"), [(2000, "old"), ("5GB", "old"), (2000, "new"), ("5GB", "new")]
)
def test_an_export_that_is_killed_leaves_no_partial_file_under_a_final_name(
    size: int | str, version: str, tmp_path: Path
) -> None:
    model = Stack()
    model.config = config = Configuration("old")  # type: ignore[assignment]
    export(model, tmp_path, max_shard_size=size)
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new = {name: tensor + 1 for name, tensor in old.items()}
    model.load_state_dict(new)
    config.text = version
    (tmp_path / "of the user.partial").touch()
    for count in range(1000):
        child = os.fork()
        if child == 0:
            changes = iter(range(count))
            disk.before_change = lambda changes=changes: next(changes, None) is None and os._exit(1)
            export(model, tmp_path, max_shard_size=size)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        if size == 2000:
            assert_no_part_of(tmp_path, old)
        elif version == "old" or (tmp_path / "model.safetensors").exists():
            # One file replaces the other, so there is always one if the configuration stays.
            found = state_in(tmp_path)
            is_new = torch.equal(found["stem.bias"], new["stem.bias"])
            assert_equal(found, new if is_new else old)
            assert (tmp_path / "config.json").read_text() == (version if is_new else "old")
    assert_equal(state_in(tmp_path), new)
    assert [path.name for path in tmp_path.glob("*.partial")] == ["of the user.partial"]
    assert count > (15 if size == 2000 else 5)


# - Reading


def _reads_its_own_rows(directory: Path) -> list[int]:
    """Return how many bytes this rank reads for a model by rows, by columns, and unsharded."""
    model, expected = made(Stack, sharded)
    export(model, directory)
    counted = []
    read = tensor_files.TensorFile.read

    for way in (sharded, unchanged):
        counts: list[int] = []

        def noted(
            self: tensor_files.TensorFile,
            name: str,
            begin: int,
            into: memoryview,
            counts: list[int] = counts,
        ) -> None:
            counts.append(len(into))
            read(self, name, begin, into)

        with torch.device("meta"):
            on_meta = way(Stack())
        on_meta.to_empty(device="cpu")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(tensor_files.TensorFile, "read", noted)
            load_pretrained(on_meta, directory)
        assert_equal(values_of(on_meta), expected)
        counted.append(sum(counts))
    return counted


def test_each_rank_reads_its_own_rows(tmp_path: Path) -> None:
    counts = run_ranks(_reads_its_own_rows, 2, tmp_path)
    _, whole_model = counts[0]
    assert sum(by_rows for by_rows, _ in counts) == whole_model
    assert max(by_rows for by_rows, _ in counts) < 0.6 * whole_model


def _trains_on(directory: Path, *, reshards: bool) -> None:
    """Load into a model after a forward, which may have left parameters unsharded; train it."""
    way = partial(sharded, reshard_after_forward=reshards)
    model, expected = made(Stack, way)
    export(model, directory, dtype=torch.bfloat16)
    rounded = {name: tensor.bfloat16().float() for name, tensor in expected.items()}
    plain = Stack()
    plain.load_state_dict(rounded)
    x = torch.ones(2, models.DIM)
    for _ in range(2):
        step(model)
        with torch.no_grad():
            model(x)
            load_pretrained(model, directory)
            torch.testing.assert_close(model(x), plain(x))
        assert_equal(values_of(model), rounded)


def test_a_model_computes_and_trains_with_what_it_has_loaded(tmp_path: Path) -> None:
    for reshards in (False, True):
        run_ranks(partial(_trains_on, reshards=reshards), 2, tmp_path)


# - What cannot be loaded


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def changed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the tensors of a file, or the index."""
    if path.name == INDEX:
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))
    else:
        state = safetensors.torch.load_file(path)
        change(state)
        safetensors.torch.save_file(state, path)


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
DAMAGES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no files": (
        lambda d: (d / INDEX).unlink(),
        FileNotFoundError,
        r"has neither model\.safetensors nor model\.safetensors\.index\.json\.",
    ),
    "a missing file": (
        lambda d: (d / SECOND).unlink(),
        FileNotFoundError,
        rf".* says that 'blocks\..*' is in {SECOND}, and there is no such file\.",
    ),
    "a directory in place of a file": (
        lambda d: ((d / FIRST).unlink(), (d / FIRST).mkdir()),
        ValueError,
        rf"{FIRST} is not a file",
    ),
    "a tensor missing": (
        lambda d: changed(d / INDEX, lambda places: places.pop("stem.bias")),
        ValueError,
        r"lacks 'stem\.bias'\. Load it into",
    ),
    "a tensor missing in its file": (
        lambda d: changed(d / FIRST, lambda state: state.pop("stem.bias")),
        ValueError,
        rf"says that 'stem\.bias' is in {FIRST}, which has no such tensor",
    ),
    "an extra tensor": (
        lambda d: (
            changed(d / FIRST, lambda state: state.update(extra=torch.ones(2))),
            changed(d / INDEX, lambda places: places.update(extra=FIRST)),
        ),
        ValueError,
        r"has 'extra', which the model lacks\.",
    ),
    "another shape": (
        lambda d: changed(d / FIRST, lambda state: state.update({"stem.bias": torch.ones(2)})),
        ValueError,
        rf"{FIRST} has 'stem\.bias' of shape \(2,\), and the model has shape \(10,\)",
    ),
    "integers": (
        lambda d: changed(
            d / FIRST, lambda state: state.update({"stem.bias": state["stem.bias"].int()})
        ),
        ValueError,
        rf"{FIRST} has 'stem\.bias' as torch\.int32, and the model as torch\.float32",
    ),
    "a place outside": (
        lambda d: changed(
            d / INDEX, lambda places: places.update({"stem.bias": f"../other/{FIRST}"})
        ),
        ValueError,
        rf"'stem\.bias' is in '\.\./other/{FIRST}', which is outside of its directory",
    ),
    "no index": (
        lambda d: (d / INDEX).write_text("[]"),
        ValueError,
        r"index\.json cannot be understood \(TypeError",
    ),
    "an index that is not JSON": (
        lambda d: cut(d / INDEX) or cut(d / INDEX),
        ValueError,
        r"index\.json cannot be understood \(JSONDecodeError",
    ),
    "a file that is cut off": (
        lambda d: cut(d / SECOND),
        ValueError,
        rf"{SECOND} has \d+ bytes, and its tensors end at byte \d+",
    ),
    "a header of garbage": (
        lambda d: (d / FIRST).write_bytes(b"\x10" + bytes(7) + b"x" * 100),
        ValueError,
        rf"{FIRST} has a header that cannot be understood",
    ),
}


def _refuses(directory: Path) -> None:
    model, expected = made(Stack, sharded)
    export(model, directory / "whole", max_shard_size=3500)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    added = {name: tensor + 1 for name, tensor in expected.items()}
    for name, (damage, kind, message) in DAMAGES.items():
        if dist.get_rank() == 0:
            shutil.copytree(directory / "whole", directory / name)
            damage(directory / name)
        dist.barrier()
        with pytest.raises(kind, match=message):
            load_pretrained(model, directory / name)
        assert_equal(values_of(model), added)
    for name, missing in (("a tensor missing", ["stem.bias"]), ("an extra tensor", [])):
        assert load_pretrained(model, directory / name, strict=False) == missing
        values = {**expected, **{each: added[each] for each in missing}}
        assert_equal(values_of(model), values)


def test_damaged_directories_are_refused_and_the_model_is_unchanged(tmp_path: Path) -> None:
    run_ranks(_refuses, 2, tmp_path)


def _fails_on_one_rank(directory: Path) -> None:
    """Let one rank fail to read the last tensor."""
    model, expected = made(Stack, sharded)
    export(model, directory)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    added = {name: tensor + 1 for name, tensor in expected.items()}
    read = tensor_files.TensorFile.read

    def failing(self: tensor_files.TensorFile, name: str, begin: int, into: memoryview) -> None:
        if dist.get_rank() == 1 and name == "blocks.2.down.bias":
            raise OSError(5, "Input/output error")
        read(self, name, begin, into)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tensor_files.TensorFile, "read", failing)
        kind = OSError if dist.get_rank() == 1 else RuntimeError
        message = "" if dist.get_rank() == 1 else "rank 1 failed: OSError: .*Input/output error"
        with pytest.raises(kind, match=message):
            load_pretrained(model, directory)
    assert_equal(values_of(model), added)


def test_a_model_is_unchanged_on_all_ranks_if_one_fails_to_read(tmp_path: Path) -> None:
    run_ranks(_fails_on_one_rank, 2, tmp_path)


def _loads_tied(directory: Path) -> None:
    """Load files that have a tied weight under either name, or under both."""
    model, expected = made(Transformer, sharded)
    for names in (["head.weight"], ["tokens.weight"], ["head.weight", "tokens.weight"]):
        if dist.get_rank() == 0:
            left = {"head.weight", "tokens.weight"} - set(names)
            state = {name: t.clone() for name, t in expected.items() if name not in left}
            safetensors.torch.save_file(state, directory / "model.safetensors")
        dist.barrier()
        other = sharded(Transformer())
        assert load_pretrained(other, directory) == []
        assert_equal(values_of(other), expected)
        dist.barrier()
    if dist.get_rank() == 0:
        del state["head.weight"], state["tokens.weight"]
        safetensors.torch.save_file(state, directory / "model.safetensors")
    dist.barrier()
    with pytest.raises(ValueError, match=r"lacks 'tokens\.weight', 'head\.weight'"):
        load_pretrained(model, directory)


def test_a_tied_weight_may_have_any_of_its_names(tmp_path: Path) -> None:
    run_ranks(_loads_tied, 2, tmp_path)


def test_float8_weights_are_not_cast_without_their_scales(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    state = {"weight": model.weight.detach().to(torch.float8_e4m3fn)}
    for scale in ("weight_scale_inv", "input_scale", "weight.scale", "weight_SCALE"):
        scales = {scale: torch.ones(1)}
        safetensors.torch.save_file({**state, **scales}, tmp_path / "model.safetensors")
        message = rf"has 'weight' as torch\.float8_e4m3fn, .* without '{scale}'\. Quantized weights"
        for strict in (True, False):
            with pytest.raises(ValueError, match=message):
                load_pretrained(other, tmp_path, strict)
    for others in ({}, {"logit_scale": torch.ones(1)}):  # the last is another parameter
        safetensors.torch.save_file({**state, **others}, tmp_path / "model.safetensors")
        load_pretrained(other, tmp_path, strict=not others)
        assert torch.equal(other.weight, state["weight"].float())


@pytest.mark.parametrize("call", [export, load_pretrained])
def test_the_error_of_an_earlier_save_is_raised(call: Callable[..., Any], tmp_path: Path) -> None:
    model = Stack()
    async_save(tmp_path, model, extra=object())
    with pytest.raises(RuntimeError, match=r"the previous checkpoint was not saved: extra is of"):
        call(model, tmp_path)


def test_one_process_needs_no_group(tmp_path: Path) -> None:
    model, other = Stack(), Stack()
    export(model, tmp_path)
    load_pretrained(other, tmp_path)
    assert_equal(values_of(other), model.state_dict())
