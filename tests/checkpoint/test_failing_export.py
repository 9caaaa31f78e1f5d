"""A rank that cannot write goes on in the gathers of an export. Then all ranks raise."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from support.checkpoints import Configuration, assert_equal, made, sharded, unchanged
from support.launcher import run_ranks
from support.models import Stack
from torch import nn

from fsdp_ext.checkpoint import disk, export, gathering, hugging_face, load_pretrained
from fsdp_ext.checkpoint.ranks import OtherRanksError

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
NO_PERMISSION = PermissionError(errno.EACCES, "Permission denied")
NO_MEMORY = torch.OutOfMemoryError("no memory")
# What fails, its error, and what the message says.
FAULTS: dict[str, tuple[tuple[Any, str], Exception, str]] = {
    "a full disk": (
        (os, "pwritev"),
        NO_SPACE,
        r"partial cannot be written \(No space left on device\)\. Make room",
    ),
    "no permission": (
        (disk, "create"),
        NO_PERMISSION,
        r"partial cannot be written \(Permission denied\)\. Make room",
    ),
    "no memory while a tensor is written": ((hugging_face, "on_host"), NO_MEMORY, "no memory"),
}


def failing_at(number: int, function: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """Return a function whose calls fail from a certain one on."""
    calls = itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= number:
            raise error
        return function(*args, **kwargs)

    return call


def _fails_on(failing: int, directory: Path, on_one_host: bool) -> None:
    model, expected = made(Stack, sharded)
    export(model, directory, max_shard_size="1MB")  # an older one, which has to stay
    for (owner, name), error, message in FAULTS.values():
        for number in (0, 1):
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(gathering, "_STEP", 300)  # so there are gathers after the fault
                if not on_one_host:
                    patched.setattr(hugging_face, "machine", lambda: str(dist.get_rank()))
                if dist.get_rank() == failing:
                    function = failing_at(number, getattr(owner, name), error)
                    patched.setattr(owner, name, function)
                is_own = dist.get_rank() == failing
                kind = type(error) if is_own else OtherRanksError
                of_peer = f"rank {failing} failed: {type(error).__name__}: .*"
                with pytest.raises(kind, match=message if is_own else of_peer + message):
                    export(model, directory, max_shard_size=500)
            dist.barrier()
            assert [path.name for path in directory.iterdir()] == ["model.safetensors"]
            stored = safetensors.torch.load_file(directory / "model.safetensors")
            assert_equal(stored, expected)
            dist.barrier()


@pytest.mark.parametrize(("failing", "on_one_host"), [(0, False), (2, False), (1, True)])
def test_all_ranks_raise_and_nothing_is_left(
    failing: int, on_one_host: bool, tmp_path: Path
) -> None:
    run_ranks(_fails_on, 3, failing, tmp_path, on_one_host, timeout=60)


def _last_close_fails(directory: Path) -> None:
    model, expected = made(Stack, sharded)
    export(model, directory)
    close = os.close

    def close_and_raise(file: int) -> None:
        name = os.readlink(f"/proc/self/fd/{file}")
        close(file)
        if name.endswith(".partial"):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with pytest.MonkeyPatch.context() as patched:
        is_own = dist.get_rank() == 1  # rank 0 makes the file, so this rank closes it once
        if is_own:
            patched.setattr(os, "close", close_and_raise)
        kind = OSError if is_own else OtherRanksError
        message = r"partial cannot be written \(Disk quota exceeded\)\. Make room"
        with pytest.raises(kind, match=message if is_own else f"rank 1 failed: .*{message}"):
            export(model, directory)
    dist.barrier()
    assert [path.name for path in directory.iterdir()] == ["model.safetensors"]
    assert_equal(safetensors.torch.load_file(directory / "model.safetensors"), expected)


def test_all_ranks_raise_if_the_last_close_fails(tmp_path: Path) -> None:
    run_ranks(_last_close_fails, 2, tmp_path, timeout=60)


def _exports_stages(directory: Path) -> None:
    rank = dist.get_rank()
    stage, expected = made(Stack, unchanged)
    for model, size in ((nn.ModuleDict({f"stage {rank}": stage}), 500), (stage, 500 + 500 * rank)):
        with pytest.raises(ValueError, match=r"rank 1 than on rank 0\..* For a pipeline stage"):
            export(model, directory / "all", size)
    assert not (directory / "all").exists()
    groups = [dist.new_group([each]) for each in (0, 1)]
    export(stage, directory / str(rank), process_group=groups[rank])
    stored = safetensors.torch.load_file(directory / str(rank) / "model.safetensors")
    assert_equal(stored, expected)


def test_ranks_that_differ_in_what_they_export_all_raise(tmp_path: Path) -> None:
    run_ranks(_exports_stages, 2, tmp_path)


@pytest.mark.parametrize("size", ["1MB", 500])
def test_a_configuration_that_cannot_be_written(size: int | str, tmp_path: Path) -> None:
    model = Stack()
    model.config = Configuration()  # type: ignore[assignment]
    export(model, tmp_path, size)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "config.json" in before
    with torch.no_grad():
        model.stem.weight.add_(1)
    model.config.text = None
    with pytest.raises(TypeError, match="must be str"):
        export(model, tmp_path, size)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_another_job_that_exports_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, later, loaded = Stack(), Stack(), Stack()
    on_host = hugging_face.on_host

    def meanwhile(*args: Any) -> Any:
        monkeypatch.setattr(hugging_face, "on_host", on_host)
        with pytest.raises(FileExistsError, match="Another job is writing into"):
            export(later, tmp_path)
        return on_host(*args)

    monkeypatch.setattr(hugging_face, "on_host", meanwhile)
    for exported in (model, later):
        export(exported, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
        load_pretrained(loaded, tmp_path)
        assert_equal(loaded.state_dict(), exported.state_dict())
