"""``export``: a model in the layout of Hugging Face.

The layout is that of ``save_pretrained`` in transformers: ``model.safetensors``, or several files
``model-00001-of-00003.safetensors`` with an index of the names in each. Files are written under
partial names, and get their own when all ranks have written all of theirs. The index comes last.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ext._util.files import naming, write_text
from fsdp_ext._util.numbers import bytes_in, is_at_least
from fsdp_ext.checkpoint import background, disk
from fsdp_ext.checkpoint import directory as directories
from fsdp_ext.checkpoint.gathering import (
    Piece,
    check_groups,
    checksums_of_partial_meshes,
    cut,
    has_all_ranks,
    own_pieces,
)
from fsdp_ext.checkpoint.offline import one_by_one, stored, whole_parts
from fsdp_ext.checkpoint.ranks import Ranks
from fsdp_ext.checkpoint.reading import Checkpoint
from fsdp_ext.checkpoint.saving import message_of_difference
from fsdp_ext.checkpoint.stream import check_dtype
from fsdp_ext.checkpoint.tensor_files import NAMES, Part, digest, header_of, memory_of, on_host
from fsdp_ext.checkpoint.weights import Weight, places_in, weights_by_unit
from fsdp_ext.comm.rendezvous import machine

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PARTIAL = ".partial"
_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")

Layout = dict[str, Part]


def export(
    model: nn.Module | str | os.PathLike[str],
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a model's weights in the layout of Hugging Face, for ``from_pretrained`` and engines.

    All ranks of the model call this, and the directory is the same for all. The ranks write at the
    same time. If all of them are on one host, each writes its own rows. Otherwise they share the
    files, and each tensor is gathered only to the rank that writes it. Beside its shards, a rank
    then needs the memory of the two largest tensors, or 32 MiB if that is more. A tied parameter is
    written once. A model of transformers gets its ``config.json``, too.

    An export that is interrupted leaves files with partial names, which the next one removes. An
    older export in the directory is replaced when the new one is written.

    Args:
        model: as for :func:`stream_weights`; or the path of a checkpoint, or of a directory whose
            newest checkpoint is exported. The export of a checkpoint has no ``config.json``, and
            each of the ranks writes some of the files.
        directory: the target directory, made if it does not exist.
        max_shard_size: of a file, in bytes or as "5GB" with KB, MB, GB or TB. A larger tensor has
            a file of its own.
        dtype: the dtype of floating-point tensors; None for that of the sharded parameters.
        process_group: the ranks of the model; all by default.

    Raises:
        OSError: if a file cannot be written, another job writes into the directory, or there is
            no such checkpoint.
        DamagedFileError: if a checkpoint's file is not what was written.
        OtherRanksError: if another rank failed.
        RuntimeError: if the last ``async_save`` failed and nobody has called its ``result()``, and
            as :func:`stream_weights`.
        TypeError: for a dtype that safetensors cannot store.
        ValueError: if ``max_shard_size`` is no size, there are no weights, ranks differ in what
            they export, such as pipeline stages, or have different tensors of one name, or the
            process group lacks ranks that have some of the weights.
    """
    check_dtype(dtype, "export")
    ranks = Ranks(process_group)
    with ranks.together("the start of export"):
        background.finish()
    if isinstance(model, str | os.PathLike):
        export_files(Path(model), Path(directory), max_shard_size, dtype, ranks)
        return
    with ranks.together("export"):
        units = weights_by_unit(model, "export")
        weights = _stored(model, [weight for unit in units for weight in unit])
        parts = {
            name: Part.whole_of(weight.dtype_as(dtype), tuple(weight.tensor.shape))
            for name, weight in weights.items()
        }
        check_groups(weights, ranks)
    _check_equal(weights, ranks)
    write_files(
        Path(directory),
        parts,
        partial(own_pieces, weights, dtype, ranks),
        max_shard_size,
        ranks,
        partial(_write_config, model),
        may_share=has_all_ranks(weights.values(), ranks),
    )


def export_files(
    source: Path,
    directory: Path,
    max_shard_size: int | str,
    dtype: torch.dtype | None,
    ranks: Ranks,
    *,
    shows_progress: bool = False,
) -> None:
    """Write a checkpoint's weights in the layout of Hugging Face."""

    def newest(_: list[Any]) -> str:
        return str(directories.locate(source).relative_to(source))

    path = source / ranks.agree("export", None, newest)
    with ranks.together("export"):
        tensors = stored(Checkpoint(path).weights().whole)

    def pieces(files: list[list[str]], _: bool) -> Iterator[Piece]:
        own = {name: tensors[name] for names in files[ranks.rank :: ranks.size] for name in names}
        read = one_by_one(own, shows_progress=shows_progress)
        return itertools.starmap(lambda name, tensor: Piece(name, 0, tensor), read)

    write_files(directory, whole_parts(tensors, dtype), pieces, max_shard_size, ranks)


def write_files(
    directory: Path,
    parts: Layout,
    pieces: Callable[[list[list[str]], bool], Iterable[Piece]],
    max_shard_size: int | str,
    ranks: Ranks,
    write_more: Callable[[Path, Layout], object] | None = None,
    *,
    may_share: bool = True,
) -> None:
    """Write whole tensors in the layout of Hugging Face.

    Args:
        directory: where to.
        parts: the tensors' dtypes and shapes, by name.
        pieces: returns what this rank writes. It may have other dtypes than the parts, and is cast.
            Its arguments are the names in each file, and whether all ranks may write each file.
            If not, rank r writes the files r, r + size, and so on.
        max_shard_size: as in :func:`export`.
        write_more: writes what else belongs there into another directory, on rank 0.
        may_share: whether all ranks may write each file, as far as this rank knows. They do if they
            see the same directory on one machine, too.
    """
    with ranks.together("export"):
        files = _files(parts, _bytes_of(max_shard_size))
    own = [name for i, name in enumerate(files) if i % ranks.size == ranks.rank]

    def create() -> list[object] | None:
        writing.create(own)
        return _place_of(directory) if may_share else None

    def begin_renaming(_: list[None]) -> None:
        if write_more is not None:
            write_more(config, parts)  # may raise, so it comes first
        more = [*config.glob("*")]
        for path in more:
            disk.flush_path(path)
        # The directory has no index while names change. A single file is replaced by renaming,
        # unless it has another configuration.
        is_kept = SINGLE in files and all(_are_equal(path, directory / path.name) for path in more)
        _remove(directory, INDEX, *(() if is_kept else (SINGLE,)))
        for path in more:
            disk.rename(path, directory / path.name)

    with contextlib.ExitStack() as lock:
        suffix = _prepare(directory, files, ranks, lock)
        writing, config = _Export(directory, files, suffix), directory / ("config" + suffix)
        try:
            with contextlib.closing(writing):
                are_shared = ranks.agree_on("export", create, _are_one)
                to_write = pieces([[*names] for names in files.values()], are_shared)
                with ranks.together("export"):
                    writing.write(to_write)
            # After all ranks have written, one rank flushes each file.
            ranks.agree_on("export", lambda: writing.flush(own), begin_renaming)
            with ranks.together("export", partial(_finish, directory, files, config, lock)):
                for name in own:
                    disk.rename(writing.path_of(name), directory / name)
        except BaseException:
            for name in own:
                with contextlib.suppress(OSError):  # the caller has to see the first error
                    writing.path_of(name).unlink(missing_ok=True)
            if ranks.rank == 0:
                shutil.rmtree(config, ignore_errors=True)
            raise


def _bytes_of(size: int | str) -> int:
    """Return a size as a number of bytes."""
    nbytes = bytes_in(size) if isinstance(size, str) else size
    if nbytes is None or not is_at_least(nbytes, 1):
        raise ValueError(
            f"export got max_shard_size={size!r}. Pass a number of bytes, or a text with KB, MB, "
            'GB or TB, such as "5GB".'
        )
    return nbytes


# - What is written where


def _stored(model: nn.Module, weights: list[Weight]) -> dict[str, Weight]:
    """Return the weights by the names under which they are stored.

    A tied parameter is stored once. transformers says which names its models tie when they are
    loaded, and needs all others.
    """
    declared: list[str] = []
    ignored: set[str] = set()
    is_declaring = False
    for module, _, prefix, _ in places_in(model):
        is_declaring |= hasattr(module, "_tied_weights_keys")
        declared += [prefix + name for name in getattr(module, "_tied_weights_keys", None) or ()]
        ignored |= {
            prefix + name for name in getattr(module, "_keys_to_ignore_on_save", None) or ()
        }
    stored: dict[str, Weight] = {}
    for weight in weights:
        names = [name for name in weight.names if name not in ignored]
        needed = [name for name in names if not any(re.search(each, name) for each in declared)]
        needed = needed or names[:1]
        stored |= dict.fromkeys(needed if is_declaring else needed[:1], weight)
    return stored


def _files(parts: Layout, limit: int) -> dict[str, Layout]:
    """Return the tensors of each file, by the files' names."""
    for name, part in parts.items():
        if part.dtype not in NAMES:
            raise TypeError(f"'{name}' has dtype {part.dtype}, which safetensors cannot store.")
    files = [dict(piece) for piece in cut(parts.items(), lambda item: item[1].nbytes, limit)]
    if not files:
        raise ValueError("export got no weights. Pass a model or a checkpoint that has some.")
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": parts
        for number, parts in enumerate(files, 1)
    }


def _check_equal(weights: dict[str, Weight], ranks: Ranks) -> None:
    """Raise ValueError if ranks have different parts of one weight: only one would be written."""

    def first_difference(found: list[dict[str, list[str]]]) -> tuple[str, int, int] | None:
        known: dict[tuple[str, str], tuple[str, int]] = {}
        for rank, of_rank in enumerate(found):
            for name, (place, checksum) in of_rank.items():
                first, other = known.setdefault((name, place), (checksum, rank))
                if first != checksum:
                    return name, ranks.members[other], ranks.members[rank]
        return None

    differs = ranks.agree_on(
        "export", lambda: checksums_of_partial_meshes(weights, ranks), first_difference
    )
    if differs is not None:
        raise ValueError(message_of_difference(*differs))


# - Writing


def _prepare(
    directory: Path, files: dict[str, Layout], ranks: Ranks, lock: contextlib.ExitStack
) -> str:
    """Check that all ranks have the same files, and remove what an interrupted export has left.

    Rank 0 enters the lock of the directory into ``lock``.

    Returns:
        the suffix of the names of unfinished files. Each export has its own suffix, so a rank that
        goes on after rank 0 has released the lock does not touch another job's files.
    """

    def remove_lock() -> None:
        # A job that has just opened the file then locks one that no later job sees. Its suffix
        # protects it, as on file systems without locks.
        with contextlib.suppress(OSError):  # the caller has to see the first error
            (directory / directories.LOCK).unlink()

    def prepare(digests: list[str]) -> tuple[int | None, str]:
        """Return the first rank whose files differ from rank 0's, if any, and the suffix."""
        other = next((rank for rank, each in enumerate(digests) if each != digests[0]), None)
        if other is None:
            lock.enter_context(directories.locked(directory))
            lock.callback(remove_lock)
            _remove(directory, f"model*.safetensors*{_PARTIAL}", f"config*{_PARTIAL}")
        return other, f".{secrets.token_hex(4)}{_PARTIAL}"

    layout = [
        (file, name, NAMES[part.dtype], part.shape)
        for file, parts in files.items()
        for name, part in parts.items()
    ]
    other, suffix = ranks.agree("export", digest(layout), prepare)
    if other is not None:
        raise ValueError(
            f"export got other tensors, or another max_shard_size=, on rank {ranks.members[other]} "
            f"than on rank {ranks.members[0]}. All ranks need the same names, dtypes and shapes. "
            "For a pipeline stage, pass a process_group= of its ranks and a directory of its own."
        )
    return str(suffix)


class _Export:
    """Files that ranks write in pieces. An error waits for the end.

    Other ranks need this one in their gathers, so it goes on without writing.
    """

    def __init__(self, directory: Path, files: dict[str, Layout], suffix: str) -> None:
        self._directory = directory
        self._suffix = suffix
        self._parts = {name: part for parts in files.values() for name, part in parts.items()}
        self._file_of = {name: file for file, parts in files.items() for name in parts}
        self._headers = {file: header_of(parts, {"format": "pt"}) for file, parts in files.items()}
        self._begins: dict[str, int] = {}
        for file, parts in files.items():
            sizes = (part.nbytes for part in parts.values())
            begins = itertools.accumulate(sizes, initial=len(self._headers[file]))
            self._begins |= zip(parts, begins, strict=False)
        self._open: tuple[Path, int] | None = None  # the file that is being written

    def path_of(self, file: str) -> Path:
        """Return where a file is until it is complete."""
        return self._directory / (file + self._suffix)

    def create(self, files: list[str]) -> None:
        """Make files with their headers."""
        for file in files:
            path = self.path_of(file)
            with naming(path):
                self._open = path, disk.create(path)
                disk.write(self._open[1], [memoryview(self._headers[file])], 0)
            self.close()

    def write(self, pieces: Iterable[Piece]) -> None:
        """Cast and write pieces."""
        failure: Exception | None = None
        for piece in pieces:
            if failure is None:
                try:
                    self._add(piece)
                except Exception as error:
                    failure = error
            del piece  # before the next gather needs memory
        try:
            self.close()  # network file systems report a full disk here
        except Exception as error:
            failure = failure or error
        if failure is not None:
            raise failure

    def _add(self, piece: Piece) -> None:
        part = self._parts[piece.name]
        path = self.path_of(self._file_of[piece.name])
        end = self._begins[piece.name] + piece.first * part.dtype.itemsize
        if self._open is None or self._open[0] != path:
            self.close()
            with naming(path):
                self._open = path, os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        for host in on_host(piece.tensor, part.dtype):
            memory = memory_of(host)
            with naming(path):
                disk.write(self._open[1], [memory], end)
            end += len(memory)

    def flush(self, files: list[str]) -> None:
        """Flush files to the disk."""
        for file in files:
            with naming(self.path_of(file)):
                disk.flush_path(self.path_of(file))

    def close(self) -> None:
        """Close the file that is being written."""
        if self._open is not None:
            path, file = self._open
            self._open = None  # an error leaves it closed, too
            with naming(path):
                os.close(file)


def _place_of(directory: Path) -> list[object] | None:
    """Return an identifier of a directory on this machine; None if it is unknown."""
    try:
        found = directory.stat()
    except OSError:
        return None
    return [machine(), found.st_dev, found.st_ino] if machine() else None


def _are_one(places: list[object]) -> bool:
    """Return whether all ranks see one directory, on one machine."""
    return places[0] is not None and all(place == places[0] for place in places)


def _are_equal(path: Path, other: Path) -> bool:
    return other.is_file() and path.read_bytes() == other.read_bytes()


def _finish(
    directory: Path, files: dict[str, Layout], config: Path, lock: contextlib.ExitStack
) -> None:
    """Remove the files of an older export, write the index, and release the lock."""
    stale = [each.name for each in directory.iterdir() if _FILE.fullmatch(each.name)]
    _remove(directory, *(name for name in stale if name not in files))
    _remove(directory, config.name)
    if SINGLE not in files:
        disk.before_change()
        write_text(directory / INDEX, _index(files))
    disk.flush_path(directory)
    lock.close()  # before other ranks return, which may export again


def _index(files: dict[str, Layout]) -> str:
    size = sum(part.nbytes for parts in files.values() for part in parts.values())
    file_of = {name: file for file, parts in files.items() for name in parts}
    index = {"metadata": {"total_size": size}, "weight_map": file_of}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _write_config(model: nn.Module, directory: Path, parts: Layout) -> None:
    """Write the configuration of a model of transformers, with its class and its dtype."""
    inner = [place.module for place in places_in(model) if not place.prefix]
    with_config = [m for m in inner if hasattr(getattr(m, "config", None), "save_pretrained")]
    if not with_config:
        return
    config: Any = copy.deepcopy(with_config[-1].config)
    config.architectures = [type(with_config[-1]).__name__.removeprefix("FSDP")]
    dtypes = (part.dtype for part in parts.values())
    floating = next((kind for kind in dtypes if kind.is_floating_point), None)
    if floating is not None:
        attribute = "dtype" if hasattr(config, "dtype") else "torch_dtype"
        setattr(config, attribute, str(floating).removeprefix("torch."))
    config.save_pretrained(directory)


def _remove(directory: Path, *patterns: str) -> None:
    for path in [path for pattern in patterns for path in directory.glob(pattern)]:
        disk.remove(path)
