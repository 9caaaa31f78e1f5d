"""Convert checkpoints from and to those of torch.distributed.checkpoint, without a model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_map_only

from fsdp_ext._util.warn import warn_caller
from fsdp_ext.checkpoint.offline import Unread, progress, stored, write_checkpoint
from fsdp_ext.checkpoint.reading import Checkpoint, decoded
from fsdp_ext.checkpoint.snapshot import (
    Content,
    content_of_extra,
    content_of_optimizer,
    content_of_weights,
)
from fsdp_ext.checkpoint.state_dicts import named_group
from fsdp_ext.checkpoint.tensor_files import digest
from fsdp_ext.checkpoint.transfers import new_tensor
from fsdp_ext.checkpoint.trees import encode

# The entry in which to_dcp repeats, as JSON, everything except tensors. DCP itself turns the keys
# of dicts into strings, and loses empty dicts and the classes of dicts. The digest in the entry
# shows whether the other entries have changed since.
_TREES = "fsdp_ext_trees"


def from_dcp(source: Path, directory: Path) -> Path:
    """Convert a checkpoint of torch.distributed.checkpoint, one tensor after the other.

    In the dict that was passed to ``dcp.save``, the optimizer is an entry with "param_groups". The
    model is the entry "model", or else an entry that is a dict of tensors. All other entries become
    ``extra``. If "extra" is the only other entry, as :func:`to_dcp` writes it, its value becomes
    ``extra``. If all entries are tensors, the dict itself is the model.

    Args:
        source: its directory. Parts of it are unpickled, so it has to be trusted.
        directory: the directory of the job's checkpoints.

    Returns:
        the new checkpoint.

    Raises:
        ValueError: if it is damaged, has no weights, or those of several models or optimizers.
    """
    saved = _saved_in(source)
    entry = json.loads(saved.pop(_TREES, "{}"))
    if entry and entry.get("of") == _digest(saved):
        return write_checkpoint(directory, _restored(saved, entry["trees"]))
    if entry:
        warn_caller(
            f"{source} has changed since it was converted from a checkpoint of fsdp_ext. What it "
            "has now is converted, without keys of dicts that are not strings."
        )
    return write_checkpoint(directory, _contents_of(_by_kind(saved, source), {}, {}))


def _restored(saved: Mapping[str, Any], trees: dict[str, Any]) -> dict[str, Content]:
    """Return the contents of files for what :func:`to_dcp` wrote. Tensors may have other values."""
    found: dict[str, Any] = {"model": {}, "extra": {}, **saved}  # DCP leaves out empty dicts
    weights = found["model"]
    tied = {
        name: first
        for name, first in trees["weights"]["aliases"].items()
        if torch.equal(weights[name].read(), weights[first].read())
    }
    trees["weights"]["aliases"] = tied
    contents = _contents_of(found, tied, {})
    return {kind: dataclasses.replace(contents[kind], tree=tree) for kind, tree in trees.items()}


def _by_kind(saved: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return the entries "model", and maybe "optimizer" and "extra", of any checkpoint of DCP."""
    if all(isinstance(value, torch.Tensor) for value in saved.values()):
        saved = {"model": saved}
    names: dict[str, list[str]] = defaultdict(list)
    has_model = isinstance(saved.get("model"), dict)
    for name, value in saved.items():
        names[_kind_of(name, value, has_model)].append(name)
    for kind in ("weights", "optimizer"):
        if len(names[kind]) > 1 or (kind == "weights" and not names[kind]):
            raise ValueError(
                f"{source} has {names[kind] or list(saved)} as {kind}. Pass a checkpoint with one "
                "model and at most one optimizer, or load it with dcp.load and call save."
            )
    found = {"model": saved[names["weights"][0]]}
    if names["optimizer"]:
        found["optimizer"] = saved[names["optimizer"][0]]
    if names["extra"]:
        extra = {name: saved[name] for name in names["extra"]}
        found["extra"] = extra["extra"] if [*extra] == ["extra"] else extra
    return found


def _contents_of(
    saved: Mapping[str, Any], tied: Mapping[str, str], versions: Mapping[str, int]
) -> dict[str, Content]:
    """Return the contents of files."""
    contents = {"weights": content_of_weights(saved["model"], tied, (), versions)}
    if "optimizer" in saved:
        state = saved["optimizer"]
        groups = [named_group(group, group["params"]) for group in state["param_groups"]]
        named = {"state": state.get("state", {}), "groups": groups}
        contents["optimizer"] = content_of_optimizer(named)
    if "extra" in saved:
        contents["extra"] = content_of_extra(saved["extra"])
    return contents


def _saved_in(source: Path) -> dict[str, Any]:
    """Return what was passed to ``dcp.save``, with tensors that are still to be read."""
    reader = FileSystemReader(source)
    with _naming_damage(source):
        metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)

    def read(values: dict[str, Any]) -> dict[str, Any]:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(values, metadata, is_coordinator=True)
        with _naming_damage(source):
            reader.read_data(planner.create_local_plan(), planner).wait()
        return values

    def unread(name: str, shape: Sequence[int], dtype: torch.dtype) -> Unread:
        return Unread.of(shape, dtype, lambda: read({name: new_tensor(shape, dtype)})[name])

    kinds = metadata.state_dict_metadata
    others = read({n: None for n, kind in kinds.items() if isinstance(kind, BytesStorageMetadata)})
    saved: dict[str, Any] = {}
    for name, kind in kinds.items():
        if isinstance(kind, TensorStorageMetadata):
            value: Any = unread(name, kind.size, kind.properties.dtype)
        else:
            value = others[name]
        set_element(saved, (metadata.planner_data or {}).get(name, (name,)), value)
    return saved


@contextlib.contextmanager
def _naming_damage(source: Path) -> Iterator[None]:
    """Raise errors of PyTorch and pickle about damaged files as ValueError. OSErrors stay."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"{source} cannot be read as a checkpoint of torch.distributed.checkpoint "
            f"({type(error).__name__}: {error}). Copy it again."
        ) from error


def _kind_of(name: str, value: Any, has_model: bool) -> str:
    if isinstance(value, dict):
        if "param_groups" in value:  # dcp.save leaves out a "state" that is empty
            return "optimizer"
        if has_model:  # then other dicts of tensors, such as averaged weights, are extra
            return "weights" if name == "model" else "extra"
        if value and all(isinstance(item, torch.Tensor) for item in value.values()):
            return "weights"
    return "extra"


class _ReadingPlanner(DefaultSavePlanner):
    """Reads each tensor when it is written.

    The writer keeps references to all tensors of a file until it has written the file. So all of
    them share one buffer. Each is written before the next one is read into it.
    """

    def __init__(self, tensors: Sequence[Unread], bar: Any) -> None:
        super().__init__()
        self._memory = bytearray(max((tensor.nbytes for tensor in tensors), default=0))
        self._bar = bar

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        if not isinstance(value, Unread):
            return tree_map_only(Unread, lambda inner: inner.read(), value)
        read = value.read()
        self._bar.update()
        if not value.nbytes:
            return read
        memory = torch.frombuffer(self._memory, dtype=torch.uint8, count=value.nbytes)
        return memory.view(value.dtype).view(value.shape).copy_(read)


def to_dcp(source: Path, target: Path) -> None:
    """Write a checkpoint as ``dcp.save({"model": ..., "optimizer": ..., "extra": ...})`` would.

    One more entry, which only :func:`from_dcp` reads, has what DCP cannot keep.

    Tensors are read and written one after the other. An error leaves no ``target``.
    """
    checkpoint = Checkpoint(source)
    saved: dict[str, Any] = {}
    of_model = checkpoint.weights()
    tensors = stored(of_model.parts)
    weights: dict[str, Any] = {name: tensors[name] for name in of_model.whole}
    weights |= {alias: weights[name] for alias, name in of_model.aliases.items()}
    for name, other in of_model.other.items():
        weights[name] = decoded(other, tensors.__getitem__, source)
    saved["model"] = weights
    if "optimizer" in checkpoint.files:
        tensor_of = stored(checkpoint.parts("optimizer")).__getitem__
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
    trees = {
        kind: content.tree
        for kind, content in _contents_of(saved, of_model.aliases, of_model.versions).items()
    }
    saved[_TREES] = json.dumps({"trees": trees, "of": _digest(_as_read(saved))})
    # A writer that copies ahead would need several tensors at once.
    writer = FileSystemWriter(target, per_thread_copy_ahead=0)
    unread = [each for each in flatten_state_dict(saved)[0].values() if isinstance(each, Unread)]
    try:
        with progress(len(unread), "tensor") as bar:
            planner = _ReadingPlanner(unread, bar)
            save(saved, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        shutil.rmtree(target, ignore_errors=True)
        [(cause, _)] = error.failures.values()
        if type(cause) is RuntimeError:  # torch.save's, which does not name the disk's error
            raise OSError(f"{target} cannot be written; is the disk full? ({cause})") from error
        raise cause from error


def _as_read(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a dict as :func:`_saved_in` returns it after DCP has saved it."""
    values, paths = flatten_state_dict(saved)
    found: dict[str, Any] = {}
    for name, value in values.items():
        set_element(found, paths[name], value)
    return found


def _digest(saved: dict[str, Any]) -> str:
    """Return a digest of everything except the tensors' values."""
    return digest(encode(saved, "", {}))
