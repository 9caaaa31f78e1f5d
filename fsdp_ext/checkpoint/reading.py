"""Read a checkpoint: find the parts of each tensor, and read those that a rank needs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp_ext.checkpoint.boxes import KnownParts
from fsdp_ext.checkpoint.directory import INDEX
from fsdp_ext.checkpoint.saving import FORMAT
from fsdp_ext.checkpoint.tensor_files import (
    BLOCK,
    MALFORMED,
    DamagedFileError,
    Part,
    TensorFile,
    digest,
    memory_of,
)
from fsdp_ext.checkpoint.transfers import new_tensor
from fsdp_ext.checkpoint.trees import decode, tensors_in

_THREADS = min(8, os.cpu_count() or 1)
_PIECE = 16 * BLOCK  # bytes that one thread reads at a time

Parts = dict[str, list[tuple[TensorFile, Part]]]
Job = Callable[[], None]
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Weights:
    """The weights in some files."""

    path: Path  # the directory of the files
    parts: Parts  # the tensors, by name
    aliases: dict[str, str]  # other names of tensors, with the name under which each is stored
    other: dict[str, Any]  # the entries of the model's state dict that are no tensors, encoded
    versions: dict[str, int]  # the versions of modules, by prefix, as far as they are known

    @property
    def whole(self) -> Parts:
        """The tensors that are entries of the state dict, and not in one of ``other``."""
        inner = {name for tree in self.other.values() for name in tensors_in(tree)}
        return {name: parts for name, parts in self.parts.items() if name not in inner}


class Checkpoint:
    """A checkpoint that is open for reading.

    Attributes:
        content: what its index says.

    Raises:
        DamagedFileError: if the index or a file's header is not what was written.
        FileNotFoundError: if a file is missing.
        ValueError: if a newer version wrote it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = self._read_index()
        with ThreadPoolExecutor(_THREADS) as threads:
            self.files = {
                kind: list(threads.map(self._open, entries))
                for kind, entries in self.content["files"].items()
            }

    def weights(self) -> Weights:
        """Return what is stored of the model."""
        parts = self.parts("weights")
        aliases, other = self._merged("weights", "aliases"), self._merged("weights", "other")
        unknown = {*map(str, aliases.values())} - parts.keys()
        if unknown:
            raise DamagedFileError(
                f"{self.path} names '{min(unknown)}' as the tensor of a tied weight, and no file "
                "has it. Load another checkpoint."
            )
        with _naming_damage(self.path):
            versions = {k: int(v) for k, v in self._merged("weights", "versions").items()}
        return Weights(self.path, parts, aliases, other, versions)

    def states(self) -> dict[str, Any]:
        """Return the optimizer's state of each parameter, encoded."""
        return self._merged("optimizer", "state")

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups: ``names``, and ``options``, which are encoded."""
        groups: list[dict[str, Any]] = []
        for part in self._trees("optimizer", "groups", list):
            groups += [group for group in part if group not in groups]
        with _naming_damage(self.path):
            return [
                {"names": [*map(str, group["names"])], "options": group["options"]}
                for group in groups
            ]

    def _merged(self, kind: str, key: str) -> dict[str, Any]:
        return {k: v for part in self._trees(kind, key, dict) for k, v in part.items()}

    def _trees(self, kind: str, key: str, form: type) -> Iterator[Any]:
        for file in self.files.get(kind, ()):
            # Early checkpoints of format 1 lack "versions".
            tree = {"versions": {}, **file.tree} if isinstance(file.tree, dict) else {}
            if not isinstance(tree.get(key), form):
                raise DamagedFileError(
                    f"{file.path} needs a {form.__name__} '{key}' in its metadata, and has "
                    f"{tree.get(key)!r:.80}. Restore the file, or load another checkpoint."
                )
            yield tree[key]

    def parts(self, kind: str) -> Parts:
        """Return the parts of each tensor, by name. No part comes twice.

        The parts of a tensor have as many elements as its whole shape, so no shape is larger than
        the files. Parts may still overlap and leave a gap, which :class:`Reader` finds.
        """
        found: dict[str, dict[Any, tuple[TensorFile, Part]]] = defaultdict(dict)
        for file in self.files.get(kind, ()):
            for name, part in file.parts.items():
                of_tensor = found[name]
                first = next(iter(of_tensor.values()), (file, part))[1]
                if (first.whole, first.dtype) != (part.whole, part.dtype):
                    raise DamagedFileError(
                        f"{file.path} has a part of '{name}' of shape {part.whole} and "
                        f"{part.dtype}, and another file one of {first.whole} and {first.dtype}."
                    )
                of_tensor.setdefault((part.offset, part.shape), (file, part))
        for name, parts in found.items():
            file, part = next(iter(parts.values()))
            stated = math.prod(part.whole)
            count = sum(math.prod(each.shape) for _, each in parts.values())
            if count != stated:
                what = f"lacks {stated - count} of" if count < stated else f"has {count} instead of"
                raise DamagedFileError(
                    f"{self.path} {what} the {stated} elements of '{name}', whose shape is "
                    f"{part.whole} in {file.path.name}."
                )
        return {name: list(parts.values()) for name, parts in found.items()}

    def extra_of(self, rank: int) -> Any:
        """Return what a rank saved as ``extra``; that of rank 0 for a rank that did not exist."""
        by_name = {file.path.name: file for file in self.files.get("extra", [])}
        file = by_name.get(f"extra-{rank:05}.safetensors")
        if file is None and rank >= self.content["world_size"]:
            file = by_name.get(f"extra-{0:05}.safetensors")
        if file is None:
            return None
        tensors = {
            name: torch.empty(part.shape, dtype=part.dtype, device="cpu")
            for name, part in file.parts.items()
        }
        with file:
            for name, tensor in tensors.items():
                file.read(name, 0, memory_of(tensor))
        return decoded(file.tree, tensors.__getitem__, file.path)

    def _read_index(self) -> dict[str, Any]:
        path = self.path / INDEX
        try:
            text = path.read_bytes()
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{path} is missing. Load from a directory that all ranks share."
            ) from error
        try:
            index = json.loads(text)
            content, expected = index["content"], index["checksum"]
            is_whole = digest(content) == expected
            number, version = content["format"], content["fsdp_ext"]
            is_newer = number > FORMAT
        except MALFORMED as error:
            raise DamagedFileError(
                f"{path} is damaged: it cannot be parsed ({type(error).__name__}: {error})."
            ) from error
        if not is_whole:
            raise DamagedFileError(f"{path} is damaged: its checksum differs.")
        if is_newer:
            raise ValueError(
                f"{self.path} has format {number}, written by fsdp_ext {version}, and this version "
                f"reads formats up to {FORMAT}. Install the newer version."
            )
        with _naming_damage(path):
            return {
                "fsdp_ext": version,
                "torch": content["torch"],
                "world_size": int(content["world_size"]),
                "mesh": dict(content["mesh"]),
                "files": {
                    kind: [(str(name), size, checksum) for name, size, checksum in entries]
                    for kind, entries in content["files"].items()
                },
            }

    def _open(self, entry: tuple[str, Any, Any]) -> TensorFile:
        name, size, header_checksum = entry
        if Path(name).name != name:
            raise DamagedFileError(f"{self.path / INDEX} names '{name}', which is not a file here.")
        try:
            return TensorFile(self.path / name, size, header_checksum)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{self.path / name} is missing. Restore it, or load another checkpoint."
            ) from error


def decoded(tree: Any, tensor_of: Callable[[str], Any], path: Path) -> Any:
    """Decode what a file has beside tensors."""
    with _naming_damage(path):
        return decode(tree, tensor_of)


@contextlib.contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    """Raise errors about unexpected JSON as DamagedFileError, which names the file."""
    try:
        yield
    except MALFORMED as error:
        raise DamagedFileError(
            f"{path} has metadata that cannot be understood ({type(error).__name__}: {error})."
        ) from error


class Reader:
    """Reads boxes of tensors from files, in threads.

    They begin while more is being planned: a block ``with reader:`` adds what is to be read, and
    its end waits until everything is. If the block raises, nothing more is read.

    Attributes:
        known: the cache of :func:`box_of`.

    Raises:
        DamagedFileError: at the end of the block, if the data is not what was written.
        OSError: there, too, the system's own error.
    """

    def __init__(self) -> None:
        self.known: KnownParts = {}
        self._jobs: dict[TensorFile, deque[Job]] = {}  # that no thread has taken
        self._changed = threading.Condition()
        self._is_ended = False  # no more jobs come
        self._threads = ThreadPoolExecutor(_THREADS)
        self._work: list[Future[None]] = []

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._end(drop_jobs=kind is not None)
            for thread in self._work if kind is None else ():
                thread.result()
        finally:  # an interrupt, too, leaves nothing to read
            self._end(drop_jobs=True)
            self._threads.shutdown()

    def add(
        self,
        name: str,
        parts: Sequence[tuple[TensorFile, Part]],
        offset: tuple[int, ...],
        into: torch.Tensor,
    ) -> None:
        """Read a box of a tensor, now or later.

        Args:
            name: the tensor.
            parts: its parts.
            offset: where the box begins in the whole tensor.
            into: memory for it, on the host. Elements are cast to its dtype.
        """
        missing = into.numel()
        for file, part in parts:
            common = _common(part, offset, tuple(into.shape))
            if common is None:
                continue
            of_part, of_box = common
            target = into[of_box]
            missing -= target.numel()
            self._put(file, [*_jobs(file, name, part, of_part, target)])
        if missing:
            raise DamagedFileError(
                f"{parts[0][0].path.parent} lacks {missing} of the {into.numel()} elements of "
                f"'{name}' that this rank needs."
            )

    def _put(self, file: TensorFile, jobs: list[Job]) -> None:
        with self._changed:
            if not jobs or self._is_ended:  # a thread that fails ends it
                return
            self._jobs.setdefault(file, deque()).extend(jobs)
            self._changed.notify(len(jobs))
        for _ in range(min(len(jobs), _THREADS - len(self._work))):
            self._work.append(self._threads.submit(self._run))

    def _end(self, *, drop_jobs: bool) -> None:
        """Let the threads end, after all jobs or at once."""
        with self._changed:
            if drop_jobs:
                self._jobs.clear()
            self._is_ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        """Run jobs. After an error, no thread takes another."""
        try:
            with contextlib.ExitStack() as opened:
                file = None
                while taken := self._take(file):
                    if taken[0] is not file:
                        opened.close()
                        file = opened.enter_context(taken[0])
                    taken[1]()
        except BaseException:
            self._end(drop_jobs=True)
            raise

    def _take(self, file: TensorFile | None) -> tuple[TensorFile, Job] | None:
        """Wait for a job, if possible one of the file that is open. Return None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_ended)
            if not self._jobs:
                return None
            file = file if file in self._jobs else next(iter(self._jobs))
            job = self._jobs[file].popleft()
            if not self._jobs[file]:
                del self._jobs[file]
            return file, job


def _common(
    part: Part, offset: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Slices, Slices] | None:
    """Return what a part and a box have in common, as slices of both; None if nothing."""
    of_part, of_box = [], []
    for begin, size, box_begin, box_size in zip(
        part.offset, part.shape, offset, shape, strict=True
    ):
        low, high = max(begin, box_begin), min(begin + size, box_begin + box_size)
        if low >= high:
            return None
        of_part.append(slice(low - begin, high - begin))
        of_box.append(slice(low - box_begin, high - box_begin))
    return tuple(of_part), tuple(of_box)


def _jobs(
    file: TensorFile, name: str, part: Part, where: Slices, target: torch.Tensor
) -> Iterable[Job]:
    """Return what reads a box of a part into a tensor."""
    rows = where[0] if where else slice(0, 1)
    row = part.nbytes // (part.shape[0] if part.shape else 1)
    inner = where[1:]
    is_whole_rows = all(
        (s.start, s.stop) == (0, size) for s, size in zip(inner, part.shape[1:], strict=True)
    )
    if is_whole_rows and target.dtype == part.dtype and target.is_contiguous():
        memory = memory_of(target)
        # Pieces end where blocks do, so that no block is read twice.
        begin, end = rows.start * row, rows.stop * row
        while begin < end:
            stop = min(end, (begin // _PIECE + 1) * _PIECE)
            piece = memory[begin - rows.start * row : stop - rows.start * row]
            yield partial(file.read, name, begin, piece)
            begin = stop
        return
    # Read whole rows, at most _PIECE bytes at a time, then slice and cast them.
    step = max(1, _PIECE // max(1, row))
    for first in range(rows.start, rows.stop, step):
        last = min(first + step, rows.stop)
        of_rows = target[first - rows.start : last - rows.start] if where else target
        yield partial(_read_and_cut, file, name, part, (first, last), inner, of_rows)


def _read_and_cut(
    file: TensorFile,
    name: str,
    part: Part,
    rows: tuple[int, int],
    inner: Slices,
    target: torch.Tensor,
) -> None:
    first, last = rows
    shape = (last - first, *part.shape[1:]) if part.shape else ()
    read = new_tensor(shape, part.dtype)
    row = read.numel() * read.element_size() // (last - first)
    file.read(name, first * row, memory_of(read))
    target.copy_(read[(slice(None), *inner)] if part.shape else read)


def shape_of(parts: list[tuple[TensorFile, Part]]) -> tuple[int, ...]:
    """Return the shape of the whole tensor."""
    return parts[0][1].whole
