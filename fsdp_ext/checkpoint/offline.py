"""Whole tensors in files, which conversions without a model read one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp_ext.checkpoint import directory as directories
from fsdp_ext.checkpoint import disk
from fsdp_ext.checkpoint.reading import Parts, Reader, shape_of
from fsdp_ext.checkpoint.saving import write_index
from fsdp_ext.checkpoint.snapshot import Content
from fsdp_ext.checkpoint.tensor_files import Part, TensorFile, Writer
from fsdp_ext.checkpoint.transfers import new_tensor
from fsdp_ext.checkpoint.weights import cast_dtype


def write_checkpoint(directory: Path, contents: Mapping[str, Content]) -> Path:
    """Make a checkpoint of one rank."""
    with directories.locked(directory):
        folder = directories.begin(directory)
        try:
            files = {}
            for kind, content in contents.items():
                path = folder / f"{kind}-00000.safetensors"
                writer = Writer(path, whole_parts(content.tensors), content.tree)
                with contextlib.closing(writer):
                    files[kind] = writer.write(one_by_one(content.tensors))
                    writer.flush()
            write_index(folder, [files], {})
            return directories.commit(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.remove_directory(folder)
            raise


# - Whole tensors that are stored but not yet read


class Unread(torch.Tensor):
    """A tensor that is still in a file: a tensor of its shape and dtype on the meta device."""

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


def stored(parts: Parts) -> dict[str, Unread]:
    """Return the whole tensors of some files, which are still to be read."""
    return {
        name: Unread.of(shape_of(of_one), of_one[0][1].dtype, partial(_read, name, of_one))
        for name, of_one in parts.items()
    }


def _read(name: str, parts: list[tuple[TensorFile, Part]]) -> torch.Tensor:
    tensor = new_tensor(shape_of(parts), parts[0][1].dtype)
    with Reader() as reader:
        reader.add(name, parts, (0,) * tensor.dim(), tensor)
    return tensor


def whole_parts(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> dict[str, Part]:
    """Return the part of each tensor, cast to ``dtype``, in a file that has whole tensors."""
    return {
        name: Part.whole_of(cast_dtype(each.dtype, dtype), tuple(each.shape))
        for name, each in tensors.items()
    }


def one_by_one(
    tensors: Mapping[str, torch.Tensor], *, shows_progress: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the tensors one after the other."""
    items: Iterable[tuple[str, torch.Tensor]] = tensors.items()
    if shows_progress:
        items = progress(len(tensors), "tensor", items)
    for name, tensor in items:
        yield name, tensor.read() if isinstance(tensor, Unread) else tensor


def progress(total: int, unit: str, items: Iterable[Any] | None = None) -> Any:
    """Return a bar of tqdm on stderr. For a total of 0, nothing is shown."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # only here, as xxhash is

    return tqdm(items, total=total, unit=unit, unit_scale=unit == "B", disable=not total)
