"""How the ranks make a checkpoint of what each of them saves: Note [saving] in directory.py."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fsdp_ext import _build_info
from fsdp_ext.checkpoint import directory as directories
from fsdp_ext.checkpoint import disk
from fsdp_ext.checkpoint.boxes import without_others
from fsdp_ext.checkpoint.ranks import Ranks
from fsdp_ext.checkpoint.snapshot import Snapshot
from fsdp_ext.checkpoint.tensor_files import Part, TensorFile, Writer, digest
from fsdp_ext.comm.lanes import check_lanes

FORMAT = 1  # of a checkpoint; another one if older versions cannot read it


def write(snapshot: Snapshot | Exception, directory: Path, ranks: Ranks, keep: int | None) -> Path:
    """Write a checkpoint together with the other ranks; return its path.

    Args:
        snapshot: what this rank saves, or why it cannot.
        directory: the directory of the job's checkpoints.
        ranks: the ranks.
        keep: how many checkpoints to keep; None for all.
    """
    if isinstance(snapshot, Exception):
        ranks.agree("checkpoint.save", snapshot, len)
        raise AssertionError("agree raises what a rank reports")
    states = snapshot.checksums_of_whole_states()
    if not ranks.agree("checkpoint.save", digest(states), _are_equal):
        ranks.agree("checkpoint.save", states, _check_states)
    with contextlib.ExitStack() as lock:

        def begin(digests: list[tuple[str, str]]) -> Any:
            lock.enter_context(directories.locked(directory))
            return directories.begin(directory).name, *map(_are_equal, zip(*digests, strict=True))

        name, share_work, same_names = ranks.agree("checkpoint.save", snapshot.digests, begin)
        folder = directory / name

        def write_own() -> dict[str, Any]:
            written = _write_files(snapshot, folder, ranks.rank, share_work)
            if not same_names:
                written["whole"] = snapshot.whole_names
            # If a collective was aborted, the kernels behind it have computed with undefined data.
            check_lanes(device_type="cuda")
            return written

        def end(files: list[dict[str, Any]]) -> str:
            count = sum(of_rank["elements"] for of_rank in files)
            entries = [of_rank["files"] for of_rank in files]
            if not same_names or count > snapshot.elements:
                count = _count_once(
                    folder, entries, [set(of_rank.get("whole", ())) for of_rank in files]
                )
            if same_names and count != snapshot.elements:
                raise ValueError(_wrong_count(count, snapshot.elements))
            write_index(folder, entries, snapshot.mesh)
            path = directories.commit(folder)
            if keep is not None:
                directories.remove_old(directory, keep)
            return path.name

        try:
            target: Path = directory / ranks.agree_on("checkpoint.save", write_own, end)
        except BaseException:
            if ranks.rank == 0:
                with contextlib.suppress(OSError):
                    disk.remove_directory(folder)
            raise
        ranks.leave()
        return target


def _are_equal(values: Sequence[str]) -> bool:
    return len(set(values)) == 1


def _count_once(folder: Path, files: list[dict[str, Any]], whole: list[set[str]]) -> int:
    """Count the elements in all ranks' files. A part that several ranks wrote counts once.

    Tensor parallelism leaves some parameters whole. All of its ranks then write the same part,
    because the parameter's mesh has only the data-parallel ranks. ``whole`` are names of tensors
    that are not sharded, whose values may differ between ranks.
    """
    known: dict[tuple[str, str], dict[Any, tuple[Part, int]]] = {}
    for rank, of_rank in enumerate(files):
        for kind in of_rank.keys() - {"extra"}:
            name, size, header = of_rank[kind]
            for tensor, part in TensorFile(folder / name, size, header).parts.items():
                parts = known.setdefault((kind, tensor), {})
                first, other = next(iter(parts.values()), (part, rank))
                if (first.whole, first.dtype) != (part.whole, part.dtype):
                    raise ValueError(message_of_difference(tensor, other, rank))
                first, other = parts.setdefault((part.offset, part.shape), (part, rank))
                is_whole = tensor in whole[rank] and tensor in whole[other]
                if first.checksums != part.checksums and not is_whole:
                    raise ValueError(message_of_difference(tensor, other, rank))
    count = 0
    for (_, tensor), parts in known.items():
        found = sum(math.prod(part.shape) for part, _ in parts.values())
        expected = math.prod(next(iter(parts.values()))[0].whole)
        if found != expected:
            raise ValueError(_wrong_count(found, expected, f"'{tensor}'"))
        count += found
    return count


def message_of_difference(name: str, rank: int, other: int) -> str:
    """Return the error for ranks that have different tensors of one name."""
    return (
        f"ranks {rank} and {other} have different tensors of one name, '{name}', such as experts "
        "or buffers of their own. Give them different names."
    )


def _wrong_count(found: int, expected: int, what: str = "the model and its optimizer") -> str:
    """Return the error for a number of all ranks' elements that differs from ``expected``."""
    if found < expected:
        return (
            f"checkpoint.save found {found} of the {expected} elements of {what} on these ranks. "
            "Pass a process_group= of all ranks of the model's meshes."
        )
    return (
        f"checkpoint.save found {found} elements of {what} on these ranks, but by their names and "
        f"shapes there are {expected}. Some ranks have tensors of one name that overlap. Give them "
        "different names."
    )


def _check_states(states: Sequence[dict[str, str]]) -> None:
    """Raise ValueError if a result of checksums_of_whole_states differs between ranks."""
    known: dict[str, tuple[str, int]] = {}
    for rank, of_rank in enumerate(states):
        for name, found in of_rank.items():
            expected, first = known.setdefault(name, (found, rank))
            if found != expected:
                raise ValueError(
                    f"the optimizers of ranks {first} and {rank} differ in {name}. Make it "
                    "equal on all ranks, or save it in extra, where each rank saves its own."
                )


def _write_files(snapshot: Snapshot, folder: Path, rank: int, share_work: bool) -> dict[str, Any]:
    """Write a rank's files.

    With ``share_work``, ranks have equal tensors that are not sharded, and one writes each.

    Returns:
        ``files``: the name, size and checksum of each, by kind; ``elements``: how many of the model
        and the optimizer are in them.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} was made by rank 0, and rank {rank} does not see it. Save into a directory "
            "that all ranks share."
        )
    files = {}
    elements = 0
    writers = []
    with contextlib.ExitStack() as opened:
        for name, kind in snapshot.kinds.items():
            boxes = without_others(kind.boxes) if share_work and name != "extra" else kind.boxes
            path = folder / f"{name}-{rank:05}.safetensors"
            writer = Writer(path, {key: box.part for key, box in boxes.items()}, kind.tree)
            writers.append(opened.enter_context(contextlib.closing(writer)))
            files[name] = writer.write((key, box.tensor) for key, box in boxes.items())
            if name != "extra":
                elements += sum(box.tensor.numel() for box in boxes.values())
        for writer in writers:  # at the end, so that the disk writes one file beside the next
            writer.flush()
    return {"files": files, "elements": elements}


def write_index(folder: Path, files: list[dict[str, Any]], mesh: dict[str, int]) -> None:
    """Write the index of a checkpoint, with the name, size and checksum of each rank's files."""
    content = {
        "format": FORMAT,
        "fsdp_ext": _build_info.VERSION,
        "torch": torch.__version__,
        "world_size": len(files),
        "mesh": mesh,
        "files": {
            kind: [of_rank[kind] for of_rank in files if kind in of_rank]
            for kind in ("weights", "optimizer", "extra")
            if any(kind in of_rank for of_rank in files)
        },
    }
    text = json.dumps({"checksum": digest(content), "content": content}, indent=1)
    file = disk.create(folder / directories.INDEX)
    try:
        disk.write(file, [memoryview(text.encode())], 0)
        disk.flush(file)
    finally:
        os.close(file)
