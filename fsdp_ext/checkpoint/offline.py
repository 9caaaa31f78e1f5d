"""Checkpoints without a model: look into one, and convert it from and to other formats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from fsdp_ext._util.tables import size
from fsdp_ext.checkpoint import directory as directories
from fsdp_ext.checkpoint.boxes import own_boxes
from fsdp_ext.checkpoint.hugging_face import write_files
from fsdp_ext.checkpoint.pretrained import open_files
from fsdp_ext.checkpoint.ranks import Ranks
from fsdp_ext.checkpoint.reading import Checkpoint, Parts, Reader, decoded, shape_of
from fsdp_ext.checkpoint.saving import write, write_index
from fsdp_ext.checkpoint.snapshot import Kind, Snapshot, encoded_optimizer
from fsdp_ext.checkpoint.state_dicts import named_group
from fsdp_ext.checkpoint.tensor_files import BLOCK, Part, Writer
from fsdp_ext.checkpoint.trees import encode

T = TypeVar("T")


def describe(path: Path, list_tensors: bool) -> str:
    """Describe a checkpoint as text."""
    checkpoint = Checkpoint(path)
    content = checkpoint.content
    mesh = ", ".join(f"{name} {length}" for name, length in content["mesh"].items()) or "none"
    lines = [
        f"{path}: {content['world_size']} ranks (mesh: {mesh}), fsdp_ext {content['fsdp_ext']}, "
        f"torch {content['torch']}"
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

    bar: Iterable[T] = tqdm(items, total=total, unit=unit)
    return bar


# - One whole tensor after the other


def whole_parts(checkpoint: Checkpoint, kind: str) -> dict[str, Part]:
    """Return the whole tensors of a checkpoint, by name."""
    return {
        name: Part.whole_of(parts[0][1].dtype, shape_of(parts))
        for name, parts in checkpoint.parts(kind).items()
    }


def read_whole(parts: Parts, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Read whole tensors, one after the other."""
    for name in names:
        of_tensor = parts[name]
        shape = shape_of(of_tensor)
        tensor = torch.empty(shape, dtype=of_tensor[0][1].dtype)
        reader = Reader()
        if tensor.numel():
            reader.add(name, of_tensor, (0,) * len(shape), tensor)
        reader.run()
        yield name, tensor


def export_files(source: Path, directory: Path, max_shard_size: int | str) -> None:
    """Write a checkpoint's weights in the layout of Hugging Face, one tensor after the other."""
    checkpoint = Checkpoint(source)
    parts = whole_parts(checkpoint, "weights")
    tensors = read_whole(checkpoint.parts("weights"), parts)
    progress = _progress(tensors, len(parts), "tensor")
    write_files(directory, parts, lambda _: progress, max_shard_size, Ranks(None))


def import_files(source: Path, directory: Path) -> Path:
    """Make a checkpoint of weights in the layout of Hugging Face, one tensor after the other.

    Args:
        source: the directory of the files.
        directory: the directory of the job's checkpoints.

    Returns:
        the new checkpoint.
    """
    files = open_files(source)
    parts = {name: [(file, file.parts[name])] for name, file in files.items()}
    whole = {name: Part.whole_of(part.dtype, part.shape) for name, [(_, part)] in parts.items()}
    tree: dict[str, Any] = {"aliases": {}, "other": {}}
    with directories.locked(directory):
        folder = directories.begin(directory)
        with Writer(folder / "weights-00000.safetensors", whole, tree) as writer:
            for name, tensor in _progress(read_whole(parts, whole), len(whole), "tensor"):
                writer.add(name, tensor)
            written = writer.finish()
        write_index(folder, [{"weights": ("weights-00000.safetensors", *written)}], {})
        return directories.commit(folder)


# - torch.distributed.checkpoint


def from_dcp(source: Path, directory: Path) -> Path:
    """Make a checkpoint of one of torch.distributed.checkpoint, all of which is read into memory.

    Of what was passed to ``dcp.save``, a dict with "state" and "param_groups" is the optimizer's, a
    dict of tensors is the model's, and the rest is ``extra``. A flat dict of tensors is a model's.

    Args:
        source: its directory. Parts of it are pickled, so it has to be trusted.
        directory: the directory of the job's checkpoints.

    Returns:
        the new checkpoint.

    Raises:
        ValueError: if it has no weights, or those of several models or optimizers.
    """
    saved: dict[str, Any] = {}
    _load_state_dict(
        saved,
        storage_reader=FileSystemReader(source),
        planner=_EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]
        no_dist=True,
    )
    if all(isinstance(value, torch.Tensor) for value in saved.values()):
        saved = {"model": saved}
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, value in saved.items():
        kinds[_kind_of(value)].append(name)
    for kind in ("weights", "optimizer"):
        if len(kinds[kind]) > 1 or (kind == "weights" and not kinds[kind]):
            raise ValueError(
                f"{source} has {kinds[kind] or list(saved)}, and one dict of {kind} is needed. "
                "Load it with dcp.load, and call save."
            )
    weights = saved[kinds["weights"][0]]
    files = {"weights": Kind(own_boxes(weights, 0, 1), {"aliases": {}, "other": {}})}
    if kinds["optimizer"]:
        state = saved[kinds["optimizer"][0]]
        groups = [named_group(group, group["params"]) for group in state["param_groups"]]
        tensors, options, tree = encoded_optimizer({"state": state["state"], "groups": groups})
        files["optimizer"] = Kind(own_boxes(tensors | options, 0, 1), tree)
    if kinds["extra"]:
        tensors = {}
        tree = encode({name: saved[name] for name in kinds["extra"]}, "extra", tensors)
        files["extra"] = Kind(own_boxes(tensors, 0, 1), tree)
    boxes = [b for name, kind in files.items() if name != "extra" for b in kind.boxes.values()]
    elements = sum(box.tensor.numel() for box in boxes)
    return write(Snapshot(files, elements, {}), directory, Ranks(None), None)


def _kind_of(value: Any) -> str:
    if isinstance(value, dict):
        if value.keys() >= {"state", "param_groups"}:
            return "optimizer"
        if value and all(isinstance(item, torch.Tensor) for item in value.values()):
            return "weights"
    return "extra"


def to_dcp(source: Path, target: Path) -> None:
    """Write a checkpoint as ``dcp.save({"model": ..., "optimizer": ...})`` would.

    The whole checkpoint is read into memory.
    """
    checkpoint = Checkpoint(source)
    saved: dict[str, Any] = {}
    parts = checkpoint.parts("weights")
    weights = dict(read_whole(parts, parts))
    weights |= {alias: weights[name] for alias, name in checkpoint.aliases().items()}
    for name, other in checkpoint.other().items():
        weights[name] = decoded(other, weights.__getitem__, source)
    saved["model"] = weights
    if "optimizer" in checkpoint.files:
        parts = checkpoint.parts("optimizer")
        tensor_of = dict(read_whole(parts, parts)).__getitem__
        saved["optimizer"] = {
            "state": {
                name: decoded(state, tensor_of, source)
                for name, state in checkpoint.states().items()
            },
            "param_groups": [
                {**decoded(group["options"], tensor_of, source), "params": group["names"]}
                for group in checkpoint.groups()
            ],
        }
    extra = checkpoint.extra_of(0)
    if extra is not None:
        saved["extra"] = extra
    save(saved, checkpoint_id=target, no_dist=True)
