"""Checkpoints without a model: look into one, and convert it from and to Hugging Face's files."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from fsdp_ext._util.files import naming
from fsdp_ext._util.tables import size
from fsdp_ext.checkpoint import directory as directories
from fsdp_ext.checkpoint import disk
from fsdp_ext.checkpoint.hugging_face import write_files
from fsdp_ext.checkpoint.pretrained import open_files
from fsdp_ext.checkpoint.ranks import Ranks
from fsdp_ext.checkpoint.reading import Checkpoint, Parts, Reader, shape_of
from fsdp_ext.checkpoint.saving import write_index
from fsdp_ext.checkpoint.tensor_files import BLOCK, Part, TensorFile, Writer
from fsdp_ext.checkpoint.transfers import new_memory

T = TypeVar("T")


def describe(path: Path, list_tensors: bool) -> str:
    """Describe a checkpoint as text."""
    checkpoint = Checkpoint(path)
    content = checkpoint.content
    lines = [
        f"{path}: {content['world_size']} ranks ({_mesh(content['mesh'])}), "
        f"fsdp_ext {content['fsdp_ext']}, torch {content['torch']}"
    ]
    for kind, files in checkpoint.files.items():
        nbytes = sum(part.nbytes for file in files for part in file.parts.values())
        names = {name for file in files for name in file.parts}
        lines.append(f"{kind}: {len(names)} tensors, {size(nbytes)}, in {len(files)} files")
        if list_tensors and kind != "extra":
            for name, parts in sorted(checkpoint.parts(kind).items()):
                dtype = str(parts[0][1].dtype).removeprefix("torch.")
                lines.append(f"  {name}  {dtype}{list(shape_of(parts))}  in {len(parts)} parts")
    return "\n".join(lines)


def _mesh(shape: dict[str, int]) -> str:
    """Describe a mesh. Dimensions without names have their numbers as names."""
    dims = [str(n) if name.isdecimal() else f"{name}={n}" for name, n in shape.items()]
    return f"mesh of {' x '.join(dims)}" if dims else "no mesh"


def verify(path: Path) -> int:
    """Read all data of a checkpoint and check it. Return the number of bytes.

    Raises:
        DamagedFileError: for the first damage.
    """
    checkpoint = Checkpoint(path)
    files = [file for of_kind in checkpoint.files.values() for file in of_kind]
    nbytes, memory = 0, memoryview(bytearray(16 * BLOCK))
    for file in _progress(files, len(files), "file"):
        with file:
            for name, part in file.parts.items():
                for begin in range(0, part.nbytes, len(memory)):
                    file.read(name, begin, memory[: part.nbytes - begin])
                nbytes += part.nbytes
    return nbytes


def _progress(items: Iterable[T], total: int, unit: str) -> Iterable[T]:
    from tqdm import tqdm  # type: ignore[import-untyped]  # only here, as xxhash is

    bar: Iterable[T] = tqdm(items, total=total, unit=unit, disable=total == 0)
    return bar


# - One whole tensor after the other


class Unread(torch.Tensor):
    """A tensor that is still in a file: a tensor of its shape and dtype on the meta device.

    Attributes:
        read: reads the tensor.
    """

    read: Callable[[], torch.Tensor]

    @classmethod
    def of(
        cls, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], torch.Tensor]
    ) -> Unread:
        tensor = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        tensor.read = read
        return tensor

    def numpy(self, **_: Any) -> Any:
        return self.read().numpy()


Tensors = Mapping[str, torch.Tensor]


def stored(parts: Parts) -> dict[str, Unread]:
    """Return the whole tensors of some files, which are still to be read."""
    return {
        name: Unread.of(shape_of(of_tensor), of_tensor[0][1].dtype, partial(_read, name, of_tensor))
        for name, of_tensor in parts.items()
    }


def _read(name: str, parts: list[tuple[TensorFile, Part]]) -> torch.Tensor:
    shape = shape_of(parts)
    tensor = new_tensor(shape, parts[0][1].dtype)
    reader = Reader()
    if tensor.numel():
        reader.add(name, parts, (0,) * len(shape), tensor)
    reader.run()
    return tensor


def new_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor. If it is large, its memory goes back to the system."""
    nbytes = math.prod(shape) * dtype.itemsize
    return new_memory(nbytes, torch.device("cpu")).view(dtype).view(shape)


def _parts_of(tensors: Tensors) -> dict[str, Part]:
    return {name: Part.whole_of(each.dtype, tuple(each.shape)) for name, each in tensors.items()}


def _one_by_one(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in _progress(tensors.items(), len(tensors), "tensor"):
        yield name, tensor.read() if isinstance(tensor, Unread) else tensor


def export_files(source: Path, directory: Path, max_shard_size: int | str) -> None:
    """Write a checkpoint's weights in the layout of Hugging Face, one tensor after the other."""
    tensors = stored(Checkpoint(source).parts("weights"))
    write_files(
        directory,
        _parts_of(tensors),
        lambda _: _one_by_one(tensors),
        max_shard_size,
        Ranks(None),
    )


def import_files(source: Path, directory: Path) -> Path:
    """Make a checkpoint of weights in the layout of Hugging Face, one tensor after the other.

    Args:
        source: the directory of the files.
        directory: the directory of the job's checkpoints.

    Returns:
        the new checkpoint.
    """
    parts = {name: [(file, file.parts[name])] for name, file in open_files(source).items()}
    return write_checkpoint(directory, {"weights": (stored(parts), {"aliases": {}, "other": {}})})


def write_checkpoint(directory: Path, kinds: Mapping[str, tuple[Tensors, Any]]) -> Path:
    """Make a checkpoint of one rank.

    Args:
        directory: the directory of the job's checkpoints.
        kinds: the tensors of each kind of file, and everything else as JSON.
    """
    with directories.locked(directory):
        folder = directories.begin(directory)
        try:
            files = {}
            for kind, (tensors, tree) in kinds.items():
                path = folder / f"{kind}-00000.safetensors"
                with Writer(path, _parts_of(tensors), tree) as writer:
                    for name, tensor in _one_by_one(tensors):
                        with naming(path):  # the error of a read names another file
                            writer.add(name, tensor)
                    with naming(path):
                        files[kind] = (path.name, *writer.finish())
            write_index(folder, [files], {})
            return directories.commit(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.remove_directory(folder)
            raise
