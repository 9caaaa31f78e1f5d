"""``python -m fsdp_ext inspect``, ``convert``, ``export`` and ``import``, for checkpoints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp_ext._util.tables import size
from fsdp_ext.checkpoint import dcp
from fsdp_ext.checkpoint import directory as directories
from fsdp_ext.checkpoint.hugging_face import export_files
from fsdp_ext.checkpoint.offline import progress
from fsdp_ext.checkpoint.pretrained import import_files
from fsdp_ext.checkpoint.ranks import Ranks
from fsdp_ext.checkpoint.reading import Checkpoint, shape_of
from fsdp_ext.checkpoint.tensor_files import BLOCK

COMMANDS = {
    "inspect": "show what a checkpoint has",
    "convert": "convert a checkpoint of torch.distributed.checkpoint, or to one",
    "export": "write a checkpoint's weights in the layout of Hugging Face",
    "import": "make a checkpoint of weights in the layout of Hugging Face",
}


def run(command: str, arguments: Sequence[str]) -> int:
    """Run a command; return 0, or 1 after an error."""
    args = _parser(command).parse_args(arguments)
    try:
        print(_RUN[command](args))
    except (OSError, ValueError, TypeError) as error:
        print(f"fsdp_ext {command}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m fsdp_ext {command}",
        description=f"{COMMANDS[command][0].upper()}{COMMANDS[command][1:]}.",
    )
    what = "a checkpoint, or a directory of them, whose newest is taken"
    if command == "inspect":
        parser.add_argument("checkpoint", type=Path, help=what)
        parser.add_argument("--tensors", action="store_true", help="list the tensors")
        parser.add_argument("--verify", action="store_true", help="read and check all data")
        return parser
    source = {
        "convert": f"{what}, or a checkpoint of torch.distributed.checkpoint",
        "export": what,
        "import": "a directory of .safetensors files",
    }
    target = {
        "convert": "the directory of the converted checkpoint, or of checkpoints",
        "export": "the directory for the files",
        "import": "the directory of checkpoints",
    }
    parser.add_argument("source", type=Path, help=source[command])
    parser.add_argument("target", type=Path, help=target[command])
    if command == "export":
        parser.add_argument(
            "--max-shard-size",
            default="5GB",
            help="of a file, in bytes or as 5GB (default: 5GB)",
        )
    return parser


def _inspect(args: argparse.Namespace) -> str:
    path = directories.locate(args.checkpoint)
    text = _describe(path, args.tensors)
    if args.verify:
        text += f"\nall {size(_verify(path))} are as they were written"
    return text


def _describe(path: Path, list_tensors: bool) -> str:
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


def _verify(path: Path) -> int:
    """Read all data of a checkpoint and check it. Return the number of bytes."""
    checkpoint = Checkpoint(path)
    for kind in checkpoint.files.keys() - {"extra"}:
        checkpoint.parts(kind)  # raises if a tensor's parts do not add up
    files = [file for of_kind in checkpoint.files.values() for file in of_kind]
    nbytes = sum(part.nbytes for file in files for part in file.parts.values())
    memory = memoryview(bytearray(16 * BLOCK))
    with progress(nbytes, "B") as bar:
        for file in files:
            with file:
                for name, part in file.parts.items():
                    for begin in range(0, part.nbytes, len(memory)):
                        piece = memory[: part.nbytes - begin]
                        file.read(name, begin, piece)
                        bar.update(len(piece))
    return nbytes


def _convert(args: argparse.Namespace) -> str:
    if (args.source / ".metadata").exists():
        return str(dcp.from_dcp(args.source, args.target))
    source = directories.locate(args.source)
    directories.make(args.target)
    if any(args.target.iterdir()):
        raise FileExistsError(f"{args.target} is not empty. Choose a new directory.")
    dcp.to_dcp(source, args.target)
    return str(args.target)


def _export(args: argparse.Namespace) -> str:
    ranks = Ranks(None)
    export_files(args.source, args.target, args.max_shard_size, None, ranks, shows_progress=True)
    return str(args.target)


def _import(args: argparse.Namespace) -> str:
    return str(import_files(args.source, args.target))


_RUN = {"inspect": _inspect, "convert": _convert, "export": _export, "import": _import}
