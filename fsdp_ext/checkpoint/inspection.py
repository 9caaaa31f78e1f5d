"""Look into a checkpoint, without a model."""

from __future__ import annotations

from pathlib import Path

from fsdp_ext._util.tables import size
from fsdp_ext.checkpoint.reading import Checkpoint, shape_of
from fsdp_ext.checkpoint.tensor_files import BLOCK


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
    from tqdm import tqdm  # type: ignore[import-untyped]  # only here, as xxhash is

    files = [file for of_kind in Checkpoint(path).files.values() for file in of_kind]
    nbytes, memory = 0, memoryview(bytearray(16 * BLOCK))
    for file in tqdm(files, unit="file", disable=not files):
        with file:
            for name, part in file.parts.items():
                for begin in range(0, part.nbytes, len(memory)):
                    file.read(name, begin, memory[: part.nbytes - begin])
                nbytes += part.nbytes
    return nbytes
