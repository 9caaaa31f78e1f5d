"""The options of a benchmark: the common ones, its own, and the checks before anything runs."""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import NoReturn

import torch

from bench.harness import output, ranks


class UsageError(Exception):
    """What was asked for cannot be measured; the message is one sentence."""


class Parser(argparse.ArgumentParser):
    """As argparse's, but what is wrong is one sentence."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and exit with 2."""
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def positive(text: str) -> int:
    """Return an option's value that has to be an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expects at least 1 but got {value}")
    return value


positive.__name__ = "integer"  # as argparse calls it where it is none


def parser_of(name: str, module: ModuleType) -> Parser:
    """Return the parser of a benchmark's options: the common ones and its own."""
    text = (module.__doc__ or "").replace("%", "%%")
    parser = Parser(
        prog=f"python -m bench {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common_arguments(parser, "FILE")
    devices = getattr(module, "DEVICES", ("cpu", "cuda"))
    default = "cuda" if "cuda" in devices and torch.cuda.is_available() else devices[0]
    parser.add_argument("--device", choices=devices, default=default, help="a GPU if there is one")
    if hasattr(module, "RANKS"):
        parser.add_argument("--ranks", type=positive, metavar="N", help=f"default: {module.RANKS}")
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    return parser


def add_common_arguments(parser: argparse.ArgumentParser, target: str) -> None:
    """Add the options that are the same for all; `target` is what --json and --plot name."""
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, in seconds")
    parser.add_argument("--json", metavar=target, help="write the rows there, too")
    parser.add_argument("--plot", metavar=target, help="draw a picture there, too")


def check_arguments(parser: Parser, args: argparse.Namespace, module: ModuleType) -> None:
    """Exit with 2 and a sentence if the run could not end well, before it begins."""
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda expects a GPU but torch finds none; nvidia-smi shows whether there is "
            "a driver, torch.version.cuda whether this torch is built for one"
        )
    if args.json and (fault := output.fault_of_target(args.json)):
        parser.error(f"--json {fault}")
    if args.plot and not hasattr(module, "plot"):
        parser.error("--plot expects a benchmark that has a picture, and this one has none")
    if args.plot and (fault := output.fault_of_picture(args.plot)):
        parser.error(f"--plot {fault}")
    if not ranks.under_torchrun():
        return
    there = ranks.world_size()
    if not hasattr(module, "RANKS") and there > 1:
        parser.error(f"expects one rank but got torchrun's {there}; start it without torchrun")
    if getattr(args, "ranks", None) not in (None, there):
        parser.error(f"--ranks expects torchrun's {there} but got {args.ranks}; leave it out")
