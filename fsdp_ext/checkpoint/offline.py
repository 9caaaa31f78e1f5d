"""Conversions without a model, one tensor after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from itertools import starmap
from pathlib import Path

from fsdp_ext.checkpoint import directory as directories
from fsdp_ext.checkpoint import disk
from fsdp_ext.checkpoint.gathering import Piece
from fsdp_ext.checkpoint.hugging_face import write_files
from fsdp_ext.checkpoint.pretrained import open_files
from fsdp_ext.checkpoint.ranks import Ranks
from fsdp_ext.checkpoint.reading import Checkpoint
from fsdp_ext.checkpoint.saving import write_index
from fsdp_ext.checkpoint.snapshot import Content, content_of_weights
from fsdp_ext.checkpoint.tensor_files import Writer
from fsdp_ext.checkpoint.unread import one_by_one, stored, whole_parts


def export_files(source: Path, directory: Path, max_shard_size: int | str) -> None:
    """Write a checkpoint's weights in the layout of Hugging Face."""
    tensors = stored(Checkpoint(source).weights().whole)
    write_files(
        directory,
        whole_parts(tensors),
        lambda *_: starmap(lambda name, tensor: Piece(name, 0, tensor), one_by_one(tensors)),
        max_shard_size,
        Ranks(None),
    )


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
