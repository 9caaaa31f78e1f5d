"""``python -m fsdp_ext inspect``, ``convert``, ``export`` and ``import``, for checkpoints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp_ext._util.tables import size
from fsdp_ext.checkpoint import dcp, inspection, offline
from fsdp_ext.checkpoint import directory as directories

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
    text = inspection.describe(path, args.tensors)
    if args.verify:
        text += f"\nall {size(inspection.verify(path))} are as they were written"
    return text


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
    offline.export_files(directories.locate(args.source), args.target, args.max_shard_size)
    return str(args.target)


def _import(args: argparse.Namespace) -> str:
    return str(offline.import_files(args.source, args.target))


_RUN = {"inspect": _inspect, "convert": _convert, "export": _export, "import": _import}
