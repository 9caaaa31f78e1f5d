"""A checkpoint that is damaged, or of another model, is refused, and the model stays as it is."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from support.checkpoints import assert_same
from support.forked import error_in_child
from support.launcher import run_ranks
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import fsdp_ext
from fsdp_ext import checkpoint
from fsdp_ext.checkpoint import cli, disk, loading, ranks, saving
from fsdp_ext.checkpoint import directory as directories
from fsdp_ext.checkpoint.ranks import Ranks
from fsdp_ext.checkpoint.reading import Checkpoint, Reader
from fsdp_ext.checkpoint.tensor_files import NAMES, TensorFile, checksum, digest
from fsdp_ext.checkpoint.trees import encode


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


Made = tuple[nn.Module, torch.optim.Optimizer]


def made(width: int = 5) -> Made:
    model = Net(width)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.save(tmp_path_factory.mktemp("saved"), *made(), {"step": 3})


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a copy of a checkpoint; afterwards check that loading it changes nothing."""
    path = tmp_path / "checkpoint-000001"
    shutil.copytree(saved, path)
    yield path
    model, optimizer = made()
    before = [tensor.clone() for tensor in model.parameters()]
    states = [tensor.clone() for state in optimizer.state.values() for tensor in state.values()]
    with pytest.raises((ValueError, OSError)):
        checkpoint.load(path, model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    after = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(states, after, strict=True))


FILES = ["weights-00000.safetensors", "optimizer-00000.safetensors", "extra-00000.safetensors"]


@pytest.mark.parametrize("name", [*FILES, "index.json"])
def test_a_flipped_bit_is_found_wherever_it_is(saved: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "checkpoint-000001"
    shutil.copytree(saved, path)
    whole = (path / name).read_bytes()
    step = max(1, len(whole) // 200)
    model, optimizer = made()
    for position in [*range(0, len(whole), step), *range(len(whole) - 40, len(whole))]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        (path / name).write_bytes(damaged)
        with pytest.raises(checkpoint.DamagedFileError, match=r"damaged|checksum|names|bytes"):
            checkpoint.load(path, model, optimizer)
    (path / name).write_bytes(whole)
    checkpoint.load(path, model, optimizer)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_file_that_was_cut_short(copy: Path, name: str, size: int) -> None:
    os.truncate(copy / name, size % (copy / name).stat().st_size)
    with pytest.raises(checkpoint.DamagedFileError, match=f"{name} has .* bytes, and .* were"):
        checkpoint.load(copy, *made())


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing"):
        checkpoint.load(copy, *made())


def test_a_damaged_tensor_is_named(copy: Path) -> None:
    path = copy / FILES[0]
    part = TensorFile(path).parts["second.bias"]
    with path.open("r+b") as file:
        file.seek(part.begin + 2)
        file.write(b"\x55")
    with pytest.raises(checkpoint.DamagedFileError, match=r"tensor 'second\.bias'"):
        checkpoint.load(copy, *made())


def rewrite_index(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change an index and make its checksum fit."""
    index = json.loads((path / "index.json").read_text())
    change(index["content"])
    index["checksum"] = digest(index["content"])
    (path / "index.json").write_text(json.dumps(index))


def rewrite_header(
    path: Path, change: Callable[[dict[str, Any]], None], name: str = FILES[0]
) -> None:
    """Change the header of a file, and make sizes and checksums fit."""
    header = rewrite_header_of(path / name, change)
    entry = [name, (path / name).stat().st_size, checksum(header)]
    kind = name.partition("-")[0]
    rewrite_index(path, lambda content: content["files"][kind].__setitem__(0, entry))


def rewrite_header_of(file: Path, change: Callable[[dict[str, Any]], None]) -> bytes:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    text = struct.pack("<Q", len(text)) + text
    file.write_bytes(text + data[8 + length :])
    return text


def place(header: dict[str, Any], name: str, whole_and_offset: list[list[int]]) -> None:
    """Change the whole shape and the offset that a header states for a part."""
    ours = json.loads(header["__metadata__"]["fsdp_ext"])
    ours["parts"][name][:2] = whole_and_offset
    header["__metadata__"]["fsdp_ext"] = json.dumps(ours)


LIES: dict[str, Any] = {
    "behind the end": {"dtype": "F32", "shape": [5, 3], "data_offsets": [1 << 40, (1 << 40) + 60]},
    "of huge size": {"dtype": "F32", "shape": [1 << 50], "data_offsets": [0, 1 << 52]},
    "before the beginning": {"dtype": "F32", "shape": [5, 3], "data_offsets": [-60, 0]},
    "of another size": {"dtype": "F32", "shape": [5, 4], "data_offsets": [0, 60]},
    "of an unknown dtype": {"dtype": "F31", "shape": [5, 3], "data_offsets": [0, 60]},
    "of no shape": {"dtype": "F32", "shape": "53", "data_offsets": [0, 60]},
    "over another one": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "no entry": [1, 2],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies(copy: Path, lie: str) -> None:
    rewrite_header(copy, lambda header: header.update({"first.weight": LIES[lie]}))
    with pytest.raises(checkpoint.DamagedFileError, match=FILES[0]):
        checkpoint.load(copy, *made())


@pytest.mark.parametrize(
    "lie", [[[5, 3], [1, 0]], [[5, 3], [0]], [[-5, 3], [0, 0]], [[9, 3], [0, 0]]]
)
def test_a_part_that_does_not_lie_in_its_tensor(copy: Path, lie: list[list[int]]) -> None:
    rewrite_header(copy, lambda header: place(header, "first.weight", lie))
    with pytest.raises(ValueError, match=r"first\.weight|part|sizes"):
        checkpoint.load(copy, *made())


def test_tensors_over_one_another_in_a_file_without_checksums(tmp_path: Path) -> None:
    checkpoint.export(Net(width=2), tmp_path)

    def change(header: dict[str, Any]) -> None:
        header["first.bias"]["data_offsets"] = header["second.bias"]["data_offsets"]

    rewrite_header_of(tmp_path / "model.safetensors", change)
    with pytest.raises(checkpoint.DamagedFileError, match=r"has tensor .* at byte .* instead of"):
        checkpoint.load_pretrained(Net(width=2), tmp_path)


def test_an_unsupported_dtype_is_no_damage(tmp_path: Path) -> None:
    checkpoint.export(Net(), tmp_path)
    entry = {"dtype": "F4", "shape": [5, 24], "data_offsets": [0, 60]}
    file = tmp_path / "model.safetensors"
    rewrite_header_of(file, lambda header: header.update({"first.weight": entry}))
    with pytest.raises(ValueError, match=r"has 'first\.weight' as F4, which .* Quantized") as error:
        checkpoint.load_pretrained(Net(), tmp_path)
    assert not isinstance(error.value, checkpoint.DamagedFileError)


def _save_halves(place: Path) -> None:
    checkpoint.save(place, fsdp_ext.fully_shard(nn.Linear(4, 4, bias=False)))


def test_an_index_that_lacks_the_files_of_a_rank(tmp_path: Path) -> None:
    run_ranks(_save_halves, 2, tmp_path)
    path = tmp_path / "checkpoint-000001"
    rewrite_index(path, lambda content: content["files"]["weights"].pop())
    with pytest.raises(checkpoint.DamagedFileError, match="lacks 8 of the 16 elements of 'weight'"):
        checkpoint.load(path, nn.Linear(4, 4, bias=False))


def test_parts_over_one_another_do_not_hide_a_gap(tmp_path: Path) -> None:
    run_ranks(_save_halves, 2, tmp_path)
    path = tmp_path / "checkpoint-000001"
    rewrite_header(path, lambda header: place(header, "weight", [[4, 4], [1, 0]]))
    parts = Checkpoint(path).parts("weights")["weight"]
    message = "lacks 4 of the 8 elements of 'weight'"
    with pytest.raises(checkpoint.DamagedFileError, match=message), Reader() as reader:
        reader.add("weight", parts, (0, 0), torch.empty(2, 4))


class WithState(Net):
    """A model with an extra state, whose shape the model does not know."""

    def get_extra_state(self) -> Any:
        return torch.ones(1)

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("a damaged state was set")


def test_a_shape_that_the_parts_do_not_fill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint.save(tmp_path, WithState())
    rewrite_header(path, lambda header: place(header, "_extra_state", [[1 << 60], [0]]))
    lacks = rf"lacks {(1 << 60) - 1} of the {1 << 60} elements of '_extra_state', whose shape is"
    with pytest.raises(checkpoint.DamagedFileError, match=lacks):
        checkpoint.load(path, WithState())
    commands = [["inspect", "--verify"], ["export", str(tmp_path / "x")]]
    for command, *more in [*commands, ["convert", str(tmp_path / "y")]]:
        assert cli.run(command, [str(path), *more]) == 1
        assert re.search(lacks, capsys.readouterr().err)


def test_an_index_that_names_a_file_elsewhere(copy: Path) -> None:
    rewrite_index(copy, lambda content: content["files"]["weights"][0].__setitem__(0, "../secret"))
    with pytest.raises(checkpoint.DamagedFileError, match=r"names '\.\./secret', which is not a"):
        checkpoint.load(copy, *made())


def test_an_index_that_is_nested_too_deeply_is_damaged(copy: Path) -> None:
    (copy / "index.json").write_text("[" * 100_000)
    with pytest.raises(checkpoint.DamagedFileError, match=r"index.json is damaged"):
        checkpoint.load(copy, *made())


def test_a_checkpoint_of_a_newer_format(copy: Path) -> None:
    rewrite_index(copy, lambda content: content.update(format=2, fsdp_ext="9.9"))
    with pytest.raises(ValueError, match=r"has format 2, written by fsdp_ext 9\.9, and this"):
        checkpoint.load(copy, *made())


@pytest.mark.parametrize(
    "lie",
    [
        *("format", "fsdp_ext", "torch", "world_size", "mesh", "files"),  # keys that are removed
        {"format": None},
        {"world_size": [1]},
        {"mesh": 3},
        {"files": [1]},
        {"files": {"weights": None}},
        {"files": {"weights": [3]}},
        {"files": {"weights": ["x"]}},
    ],
)
def test_an_index_of_another_form(
    copy: Path, capsys: pytest.CaptureFixture[str], lie: str | dict[str, Any]
) -> None:
    def change(content: dict[str, Any]) -> None:
        content.pop(lie) if isinstance(lie, str) else content.update(lie)

    rewrite_index(copy, change)
    with pytest.raises(checkpoint.DamagedFileError, match=r"index\.json (is damaged|has metadata)"):
        checkpoint.load(copy, *made())
    assert cli.run("inspect", [str(copy)]) == 1
    assert "index.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        (FILES[0], {"aliases": 3}),
        (FILES[0], {"aliases": {"tied": "nowhere"}}),
        (FILES[0], {"aliases": {"tied": [1]}}),
        (FILES[0], {"other": {"state": {"tensor": [1]}}}),
        (FILES[0], {"versions": 3}),
        (FILES[0], {"versions": {"": "x"}}),
        (FILES[1], {"state": [1]}),
        (FILES[1], {"state": {"first.weight": {"tensor": {}}}}),
        (FILES[1], {"groups": {}}),
        (FILES[1], {"groups": [1]}),
        (FILES[1], {"groups": [{"names": [], "options": {"list": 3}}]}),
        (FILES[1], {"groups": [{"names": [{}], "options": {"dict": []}}]}),
    ],
)
def test_metadata_of_another_form(copy: Path, name: str, lie: dict[str, Any]) -> None:
    def change(header: dict[str, Any]) -> None:
        ours = json.loads(header["__metadata__"]["fsdp_ext"])
        ours["tree"].update(lie)
        header["__metadata__"]["fsdp_ext"] = json.dumps(ours)

    rewrite_header(copy, change, name)
    with pytest.raises(ValueError, match=rf"{copy.name}.* (has|lacks) "):
        checkpoint.load(copy, *made())


# - Other models


def test_models_with_other_names_and_shapes(saved: Path) -> None:
    model, optimizer = made()
    more = nn.ModuleDict({"first": model.first, "second": model.second, "third": nn.Linear(1, 1)})
    with pytest.raises(ValueError, match=r"lacks 'third\.weight', 'third\.bias'\. Load it into"):
        checkpoint.load(saved, more)
    less = nn.ModuleDict({"first": model.first})
    with pytest.raises(ValueError, match=r"has 'second\.bias', 'second\.weight', which the model"):
        checkpoint.load(saved, less)
    with pytest.raises(ValueError, match=r"has 'first\.\w+' of shape \(5.*, and the model has"):
        checkpoint.load(saved, Net(7))
    expanded = Net()
    expanded.first.bias = nn.Parameter(torch.zeros(1).expand(expanded.first.bias.shape))
    with pytest.raises(ValueError, match=r"'first\.bias' is an expanded tensor.* its clone\(\)"):
        checkpoint.load(saved, expanded)
    with pytest.raises(ValueError, match="got an optimizer whose group 0 has parameters that are"):
        checkpoint.load(saved, Net(), optimizer)
    expected = torch.load(_as_torch(saved), weights_only=True)
    checkpoint.load(saved, less, strict=False)
    assert torch.equal(model.first.weight, expected["first.weight"])


def _as_torch(saved: Path) -> Path:
    model, optimizer = made()
    checkpoint.load(saved, model, optimizer)
    path = saved.parent / "whole.pt"
    torch.save(model.state_dict(), path)
    return path


def test_an_optimizer_that_was_not_saved_or_steps_more(tmp_path: Path) -> None:
    model, optimizer = made()
    checkpoint.save(tmp_path / "without", model)
    with pytest.raises(ValueError, match="was saved without an optimizer"):
        checkpoint.load(tmp_path / "without", model, optimizer)
    fewer = torch.optim.AdamW(model.first.parameters())
    checkpoint.save(tmp_path / "fewer", model, fewer)
    with pytest.raises(ValueError, match=r"has no state of 'second\.weight', 'second\.bias', "):
        checkpoint.load(tmp_path / "fewer", model, optimizer)


class Counting(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "tokens": 7}


def test_states_of_another_optimizer_class_leave_the_model_unchanged(tmp_path: Path) -> None:
    model = Net()
    momentum = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    momentum.step()
    checkpoint.save(tmp_path, model, momentum)
    other, optimizer = made()
    before = [param.clone() for param in other.parameters()]
    with pytest.raises(ValueError, match=r"AdamW cannot load .* of the class that was saved"):
        checkpoint.load(tmp_path, other, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    assert all("exp_avg" in state for state in optimizer.state.values())
    assert all(param in optimizer.state for param in optimizer.param_groups[0]["params"])


def test_optimizers_whose_state_belongs_to_no_parameter(tmp_path: Path) -> None:
    model, optimizer = made()
    other = torch.optim.SGD(model.first.parameters())
    with pytest.raises(ValueError, match=r"two optimizers that step 'first\.\w+'\. Save one"):
        checkpoint.save(tmp_path, model, [optimizer, other])
    with pytest.raises(ValueError, match=r"Counting, whose state_dict.* has the entry 'tokens'"):
        checkpoint.save(tmp_path, model, Counting(model.parameters()))
    assert checkpoint.latest(tmp_path) is None


# - Places


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    model, _ = made()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"is a file\. Pass a directory\."):
        checkpoint.save(tmp_path / "file", model)
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(NotADirectoryError, match="link is a link to nothing"):
        checkpoint.save(tmp_path / "link", model)
    with pytest.raises(FileNotFoundError, match=r"has no checkpoint\. Pass the directory that"):
        checkpoint.load(tmp_path, model)
    assert checkpoint.latest(tmp_path / "nothing") is None
    (tmp_path / ".metadata").write_text("")
    with pytest.raises(FileNotFoundError, match=r"is a checkpoint of torch\.distributed\."):
        checkpoint.load(tmp_path, model)
    with pytest.raises(ValueError, match=r"got keep=0\. Pass a number of at least 1"):
        checkpoint.save(tmp_path, model, keep=0)


def test_a_directory_that_has_the_name_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, _ = made()
    saving = checkpoint.async_save("checkpoint-000001", model)
    monkeypatch.chdir("/")
    path = saving.result()
    assert path == tmp_path / "checkpoint-000001/checkpoint-000001"
    checkpoint.load(path.parent, model)
    checkpoint.load(path, model)


def test_another_job_that_writes_there(tmp_path: Path) -> None:
    model, _ = made()
    with (
        directories.locked(tmp_path),
        pytest.raises(FileExistsError, match="Another job is writing into"),
    ):
        checkpoint.save(tmp_path, model)
    checkpoint.save(tmp_path, model)


@pytest.mark.parametrize("moment", ["before its index is written", "in the middle of its removal"])
def test_a_job_whose_files_another_one_removes_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)  # so jobs do not know of each other
    model = made()[0]
    with pytest.warns(UserWarning, match=r"cannot be locked \(Function not implemented\)\."):
        checkpoint.save(tmp_path, model)
    written, go_on = threading.Event(), threading.Event()
    write_files, remove = saving._write_files, disk.remove
    outcomes: list[object] = []

    def save() -> None:
        try:
            outcomes.append(checkpoint.save(tmp_path, model, keep=1))
        except OSError as error:
            outcomes.append(error)

    other = threading.Thread(target=save)

    def end_the_other_job() -> None:
        go_on.set()
        other.join()

    def write(*args: Any) -> dict[str, Any]:
        if threading.current_thread() is other:
            files = write_files(*args)
            written.set()
            assert go_on.wait(60)
            return files
        end_the_other_job()
        return write_files(*args)

    def remove_one(path: Path) -> None:
        remove(path)
        if threading.current_thread() is not other and "removal" in moment:
            end_the_other_job()

    monkeypatch.setattr(saving, "_write_files", write)
    monkeypatch.setattr(disk, "remove", remove_one)
    other.start()
    assert written.wait(60)
    try:
        path = checkpoint.save(tmp_path, model, keep=1)
    finally:
        end_the_other_job()
    assert [type(each) for each in outcomes] == [FileNotFoundError]
    assert path == checkpoint.latest(tmp_path)
    checkpoint.load(path, model)
    assert [each for each in tmp_path.iterdir() if each.name != ".lock"] == [path]


def test_a_checkpoint_that_is_a_link_is_removed_and_its_target_kept(tmp_path: Path) -> None:
    model = made()[0]
    jobs = tmp_path / "jobs"
    moved = checkpoint.save(jobs, model).rename(tmp_path / "moved")
    (jobs / "checkpoint-000001").symlink_to(moved)
    kept = checkpoint.save(jobs, model, keep=1)
    assert [path for path in jobs.iterdir() if path.name != ".lock"] == [kept]
    checkpoint.load(moved, model)


def test_an_old_checkpoint_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made()[0]
    checkpoint.save(tmp_path, model)

    def fail(path: Path) -> None:
        raise PermissionError(f"Operation not permitted: {path.name}")

    with monkeypatch.context() as context:
        context.setattr(disk, "remove_directory", fail)
        message = r"could not be removed: Operation not permitted: \.deleting-000001"
        with pytest.warns(UserWarning, match=message) as warnings:
            second = checkpoint.save(tmp_path, model, keep=1)
        assert warnings[0].filename == __file__
        with pytest.warns(UserWarning, match=message):
            third = checkpoint.save(tmp_path, model)
    assert directories.checkpoints(tmp_path) == [second, third]
    checkpoint.load(third, model)
    last = checkpoint.save(tmp_path, model, keep=1)
    assert [path for path in tmp_path.iterdir() if path.name != ".lock"] == [last]


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    model, optimizer = made()
    before = checkpoint.save(tmp_path, model, optimizer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"weights-00000\.safetensors cannot be written \(File"):
            checkpoint.save(tmp_path, model, optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [before.name]
    checkpoint.load(tmp_path, model, optimizer)


def error_of_another_user(call: Callable[[], object]) -> str:
    """Run a call in a child process without root's rights. Return its error, or "no error"."""

    def call_as_another() -> None:
        if os.geteuid() == 0:
            os.setuid(65534)
        call()

    return error_in_child(call_as_another)


def test_places_without_permission() -> None:
    if error_of_another_user(lambda: None) != "no error":
        pytest.skip("root may not become another user here")
    model, optimizer = made()
    with tempfile.TemporaryDirectory() as name:  # only one user may enter tmp_path
        place = Path(name)
        place.chmod(0o755)
        path = checkpoint.save(place / "runs", model, optimizer)
        checkpoint.export(model, place / "files")
        closed = [place / "closed", path / FILES[1], place / "files/model.safetensors"]
        closed[0].mkdir()
        for each in closed:
            each.chmod(0)
        state = {key: value.clone() for key, value in model.state_dict().items()}

        def load() -> None:
            try:
                checkpoint.load(place / "runs", model, optimizer)
            finally:
                assert_same(dict(model.state_dict()), state)

        try:
            for call, refused in (
                (lambda: checkpoint.save(closed[0], model), closed[0]),
                (lambda: checkpoint.async_save(closed[0], model).result(), closed[0]),
                (lambda: checkpoint.export(model, closed[0]), closed[0]),
                (load, closed[1]),
                (lambda: checkpoint.load_pretrained(model, place / "files"), closed[2]),
            ):
                error = error_of_another_user(call)
                assert re.match(rf"PermissionError: .*{refused}", error), error
        finally:
            closed[0].chmod(0o700)


# - Values


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"x": Odd()}, "extra/x is of type Odd"),
        ([{1}], "extra/0 is of type set"),
        (Odd, "type type"),
        (numpy.longdouble(1), "extra is of type longdouble"),
        (numpy.datetime64(0, "ns"), "extra is of type datetime64"),
    ],
)
def test_values_that_would_need_pickle_are_refused(tmp_path: Path, value: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}, which cannot be saved. Use numbers"):
        checkpoint.save(tmp_path, nn.Linear(1, 1), extra=value)
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize("array", [numpy.array(["a"]), numpy.arange(2, dtype=">i4")])
def test_arrays_that_cannot_become_tensors_are_named_in_the_error(
    tmp_path: Path, array: Any
) -> None:
    with pytest.raises(TypeError, match=r"extra/x is a NumPy array of .*, which cannot be saved"):
        checkpoint.save(tmp_path, nn.Linear(1, 1), extra={"x": array})


def test_tensors_that_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"is on the meta device and has no elements yet\. Call"):
        checkpoint.save(tmp_path, nn.Linear(1, 1, device="meta"))
    sparse = nn.Module()
    sparse.register_buffer("s", torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match=r"'s' is a Tensor of layout torch\.sparse_coo"):
        checkpoint.save(tmp_path, sparse)
    strange = nn.Module()
    strange.register_buffer("q", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(TypeError, match=r"'q' has dtype torch\.complex128, which safetensors"):
        checkpoint.save(tmp_path, strange)
    with pytest.raises(TypeError, match="is of type set"):
        encode({"a": {1}}, "x", {})


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    shared = torch.arange(3)
    extra = {
        "numbers": [1, 2.5, True, None, float("inf"), float("-inf"), -0.0],
        "nested": ({"a": (1, [2])}, b"\x00\xff", torch.float8_e4m3fn, "text"),
        "counter": Counter({5: 2}),
        "generators": (random.getstate(), numpy.random.get_state(), torch.get_rng_state()),
        1: torch.ones(2),
        "1": torch.zeros(2),
        "a/b": shared,
        "a": {"b": shared + 1},
        ("a", 2): numpy.arange(4, dtype=numpy.uint32),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "dtypes": [torch.ones(2).to(dtype) for dtype in NAMES],
        "negative": torch.tensor([1 + 2j]).conj().imag,
    }
    model = nn.Linear(1, 1)
    checkpoint.save(tmp_path, model, extra=extra)
    assert_same(checkpoint.load(tmp_path, model), extra)
    checkpoint.save(tmp_path, model, extra=float("nan"))
    assert math.isnan(checkpoint.load(tmp_path, model))


def test_numpy_scalars_come_back_as_numbers(tmp_path: Path) -> None:
    model, optimizer = made()
    schedule = LambdaLR(optimizer, lambda step: 0.5 * (1 + numpy.cos(step)))
    extra = {"schedule": schedule.state_dict(), "best": numpy.float32(0.5), "run": numpy.str_("a")}
    extra |= {"steps": numpy.int64(3), "done": numpy.True_, numpy.int32(1): numpy.float64("nan")}
    checkpoint.save(tmp_path, model, optimizer, extra)
    optimizer.param_groups[0]["lr"] = 0.0
    loaded = checkpoint.load(tmp_path, model, optimizer)
    assert_same(optimizer.param_groups[0]["lr"], float(schedule.get_last_lr()[0]))
    assert_same(loaded["schedule"]["_last_lr"], [float(schedule.get_last_lr()[0])])
    assert_same([loaded[key] for key in ("best", "run", "steps", "done")], [0.5, "a", 3, True])
    assert math.isnan(loaded[1])


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    with directories.locked(tmp_path):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        checkpoint.save(tmp_path, nn.Linear(1, 1))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# - Ranks


def _one_rank_fails(place: Path) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = fsdp_ext.fully_shard(Net())
    failing = {"odd": Odd()} if rank == 1 else {}
    kind = TypeError if rank == 1 else checkpoint.OtherRanksError
    with pytest.raises(kind, match=r"extra/odd is of type Odd"):
        checkpoint.save(place, model, extra=failing)
    path = checkpoint.save(place, model, timeout=timedelta(seconds=60))
    if rank == 1:
        os.truncate(path / "weights-00001.safetensors", 3)
    dist.barrier()
    before = model.first.weight.to_local().clone()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    with pytest.raises(checkpoint.DamagedFileError, match=r"weights-00001\.safetensors has 3"):
        checkpoint.load(place, model)
    assert torch.equal(model.first.weight.to_local(), before + 1)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"waited 1 s in the start of checkpoint\.save for"):
            checkpoint.save(place, model, timeout=timedelta(seconds=1))


def test_one_rank_that_fails_fails_all(tmp_path: Path) -> None:
    run_ranks(_one_rank_fails, 2, tmp_path)


def _agree_after_each_rank_was_late() -> list[list[str]]:
    """One rank after the other leaves an agreement out, and then all ranks agree."""
    group = dist.group.WORLD
    agreed = []
    for late in range(dist.get_world_size()):
        if dist.get_rank() != late:
            with pytest.raises(RuntimeError, match=r"waited 0 s in a save for rank"):
                Ranks(group, timedelta(seconds=0.2)).agree("a save", "old", list)
        dist.barrier()
        agreed.append(Ranks(group).agree("a save", f"new {dist.get_rank()}", list))
    return agreed


def test_a_call_that_a_rank_left_out_does_not_disturb_the_next_one() -> None:
    expected = [["new 0", "new 1", "new 2"]] * 3
    assert run_ranks(_agree_after_each_rank_was_late, 3, timeout=60.0) == [expected] * 3


@contextlib.contextmanager
def tells_of_calls(name: str) -> Iterator[Any]:
    """Let calls of a method of Ranks set a key in the store, which the context returns."""
    store = dist.distributed_c10d._get_default_store()
    method = getattr(Ranks, name)

    def call(*args: Any) -> Any:
        result = method(*args)
        store.set(name, "")
        return result

    with mock.patch.object(Ranks, name, call):
        yield store


def _come_after_rank_0_gave_up() -> list[str]:
    group = dist.group.WORLD
    Ranks(group).agree("a first save", "", list)
    with mock.patch.object(ranks, "_GRACE", 0.1), tells_of_calls("_new_message") as store:
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="waited 0 s in a save for rank 1"):
                Ranks(group, timedelta(seconds=0.2)).agree("a save", "old", list)
            store.delete_key("_new_message")
            dist.barrier()
        else:
            dist.barrier()
            store.wait(["_new_message"])  # rank 0 waits in its next agreement
            with pytest.raises(checkpoint.OtherRanksError, match=r"rank 0 failed: .* for rank 1"):
                Ranks(group).agree("a save", "late", list)
        Ranks(group).agree("another save", "", list)
        dist.barrier()
        return Ranks(group).agree("a save", f"new {dist.get_rank()}", list)


def test_a_late_rank_is_told_that_rank_0_gave_up() -> None:
    assert run_ranks(_come_after_rank_0_gave_up, 2, timeout=60.0) == [["new 0", "new 1"]] * 2


def _come_early_after_rank_0_gave_up() -> list[str]:
    group = dist.group.WORLD
    Ranks(group).agree("a first save", "", list)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="waited 0 s in a save for rank 1"):
            Ranks(group, timedelta(seconds=0.2)).agree("a save", "left out by rank 1", list)
    Ranks(group).agree("a later save", "", list)
    with mock.patch.object(ranks, "_GRACE", 0.0), tells_of_calls("_read") as store:
        if dist.get_rank() == 0:
            store.wait(["_read"])  # rank 1 waits for rank 0
        return Ranks(group).agree("a save", f"new {dist.get_rank()}", list)


def test_an_early_rank_is_not_told_of_an_agreement_before_the_last_one() -> None:
    assert run_ranks(_come_early_after_rank_0_gave_up, 2, timeout=60.0) == [["new 0", "new 1"]] * 2


class KeepsLargest(torch.optim.SGD):
    """Keeps as states the largest values of this rank's shard or, with ``of_all``, of all shards.

    The states are transposed, so their elements are not contiguous in memory.
    """

    of_all = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            largest = param.to_local().max().repeat(2, 3)
            if self.of_all:
                dist.all_reduce(largest, dist.ReduceOp.MAX)
            self.state[param]["largest"] = largest.t()
        return super().step(closure)


def _states_of_ranks_differ(place: Path) -> None:
    torch.manual_seed(0)
    model = fsdp_ext.fully_shard(Net(6))
    optimizer = KeepsLargest(model.parameters(), lr=0.1)
    optimizer.step()
    kind = ValueError if dist.get_rank() == 0 else checkpoint.OtherRanksError
    different = "optimizers of ranks 0 and 1 differ in the "
    with pytest.raises(kind, match=rf"{different}state '.*/largest', which is no DTensor"):
        checkpoint.save(place, model, optimizer)
    optimizer.of_all = True
    optimizer.step()
    state, group = optimizer.state[model.first.weight], optimizer.param_groups[0]
    state["count"] = dist.get_rank()
    with pytest.raises(kind, match=rf"{different}state of 'first.weight' beside tensors"):
        checkpoint.save(place, model, optimizer)
    state["count"] = 3
    group["lr"] = 0.1 + dist.get_rank()
    with pytest.raises(kind, match=rf"{different}options of 'first"):
        checkpoint.save(place, model, optimizer)
    group["lr"] = 0.1
    checkpoint.save(place, model, optimizer)
    optimizer.state.clear()
    checkpoint.load(place, model, optimizer)
    largest = model.first.weight.full_tensor().max().expand(3, 2)
    assert torch.equal(optimizer.state[model.first.weight]["largest"], largest)


def test_states_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    run_ranks(_states_of_ranks_differ, 2, tmp_path)


def _groups_are_checked(place: Path) -> None:
    group: Any = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="process_group= without rank 1"):
            checkpoint.save(place, Net(), process_group=group)
    with pytest.raises(TypeError, match="timeout=60"):
        checkpoint.save(place, Net(), timeout=60)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="process_group=5"):
        checkpoint.load(place, Net(), process_group=5)  # type: ignore[arg-type]


def test_groups_without_this_rank_are_refused(tmp_path: Path) -> None:
    run_ranks(_groups_are_checked, 2, tmp_path)


@pytest.mark.parametrize("fails", [False, True])
def test_reading_begins_while_more_is_planned(
    saved: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    has_begun = threading.Event()
    read, plan = TensorFile.read, loading._plan_optimizer

    def noted(file: TensorFile, name: str, begin: int, into: memoryview) -> None:
        has_begun.set()
        read(file, name, begin, into)

    def plan_late(*arguments: Any) -> Any:
        assert has_begun.wait(20)
        if fails:
            raise ValueError("no plan")
        return plan(*arguments)

    def resources() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    monkeypatch.setattr(TensorFile, "read", noted)
    monkeypatch.setattr(loading, "_plan_optimizer", plan_late)
    before = resources()
    if fails:
        with pytest.raises(ValueError, match="no plan"):
            checkpoint.load(saved, *made())
    else:
        assert checkpoint.load(saved, *made()) == {"step": 3}
    assert resources() == before


def test_no_thread_stays_if_another_one_cannot_start(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    before = threading.active_count()
    start = threading.Thread.start
    for number in range(1000):
        started = iter(range(number))

        def start_some(thread: threading.Thread, started: Any = started) -> None:
            if next(started, None) is None:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_some)
        try:
            assert checkpoint.load(saved, model, optimizer) == {"step": 3}
            break
        except RuntimeError as error:
            assert str(error) == "can't start new thread"  # noqa: PT017
        assert threading.active_count() == before
    assert number > 1


def _is_interrupted(place: Path) -> None:
    model = nn.ParameterList(torch.zeros(8) for _ in range(50))
    checkpoint.save(place, model)
    read: list[str] = []

    def interrupt(file: TensorFile, name: str, begin: int, into: memoryview) -> None:
        read.append(name)
        if len(read) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.05)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.MonkeyPatch.context() as context:
            context.setattr(TensorFile, "read", interrupt)
            with pytest.raises(KeyboardInterrupt):
                checkpoint.load(place, model)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(read) < 50


def test_an_interrupt_leaves_the_rest_of_a_file_unread(tmp_path: Path) -> None:
    run_ranks(_is_interrupted, 1, tmp_path, fresh=True)  # a thread may end a little later
