"""``load_pretrained``: a sharded model from files in the layout of Hugging Face.

Each rank reads its own rows. Everything is checked first, then read into new memory, and copied
into the model at the end, once all ranks have got that far.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_ext.checkpoint.hugging_face import INDEX, SINGLE
from fsdp_ext.checkpoint.tensor_files import Part, TensorFile, memory_of
from fsdp_ext.checkpoint.together import called_together, raised_together
from fsdp_ext.checkpoint.weights import Weight, weights_by_unit

_THREADS = 8


def load_pretrained(
    model: nn.Module, directory: str | os.PathLike[str], strict: bool = True
) -> list[str]:
    """Fill a sharded model from ``model.safetensors``, or the files of its index.

    All ranks of the default process group call this. Each reads the bytes of its own rows, or of a
    few more if a parameter is not sharded by rows. Values are cast to the model's dtypes. If it
    raises, it does so on all ranks, and the model is unchanged. Until then a rank has its shards
    twice.

    Args:
        model: with memory, e.g. after ``to_empty``. Buffers that are not saved keep their values.
        directory: where the files are. ``export`` and ``save_pretrained`` write such ones.
        strict: False lets files lack weights of the model, and have others.

    Returns:
        The names of the weights that were not in the files; none if ``strict``.

    Raises:
        FileNotFoundError: if the directory has no such files, or lacks one that its index names.
        RuntimeError: if another rank failed, the model runs, or has weights on the meta device.
        ValueError: if a file or the index is damaged, a tensor has another shape, or, with
            ``strict``, the names in the files are not the model's. A tied weight may have any one
            of its names.
    """
    with called_together("load_pretrained"):
        with raised_together("load_pretrained"):
            weights = list(itertools.chain(*weights_by_unit(model, "load_pretrained")))
            files = _open(Path(directory))
            found, missing = _match(weights, files, Path(directory), strict)
            loads = [_Load(weight, files[name], name) for weight, name in found]
        with raised_together("load_pretrained"):
            read = _read(loads)
        for load, tensor in zip(loads, read, strict=True):
            load.copy(tensor)
        # The next use gathers the new values, also if nothing tells that they have changed.
        weights_by_unit(model, "load_pretrained")
    return missing


# - The files


def _open(directory: Path) -> dict[str, TensorFile]:
    """Return the file of each tensor in a directory. Their headers have been checked."""
    if (directory / SINGLE).exists():
        single = TensorFile(directory / SINGLE)
        return dict.fromkeys(single.parts, single)
    if not (directory / INDEX).exists():
        raise FileNotFoundError(
            f"load_pretrained found neither {SINGLE} nor {INDEX} in {directory}. Pass a directory "
            "that export or save_pretrained has written."
        )
    places = _read_index(directory / INDEX)
    opened: dict[str, TensorFile] = {}
    for name, file in places.items():
        if file not in opened:
            if not (directory / file).exists():
                raise FileNotFoundError(
                    f"{directory / INDEX} says that '{name}' is in {file}, and there is no such "
                    "file. Copy it there."
                )
            opened[file] = TensorFile(directory / file)
        if name not in opened[file].parts:
            raise ValueError(
                f"{directory / INDEX} says that '{name}' is in {file}, which has no such tensor. "
                "Copy both from the same export."
            )
    return {name: opened[file] for name, file in places.items()}


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor, which lies beside the index."""
    try:
        places = json.loads(path.read_bytes())["weight_map"]
        items = [(str(name), str(file)) for name, file in places.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be understood ({type(error).__name__}: {error}). Copy it again."
        ) from error
    for name, file in items:
        if Path(file).name != file or file in ("", ".", ".."):
            raise ValueError(
                f"{path} says that '{name}' is in {file!r}, which is outside of its directory. "
                "Only load files whose origin you trust."
            )
    return dict(items)


def _match(
    weights: list[Weight], files: dict[str, TensorFile], directory: Path, strict: bool
) -> tuple[list[tuple[Weight, str]], list[str]]:
    """Return each weight with the name under which it is stored, and the names of the others."""
    found: list[tuple[Weight, str]] = []
    missing: list[str] = []
    for weight in weights:
        stored = [name for name in weight.names if name in files]
        for name in stored:
            _check(weight, files[name].parts[name], name, files[name].path)
        if stored:
            found.append((weight, stored[0]))
        else:
            missing += weight.names
    extra = set(files) - {name for weight in weights for name in weight.names}
    if strict and missing:
        raise ValueError(
            f"{directory} has no tensor '{missing[0]}', which the model has"
            f"{_and_others(len(missing))}. Pass strict=False to keep the model's values."
        )
    if strict and extra:
        first = min(extra)
        raise ValueError(
            f"{files[first].path} has a tensor '{first}', which the model does not have"
            f"{_and_others(len(extra))}. Pass strict=False to leave it out."
        )
    return found, missing


def _and_others(count: int) -> str:
    return f" ({count - 1} others likewise)" if count > 1 else ""


def _check(weight: Weight, part: Part, name: str, path: Path) -> None:
    shape = tuple(weight.tensor.shape)
    if part.shape != shape:
        raise ValueError(
            f"{path} has '{name}' with shape {part.shape}, and the model has it with {shape}. Make "
            "the model with the configuration of the file."
        )
    if part.dtype.is_floating_point != weight.dtype.is_floating_point:
        raise ValueError(
            f"{path} has '{name}' as {part.dtype}, and the model as {weight.dtype}. Quantized "
            "weights have to be loaded by the library that wrote them."
        )


# - Reading


@dataclass
class _Load:
    """A weight, and where this rank's part of it is.

    Args:
        weight: the model's.
        file: the file that has it.
        name: its name there.
    """

    weight: Weight
    file: TensorFile
    name: str

    def read(self) -> torch.Tensor:
        """Return this rank's part, in memory of its own, as the file has it."""
        part = self.file.parts[self.name]
        shape, offset = _box(self.weight.tensor)
        if not shape:
            rows, row, first = torch.empty((), dtype=part.dtype), part.nbytes, 0
        else:
            others = part.shape[1:]
            rows = torch.empty((shape[0] if math.prod(shape) else 0, *others), dtype=part.dtype)
            row, first = math.prod(others) * part.dtype.itemsize, offset[0]
        self.file.read(self.name, first * row, memory_of(rows))
        for dim in range(1, len(shape)):
            rows = rows.narrow(dim, offset[dim], shape[dim])
        is_narrow = math.prod(shape[1:]) < math.prod(part.shape[1:])
        return rows.clone() if is_narrow else rows  # a part of wider rows must not keep them

    @torch.no_grad()
    def copy(self, read: torch.Tensor) -> None:
        """Copy what was read into the model."""
        local = self.weight.local
        local.copy_(read.view(local.shape))


def _box(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part of a tensor, and where it begins."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.ndim
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(shape), tuple(offset)


def _read(loads: list[_Load]) -> list[torch.Tensor]:
    """Read the parts of this rank, several at a time."""
    with contextlib.ExitStack() as stack:
        for file in dict.fromkeys(load.file for load in loads):
            stack.enter_context(file)
        with ThreadPoolExecutor(_THREADS, "fsdp_ext_read") as threads:
            return list(threads.map(_Load.read, loads))
