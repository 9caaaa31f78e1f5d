"""``load_pretrained``: a sharded model from files in the layout of Hugging Face.

Each rank reads its own rows into new memory, and plans further reads meanwhile. The rows are copied
into the model at the end, once all ranks have read theirs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ext.checkpoint import background
from fsdp_ext.checkpoint.hugging_face import INDEX, SINGLE
from fsdp_ext.checkpoint.loading import plan_weights
from fsdp_ext.checkpoint.offline import stored, write_checkpoint
from fsdp_ext.checkpoint.ranks import Ranks
from fsdp_ext.checkpoint.reading import Parts, Reader, Weights
from fsdp_ext.checkpoint.snapshot import content_of_weights
from fsdp_ext.checkpoint.state_dicts import set_weights, weights_of
from fsdp_ext.checkpoint.tensor_files import MALFORMED, TensorFile
from fsdp_ext.checkpoint.transfers import free_pinned_memory


@torch.inference_mode(False)  # DTensors cannot be detached there
@torch.no_grad()
def load_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> list[str]:
    """Fill a sharded model from ``model.safetensors``, or the files of its index.

    All ranks of the model call this. Each reads the bytes of its own rows, or of a few more if a
    parameter is not sharded by rows. Values are cast to the model's dtypes. The models change after
    all ranks have read everything, so a rank has its shards twice until then. If a rank cannot
    read, all ranks raise. If the model's own ``load_state_dict`` raises, other ranks may not.

    Args:
        model: with memory, e.g. after ``to_empty``. Buffers that are not saved keep their values.
        directory: where the files are. ``export`` and ``save_pretrained`` write such ones.
        strict: False lets files lack weights of the model, and have others.
        process_group: the ranks of the model; all by default.

    Returns:
        The names of the weights that were not in the files; none if ``strict``.

    Raises:
        FileNotFoundError: if the directory has no such files, or lacks one that its index names.
        OtherRanksError: if another rank failed.
        RuntimeError: if the last ``async_save`` failed, and nobody has called its ``result()``.
        TypeError: for weights on the meta device, or in PyTorch's FSDP1 wrapper without a
            ``device_mesh``.
        ValueError: if a file or the index is damaged, a tensor has another shape, or, with
            ``strict``, the names in the files are not the model's. A tied weight may have any one
            of its names.
    """
    ranks = Ranks(process_group)
    with ranks.together("load_pretrained"), Reader() as reader:
        background.finish()
        stored = Weights(Path(directory), open_files(Path(directory)), {}, {}, {})
        weights, missing = plan_weights(stored, model, weights_of(model), reader, strict)
    set_weights(model, weights)
    del weights
    free_pinned_memory()
    return missing


def import_files(source: Path, directory: Path) -> Path:
    """Make a checkpoint of weights in the layout of Hugging Face.

    Returns:
        the new checkpoint.
    """
    files = open_files(source)
    if not files:
        raise ValueError(f"the files in {source} have no tensors. Pass the directory of a model.")
    weights = content_of_weights(stored(files), {}, (), {})
    return write_checkpoint(directory, {"weights": weights})


# - The files


def open_files(directory: Path) -> Parts:
    """Return the tensors in a directory's files. The files' headers have been checked."""
    if (directory / SINGLE).exists():
        single = TensorFile(directory / SINGLE)
        return {name: [(single, part)] for name, part in single.parts.items()}
    if not (directory / INDEX).exists():
        raise FileNotFoundError(
            f"{directory} has neither {SINGLE} nor {INDEX}. Pass a directory that export or "
            "save_pretrained has written."
        )
    file_of = _read_index(directory / INDEX)
    opened: dict[str, TensorFile] = {}
    for name, file in file_of.items():
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
    return {name: [(opened[file], opened[file].parts[name])] for name, file in file_of.items()}


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor, which lies beside the index."""
    try:
        file_of = json.loads(path.read_bytes())["weight_map"]
        items = [(str(name), str(file)) for name, file in file_of.items()]
    except MALFORMED as error:
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
