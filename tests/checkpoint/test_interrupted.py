"""A save that is killed anywhere leaves the checkpoint before, and the next save works."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import Configuration
from support.launcher import run_ranks
from torch import nn
from torch.optim import Optimizer

from fsdp_ext import checkpoint
from fsdp_ext.checkpoint import directory as directories
from fsdp_ext.checkpoint import disk

KILLED = 9  # the exit code of a process that ended itself
RAISED = 8
TOLD = 7  # the error said which rank was gone


def made(value: float) -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def kill_at(number: int, half: bool) -> None:
    """Let this process end itself at a change of the disk, or in the middle of a write."""
    count = 0
    write = disk.write

    def before() -> None:
        nonlocal count
        count += 1
        if count > number:
            os._exit(KILLED)

    def write_half(file: int, buffers: list[memoryview], position: int) -> None:
        if count == number - 1:
            os.pwritev(file, [buffers[0][: len(buffers[0]) // 2]], position)
            os._exit(KILLED)
        write(file, buffers, position)

    disk.before_change = before
    if half:
        disk.write = write_half


def start_child(work: Callable[[], None]) -> int:
    """Run something in a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(RAISED)
    return child


def code_of(child: int) -> int:
    """Return how a process ended."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def survives(directory: Path, number: int, half: bool) -> bool:
    """Kill a save at a change of the disk, and check what is left. Return whether it was killed."""
    checkpoint.save(directory, *made(1.0), {"step": 1})
    checkpoint.save(directory, *made(2.0), {"step": 2})

    def save() -> None:
        kill_at(number, half)
        checkpoint.save(directory, *made(3.0), {"step": 3}, keep=1)

    code = code_of(start_child(save))
    newest = checkpoint.latest(directory)
    assert newest is not None
    for path in directories.checkpoints(directory):
        assert checkpoint.load(path, *made(0.0)) == {"step": int(path.name[-1])}
    model, optimizer = made(0.0)
    step = checkpoint.load(directory, model, optimizer)["step"]
    assert step == int(newest.name[-1])
    assert step >= 2
    assert torch.equal(model.weight, torch.full((2, 3), float(step)))
    after = checkpoint.save(directory, *made(4.0), {"step": 4}, keep=1)
    assert newest.name < after.name
    assert [path.name for path in directory.iterdir() if path.is_dir()] == [after.name]
    shutil.rmtree(directory)
    assert code == KILLED or (code == 0 and step == 3)
    return code == KILLED


def _kill_everywhere(place: Path, half: bool) -> int:
    """Kill a save at each change of the disk, until one gets through. Return how many failed."""
    return next(n for n in itertools.count() if not survives(place / str(n), n, half))


@pytest.mark.parametrize("half", [False, True], ids=["before", "within"])
def test_a_process_that_is_killed_at_any_change_of_the_disk(tmp_path: Path, half: bool) -> None:
    # It forks, which no process survives whose autograd has had threads.
    (changes,) = run_ranks(_kill_everywhere, 1, tmp_path, half, fresh=True)
    assert changes > 20


@pytest.mark.parametrize("kind", ["a checkpoint", "an export"])
def test_it_gets_its_name_when_all_of_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A loss of power after the rename must not lose a part of what was written.

    A checkpoint's files are flushed when all are written, so that the disk writes one while the
    next one is made.
    """
    create, write, rename, fsync = disk.create, disk.write, disk.rename, os.fsync
    unflushed: set[Path] = set()  # files with data, and directories with names
    at_rename = []
    changes: list[str] = []  # of the files that have tensors

    def path_of(file: int) -> Path:
        return Path(os.readlink(f"/proc/self/fd/{file}"))

    def note_create(path: Path) -> int:
        unflushed.add(path.parent)
        return create(path)

    def note_write(file: int, buffers: list[memoryview], position: int) -> None:
        unflushed.add(path_of(file))
        changes.extend(["write"] if path_of(file).suffix == ".safetensors" else [])
        write(file, buffers, position)

    def note_rename(path: Path, target: Path) -> None:
        at_rename.append(sorted(unflushed))
        rename(path, target)
        unflushed.add(target.parent)

    def note_flush(file: int) -> None:
        fsync(file)
        changes.extend(["flush"] if path_of(file).suffix == ".safetensors" else [])
        unflushed.discard(path_of(file))

    monkeypatch.setattr(disk, "create", note_create)
    monkeypatch.setattr(disk, "write", note_write)
    monkeypatch.setattr(disk, "rename", note_rename)
    monkeypatch.setattr(os, "fsync", note_flush)

    class NotedConfiguration(Configuration):
        def save_pretrained(self, directory: Path) -> None:
            super().save_pretrained(directory)
            unflushed.add(directory / "config.json")

    model, optimizer = made(1.0)
    if kind == "a checkpoint":
        checkpoint.save(tmp_path, model, optimizer, {"step": 1})
        assert at_rename == [[]]
        assert changes == ["write"] * changes.count("write") + ["flush"] * 3
    else:
        model.config = NotedConfiguration()  # type: ignore[assignment]
        checkpoint.export(model, tmp_path)
        assert at_rename == [[tmp_path]] * 2  # the new names are flushed after the renames
    assert not unflushed


def lose_a_rank(
    directory: Path, rank: int, number: int, *, kills_both: bool = False
) -> tuple[int, int]:
    """Save on two ranks, and kill one of them at a change of the disk. Return how both ended.

    With ``kills_both``, the other rank is killed as soon as the first one has ended.
    """
    checkpoint.save(directory, *made(1.0))

    def save(this: int) -> None:
        store = dist.FileStore(str(directory / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=this, world_size=2)
        if this == rank:
            kill_at(number, half=False)
        try:
            checkpoint.save(directory, *made(2.0), timeout=timedelta(seconds=20))
        except RuntimeError as error:
            is_named = f"rank {rank} (process " in str(error) and "has ended" in str(error)
            os._exit(TOLD if is_named else RAISED)

    children = [start_child(partial(save, this)) for this in range(2)]
    codes = {rank: code_of(children[rank])}
    if kills_both:
        os.kill(children[1 - rank], signal.SIGKILL)
    codes[1 - rank] = code_of(children[1 - rank])
    assert codes[rank] in (KILLED, 0), codes
    assert codes[1 - rank] in ((TOLD, 0, -signal.SIGKILL) if kills_both else (TOLD, 0)), codes
    newest = checkpoint.latest(directory)
    assert newest is not None
    assert newest.name == "checkpoint-000002" or codes != {0: 0, 1: 0}
    model, optimizer = made(0.0)
    checkpoint.load(directory, model, optimizer)
    assert torch.equal(model.weight, torch.full((2, 3), float(newest.name[-1])))
    after = checkpoint.save(directory, *made(5.0), keep=1)
    assert [path for path in directory.iterdir() if path.is_dir()] == [after]
    return codes[rank], codes[1 - rank]


@pytest.mark.parametrize(("rank", "number"), [(0, 0), (0, 2), (0, 12), (1, 0), (1, 3)])
def test_a_rank_that_is_killed(tmp_path: Path, rank: int, number: int) -> None:
    assert lose_a_rank(tmp_path, rank, number) == (KILLED, TOLD)


@pytest.mark.parametrize(("rank", "number"), [(0, 12), (1, 3)])
def test_all_ranks_that_are_killed(tmp_path: Path, rank: int, number: int) -> None:
    assert lose_a_rank(tmp_path, rank, number, kills_both=True) == (KILLED, -signal.SIGKILL)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("rank", "changes"), [(0, 20), (1, 10)])
def test_a_rank_that_is_killed_at_any_change(tmp_path: Path, rank: int, changes: int) -> None:
    for number, kills_both in itertools.product(range(changes), [False, True]):
        lose_a_rank(tmp_path / f"{number}-{kills_both}", rank, number, kills_both=kills_both)
